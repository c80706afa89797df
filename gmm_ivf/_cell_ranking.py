"""Compiled ranking of the cells of a query: which to scan, and how far.

Everything here runs without Python and without threads of its own: callers spread queries over
threads. Scores are such that smaller is better for either metric.
"""

from typing import NamedTuple

import numba
import numpy as np

_BUCKETS = 512
# Sums in any order, so that loops vectorise; infinities keep their meaning.
_compiled = numba.njit(
    cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy"
)
# Scores are numbers, which lets least and greatest be found without branches.
_compiled_for_numbers = numba.njit(
    cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz", "nnan"}, error_model="numpy"
)


class Ranked(NamedTuple):
    """What ranking reads of C cells of K components, cells of a component one after another.

    A cell of component i with link j scores ``near * D[i] + far * D[j] + rough`` at first, where D
    holds distances of the query to all means; a finer score replaces `rough` by `fine` and adds
    ``sketch @ p`` for the projection p of the query.

    Attributes
    ----------
    start : ndarray of shape (K + 1,), int64
        First cell of each component.
    own, link : ndarray of shape (C,), int32
        Components i and j.
    near, far, rough, fine : ndarray of shape (C,), float32
    sketch : ndarray of shape (C, t), int8
        In units of `unit`.
    unit : float
    size, begin : ndarray of shape (C,), int32
        Entries, and the place of the first one in the list of the component.
    """

    start: np.ndarray
    own: np.ndarray
    link: np.ndarray
    near: np.ndarray
    far: np.ndarray
    rough: np.ndarray
    fine: np.ndarray
    sketch: np.ndarray
    unit: float
    size: np.ndarray
    begin: np.ndarray


@_compiled_for_numbers
def prefix(scores, sizes, target, chosen):
    """Best items whose sizes make up the target: (how many, their size).

    Items are taken by score, of equal ones the first, until the target is reached. Their numbers
    come in `chosen`, which has room for one more; the last one is that which reached it.
    """
    n = len(scores)
    if n == 0:
        return 0, np.int64(0)
    low, high = scores[0], scores[0]
    for t in range(n):
        low = min(low, scores[t])
        high = max(high, scores[t])
    # Buckets of equal width: one pass over the scores finds that in which the target lies, and
    # only those few have to be sorted.
    scale = np.float32(_BUCKETS - 1) / (high - low) if high > low else np.float32(0)
    filled = np.zeros(_BUCKETS, np.int64)
    for t in range(n):
        filled[int((scores[t] - low) * scale)] += sizes[t]
    edge, total = 0, np.int64(0)
    while edge < _BUCKETS - 1 and total + filled[edge] < target:
        total += filled[edge]
        edge += 1
    count, inside = 0, 0
    on_edge = np.empty(n + 1, np.int32)
    for t in range(n):
        # Written anyway and kept if wanted: branches would be guessed wrong.
        bucket = int((scores[t] - low) * scale)
        chosen[count] = on_edge[inside] = t
        count += bucket < edge
        inside += bucket == edge
    for place in np.argsort(scores[on_edge[:inside]], kind="mergesort"):
        if total >= target:
            break
        chosen[count] = on_edge[place]
        count += 1
        total += sizes[on_edge[place]]
    return count, total


@_compiled
def rough_scores(distances, lists, cells, by_list, scores, numbers, sizes):
    """Score all cells of some lists in ascending order of lists; return how many there are."""
    m = 0
    for i in lists:
        own = distances[i]
        for c in range(cells.start[i], cells.start[i + 1]):
            other = distances[cells.link[c]]
            if by_list:
                scores[m] = min(own, other)
            else:
                scores[m] = cells.near[c] * own + cells.far[c] * other + cells.rough[c]
            numbers[m], sizes[m] = c, cells.size[c]
            m += 1
    return m


@_compiled
def fine_score(c, distances, projection, cells):
    """The better score of a cell, by its sketch."""
    own, other = distances[cells.own[c]], distances[cells.link[c]]
    product = np.float32(0)
    for t in range(len(projection)):
        product += np.float32(cells.sketch[c, t]) * projection[t]
    score = cells.near[c] * own + cells.far[c] * other + cells.fine[c]
    return score + np.float32(cells.unit) * product


@_compiled
def nearest_lists(distances, count):
    """Numbers of the `count` least distances, ascending, int32."""
    chosen = np.empty(len(distances) + 1, np.int32)
    ones = np.ones(len(distances), np.int32)
    found, _ = prefix(distances, ones, count, chosen)
    return np.sort(chosen[:found])


@_compiled
def choose_cells(distances, lists, projection, cells, by_list, shortlist, budget, work):
    """Cells to scan for one query, ascending, and what it took.

    Parameters
    ----------
    distances : ndarray of shape (K,), float32
        Of the query to the means; those of `lists` and their links are read.
    lists : ndarray of int32
        Components whose cells are ranked, ascending.
    projection : ndarray of shape (t,), float32; empty for no second score
    cells : Ranked
    by_list : bool
        Whether a cell ranks by the nearer of its two components.
    shortlist, budget : int
        Entries in the cells that get the second score, and entries to scan.
    work : tuple of ndarray
        Two float32 and three int32 of shape (C + 1,), which are overwritten.

    Returns
    -------
    chosen : ndarray of int32
    last, rest : int
        The cell that is not scanned whole, and its entries to scan.
    ranked, refined : int
        Cells that got the first and the second score.
    """
    rough, fine, numbers, chosen, sizes = work
    m = rough_scores(distances, lists, cells, by_list, rough, numbers, sizes)
    refined = 0
    if len(projection) == 0 or by_list:
        count, total = prefix(rough[:m], sizes[:m], budget, chosen)
    else:
        refined, _ = prefix(rough[:m], sizes[:m], shortlist, chosen)
        chosen[:refined] = numbers[chosen[:refined]]
        for t in range(refined):
            c = chosen[t]
            numbers[t], sizes[t] = c, cells.size[c]
            fine[t] = fine_score(c, distances, projection, cells)
        count, total = prefix(fine[:refined], sizes[:refined], budget, chosen)
    found = numbers[chosen[:count]]
    last, rest = -1, 0
    if count and total > budget:
        last = found[count - 1]
        rest = cells.size[last] - (total - budget)
    return np.sort(found), last, rest, m, refined
