"""Layout "cells" against plain numpy in float64, and as an index."""

import copy
import pickle

import faiss
import numpy as np
import pytest

from gmm_ivf import CellOptions, GMMQuantizer, IndexIVFGMM
from gmm_ivf._decoding import list_ids
from gmm_ivf.cells import CellLayout

L2, IP = faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT


@pytest.fixture
def celled(codec):
    """``celled(x, nlist, codec="Flat", metric=..., **cell options)``: trained and empty."""

    def make(x, nlist, name="Flat", metric=L2, **options):
        centroids = x[np.random.default_rng(1).choice(len(x), nlist, replace=False)]
        q = GMMQuantizer.from_centroids(centroids, metric)
        index = IndexIVFGMM(codec(name, q), q, layout="cells", cells=CellOptions(**options))
        index.train(x)
        return index

    return make


def exact(x, queries, k, metric=L2):
    if metric == IP:
        distances = -queries.astype("f8") @ x.T.astype("f8")
    else:
        distances = ((queries[:, None].astype("f8") - x[None]) ** 2).sum(axis=2)
    return np.argsort(distances, axis=1, kind="stable")[:, :k]


def params(nprobe, sel=None, max_codes=0):
    made = faiss.SearchParametersIVF()
    made.nprobe, made.max_codes = nprobe, max_codes
    if sel is not None:
        made.sel = sel
    return made


@pytest.mark.parametrize("name", ["Flat", "SQ8", "PQ", "RaBitQ"])
@pytest.mark.parametrize("metric", [L2, IP], ids=["l2", "ip"])
def test_all_lists_probed_is_the_search_of_stock_faiss(blobs, celled, name, metric):
    x, queries = blobs(3000, 16), blobs(40, 16, seed=3)
    index = celled(x, 12, name, metric, links=5)
    index.add(x)
    index.nprobe = 12
    distances, labels = index.search(queries, 10)
    stock = index.index
    stock.nprobe = 12
    wanted, ids = type(stock).search(stock, queries, 10)
    np.testing.assert_allclose(distances, wanted, rtol=2e-4, atol=1e-4)
    assert (labels == ids).mean() > 0.99
    assert (index.last_search.scanned == len(x)).all()


@pytest.mark.parametrize("metric", [L2, IP], ids=["l2", "ip"])
@pytest.mark.parametrize("options", [{}, {"residual_bins": 4}, {"sketch": 0}], ids=str)
def test_few_vectors_scanned_find_most_neighbours(blobs, celled, metric, options):
    x, queries = blobs(6000, 16), blobs(60, 16, seed=3)
    index = celled(x, 16, metric=metric, **options)
    index.add(x)
    _, labels = index.search(queries, 10, params(4, max_codes=900))
    truth = exact(x, queries, 10, metric)
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(labels, truth, strict=True)])
    stock = index.index
    stock.nprobe = 2
    hard = type(stock).search(stock, queries, 10)[1]
    assert (index.last_search.scanned == 900).all()
    assert recall > np.mean([len(set(a) & set(b)) / 10 for a, b in zip(hard, truth, strict=True)])


def test_visited_by_list_a_cell_is_found_from_either_component(blobs, celled):
    x, queries = blobs(4000, 16), blobs(60, 16, seed=3)
    index = celled(x, 16, visit="list", lists_ranked=16, links=15)
    index.add(x)
    layout = index._layout
    _, labels = index.search(queries, 4000, params(2))
    nearest = layout._ranker.search(queries, 16)
    ranked = layout._arranged().cells
    cells = np.repeat(np.arange(len(ranked.own)), ranked.size)
    order = np.concatenate([list_ids(index.index, i) for i in range(16)])
    for q in range(60):
        distances = np.empty(16)
        distances[nearest[1][q]] = nearest[0][q]
        score = np.minimum(distances[ranked.own], distances[ranked.link])
        scanned = np.isin(order, labels[q])
        whole = score[cells[scanned]].max()
        assert scanned.sum() == 500
        assert scanned[score[cells] < whole - 1e-3].all()


def test_every_vector_lies_once_in_the_list_of_its_nearest_mean(blobs, celled, entries_of):
    x = blobs(2000, 8)
    index = celled(x, 10)
    for start in range(0, 2000, 300):
        index.add(x[start : start + 300])
        index.search(x[:1], 1)
    lists = entries_of(index.index)
    own = index.quantizer.search(x, 1)[1][:, 0]
    assert sorted(np.concatenate(lists)) == list(range(2000))
    for number, ids in enumerate(lists):
        assert (own[ids] == number).all()
    assert index.stats()["entries_per_vector"] == 1


def test_entries_lie_cell_after_cell_with_their_codes(blobs, celled):
    x = blobs(2000, 8)
    index = celled(x, 10)
    index.add(x[:1500])
    index.search(x[:1], 1)
    index.add(x[1500:])
    index.search(x[:1], 1)
    np.testing.assert_array_equal(index.reconstruct_batch(np.arange(2000)), x)
    for local in index._layout._store._local:
        assert (np.diff(local) >= 0).all()


def test_added_in_parts_is_added_at_once(blobs, celled):
    x, queries = blobs(3000, 16), blobs(50, 16, seed=3)
    index = celled(x, 12)
    once = copy.copy(index)
    once.add(x)
    for start in range(0, 3000, 700):
        index.add(x[start : start + 700])
        index.search(queries, 1)
    for nprobe in (1, 3):
        index.nprobe = once.nprobe = nprobe
        assert (index.search(queries, 10)[1] == once.search(queries, 10)[1]).mean() > 0.98


def test_removed_vectors_are_gone_and_others_stay_in_their_cells(blobs, celled):
    x, queries = blobs(3000, 16), blobs(50, 16, seed=3)
    index = celled(x, 12)
    index.add(x)
    index.nprobe = 2
    before = index.search(queries, 3000)[1]
    assert index.remove_ids(np.arange(0, 3000, 3)) == 1000
    index.nprobe = 12
    labels = index.search(queries, 10)[1]
    rest = np.setdiff1d(np.arange(3000), np.arange(0, 3000, 3))
    np.testing.assert_array_equal(labels, rest[exact(x[rest], queries, 10)])
    index.add_with_ids(x[::3], np.arange(0, 3000, 3))
    index.nprobe = 2
    after = index.search(queries, 3000)[1]
    shared = [len(set(a) & set(b)) / len(set(a)) for a, b in zip(before, after, strict=True)]
    # The means of cells now count those vectors twice.
    assert np.mean(shared) > 0.9
    np.testing.assert_array_equal(index.reconstruct_batch(np.arange(3000)), x)


def test_an_interrupted_add_leaves_the_index_as_before(blobs, celled, monkeypatch):
    x, queries = blobs(2000, 16), blobs(20, 16, seed=3)
    index = celled(x, 12)
    index.add(x[:1000])
    before = index.search(queries, 10)
    index.add(x[1000:1100])
    monkeypatch.setattr("gmm_ivf._mutating.spans", lambda n, d: [slice(0, 100), slice(100, 900)])
    original = CellLayout.add
    calls = []

    def add(self, *arguments):
        original(self, *arguments)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(CellLayout, "add", add)
    with pytest.raises(KeyboardInterrupt):
        index.add(x[1100:])
    assert index.remove_ids(np.arange(1000, 1100)) == 100
    assert index.ntotal == 1000
    index.nprobe = 12
    np.testing.assert_array_equal(index.search(queries, 10)[1], exact(x[:1000], queries, 10))
    assert before[1].max() < 1000


@pytest.mark.parametrize("name", ["Flat", "SQ8"])
def test_selector_and_max_codes(blobs, celled, name):
    x, queries = blobs(2000, 16), blobs(20, 16, seed=3)
    index = celled(x, 12, name)
    index.add(x)
    even = np.arange(0, 2000, 2)
    labels = index.search(queries, 5, params(12, faiss.IDSelectorBatch(even)))[1]
    assert (labels % 2 == 0).all()
    if name == "Flat":
        np.testing.assert_array_equal(labels, even[exact(x[even], queries, 5)])
    index.search(queries, 5, params(12, max_codes=77))
    assert (index.last_search.scanned <= 77).all()


@pytest.mark.parametrize("name", ["Flat", "SQ8"])
@pytest.mark.parametrize("metric", [L2, IP], ids=["l2", "ip"])
def test_range_search_finds_what_search_finds(blobs, celled, name, metric):
    x, queries = blobs(2000, 16), blobs(30, 16, seed=3)
    index = celled(x, 12, name, metric)
    index.add(x)
    for nprobe in (2, 12):
        index.nprobe = nprobe
        distances, labels = index.search(queries, 2000)
        radius = float(np.median(distances[labels >= 0]))
        lims, within, ids = index.range_search(queries, radius)
        for q in range(30):
            near = distances[q] > radius if metric == IP else distances[q] < radius
            part = slice(int(lims[q]), int(lims[q + 1]))
            assert set(ids[part]) == set(labels[q][near & (labels[q] >= 0)])
            np.testing.assert_allclose(np.sort(within[part]), np.sort(distances[q][near]))


def test_far_from_the_origin_the_same_vectors_are_scanned(blobs, celled):
    x, queries = blobs(3000, 16), blobs(40, 16, seed=3)
    near = celled(x, 12, residual_weight=0.25, residual_bins=1)
    far = celled(x + np.float32(500), 12, residual_weight=0.25, residual_bins=1)
    near.add(x)
    far.add(x + np.float32(500))
    near.nprobe = far.nprobe = 1
    one, other = near.search(queries, 3000)[1], far.search(queries + np.float32(500), 3000)[1]
    shared = [len(set(a) & set(b)) / len(set(a)) for a, b in zip(one, other, strict=True)]
    assert np.mean(shared) > 0.98


def test_one_list_and_vectors_that_coincide(blobs, celled):
    x = np.repeat(blobs(20, 4), 10, axis=0)
    for nlist in (1, 2, 20):
        index = celled(x, nlist)
        index.add(x)
        index.nprobe = nlist
        distances = index.search(x[:50], 10)[0]
        assert (distances < 1e-6).all()


def test_cost_counts_ranking(blobs, celled):
    x, queries = blobs(3000, 16), blobs(20, 16, seed=3)
    index = celled(x, 12, links=4, sketch=0, residual_bins=1, lists_ranked=12)
    index.add(x)
    index.search(queries, 5)
    cost, cells = index.last_search, index.stats()["cells"]
    assert (cost.coarse == 12).all()
    assert (cost.scanned == 250).all()
    np.testing.assert_allclose(cost.ranking, 3 * cells / 16)
    np.testing.assert_allclose(
        cost.distance_computations, cost.scanned + cost.coarse + cost.ranking
    )


@pytest.mark.parametrize("name", ["Flat", "SQ8"])
def test_graph_over_the_means(blobs, codec, name):
    x, queries = blobs(4000, 16), blobs(40, 16, seed=3)
    centroids = x[np.random.default_rng(1).choice(len(x), 64, replace=False)]
    labels = []
    for coarse in ("flat", "hnsw8"):
        q = GMMQuantizer.from_centroids(centroids)
        q.coarse = coarse
        cells = CellOptions(residual_weight=0.25, residual_bins=1, lists_ranked=16)
        index = IndexIVFGMM(codec(name, q), q, layout="cells", cells=cells)
        index.train(x)
        index.add(x)
        labels.append(index.search(queries, 10)[1])
    assert (labels[0] == labels[1]).mean() > 0.9
    cost = index.last_search
    assert (cost.coarse > 0).all() and (cost.ranking > 0).all()


@pytest.mark.parametrize("name", ["Flat", "PQ"])
def test_copies_search_alike(blobs, celled, name):
    x, queries = blobs(2000, 16), blobs(20, 16, seed=3)
    index = celled(x, 12, name)
    index.add(x)
    # Made of an index whose entries were not yet put in order by a search.
    copies = [copy.copy(index), pickle.loads(pickle.dumps(index))]
    wanted = index.search(queries, 10)
    for other in copies:
        found = other.search(queries, 10)
        np.testing.assert_array_equal(found[1], wanted[1])
        other.add(x[:5])
        assert other.ntotal == 2005


def test_merged_indexes_hold_what_both_held(blobs, celled):
    x, queries = blobs(2000, 16), blobs(20, 16, seed=3)
    index = celled(x, 12)
    other = copy.copy(index)
    index.add(x[:1200])
    other.add_with_ids(x[1200:], np.arange(1200, 2000))
    index.merge_from(other)
    index.nprobe = 12
    np.testing.assert_array_equal(index.search(queries, 10)[1], exact(x, queries, 10))
    np.testing.assert_array_equal(index.reconstruct_batch(np.arange(2000)), x)


def test_reset_keeps_what_was_trained(blobs, celled):
    x = blobs(1000, 16)
    index = celled(x, 8)
    index.add(x)
    index.reset()
    assert index.ntotal == 0 and index.is_trained
    assert (index.search(x[:3], 4)[1] == -1).all()
    index.add(x[:10])
    index.nprobe = 8
    assert index.search(x[:1], 1)[1] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"links": 0}, "links must be an integer of at least 1; got 0"),
        ({"visit": "cell"}, 'visit must be "edge" or "list"'),
        ({"shortlist": 0.5}, "shortlist must be a finite number of at least 1"),
        ({"residual_weight": float("nan")}, "residual_weight must be a finite number"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        CellOptions(**options)


def test_options_of_the_other_layout_are_refused(blobs, codec):
    q = GMMQuantizer.from_centroids(blobs(8, 4))
    with pytest.raises(ValueError, match=r"replication=1\.2 belongs to"):
        IndexIVFGMM(codec("Flat", q), q, layout="cells", replication=1.2)
    with pytest.raises(ValueError, match=r"cells must be a gmm_ivf\.CellOptions"):
        IndexIVFGMM(codec("Flat", q), q, layout="cells", cells=8)


def test_lists_of_the_caller_are_refused(blobs, celled):
    x = blobs(500, 8)
    index = celled(x, 8)
    with pytest.raises(NotImplementedError, match="chooses the list of a vector itself"):
        index.add_preassigned(x, np.zeros((500, 1), np.int64))
    assert index.ntotal == 0


@pytest.mark.parametrize("name", ["Flat", "SQ8"])
@pytest.mark.parametrize("metric", [L2, IP], ids=["l2", "ip"])
def test_tune_scans_what_a_recall_takes(blobs, celled, name, metric):
    x, queries = blobs(4000, 16), blobs(200, 16, seed=3)
    index = celled(x, 16, name, metric)
    index.add(x)
    everything = index.search(queries, 10, params(16))[1]
    found = index.tune(queries, recall=0.8)
    labels = index.search(queries, 10)[1]
    shared = [len(set(a) & set(b)) / 10 for a, b in zip(labels, everything, strict=True)]
    assert np.mean(shared) == pytest.approx(found["recall"], abs=0.005)
    assert 0.8 <= found["recall"] < 0.85
    assert index.last_search.scanned.mean() <= found["max_codes"] < 2000
    cost = index.last_search.distance_computations.mean()
    assert cost == pytest.approx(found["distance_computations"])
    more = index.tune(queries, recall=0.99)
    assert more["max_codes"] > found["max_codes"]


def test_tune_of_layout_lists_probes_what_a_recall_takes(blobs, soft):
    x, queries = blobs(3000, 16), blobs(100, 16, seed=3)
    index = soft(x, 16)
    index.add(x)
    found = index.tune(queries, recall=0.9)
    assert index.nprobe == found["nprobe"] < 16
    index.nprobe -= 1
    everything = index.search(queries, 10, params(16))[1]
    labels = index.search(queries, 10)[1]
    shared = [len(set(a) & set(b)) / 10 for a, b in zip(labels, everything, strict=True)]
    assert np.mean(shared) < 0.9 <= found["recall"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"recall": 0}, "recall must be a number in"), ({"k": 501}, "k=501 must not exceed the 500")],
)
def test_tune_refuses_what_cannot_be(blobs, celled, arguments, message):
    x = blobs(500, 8)
    index = celled(x, 8)
    index.add(x)
    with pytest.raises(ValueError, match=message):
        index.tune(x[:20], **arguments)


@pytest.mark.parametrize("name", ["Flat", "SQ8"])
def test_a_query_too_long_for_distances_finds_nothing(blobs, celled, name):
    x = blobs(1000, 16)
    index = celled(x, 8, name)
    index.add(x)
    queries = x[:3].copy()
    queries[1] = 1e30
    labels = index.search(queries, 4)[1]
    assert (labels[1] == -1).all() and (labels[[0, 2]] >= 0).all()
    lims = index.range_search(queries, 5.0)[0]
    assert lims[1] == lims[2] and lims[3] > lims[2] > 0
