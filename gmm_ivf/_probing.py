"""Search parameters, read into what one search may scan."""

import warnings
from typing import Any

import numpy as np

from gmm_ivf._faiss import faiss
from gmm_ivf._ids import as_int64
from gmm_ivf._layout import ProbeOptions
from gmm_ivf._vectors import check_count
from gmm_ivf.assignment import pairs_of_table

# Fields of SearchParametersIVF that change which entries are scanned, with their defaults.
_OTHER_FIELDS = {
    "quantizer_params": None,
    "inverted_list_context": None,
    "max_lists_num": 0,
    "max_empty_result_buckets": 0,
    "ensure_topk_full": False,
}


class Probing:
    """Reads search parameters, with those of the wrapped index as defaults.

    Parameters
    ----------
    ivf : faiss.IndexIVF
    """

    def __init__(self, ivf: Any):
        self._ivf = ivf
        self._has_warned = False

    def options(self, params: Any, nprobe: int | None = None) -> ProbeOptions:
        """Options of one search.

        Parameters
        ----------
        params : faiss.SearchParametersIVF or None
            None takes nprobe and max_codes of the wrapped index.
        nprobe : int, default=None
            Lists that the caller chose, instead.

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
        if nprobe is None:
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


def checked_probes(
    lists: Any, distances: Any, n: int, nlist: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Lists that a caller chose for n queries, and distances to them if given.

    Returns
    -------
    lists : ndarray of shape (n, m), int64
    distances : ndarray of shape (n, m), float32, or None

    Raises
    ------
    ValueError
        When a shape is wrong, or a list outside [-1, nlist) or twice in a row.
    """
    lists = np.asarray(lists)
    if lists.ndim != 2 or len(lists) != n or not 1 <= lists.shape[1] <= nlist:
        raise ValueError(
            f"lists must have shape ({n}, m) with m from 1 to nlist={nlist}; got {lists.shape}."
        )
    lists = as_int64(lists, "lists")
    pairs_of_table(lists, nlist)
    if distances is None:
        return lists, None
    distances = np.ascontiguousarray(distances, np.float32)
    if distances.shape != lists.shape:
        raise ValueError(f"coarse_dis must have shape {lists.shape}; got {distances.shape}.")
    return lists, distances
