"""Adding to an `IndexIVFGMM` and removing from it."""

from typing import Any

import numpy as np

from gmm_ivf._adapter import Adapter
from gmm_ivf._ids import as_int64, check_ids
from gmm_ivf._interrupts import uninterrupted
from gmm_ivf._vectors import block, check_rows, spans
from gmm_ivf.assignment import pairs_of_table


class Mutating(Adapter):
    """The methods of a FAISS index that change what is stored."""

    def add(self, x: Any) -> None:
        """Add vectors under the next free ids.

        Parameters
        ----------
        x : array-like of shape (n, d)
            numpy array or memmap of any real dtype, torch tensor, or HDF5 dataset. Ids go on from
            the largest id ever stored; one that was removed is not given again.

        Raises
        ------
        ValueError
            Naming a row that holds NaN or infinity; nothing is added then.
        RuntimeError
            Before training, or when the wrapped index was changed directly.

        Notes
        -----
        An addition that fails or is interrupted half-way, by KeyboardInterrupt or for want of
        memory, is taken back as a whole; so is one by the methods below.
        """
        self._add(x, None, None)

    def add_with_ids(self, x: Any, ids: Any) -> None:
        """Add vectors under given ids.

        Parameters
        ----------
        x : array-like of shape (n, d)
        ids : array-like of shape (n,), integers
            Non-negative, unique, and not in the index yet.

        Raises
        ------
        ValueError
            Naming the id, or a row that is not finite; nothing is added then.
        """
        self._add(x, ids, None)

    def add_preassigned(self, x: Any, lists: Any, ids: Any = None) -> None:
        """Add vectors to lists that the caller chose.

        Parameters
        ----------
        x : array-like of shape (n, d)
        lists : array-like of shape (n, m), integers
            Lists of each vector, -1 for none; a row of -1 is not stored, nor counted.
        ids : array-like of shape (n,), integers, default=None

        Raises
        ------
        ValueError
            When a list is outside [-1, nlist) or comes twice in a row; nothing is added then.
        """
        lists = np.asarray(lists)
        if lists.ndim != 2 or lists.shape[0] != len(x):
            raise ValueError(f"lists must have shape ({len(x)}, m); got {lists.shape}.")
        lists = as_int64(lists, "lists")
        pairs_of_table(lists, self.nlist)
        self._add(x, ids, lists)

    def _add(self, x: Any, ids: Any, lists: np.ndarray | None) -> None:
        layout = self._ready()
        x = self._matrix(x)
        ids = layout.new_ids(ids, x.shape[0])
        check_rows(x, "x")
        # All checks are done; what can still fail is memory, and the patience of the user.
        next_id, stop = layout.next_id, 0
        try:
            for where in spans(*x.shape):
                stop = where.stop
                chosen = None if lists is None else lists[where]
                rows = block(x, "x", where)
                inner = self._inner_checked(rows, where.start)
                self._add_block(rows, inner, ids[where], chosen)
        except BaseException:
            self._undo(ids[:stop], next_id)
            raise
        self.index.ntotal = self._ivf.ntotal

    def _undo(self, ids: np.ndarray, next_id: int) -> None:
        with uninterrupted():
            self._layout.undo(ids, next_id)
            self._forget_removed()

    def _add_block(
        self, rows: np.ndarray, inner: np.ndarray, ids: np.ndarray, lists: np.ndarray | None
    ) -> None:
        self._layout.add(inner, ids, lists)
        if self._originals is not None:
            stored = self._layout.contains(ids)
            self._originals.add(rows[stored], ids[stored])

    def remove_ids(self, sel: Any) -> int:
        """Remove vectors with all their copies.

        Parameters
        ----------
        sel : array-like of integers, or faiss.IDSelector
            Ids that are not stored are passed over.

        Returns
        -------
        int
            Vectors removed.
        """
        self._layout.check_unchanged()
        with uninterrupted():
            try:
                return self._layout.remove(sel)
            finally:
                # Also what is gone when memory ran out half-way.
                self._forget_removed()

    def update_vectors(self, keys: Any, x: Any) -> None:
        """Give stored ids other vectors.

        Parameters
        ----------
        keys : array-like of shape (n,), integers
            Ids that are stored, each once.
        x : array-like of shape (n, d)

        Raises
        ------
        ValueError
            Naming an id that is not stored, or a row that is not finite; nothing is changed then.

        Notes
        -----
        Should it be interrupted, the exception has a note that says which ids have which vectors.
        """
        layout = self._ready()
        x = self._matrix(x)
        keys = check_ids(keys, x.shape[0], "keys")
        unknown = ~layout.contains(keys)
        if unknown.any():
            raise ValueError(f"keys must be stored; {keys[unknown.argmax()]} is not: add it.")
        check_rows(x, "x")
        done = 0
        try:
            for where in spans(*x.shape):
                rows = block(x, "x", where)
                inner = self._inner_checked(rows, where.start)
                with uninterrupted():
                    self._replace(keys[where], rows, inner)
                    done = where.stop
        except BaseException as error:
            lost = int((~layout.contains(keys)).sum())
            error.add_note(
                f"update_vectors was stopped: keys[:{done}] have their new vectors, the others are "
                f"as before{f', but keys[{done}:{done + lost}] were removed' * bool(lost)}."
            )
            raise
        self.index.ntotal = self._ivf.ntotal

    def _replace(self, keys: np.ndarray, rows: np.ndarray, inner: np.ndarray) -> None:
        next_id = self._layout.next_id
        self.remove_ids(keys)
        try:
            self._add_block(rows, inner, keys, None)
        except BaseException:
            self._undo(keys, next_id)
            raise

    def merge_from(self, other: Any, add_id: int = 0) -> None:
        """Take over the vectors of another index, which is empty then.

        Parameters
        ----------
        other : IndexIVFGMM
            With the same centroids and the same trained codec: a copy of this one made before
            either was filled, say. Thresholds and rules may differ.
        add_id : int, default=0
            As in FAISS; only 0, since ids have to be unique already.

        Raises
        ------
        ValueError
            Saying what differs, or naming an id that is in both; nothing is changed then.
        """
        if not isinstance(other, Mutating) or other is self:
            raise ValueError(f"other must be another IndexIVFGMM; got {type(other).__name__}.")
        if add_id != 0:
            raise ValueError(f"add_id must be 0, so that ids stay what they are; got {add_id!r}.")
        if (self._originals is None) != (other._originals is None):
            raise ValueError("other must keep its originals (refine=) if and only if this does.")
        layout, theirs = self._ready(), other._ready()
        if self._chain is not None and not self._chain.equals(other._chain):
            raise ValueError("other must apply the same transforms before its lists.")
        layout.check_mergeable(theirs)
        with uninterrupted():
            try:
                # First what takes memory; those without an entry are forgotten again.
                if self._originals is not None and other._originals is not None:
                    self._originals.add(*other._originals.all())
                layout.merge(theirs)
            finally:
                for changed in (self, other):
                    changed._forget_removed()

    def reset(self) -> None:
        """Remove all vectors; what was trained stays, and ids start at 0 again.

        `max_codes` is lifted: `tune` chose it for the vectors that go.
        """
        with uninterrupted():
            self._layout.clear()
            self._forget_removed()
            self.max_codes = 0
        self.last_search = None
