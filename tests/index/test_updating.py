"""update_vectors and merge_from: no ghost, no drift of counts."""

import copy
import os
import signal

import faiss
import numpy as np
import pytest

from gmm_ivf import GMMQuantizer, IndexIVFGMM, _store, _vectors

CODECS = pytest.mark.parametrize("name", ["Flat", "PQ", "SQ8", "RaBitQ"])


def counts_agree(index, entries_of):
    lists = entries_of(index.index)
    stats = index.stats()
    assert stats["list_sizes"].tolist() == [len(ids) for ids in lists]
    assert stats["entries"] == index.index.ntotal == sum(map(len, lists))
    assert index.ntotal == len(np.unique(np.concatenate(lists)))


@CODECS
def test_update_equals_adding_the_new_vectors(blobs, soft, entries_of, name):
    x = blobs(900, 16)
    index, want = (soft(x, 5, name, max_lists=3, replication=1.8) for _ in range(2))
    index.add(x[:600])
    keys = np.random.default_rng(0).permutation(600)[:200]
    index.update_vectors(keys, x[600:800])
    now = x[:600].copy()
    now[keys] = x[600:800]
    want.add(now)
    counts_agree(index, entries_of)
    assert index.ntotal == 600
    for either in (index, want):
        either.nprobe = 5
    np.testing.assert_array_equal(index.search(x, 3)[0], want.search(x, 3)[0])
    np.testing.assert_array_equal(index.stats()["list_sizes"], want.stats()["list_sizes"])
    index.add(x[800:801])
    assert 600 in index.search(x[800:801], 5)[1]


@pytest.mark.parametrize(
    ("keys", "rows", "message"),
    [
        ([1, 300], 2, "keys must be stored; 300 is not: add it"),
        ([1, 1], 2, "keys must be unique.*1 comes more than once"),
        ([-1, 1], 2, "negative"),
        ([1, 2], 3, r"keys must have shape \(3,\)"),
        ([0.0, 1.0], 2, "must be integers"),
    ],
)
def test_bad_updates_change_nothing(blobs, soft, keys, rows, message):
    x = blobs(300, 4)
    index = soft(x, 3)
    index.add(x)
    with pytest.raises(ValueError, match=message):
        index.update_vectors(keys, x[:rows])
    nan = x[:2].copy()
    nan[1] = np.nan
    with pytest.raises(ValueError, match="x: row 1 holds NaN"):
        index.update_vectors([3, 4], nan)
    np.testing.assert_array_equal(index.reconstruct_n(), x)


def test_failed_update_says_what_is_in(blobs, soft, entries_of, monkeypatch):
    x = blobs(400, 4)
    index = soft(x, 3)
    index.add(x[:300])
    monkeypatch.setattr(_vectors, "_BLOCK_ROWS", 50)
    append = _store.CopyStore.append

    def failing(self, rows, ids, owner, lists):
        if ids[0] == 50:
            raise MemoryError
        append(self, rows, ids, owner, lists)

    monkeypatch.setattr(_store.CopyStore, "append", failing)
    with pytest.raises(MemoryError) as caught:
        index.update_vectors(np.arange(200), x[200:400])
    monkeypatch.undo()
    assert caught.value.__notes__ == [
        "update_vectors was stopped: keys[:50] have their new vectors, the others are as before, "
        "but keys[50:100] were removed."
    ]
    counts_agree(index, entries_of)
    assert index.ntotal == 250
    np.testing.assert_array_equal(index.reconstruct_n(0, 50), x[200:250])
    np.testing.assert_array_equal(index.reconstruct_n(100), x[100:300])


def test_interrupted_update_loses_nothing(blobs, soft, entries_of, monkeypatch):
    x = blobs(400, 4)
    index = soft(x, 3)
    index.add(x[:300])
    monkeypatch.setattr(_vectors, "_BLOCK_ROWS", 50)
    append = _store.CopyStore.append

    def interrupted(self, rows, ids, owner, lists):
        if ids[0] == 50:
            os.kill(os.getpid(), signal.SIGINT)
        append(self, rows, ids, owner, lists)

    monkeypatch.setattr(_store.CopyStore, "append", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        index.update_vectors(np.arange(200), x[200:400])
    monkeypatch.undo()
    assert caught.value.__notes__ == [
        "update_vectors was stopped: keys[:100] have their new vectors, the others are as before."
    ]
    counts_agree(index, entries_of)
    np.testing.assert_array_equal(index.reconstruct_n(0, 100), x[200:300])
    np.testing.assert_array_equal(index.reconstruct_n(100), x[100:300])


@CODECS
def test_merging_equals_adding_to_one(blobs, soft, entries_of, name):
    x = blobs(900, 16)
    options = {"max_lists": 3, "replication": 1.8, "refine": "flat", "k_factor": 2}
    index = soft(x, 5, name, **options)
    other, whole = copy.copy(index), copy.copy(index)
    index.add(x[:500])
    other.add_with_ids(x[500:], np.arange(500, 900))
    whole.add(x)
    index.merge_from(other)
    counts_agree(index, entries_of)
    counts_agree(other, entries_of)
    assert (index.ntotal, other.ntotal, other.index.ntotal) == (900, 0, 0)
    assert len(other._originals) == 0
    for either in (index, whole, other):
        either.nprobe = 3
    got, want = index.search(x[:100], 10), whole.search(x[:100], 10)
    np.testing.assert_array_equal(got[0], want[0])
    assert (other.search(x[:5], 3)[1] == -1).all()
    index.add(x[:1])
    assert 900 in index.search(x[:1], 900)[1]
    assert index.remove_ids(np.arange(400, 600)) == 200
    counts_agree(index, entries_of)
    other.add(x[:10])
    assert other.ntotal == 10


def test_what_cannot_be_merged(blobs, soft, trained, codec):
    x = blobs(900, 16)
    index = soft(x, 5, "PQ")
    index.add(x[:300])
    same = copy.copy(index)
    with pytest.raises(ValueError, match="ids must be in one index only; 0 is in both"):
        index.merge_from(same)
    with pytest.raises(ValueError, match="must be another IndexIVFGMM; got IndexIVFGMM"):
        index.merge_from(index)
    with pytest.raises(ValueError, match="must be another IndexIVFGMM; got IndexIVFPQ"):
        index.merge_from(index.index)
    same.reset()
    with pytest.raises(ValueError, match="add_id must be 0"):
        index.merge_from(same, 300)
    others = {
        "codec": soft(x, 5, "SQ8"),
        "training": soft(x[:600], 5, "PQ"),
        "nlist": soft(x, 4, "PQ"),
    }
    q = index.quantizer
    book = IndexIVFGMM(codec("PQ", q), q)
    book.train(x[::-1])
    others["codebooks"] = book
    for other in others.values():
        with pytest.raises(ValueError, match="same centroids and the same trained codec"):
            index.merge_from(other)
    kept = IndexIVFGMM(codec("Flat", q), q, refine="flat", tau=0.2)
    with pytest.raises(ValueError, match="must keep its originals"):
        index.merge_from(kept)
    fresh = IndexIVFGMM(codec("PQ", q), q)
    with pytest.raises(RuntimeError, match="not trained"):
        index.merge_from(fresh)
    assert (index.ntotal, index.search(x[:1], 1)[1] >= 0) == (300, True)


def test_thresholds_may_differ(blobs, trained, codec):
    x = blobs(900, 8)
    q = trained(x, 6)
    one = IndexIVFGMM(codec("Flat", q), q, max_lists=1)
    many = IndexIVFGMM(codec("Flat", q), q, rule="top2")
    one.add(x[:400])
    many.add_with_ids(x[400:], np.arange(400, 900))
    one.merge_from(many)
    one.nprobe = 6
    assert one.max_copies == 2
    assert all(len(set(row)) == 50 for row in one.search(x[:50], 50)[1])


def test_transforms_have_to_be_the_same(blobs):
    x = blobs(600, 12)

    def build(rows):
        index = faiss.index_factory(12, "PCAR8,IVF4,Flat")
        q = GMMQuantizer(8, 4, random_state=0)
        q.attach(index)
        soft = IndexIVFGMM(index, q)
        soft.train(rows)
        return soft

    index, other = build(x), build(x[:300])
    twin = copy.copy(index)
    index.add(x[:300])
    twin.add_with_ids(x[300:], np.arange(300, 600))
    index.merge_from(twin)
    assert index.ntotal == index.index.ntotal / index.stats()["entries_per_vector"] == 600
    with pytest.raises(ValueError, match="same transforms"):
        index.merge_from(other)
