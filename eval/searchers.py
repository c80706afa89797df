"""Built indexes as `eval.recall` searches and counts them."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gmm_ivf.eval.codes import code_work, index_bytes, list_sizes
from gmm_ivf.eval.environment import require_faiss

#: Least breadths of an HNSW coarse quantizer that a sweep tries; each is nprobe at least.
EF_SEARCH = (32, 64, 128)
#: Times k that are ranked again, each step as long as it finds more.
REFINE_FACTORS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Probe:
    """How far a search goes.

    Parameters
    ----------
    nprobe : int
        Lists probed.
    ef_search : int, default=0
        Breadth of an HNSW coarse quantizer; 0 where it is flat.
    refine_factor : int, default=0
        So many times k vectors are ranked again with the originals; 0 where none are.
    max_codes : int, default=0
        Most entries scanned, for steps below an average list; 0 sets no limit.
    """

    nprobe: int
    ef_search: int = 0
    refine_factor: int = 0
    max_codes: int = 0


@dataclass(frozen=True)
class SearchCost:
    """Work of one search, one entry per query: float64 arrays of shape (q,).

    Attributes
    ----------
    scanned : ndarray
        Entries in the probed lists, every copy counted.
    coarse : ndarray
        Comparisons with list centres.
    ranking : ndarray
        Any other work, in units of one distance.
    scan_unit : float
        Work of one scanned entry, in the same unit: 1, or less where codes are scanned.
    """

    scanned: np.ndarray
    coarse: np.ndarray
    ranking: np.ndarray
    scan_unit: float = 1.0


@dataclass(frozen=True)
class BuildReport:
    """What a build cost and holds; `settings` are those that the builder chose or was given."""

    train_seconds: float
    add_seconds: float
    entries_per_vector: float
    bytes_per_vector: float
    imbalance: float
    settings: dict[str, Any]


class Searcher(Protocol):
    """A built index."""

    report: BuildReport

    def search(self, queries: np.ndarray, k: int, probe: Probe) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (int64) and distances, both (q, k), best first. This is what is timed."""
        ...

    def cost(self, queries: np.ndarray, k: int, probe: Probe) -> SearchCost:
        """Cost of the search just made with the same arguments. Not timed."""
        ...


class StockSearcher:
    """A stock FAISS index: IVF, rotated or not, ranked again with the originals or not.

    Its cost comes from the sizes of the lists that a query probes, and from FAISS's own count of an
    HNSW search.

    Parameters
    ----------
    index : faiss.Index
        Filled.
    train_seconds, add_seconds : float
    settings : dict
        Stored with every measurement.
    """

    def __init__(self, index: Any, train_seconds: float, add_seconds: float, settings: dict):
        faiss = require_faiss()
        self._index = index
        base = faiss.downcast_index(index.base_index) if _is_refined(index) else index
        self._rotation = base.chain.at(0) if isinstance(base, faiss.IndexPreTransform) else None
        self._ivf = faiss.downcast_index(faiss.extract_index_ivf(base))
        self._quantizer = faiss.downcast_index(self._ivf.quantizer)
        self._sizes = list_sizes(self._ivf)
        self._work = code_work(self._ivf)
        n = index.ntotal
        self.report = BuildReport(
            train_seconds=train_seconds,
            add_seconds=add_seconds,
            entries_per_vector=float(self._sizes.sum() / n),
            bytes_per_vector=index_bytes(index) / n,
            imbalance=imbalance(self._sizes),
            settings=settings,
        )

    def search(self, queries: np.ndarray, k: int, probe: Probe) -> tuple[np.ndarray, np.ndarray]:
        """See `Searcher`."""
        distances, ids = self._index.search(queries, k, params=self._parameters(probe))
        return ids, distances

    def _parameters(self, probe: Probe) -> Any:
        faiss = require_faiss()
        params = faiss.SearchParametersIVF(
            nprobe=probe.nprobe, quantizer_params=_breadth(probe.ef_search)
        )
        if self._rotation is not None:
            params = faiss.SearchParametersPreTransform(index_params=params)
        if probe.refine_factor:
            params = faiss.IndexRefineSearchParameters(
                k_factor=probe.refine_factor, base_index_params=params
            )
        return params

    def cost(self, queries: np.ndarray, k: int, probe: Probe) -> SearchCost:
        """See `Searcher`."""
        work, n = self._work, len(queries)
        other = work.per_query + work.per_list * probe.nprobe
        if self._rotation is not None:
            queries = self._rotation.apply(queries)
            other += self._ivf.d
        lists, coarse = coarse_search(self._quantizer, queries, probe)
        # FAISS writes -1 where it has no list to offer; such a probe scans nothing.
        scanned = np.where(lists >= 0, self._sizes[lists], 0).sum(axis=1, dtype=np.float64)
        again = np.minimum(scanned, k * probe.refine_factor)
        return SearchCost(scanned, np.full(n, coarse), other + again, work.per_entry)


def _is_refined(index: Any) -> bool:
    return isinstance(index, require_faiss().IndexRefine)


def _breadth(ef_search: int) -> Any:
    """Search parameters of an HNSW coarse quantizer, None for a flat one."""
    return require_faiss().SearchParametersHNSW(efSearch=ef_search) if ef_search else None


def coarse_search(quantizer: Any, queries: np.ndarray, probe: Probe) -> tuple[np.ndarray, float]:
    """Lists that a coarse quantizer finds, and how many centres it compares a query with.

    Returns
    -------
    lists : ndarray of shape (q, nprobe), int64
    comparisons : float
        Mean over the queries: all centres, or FAISS's own count of an HNSW search.
    """
    if not probe.ef_search:
        _, lists = quantizer.search(queries, probe.nprobe)
        return lists, float(quantizer.ntotal)
    # The count is one for the whole process; nothing else searches meanwhile.
    counted = require_faiss().cvar.hnsw_stats
    before = counted.ndis
    _, lists = quantizer.search(queries, probe.nprobe, params=_breadth(probe.ef_search))
    return lists, (counted.ndis - before) / len(queries)


class SoftSearcher:
    """`IndexIVFGMM`, which counts its own searches."""

    def __init__(self, soft: Any, train_seconds: float, add_seconds: float, settings: dict):
        self._soft = soft
        stats = soft.stats()
        self.report = BuildReport(
            train_seconds=train_seconds,
            add_seconds=add_seconds,
            entries_per_vector=float(stats["entries_per_vector"]),
            bytes_per_vector=float(stats["bytes_per_vector"]),
            imbalance=float(stats["imbalance"]),
            settings=settings,
        )
        ivf = require_faiss().downcast_index(require_faiss().extract_index_ivf(soft.index))
        self._work = code_work(ivf)

    def search(self, queries: np.ndarray, k: int, probe: Probe) -> tuple[np.ndarray, np.ndarray]:
        """See `Searcher`."""
        params = require_faiss().SearchParametersIVF(nprobe=probe.nprobe, max_codes=probe.max_codes)
        if probe.ef_search:
            self._soft.quantizer.ef_search = probe.ef_search
        if probe.refine_factor:
            self._soft.k_factor = probe.refine_factor
        distances, ids = self._soft.search(queries, k, params)
        return ids, distances

    def cost(self, queries: np.ndarray, k: int, probe: Probe) -> SearchCost:
        """See `Searcher`."""
        last, shape = self._soft.last_search, (len(queries),)
        scanned, coarse, ranking = (
            np.broadcast_to(np.asarray(part, dtype=np.float64), shape)
            for part in (last.scanned, last.coarse, last.ranking)
        )
        other = self._work.per_query + self._work.per_list * probe.nprobe
        return SearchCost(scanned, coarse, ranking + other, self._work.per_entry)


def imbalance(sizes: np.ndarray) -> float:
    """FAISS's imbalance factor, 1 for equal lists: nlist * sum(s^2) / sum(s)^2."""
    sizes = sizes.astype(np.float64)
    return float(len(sizes) * (sizes**2).sum() / sizes.sum() ** 2)
