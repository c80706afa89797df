"""refine="flat": the best ids by their codes are ranked again by the vectors themselves."""

import copy

import faiss
import numpy as np
import pytest

from gmm_ivf import GMMQuantizer, IndexIVFGMM, _store, _vectors
from gmm_ivf._ids import IdSet
from gmm_ivf._originals import Originals

METRICS = pytest.mark.parametrize(
    "metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT], ids=["l2", "ip"]
)


def exact(x, queries, metric):
    """Distances of all queries to all vectors, in float64."""
    x, queries = x.astype("f8"), queries.astype("f8")
    if metric == faiss.METRIC_INNER_PRODUCT:
        return queries @ x.T
    return ((queries[:, None] - x) ** 2).sum(axis=2)


@METRICS
@pytest.mark.parametrize("name", ["PQ", "RaBitQ", "SQ4"])
def test_results_are_those_of_exact_ranking(blobs, soft, name, metric):
    x, queries = blobs(1200, 16), blobs(40, 16, seed=1)
    options = {"max_lists": 3, "replication": 1.8}
    index = soft(x, 6, name, metric, refine="flat", k_factor=4, **options)
    codes = soft(x, 6, name, metric, **options)
    for either in (index, codes):
        either.add(x)
        either.nprobe = 4
    distances, labels = index.search(queries, 10)
    candidates = codes.search(queries, 40)[1]
    true = exact(x, queries, metric)
    sign = 1 if metric == faiss.METRIC_L2 else -1
    for row in range(40):
        order = np.argsort(sign * true[row, candidates[row]], kind="stable")[:10]
        np.testing.assert_array_equal(labels[row], candidates[row][order])
    np.testing.assert_allclose(
        distances, np.take_along_axis(true, labels, axis=1), rtol=1e-4, atol=1e-4
    )
    cost = index.last_search
    np.testing.assert_array_equal(cost.scanned, codes.last_search.scanned)
    assert cost.ranking.tolist() == [40.0] * 40
    assert index.stats()["bytes"] == codes.stats()["bytes"] + 1200 * (4 * 16 + 8)


def test_everything_ranked_is_exact_search(blobs, soft):
    x, queries = blobs(600, 16), blobs(30, 16, seed=1)
    index = soft(x, 5, "RaBitQ", refine="flat", k_factor=1000)
    index.add(x)
    index.nprobe = 5
    truth = faiss.IndexFlatL2(16)
    truth.add(x)
    np.testing.assert_array_equal(index.search(queries, 10)[1], truth.search(queries, 10)[1])
    assert index.last_search.ranking.tolist() == [600.0] * 30
    index.k_factor = 1
    index.search(queries, 10)
    assert index.last_search.ranking.tolist() == [10.0] * 30


def test_the_originals_follow_every_change(blobs, soft):
    x = blobs(900, 16)
    index = soft(x, 5, "PQ", refine="flat", k_factor=20)
    index.nprobe = 5
    index.add_with_ids(x[:300], np.arange(300)[::-1] * 7)
    for row in range(300, 320):
        index.add(x[row : row + 1])
    assert (index.search(x[:320], 1)[0] == 0).all()
    index.remove_ids(faiss.IDSelectorRange(0, 700))
    assert len(index._originals) == index.ntotal == 220
    assert index.search(x[:1], 1)[1] == 299 * 7
    index.update_vectors([299 * 7], x[800:801])
    assert index.search(x[800:801], 1)[1] == 299 * 7
    np.testing.assert_array_equal(index.reconstruct(299 * 7), x[800])
    index.add_preassigned(x[400:402], [[0, 1], [-1, -1]])
    assert len(index._originals) == index.ntotal == 221
    index.reset()
    assert len(index._originals) == 0
    assert (index.search(x[:3], 4)[1] == -1).all()
    index.add(x)
    assert (index.search(x, 1)[1][:, 0] == np.arange(900)).all()


@pytest.mark.parametrize("moment", ["layout", "originals"])
def test_interrupted_add_leaves_no_originals(blobs, soft, monkeypatch, moment):
    x = blobs(600, 16)
    index = soft(x, 5, "PQ", refine="flat")
    index.add(x[:100])
    where = {"layout": (_store.CopyStore, "append"), "originals": (Originals, "add")}[moment]
    whole = getattr(*where)

    def failing(self, *arguments):
        whole(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(*where, failing)
    with pytest.raises(KeyboardInterrupt):
        index.add(x[100:])
    monkeypatch.undo()
    assert len(index._originals) == index.ntotal == 100
    index.add(x[100:])
    assert (index.search(x[500:], 1)[1] >= 0).all()


def failing(*arguments):
    raise MemoryError


def test_a_removal_short_of_memory_leaves_no_originals(blobs, soft, monkeypatch):
    x = blobs(300, 16)
    index = soft(x, 5, "PQ", refine="flat")
    index.add(x)
    monkeypatch.setattr(IdSet, "discard", failing)  # by then FAISS has removed the entries
    with pytest.raises(MemoryError):
        index.remove_ids(np.arange(100))
    monkeypatch.undo()
    assert len(index._originals) == index.ntotal == 200
    index.add_with_ids(x[200:], np.arange(100))
    np.testing.assert_array_equal(index.reconstruct_batch(np.arange(100)), x[200:])


@pytest.mark.parametrize(
    "moment", [(IdSet, "joined"), (Originals, "add")], ids=["ids", "originals"]
)
def test_a_merge_short_of_memory_moves_nothing(blobs, soft, monkeypatch, moment):
    x = blobs(300, 16)
    index = soft(x, 5, "PQ", refine="flat")
    other = copy.copy(index)
    index.add(x[:200])
    other.add_with_ids(x[200:], np.arange(200, 300))
    monkeypatch.setattr(*moment, failing)
    with pytest.raises(MemoryError):
        index.merge_from(other)
    monkeypatch.undo()
    for part, first, stop in ((index, 0, 200), (other, 200, 300)):
        assert len(part._originals) == part.ntotal == stop - first
        np.testing.assert_array_equal(part.reconstruct_n(first, stop - first), x[first:stop])
    index.merge_from(other)
    np.testing.assert_array_equal(index.reconstruct_n(), x)


def test_range_search_and_padding(blobs, soft):
    x = blobs(600, 16)
    index = soft(x, 5, "SQ8", refine="flat", k_factor=3)
    index.add(x[:7])
    index.nprobe = 5
    distances, labels = index.search(x[:4], 20)
    assert sorted(labels[0][:7]) == list(range(7))
    assert (labels[:, 7:] == -1).all()
    assert (distances[:, 7:] == np.finfo("f4").max).all()
    assert index.last_search.ranking.tolist() == [7.0] * 4
    codes = soft(x, 5, "SQ8")
    codes.add(x[:7])
    codes.nprobe = 5
    found = index.range_search(x[:4], 9.0), codes.range_search(x[:4], 9.0)
    for got, want in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want)


def test_behind_a_transform_the_originals_are_those_of_the_user(blobs):
    x = blobs(800, 16)
    index = faiss.index_factory(16, "PCA6,IVF5,SQ8")
    q = GMMQuantizer(6, 5, random_state=0)
    q.attach(index)
    fine = IndexIVFGMM(index, q, refine="flat", k_factor=20)
    fine.train(x)
    fine.add(x)
    fine.nprobe = 5
    distances, labels = fine.search(x[:50], 5)
    np.testing.assert_array_equal(labels[:, 0], np.arange(50))
    true = ((x[labels].astype("f8") - x[:50, None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(distances, true, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(copy.copy(fine).search(x[:50], 5)[1], labels)


@METRICS
def test_originals_may_stay_in_a_file(blobs, soft, tmp_path, monkeypatch, metric):
    x, queries = blobs(600, 16), blobs(70, 16, seed=1)
    index = soft(x, 5, "PQ", metric, refine="flat", k_factor=5)
    index.add_with_ids(x, np.random.default_rng(0).permutation(600))
    index.remove_ids([3, 5])
    settings, arrays = index.state()
    arrays["originals"].tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float32, "r", shape=(598, 16))
    wrapped = faiss.deserialize_index(faiss.serialize_index(index.index))
    twin = IndexIVFGMM.from_state(
        wrapped, index.quantizer, settings, {**arrays, "originals": mapped}
    )
    assert np.shares_memory(twin._originals.all()[0], mapped)
    for k in (1, 7, 700):  # the last leaves empty places
        want = index.search(queries, k)
        with monkeypatch.context() as patch:
            patch.setattr(_vectors, "_BLOCK_ROWS", 32)
            got = twin.search(queries, k)
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_array_equal(twin.reconstruct(7), index.reconstruct(7))
    assert twin.stats()["bytes"] == index.stats()["bytes"]
    for either in (index, twin):  # a change loads them
        either.remove_ids([7])
        either.add_with_ids(x[:1], [3])
    assert not np.shares_memory(twin._originals.all()[0], mapped)
    np.testing.assert_array_equal(twin.search(queries, 7)[1], index.search(queries, 7)[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refine": "sq8"}, r'refine must be None or "flat"; got .sq8'),
        ({"refine": "flat", "k_factor": 0.5}, "k_factor must be a number of at least 1; got 0.5"),
        ({"refine": "flat", "k_factor": "2"}, "k_factor must be"),
        ({"refine": "flat", "k_factor": float("nan")}, "k_factor must be"),
        ({"k_factor": 2}, "k_factor=2 needs the originals"),
    ],
)
def test_bad_options(trained, codec, blobs, options, message):
    q = trained(blobs(300, 4), 3)
    with pytest.raises(ValueError, match=message):
        IndexIVFGMM(codec("Flat", q), q, **options)
