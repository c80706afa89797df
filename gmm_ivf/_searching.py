"""Searches of an `IndexIVFGMM`, and decoding of what it stores."""

from math import ceil
from typing import Any

import numpy as np

from gmm_ivf._adapter import Adapter
from gmm_ivf._faiss import worst_distance
from gmm_ivf._layout import Results
from gmm_ivf._results import SearchCost
from gmm_ivf._vectors import block, check_count, spans


class Searching(Adapter):
    """The methods of a FAISS index that find vectors."""

    def search(self, x: Any, k: int, params: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Find the k nearest stored vectors among those in the probed lists.

        Parameters
        ----------
        x : array-like of shape (q, d)
            Queries. One that holds NaN or infinity finds nothing, as in FAISS.
        k : int
        params : faiss.SearchParametersIVF, default=None
            `nprobe` (1 unless set there), `sel` and `max_codes` are heeded.

        Returns
        -------
        D : ndarray of shape (q, k), float32
            Squared L2 distances or inner products, best first; the worst float32 where fewer than
            k ids were scanned.
        I : ndarray of shape (q, k), int64
            Ids, unique in a row; -1 where fewer than k ids were scanned.

        Raises
        ------
        ValueError
            For a bad shape or k.
        NotImplementedError
            For other search parameters.
        """
        layout = self._ready()
        x, k = self._matrix(x), check_count(k, "k")
        options = self._probing.options(params)
        found = self._nothing(x.shape[0], k)
        fetch = self._fetch(k)
        for where in spans(x.shape[0], max(self.d, 2 * fetch, options.nprobe)):
            rows, finite = _finite(block(x, "x", where))
            part = layout.search(self._inner(rows), fetch, options)
            _put(found, where, finite, self._refined(rows, k, part))
        self.last_search = SearchCost(found.scanned, found.coarse, found.ranking)
        return found.distances, found.labels

    def _fetch(self, k: int) -> int:
        """Ids to find by their codes, so that the best k by exact distance are among them."""
        if self._originals is None:
            return k
        return max(k, min(ceil(k * self._k_factor), self.ntotal))

    def _refined(self, rows: np.ndarray, k: int, found: Results) -> Results:
        """The best k by exact distance, where the originals are kept."""
        if self._originals is None:
            return found
        distances, labels = self._originals.best(rows, found.labels, k)
        ranking = found.ranking + (found.labels >= 0).sum(axis=1)
        return Results(distances, labels, found.scanned, found.coarse, ranking)

    def _nothing(self, n: int, k: int) -> Results:
        """Results of queries that find nothing."""
        return Results(
            np.full((n, k), worst_distance(self.metric_type), np.float32),
            np.full((n, k), -1, np.int64),
            np.zeros(n, np.int64),
            np.zeros(n, np.int64),
            np.zeros(n, np.float64),
        )

    def range_search(
        self, x: Any, radius: float, params: Any = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Find all stored vectors in the probed lists that lie within a radius.

        Parameters
        ----------
        x : array-like of shape (q, d)
        radius : float
            Squared L2 distances below it count, or inner products above it.
        params : faiss.SearchParametersIVF, default=None
            As in `search`.

        Returns
        -------
        lims : ndarray of shape (q + 1,), uint64
            Those of query i lie in ``lims[i]:lims[i + 1]`` of the other two, in no order.
        D : ndarray of shape (lims[-1],), float32
        I : ndarray of shape (lims[-1],), int64
            Ids, unique for a query.
        """
        layout = self._ready()
        x, radius = self._matrix(x), _number(radius)
        options = self._probing.options(params)
        n = x.shape[0]
        counts, found, costs = np.zeros(n, np.int64), [], self._nothing(n, 0)
        for where in spans(n, max(self.d, options.nprobe)):
            rows, finite = _finite(block(x, "x", where))
            lims, distances, labels, cost = layout.range_search(self._inner(rows), radius, options)
            numbers = np.arange(n)[where][finite]
            counts[numbers] = np.diff(lims)
            found.append((distances, labels))
            _put_costs(costs, numbers, cost)
        self.last_search = SearchCost(costs.scanned, costs.coarse, costs.ranking)
        lims = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
        distances, labels = zip(*found, strict=True) if found else ([], [])
        empty = np.empty(0, np.float32), np.empty(0, np.int64)
        return lims, np.concatenate([*distances, empty[0]]), np.concatenate([*labels, empty[1]])


def _number(radius: Any) -> float:
    try:
        value = float(radius)
    except (TypeError, ValueError):
        value = np.nan
    if np.isnan(value):
        raise ValueError(f"radius must be a number; got {radius!r}.")
    return value


def _finite(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows without NaN or infinity, and which they are."""
    finite = np.asarray(np.isfinite(rows).all(axis=1))
    return (rows if finite.all() else rows[finite]), finite


def _put(found: Results, where: slice, finite: np.ndarray, part: Results) -> None:
    rows = np.arange(len(found.scanned))[where][finite]
    found.distances[rows], found.labels[rows] = part.distances, part.labels
    _put_costs(found, rows, part)


def _put_costs(found: Results, rows: np.ndarray, part: Results | SearchCost) -> None:
    found.scanned[rows], found.coarse[rows] = part.scanned, part.coarse
    found.ranking[rows] = part.ranking
