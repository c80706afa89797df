"""Every codec against stock FAISS on the same assignment, and against what its codes stand for."""

import faiss
import numpy as np
import pytest

from gmm_ivf import IndexIVFGMM

L2, IP = faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT
NAMES = ["Flat", "SQ8", "SQ4", "SQfp16", "SQbf16", "PQ", "PQ8", "RaBitQ", "RaBitQ4"]
ADDITIVE = ["Residual", "LocalSearch", "ProductResidual"]
# RaBitQ and additive codes estimate a distance; the others give that to the decoded vector.
EXACT = ["Flat", "SQ8", "SQ4", "SQfp16", "SQbf16", "PQ", "PQ8"]
METRICS = pytest.mark.parametrize("metric", [L2, IP], ids=["l2", "ip"])


@METRICS
@pytest.mark.parametrize("name", [*NAMES, *ADDITIVE])
def test_one_list_equals_stock(blobs, trained, codec, name, metric):
    x, queries = blobs(500 if name in ADDITIVE else 1500, 16), blobs(60, 16, seed=1)
    q = trained(x, 8, metric)
    stock, index = codec(name, q), IndexIVFGMM(codec(name, q), q, max_lists=1)
    stock.train(x)
    stock.add(x)
    index.train(x)
    index.add(x)
    for nprobe in (1, 3, 8):
        stock.nprobe = index.nprobe = nprobe
        for k in (1, 10, 400):
            want, got = stock.search(queries, k), index.search(queries, k)
            np.testing.assert_array_equal(got[1], want[1])
            np.testing.assert_array_equal(got[0], want[0])


@METRICS
@pytest.mark.parametrize("name", [*NAMES, "Residual"])
def test_copies_equal_stock_over_the_same_entries(blobs, trained, codec, name, metric):
    """Stock FAISS holds the same entries under ids of their own; the best of each vector counts."""
    x, queries = blobs(800, 16), blobs(40, 16, seed=1)
    q = trained(x, 8, metric)
    index = IndexIVFGMM(codec(name, q), q, max_lists=3, replication=1.8)
    index.train(x)
    owner, lists = index._layout._assigner.pairs(x, index._layout._log_tau)
    stock = codec(name, q)
    stock.train(x)
    keys, vectors = np.arange(len(owner)), x[owner]
    stock.add_core(len(owner), *map(faiss.swig_ptr, (vectors, keys, lists)))
    index.add(x)
    assert index.stats()["entries"] == len(owner) > 1400
    stock.nprobe = index.nprobe = 4
    raw_distances, raw_keys = stock.search(queries, len(owner))
    distances, labels = index.search(queries, 30)
    for row in range(len(queries)):
        found = raw_keys[row] >= 0
        ids, first = np.unique(owner[raw_keys[row][found]], return_index=True)
        order = np.sort(first)[:30]
        np.testing.assert_allclose(distances[row], raw_distances[row][order], rtol=1e-5, atol=1e-4)
        assert set(labels[row]) <= set(ids)
        assert len(set(labels[row])) == 30


@METRICS
@pytest.mark.parametrize("name", EXACT)
def test_copies_equal_brute_force_over_decoded_entries(blobs, soft, entries_of, name, metric):
    x, queries = blobs(1000, 16), blobs(30, 16, seed=1)
    index = soft(x, 8, name, metric, max_lists=3, replication=1.8)
    index.add(x)
    index.nprobe = 3
    probed = index.quantizer.search(queries, 3)[1]
    held = entries_of(index.index)
    decoded = []
    for number, ids in enumerate(held):
        part = np.empty((len(ids), 16), np.float32)
        for place in range(len(ids)):
            index.index.reconstruct_from_offset(number, place, faiss.swig_ptr(part[place]))
        decoded.append(part.astype("f8"))
    distances, labels = index.search(queries, 10)
    sign = 1 if metric == L2 else -1
    for row, query in enumerate(queries.astype("f8")):
        best = {}
        for number in probed[row]:
            vectors = decoded[number]
            far = ((vectors - query) ** 2).sum(axis=1) if metric == L2 else vectors @ query
            for key, value in zip(held[number], sign * far, strict=True):
                best[key] = min(best.get(key, np.inf), value)
        want = sign * np.sort(list(best.values()))[:10]
        np.testing.assert_allclose(distances[row], want, rtol=2e-3, atol=2e-3)
        mine = [sign * best[key] for key in labels[row]]
        np.testing.assert_allclose(mine, want, rtol=2e-3, atol=2e-3)


@METRICS
@pytest.mark.parametrize("name", ["PQ", "SQ8", "RaBitQ", "Residual"])
def test_coarse_distances_are_true_ones(blobs, soft, name, metric):
    """Residual codecs add them up: what is handed to FAISS decides on its results."""
    x, queries = blobs(1000, 16), blobs(30, 16, seed=1)
    index = soft(x, 8, name, metric)
    index.add(x)
    index.nprobe = 4
    want = index.search(queries, 10)
    distances, lists = index.quantizer.search(queries, 4)
    given = index.search_preassigned(queries, 10, lists, distances)
    np.testing.assert_array_equal(given[1], want[1])
    np.testing.assert_array_equal(given[0], want[0])
    assert index.last_search.coarse.tolist() == [0] * 30
    computed = index.search_preassigned(queries, 10, lists)
    np.testing.assert_allclose(computed[0], want[0], rtol=1e-3, atol=1e-3)
    assert (computed[1] == want[1]).mean() > 0.98
    assert index.last_search.coarse.tolist() == [4] * 30
