"""Long random sequences of changes: what is found is what a dict of vectors says is there."""

import copy

import faiss
import numpy as np
import pytest

NLIST, D = 6, 8
CASES = {
    "flat": ("Flat", {"max_lists": 3, "replication": 1.8}),
    "hard": ("Flat", {"max_lists": 1}),
    "top2": ("Flat", {"rule": "top2"}),
    "codes": ("SQ8", {"max_lists": 4, "replication": 2.2}),
    "originals": ("PQ", {"refine": "flat", "k_factor": 1000}),
    "fast": ("PQ", {"fast_scan": True, "max_lists": 3, "replication": 1.8}),
    "cells": ("Flat", {"layout": "cells"}),
    "cells originals": ("PQ", {"layout": "cells", "refine": "flat", "k_factor": 1000}),
    "fast originals": ("RaBitQ", {"fast_scan": True, "refine": "flat", "k_factor": 1000}),
}
EXACT = {"flat", "hard", "top2", "originals", "fast originals", "cells", "cells originals"}


class Twin:
    """An index, and a dict that should hold the same."""

    def __init__(self, index, seed):
        self.index, self.held, self.next_id = index, {}, 0
        self.rng = np.random.default_rng(seed)
        self.index.nprobe = NLIST

    def rows(self):
        return self.rng.normal(size=(self.rng.integers(0, 40), D)).astype("f4")

    def some(self):
        known = np.array(sorted(self.held), np.int64)
        return self.rng.permutation(known)[: self.rng.integers(0, 30)]

    def _put(self, ids, rows):
        self.held.update(zip(np.asarray(ids).tolist(), rows, strict=True))
        self.next_id = max([self.next_id, *(int(i) + 1 for i in ids)])

    def add(self):
        rows = self.rows()
        self.index.add(rows)
        self._put(np.arange(self.next_id, self.next_id + len(rows)), rows)

    def add_with_ids(self):
        rows = self.rows()
        free = np.setdiff1d(np.arange(self.next_id + 60), list(self.held))
        ids = self.rng.permutation(free)[: len(rows)]
        self.index.add_with_ids(rows[: len(ids)], ids)
        self._put(ids, rows[: len(ids)])

    def remove(self):
        gone = self.some()
        more = np.concatenate([gone, self.rng.integers(-5, 2 * self.next_id + 1, 5)])
        there = [i for i in set(more.tolist()) if i in self.held]
        assert self.index.remove_ids(more) == len(there)
        for key in there:
            del self.held[key]

    def remove_range(self):
        low = int(self.rng.integers(0, self.next_id + 1))
        there = [i for i in self.held if low <= i < low + 10]
        assert self.index.remove_ids(faiss.IDSelectorRange(low, low + 10)) == len(there)
        for key in there:
            del self.held[key]

    def update(self):
        keys = self.some()
        rows = self.rng.normal(size=(len(keys), D)).astype("f4")
        self.index.update_vectors(keys, rows)
        self._put(keys, rows)

    def refused(self):
        rows = self.rng.normal(size=(3, D)).astype("f4")
        taken = next(iter(self.held), None)
        for ids in ([-1, 5, 6], [taken, self.next_id, self.next_id + 1], [8, 8, 9]):
            if ids[0] is not None:
                with pytest.raises(ValueError, match="ids must"):
                    self.index.add_with_ids(rows, ids)
        rows[1, 2] = np.nan
        with pytest.raises(ValueError, match="row 1 holds NaN"):
            self.index.add(rows)

    def merge(self):
        other = copy.copy(self.index)
        other.reset()
        rows = self.rows()
        ids = np.arange(self.next_id, self.next_id + len(rows))
        other.add_with_ids(rows, ids)
        self.index.merge_from(other)
        assert other.ntotal == 0
        self._put(ids, rows)

    def replace(self):
        self.index = copy.deepcopy(self.index)

    def check(self, exact):
        n = len(self.held)
        keys = np.array(sorted(self.held), np.int64)
        stats = self.index.stats()
        assert self.index.ntotal == stats["ntotal"] == n
        assert n <= stats["entries"] == self.index.index.ntotal == stats["list_sizes"].sum()
        queries = self.rng.normal(size=(4, D)).astype("f4")
        distances, labels = self.index.search(queries, n + 3)
        assert (labels[:, n:] == -1).all()
        np.testing.assert_array_equal(np.sort(labels[:, :n], axis=1), np.tile(keys, (4, 1)))
        if exact and n:
            vectors = np.stack([self.held[i] for i in keys.tolist()])
            want = np.sort(((queries[:, None] - vectors) ** 2).sum(axis=2), axis=1)
            np.testing.assert_allclose(distances[:, :n], want, rtol=1e-4, atol=1e-4)
            if self.index._originals is not None or type(self.index.index).__name__[8:] == "Flat":
                np.testing.assert_array_equal(self.index.reconstruct_batch(keys), vectors)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_random_use(blobs, soft, case, seed):
    name, options = CASES[case]
    twin = Twin(soft(blobs(400, D, seed), NLIST, name, **options), seed)
    steps = [
        twin.add, twin.add_with_ids, twin.add, twin.remove, twin.remove_range, twin.update,
        twin.refused, twin.merge, twin.replace,
    ]  # fmt: skip
    for number in range(60):
        steps[twin.rng.integers(len(steps))]()
        if number % 3 == 0:
            twin.check(case in EXACT)
    twin.index.reset()
    twin.held, twin.next_id = {}, 0
    twin.add()
    twin.check(case in EXACT)
