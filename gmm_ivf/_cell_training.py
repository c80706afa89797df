"""What layout "cells" learns: which cells there are, their sketches, the weight of residuals."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.linalg import eigh

from gmm_ivf._cell_options import CellOptions
from gmm_ivf._cell_search import chosen_by_query, make_plan, prepared, ranking_cost
from gmm_ivf._cell_table import Moments, Occupied, Shape, ranked_cells
from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._faiss import faiss
from gmm_ivf._links import nearest_links
from gmm_ivf._vectors import block, sample_rows

_LINKS, _LINKS_OF_MANY, _MANY_LISTS = 128, 32, 4096
_MOST_DIRECTIONS = 32
# Rows that are looked at for each list, and at most; rows of those that serve as queries.
_ROWS_PER_LIST, _MOST_ROWS, _QUERIES = 256, 1 << 18, 400
# Rows that anchors are learned from, for each cell and at most, and how often; they are not held.
_ROWS_PER_ANCHOR, _MOST_ANCHOR_ROWS, _ANCHOR_STEPS = 8, 1 << 20, 2
_WEIGHTS = (0.0, 0.125, 0.25, 0.375, 0.5)
_BINS = (1, 4)
# Share of the cost that the second number of bins has to save, beside the share of memory it adds.
_GAIN_OF_BINS = 0.05
# Without a measurement. Of no weight is worse on all data tried, of 0.25 never by much.
_DEFAULT_WEIGHT = 0.25
# Lists' worth of vectors to scan, between which the cost at a recall is found.
_PROBES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_NEIGHBOURS, _RECALL = 10, 0.9


class Sample:
    """Training vectors in the space of the means.

    Parameters
    ----------
    ranker : CoarseRanker
    x : matrix

    Attributes
    ----------
    total : int
        Rows of x, of which the sample holds a part.
    """

    def __init__(self, ranker: CoarseRanker, x: Any):
        nlist = len(ranker.table)
        limit = max(1 << 12, min(_MOST_ROWS, _ROWS_PER_LIST * nlist))
        rows = block(x, "x", sample_rows(x.shape[0], limit, np.random.default_rng(0)))
        self.rows = rows
        self.points, self.norms = points_and_norms(ranker, rows)
        self.own = ranker.nearest(rows)
        self._ranker, self._x = ranker, x
        self.total = x.shape[0]

    def blocks(self, limit: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Points, components and norms of at most `limit` training vectors, or of the sample.

        As many at a time as the sample has.
        """
        size, n = len(self.own), self.total
        if size == n or size >= limit:
            yield self.points, self.own, self.norms
            return
        numbers = sample_rows(n, limit, np.random.default_rng(2))
        for start in range(0, len(numbers), size):
            rows = block(self._x, "x", numbers[start : start + size])
            points, norms = points_and_norms(self._ranker, rows)
            yield points, self._ranker.nearest(rows), norms


def points_and_norms(ranker: CoarseRanker, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows in the space of the means, and the lengths that were lost on the way there."""
    points = ranker.points(rows)
    if ranker.is_product:
        norms = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64)).astype(np.float32)
    else:
        norms = np.ones(len(rows), np.float32)
    return points, norms


def _units(sample: Sample, moments: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Root mean squares of the moments of vectors, 1 where they are all zero."""
    squares = np.mean(moments.astype(np.float64) ** 2, axis=0)
    # Residuals along a direction are about as long as they are on the average direction.
    lengths = moments[:, 0].mean(dtype=np.float64)
    sketch = np.full(len(directions), lengths / sample.points.shape[1])
    units = np.sqrt(np.concatenate([squares, sketch])).astype(np.float32)
    units[units == 0] = 1
    return units


def learned_shapes(
    ranker: CoarseRanker, sample: Sample, options: CellOptions, bins: tuple[int, ...]
) -> list[Shape]:
    """Cells and sketches learned on a sample, for each number of bins of the residuals."""
    nlist, d = ranker.table.shape
    links = nearest_links(ranker, options.links or _default_links(nlist))
    bare = Shape(
        links,
        np.zeros(links.neighbours.shape, bool),
        np.empty((nlist, 0), np.float32),
        np.empty((0, d), np.float32),
        np.ones(3, np.float32),
        by_list=options.visit == "list",
    )
    local, moments = bare.place(sample.points, sample.own, sample.norms)
    cells = sample.own * bare.per_component + local
    count = min(_MOST_DIRECTIONS, d // 4) if options.sketch is None else options.sketch
    directions = _directions(bare, sample.points, moments, cells, min(count, d))
    shape = replace(bare, directions=directions, units=_units(sample, moments, directions))
    # Of fewer rows than links most anchors would be one row, shrunk: edges place vectors better.
    if not shape.by_list and sample.total >= links.neighbours.size:
        shape = _anchored(shape, sample)
        local, moments = shape.place(sample.points, sample.own, sample.norms)
        cells = sample.own * shape.per_component + local
    sizes = np.bincount(cells, minlength=nlist * shape.per_component)
    merged = sizes.reshape(nlist, -1)[:, : links.count] < options.min_size
    left = _left(shape, moments, cells)
    return [
        replace(
            shape,
            merged=merged & (options.min_size > 1),
            edges_of_bins=_edges_of_bins(sample.own, left, nlist, number),
        )
        for number in bins
    ]


def _anchored(shape: Shape, sample: Sample) -> Shape:
    """The same cells with anchors."""
    nlist = len(shape.links.means)
    limit = min(_MOST_ANCHOR_ROWS, _ROWS_PER_ANCHOR * nlist * shape.links.count)
    for _ in range(_ANCHOR_STEPS):
        moments = Moments.none(shape.units)
        for points, own, norms in sample.blocks(limit):
            local, rows = shape.place(points, own, norms)
            cells = own * shape.per_component + local
            moments = moments.joined([Moments.of(cells, rows, shape.units)])
        shape = shape.anchored(moments)
    return shape


def _default_links(nlist: int) -> int:
    return _LINKS if nlist <= _MANY_LISTS else _LINKS_OF_MANY


def _left(shape: Shape, moments: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Squared residuals of vectors off their edges."""
    gaps = shape.links.ends(*np.divmod(cells, shape.per_component))[1]
    a = np.clip(moments[:, 1], 0, 1)
    return moments[:, 0] - a * (2 * moments[:, 1] - a) * gaps


def _edges_of_bins(own: np.ndarray, left: np.ndarray, nlist: int, bins: int) -> np.ndarray:
    """Quantiles of the residuals of each component; those of all where it has few vectors."""
    shares = np.arange(1, bins) / bins
    edges = np.tile(np.quantile(left, shares), (nlist, 1)).astype(np.float32)
    order = np.argsort(own, kind="stable")
    starts = np.searchsorted(own[order], np.arange(nlist + 1))
    for i in np.flatnonzero(np.diff(starts) >= 8 * bins) if bins > 1 else ():
        edges[i] = np.quantile(left[order[starts[i] : starts[i + 1]]], shares)
    return edges


def _directions(
    shape: Shape, points: np.ndarray, moments: np.ndarray, cells: np.ndarray, count: int
) -> np.ndarray:
    """Directions in which the means of cells differ most from their points on the edges."""
    if not count:
        return np.empty((0, points.shape[1]), np.float32)
    means = shape.links.means
    own, column = np.divmod(cells, shape.per_component)
    other, a = shape.links.ends(own, column)[0], np.clip(moments[:, 1], 0, 1)
    off = points - means[own] - a[:, None] * (means[other] - means[own])
    order = np.argsort(cells, kind="stable")
    starts = np.flatnonzero(np.diff(cells[order], prepend=-1))
    sizes = np.diff(np.append(starts, len(cells)))
    centres = np.add.reduceat(off[order].astype(np.float64), starts) / sizes[:, None]
    d = points.shape[1]
    vectors = eigh(centres.T @ centres, subset_by_index=[d - count, d - 1])[1]
    return np.ascontiguousarray(vectors[:, ::-1].T, np.float32)


def learn(ranker: CoarseRanker, x: Any, options: CellOptions, stored: int) -> tuple[Shape, float]:
    """Cells for data like x, and the weight of their residuals.

    What the options leave open is chosen by the cost at which held-out rows of x find their
    nearest neighbours among the others; several bins against their memory, where a vector takes
    `stored` bytes.
    """
    sample = Sample(ranker, x)
    bins = _BINS if options.residual_bins is None else (int(options.residual_bins),)
    weights = _WEIGHTS if options.residual_weight is None else (float(options.residual_weight),)
    if options.visit == "list" or len(sample.own) < 2 * _QUERIES:
        weight = options.residual_weight
        shape = learned_shapes(ranker, sample, options, bins[:1])[0]
        return shape, _DEFAULT_WEIGHT if weight is None else float(weight)
    shapes = learned_shapes(ranker, sample, options, bins)
    if len(shapes) == 1 and len(weights) == 1:
        return shapes[0], weights[0]
    trial = Trial(ranker, sample, options)
    measured = [trial.costs(shape, weights) for shape in shapes]
    costs = np.array([found for found, _ in measured])
    if not np.isfinite(costs).any():
        return shapes[0], _DEFAULT_WEIGHT
    choice = 0
    if len(shapes) > 1:
        one, several = (stored + table for _, table in measured)
        growth = several / one - 1
        choice = int(costs[1].min() < (1 - growth - _GAIN_OF_BINS) * costs[0].min())
    return shapes[choice], weights[int(costs[choice].argmin())]


class Trial:
    """Searches of a few rows of a sample among the others.

    Parameters
    ----------
    ranker : CoarseRanker
    sample : Sample
    options : CellOptions
    """

    def __init__(self, ranker: CoarseRanker, sample: Sample, options: CellOptions):
        n = len(sample.own)
        picked = sample_rows(n, _QUERIES, np.random.default_rng(1))
        kept = np.delete(np.arange(n), picked)
        self._ranker, self._options, self._is_product = ranker, options, ranker.is_product
        self._queries = sample.rows[picked]
        self._rows, self._points = sample.rows[kept], sample.points[kept]
        self._own, self._norms = sample.own[kept], sample.norms[kept]
        metric = faiss.METRIC_INNER_PRODUCT if self._is_product else faiss.METRIC_L2
        queries = self._queries if self._is_product else ranker.points(self._queries)
        base = self._rows if self._is_product else self._points
        self._truth = faiss.knn(queries, base, min(_NEIGHBOURS, len(kept)), metric=metric)[1]

    def costs(self, shape: Shape, weights: tuple[float, ...]) -> tuple[list[float], float]:
        """Distance computations at which 90 % of the neighbours are found, for each weight.

        And what is kept of the cells, in bytes for each row.
        """
        local, moments = shape.place(self._points, self._own, self._norms)
        cells = self._own * shape.per_component + local
        occupied = Occupied.of_sorted(np.sort(cells), shape.per_component)
        means = Moments.of(cells, moments, shape.units)
        wanted = np.searchsorted(occupied.cells, cells)[self._truth]
        costs, kept = [], 0
        for weight in weights:
            ranked = ranked_cells(shape, means, occupied, weight, self._is_product)
            kept = means.nbytes + sum(np.asarray(part).nbytes for part in ranked)
            costs.append(self._cost(shape, ranked, wanted))
        return costs, kept / len(cells)

    def _cost(self, shape: Shape, ranked: Any, wanted: np.ndarray) -> float:
        recalls, costs = [0.0], [1.0]
        for probes in _PROBES:
            recall, cost = self._measured(shape, ranked, wanted, probes)
            if recall > recalls[-1]:
                recalls.append(recall)
                costs.append(cost)
            if recall >= _RECALL:
                return float(np.exp(np.interp(_RECALL, recalls, np.log(costs))))
        return np.inf

    def _measured(
        self, shape: Shape, ranked: Any, wanted: np.ndarray, probes: float
    ) -> tuple[float, float]:
        nlist = len(self._ranker.table)
        budget = int(np.ceil(probes * len(self._own) / nlist))
        plan = make_plan(self._options, nlist, budget, int(np.ceil(probes)), self._is_product)
        queries, coarse = prepared(self._ranker, shape, plan, self._queries)
        counts = np.zeros((len(wanted), 4), np.int64)
        found = chosen_by_query(queries, self._ranker.table, ranked, plan, counts)
        hits = [np.isin(some, cells).mean() for some, cells in zip(wanted, found, strict=True)]
        cost = counts[:, 0] + coarse + ranking_cost(counts, queries)
        return float(np.mean(hits)), float(cost.mean())
