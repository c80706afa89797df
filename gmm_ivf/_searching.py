"""Searches of an `IndexIVFGMM`, and decoding of what it stores."""

import numbers
from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np

from gmm_ivf._adapter import Adapter
from gmm_ivf._faiss import worst_distance
from gmm_ivf._ids import as_int64
from gmm_ivf._layout import ProbeOptions, Results
from gmm_ivf._probing import checked_probes
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

        def search(rows: np.ndarray, chosen: np.ndarray, fetch: int) -> Results:
            return layout.search(rows, fetch, options)

        return self._search(x, k, options, search)

    def assign(self, x: Any, k: int = 1) -> np.ndarray:
        """Ids of the k nearest vectors: I of `search`, of shape (q, k), or (q,) if k is 1."""
        labels = self.search(x, k)[1]
        return labels[:, 0] if k == 1 else labels

    def _search(
        self,
        x: Any,
        k: int,
        options: ProbeOptions,
        search: Callable[[np.ndarray, np.ndarray, int], Results],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Search block by block: ``search(rows, their numbers in x, ids to fetch)``."""
        found = self._nothing(x.shape[0], k)
        fetch = self._fetch(k)
        for where in spans(x.shape[0], max(self.d, 2 * fetch, options.nprobe)):
            rows, chosen = _finite(block(x, "x", where), where)
            part = self._refined(rows, k, search(self._inner(rows), chosen, fetch))
            found.distances[chosen], found.labels[chosen] = part.distances, part.labels
            _put_costs(found, chosen, part)
        self.last_search = SearchCost(found.scanned, found.coarse, found.ranking)
        return found.distances, found.labels

    def search_preassigned(
        self, x: Any, k: int, lists: Any, coarse_dis: Any = None, params: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the k nearest stored vectors in lists that the caller chose.

        Parameters
        ----------
        x : array-like of shape (q, d)
        k : int
        lists : array-like of shape (q, m), integers
            Lists to scan for each query, each once; -1 for none.
        coarse_dis : array-like of shape (q, m), default=None
            Squared L2 distances of the queries to the means of these lists, or inner products:
            codecs of residuals add them up. None computes them, which counts as
            `last_search.coarse`.
        params : faiss.SearchParametersIVF, default=None
            `sel` and `max_codes` are heeded; all lists given are probed.

        Returns
        -------
        D, I
            As of `search`.

        Raises
        ------
        ValueError
            When a list is outside [-1, nlist) or comes twice in a row.
        """
        layout = self._ready()
        x, k = self._matrix(x), check_count(k, "k")
        lists, coarse_dis = checked_probes(lists, coarse_dis, x.shape[0], self.nlist)
        options = self._probing.options(params, lists.shape[1])

        def search(rows: np.ndarray, chosen: np.ndarray, fetch: int) -> Results:
            distances = None if coarse_dis is None else coarse_dis[chosen]
            return layout.search_lists(rows, fetch, lists[chosen], distances, options)

        return self._search(x, k, options, search)

    def search_and_reconstruct(
        self, x: Any, k: int, params: Any = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `search`, and the vectors found: R of shape (q, k, d), float32, NaN where I is -1."""
        distances, labels = self.search(x, k, params)
        vectors = np.full((*labels.shape, self.d), np.nan, np.float32)
        vectors[labels >= 0] = self.reconstruct_batch(labels[labels >= 0])
        return distances, labels, vectors

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
            Squared L2 distances below it count, or inner products above it; those of the codes,
            also where `refine` keeps the originals.
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
            rows, chosen = _finite(block(x, "x", where), where)
            lims, distances, labels, cost = layout.range_search(self._inner(rows), radius, options)
            counts[chosen] = np.diff(lims)
            found.append((distances, labels))
            _put_costs(costs, chosen, cost)
        self.last_search = SearchCost(costs.scanned, costs.coarse, costs.ranking)
        lims = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
        distances, labels = zip(*found, strict=True) if found else ([], [])
        empty = np.empty(0, np.float32), np.empty(0, np.int64)
        return lims, np.concatenate([*distances, empty[0]]), np.concatenate([*labels, empty[1]])

    def reconstruct(self, key: Any) -> np.ndarray:
        """Vector of one id: (d,) float32; see `reconstruct_batch`."""
        return self.reconstruct_batch([key])[0]

    def reconstruct_n(self, n0: int = 0, ni: int = -1) -> np.ndarray:
        """Vectors of the ids n0 to n0 + ni - 1, by default to the last: (ni, d) float32.

        All of them have to be stored; see `reconstruct_batch`.
        """
        for name, value, least in (("n0", n0, 0), ("ni", ni, -1)):
            if not isinstance(value, numbers.Integral) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}.")
        stop = self._layout.next_id if ni == -1 else n0 + ni
        return self.reconstruct_batch(np.arange(n0, stop))

    def reconstruct_batch(self, keys: Any) -> np.ndarray:
        """Vectors of ids, as the codes have them.

        Parameters
        ----------
        keys : array-like of shape (m,), integers

        Returns
        -------
        ndarray of shape (m, d), float32
            The originals where `refine` keeps them. Of a vector with several codes that one which
            lies nearest to the mean of its list. A transform is undone as far as can be.

        Raises
        ------
        ValueError
            Naming an id that is not stored.
        NotImplementedError
            For a codec that FAISS cannot decode.

        Notes
        -----
        After a change of the index the first call sorts all ids, which takes 24 bytes an entry.
        """
        layout = self._ready()
        keys = np.asarray(keys)
        if keys.ndim != 1:
            raise ValueError(f"keys must have shape (m,); got {keys.shape}.")
        keys = as_int64(keys, "keys")
        if self._originals is not None:
            return self._originals.get(keys)
        vectors = layout.reconstruct(keys)
        return vectors if self._chain is None else self._chain.reverse(vectors)


def _number(radius: Any) -> float:
    try:
        value = float(radius)
    except (TypeError, ValueError):
        value = np.nan
    if np.isnan(value):
        raise ValueError(f"radius must be a number; got {radius!r}.")
    return value


def _finite(rows: np.ndarray, where: slice) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a block without NaN or infinity, and their numbers."""
    finite = np.asarray(np.isfinite(rows).all(axis=1))
    numbers = where.start + np.flatnonzero(finite)
    return (rows if finite.all() else rows[finite]), numbers


def _put_costs(found: Results, rows: np.ndarray, part: Results | SearchCost) -> None:
    found.scanned[rows], found.coarse[rows] = part.scanned, part.coarse
    found.ranking[rows] = part.ranking
