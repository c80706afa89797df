"""Entries of a wrapped IVF index, one per vector, those of a cell next to each other."""

from typing import Any

import numpy as np

from gmm_ivf._cell_table import Occupied
from gmm_ivf._decoding import list_ids
from gmm_ivf._faiss import faiss
from gmm_ivf._store import CopyStore


class CellStore(CopyStore):
    """A vector lies in the list of its nearest mean, and there among those of its cell.

    So the index is a stock FAISS index of hard assignment, whose lists have an order. New entries
    go to the ends of the lists; `arrange` puts them where they belong.

    Parameters
    ----------
    ivf : faiss.IndexIVF
        Empty.

    Attributes
    ----------
    version : int
        Changes whenever entries come, go or move.
    """

    def _forget(self) -> None:
        super()._forget()
        # Cells of the entries of a list, in the order of the list, as far as they were arranged.
        self._local = [np.empty(0, np.int32)] * self._ivf.nlist
        self._pending: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._unsorted: set[int] = set()
        self.version = getattr(self, "version", 0) + 1

    def put(self, rows: np.ndarray, ids: np.ndarray, own: np.ndarray, local: np.ndarray) -> None:
        """Append rows under ids to lists `own`, for cells `local` in those."""
        self.version += 1
        self._pending.append((ids, own, local))
        self.append(rows, ids, np.arange(len(ids)), own)

    def arrange(self) -> None:
        """Sort the entries of each list by cell, new ones after older ones of the same cell."""
        # Sorting goes by addresses and our own sizes: lists that shrank would be written beyond.
        self.check_unchanged()
        if self._pending:
            _, own, local = (np.concatenate(part) for part in zip(*self._pending, strict=True))
            order = np.argsort(own, kind="stable")
            numbers, starts = np.unique(own[order], return_index=True)
            parts = np.split(local[order], starts[1:])
            for number, part in zip(numbers.tolist(), parts, strict=True):
                self._local[number] = np.concatenate([self._local[number], part])
                self._unsorted.add(number)
            self._pending = []
            self._places = None
        for number in sorted(self._unsorted):
            self._sort(number)
            self._unsorted.discard(number)

    def _sort(self, number: int) -> None:
        from gmm_ivf._cell_assign import reorder

        local = self._local[number]
        if (local[1:] >= local[:-1]).all():
            return
        lists = faiss.downcast_InvertedLists(self._ivf.invlists)
        size, width = len(local), self._ivf.code_size
        codes = faiss.rev_swig_ptr(lists.get_codes(number), size * width).reshape(size, width)
        ids = faiss.rev_swig_ptr(lists.get_ids(number), size)
        reorder(np.argsort(local, kind="stable"), codes, ids, local)

    def occupied(self, per_component: int) -> Occupied:
        """The cells that hold entries; call `arrange` before."""
        base = np.arange(self._ivf.nlist) * per_component
        sizes = [len(local) for local in self._local]
        return Occupied.of_sorted(
            np.concatenate(self._local) + np.repeat(base, sizes), per_component
        )

    def undo(self, ids: np.ndarray, next_id: int) -> None:
        """See `CopyStore.undo`."""
        known = self._known()
        super().undo(ids, next_id)
        self._realign(*known)

    def remove(self, sel: Any) -> int:
        """See `CopyStore.remove`."""
        known = self._known()
        gone = -1
        try:
            gone = super().remove(sel)
        finally:
            # Also after one that ran short of memory: sorting would go past the ends of lists.
            if gone:
                self._realign(*known)
        return gone

    def merge(self, other: "CopyStore") -> None:
        """See `CopyStore.merge`; both are arranged."""
        assert isinstance(other, CellStore)
        theirs = other._local
        super().merge(other)
        pairs = zip(self._local, theirs, strict=True)
        self._local = [np.concatenate(pair) for pair in pairs]
        self._unsorted = set(range(self._ivf.nlist))
        self.version += 1

    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        """All ids, and their cells: FAISS moves others where it removes entries."""
        ids = [
            list_ids(self._ivf, number)[: len(local)] for number, local in enumerate(self._local)
        ]
        ids += [part[0] for part in self._pending]
        return np.concatenate(ids), np.concatenate(self._local + [p[2] for p in self._pending])

    def _realign(self, ids: np.ndarray, local: np.ndarray) -> None:
        """Find out again which entry lies where, from ids that may be more than are left."""
        self.version += 1
        order = np.argsort(ids, kind="stable")
        ids, local = ids[order], local[order]
        self._pending = []
        for number in range(self._ivf.nlist):
            self._local[number] = local[np.searchsorted(ids, list_ids(self._ivf, number))]
            self._unsorted.add(number)

    @property
    def nbytes_of_cells(self) -> int:
        """Memory of what is kept for each entry beside its code and id."""
        return sum(local.nbytes for local in self._local)

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """See `CopyStore.state`; call `arrange` before."""
        settings, arrays = super().state()
        return settings, {**arrays, "local": np.concatenate(self._local)}

    def restore(self, settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """See `CopyStore.restore`."""
        super().restore(settings, arrays)
        local = np.asarray(arrays["local"])
        if local.dtype != np.int32 or local.shape != (self.entries,) or (local < 0).any():
            raise ValueError(
                f"local must be {self.entries} non-negative int32; got {local.shape} {local.dtype}."
            )
        parts = np.split(local.copy(), np.cumsum(self.sizes)[:-1])
        if any((part[1:] < part[:-1]).any() for part in parts):
            raise ValueError("local must be ascending in each list.")
        self._local, self._pending, self._unsorted = parts, [], set()
        self.version += 1
