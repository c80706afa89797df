"""GMMQuantizer(coarse="hnsw..."): lists to probe, and their cost, by a graph over the means."""

import copy
import pickle

import faiss
import numpy as np
import pytest

from gmm_ivf import GMMQuantizer, IndexIVFGMM, _coarse
from gmm_ivf._near_posteriors import near_posteriors

METRICS = pytest.mark.parametrize(
    "metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT], ids=["l2", "ip"]
)


@pytest.fixture
def by_graph(blobs):
    """``by_graph(x, nlist, metric, **options)``: soft by geometry, over rows as centroids."""

    def make(x, nlist, metric=faiss.METRIC_L2, coarse="hnsw8", **options):
        q = GMMQuantizer.from_centroids(x[:nlist], metric, coarse=coarse)
        index = IndexIVFGMM(faiss.IndexIVFFlat(q, q.d, nlist, metric), q, rule="soar", **options)
        index.train(x)
        return index

    return make


@METRICS
def test_finds_what_flat_search_finds(blobs, by_graph, metric):
    x, queries = blobs(3000, 12), blobs(200, 12, seed=1)
    graph, flat = by_graph(x, 400, metric), by_graph(x, 400, metric, coarse="flat")
    graph.quantizer.ef_search = 200
    for either in (graph, flat):
        either.add(x)
        either.nprobe = 20
    # Up to 16,384 means the lists of stored vectors are the exact ones.
    np.testing.assert_array_equal(graph.stats()["list_sizes"], flat.stats()["list_sizes"])
    got, want = graph.search(queries, 10), flat.search(queries, 10)
    assert (got[1] == want[1]).mean() > 0.98
    assert flat.last_search.coarse.tolist() == [400] * 200


def test_cost_is_that_of_faiss(blobs, by_graph):
    x, queries = blobs(3000, 12), blobs(77, 12, seed=1)
    index = by_graph(x, 400)
    index.add(x)
    index.nprobe = 10
    for ef_search in (16, 64):
        index.quantizer.ef_search = ef_search
        index.search(queries, 5)
        coarse = index.last_search.coarse
        parameters = faiss.SearchParametersHNSW()
        parameters.efSearch = ef_search
        before = faiss.cvar.hnsw_stats.ndis
        _, lists = index.quantizer.graph.search(queries, 10, params=parameters)
        assert coarse.sum() == faiss.cvar.hnsw_stats.ndis - before
        assert coarse.max() - coarse.min() <= 1
        sizes = index.stats()["list_sizes"]
        np.testing.assert_array_equal(index.last_search.scanned, sizes[lists].sum(axis=1))
    index.search(queries[:0], 5)
    assert index.last_search.coarse.shape == (0,)


@pytest.mark.parametrize(
    ("metric", "shift"),
    [(faiss.METRIC_L2, 0.0), (faiss.METRIC_L2, 500.0), (faiss.METRIC_INNER_PRODUCT, 0.0)],
    ids=["l2", "far", "ip"],
)
@pytest.mark.parametrize("rule", ["responsibility", "air"])
def test_many_means_are_found_by_the_graph_alone(blobs, monkeypatch, metric, shift, rule):
    monkeypatch.setattr(_coarse, "EXACT_LIMIT", 16)
    x = blobs(2000, 8) + np.float32(shift)
    q = GMMQuantizer(8, 50, metric, coarse="hnsw16", random_state=0, max_iter=3)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 8, 50, metric), q, rule=rule, max_lists=3)
    index.train(x)
    index.add(x)
    index.nprobe = 30
    exact = faiss.IndexFlat(8, metric)
    exact.add(x - np.float32(shift))
    found, want = index.search(x[:200], 10)[1], exact.search(x[:200] - np.float32(shift), 10)[1]
    shared = [len(set(a) & set(b)) / 10 for a, b in zip(found, want, strict=True)]
    assert np.mean(shared) > 0.9
    assert all(len(set(row)) == 10 for row in found)
    if rule == "responsibility":
        assert index.stats()["entries_per_vector"] == pytest.approx(1.5, abs=0.01)


@pytest.mark.parametrize("kind", ["spherical", "diag", "tied", "full"])
def test_near_posteriors_are_posteriors(blobs, trained, kind):
    x = blobs(600, 6)
    mixture = trained(x, 12, covariance_type=kind).mixture
    ids, log_resp = mixture.top_components(x[:50], 12)
    shuffled = np.random.default_rng(0).permuted(np.tile(np.arange(12), (50, 1)), axis=1)
    got_ids, got = near_posteriors(mixture, x[:50], shuffled)
    np.testing.assert_allclose(np.exp(got), np.exp(log_resp), atol=1e-5)
    assert (got_ids[:, 0] == ids[:, 0]).all()
    shuffled[:, 5:] = -1
    got_ids, got = near_posteriors(mixture, x[:50], shuffled)
    assert (got_ids[:, 5:] == -1).all()
    assert (got[:, 5:] == -np.inf).all()
    np.testing.assert_allclose(np.exp(got).sum(axis=1), 1)


def test_graph_that_leads_to_few_means(by_graph):
    """300 equal means: a graph reaches some, and empty places are no lists."""
    x = np.ones((300, 4), "f4")
    x[150:] += 1
    index = by_graph(x, 300)
    index.add(x)
    index.nprobe = 299
    distances, labels = index.search(x[:5], 400)
    known = labels[0][labels[0] >= 0]
    assert len(known) == len(set(known)) > 0
    assert (distances[labels < 0] == np.finfo("f4").max).all()


@pytest.mark.parametrize("options", [{"max_lists": 1}, {"layout": "cells"}], ids=str)
def test_all_lists_are_probed_where_means_are_equal(blobs, options):
    """A graph over equal means falls apart, and does not lead to all of them."""
    x = blobs(400, 3)
    centroids = np.repeat(x[:2], 20, axis=0)
    q = GMMQuantizer.from_centroids(centroids, coarse="hnsw8")
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 3, 40), q, **options)
    index.train(x)
    index.add(x)
    index.nprobe = 40
    labels = index.search(x[:5], 400)[1]
    assert [sorted(row) for row in labels.tolist()] == [list(range(400))] * 5


def test_copies_pickles_and_files(blobs, by_graph, tmp_path):
    x = blobs(2000, 8)
    index = by_graph(x, 100)
    index.add(x)
    index.nprobe = 5
    index.quantizer.ef_search = 32
    want = index.search(x[:50], 5)[1]
    for other in (copy.copy(index), copy.deepcopy(index), pickle.loads(pickle.dumps(index))):
        assert (other.quantizer.coarse, other.quantizer.ef_search) == ("hnsw8", 32)
        np.testing.assert_array_equal(other.search(x[:50], 5)[1], want)
    q = copy.copy(index.quantizer)
    assert q.graph is None
    path = str(tmp_path / "graph")
    faiss.write_index(index.quantizer.graph, path)
    q.restore_graph(faiss.read_index(path))
    assert q.graph.ntotal == 100
    for bad in (faiss.IndexHNSWFlat(8, 8), faiss.IndexHNSWFlat(8, 16), faiss.IndexFlatL2(8)):
        with pytest.raises(ValueError, match=r"IndexHNSWFlat of 100 means in 8 dimensions"):
            q.restore_graph(bad)


def test_new_means_make_a_new_graph(blobs):
    x = blobs(800, 6)
    q = GMMQuantizer(6, 20, coarse="hnsw4", random_state=0)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 6, 20), q)
    index.train(x)
    index.add(x)
    index.search(x[:5], 3)
    assert q.graph.ntotal == 20
    index.reset()
    q.reset()
    assert q.graph is None
    index.train(-x)
    index.add(-x)
    index.nprobe = 20
    assert (index.search(-x[:50], 1)[1][:, 0] == np.arange(50)).all()


def test_stock_faiss_takes_the_graph_itself(blobs, by_graph):
    x = blobs(2000, 8)
    index = by_graph(x, 50)
    index.add(x)
    stock = faiss.IndexIVFFlat(index.quantizer.graph, 8, 50)
    stock.add(x)
    stock.nprobe = 20
    assert (stock.search(x[:50], 1)[1][:, 0] == np.arange(50)).all()


@pytest.mark.parametrize("coarse", ["hnsw", "hnsw0", "HNSW32", "ivf", None, 32, "hnsw1", "hnsw-4"])
def test_unknown_coarse(coarse):
    with pytest.raises(ValueError, match=r"coarse must (be 'flat', or|have at least 2)"):
        GMMQuantizer(4, 3, coarse=coarse)


def test_bad_ef_search():
    q = GMMQuantizer(4, 3, coarse="hnsw4")
    for bad in (0, 1.5, None):
        with pytest.raises(ValueError, match="ef_search must be an integer of at least 1"):
            q.ef_search = bad  # pyright: ignore
    assert q.ef_search == 64
