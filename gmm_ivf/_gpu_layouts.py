"""Layouts whose entries lie on a GPU, for searching only."""

from typing import Any

import numpy as np

from gmm_ivf._cell_copy import CellCopy
from gmm_ivf._cell_scanning import ListScan
from gmm_ivf._cell_table import Occupied
from gmm_ivf._faiss import faiss
from gmm_ivf._gpu_limits import check_limits, on_gpu, refuse_max_codes, refuse_selector
from gmm_ivf._layout import Layout, ProbeOptions, Results
from gmm_ivf._results import SearchCost
from gmm_ivf._scan import Probes
from gmm_ivf.cells import CellLayout
from gmm_ivf.lists import ListsLayout


class OnGpu(Layout):
    """What both layouts share: the copy is as old as its `to_gpu`.

    Attributes
    ----------
    gpu_index : faiss.GpuIndexIVF
    """

    gpu_index: Any
    _cpu: Layout
    _state: tuple[int, int, int]

    def _copied_from(self, layout: Layout) -> None:
        vars(self).update(vars(layout))
        self._cpu, self._state = layout, (layout.ntotal, layout.entries, layout.next_id)

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


class GpuLists(OnGpu, ListsLayout):
    """Layout "lists": copies in the lists of a GPU index, means on the GPU beside them.

    Where a graph finds the lists to probe, it does so on the CPU.

    Parameters
    ----------
    layout : ListsLayout
        On the CPU.
    resources : faiss.StandardGpuResources
    device : int
    """

    def __init__(self, layout: ListsLayout, resources: Any, device: int):
        if layout._adaptive is not None:
            raise NotImplementedError(
                "adaptive=True is not available on a GPU: make the index without it."
            )
        self._copied_from(layout)
        self._ranker = layout._ready().ranker
        self.ivf = self.gpu_index = on_gpu(layout.ivf, resources, device)
        means = faiss.IndexFlat(layout.ivf.d, layout.ivf.metric_type)
        means.add(self._ranker.table)
        self._means = on_gpu(means, resources, device)

    def _probes(self, rows: np.ndarray, nprobe: int) -> Probes:
        if self._ranker.has_graph:
            distances, lists, coarse = self._ranker.counted_search(rows, nprobe)
            return Probes(lists, distances, coarse)
        points = self._ranker.points(rows) if self._ranker.is_centred else rows
        distances, lists = self._means.search(points, nprobe)
        return Probes(lists, distances, np.full(len(rows), self._means.ntotal))

    def search(self, rows: np.ndarray, k: int, options: ProbeOptions) -> Results:
        """See `Layout`."""
        check_limits(k, k, options.nprobe, "nprobe")
        return super().search(rows, k, options)

    def _search_probes(
        self, rows: np.ndarray, k: int, probes: Probes, options: ProbeOptions
    ) -> Results:
        refuse_selector(options)
        refuse_max_codes(options)
        width = probes.lists.shape[1]
        check_limits(k, self._fetches(k, width)[-1], width, "the number of lists")
        return super()._search_probes(rows, k, probes, options)


class GpuCells(OnGpu, CellLayout):
    """Layout "cells": ranked on the CPU, each a list of a GPU index.

    Parameters
    ----------
    layout : CellLayout
        On the CPU, with vectors.
    resources : faiss.StandardGpuResources
    device : int

    Raises
    ------
    ValueError
        When there are no vectors.
    """

    def __init__(self, layout: CellLayout, resources: Any, device: int):
        if not layout.ntotal:
            raise ValueError('layout="cells" goes to a GPU with its vectors: add them first.')
        shape = layout._arranged().shape
        self._copied_from(layout)
        occupied = layout._store.occupied(shape.per_component)
        copy = _CompactCopy(layout.ivf, occupied, shape.per_component)
        copy.ivf = self.gpu_index = on_gpu(copy.ivf, resources, device)
        self._scan = _GpuScan(layout.ivf, copy, layout.entries)

    def search(self, rows: np.ndarray, k: int, options: ProbeOptions) -> Results:
        """See `Layout`; `max_codes` is heeded by the choice of cells."""
        refuse_selector(options)
        return super().search(rows, k, options)


class _CompactCopy(CellCopy):
    """Cells as lists, those without entries left out: faiss-gpu wants a mean for each list."""

    def __init__(self, ivf: Any, occupied: Occupied, per_component: int):
        own = occupied.cells // per_component
        self.keys, self.sizes = np.arange(len(own)), occupied.sizes
        self._quantizer = faiss.IndexFlat(ivf.d, ivf.metric_type)
        self._quantizer.add(ivf.quantizer.reconstruct_n(0, ivf.nlist)[own])
        self.ivf = _same_codec(ivf, self._quantizer, len(own))
        self._fill(ivf, own, occupied)
        self.ivf.ntotal = int(occupied.sizes.sum())


def _same_codec(ivf: Any, quantizer: Any, lists: int) -> Any:
    """An empty index with the codec of another, which is one that faiss-gpu has."""
    shape = quantizer, ivf.d, lists
    if isinstance(ivf, faiss.IndexIVFPQ):
        copy = faiss.IndexIVFPQ(*shape, ivf.pq.M, ivf.pq.nbits, ivf.metric_type)
        copy.pq = ivf.pq
    elif isinstance(ivf, faiss.IndexIVFScalarQuantizer):
        copy = faiss.IndexIVFScalarQuantizer(*shape, ivf.sq.qtype, ivf.metric_type, ivf.by_residual)
        copy.sq = ivf.sq
    else:
        copy = faiss.IndexIVFFlat(*shape, ivf.metric_type)
    copy.by_residual, copy.is_trained = ivf.by_residual, True
    return copy


class _GpuScan(ListScan):
    """Scans chosen cells on a GPU."""

    def __init__(self, ivf: Any, copy: CellCopy, entries: int):
        super().__init__(ivf)
        self._copy, self._entries = copy, entries

    def _of_search(self, options: ProbeOptions, k: int, width: int) -> ProbeOptions:
        """Without `max_codes`, which faiss-gpu has not: the last cell is scanned whole."""
        check_limits(k, k, width, f"the number of cells to scan with nprobe={options.nprobe}")
        return self._options(ProbeOptions(options.nprobe, 0, options.parameters), width)
