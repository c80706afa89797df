"""Entries of a wrapped IVF index in which one id may lie in several lists."""

from typing import Any

import numpy as np

from gmm_ivf._checks import check_no_direct_map
from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._decoding import EntryMap, check_in_memory, list_ids, template_bytes
from gmm_ivf._faiss import ID_BYTES, faiss, raw
from gmm_ivf._ids import ID_LIMIT, IdSet, check_ids, unique_ids
from gmm_ivf._interrupts import uninterrupted
from gmm_ivf._layout import checked_int
from gmm_ivf.assignment import check_lists

_LIST_HEADER_BYTES = 48  # two std::vector headers, codes and ids, of FAISS's ArrayInvertedLists


class CopyStore:
    """Adds, removes and counts entries; the only writer to the wrapped index.

    FAISS counts copies as vectors, numbers new vectors by that count, and writes to whatever list
    it is told: counting, numbering and checking are done here.

    Parameters
    ----------
    ivf : faiss.IndexIVF
        Empty.

    Attributes
    ----------
    sizes : ndarray of shape (nlist,), int64
        Entries per list.
    max_copies : int
        Most lists that any vector was put in since the store was last empty by `clear`.
    next_id : int
        The id after the largest one ever stored.
    """

    def __init__(self, ivf: Any):
        self._ivf = ivf
        self._forget()

    def _forget(self) -> None:
        self._ids = IdSet()
        self._places: EntryMap | None = None
        self.next_id = 0
        self.sizes = np.zeros(self._ivf.nlist, np.int64)
        self.max_copies = 1

    def __len__(self) -> int:
        """Number of vectors; copies do not count."""
        return len(self._ids)

    @property
    def entries(self) -> int:
        """Number of entries, copies included."""
        return int(self.sizes.sum())

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """Which of the ids are stored, a bool array of their shape."""
        return self._ids.contains(ids)

    def new_ids(self, ids: Any, n: int) -> np.ndarray:
        """Return n ids that may be stored: those given, or the next ones.

        Raises
        ------
        ValueError
            Naming an id that is negative, no int64, repeated or stored already.
        """
        if ids is None:
            if self.next_id > ID_LIMIT - n:
                raise ValueError(f"no {n} ids are left above {self.next_id - 1}: give ids.")
            return np.arange(self.next_id, self.next_id + n)
        ids = check_ids(ids, n)
        known = self._ids.contains(ids)
        if known.any():
            raise ValueError(
                f"ids must be new; {ids[known.argmax()]} is stored already: remove_ids it first."
            )
        return ids

    def append(
        self, rows: np.ndarray, ids: np.ndarray, owner: np.ndarray, lists: np.ndarray
    ) -> None:
        """Append entries: row ``owner[i]``, under the id of that row, to list ``lists[i]``.

        Parameters
        ----------
        rows : ndarray of shape (n, d), float32
        ids : ndarray of shape (n,), int64
            From `new_ids`.
        owner, lists : ndarray of shape (entries,), int64
            A row without an entry is not stored.

        Raises
        ------
        ValueError
            When a list does not exist; nothing is added then.
        """
        check_lists(lists, self._ivf.nlist)
        copies = np.bincount(owner, minlength=len(rows))
        lists = np.ascontiguousarray(lists, np.int64)
        vectors, keys = rows[owner], ids[owner]
        with uninterrupted():
            self._places = None
            self._ivf.add_core(len(owner), raw(vectors), raw(keys), raw(lists))
            self.sizes += np.bincount(lists, minlength=self._ivf.nlist)
            self._ids.add(ids[copies > 0])
            self.next_id = max(self.next_id, int(ids.max()) + 1)
            self.max_copies = max(self.max_copies, int(copies.max()))

    def undo(self, ids: np.ndarray, next_id: int) -> None:
        """Take out whatever is stored of these ids, counted or not; see `Layout.undo`."""
        with uninterrupted():
            self._ivf.remove_ids(ids)
            self.next_id = next_id
            # FAISS counts what it adds after adding it, and so do we: numbers may be false.
            self._take_stock()

    def remove(self, sel: Any) -> int:
        """Remove all copies of the ids selected; return how many vectors went."""
        before = len(self)
        try:
            with uninterrupted():
                self._remove(sel)
        except MemoryError:
            self._take_stock()
            raise
        return before - len(self)

    def _remove(self, sel: Any) -> None:
        if isinstance(sel, faiss.IDSelector):
            self._ivf.remove_ids(sel)
            self._ids = self._held_ids()
        else:
            ids = unique_ids(sel, "sel")
            ids = ids[self._ids.contains(ids)]
            if ids.size:
                self._ivf.remove_ids(ids)
                self._ids.discard(ids)
        self._recount()

    def _take_stock(self) -> None:
        """Count anew what the lists hold, after an interruption that left it open."""
        self._ivf.ntotal = self._ivf.invlists.compute_ntotal()
        self._ids = self._held_ids()
        self._recount()

    def _recount(self) -> None:
        lists = self._ivf.invlists
        self._places = None
        self.sizes = np.array([lists.list_size(i) for i in range(self._ivf.nlist)], np.int64)

    def _held_ids(self) -> IdSet:
        """The ids that the lists of the wrapped index really hold."""
        ids = IdSet()
        held = [list_ids(self._ivf, number) for number in range(self._ivf.nlist)]
        ids.add(np.unique(np.concatenate(held)))
        return ids

    def check_mergeable(self, other: "CopyStore") -> None:
        """Raise ValueError when codec, centroids or ids do not allow `merge`."""
        mine, theirs = template_bytes(self._ivf), template_bytes(other._ivf)
        if type(self._ivf) is not type(other._ivf) or not np.array_equal(mine, theirs):
            raise ValueError(
                "other must have the same centroids and the same trained codec, bit for bit: "
                f"{type(other._ivf).__name__} does not go into this {type(self._ivf).__name__}. "
                "Train one index, copy.copy it while it is empty, and fill the copies."
            )
        check_in_memory(self._ivf)
        check_in_memory(other._ivf)
        shared = self._ids.first_shared(other._ids)
        if shared is not None:
            raise ValueError(f"ids must be in one index only; {shared} is in both.")

    def merge(self, other: "CopyStore") -> None:
        """Take over all entries of another store, which is empty then; see `check_mergeable`."""
        # Memory is asked for first: once the entries have moved there is no way back.
        ids = self._ids.joined(other._ids)
        with uninterrupted():
            self._places = None
            self._ivf.merge_from(other._ivf, 0)
            self._ids = ids
            self.next_id = max(self.next_id, other.next_id)
            self.max_copies = max(self.max_copies, other.max_copies)
            self._recount()
            other.clear()

    def decode(self, ids: np.ndarray, ranker: CoarseRanker) -> np.ndarray:
        """Decode the vectors of stored ids; see `EntryMap.decode`."""
        if self._places is None:
            self._places = EntryMap(self._ivf)
        return self._places.decode(ids, ranker)

    def clear(self) -> None:
        """Remove everything; ids start at 0 again."""
        with uninterrupted():
            self._ivf.reset()
            self._forget()

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Settings and arrays; see `Layout.state`."""
        self.check_unchanged()
        starts, ends = self._ids.intervals
        settings = {"next_id": self.next_id, "max_copies": self.max_copies}
        return settings, {"id_starts": starts, "id_ends": ends}

    def restore(self, settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """The inverse of `state`, over an index that holds the entries already."""
        ids = IdSet.of_intervals(arrays["id_starts"], arrays["id_ends"])
        last = int(arrays["id_ends"].max(initial=0))
        next_id = checked_int(settings, "next_id", last, ID_LIMIT)
        max_copies = checked_int(settings, "max_copies", 1, self._ivf.nlist)
        self._recount()
        if not len(ids) <= self.entries == self._ivf.ntotal <= max_copies * len(ids):
            raise ValueError(
                f"{len(ids)} ids of up to {max_copies} entries do not go with an index of "
                f"{self._ivf.ntotal} entries, {self.entries} of them in its lists."
            )
        self._ids, self.next_id, self.max_copies = ids, next_id, max_copies

    def check_unchanged(self) -> None:
        """Raise RuntimeError when somebody else added to the wrapped index or removed from it."""
        if self._ivf.ntotal != self.entries:
            raise RuntimeError(
                "the wrapped index was changed behind the adapter's back: it holds "
                f"{self._ivf.ntotal} entries where IndexIVFGMM put {self.entries}. Call reset() "
                "and add the vectors again."
            )
        check_no_direct_map(self._ivf)

    def stats(self, table_bytes: int) -> dict[str, Any]:
        """Storage and balance; `table_bytes` is what the means take. See `IndexIVFGMM.stats`."""
        sizes, entries, vectors = self.sizes.copy(), self.entries, len(self)
        used = entries * (self._ivf.code_size + ID_BYTES) + len(sizes) * _LIST_HEADER_BYTES
        used += self._ids.nbytes + table_bytes
        return {
            "ntotal": vectors,
            "entries": entries,
            "entries_per_vector": entries / vectors if vectors else np.nan,
            "max_copies": self.max_copies,
            "list_sizes": sizes,
            "imbalance": len(sizes) * float(sizes @ sizes) / entries**2 if entries else np.nan,
            "max_over_mean": len(sizes) * int(sizes.max()) / entries if entries else np.nan,
            "bytes": used,
            "bytes_per_vector": used / vectors if vectors else np.nan,
        }
