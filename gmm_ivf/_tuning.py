"""Search options of an `IndexIVFGMM` for a recall, by measurement."""

import numbers
from math import ceil
from typing import Any

import numpy as np

from gmm_ivf._faiss import faiss
from gmm_ivf._searching import Searching
from gmm_ivf._vectors import as_matrix, check_count, check_rows
from gmm_ivf.cells import CellLayout

# Lists whose cells are ranked, and sizes of shortlists, that are tried.
_LISTS_RANKED, _SHORTLISTS = (16, 24, 48), (2.0, 3.0, 5.0)
_TIES = 1e-6


class Tuning(Searching):
    """Searches, and the choice of their options."""

    def tune(self, queries: Any, recall: float = 0.9, k: int = 10) -> dict[str, Any]:
        """Set what a search may scan, so that it finds a share of the neighbours at least cost.

        Parameters
        ----------
        queries : array-like of shape (q, d)
            Like those to come, some hundreds.
        recall : float in (0, 1], default=0.9
            Mean share of the k nearest that is found. Nearest by the codes, if those are not the
            vectors themselves: what a search of everything returns.
        k : int, default=10

        Returns
        -------
        dict
            ``"nprobe"`` that was set; for layout "cells" also ``"max_codes"`` (entries scanned;
            until `nprobe` is set or the index reset), ``"lists_ranked"``, ``"shortlist"``;
            ``"recall"`` reached on these queries and ``"distance_computations"`` per query, as
            `last_search` counts them.

        Raises
        ------
        ValueError
            For a bad argument, more neighbours wanted than vectors stored, or naming a query that
            holds NaN or infinity. Options are as before then, and after an interruption.
        """
        self._ready()
        queries, k = as_matrix(queries, self.d, "queries"), check_count(k, "k")
        if not isinstance(recall, numbers.Real) or not 0 < float(recall) <= 1:
            raise ValueError(f"recall must be a number in (0, 1]; got {recall!r}.")
        if not queries.shape[0] or k > self.ntotal:
            raise ValueError(
                f"queries must have at least one row, and k={k} must not exceed the "
                f"{self.ntotal} vectors stored; got {queries.shape[0]} rows."
            )
        check_rows(queries, "queries")
        run = _Run(self, queries, k, float(recall))
        found = run.cells() if isinstance(self._layout, CellLayout) else run.lists()
        self.nprobe, self.max_codes = found["nprobe"], found.get("max_codes", 0)
        return found


class _Run:
    """Searches for the same queries under different options."""

    def __init__(self, index: Tuning, queries: Any, k: int, recall: float):
        self._index, self._queries, self._k, self._wanted = index, queries, k, recall
        worst = index.search(queries, k, _parameters(index.nlist, 0))[0][:, -1:]
        margin = np.abs(worst) * np.float32(_TIES)
        self._is_product = index.metric_type == faiss.METRIC_INNER_PRODUCT
        self._bound = worst - margin if self._is_product else worst + margin

    def _measured(self, nprobe: int, max_codes: int) -> tuple[float, float]:
        """Recall, and distance computations per query."""
        parameters = _parameters(nprobe, max_codes)
        distances, labels = self._index.search(self._queries, self._k, parameters)
        near = distances >= self._bound if self._is_product else distances <= self._bound
        cost = self._index.last_search
        assert cost is not None
        return float((near & (labels >= 0)).mean()), float(cost.distance_computations.mean())

    def lists(self) -> dict[str, Any]:
        """Fewest lists that reach the recall."""
        low, high = 0, self._index.nlist
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._reaches(middle, 0) else (middle, high)
        recall, cost = self._measured(high, 0)
        return {"nprobe": high, "recall": recall, "distance_computations": cost}

    def _reaches(self, nprobe: int, max_codes: int) -> bool:
        return self._measured(nprobe, max_codes)[0] >= self._wanted

    def cells(self) -> dict[str, Any]:
        """Fewest vectors that reach the recall, under the options that make them cheapest."""
        layout: Any = self._index._layout
        before, best = layout.cell_options, {}
        try:
            for ranked in _LISTS_RANKED:
                for shortlist in _SHORTLISTS:
                    layout.set_cell_options(lists_ranked=ranked, shortlist=shortlist)
                    found = self._fewest_vectors()
                    if not best or found["distance_computations"] < best["distance_computations"]:
                        best = {**found, "lists_ranked": ranked, "shortlist": shortlist}
        except BaseException:
            layout.cell_options = before
            raise
        layout.set_cell_options(lists_ranked=best["lists_ranked"], shortlist=best["shortlist"])
        return best

    def _fewest_vectors(self) -> dict[str, Any]:
        entries, nlist = self._index._layout.entries, self._index.nlist
        low, high = 0, entries
        # To 1 %: finer differences are noise of the queries.
        while high - low > max(1, high // 100):
            middle = max(low + 1, int(np.sqrt(max(low, high // 64) * high)))
            middle = min(middle, high - 1)
            enough = self._reaches(ceil(middle * nlist / entries), middle)
            low, high = (low, middle) if enough else (middle, high)
        nprobe = min(nlist, ceil(high * nlist / entries))
        recall, cost = self._measured(nprobe, high)
        return {
            "nprobe": nprobe,
            "max_codes": high,
            "recall": recall,
            "distance_computations": cost,
        }


def _parameters(nprobe: int, max_codes: int) -> Any:
    parameters = faiss.SearchParametersIVF()
    parameters.nprobe, parameters.max_codes = nprobe, max_codes
    return parameters
