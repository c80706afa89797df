"""Adding to an `IndexIVFGMM` and removing from it."""

from typing import Any

import numpy as np

from gmm_ivf._adapter import Adapter
from gmm_ivf._ids import as_int64
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
                self._add_block(block(x, "x", where), ids[where], chosen)
        except BaseException:
            layout.undo(ids[:stop], next_id)
            self._forget_removed()
            raise
        self.index.ntotal = self._ivf.ntotal

    def _add_block(self, rows: np.ndarray, ids: np.ndarray, lists: np.ndarray | None) -> None:
        self._layout.add(self._inner(rows), ids, lists)
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
        gone = self._layout.remove(sel)
        self._forget_removed()
        return gone

    def reset(self) -> None:
        """Remove all vectors; what was trained stays, and ids start at 0 again."""
        self._layout.clear()
        self._forget_removed()
        self.last_search = None
