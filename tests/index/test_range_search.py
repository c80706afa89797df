"""IndexIVFGMM.range_search: FAISS's three arrays, each id once."""

import itertools

import faiss
import numpy as np
import pytest

from gmm_ivf import IndexIVFGMM, _vectors
from gmm_ivf._results import first_within_each_row

METRICS = pytest.mark.parametrize(
    "metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT], ids=["l2", "ip"]
)
CODECS = pytest.mark.parametrize("name", ["Flat", "PQ", "SQ8", "RaBitQ"])


def rows_of(found):
    """A dict of id to distance for each query."""
    lims, distances, labels = found
    assert (lims.dtype, distances.dtype, labels.dtype) == (np.uint64, np.float32, np.int64)
    bounds = itertools.pairwise(lims)
    rows = [(labels[a:b], distances[a:b]) for a, b in bounds]
    assert all(len(set(ids)) == len(ids) for ids, _ in rows)
    return [dict(zip(ids.tolist(), far.tolist(), strict=True)) for ids, far in rows]


@METRICS
@CODECS
def test_one_list_equals_stock(blobs, trained, codec, name, metric):
    x, queries = blobs(900, 16), blobs(30, 16, seed=1)
    q = trained(x, 6, metric)
    stock, index = codec(name, q), IndexIVFGMM(codec(name, q), q, max_lists=1)
    stock.train(x)
    stock.add(x)
    index.train(x)
    index.add(x)
    stock.nprobe = index.nprobe = 3
    radius = float(np.median(stock.search(queries, 20)[0]))
    want, got = (
        rows_of(stock.range_search(queries, radius)),
        rows_of(index.range_search(queries, radius)),
    )
    assert got == want
    assert sum(map(len, got)) > 100


@METRICS
@CODECS
def test_ids_come_once_with_their_best_distance(blobs, soft, name, metric):
    x, queries = blobs(900, 16), blobs(30, 16, seed=1)
    index = soft(x, 6, name, metric, max_lists=3, replication=1.8)
    index.add(x)
    index.nprobe = 4
    distances, labels = index.search(queries, 900)
    radius = float(np.median(distances[:, 20]))
    found = rows_of(index.range_search(queries, radius))
    for row, got in enumerate(found):
        near = distances[row] < radius if metric == faiss.METRIC_L2 else distances[row] > radius
        near &= labels[row] >= 0
        assert got.keys() == set(labels[row][near])
        want = dict(zip(labels[row], distances[row], strict=True))
        np.testing.assert_allclose([got[i] for i in got], [want[i] for i in got], rtol=1e-4)
    assert len(np.unique(index.range_search(queries[:1], radius)[2])) == len(found[0])


def test_costs_parameters_and_blocks(blobs, soft, monkeypatch, ivf_parameters):
    x, queries = blobs(900, 6), blobs(200, 6, seed=1)
    index = soft(x, 8)
    index.add(x)
    index.nprobe = 3
    whole = rows_of(index.range_search(queries, 2.0))
    cost = index.last_search
    index.search(queries, 1)
    np.testing.assert_array_equal(cost.scanned, index.last_search.scanned)
    np.testing.assert_array_equal(cost.coarse, np.full(200, 8))
    monkeypatch.setattr(_vectors, "_BLOCK_ROWS", 64)
    assert [set(row) for row in rows_of(index.range_search(queries, 2.0))] == list(map(set, whole))
    only = ivf_parameters(nprobe=8, sel=faiss.IDSelectorRange(100, 110))
    assert set().union(*rows_of(index.range_search(queries, 1e9, only))) == set(range(100, 110))
    assert index.index.parallel_mode == 3  # range_search borrows another mode


def test_bad_queries_and_empty_results(blobs, soft):
    x = blobs(400, 4)
    index = soft(x, 3)
    index.nprobe = 3
    assert index.range_search(x[:4], 1.0)[0].tolist() == [0] * 5
    index.add(x)
    queries = x[:4].copy()
    queries[1, 0], queries[3] = np.nan, np.inf
    found = rows_of(index.range_search(queries, 1e-9))
    assert found == [{0: 0.0}, {}, {2: 0.0}, {}]
    assert index.last_search.scanned[[1, 3]].tolist() == [0, 0]
    lims, distances, labels = index.range_search(x[:0], 1.0)
    assert (lims.tolist(), distances.shape, labels.shape) == ([0], (0,), (0,))
    for radius in ("far", None, float("nan")):
        with pytest.raises(ValueError, match="radius must be a number; got"):
            index.range_search(x, radius)
    with pytest.raises(ValueError, match=r"x must have shape \(n, 4\)"):
        index.range_search(x[:, :3], 1.0)


@pytest.mark.parametrize("is_product", [False, True])
def test_first_within_each_row_equals_loop(is_product):
    rng = np.random.default_rng(0)
    lims = np.concatenate([[0], np.cumsum(rng.integers(0, 12, 20))])
    labels = rng.integers(0, 6, lims[-1])
    distances = rng.integers(0, 4, lims[-1]).astype("f4")
    got = first_within_each_row(lims, distances, labels, is_product)
    pick = max if is_product else min
    for row in range(20):
        best = {}
        for key, value in zip(
            labels[lims[row] : lims[row + 1]], distances[lims[row] : lims[row + 1]], strict=True
        ):
            best[key] = pick(best.get(key, value), value)
        where = slice(got[0][row], got[0][row + 1])
        assert dict(zip(got[2][where], got[1][where], strict=True)) == best
        assert len(best) == got[0][row + 1] - got[0][row]
