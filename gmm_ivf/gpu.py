"""Search on a GPU by faiss-gpu: `IndexIVFGMM.to_gpu`."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gmm_ivf._faiss import faiss
from gmm_ivf._graph import links_of
from gmm_ivf._layout import Layout, ProbeOptions, Results
from gmm_ivf._probing import Probing
from gmm_ivf._results import SearchCost
from gmm_ivf._scan import Probes
from gmm_ivf._searching import Searching
from gmm_ivf.lists import ListsLayout

#: Most results and most lists per query of a search on a GPU.
GPU_LIMIT = 2048

_PQ_BYTES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96)
# Look-up tables of float32 for more bytes than these do not fit a block's shared memory.
_FLOAT32_TABLES = 48
_SQ_TYPES = ("8bit", "8bit_uniform", "8bit_direct", "6bit", "4bit", "4bit_uniform", "fp16")


@dataclass
class _View:
    """What a search asks of the index on the CPU, so that `nprobe` here is a setting of its own."""

    nlist: int
    metric_type: int
    nprobe: int
    max_codes: int = 0


class GpuIndexIVFGMM(Searching):
    """Copy of an `IndexIVFGMM` on a GPU, for searching only.

    Made by `IndexIVFGMM.to_gpu`. Ids, distances and costs are those of the CPU, distances to
    rounding. What changes the index is done there, and `to_gpu` called again.

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
        When there is no such device.
    NotImplementedError
        Naming what faiss-gpu does not support of this index.

    Notes
    -----
    faiss-gpu finds at most 2048 entries in at most 2048 lists, copies included: a search for more
    raises ValueError. Selectors, `max_codes` and `range_search` are not available.
    """

    def __init__(self, source: Any, device: int, resources: Any):
        _check_faiss(device)
        layout = source._ready()
        check_supported(layout, source.quantizer)
        self._resources = resources or faiss.StandardGpuResources()
        self._source = source
        self.quantizer = source.quantizer
        self._layout = GpuLists(layout, self._resources, device)
        self.index = self._layout.ivf
        self._ivf: Any = _View(source.nlist, source.metric_type, source.nprobe)
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


class GpuLists(ListsLayout):
    """Layout "lists" with the lists on a GPU, as they were when it was made.

    Parameters
    ----------
    layout : ListsLayout
        On the CPU.
    resources : faiss.StandardGpuResources
    device : int
    """

    def __init__(self, layout: ListsLayout, resources: Any, device: int):
        vars(self).update(vars(layout))
        self._cpu, self._state = layout, (layout.ntotal, layout.entries, layout.next_id)
        self._ranker = layout._ready().ranker
        self.ivf = _on_gpu(layout.ivf, resources, device)
        means = faiss.IndexFlat(layout.ivf.d, layout.ivf.metric_type)
        means.add(self._ranker.table)
        self._means = _on_gpu(means, resources, device)

    def _probes(self, rows: np.ndarray, nprobe: int) -> Probes:
        points = self._ranker.points(rows) if self._ranker.is_centred else rows
        distances, lists = self._means.search(points, nprobe)
        return Probes(lists, distances, np.full(len(rows), self._means.ntotal))

    def search(self, rows: np.ndarray, k: int, options: ProbeOptions) -> Results:
        """See `Layout`."""
        refuse_options(options)
        check_limits(k, self._fetch(k, options.nprobe), options.nprobe)
        return super().search(rows, k, options)

    def range_search(
        self, rows: np.ndarray, radius: float, options: ProbeOptions
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, SearchCost]:
        """Not available on a GPU."""
        raise NotImplementedError("faiss-gpu has no range_search: search on the CPU.")

    def check_unchanged(self) -> None:
        """Raise RuntimeError when the index on the CPU holds other vectors by now."""
        cpu = self._cpu
        if (cpu.ntotal, cpu.entries, cpu.next_id) != self._state:
            raise RuntimeError(
                "the index on the CPU was changed after to_gpu: call to_gpu() again to copy it."
            )


def _on_gpu(index: Any, resources: Any, device: int) -> Any:
    options = faiss.GpuClonerOptions()
    # cuVS would be another search, with limits and roundings of its own.
    options.use_cuvs = False
    if isinstance(index, faiss.IndexIVFPQ):
        options.useFloat16 = index.pq.M > _FLOAT32_TABLES
    return faiss.index_cpu_to_gpu(resources, device, index, options)


def _check_faiss(device: int) -> None:
    if not hasattr(faiss, "StandardGpuResources"):
        raise RuntimeError(
            "this faiss was built without GPU support: uninstall faiss-cpu, then pip install "
            '"gmm-ivf[gpu]" (never two faiss packages at once).'
        )
    count = faiss.get_num_gpus()
    if not 0 <= device < count:
        raise ValueError(f"device must be in [0, {count}), the GPUs that faiss sees; got {device}.")


def check_supported(layout: Any, quantizer: Any) -> None:
    """Refuse what faiss-gpu would refuse or abort on, by name.

    Raises
    ------
    NotImplementedError
    """
    if not isinstance(layout, ListsLayout):
        raise NotImplementedError(
            f'{type(layout).__name__} is not available on a GPU: use layout="lists", or the CPU.'
        )
    ivf = layout.ivf
    reason = _codec_reason(ivf)
    if links_of(quantizer.coarse):
        reason = "an HNSW graph over the means is searched on the CPU only: use a flat quantizer"
    if reason:
        raise NotImplementedError(f"{type(ivf).__name__} on a GPU: {reason}.")


def _codec_reason(ivf: Any) -> str:
    """Why faiss-gpu has no such codec, "" if it has."""
    if isinstance(ivf, faiss.IndexIVFPQ):
        if ivf.pq.nbits != 8:
            return f"faiss-gpu has codes of 8 bits only, this one has {ivf.pq.nbits}"
        if ivf.pq.M not in _PQ_BYTES:
            return f"faiss-gpu has codes of {', '.join(map(str, _PQ_BYTES))} bytes, not {ivf.pq.M}"
        return ""
    if isinstance(ivf, faiss.IndexIVFScalarQuantizer):
        known = {getattr(faiss.ScalarQuantizer, f"QT_{name}") for name in _SQ_TYPES}
        return "" if ivf.sq.qtype in known else f"faiss-gpu has SQ of {', '.join(_SQ_TYPES)} only"
    if type(ivf) is faiss.IndexIVFFlat:
        return ""
    return "faiss-gpu has Flat, SQ and PQ of 8 bits only"


def refuse_options(options: ProbeOptions) -> None:
    """Refuse search parameters that faiss-gpu does not heed.

    Raises
    ------
    NotImplementedError
    """
    for name, given in (("sel", options.selector), ("max_codes", options.max_codes)):
        if given:
            raise NotImplementedError(f"params.{name} is not available on a GPU: leave it unset.")


def check_limits(k: int, fetch: int, nprobe: int) -> None:
    """Refuse a search beyond what faiss-gpu can do, which would end in a C++ error.

    Raises
    ------
    ValueError
    """
    if nprobe > GPU_LIMIT:
        raise ValueError(
            f"nprobe must be at most {GPU_LIMIT} on a GPU; got {nprobe}. Search on the CPU."
        )
    if fetch > GPU_LIMIT:
        copies = (
            "" if fetch == k else f", for which {fetch} entries are fetched since ids have copies"
        )
        raise ValueError(
            f"a search on a GPU fetches at most {GPU_LIMIT} entries per query; k={k}{copies}. "
            "Lower k, or search on the CPU."
        )
