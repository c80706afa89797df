"""Searches through cells: what a query may look at, and its spread over threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from gmm_ivf._cell_options import CellOptions
from gmm_ivf._cell_table import Shape
from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._faiss import faiss
from gmm_ivf._vectors import LARGEST_SQUARED_NORM

# Distances to means that are held at a time.
_DISTANCES = 1 << 24
# Lists ranked for each one that is scanned: those further away hold next to nothing.
_RANKED_PER_PROBE = 12
_QUERIES_PER_TASK = 16
# Multiply-adds of the two scores of a cell, sketch apart.
_ROUGH, _FINE = 3, 1


@dataclass(frozen=True)
class Ranking:
    """What a search ranks cells by.

    Attributes
    ----------
    ranker : CoarseRanker
    shape : Shape
    cells : gmm_ivf._cell_ranking.Ranked
    options : CellOptions
    """

    ranker: CoarseRanker
    shape: Shape
    cells: Any
    options: CellOptions


def make_plan(options: CellOptions, nlist: int, budget: int, nprobe: int, is_product: bool) -> Any:
    """What a search for `budget` entries may look at, a `gmm_ivf._cell_scan.Plan`."""
    from gmm_ivf._cell_scan import Plan

    ranked = min(nlist, max(options.lists_ranked, _RANKED_PER_PROBE * nprobe))
    shortlist = int(np.ceil(options.shortlist * budget))
    return Plan(ranked, shortlist, budget, options.visit == "list", is_product)


def unit_product(ranker: CoarseRanker, rows: np.ndarray) -> np.ndarray:
    """Negative inner products of normalised rows with the means: (n, K) float32."""
    return -faiss.pairwise_distances(ranker.points(rows), ranker.table, faiss.METRIC_INNER_PRODUCT)


def query_blocks(n: int, nlist: int):
    """Slices of queries whose distances to all means are held at a time."""
    size = max(1, _DISTANCES // nlist)
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def prepared(
    ranker: CoarseRanker, shape: Shape, plan: Any, rows: np.ndarray
) -> tuple[Any, np.ndarray]:
    """Queries with their coarse distances, and the comparisons with means of each.

    Returns
    -------
    queries : gmm_ivf._cell_scan.Queries
    coarse : ndarray of shape (n,), int64
    """
    from gmm_ivf._cell_scan import Queries

    points = ranker.points(rows)
    n, nlist = len(rows), len(ranker.table)
    lists = np.empty((n, 0), np.int32)
    if ranker.has_graph:
        distances, found, coarse = ranker.counted_search(rows, plan.lists_ranked)
        lists = found.astype(np.int32)
        if plan.is_product:
            lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
            distances = -distances / np.maximum(lengths, np.finfo(np.float32).tiny)[:, None]
    elif plan.is_product:
        distances, coarse = unit_product(ranker, rows), np.full(n, nlist)
    else:
        distances = faiss.pairwise_distances(points, ranker.table)
        coarse = np.full(n, nlist)
    projections = points @ shape.directions.T
    if plan.by_list:
        projections = projections[:, :0]
    return (
        Queries(
            rows,
            points,
            np.ascontiguousarray(projections, np.float32),
            np.ascontiguousarray(distances, np.float32),
            lists,
        ),
        coarse,
    )


def searchable(queries: Any) -> np.ndarray:
    """Numbers of queries that are not so long that their distances overflow, ascending."""
    with np.errstate(over="ignore"):
        squared = np.einsum("nd,nd->n", queries.rows, queries.rows)
    return np.flatnonzero(squared <= LARGEST_SQUARED_NORM)


def query_order(queries: Any) -> np.ndarray:
    """Those of `searchable`, of one list after another: they scan the same memory."""
    numbers = searchable(queries)
    if queries.lists.shape[1]:
        nearest = queries.lists[numbers, 0]
    else:
        nearest = queries.distances[numbers].argmin(axis=1)
    return numbers[np.argsort(nearest, kind="stable")]


def over_threads(work: Callable[[np.ndarray], Any], order: np.ndarray) -> list[Any]:
    """Run compiled work on parts of the queries, on as many threads as FAISS has.

    Threads of our own, because those of numba's pool and FAISS's wait for each other in loops.
    Returns what the parts returned, in the order of the parts.
    """
    threads = min(faiss.omp_get_max_threads(), -(-len(order) // _QUERIES_PER_TASK))
    if threads <= 1:
        return [work(order)] if len(order) else []
    # Several parts for each thread, as some queries take longer than others.
    parts = np.array_split(order, min(8 * threads, -(-len(order) // _QUERIES_PER_TASK)))
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, parts))


def chosen_by_query(
    queries: Any, means: np.ndarray, ranked: Any, plan: Any, counts: np.ndarray
) -> list[np.ndarray]:
    """Cells to scan of each query, ascending; their counts, see `chosen_cells`, go to `counts`."""
    from numba import types
    from numba.typed import List

    from gmm_ivf._cell_scan import cells_of_some

    def work(numbers: np.ndarray) -> list[np.ndarray]:
        chosen = List.empty_list(types.Array(types.int32, 1, "C"))
        cells_of_some(numbers, queries, means, ranked, plan, chosen, counts)
        return list(chosen)

    numbers = searchable(queries)
    found = [np.empty(0, np.int32)] * len(queries.rows)
    cells = (some for part in over_threads(work, numbers) for some in part)
    for q, some in zip(numbers, cells, strict=True):
        found[q] = some
    return found


def ranking_cost(counts: np.ndarray, queries: Any) -> np.ndarray:
    """Work of ranking in units of one distance, (n,) float64; `counts` are of `chosen_cells`."""
    d, directions = queries.rows.shape[1], queries.projections.shape[1]
    ranked, refined, computed = counts[:, 1], counts[:, 2], counts[:, 3]
    scores = _ROUGH * ranked + (_FINE + directions) * refined
    return scores / d + computed + (directions if directions else 0)
