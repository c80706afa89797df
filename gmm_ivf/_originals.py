"""Original vectors kept beside an index of codes, for distances that are exact."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gmm_ivf._faiss import faiss, raw, worst_distance
from gmm_ivf._interrupts import uninterrupted
from gmm_ivf._vectors import spans


class Originals:
    """Vectors in float32 under unique ids; in memory, or mapped from a file for reading only.

    Parameters
    ----------
    d : int
    metric : int
        As in faiss.
    """

    def __init__(self, d: int, metric: int):
        self._flat: Any = faiss.IndexFlat(d, metric)
        self._mapped: np.ndarray | None = None
        self._parts: list[np.ndarray] = []
        self._order: np.ndarray | None = None

    @property
    def _ids(self) -> np.ndarray:
        """Id of each row; those of many small additions are put together when they are needed."""
        if len(self._parts) != 1:
            self._parts = [np.concatenate([np.empty(0, np.int64), *self._parts])]
        return self._parts[0]

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def nbytes(self) -> int:
        """Memory of vectors and ids; those in a file count as well."""
        return len(self) * (4 * self._flat.d + 8)

    def add(self, rows: np.ndarray, ids: np.ndarray) -> None:
        """Keep rows under ids that are new."""
        self._load()
        with uninterrupted():
            self._order = None
            self._flat.add(rows)
            self._parts.append(ids)

    def keep(self, contains: Callable[[np.ndarray], np.ndarray]) -> None:
        """Forget the ids for which ``contains(ids)`` is false, and rows without an id."""
        gone = np.flatnonzero(~contains(self._ids))
        unnamed = np.arange(len(self._ids), len(self._table))
        if gone.size or unnamed.size:
            self._load()
            with uninterrupted():
                self._order = None
                self._flat.remove_ids(np.concatenate([gone, unnamed]))
                self._parts = [np.delete(self._ids, gone)]

    def _load(self) -> None:
        """Bring vectors that lie in a file into memory, where they can change."""
        if self._mapped is not None:
            with uninterrupted():
                self._flat.add(np.ascontiguousarray(self._mapped))
                self._mapped = None

    def clear(self) -> None:
        """Forget everything."""
        self._flat.reset()
        self._mapped = None
        self._parts, self._order = [], None

    def _rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Row of each id, -1 where there is none."""
        if not len(self):
            return np.full(ids.shape, -1)
        if self._order is None:
            self._order = np.argsort(self._ids, kind="stable")
        place = np.searchsorted(self._ids, ids, sorter=self._order)
        rows = self._order[np.minimum(place, len(self) - 1)]
        return np.where(self._ids[rows] == ids, rows, -1)

    def get(self, ids: np.ndarray) -> np.ndarray:
        """Vectors of ids, (m, d) float32.

        Raises
        ------
        ValueError
            Naming an id that is not kept.
        """
        rows = self._rows_of(ids)
        if (rows < 0).any():
            raise ValueError(f"ids must be stored; {ids[(rows < 0).argmax()]} is not.")
        return self._table[rows]

    def all(self) -> tuple[np.ndarray, np.ndarray]:
        """All vectors, a view, and their ids."""
        return self._table, self._ids

    @property
    def _table(self) -> np.ndarray:
        if self._mapped is not None:
            return self._mapped
        n, d = self._flat.ntotal, self._flat.d
        if not n:
            return np.empty((0, d), np.float32)
        return faiss.rev_swig_ptr(self._flat.get_xb(), n * d).reshape(n, d)

    def distances(self, queries: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Exact distances of queries to ids, the worst float32 for -1: (n, k) float32."""
        found = np.empty(labels.shape, np.float32)
        for where in spans(len(queries), labels.shape[1] * self._flat.d):
            rows = self._rows_of(labels[where])
            flat, rows = (self._flat, rows) if self._mapped is None else self._loaded(rows)
            n, k = rows.shape
            part, rows = np.empty((n, k), np.float32), np.ascontiguousarray(rows)
            flat.compute_distance_subset(n, raw(queries[where]), k, raw(part), raw(rows))
            found[where] = part
        found[labels < 0] = worst_distance(self._flat.metric_type)
        return found

    def _loaded(self, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        """A flat index of those rows of the file, and where each lies in it; -1 stays -1."""
        needed, places = np.unique(rows, return_inverse=True)
        missing = int(needed[:1].tolist() == [-1])
        flat = faiss.IndexFlat(self._flat.d, self._flat.metric_type)
        flat.add(np.ascontiguousarray(self._table[needed[missing:]]))
        return flat, places.reshape(rows.shape) - missing

    def best(
        self, queries: np.ndarray, labels: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest of the ids given, by exact distance: (distances, labels), best first."""
        found = self.distances(queries, labels)
        sign = -1 if self._flat.metric_type == faiss.METRIC_INNER_PRODUCT else 1
        order = np.argsort(sign * found, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(found, order, axis=1), np.take_along_axis(labels, order, axis=1)

    def state(self) -> dict[str, np.ndarray]:
        """Arrays ``"originals"`` (n, d) float32, a view, and ``"original_ids"`` (n,) int64."""
        rows, ids = self.all()
        return {"originals": rows, "original_ids": ids}

    def restore(self, arrays: dict[str, Any], contains: Callable[[np.ndarray], np.ndarray]) -> None:
        """The inverse of `state`; a memmap of vectors is left in its file.

        Raises
        ------
        ValueError
            When shapes or types are others, or ids are not those that ``contains`` knows.
        """
        rows, ids = arrays["originals"], arrays["original_ids"]
        good = ids.ndim == 1 and ids.dtype == np.int64 and rows.dtype == np.float32
        if not good or rows.shape != (len(ids), self._flat.d):
            raise ValueError(
                f"originals must be float32 of shape ({len(ids)}, {self._flat.d}) under int64 ids; "
                f"got {rows.dtype} of shape {rows.shape} under {ids.dtype}."
            )
        if len(np.unique(ids)) != len(ids) or not contains(ids).all():
            raise ValueError("the ids of the originals are not those of the index.")
        self.clear()
        if isinstance(rows, np.memmap):
            self._mapped, self._parts = rows, [np.array(ids)]
        else:
            self.add(np.ascontiguousarray(rows), np.array(ids))
