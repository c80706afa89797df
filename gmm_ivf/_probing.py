"""The part of a search that runs in FAISS: rank the lists, scan those that are probed."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._faiss import faiss, raw
from gmm_ivf._vectors import check_count

# Fields of SearchParametersIVF that change which entries are scanned, with their defaults.
_OTHER_FIELDS = {
    "quantizer_params": None,
    "inverted_list_context": None,
    "max_lists_num": 0,
    "max_empty_result_buckets": 0,
    "ensure_topk_full": False,
}


@dataclass(frozen=True)
class ProbeOptions:
    """Lists to probe per query, and the parameters for FAISS that say the same."""

    nprobe: int
    max_codes: int
    parameters: Any


@dataclass(frozen=True)
class Found:
    """Entries of the probed lists, best first, copies included; and how many were scanned."""

    distances: np.ndarray
    labels: np.ndarray
    scanned: np.ndarray


class Probing:
    """Scans lists of a wrapped index.

    Parameters
    ----------
    ivf : faiss.IndexIVF
    """

    def __init__(self, ivf: Any):
        self._ivf = ivf
        self._has_warned = False
        # In mode 0 FAISS spreads queries over threads in `search` only, and `search_preassigned`
        # runs on one thread; mode 3 spreads them in both.
        if ivf.parallel_mode == 0:
            ivf.parallel_mode = 3

    def options(self, params: Any) -> ProbeOptions:
        """Options of one search.

        Parameters
        ----------
        params : faiss.SearchParametersIVF or None
            None takes nprobe and max_codes of the wrapped index.

        Raises
        ------
        NotImplementedError
            For another type, or fields other than nprobe, sel and max_codes.
        """
        if params is not None and type(params) is not faiss.SearchParametersIVF:
            raise NotImplementedError(
                f"params must be a faiss.SearchParametersIVF; {type(params).__name__} is not "
                "available."
            )
        source = self._ivf if params is None else params
        for name, default in _OTHER_FIELDS.items():
            if params is not None and getattr(params, name) != default:
                raise NotImplementedError(f"params.{name} is not available: leave it unset.")
        nprobe = self._clamped(check_count(source.nprobe, "nprobe"))
        parameters = faiss.SearchParametersIVF()
        parameters.nprobe, parameters.max_codes = nprobe, source.max_codes
        if params is not None and params.sel is not None:
            parameters.sel = params.sel
        return ProbeOptions(nprobe, source.max_codes, parameters)

    def _clamped(self, nprobe: int) -> int:
        nlist = self._ivf.nlist
        if nprobe > nlist and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"nprobe={nprobe} exceeds nlist={nlist}; all lists are probed.",
                UserWarning,
                stacklevel=4,
            )
        return min(nprobe, nlist)

    def search(
        self,
        rows: np.ndarray,
        fetch: int,
        options: ProbeOptions,
        ranker: CoarseRanker,
        sizes: np.ndarray,
    ) -> Found:
        """Fetch the best entries of the lists nearest to each row.

        Parameters
        ----------
        rows : ndarray of shape (n, d), float32
        fetch : int
        options : ProbeOptions
        ranker : CoarseRanker
        sizes : ndarray of shape (nlist,), int64
            Entries per list.
        """
        finite = np.asarray(np.isfinite(rows).all(axis=1))
        if not finite.all():
            rows = rows.copy()
            rows[~finite] = 0
        coarse, lists = ranker.search(rows, options.nprobe)
        # FAISS skips list -1, so such a query finds nothing.
        lists[~finite] = -1
        n = len(rows)
        distances = np.empty((n, fetch), np.float32)
        labels = np.empty((n, fetch), np.int64)
        # The Python method takes neither parameters nor another width than index.nprobe.
        self._ivf.search_preassigned_c(
            n,
            raw(rows),
            fetch,
            raw(lists),
            raw(coarse),
            raw(distances),
            raw(labels),
            False,
            options.parameters,
        )
        scanned = np.where(lists >= 0, sizes[lists], 0).sum(axis=1)
        if options.max_codes:
            scanned = np.minimum(scanned, options.max_codes)
        return Found(distances, labels, scanned)
