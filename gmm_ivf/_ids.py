"""The set of stored ids, compact where ids are consecutive."""

from typing import Any

import numpy as np

# The largest id kept free, so that the end of an interval is an int64 as well.
ID_LIMIT = np.iinfo(np.int64).max


def check_ids(ids: Any, n: int, name: str = "ids") -> np.ndarray:
    """Return n ids as int64, or raise ValueError naming the offending one."""
    ids = np.asarray(ids)
    if ids.shape != (n,):
        raise ValueError(f"{name} must have shape ({n},), one per row of x; got {ids.shape}.")
    checked = as_int64(ids, name)
    if n and checked.min() < 0:
        raise ValueError(
            f"{name} must not be negative (FAISS's -1 means none); got {checked.min()}."
        )
    if n and checked.max() == ID_LIMIT:
        raise ValueError(f"{name} must be below 2**63 - 1; got {checked.max()}.")
    ordered = np.sort(checked)
    twice = ordered[:-1][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise ValueError(f"{name} must be unique within one call; {twice[0]} comes more than once.")
    return checked


def as_int64(ids: np.ndarray, name: str) -> np.ndarray:
    """Return integers as C-contiguous int64, or raise ValueError when that is not exact."""
    if ids.size == 0:
        return np.zeros(ids.shape, np.int64)
    if ids.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers; got dtype {ids.dtype}: cast them yourself.")
    if ids.max() > ID_LIMIT:
        raise ValueError(f"{name} must fit int64; got {ids.max()}.")
    return np.ascontiguousarray(ids, dtype=np.int64)


def unique_ids(ids: Any, name: str) -> np.ndarray:
    """Sorted unique int64 ids of an array-like of integers, whatever its shape."""
    return np.unique(as_int64(np.ravel(np.asarray(ids)), name))


class IdSet:
    """A set of non-negative int64 ids, kept as half-open intervals.

    A million consecutive ids are one interval; scattered ids cost 16 bytes each. Intervals lie in
    a few runs, each sorted and more than twice the next, so that adding one id to many does not
    rewrite them all.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[np.ndarray, np.ndarray]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Memory of the intervals."""
        return sum(starts.nbytes + ends.nbytes for starts, ends in self._runs)

    @property
    def intervals(self) -> tuple[np.ndarray, np.ndarray]:
        """Sorted, disjoint half-open intervals that make up the set: (starts, ends), int64."""
        if not self._runs:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        starts, ends = (np.sort(np.concatenate(part)) for part in zip(*self._runs, strict=True))
        return _joined(starts, ends)

    @classmethod
    def of_intervals(cls, starts: np.ndarray, ends: np.ndarray) -> "IdSet":
        """The set that `intervals` described.

        Raises
        ------
        ValueError
            When they are none: not int64, negative, empty, unsorted or overlapping.
        """
        good = all(a.ndim == 1 and a.dtype == np.int64 for a in (starts, ends))
        good = good and len(starts) == len(ends) and bool((starts < ends).all())
        if not good or (starts[:1] < 0).any() or (starts[1:] < ends[:-1]).any():
            raise ValueError("the intervals of ids must be sorted, disjoint and not negative.")
        ids = cls()
        if starts.size:
            ids._runs = [_joined(starts.copy(), ends.copy())]
            ids._count = int((ends - starts).sum())
        return ids

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """Which of the ids are in the set, a bool array of their shape."""
        found = np.zeros(ids.shape, bool)
        for starts, ends in self._runs:
            place = np.searchsorted(starts, ids, side="right") - 1
            found |= (place >= 0) & (ids < ends[place])
        return found

    def joined(self, other: "IdSet") -> "IdSet":
        """The ids of both sets, which share none."""
        pairs = zip(self.intervals, other.intervals, strict=True)
        return IdSet.of_intervals(*(np.sort(np.concatenate(pair)) for pair in pairs))

    def first_shared(self, other: "IdSet") -> int | None:
        """The smallest id that both sets hold, or None."""
        starts, low = self.intervals[0], other.intervals[0]
        # Intervals that overlap do so where one of the two begins.
        shared = np.concatenate([starts[other.contains(starts)], low[self.contains(low)]])
        return int(shared.min()) if shared.size else None

    def add(self, ids: np.ndarray) -> None:
        """Put in ids that are unique and not yet there."""
        if not ids.size:
            return
        starts = np.sort(ids)
        self._count += ids.size
        self._runs.append(_joined(starts, starts + 1))
        while len(self._runs) > 1 and len(self._runs[-2][0]) <= 2 * len(self._runs[-1][0]):
            last, before = self._runs.pop(), self._runs.pop()
            pairs = zip(before, last, strict=True)
            self._runs.append(_joined(*(np.sort(np.concatenate(pair)) for pair in pairs)))

    def discard(self, ids: np.ndarray) -> None:
        """Take out unique ids that are in the set."""
        for i, (starts, ends) in enumerate(self._runs):
            place = np.searchsorted(starts, ids, side="right") - 1
            points = ids[(place >= 0) & (ids < ends[place])]
            # A point cuts its interval in two: before it and after it.
            starts = np.sort(np.concatenate([starts, points + 1]))
            ends = np.sort(np.concatenate([ends, points]))
            keep = starts < ends
            self._runs[i] = starts[keep], ends[keep]
            self._count -= points.size
        self._runs = [run for run in self._runs if run[0].size]


def _joined(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted disjoint intervals with those that touch made one."""
    gap = starts[1:] != ends[:-1]
    return starts[np.concatenate([[True], gap])], ends[np.concatenate([gap, [True]])]
