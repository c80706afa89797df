"""Rules applied to many vectors: a few rows at a time, on the CPU or with torch on a GPU."""

from typing import Any

import numpy as np
import torch

from gmm_ivf._arrays import order, take, true_places
from gmm_ivf.kernels.torch_backend import exact_float32
from gmm_ivf.rules import Near, Rule, squared_distances

# Elements of the means that are gathered at a time, and of distances to all means on a GPU.
_GATHERED = 1 << 18
_GATHERED_ON_GPU = 1 << 26


def pairs_by_rule(
    rule: Rule,
    points: np.ndarray,
    table: np.ndarray,
    primary: np.ndarray,
    lists: np.ndarray,
    max_lists: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Flat (rows, lists) pairs that a rule chooses, in order of rows, the primary of a row first.

    A few rows at a time are looked at, since each has candidates of its own.

    Parameters
    ----------
    rule : Rule
    points : ndarray of shape (n, d), float32
    table : ndarray of shape (K, d), float32
        Means.
    primary : ndarray of shape (n,), int64
    lists : ndarray of shape (n, m), int64
        As for `Near`.
    max_lists : int

    Returns
    -------
    rows, lists : ndarray of shape (entries,), int64
    """
    size = max(1, _GATHERED // (lists.shape[1] * table.shape[1]))
    parts = []
    for start in range(0, len(points), size):
        where = slice(start, start + size)
        near = Near(points[where], table, primary[where], lists[where])
        chosen, columns = np.nonzero(rule.choose(near, max_lists))
        parts.append((chosen + start, near.lists[chosen, columns]))
    rows, chosen = (np.concatenate(part) for part in zip(*parts, strict=True))
    return rows, chosen


def pairs_on_gpu(
    rule: Rule, points: np.ndarray, table: np.ndarray, max_lists: int, device: Any
) -> tuple[np.ndarray, np.ndarray]:
    """As `pairs_by_rule`, with the nearest means found on a torch device, too.

    Distances to all means are rounded as FAISS's are, though not alike: where two are equal to
    rounding, another may come first than on the CPU.

    Parameters
    ----------
    rule : Rule
    points : ndarray of shape (n, d), float32
    table : ndarray of shape (K, d), float32
    max_lists : int
    device : torch.device

    Returns
    -------
    rows, lists : ndarray of shape (entries,), int64
    """
    means = torch.tensor(table, device=device)
    m = min(rule.candidates, len(means))
    norms = torch.einsum("kd,kd->k", means, means)
    size = max(1, _GATHERED_ON_GPU // max(len(means), m * means.shape[1]))
    parts = []
    for start in range(0, len(points), size):
        rows = torch.tensor(points[start : start + size], device=device)
        with exact_float32():
            # Without |x|^2, which ranks nothing.
            lists = torch.topk(norms - 2 * (rows @ means.T), m, dim=1, largest=False)[1]
        # Of equal distances in float64 the lower number is first.
        primary = take(lists, order(squared_distances(means, lists, rows), lists))[:, 0]
        near = Near(rows, means, primary, lists)
        chosen, columns = true_places(rule.choose(near, max_lists))
        parts.append(((chosen + start).cpu().numpy(), near.lists[chosen, columns].cpu().numpy()))
    rows, chosen = (np.concatenate(part) for part in zip(*parts, strict=True))
    return rows, chosen
