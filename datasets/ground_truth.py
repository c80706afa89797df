"""Exact nearest neighbours, in bounded memory, with ties in a fixed order."""

import numpy as np
import torch
from tqdm import tqdm

from gmm_ivf.datasets.dataset import METRICS
from gmm_ivf.datasets.rows import check_finite, row_blocks, unit_rows

_QUERY_ROWS = 2048
_BASE_ROWS = 8192
_MARGIN = 32
_GATHER_VALUES = 1 << 22


def exact_neighbors(
    base: np.ndarray, query: np.ndarray, k: int, metric: str = "l2"
) -> tuple[np.ndarray, np.ndarray]:
    """Find the exact k nearest base vectors of each query.

    A float32 pass over the base keeps k and some more candidates a query; their distances are then
    computed in float64 from the vectors as given. Where float32 may have lost a neighbour, by a
    bound on its rounding, the query is searched again in float64.

    Parameters
    ----------
    base : ndarray of shape (n, d), real
        May be memory-mapped; it is read in blocks.
    query : ndarray of shape (n_queries, d), real
    k : int
        Neighbours a query, at most n.
    metric : {"l2", "ip", "cosine"}, default="l2"
        "cosine" needs no unit rows.

    Returns
    -------
    ids : ndarray of shape (n_queries, k), int64
        Rows of base, best first; equal distances by lower id.
    distances : ndarray of shape (n_queries, k), float32
        Euclidean (not squared), inner product (largest first), or one minus the cosine.

    Raises
    ------
    ValueError
        If shapes disagree, k is outside 1..n, the metric is unknown, or a value is not finite.
    """
    _check(base, query, k, metric)
    centre = _centre(base, metric)
    ids = np.empty((len(query), k), np.int64)
    costs = np.empty((len(query), k), np.float64)
    pairs = len(query) * len(base)
    with tqdm(desc="exact neighbours", total=pairs, unit="pair", unit_scale=True, delay=2) as bar:
        for first in range(0, len(query), _QUERY_ROWS):
            rows = np.asarray(query[first : first + _QUERY_ROWS])
            part = slice(first, first + len(rows))
            ids[part], costs[part] = _search(base, rows, k, metric, centre, bar)
    return ids, _reported(costs, metric)


def distances_to(
    base: np.ndarray, query: np.ndarray, ids: np.ndarray, metric: str = "l2"
) -> np.ndarray:
    """Distances from each query to the base rows named for it, in `exact_neighbors`' convention.

    Parameters
    ----------
    base, query : ndarray of shape (n, d) and (n_queries, d), real
    ids : ndarray of shape (n_queries, m), integer
    metric : {"l2", "ip", "cosine"}, default="l2"

    Returns
    -------
    ndarray of shape (n_queries, m), float32
    """
    costs = np.empty(ids.shape, np.float64)
    for part in _gather_blocks(ids, base.shape[1]):
        costs[part] = _costs(base[ids[part]], query[part, None, :], metric)
    return _reported(costs, metric)


def _check(base: np.ndarray, query: np.ndarray, k: int, metric: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {METRICS}, got {metric!r}")
    if base.ndim != 2 or query.ndim != 2 or base.shape[1] != query.shape[1]:
        raise ValueError(
            "base and query must be 2-D with the same number of columns, "
            f"got shapes {base.shape} and {query.shape}"
        )
    if not 1 <= k <= len(base):
        raise ValueError(f"k must be between 1 and the {len(base)} rows of base, got {k}")
    check_finite(base, "base")
    check_finite(query, "query")


def _centre(base: np.ndarray, metric: str) -> np.ndarray:
    """Point to subtract before the float32 pass: rounding grows with the distance from it.

    It changes no order: Euclidean distances do not see it, and every inner product of a query
    falls by the same amount.
    """
    if metric == "cosine":
        return np.zeros(base.shape[1])
    total = np.zeros(base.shape[1])
    for _, block in row_blocks(base):
        total += block.sum(axis=0, dtype=np.float64)
    return total / len(base)


def _search(base, rows, k, metric, centre, bar):
    """Ids and float64 costs of the k nearest of a block of queries."""
    keep = min(len(base), k + _MARGIN)
    found, last, slack = _candidates(base, rows, keep, metric, centre, bar)
    ids, costs = _rank(base, rows, found, k, metric)
    if keep < len(base):
        worst = costs[:, -1]
        underflow = base.shape[1] * np.finfo(np.float32).tiny
        # Not finite after an overflow.
        safe = np.isfinite(last) & (last > worst + slack(worst) + underflow)
        for row in np.flatnonzero(~safe):
            ids[row], costs[row] = _search_one(base, rows[row], k, metric)
    return ids, costs


def _candidates(base, rows, keep, metric, centre, bar):
    """The `keep` best base rows of each query by float32, and how far to trust them.

    Returns ids [q, keep]; the cost of the worst one kept [q]; and a function from a cost to the
    rounding that a float32 cost near it may carry.
    """
    near = _narrow(rows, metric, centre if metric == "l2" else 0.0)
    best = torch.empty((len(rows), 0))
    ids = torch.empty((len(rows), 0), dtype=torch.int64)
    longest = 0.0
    for first in range(0, len(base), _BASE_ROWS):
        block = _narrow(base[first : first + _BASE_ROWS], metric, centre)
        norms = torch.linalg.vector_norm(block, dim=1)
        longest = max(longest, float(norms.max()))
        if metric == "l2":
            costs = torch.addmm(norms.square()[None, :], near, block.T, alpha=-2)
        else:
            costs = -(near @ block.T)
        value, column = torch.topk(costs, min(keep, len(block)), dim=1, largest=False)
        best = torch.cat([best, value], dim=1)
        ids = torch.cat([ids, column + first], dim=1)
        best, order = torch.topk(best, min(keep, best.shape[1]), dim=1, largest=False)
        ids = ids.gather(1, order)
        bar.update(len(rows) * len(block))
    lengths = np.linalg.norm(near.numpy().astype(np.float64), axis=1)
    last = best[:, -1].numpy().astype(np.float64)
    # Rounding of a sum of d products: statistically sqrt(d) units in the last place, here times 4.
    unit = np.finfo(np.float32).eps * (4 * np.sqrt(base.shape[1]) + 8)
    if metric == "l2":
        last += lengths**2
        return ids.numpy(), last, lambda cost: unit * (2 * lengths + np.sqrt(cost)) ** 2
    if metric == "ip":
        last -= rows.astype(np.float64) @ centre
        return ids.numpy(), last, lambda _: unit * lengths * longest
    return ids.numpy(), last + 1, lambda _: unit


def _narrow(rows: np.ndarray, metric: str, centre) -> torch.Tensor:
    """Rows as the float32 pass sees them: centred, or of unit length for the cosine."""
    if metric == "cosine":
        return torch.from_numpy(unit_rows(rows))
    with np.errstate(over="ignore"):
        return torch.from_numpy((rows - centre).astype(np.float32))


def _costs(base_rows: np.ndarray, query_rows: np.ndarray, metric: str) -> np.ndarray:
    """Float64 costs over the last axis, lower is better; equal vectors give equal costs."""
    x, q = base_rows.astype(np.float64), query_rows.astype(np.float64)
    if metric == "l2":
        return np.square(x - q).sum(axis=-1)
    products = (x * q).sum(axis=-1)
    if metric == "ip":
        return -products
    lengths = np.sqrt(np.square(x).sum(axis=-1) * np.square(q).sum(axis=-1))
    return 1 - products / np.where(lengths == 0, 1, lengths)


def _gather_blocks(ids: np.ndarray, d: int):
    step = max(1, _GATHER_VALUES // (ids.shape[1] * d))
    return (slice(first, first + step) for first in range(0, len(ids), step))


def _rank(base, rows, found, k, metric):
    """The k best of the candidates by float64 cost, then by id."""
    ids = np.empty((len(rows), k), np.int64)
    costs = np.empty((len(rows), k), np.float64)
    for part in _gather_blocks(found, base.shape[1]):
        exact = _costs(base[found[part]], rows[part, None, :], metric)
        order = np.lexsort((found[part], exact), axis=1)[:, :k]
        ids[part] = np.take_along_axis(found[part], order, axis=1)
        costs[part] = np.take_along_axis(exact, order, axis=1)
    return ids, costs


def _search_one(base, row, k, metric):
    """Search one query in float64 throughout."""
    costs = np.concatenate([_costs(block, row[None, :], metric) for _, block in row_blocks(base)])
    order = np.lexsort((np.arange(len(costs)), costs))[:k]
    return order, costs[order]


def _reported(costs: np.ndarray, metric: str) -> np.ndarray:
    if metric == "l2":
        return np.sqrt(costs).astype(np.float32)
    return (-costs if metric == "ip" else costs).astype(np.float32)
