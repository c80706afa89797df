"""Adding and removing through IndexIVFGMM: ids, blocks, failures half-way, other writers."""

import copy
import pickle

import faiss
import numpy as np
import pytest

from gmm_ivf import GMMQuantizer, IndexIVFGMM, _store, _vectors

CODEC_NAMES = ["Flat", "PQ", "SQ8", "SQ4", "SQfp16", "RaBitQ"]


def held(lists):
    return np.unique(np.concatenate(lists))


def test_ix_m1_ids_are_never_given_twice(blobs, soft, entries_of):
    x = blobs(400, 8)
    index = soft(x, 5)
    index.add(x[:100])
    assert index.remove_ids([3]) == 1
    index.add(x[100:101])
    assert index.ntotal == 100
    np.testing.assert_array_equal(held(entries_of(index.index)), np.delete(np.arange(101), 3))
    index.nprobe = 5
    assert index.search(x[100:101], 1)[1] == 100
    assert index.search(x[99:100], 1)[1] == 99
    assert 3 not in index.search(x[3:4], 200)[1]


def test_automatic_ids_go_on_from_given_ones(blobs, soft, entries_of):
    x = blobs(400, 4)
    index = soft(x, 3)
    index.add_with_ids(x[:3], [70, 10, 2**40])
    index.add(x[3:5])
    assert held(entries_of(index.index)).tolist() == [10, 70, 2**40, 2**40 + 1, 2**40 + 2]
    index.reset()
    assert (index.ntotal, index.index.ntotal, index.max_copies, index.is_trained) == (0, 0, 1, True)
    index.add(x[:2])
    assert held(entries_of(index.index)).tolist() == [0, 1]


def test_ids_can_run_out(blobs, soft):
    x = blobs(300, 4)
    index = soft(x, 3)
    index.add_with_ids(x[:1], [2**63 - 2])
    with pytest.raises(ValueError, match="no 2 ids are left above 9223372036854775806"):
        index.add(x[:2])
    assert index.ntotal == 1


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, -1, 6], "negative.*-1"),
        ([5, 5, 6], "unique within one call; 5"),
        ([5, 42, 6], "must be new; 42 is stored"),
        ([0.0, 1.0, 2.0], "integers"),
        ([5, 6], r"shape \(3,\)"),
        (np.array([5, 6, 2**64 - 1], np.uint64), "int64"),
    ],
)
def test_bad_ids_add_nothing(blobs, soft, ids, message):
    x = blobs(300, 4)
    index = soft(x, 3)
    index.add_with_ids(x[:1], [42])
    entries = index.index.ntotal
    with pytest.raises(ValueError, match=message):
        index.add_with_ids(x[:3], ids)
    assert (index.ntotal, index.index.ntotal) == (1, entries)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_removal_takes_all_copies(blobs, soft, entries_of, name):
    x = blobs(600, 16)
    index = soft(x, 5, name, max_lists=3, replication=2.0)
    index.add(x)
    gone = np.arange(0, 600, 7)
    assert index.remove_ids(np.concatenate([gone, gone, [1000, -4]])) == len(gone)
    lists = entries_of(index.index)
    np.testing.assert_array_equal(held(lists), np.setdiff1d(np.arange(600), gone))
    stats = index.stats()
    assert stats["list_sizes"].tolist() == [len(ids) for ids in lists]
    assert (stats["ntotal"], stats["entries"]) == (600 - len(gone), index.index.ntotal)
    assert index.remove_ids(gone) == 0
    index.add_with_ids(x[gone], gone)
    assert index.ntotal == 600
    index.nprobe = 5
    assert (index.search(x[:1], 600)[1] >= 0).all()


@pytest.mark.parametrize(
    ("selector", "kept"),
    [
        (faiss.IDSelectorRange(10, 290), [*range(10), *range(290, 300)]),
        (faiss.IDSelectorBatch(np.array([0, 2, 2, 900])), [1, *range(3, 300)]),
        (faiss.IDSelectorArray(np.array([299])), list(range(299))),
        (faiss.IDSelectorNot(faiss.IDSelectorRange(5, 8)), [5, 6, 7]),
        (faiss.IDSelectorAll(), []),
    ],
    ids=["range", "batch", "array", "not", "all"],
)
def test_removal_by_selector(blobs, soft, entries_of, selector, kept):
    x = blobs(300, 4)
    index = soft(x, 4)
    index.add(x)
    assert index.remove_ids(selector) == 300 - len(kept)
    assert index.ntotal == len(kept)
    assert held(entries_of(index.index)).tolist() == kept
    # The ids removed are free again, the others are not.
    if kept:
        with pytest.raises(ValueError, match=f"{kept[0]} is stored"):
            index.add_with_ids(x[:1], kept[:1])
    gone = np.setdiff1d(np.arange(300), kept)
    index.add_with_ids(x[gone], gone)
    assert index.ntotal == 300


def test_removing_nothing(blobs, soft):
    x = blobs(300, 4)
    index = soft(x, 4)
    assert index.remove_ids([]) == 0
    assert index.remove_ids(faiss.IDSelectorAll()) == 0
    index.add(x)
    assert index.remove_ids(np.empty(0)) == 0
    with pytest.raises(ValueError, match="sel must be integers; got dtype float64"):
        index.remove_ids([1.0])


@pytest.mark.parametrize("n", [1, 63, 64, 65, 127, 128, 129, 300])
def test_blocks_do_not_show(blobs, soft, entries_of, monkeypatch, n):
    x = blobs(400, 6)
    whole, index = soft(x, 5), soft(x, 5)
    whole.add(x[:n])
    monkeypatch.setattr(_vectors, "_BLOCK_ROWS", 64)
    index.add(x[:n])
    for a, b in zip(entries_of(whole.index), entries_of(index.index), strict=True):
        np.testing.assert_array_equal(a, b)
    index.nprobe = whole.nprobe = 3
    blocked = index.search(x[:n], 4)
    cost = index.last_search
    monkeypatch.undo()
    want = whole.search(x[:n], 4)
    np.testing.assert_array_equal(blocked[1], want[1])
    np.testing.assert_allclose(blocked[0], want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(cost.scanned, whole.last_search.scanned)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("moment", ["before", "inside", "after"])
def test_failure_half_way_leaves_the_index_as_before(
    blobs, soft, entries_of, monkeypatch, error, moment
):
    x = blobs(500, 6)
    index, want = soft(x, 5), soft(x, 5)
    for either in (index, want):
        either.add(x[:100])
    before = entries_of(index.index)
    monkeypatch.setattr(_vectors, "_BLOCK_ROWS", 50)
    append = _store.CopyStore.append

    def failing(self, rows, ids, owner, lists):
        if ids[0] < 250:
            return append(self, rows, ids, owner, lists)
        if moment == "after":
            append(self, rows, ids, owner, lists)
        elif moment == "inside":  # FAISS stored some of them, and did not get to counting them
            index.index.add_core(5, *map(faiss.swig_ptr, (rows, ids, lists)))
            index.index.ntotal -= 5
        raise error

    monkeypatch.setattr(_store.CopyStore, "append", failing)
    with pytest.raises(error):
        index.add(x[100:400])
    monkeypatch.setattr(_store.CopyStore, "append", append)
    assert (index.ntotal, index.index.ntotal) == (100, sum(map(len, before)))
    for now, then in zip(entries_of(index.index), before, strict=True):
        np.testing.assert_array_equal(now, then)
    for either in (index, want):
        either.add(x[100:])
        either.nprobe = 5
    np.testing.assert_array_equal(index.search(x[:50], 9)[1], want.search(x[:50], 9)[1])
    np.testing.assert_array_equal(index.stats()["list_sizes"], want.stats()["list_sizes"])


def test_bad_row_far_down_adds_nothing(blobs, soft, monkeypatch):
    x = blobs(400, 6)
    index = soft(x, 5)
    monkeypatch.setattr(_vectors, "_BLOCK_ROWS", 50)
    x[333, 0] = np.nan
    with pytest.raises(ValueError, match="row 333 holds NaN"):
        index.add(x)
    assert (index.ntotal, index.index.ntotal) == (0, 0)


def test_many_adds_equal_one(blobs, soft):
    x = blobs(300, 4)
    once, often = soft(x, 4), soft(x, 4)
    once.add(x)
    for row in range(300):
        often.add(x[row : row + 1])
    assert often.ntotal == 300
    np.testing.assert_array_equal(once.stats()["list_sizes"], often.stats()["list_sizes"])


def test_preassigned_lists(blobs, soft, entries_of):
    x = blobs(300, 4)
    index = soft(x, 4)
    index.add_preassigned(x[:4], [[0, 3], [2, -1], [-1, -1], [1, 0]])
    assert [ids.tolist() for ids in entries_of(index.index)] == [[0, 3], [3], [1], [0]]
    assert (index.ntotal, index.max_copies) == (3, 2)
    index.add_preassigned(x[4:5], [[3, 2, 1, 0]], ids=[99])
    assert index.max_copies == 4
    index.nprobe = 4
    assert sorted(index.search(x[:1], 10)[1][0][:4].tolist()) == [0, 1, 3, 99]
    index.add_preassigned(x[:1], [[-1]], ids=[2])
    assert index.ntotal == 4


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[0, 9], [1, -1]], r"lists must lie in \[0, 4\); got 9"),
        ([[0, -2], [1, -1]], r"got -2"),
        ([[0, 0], [1, 1]], "row 0 names list 0 twice"),
        ([0, 1], r"lists must have shape \(2, m\); got \(2,\)"),
        ([[0.0], [1.0]], "lists must be integers"),
    ],
)
def test_ix_l2_bad_lists_add_nothing(blobs, soft, lists, message):
    x = blobs(300, 4)
    index = soft(x, 4)
    with pytest.raises(ValueError, match=message):
        index.add_preassigned(x[:2], lists)
    assert (index.ntotal, index.index.ntotal) == (0, 0)


def test_store_checks_lists_itself(blobs, soft):
    """The last line before FAISS writes to whatever list it is told."""
    x = blobs(300, 4)
    store = soft(x, 4)._layout._store
    for bad in (4, -1, 10**9):
        with pytest.raises(ValueError, match=rf"\[0, 4\); got {bad}"):
            store.append(x[:1], np.array([0]), np.array([0]), np.array([bad]))
    assert len(store) == 0


@pytest.mark.parametrize("layout", ["lists", "cells"])
@pytest.mark.parametrize("change", ["add", "remove_ids", "reset"])
def test_changes_behind_our_back_are_noticed(blobs, soft, change, layout):
    x = blobs(300, 4)
    index = soft(x, 4, layout=layout)
    index.add(x)
    {
        "add": lambda: index.index.add(x[:5]),
        "remove_ids": lambda: index.index.remove_ids(np.array([7])),
        "reset": index.index.reset,
    }[change]()
    calls = [lambda: index.search(x, 1), lambda: index.add(x), lambda: index.remove_ids([1])]
    calls += [lambda: copy.copy(index), lambda: pickle.dumps(index)]
    for call in calls:
        with pytest.raises(RuntimeError, match="changed behind the adapter's back"):
            call()
    index.reset()
    index.add(x)
    assert index.ntotal == 300


@pytest.mark.parametrize("kind", [faiss.DirectMap.Array, faiss.DirectMap.Hashtable])
def test_direct_maps_are_refused(blobs, soft, trained, kind):
    x = blobs(300, 4)
    q = trained(x, 4)
    index = faiss.IndexIVFFlat(q, 4, 4)
    index.set_direct_map_type(kind)
    with pytest.raises(ValueError, match=r"direct map.*set_direct_map_type"):
        IndexIVFGMM(index, q)
    later = soft(x, 4)
    later.add(x)
    later.index.set_direct_map_type(faiss.DirectMap.Hashtable)
    with pytest.raises(ValueError, match="direct map"):
        later.remove_ids([1])


def test_retrained_quantizer_is_noticed(blobs, soft):
    x = blobs(300, 4)
    index = soft(x, 4)
    index.add(x)
    q = index.quantizer
    q.reset()
    with pytest.raises(RuntimeError, match="not trained"):
        index.search(x, 1)
    q.train(x[::-1])
    with pytest.raises(RuntimeError, match="trained again: reset"):
        index.search(x, 1)
    index.reset()
    index.train(x)
    index.add(x)
    assert index.search(x[:1], 1)[1] == 0


@pytest.mark.parametrize("layout", ["lists", "cells"])
def test_a_copy_notices_a_retrained_quantizer(blobs, soft, layout):
    x = blobs(300, 4)
    index = soft(x, 4, layout=layout)
    index.add(x)
    other, q = copy.copy(index), index.quantizer
    q.reset()
    with pytest.raises(RuntimeError, match="trained again: reset"):
        copy.copy(index)
    q.train(x[::-1])
    for call in (lambda: other.search(x, 1), lambda: other.add(x), lambda: copy.copy(other)):
        with pytest.raises(RuntimeError, match="trained again: reset"):
            call()
    other.reset()
    other.train(x)
    other.add(x)
    assert other.search(x[:1], 1)[1] == 0


def test_replaced_quantizer_is_noticed(blobs, soft, trained):
    x = blobs(300, 4)
    index = soft(x, 4)
    trained(x, 4).attach(index.index)
    with pytest.raises(RuntimeError, match="quantizer of the wrapped index was replaced"):
        index.add(x)


def test_replaced_table_is_noticed(blobs, soft):
    x = blobs(600, 4)
    index = soft(x, 4)
    faiss.IndexIVFFlat(index.quantizer, 4, 8).train(x)
    with pytest.raises(RuntimeError, match="8 centroids that are not the 4 means"):
        index.add(x)


def test_zero_rows_under_inner_product(blobs, soft):
    x = blobs(400, 4)
    index = soft(x, 4, metric=faiss.METRIC_INNER_PRODUCT)
    x[5] = 0
    index.add(x)
    index.nprobe = 4
    assert index.ntotal == 400
    assert 5 in index.search(x[:1], 400)[1]


def test_two_indexes_share_a_quantizer(blobs, trained):
    x = blobs(400, 4)
    q = trained(x, 4)
    first = IndexIVFGMM(faiss.IndexIVFFlat(q, 4, 4), q, tau=0.25)
    second = IndexIVFGMM(faiss.IndexIVFFlat(q, 4, 4), q, max_lists=1)
    first.add(x)
    second.add(x[:10])
    assert (first.ntotal, second.ntotal) == (400, 10)


def test_untrained_quantizer_trained_elsewhere(blobs):
    x = blobs(400, 4)
    q = GMMQuantizer(4, 3, random_state=0, tol=1e-2)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 4, 3), q, tau=0.2)
    q.train(x)
    index.train(x)
    index.add(x)
    assert index.ntotal == 400
