"""Recall that ties and duplicates cannot bend, and cost read off a recall curve. Pure numpy."""

from collections.abc import Sequence
from typing import Any

import numpy as np

#: How far past the k-th true neighbour a result may lie and still count, name -> (relative,
#: absolute). "strict" forgives float32 rounding only; "ann-benchmarks" is that harness's epsilon.
TIES: dict[str, tuple[float, float]] = {"strict": (1e-6, 0.0), "ann-benchmarks": (0.0, 1e-3)}

_BLOCK_BYTES = 64 << 20


def exact_scores(base: Any, queries: np.ndarray, ids: np.ndarray, metric: str) -> np.ndarray:
    """Recompute the scores of given neighbours in float64.

    Parameters
    ----------
    base : array-like of shape (n, d), float32
        Base vectors; a memmap or an HDF5 dataset is read row by row.
    queries : ndarray of shape (q, d)
    ids : ndarray of shape (q, k), int64
        Rows of `base`; -1 marks an empty place.
    metric : {"l2", "ip", "cosine"}

    Returns
    -------
    ndarray of shape (q, k), float64
        Euclidean distance (not squared) for "l2", otherwise the inner product. Empty places hold
        the worst value: inf, or -inf for an inner product.

    Raises
    ------
    ValueError
        If an id is not a row of `base`.
    """
    ids = np.asarray(ids, dtype=np.int64)
    if ids.size and (ids.max() >= len(base) or ids.min() < -1):
        raise ValueError(
            f"ids must lie in -1..{len(base) - 1}, got {ids.min()}..{ids.max()}; "
            "pass row numbers of the base vectors"
        )
    scores = np.empty(ids.shape, dtype=np.float64)
    rows = max(1, _BLOCK_BYTES // (8 * max(1, ids.shape[1]) * queries.shape[1]))
    for start in range(0, len(ids), rows):
        block = slice(start, start + rows)
        query = np.asarray(queries[block], dtype=np.float64)[:, None, :]
        neighbours = _take(base, np.maximum(ids[block], 0)).astype(np.float64)
        if metric == "l2":
            scores[block] = np.sqrt(((neighbours - query) ** 2).sum(axis=2))
        else:
            scores[block] = (neighbours * query).sum(axis=2)
    scores[ids < 0] = np.inf if metric == "l2" else -np.inf
    return scores


def kth_scores(
    base: Any, queries: np.ndarray, truth: np.ndarray, k: int, metric: str
) -> np.ndarray:
    """Score of the k-th true neighbour of every query, recomputed in float64.

    Parameters
    ----------
    truth : ndarray of shape (q, at least k), int64
        Ids of the true neighbours, best first.

    Returns
    -------
    ndarray of shape (q,), float64
        The worst score among the first k. A file's order is that of float32 distances, so the
        k-th entry alone may not be the worst.
    """
    scores = exact_scores(base, queries, truth[:, :k], metric)
    return scores.max(axis=1) if metric == "l2" else scores.min(axis=1)


def recall_per_query(
    ids: np.ndarray, scores: np.ndarray, kth: np.ndarray, metric: str, ties: str = "strict"
) -> np.ndarray:
    """Share of the k places filled with a true neighbour, any tied id accepted once.

    Parameters
    ----------
    ids : ndarray of shape (q, k), int64
        Result of a search; -1 is empty.
    scores : ndarray of shape (q, k), float64
        From `exact_scores` on the same ids.
    kth : ndarray of shape (q,), float64
        From `kth_scores`.
    ties : {"strict", "ann-benchmarks"}
        Tolerance at the last place, see `TIES`.

    Returns
    -------
    ndarray of shape (q,), float64
        In [0, 1].
    """
    relative, absolute = TIES[ties]
    slack = (np.abs(kth) * relative + absolute)[:, None]
    limit = kth[:, None]
    near = scores <= limit + slack if metric == "l2" else scores >= limit - slack
    return (near & _first_occurrence(ids)).sum(axis=1) / ids.shape[1]


def pareto_front(recalls: Sequence[float], costs: Sequence[float]) -> list[int]:
    """Positions of the points that no cheaper point equals in recall, cheapest first."""
    front: list[int] = []
    for i in sorted(range(len(costs)), key=lambda i: (costs[i], -recalls[i])):
        if not front or recalls[i] > recalls[front[-1]]:
            front.append(i)
    return front


def cost_at_recall(recalls: Sequence[float], costs: Sequence[float], target: float) -> float | None:
    """Cost at which the Pareto front of a curve crosses `target`.

    log(cost) is interpolated linearly over recall between the two neighbouring points.

    Returns
    -------
    float or None
        None when the curve does not cross: it ends below `target`, or its cheapest point lies
        above. Nothing is extrapolated.
    """
    front = pareto_front(recalls, costs)
    if not front:
        return None
    x = np.array([recalls[i] for i in front], dtype=np.float64)
    if not x[0] <= target <= x[-1]:
        return None
    y = np.log([costs[i] for i in front])
    return float(np.exp(np.interp(target, x, y)))


def gap_at_recall(recalls: Sequence[float], costs: Sequence[float], target: float) -> float | None:
    """Recall between the two points that `cost_at_recall` interpolates, 0 at a point itself.

    Returns
    -------
    float or None
        None when the curve does not cross.
    """
    x = [recalls[i] for i in pareto_front(recalls, costs)]
    if not x or not x[0] <= target <= x[-1]:
        return None
    below, above = max(r for r in x if r <= target), min(r for r in x if r >= target)
    return above - below


def _first_occurrence(ids: np.ndarray) -> np.ndarray:
    """True where an id stands for the first time in its row and is not -1."""
    order = np.argsort(ids, axis=1, kind="stable")
    ordered = np.take_along_axis(ids, order, axis=1)
    fresh = np.ones(ids.shape, dtype=bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    result = np.empty_like(fresh)
    np.put_along_axis(result, order, fresh, axis=1)
    return result & (ids >= 0)


def _take(base: Any, ids: np.ndarray) -> np.ndarray:
    """base[ids], reading each row once and in order, as HDF5 wants it."""
    if isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        return base[ids]
    unique, inverse = np.unique(ids, return_inverse=True)
    return np.asarray(base[unique])[inverse.reshape(ids.shape)]
