"""search_preassigned: lists of the caller, in FAISS's convention; and searches side by side."""

from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import pytest

METRICS = pytest.mark.parametrize(
    "metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT], ids=["l2", "ip"]
)


@METRICS
@pytest.mark.parametrize("name", ["Flat", "PQ", "SQ8", "RaBitQ"])
def test_equals_stock_on_one_list_each(blobs, soft, name, metric):
    x, queries = blobs(900, 16), blobs(30, 16, seed=1)
    index = soft(x, 8, name, metric, max_lists=1)
    index.add(x)
    distances, lists = index.quantizer.search(queries, 5)
    lists[3, 2:], lists[4] = -1, -1
    stock = faiss.deserialize_index(faiss.serialize_index(index.index))
    stock.nprobe = 5
    want = stock.search_preassigned(queries, 10, lists, distances)
    got = index.search_preassigned(queries, 10, lists, distances)
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_array_equal(got[0], want[0])
    assert (got[1][4] == -1).all()
    sizes = np.append(index.stats()["list_sizes"], 0)
    np.testing.assert_array_equal(index.last_search.scanned, sizes[lists].sum(axis=1))


@METRICS
@pytest.mark.parametrize("shift", [0.0, 500.0])
def test_distances_are_computed(blobs, soft, metric, shift):
    x = blobs(900, 8) + np.float32(shift)
    index = soft(x, 8, "SQfp16", metric, max_lists=3, replication=1.8)
    index.add(x)
    index.nprobe = 4
    want = index.search(x[:40], 10)
    lists = index._layout._assigner.ranker.search(x[:40], 4)[1]
    got = index.search_preassigned(x[:40], 10, lists[:, ::-1])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3, atol=1e-2)
    assert (np.sort(got[1]) == np.sort(want[1])).mean() > 0.95
    assert all(len(set(row)) == 10 for row in got[1])


def test_parameters_and_bad_queries(blobs, soft, ivf_parameters):
    x = blobs(900, 8)
    index = soft(x, 8)
    index.add(x)
    lists = np.tile(np.arange(8), (5, 1))
    only = ivf_parameters(nprobe=1, sel=faiss.IDSelectorRange(20, 25))
    labels = index.search_preassigned(x[:5], 9, lists, params=only)[1]
    assert all(sorted(row[:5]) == list(range(20, 25)) for row in labels)
    assert (labels[:, 5:] == -1).all()
    index.search_preassigned(x[:5], 9, lists, params=ivf_parameters(max_codes=50))
    assert index.last_search.scanned.tolist() == [50] * 5
    queries = x[:5].copy()
    queries[2, 1] = np.nan
    labels = index.search_preassigned(queries, 1, lists)[1][:, 0]
    assert labels.tolist() == [0, 1, -1, 3, 4]
    assert index.last_search.coarse.tolist() == [8, 8, 0, 8, 8]


@pytest.mark.parametrize(
    ("lists", "distances", "message"),
    [
        ([[0, 1]], None, r"lists must have shape \(2, m\) with m from 1 to nlist=4; got \(1, 2\)"),
        ([[0] * 5] * 2, None, r"got \(2, 5\)"),
        ([[]] * 2, None, r"got \(2, 0\)"),
        ([0, 1], None, r"got \(2,\)"),
        ([[0.0], [1.0]], None, "lists must be integers"),
        ([[0, 4]] * 2, None, r"lists must lie in \[0, 4\); got 4"),
        ([[0, -2]] * 2, None, "got -2"),
        ([[1, 1]] * 2, None, "row 0 names list 1 twice"),
        ([[0, 1]] * 2, [[0.5]] * 2, r"coarse_dis must have shape \(2, 2\); got \(2, 1\)"),
    ],
)
def test_bad_lists(blobs, soft, lists, distances, message):
    x = blobs(300, 4)
    index = soft(x, 4)
    index.add(x)
    with pytest.raises(ValueError, match=message):
        index.search_preassigned(x[:2], 3, lists, distances)


@pytest.mark.parametrize("options", [{}, {"refine": "flat", "k_factor": 4}, {"fast_scan": True}])
def test_threads_may_search_at_the_same_time(blobs, soft, options):
    x = blobs(2000, 16)
    index = soft(x, 8, "PQ", max_lists=3, replication=1.8, **options)
    index.add(x)
    index.nprobe = 4
    parts = [x[start : start + 100] for start in range(0, 2000, 100)]
    want = [index.search(part, 10) for part in parts]
    radius = float(np.median(want[0][0]))
    within = [index.range_search(part, radius) for part in parts]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda part: index.search(part, 10), parts))
        found = list(pool.map(lambda part: index.range_search(part, radius), parts))
        back = list(pool.map(lambda i: index.reconstruct(i), range(200)))
    for mine, theirs in zip(got + found, want + within, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(back, index.reconstruct_n(0, 200))
