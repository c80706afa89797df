"""An HNSW graph over means: finds near ones without a look at all of them."""

import re
from typing import Any

import numpy as np

from gmm_ivf._faiss import faiss
from gmm_ivf._vectors import check_count

# Neighbours looked at for each mean when the graph is built; as usual in FAISS's own factory.
_EF_CONSTRUCTION = 40
_FLAT, _HNSW = "flat", re.compile(r"hnsw([1-9][0-9]{0,2})")


def checked_coarse(coarse: Any) -> str:
    """Return "flat" or "hnsw<M>", or raise ValueError."""
    if isinstance(coarse, str) and (coarse == _FLAT or _HNSW.fullmatch(coarse)):
        if links_of(coarse) == 1:
            raise ValueError("coarse must have at least 2 links, as in 'hnsw32'; got 'hnsw1'.")
        return coarse
    raise ValueError(
        f"coarse must be 'flat', or 'hnsw' and the links per mean, as in 'hnsw32'; got {coarse!r}."
    )


def links_of(coarse: str) -> int | None:
    """Links per mean of "hnsw<M>", None of "flat"."""
    found = _HNSW.fullmatch(coarse)
    return int(found[1]) if found else None


def built_graph(table: np.ndarray, links: int, metric: int) -> Any:
    """A faiss.IndexHNSWFlat over a table of means."""
    graph = faiss.IndexHNSWFlat(table.shape[1], links, metric)
    graph.hnsw.efConstruction = _EF_CONSTRUCTION
    graph.add(table)
    return graph


def graph_search(
    graph: Any, rows: np.ndarray, m: int, ef_search: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Near means by a graph: (distances, lists, comparisons of each row).

    FAISS counts comparisons of a whole call, for all threads of the process, so each row gets an
    equal share of them. Lists are -1 where the graph leads to fewer than m means.
    """
    parameters = faiss.SearchParametersHNSW()
    parameters.efSearch = max(ef_search, m)
    before = int(faiss.cvar.hnsw_stats.ndis)
    distances, lists = graph.search(rows, m, params=parameters)
    total = int(faiss.cvar.hnsw_stats.ndis) - before
    n = len(rows)
    share, rest = divmod(total, max(n, 1))
    return distances, lists, share + (np.arange(n) < rest).astype(np.int64)


class WithGraph:
    """The part of a quantizer that knows of a graph over its means; see `GMMQuantizer`."""

    coarse: str = _FLAT
    _ef_search: int = 64
    _graph: Any = None

    @property
    def ef_search(self) -> int:
        """Means that a search by the graph keeps in view, at least as many as it returns."""
        return self._ef_search

    @ef_search.setter
    def ef_search(self, value: int) -> None:
        self._ef_search = check_count(value, "ef_search")

    @property
    def graph(self) -> Any:
        """The faiss.IndexHNSWFlat in use, None before the first search or with "flat".

        Far from the origin it is one over centred means.
        """
        return self._graph

    def graph_over(self, table: np.ndarray, metric: int) -> Any:
        """The graph over a table of the means: that which is there, or a new one."""
        links = links_of(self.coarse)
        if self._graph is None and links:
            self._graph = built_graph(table, links, metric)
        return self._graph

    def restore_graph(self, graph: Any) -> None:
        """Take a graph that was written to a file, instead of building it again.

        Parameters
        ----------
        graph : faiss.IndexHNSWFlat
            What `graph` was, as ``faiss.read_index`` gives it.

        Raises
        ------
        ValueError
            When it is no graph of that many means with those links.
        """
        links = links_of(self.coarse)
        shape = [getattr(graph, name, None) for name in ("ntotal", "d", "metric_type")]
        wanted = [getattr(self, name) for name in ("ntotal", "d", "metric_type")]
        fits = isinstance(graph, faiss.IndexHNSWFlat) and shape == wanted and links
        if not fits or graph.hnsw.nb_neighbors(1) != links:
            raise ValueError(
                f"graph must be a faiss.IndexHNSWFlat of {wanted[0]} means in {wanted[1]} "
                f"dimensions for coarse={self.coarse!r}; got {type(graph).__name__} of {shape[0]}."
            )
        self._graph = graph
