"""The bundled data set."""

import numpy as np
import pytest

from gmm_ivf.datasets.registry import entries, load
from gmm_ivf.datasets.verify import verify


@pytest.fixture(scope="module")
def sift_mini():
    return load("sift-mini")


def test_it_is_as_large_as_promised_and_no_larger(sift_mini):
    path = entries()["sift-mini"].path()
    assert path.stat().st_size == entries()["sift-mini"].bytes <= 6_000_000
    assert sift_mini.n >= 40_000
    assert len(sift_mini.query) >= 1_000
    assert sift_mini.ground_truth.shape == (len(sift_mini.query), 100)
    assert sift_mini.metric == "l2"


def test_size_hash_and_structure_are_those_of_the_registry():
    verify("sift-mini")


def test_its_vectors_are_sift_without_repetition(sift_mini):
    rows = np.concatenate([sift_mini.base, sift_mini.query])
    assert rows.min() == 0
    assert rows.max() <= 255
    np.testing.assert_array_equal(rows, np.rint(rows))
    # OpenCV scales each descriptor to length 512 before rounding.
    lengths = np.linalg.norm(rows, axis=1)
    assert np.percentile(np.abs(lengths - 512), 99) < 10
    assert len(np.unique(rows.astype(np.uint8), axis=0)) == len(rows)


def test_its_ground_truth_is_exact(sift_mini, brute_force):
    some = np.random.default_rng(0).permutation(len(sift_mini.query))[:50]
    ids, squared = brute_force(sift_mini.base, sift_mini.query[some], 100)
    np.testing.assert_array_equal(sift_mini.ground_truth[some], ids)
    np.testing.assert_array_equal(sift_mini.distances[some], np.sqrt(squared).astype(np.float32))


def test_its_base_is_shuffled(sift_mini):
    # Otherwise --limit would take the first photographs only.
    first, last = sift_mini.base[:20_000].mean(axis=0), sift_mini.base[-20_000:].mean(axis=0)
    assert np.abs(first - last).max() < 1.5


def test_queries_are_not_from_the_pictures_of_the_base(sift_mini):
    # A random split of the same descriptors has 228.7 here, see sift-mini-attribution.md.
    assert 255 < sift_mini.distances[:, 0].mean() < 275
