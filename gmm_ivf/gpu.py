"""Search on a GPU by faiss-gpu: `IndexIVFGMM.to_gpu`."""

from dataclasses import dataclass
from typing import Any

from gmm_ivf._faiss import faiss
from gmm_ivf._gpu_layouts import GpuCells, GpuLists
from gmm_ivf._gpu_limits import check_codec, check_device
from gmm_ivf._layout import Layout
from gmm_ivf._probing import Probing
from gmm_ivf._searching import Searching
from gmm_ivf.cells import CellLayout


@dataclass
class _View:
    """What a search asks of the index on the CPU, so that `nprobe` here is a setting of its own."""

    nlist: int
    metric_type: int
    nprobe: int
    max_codes: int


class GpuIndexIVFGMM(Searching):
    """Copy of an `IndexIVFGMM` on a GPU, for searching only.

    Made by `IndexIVFGMM.to_gpu`. It finds what the index on the CPU finds, distances and their
    order to rounding; in layout "cells" it scans the last cell of a query whole. What changes the
    index is done on the CPU, and `to_gpu` called again.

    Parameters
    ----------
    source : IndexIVFGMM
    device : int
    resources : faiss.StandardGpuResources or None

    Attributes
    ----------
    index : faiss.GpuIndexIVF
    quantizer : GMMQuantizer
    last_search : SearchCost or None

    Raises
    ------
    RuntimeError
        When faiss has no GPU support, or the index is not trained.
    ValueError
        When there is no such device, or layout "cells" holds no vectors yet.
    NotImplementedError
        Naming what faiss-gpu does not support of this index.

    Notes
    -----
    faiss-gpu finds at most 2048 entries, copies included, in at most 2048 lists or cells: a search
    for more raises ValueError. Selectors and `range_search` are not available, and `max_codes` for
    cells only. A graph over the means, the ranking of cells, transforms and re-ranking run on the
    CPU.
    """

    def __init__(self, source: Any, device: int, resources: Any):
        check_device(device)
        layout = source._ready()
        check_codec(layout.ivf)
        kind: Any = GpuCells if isinstance(layout, CellLayout) else GpuLists
        self._resources = resources or faiss.StandardGpuResources()
        self._source = source
        self.quantizer = source.quantizer
        self._layout = kind(layout, self._resources, device)
        self.index = self._layout.gpu_index
        limits = source.nprobe, source.max_codes
        self._ivf: Any = _View(source.nlist, source.metric_type, *limits)
        self._dimensions = source.d
        self._chain, self._originals = source._chain, source._originals
        self._k_factor = source._k_factor
        self._probing = Probing(self._ivf)
        self.last_search = None

    @property
    def d(self) -> int:
        """Dimensions of the vectors."""
        return self._dimensions

    def _ready(self) -> Layout:
        self._source._ready()
        self._layout.check_unchanged()
        return self._layout

    def __repr__(self) -> str:
        return (
            f"GpuIndexIVFGMM({type(self.index).__name__}, d={self.d}, nlist={self.nlist}, "
            f"nprobe={self.nprobe}, ntotal={self.ntotal})"
        )
