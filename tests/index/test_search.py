"""IndexIVFGMM.search: stock results without copies, unique ids with them, cost, parameters."""

import faiss
import numpy as np
import pytest

from gmm_ivf import IndexIVFGMM

CODEC_NAMES = ["Flat", "PQ", "SQ8", "SQ4", "SQfp16", "RaBitQ"]
METRICS = pytest.mark.parametrize(
    "metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT], ids=["l2", "ip"]
)


def ivf_parameters(**fields):
    """SearchParametersIVF with fields set."""
    parameters = faiss.SearchParametersIVF()
    for name, value in fields.items():
        setattr(parameters, name, value)
    return parameters


def brute_force(index, x, queries, k, lists):
    """Best k unique ids among the lists that each query probes, by exact L2 distance."""
    found = np.full((len(queries), k), -1)
    for row, probed in enumerate(lists):
        ids = np.unique(np.concatenate([index[i] for i in probed]))
        distances = ((x[ids].astype("f8") - queries[row]) ** 2).sum(axis=1)
        best = ids[np.lexsort((ids, distances))][:k]
        found[row, : len(best)] = best
    return found


@pytest.mark.parametrize("nprobe", [1, 2, 5, 10])
@pytest.mark.parametrize("max_lists", [2, 4])
def test_search_equals_brute_force(blobs, soft, entries_of, max_lists, nprobe):
    x, queries = blobs(1500, 6), blobs(60, 6, seed=1)
    index = soft(x, 10, max_lists=max_lists, replication=1.9)
    index.add(x)
    index.nprobe = nprobe
    lists = index.quantizer.search(queries, nprobe)[1]
    distances, labels = index.search(queries, 10)
    np.testing.assert_array_equal(
        labels, brute_force(entries_of(index.index), x, queries, 10, lists)
    )
    exact = ((x[labels] - queries[:, None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(distances[labels >= 0], exact[labels >= 0], rtol=1e-4)


@METRICS
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_ix_d2_k_unique_ids(blobs, soft, entries_of, name, metric):
    x = blobs(1200, 16)
    index = soft(x, 6, name, metric, max_lists=4, replication=2.5)
    index.add(x)
    index.nprobe = 4
    lists = entries_of(index.index)
    _, probed = index.quantizer.search(x[:100], 4)
    for k in (10, 500):
        distances, labels = index.search(x[:100], k)
        for row in range(100):
            scanned = len(np.unique(np.concatenate([lists[i] for i in probed[row]])))
            known = labels[row][labels[row] >= 0]
            assert len(known) == len(np.unique(known)) == min(k, scanned)
        order = np.diff(distances, axis=1)
        assert ((order >= 0) if metric == faiss.METRIC_L2 else (order <= 0)).all()


@pytest.mark.parametrize("name", ["PQ", "SQ8", "RaBitQ"])
def test_best_distance_of_each_id(blobs, soft, name):
    """Each copy is coded against its own mean; the raw result holds all of them."""
    x = blobs(1200, 16)
    index = soft(x, 6, name, max_lists=3, replication=2.0)
    index.add(x)
    index.nprobe = index.index.nprobe = 6
    raw_distances, raw_labels = index.index.search(x[:50], index.index.ntotal)
    distances, labels = index.search(x[:50], 1200)
    for row in range(50):
        best = dict(zip(raw_labels[row][::-1], raw_distances[row][::-1], strict=True))
        got = dict(zip(labels[row], distances[row], strict=True))
        best.pop(-1, None)
        assert got.keys() == best.keys()
        np.testing.assert_allclose([got[i] for i in best], list(best.values()), rtol=1e-4)


@METRICS
def test_k_beyond_ntotal_pads(blobs, soft, metric):
    x = blobs(300, 4)
    index = soft(x, 4, metric=metric)
    index.add(x[:7])
    index.nprobe = 4
    distances, labels = index.search(x[:5], 20)
    assert distances.dtype == np.float32
    assert labels.dtype == np.int64
    assert all(sorted(row[:7]) == list(range(7)) for row in labels)
    assert (labels[:, 7:] == -1).all()
    worst = np.finfo("f4").max * (1 if metric == faiss.METRIC_L2 else -1)
    assert (distances[:, 7:] == worst).all()
    index.reset()
    distances, labels = index.search(x[:5], 3)
    assert (labels == -1).all()
    assert (distances == worst).all()


def test_no_queries_and_no_vectors(blobs, soft):
    x = blobs(300, 4)
    index = soft(x, 4)
    index.add(x[:0])
    assert index.ntotal == 0
    distances, labels = index.search(x[:0], 5)
    assert distances.shape == labels.shape == (0, 5)
    assert index.last_search.distance_computations.shape == (0,)


@METRICS
def test_ix_n1_nan_in_add_and_query(blobs, soft, metric):
    x = blobs(500, 16)
    index = soft(x, 4, metric=metric)
    x[37, 2] = np.nan
    with pytest.raises(ValueError, match="x: row 37 holds NaN"):
        index.add(x)
    assert index.ntotal == index.index.ntotal == 0
    index.add(np.delete(x, 37, axis=0))
    queries = x[35:40].copy()
    queries[4] = np.inf
    distances, labels = index.search(queries, 3)
    worst = np.finfo("f4").max * (1 if metric == faiss.METRIC_L2 else -1)
    assert (labels[[2, 4]] == -1).all()
    assert (distances[[2, 4]] == worst).all()
    assert (labels[[0, 1, 3]] >= 0).all()
    assert index.last_search.scanned[[2, 4]].tolist() == [0, 0]


def test_overflowing_query(blobs, soft):
    """Squared distances overflow float32: as in FAISS nothing is near."""
    x = blobs(300, 4)
    index = soft(x, 4)
    index.add(x)
    labels = index.search(np.full((1, 4), 1e25, "f4"), 3)[1]
    assert labels.tolist() == [[-1, -1, -1]]
    with pytest.raises(ValueError, match="row 0 is so long"):
        index.add(np.full((1, 4), 1e25, "f4"))


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_ix_r3_r4_cost_is_counted_from_list_sizes(blobs, soft, name):
    x, queries = blobs(1500, 16), blobs(5, 16, seed=2)
    index = soft(x, 8, name)
    index.add(x)
    index.nprobe = 3
    index.search(queries, 4)
    sizes = index.stats()["list_sizes"]
    scanned = sizes[index.quantizer.search(queries, 3)[1]].sum(axis=1)
    cost = index.last_search
    np.testing.assert_array_equal(cost.scanned, scanned)
    np.testing.assert_array_equal(cost.coarse, np.full(5, 8))
    np.testing.assert_array_equal(cost.ranking, np.zeros(5))
    np.testing.assert_array_equal(cost.distance_computations, scanned + 8)
    assert cost.scanned.dtype == cost.coarse.dtype == np.int64
    assert cost.ranking.dtype == cost.distance_computations.dtype == np.float64


def test_ix_s2_nprobe_is_clamped_with_one_warning(blobs, soft):
    x = blobs(800, 6)
    index = soft(x, 16)
    index.add(x)
    assert index.nprobe == 1
    index.nprobe = 64
    with pytest.warns(UserWarning, match="nprobe=64 exceeds nlist=16") as caught:
        clamped = index.search(x[:9], 5)
    assert [w.filename for w in caught] == [__file__]
    again = index.search(x[:9], 5)
    index.nprobe = 16
    full = index.search(x[:9], 5)
    for other in (clamped, again):
        np.testing.assert_array_equal(other[1], full[1])
    assert index.last_search.scanned.tolist() == [index.stats()["entries"]] * 9
    with pytest.raises(ValueError, match="nprobe must be an integer of at least 1; got 0"):
        index.nprobe = 0


def test_search_parameters(blobs, soft):
    x = blobs(1000, 6)
    index = soft(x, 8)
    index.add(x)
    index.nprobe = 5
    want = index.search(x[:20], 4)
    index.nprobe = 1
    got = index.search(x[:20], 4, params=ivf_parameters(nprobe=5))
    np.testing.assert_array_equal(got[1], want[1])
    assert index.nprobe == 1
    only = ivf_parameters(nprobe=8, sel=faiss.IDSelectorRange(100, 110))
    labels = index.search(x[:20], 30, only)[1]
    assert all(sorted(row[row >= 0]) == list(range(100, 110)) for row in labels)
    np.testing.assert_array_equal(index.assign(x[:20], 4), index.search(x[:20], 4)[1])
    np.testing.assert_array_equal(index.assign(x[:20]), index.search(x[:20], 1)[1][:, 0])
    index.search(x[:20], 4, ivf_parameters(nprobe=8, max_codes=300))
    assert index.last_search.scanned.tolist() == [300] * 20


@pytest.mark.parametrize(
    "params",
    [
        faiss.SearchParameters(),
        faiss.IVFPQSearchParameters(),
        ivf_parameters(max_lists_num=3),
        ivf_parameters(ensure_topk_full=True),
        ivf_parameters(quantizer_params=faiss.SearchParameters()),
    ],
    ids=["base", "pq", "max_lists_num", "ensure_topk_full", "quantizer_params"],
)
def test_other_parameters_are_refused(blobs, soft, params):
    x = blobs(300, 4)
    index = soft(x, 3)
    with pytest.raises(NotImplementedError, match="not available"):
        index.search(x, 2, params)


def test_max_codes_of_the_wrapped_index(blobs, soft):
    x = blobs(600, 4)
    index = soft(x, 3)
    index.add(x)
    index.nprobe = 3
    index.index.max_codes = 200
    index.search(x[:6], 2)
    assert index.last_search.scanned.tolist() == [200] * 6


@pytest.mark.parametrize(
    ("x", "k", "message"),
    [
        (np.zeros(4, "f4"), 1, r"x must have shape \(n, 4\); got \(4,\). Reshape"),
        (np.zeros((2, 3), "f4"), 1, r"got \(2, 3\)"),
        (np.zeros((2, 4), "f4"), 0, "k must be an integer of at least 1; got 0"),
        (np.zeros((2, 4), "f4"), 2.0, "k must be"),
        (np.zeros((2, 4), "f4"), -1, "k must be"),
    ],
)
def test_bad_searches(blobs, soft, x, k, message):
    index = soft(blobs(300, 4), 3)
    with pytest.raises(ValueError, match=message):
        index.search(x, k)


@METRICS
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_one_list_equals_stock_faiss(blobs, trained, codec, name, metric):
    x, queries = blobs(2000, 16), blobs(70, 16, seed=1)
    q = trained(x, 12, metric)
    stock, wrapped = codec(name, q), codec(name, q)
    stock.train(x)
    stock.add(x)
    index = IndexIVFGMM(wrapped, q, max_lists=1)
    index.train(x)
    index.add(x)
    assert index.tau == 1.0
    for nprobe in (1, 3, 12):
        stock.nprobe = index.nprobe = nprobe
        for k in (1, 10, 300):
            want_distances, want_labels = stock.search(queries, k)
            distances, labels = index.search(queries, k)
            np.testing.assert_array_equal(labels, want_labels)
            np.testing.assert_array_equal(distances, want_distances)


@METRICS
@pytest.mark.parametrize("name", ["Flat", "PQ"])
def test_queries_with_more_copies_than_usual(blobs, soft, name, metric):
    """A few vectors have many copies: what one fetch misses, the second finds."""
    x = blobs(1200, 16)
    index = soft(x, 6, name, metric, max_lists=1)
    lists = np.full((1200, 6), -1)
    lists[:, 0] = index.quantizer.search(x, 1)[1][:, 0]
    lists[:200] = np.arange(6)
    index.add_preassigned(x, lists)
    index.nprobe = 6
    whole = index.search(x[:400], 1200)
    for k in (1, 10, 100):
        distances, labels = index.search(x[:400], k)
        np.testing.assert_array_equal(distances, whole[0][:, :k])
        assert all(len(set(row)) == k for row in labels)
    only = ivf_parameters(nprobe=6, sel=faiss.IDSelectorRange(0, 30))
    labels = index.search(x[:50], 40, only)[1]
    assert all(sorted(row[:30]) == list(range(30)) for row in labels)
    assert (labels[:, 30:] == -1).all()
    index.search(x[:400], 10)
    assert index.last_search.scanned.tolist() == [index.stats()["entries"]] * 400
