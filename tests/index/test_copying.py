"""Copies, pickles and states of IndexIVFGMM: equal at once, independent afterwards."""

import copy
import json
import pickle

import faiss
import numpy as np
import pytest

from gmm_ivf import GMMQuantizer, IndexIVFGMM
from gmm_ivf.rules import Air, Rule

CASES = {
    "flat": ("Flat", {}),
    "tau": ("SQ8", {"tau": 0.1, "max_lists": 4}),
    "hard": ("PQ", {"max_lists": 1}),
    "rule": ("Flat", {"rule": Air(lambda_=0.3, strict=True)}),
    "fast": ("PQ", {"fast_scan": True}),
    "refine": ("RaBitQ", {"refine": "flat", "k_factor": 3}),
}


@pytest.fixture(params=CASES)
def filled(request, blobs, soft):
    """An index of 500 vectors, some gone again, and the queries to ask it."""
    name, options = CASES[request.param]
    x = blobs(500, 16)
    index = soft(x, 5, name, **options)
    index.add(x)
    index.remove_ids(np.arange(0, 500, 3))
    index.add_with_ids(x[:3], [10**12, 7 * 10**11, 9])
    index.nprobe = 3
    if "fast_scan" not in options:
        index.index.max_codes = 150
    return index, x[:40]


def by_json(index):
    settings, arrays = index.state()
    wrapped = faiss.deserialize_index(faiss.serialize_index(index.index))
    wrapped.max_codes = index.index.max_codes  # which FAISS leaves out
    q = copy.copy(index.quantizer)
    return IndexIVFGMM.from_state(wrapped, q, json.loads(json.dumps(settings)), arrays)


@pytest.mark.parametrize(
    "twin", [copy.copy, copy.deepcopy, lambda i: pickle.loads(pickle.dumps(i)), by_json],
    ids=["copy", "deepcopy", "pickle", "state"],
)  # fmt: skip
def test_equal_and_independent(filled, twin):
    index, queries = filled
    other = twin(index)
    want = index.search(queries, 7)
    for mine, theirs in zip(want, other.search(queries, 7), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert repr(other) == repr(index)
    before = index.stats()["list_sizes"]
    np.testing.assert_array_equal(other.stats()["list_sizes"], before)
    other.add(queries)
    assert other.remove_ids([10**12]) == 1
    with pytest.raises(ValueError, match="9 is stored already"):
        other.add_with_ids(queries[:1], [9])
    np.testing.assert_array_equal(index.stats()["list_sizes"], before)
    np.testing.assert_array_equal(index.search(queries, 7)[1], want[1])
    index.add(queries)  # ids go on from the largest one, in both
    assert 10**12 + len(queries) in index.search(queries[-1:], 600)[1]
    assert 10**12 + len(queries) in other.search(queries[-1:], 600)[1]


def test_untrained_and_empty(blobs, trained, codec):
    x = blobs(300, 16)
    q = trained(x, 3)
    index = IndexIVFGMM(codec("PQ", q), q)
    other = copy.copy(index)
    assert not other.is_trained
    other.train(x)
    other.add(x)
    assert (other.ntotal, index.is_trained, index.ntotal) == (300, False, 0)


def test_replication_of_more_lists_than_there_are(blobs, soft):
    x = blobs(100, 8)
    with pytest.warns(UserWarning, match="replication=1.5 was asked for and 1.00"):
        index = soft(x, 1, replication=1.5)
    index.add(x)
    for other in (copy.copy(index), by_json(index)):
        np.testing.assert_array_equal(other.search(x[:5], 3)[1], index.search(x[:5], 3)[1])


def test_a_copy_outlives_the_original(in_subprocess):
    code = """
import copy, gc
import faiss
import numpy as np
from gmm_ivf import GMMQuantizer, IndexIVFGMM
x = np.random.default_rng(0).normal(size=(500, 8)).astype("f4")
def build():
    q = GMMQuantizer(8, 6, random_state=0)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 8, 6), q)
    index.train(x)
    index.add(x)
    return copy.deepcopy(index)
twin = build()
gc.collect()
waste = [np.full(50, np.nan, "f4") for _ in range(10000)]
for _ in range(200):
    copy.copy(twin)
print(twin.search(x[:3], 1)[1].ravel().tolist())
"""
    assert in_subprocess(code) == "[0, 1, 2]\n"


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy])
def test_copies_keep_type_and_description(blobs, twin):
    class Mine(IndexIVFGMM):
        pass

    x = blobs(400, 16)
    index = faiss.index_factory(16, "OPQ4_8,IVF4,PQ4x4")
    q = GMMQuantizer(8, 4, random_state=0)
    q.attach(index)
    mine = Mine(index, q)
    mine.train(x)
    other = twin(twin(mine))
    assert type(other) is Mine
    assert other.description == mine.description == "OPQ4_8,GMM4x2,PQ4x4"


class Own(Rule):
    candidates = 2

    def choose(self, near, max_lists):
        return near.lists >= 0


def test_a_rule_of_the_users_own_cannot_be_saved(blobs, soft):
    index = soft(blobs(300, 4), 3, rule=Own())
    with pytest.raises(ValueError, match=r"cannot be saved or copied: only air, soar"):
        copy.copy(index)


def damaged(state, change):
    settings, arrays = json.loads(json.dumps(state[0])), dict(state[1])
    change(settings, arrays)
    return settings, arrays


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, a: s.update(layout="rows"), "layout must be"),
        (lambda s, a: s.update(refine="x"), "refine must be"),
        (lambda s, a: s["state"].update(next_id=3), "next_id must be an integer in"),
        (lambda s, a: s["state"].update(next_id=True), "next_id must be"),
        (lambda s, a: s["state"].update(max_copies=0), "max_copies must be"),
        (lambda s, a: s["state"].update(max_copies=1), "do not go with an index"),
        (lambda s, a: s["state"].update(log_tau=(0.5).hex()), "log_tau must be at most 0"),
        (lambda s, a: s["state"].update(log_tau="nan"), "log_tau must be at most 0"),
        (lambda s, a: s["options"].update(rule={"name": "best"}), "rule must be one of"),
        (lambda s, a: s["options"].update(rule={"name": "air", "x": 1}), "rule must be one of"),
        (lambda s, a: a.update(id_ends=a["id_ends"] + 1), "next_id must be"),
        (lambda s, a: a.update(id_ends=a["id_starts"]), "sorted, disjoint"),
        (lambda s, a: a.update(id_ends=a["id_ends"][:-1]), "sorted, disjoint"),
        (lambda s, a: a.update(id_starts=a["id_starts"].astype("f8")), "sorted, disjoint"),
        (lambda s, a: a.update(id_starts=a["id_starts"][:0], id_ends=a["id_ends"][:0]), "0 ids of"),
        (lambda s, a: a.update(originals=a["originals"][1:]), "originals must be float32 of shape"),
        (lambda s, a: a.update(originals=a["originals"].astype("f8")), "originals must be float32"),
        (lambda s, a: a.update(original_ids=a["original_ids"] * 0), "ids of the originals"),
    ],
)
def test_states_that_do_not_fit_are_refused(blobs, soft, change, message):
    x = blobs(300, 8)
    index = soft(x, 4, refine="flat")
    index.add(x[:200])
    index.remove_ids([5, 6])
    wrapped = faiss.deserialize_index(faiss.serialize_index(index.index))
    with pytest.raises(ValueError, match=message):
        settings, arrays = damaged(index.state(), change)
        IndexIVFGMM.from_state(wrapped, index.quantizer, settings, arrays)


def test_other_centroids_are_refused(blobs, soft, trained):
    x = blobs(400, 8)
    index = soft(x, 4)
    index.add(x)
    wrapped = faiss.deserialize_index(faiss.serialize_index(index.index))
    for q in (trained(x[::-1], 4, random_state=1), trained(x, 3)):
        with pytest.raises(ValueError, match="other centroids"):
            IndexIVFGMM.from_state(wrapped, q, *index.state())
    index.quantizer.adopt(wrapped)
    again = IndexIVFGMM.from_state(wrapped, index.quantizer, *index.state())
    assert again.search(x[:1], 1)[1] == 0
