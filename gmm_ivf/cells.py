"""Layout "cells": every vector once, in the cell of a pair of components."""

import threading
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from gmm_ivf._cell_options import CellOptions
from gmm_ivf._cell_scanning import FlatScan, ListScan
from gmm_ivf._cell_search import Ranking
from gmm_ivf._cell_state import moment_arrays, shape_arrays, shape_of_arrays
from gmm_ivf._cell_store import CellStore
from gmm_ivf._cell_table import Moments, Shape, ranked_cells
from gmm_ivf._cell_training import learn, points_and_norms
from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._faiss import ID_BYTES, faiss
from gmm_ivf._layout import Layout, ProbeOptions, Results
from gmm_ivf._results import SearchCost
from gmm_ivf._scan import Probes, nearest_entries, spread_over_threads
from gmm_ivf._stored import StoredLayout
from gmm_ivf._vectors import block
from gmm_ivf.quantizer import GMMQuantizer

__all__ = ["CellLayout", "CellOptions"]


class CellLayout(StoredLayout):
    """Vectors in cells, of which a query ranks many and scans few.

    The wrapped index holds each vector in the list of its nearest mean, as stock FAISS would, cell
    after cell. Searches scan the best cells until they have seen `nprobe` average lists' worth of
    vectors; with all lists probed, every vector. What a cell is ranked by are means over all
    vectors ever put into it since `clear`; a removal leaves them.

    Parameters
    ----------
    ivf : faiss.IndexIVF
        Empty.
    quantizer : GMMQuantizer
        That of `ivf`.
    cells : CellOptions, dict or None
        A dict holds fields of CellOptions.

    Attributes
    ----------
    cell_options : CellOptions
    max_lists : int
        1.
    """

    max_lists = 1

    def __init__(self, ivf: Any, quantizer: GMMQuantizer, cells: Any = None):
        if isinstance(ivf, faiss.IndexIVFFlatDedup):
            raise ValueError(
                "index is an IndexIVFFlatDedup, which keeps equal vectors beside its lists: "
                'layout="cells" needs another, such as faiss.IndexIVFFlat.'
            )
        self.cell_options = CellOptions.checked(cells)
        self.ivf = ivf
        self._quantizer = quantizer
        # Searches side by side are allowed, and the first one after a change puts things in order.
        self._lock = threading.Lock()
        self._ranker: CoarseRanker | None = None
        self._generation = quantizer.generation
        self._store = CellStore(ivf)
        self._shape: Shape | None = None
        self._weight = 0.0
        self._moments: Moments | None = None
        self._new: list[Moments] = []
        self._ranked: Any = None
        self._version = -1
        flat = type(ivf) is faiss.IndexIVFFlat
        self._scan: Any = FlatScan(ivf) if flat else ListScan(ivf)
        spread_over_threads(ivf)

    @property
    def is_trained(self) -> bool:
        """See `Layout`."""
        return bool(self.ivf.is_trained and self._shape is not None)

    @property
    def max_copies(self) -> int:
        """See `Layout`."""
        return 1

    @property
    def tau(self) -> float | None:
        """See `Layout`; None."""
        return None

    @property
    def residual_weight(self) -> float:
        """Part of the mean squared residual that is added to the score of a cell."""
        return self._weight

    def describe(self) -> str:
        """Options in one line."""
        return f"cells={self.cell_options}"

    def options(self) -> dict[str, Any]:
        """See `Layout`."""
        return {"cells": asdict(self.cell_options)}

    def train(self, x: Any, *, train_codec: bool = True) -> None:
        """See `Layout`; `train_codec=False` learns the cells only."""
        if train_codec:
            flat = isinstance(self.ivf, faiss.IndexIVFFlat)
            self.ivf.train(block(x, "x", slice(1)) if flat else block(x, "x"))
        self._ranker = None
        self._install(*learn(self._ready(), x, self.cell_options, self.ivf.code_size + ID_BYTES))

    def _install(self, shape: Shape, weight: float) -> None:
        self._shape, self._weight, self._ranked = shape, weight, None
        self._moments, self._new = Moments.none(shape.units), []
        self._scan.learn_codec()

    def _ready(self) -> CoarseRanker:
        if self._ranker is None:
            self._ranker = CoarseRanker(self._quantizer, self._quantizer.mixture)
            self._generation = self._quantizer.generation
        return self._ranker

    def _trained(self) -> tuple[CoarseRanker, Shape]:
        if self._shape is None:
            raise RuntimeError("the cells are not trained: call train(x) first.")
        return self._ready(), self._shape

    def add(self, rows: np.ndarray, ids: np.ndarray, lists: np.ndarray | None) -> None:
        """See `Layout`.

        Raises
        ------
        NotImplementedError
            For lists of the caller's own: the cell of a vector is found by its distances.
        """
        if lists is not None:
            raise NotImplementedError(
                'layout="cells" chooses the list of a vector itself: use add_with_ids.'
            )
        if not len(rows):
            return
        ranker, shape = self._trained()
        points, norms = points_and_norms(ranker, rows)
        own = ranker.nearest(rows)
        local, moments = shape.place(points, own, norms)
        self._store.put(rows, ids, own, local)
        self._new.append(Moments.of(own * shape.per_component + local, moments, shape.units))

    def undo(self, ids: np.ndarray, next_id: int) -> None:
        """See `Layout`; the means of cells keep what blocks before the interruption added."""
        self._store.undo(ids, next_id)

    def _arranged(self) -> Ranking:
        """What a search needs, up to date."""
        with self._lock:
            return self._arranged_alone()

    def _arranged_alone(self) -> Ranking:
        ranker, shape = self._trained()
        if self._version != self._store.version or self._ranked is None:
            self._store.arrange()
            moments = (self._moments or Moments.none(shape.units)).joined(self._new)
            self._moments, self._new = moments, []
            occupied = self._store.occupied(shape.per_component)
            self._ranked = ranked_cells(shape, moments, occupied, self._weight, ranker.is_product)
            self._scan.prepare(occupied, self._store.sizes)
            self._version = self._store.version
        return Ranking(ranker, shape, self._ranked, self.cell_options)

    def search(self, rows: np.ndarray, k: int, options: ProbeOptions) -> Results:
        """See `Layout`."""
        if not self.ntotal:
            return self._scan.nothing(len(rows), k, self.ivf.nlist)
        return self._scan.search(rows, k, options, self._arranged())

    def range_search(
        self, rows: np.ndarray, radius: float, options: ProbeOptions
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, SearchCost]:
        """See `Layout`."""
        if not self.ntotal:
            found = self._scan.nothing(len(rows), 1, self.ivf.nlist)
            cost = SearchCost(found.scanned, found.coarse, found.ranking)
            lims = np.zeros(len(rows) + 1, np.int64)
            return lims, np.empty(0, np.float32), np.empty(0, np.int64), cost
        return self._scan.within(rows, radius, options, self._arranged())

    def search_lists(
        self, rows: np.ndarray, k: int, lists: np.ndarray, distances: Any, options: ProbeOptions
    ) -> Results:
        """See `Layout`: lists are scanned whole, by FAISS."""
        ranker = self._ready()
        coarse = np.zeros(len(rows), np.int64)
        if distances is None:
            distances, coarse = ranker.distances(rows, lists), (lists >= 0).sum(axis=1)
        probes = Probes(lists, distances, coarse)
        found = nearest_entries(self.ivf, rows, k, probes, options)
        scanned = probes.scanned(self._store.sizes, options.max_codes)
        return Results(*found, scanned, coarse, np.zeros(len(rows)))

    def check_mergeable(self, other: Layout) -> None:
        """See `Layout`."""
        if not isinstance(other, CellLayout):
            raise ValueError('other must have layout="cells", as this index has.')
        self._store.check_mergeable(other._store)
        mine, theirs = (shape_arrays(layout._trained()[1]) for layout in (self, other))
        if any(not np.array_equal(mine[name], theirs[name]) for name in mine):
            raise ValueError(
                "other must have the same cells: train one index, copy.copy it while it is empty, "
                "and fill the copies."
            )

    def merge(self, other: Layout) -> None:
        """See `Layout`."""
        if isinstance(other, CellLayout):
            self._arranged()
            other._arranged()
            theirs = other._moments
            self._store.merge(other._store)
            other.clear()
            if theirs is not None:
                self._new.append(theirs)

    def remove(self, sel: Any) -> int:
        """See `Layout`."""
        return self._store.remove(sel)

    def reconstruct(self, ids: np.ndarray) -> np.ndarray:
        """See `Layout`."""
        return self._store.decode(ids, self._ready())

    def clear(self) -> None:
        """See `Layout`."""
        self._store.clear()
        if self._shape is not None:
            self._install(self._shape, self._weight)

    def check_unchanged(self) -> None:
        """See `Layout`."""
        self._store.check_unchanged()
        if self._generation != self._quantizer.generation:
            raise RuntimeError(
                "the quantizer was trained again: reset() this index, train it and add the vectors."
            )

    def set_cell_options(self, **changes: Any) -> None:
        """Change how cells are searched: lists_ranked or shortlist."""
        fixed = sorted(set(changes) - {"lists_ranked", "shortlist"})
        if fixed:
            raise ValueError(f"{fixed[0]} is fixed when cells are trained: build a new index.")
        self.cell_options = replace(self.cell_options, **changes)

    def stats(self) -> dict[str, Any]:
        """See `Layout`; also ``"cells"`` that hold vectors, and ``"vectors_per_cell"``."""
        table = 4 * self.ivf.d * self._quantizer.ntotal + self._store.nbytes_of_cells
        table += self._ranker.nbytes if self._ranker else 0
        cells = 0
        if self._shape is not None and self.ntotal:
            ranking = self._arranged()
            assert self._moments is not None
            table += (
                ranking.shape.nbytes
                + self._moments.nbytes
                + sum(np.asarray(part).nbytes for part in ranking.cells)
            )
            table += self._scan.nbytes
            cells = len(ranking.cells.own)
        found = self._store.stats(table)
        found["cells"] = cells
        found["vectors_per_cell"] = self.ntotal / cells if cells else np.nan
        return found

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """See `Layout`."""
        if self._shape is None:
            return {"trained": False}, {}
        self._arranged()
        assert self._moments is not None
        settings, arrays = self._store.state()
        settings = {**settings, "trained": True, "weight": float(self._weight).hex()}
        return settings, {**arrays, **shape_arrays(self._shape), **moment_arrays(self._moments)}

    def restore(self, settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """See `Layout`."""
        if not settings["trained"]:
            return
        weight = float.fromhex(settings["weight"])
        if not 0 <= weight < np.inf:
            raise ValueError(f"weight must be a number of at least 0; got {weight}.")
        by_list = self.cell_options.visit == "list"
        shape, moments = shape_of_arrays(self._ready().table, arrays, by_list)
        self._store.restore(settings, arrays)
        occupied = self._store.occupied(shape.per_component)
        known = np.isin(occupied.cells, moments.cells, assume_unique=True)
        if (np.asarray(arrays["local"]) >= shape.per_component).any() or not known.all():
            raise ValueError("local names a cell that is not there.")
        self._install(shape, weight)
        self._moments = moments
