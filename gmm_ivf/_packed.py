"""A FastScan copy of an index of codes: the same entries, packed for SIMD registers."""

from typing import Any

import numpy as np

from gmm_ivf._faiss import faiss
from gmm_ivf._layout import ProbeOptions

_BLOCK = 32  # codes that FastScan packs together


class PackedCopy:
    """FastScan twin of an index, made anew at the first search after a change.

    FAISS cannot add one id to several lists of a FastScan index, but converts an index that has it.

    Parameters
    ----------
    ivf : faiss.IndexIVFPQ of 4 bits or faiss.IndexIVFRaBitQ

    Raises
    ------
    ValueError
        For a codec that FAISS does not convert.
    """

    def __init__(self, ivf: Any):
        name = type(ivf).__name__
        bits = ivf.pq.nbits if isinstance(ivf, faiss.IndexIVFPQ) else 4
        if name not in ("IndexIVFPQ", "IndexIVFRaBitQ") or bits != 4:
            raise ValueError(
                "fast_scan=True needs an index that FAISS converts: faiss.IndexIVFPQ with 4-bit "
                f"codes, or faiss.IndexIVFRaBitQ; got {name}{f' of {bits} bits' * (bits != 4)}."
            )
        self._ivf = ivf
        self._kind = getattr(faiss, name + "FastScan")
        self._index: Any = None

    def drop(self) -> None:
        """Forget the copy; the index has changed."""
        self._index = None

    def index(self, options: ProbeOptions) -> Any:
        """The FastScan index.

        Raises
        ------
        NotImplementedError
            When `options` limit the codes scanned: FastScan scans whole lists.
        """
        if options.max_codes:
            raise NotImplementedError("max_codes is not available with fast_scan: leave it 0.")
        if self._index is None:
            self._index = self._kind(self._ivf)
        return self._index

    def nbytes(self, sizes: np.ndarray) -> int:
        """Memory of the copy for lists of these sizes, 0 while there is none."""
        if self._index is None:
            return 0
        codes = int((-(-sizes // _BLOCK) * _BLOCK).sum()) * self._ivf.code_size
        return codes + 8 * int(sizes.sum())
