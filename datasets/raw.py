"""What a reader hands over: arrays as the file holds them, not yet cast or checked together."""

from typing import NamedTuple

import numpy as np


class RawVectors(NamedTuple):
    """Arrays of one file; ``query`` and what follows is None where the file has none."""

    base: np.ndarray
    query: np.ndarray | None = None
    ground_truth: np.ndarray | None = None
    distances: np.ndarray | None = None
    metric: str = "l2"


def hold_out_queries(base: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split off a tenth of the rows, at most 1,000, as queries: (base, query).

    The choice is random with a fixed seed. Rows from the end move into the places of those taken,
    in memory only, so that a mapped file of any size is not copied.

    Raises
    ------
    ValueError
        If there are fewer than two rows.
    """
    n = len(base)
    if n < 2:
        raise ValueError(f"base must have at least 2 rows to hold queries out of it, got {n}")
    count = min(1000, max(1, n // 10))
    held = np.sort(np.random.default_rng(0).choice(n, count, replace=False))
    query = np.array(base[held])
    tail = np.arange(n - count, n)
    base[held[held < n - count]] = base[tail[~np.isin(tail, held)]]
    return base[: n - count], query
