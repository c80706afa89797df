"""Searches side by side, of layout "cells": the first one after a change puts things in order."""

import sys
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import pytest

from gmm_ivf import _decoding


@pytest.fixture
def fast_switching():
    """Python threads that take turns all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_threads_give_the_same_results(blobs, soft):
    x, queries = blobs(3000, 16), blobs(300, 16, seed=3)
    index = soft(x, 12, layout="cells")
    index.add(x)
    one = index.search(queries, 10)
    faiss.omp_set_num_threads(2)
    two = index.search(queries, 10)
    np.testing.assert_array_equal(one[1], two[1])


@pytest.mark.parametrize("name", ["Flat", "SQ8", "PQ"])
def test_searches_side_by_side_after_an_add(blobs, soft, fast_switching, name):
    x, queries = blobs(3000, 16), blobs(100, 16, seed=3)
    index = soft(x, 12, name, layout="cells")
    for part in np.split(x, 5):
        index.add(part)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: index.search(queries, 10)[1], range(8)))
        for labels in found[1:]:
            np.testing.assert_array_equal(labels, found[0])


def test_a_search_leaves_the_lists_where_they_are(blobs, soft, monkeypatch):
    """Reading the codec takes the lists away for a moment, in which others would find nothing."""
    x = blobs(1000, 16)
    index = soft(x, 8, "PQ", layout="cells")
    index.add(x)

    def fail(*_):
        raise AssertionError("a search swapped the lists of the index")

    monkeypatch.setattr(_decoding, "structure", fail)
    assert (index.search(x[:5], 3)[1] >= 0).all()
