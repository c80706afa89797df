"""The rule "responsibility", and checks of lists. The first list is always the nearest mean."""

import math

import numpy as np

from gmm_ivf._arrays import Array, ascending, filled, namespace, true_places


def _further(primary: Array, ids: Array, max_lists: int) -> Array:
    """Mask of the candidates that may follow the primary list: best first, up to the cap."""
    usable = (ids != primary[:, None]) & (ids >= 0)
    return usable & (namespace(ids).cumsum(usable, 1) < max_lists)


def select_lists(
    log_resp: Array, primary: Array, ids: Array, log_tau: float, max_lists: int
) -> tuple[Array, Array]:
    """Lists of each row: the primary, then every component of posterior above tau up to the cap.

    All arrays are of numpy, or tensors on one device.

    Parameters
    ----------
    log_resp : ndarray or Tensor of shape (n, m), float64
        Natural logarithm of the posteriors, best first.
    primary : ndarray or Tensor of shape (n,), int64
        List of the nearest mean; kept whatever its posterior is.
    ids : ndarray or Tensor of shape (n, m), int64
        Component of each posterior, -1 for none.
    log_tau : float
        Threshold; a posterior has to be above it. Logarithms hold where posteriors of many
        dimensions underflow.
    max_lists : int
        Most lists per row, the primary included.

    Returns
    -------
    rows, lists : ndarray or Tensor of shape (entries,), int64
        Flat pairs in order of rows, the primary of a row first.
    """
    xp, first = namespace(ids), primary[:, None]
    chosen = _further(primary, ids, max_lists) & (log_resp > log_tau)
    table = xp.concatenate([first, ids], 1)
    rows, columns = true_places(xp.concatenate([filled(first, True), chosen], 1))
    return rows, table[rows, columns]


def solve_threshold(
    log_resp: Array, primary: Array, ids: Array, replication: float, max_lists: int
) -> float:
    """Threshold at which `select_lists` stores `replication` entries per vector.

    Parameters
    ----------
    log_resp, primary, ids, max_lists
        As for `select_lists`, of a sample.
    replication : float
        Mean number of lists per vector wanted, at least 1.

    Returns
    -------
    float
        Natural logarithm of tau: 0.0 when no copies are wanted, -inf when all candidates are.
        Equal posteriors are taken or left together, whichever comes closer.
    """
    usable = _further(primary, ids, max_lists) & (log_resp > -math.inf)
    candidates = ascending(log_resp[usable])
    wanted = min(round((replication - 1) * len(primary)), len(candidates))
    if wanted == 0:
        return 0.0
    value = candidates[len(candidates) - wanted]
    above, with_equal = int((candidates > value).sum()), int((candidates >= value).sum())
    if wanted - above < with_equal - wanted:
        return float(value)
    # Any value in between separates the two; the next one down does, as the comparison is strict.
    below = len(candidates) - with_equal
    return float(candidates[below - 1]) if below else -math.inf


def pairs_of_table(lists: np.ndarray, nlist: int) -> tuple[np.ndarray, np.ndarray]:
    """Flat (rows, lists) pairs of an (n, m) table of lists, in which -1 means skip.

    Raises
    ------
    ValueError
        When a list is outside [-1, nlist), or comes twice in one row.
    """
    ordered = np.sort(lists, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        row, column = np.argwhere(twice)[0]
        raise ValueError(f"lists: row {row} names list {ordered[row, column]} twice.")
    check_lists(lists[lists != -1], nlist)
    rows, columns = np.nonzero(lists >= 0)
    return rows, lists[rows, columns]


def check_lists(lists: np.ndarray, nlist: int) -> None:
    """Refuse list numbers outside [0, nlist), which FAISS would write to without a check.

    Raises
    ------
    ValueError
        Naming the first of them.
    """
    bad = (lists < 0) | (lists >= nlist)
    if bad.any():
        raise ValueError(f"lists must lie in [0, {nlist}); got {lists[bad.argmax()]}.")
