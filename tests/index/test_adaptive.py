"""Adaptive probing: against loops over single queries in float64, kept in files, refused."""

import copy
import pickle

import faiss
import numpy as np
import pytest

from gmm_ivf import GMMQuantizer, IndexIVFGMM, read_index, write_index
from gmm_ivf._adaptive import AdaptiveProbing
from gmm_ivf._gpu_layouts import GpuLists

NLIST = 40


def naive_lists(query, means, stop, nprobe):
    """Lists that a query probes, nearest first."""
    squared = ((means.astype("f8") - query.astype("f8")) ** 2).sum(axis=1)
    kept = []
    for rank, number in enumerate(np.argsort(squared, kind="stable")[: 4 * nprobe]):
        if rank and rank * (squared[number] / squared.min() - 1) > stop:
            break
        kept.append(number)
    return kept


@pytest.fixture
def adaptive(blobs):
    """``adaptive(**options)``: filled, over 40 centroids; and its vectors and centroids."""

    def make(**options):
        x, means = blobs(3000, 6), blobs(NLIST, 6, seed=1)
        q = GMMQuantizer.from_centroids(means)
        flat = faiss.IndexIVFFlat(q, 6, NLIST)
        index = IndexIVFGMM(flat, q, adaptive=True, **{"rule": "soar", "max_lists": 3} | options)
        assert not index.is_trained  # the stops are not solved yet
        index.train(x)
        index.add(x)
        return index, x, means

    return make


@pytest.mark.parametrize("nprobe", [1, 3, 10, 25])
def test_lists_equal_loops(adaptive, blobs, entries_of, nprobe):
    index, x, means = adaptive()
    queries = blobs(200, 6, seed=2)
    index.nprobe = nprobe
    distances, labels = index.search(queries, 5)
    held, stop = entries_of(index.index), index._layout._adaptive.stops[nprobe - 1]
    lists = [naive_lists(query, means, stop, nprobe) for query in queries]
    scanned = [sum(len(held[number]) for number in found) for found in lists]
    np.testing.assert_array_equal(index.last_search.scanned, scanned)
    assert (index.last_search.coarse == NLIST).all()
    for query, found, row, near in zip(queries, lists, labels, distances, strict=True):
        ids = np.unique(np.concatenate([held[number] for number in found]))
        squared = ((x[ids].astype("f8") - query) ** 2).sum(axis=1)
        best = np.argsort(squared, kind="stable")[:5]
        assert set(row) - {-1} == set(ids[best])
        np.testing.assert_allclose(near[: len(best)], squared[best], rtol=1e-4)


def test_nprobe_is_the_average_of_the_sample(adaptive):
    index, x, _ = adaptive(rule="air", max_lists=1)
    sizes = index.stats()["list_sizes"]
    for nprobe in (1, 4, 10):
        index.nprobe = nprobe
        lists = index._layout._probes(x, nprobe).lists
        counts = (lists >= 0).sum(axis=1)
        assert 0.9 * nprobe < counts.mean() <= nprobe
        assert counts.min() >= 1
        assert counts.max() <= 4 * nprobe
        index.search(x[:50], 3)
        want = [sizes[row[row >= 0]].sum() for row in lists[:50]]
        np.testing.assert_array_equal(index.last_search.scanned, want)
    assert counts.max() > nprobe > counts.min()


def test_all_lists_are_all(adaptive, blobs):
    index, x, _ = adaptive()
    index.nprobe = NLIST
    queries = blobs(50, 6, seed=3)
    truth = faiss.IndexFlatL2(6)
    truth.add(x)
    np.testing.assert_array_equal(index.search(queries, 10)[1], truth.search(queries, 10)[1])


def test_one_list_is_the_nearest(adaptive, blobs):
    index, _, _ = adaptive()
    queries = blobs(100, 6, seed=3)
    lists = index._layout._probes(queries, 1).lists
    np.testing.assert_array_equal(lists[:, 0], index.quantizer.search(queries, 1)[1][:, 0])
    assert lists.shape == (100, 1)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_query_that_equals_its_mean(adaptive, scale):
    table = np.array([[0, 0], [0, 0], [3, 0], [0, 5]], "f4") * np.float32(scale)
    q = GMMQuantizer.from_centroids(table)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 2, 4), q, rule="air", adaptive=True)
    index.train(table + np.float32(0.1 * scale))
    lists = index._layout._probes(table[:1], 3).lists
    assert lists[0, :2].tolist() == [0, 1]
    assert (lists[0, 2:] == -1).all()


def test_no_queries_and_queries_of_nan(adaptive):
    index, x, _ = adaptive()
    index.nprobe = 3
    assert index.search(x[:0], 4)[1].shape == (0, 4)
    rows = x[:3].copy()
    rows[1, 2] = np.nan
    labels = index.search(rows, 1)[1][:, 0]
    assert labels.tolist() == [0, -1, 2]


def test_range_search_and_selectors_heed_the_lists(adaptive, ivf_parameters):
    index, x, _ = adaptive()
    index.nprobe = 2
    labels = index.search(x[:40], 3)[1]
    scanned = index.last_search.scanned
    lims, _, found = index.range_search(x[:40], np.inf)
    np.testing.assert_array_equal(index.last_search.scanned, scanned)
    assert (np.diff(lims.astype(int)) <= scanned).all()
    for row, start, stop in zip(labels, lims, lims[1:], strict=False):
        assert set(row) <= set(found[start:stop])
    even = faiss.IDSelectorBatch(np.arange(0, 3000, 2))
    labels = index.search(x[:40], 3, ivf_parameters(nprobe=2, sel=even))[1]
    assert (labels % 2 == 0).all()


@pytest.mark.parametrize("name", ["PQ", "SQ8", "RaBitQ"])
def test_codecs(blobs, soft, name):
    x = blobs(1500, 8)
    index = soft(x, 12, name, rule="soar", adaptive=True)
    index.add(x)
    index.nprobe = 12
    all_lists = index.search(x[:50], 5)
    index.nprobe = 4
    few = index.search(x[:50], 5)
    assert index.last_search.scanned.mean() < 0.6 * index.index.ntotal
    pairs = zip(few[1], all_lists[1], strict=True)
    assert np.mean([len(set(a) & set(b)) / 5 for a, b in pairs]) > 0.6


def test_fast_scan(blobs, soft):
    x = blobs(1500, 8)
    plain, packed = (
        soft(x, 12, "PQ", rule="soar", adaptive=True, fast_scan=flag) for flag in (False, True)
    )
    for index in (plain, packed):
        index.add(x)
        index.nprobe = 3
        index.search(x[:50], 5)
    np.testing.assert_array_equal(plain.last_search.scanned, packed.last_search.scanned)


def test_far_from_the_origin_nothing_changes(blobs):
    x, means = (np.rint(64 * a) / np.float32(16) for a in (blobs(800, 6), blobs(20, 6, seed=1)))
    found = []
    for offset in (0, 1e6):
        shift = np.float32(offset)
        q = GMMQuantizer.from_centroids(means + shift)
        index = IndexIVFGMM(faiss.IndexIVFFlat(q, 6, 20), q, rule="soar", adaptive=True)
        index.train(x + shift)
        found.append(index._layout._probes(x + shift, 4).lists)
    width = min(lists.shape[1] for lists in found)
    assert np.mean(found[0][:, :width] == found[1][:, :width]) > 0.98


def test_copies_and_files_keep_the_stops(adaptive, tmp_path):
    index, x, _ = adaptive()
    index.nprobe = 3
    write_index(index, tmp_path / "index")
    want = index.search(x[:60], 4)
    copies = [copy.copy(index), pickle.loads(pickle.dumps(index))]
    copies += [read_index(tmp_path / "index", mmap=mmap) for mmap in (False, True)]
    for other in copies:
        assert other.is_trained
        assert "adaptive" in repr(other)
        for ours, theirs in zip(other.search(x[:60], 4), want, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(other.last_search.scanned, index.last_search.scanned)


@pytest.mark.parametrize(
    "stops",
    [np.zeros(3), np.zeros(4, "f4"), np.array([0, 2, 1, 3.0]), np.array([0, np.nan, 1, 1])],
    ids=["short", "float32", "falling", "nan"],
)
def test_stops_of_a_damaged_file(stops):
    with pytest.raises(ValueError, match="stops must"):
        AdaptiveProbing.restored(stops, 4)


def test_tune(adaptive, blobs):
    index, _, _ = adaptive()
    found = index.tune(blobs(100, 6, seed=4), 0.9, 5)
    assert found["recall"] >= 0.9
    assert found["nprobe"] == index.nprobe < NLIST


def test_a_graph_over_the_means(blobs):
    x = blobs(2000, 6)
    q = GMMQuantizer.from_centroids(blobs(60, 6, seed=1), coarse="hnsw8")
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 6, 60), q, rule="soar", adaptive=True)
    index.train(x)
    index.add(x)
    index.nprobe = 4
    assert (index.search(x[:100], 1)[1][:, 0] == np.arange(100)).mean() > 0.9
    assert index.last_search.coarse.mean() > 0


def test_user_lists_are_probed_as_given(adaptive):
    index, x, _ = adaptive()
    lists = np.tile(np.arange(5), (10, 1))
    index.search_preassigned(x[:10], 3, lists)
    sizes = index.stats()["list_sizes"]
    assert (index.last_search.scanned == sizes[:5].sum()).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adaptive": 1}, "adaptive must be True or False; got 1"),
        ({"adaptive": None}, "adaptive must be True or False"),
        ({"adaptive": True, "layout": "cells"}, "adaptive=True belongs to layout"),
    ],
)
def test_bad_options(options, message):
    q = GMMQuantizer(4, 3)
    with pytest.raises(ValueError, match=message):
        IndexIVFGMM(faiss.IndexIVFFlat(q, 4, 3), q, **options)


def test_inner_products_are_refused():
    q = GMMQuantizer(4, 3, faiss.METRIC_INNER_PRODUCT)
    flat = faiss.IndexIVFFlat(q, 4, 3, faiss.METRIC_INNER_PRODUCT)
    with pytest.raises(ValueError, match="needs METRIC_L2"):
        IndexIVFGMM(flat, q, adaptive=True)


def test_a_gpu_is_refused(adaptive):
    index, _, _ = adaptive()
    with pytest.raises(NotImplementedError, match="not available on a GPU"):
        GpuLists(index._layout, None, 0)
