"""Compiled scan of cells of float32 vectors, where the lists of a FAISS index hold them.

Lists are read by address: their memory must not change or move meanwhile.
"""

from typing import NamedTuple

import numba
import numpy as np
from numba.core import cgutils, types

from gmm_ivf._cell_ranking import choose_cells, nearest_lists

_compiled = numba.njit(
    cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy"
)


class Places(NamedTuple):
    """Where the entries of K lists lie.

    Attributes
    ----------
    codes, ids : ndarray of shape (K,), int64
        Addresses of float32 vectors and of int64 ids.
    sizes : ndarray of shape (K,), int64
    first : ndarray of shape (K,), int64
        Place of the first entry of a list in `keep`.
    keep : ndarray of bool
        Which entries may be found; empty for all.
    """

    codes: np.ndarray
    ids: np.ndarray
    sizes: np.ndarray
    first: np.ndarray
    keep: np.ndarray


class Queries(NamedTuple):
    """Queries and what is known of them.

    Attributes
    ----------
    rows : ndarray of shape (n, d), float32
        As the entries are stored.
    points : ndarray of shape (n, d), float32
        As the means are.
    projections : ndarray of shape (n, t), float32
    distances : ndarray of shape (n, m), float32
        To all means, or to those of `lists`: squared, or negative inner products.
    lists : ndarray of shape (n, m), int32
        Lists to rank, -1 for none; of shape (n, 0) where all distances are there.
    """

    rows: np.ndarray
    points: np.ndarray
    projections: np.ndarray
    distances: np.ndarray
    lists: np.ndarray


class Plan(NamedTuple):
    """What one search may look at; see `choose_cells`."""

    lists_ranked: int
    shortlist: int
    budget: int
    by_list: bool
    is_product: bool


@numba.extending.intrinsic
def _pointer(typing_context, address):
    """The pointer that an integer stands for."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@_compiled
def _vectors_at(address, rows, width):
    return numba.carray(_pointer(address), (rows, width), np.float32)  # pyright: ignore


@_compiled
def _ids_at(address, rows):
    return numba.carray(_pointer(address), (rows,), np.int64)  # pyright: ignore


# A call for every vector, with its arguments, would cost as much as the distance.
@numba.njit(inline="always")
def _distance(query, vectors, row, is_product):
    total = np.float32(0)
    if is_product:
        for t in range(len(query)):
            total -= query[t] * vectors[row, t]
    else:
        for t in range(len(query)):
            difference = query[t] - vectors[row, t]
            total += difference * difference
    return total


@numba.njit(inline="always")
def _may_find(places, i, row):
    return len(places.keep) == 0 or places.keep[places.first[i] + row]


@_compiled
def _replace_worst(best, labels, distance, label):
    """Put an entry in the place of the worst one of a max-heap."""
    k, place = len(best), 0
    while True:
        child = 2 * place + 1
        if child >= k:
            break
        if child + 1 < k and best[child + 1] > best[child]:
            child += 1
        if best[child] <= distance:
            break
        best[place], labels[place] = best[child], labels[child]
        place = child
    best[place], labels[place] = distance, label


@_compiled
def _spans(chosen, last, rest, cells):
    """Places to scan, those of neighbouring cells made one: (lists, begins, ends)."""
    lists = np.empty(len(chosen), np.int64)
    begins, ends = np.empty_like(lists), np.empty_like(lists)
    n = 0
    for c in chosen:
        begin = cells.begin[c]
        end = begin + (rest if c == last else cells.size[c])
        if n and lists[n - 1] == cells.own[c] and ends[n - 1] == begin:
            ends[n - 1] = end
        else:
            lists[n], begins[n], ends[n] = cells.own[c], begin, end
            n += 1
    return lists[:n], begins[:n], ends[:n]


@_compiled
def _known_distances(q, queries, means, cells, plan, distances):
    """Lists to rank, and distances to them and to their links, in `distances` of shape (K,).

    Returns the lists, ascending, and how many distances had to be computed.
    """
    if queries.lists.shape[1] == 0:
        distances[:] = queries.distances[q]
        return nearest_lists(distances, plan.lists_ranked), 0
    distances[:] = np.nan
    found = 0
    lists = np.empty(queries.lists.shape[1], np.int32)
    for p in range(len(lists)):
        i = queries.lists[q, p]
        if i >= 0:
            distances[i] = queries.distances[q, p]
            lists[found] = i
            found += 1
    lists = np.sort(lists[:found])
    computed = 0
    for i in lists:
        for c in range(cells.start[i], cells.start[i + 1]):
            j = cells.link[c]
            if np.isnan(distances[j]):
                distances[j] = _distance(queries.points[q], means, j, plan.is_product)
                computed += 1
    return lists, computed


@_compiled
def _work(means, cells):
    """Memory that choosing cells writes to, for one thread."""
    n = len(cells.own) + 1
    arrays = (
        np.empty(n, np.float32),
        np.empty(n, np.float32),
        np.empty(n, np.int32),
        np.empty(n, np.int32),
        np.empty(n, np.int32),
    )
    return np.empty(len(means), np.float32), arrays


@_compiled
def chosen_cells(q, queries, means, cells, plan, work, counts):
    """Cells to scan for query q as from `choose_cells`; its work goes to ``counts[q]``.

    Counts are: entries to scan, cells with a first and with a second score, distances to means.
    """
    distances, arrays = work
    lists, computed = _known_distances(q, queries, means, cells, plan, distances)
    chosen, last, rest, ranked, refined = choose_cells(
        distances,
        lists,
        queries.projections[q],
        cells,
        plan.by_list,
        plan.shortlist,
        plan.budget,
        arrays,
    )
    scanned = 0
    for c in chosen:
        scanned += rest if c == last else cells.size[c]
    counts[q, 0], counts[q, 1], counts[q, 2], counts[q, 3] = scanned, ranked, refined, computed
    return chosen, last, rest


@_compiled
def search_some(numbers, queries, means, cells, places, plan, best, labels, counts):
    """Search for the queries of some numbers.

    Parameters
    ----------
    numbers : ndarray of int64
    queries : Queries
    means : ndarray of shape (K, d), float32
    cells : Ranked
    places : Places
    plan : Plan
    best : ndarray of shape (n, k), float32
        Full of the worst value; becomes distances, least first.
    labels : ndarray of shape (n, k), int64
        Full of -1; becomes ids.
    counts : ndarray of shape (n, 4), int64
        See `chosen_cells`.
    """
    work = _work(means, cells)
    d = queries.rows.shape[1]
    for q in numbers:
        chosen, last, rest = chosen_cells(q, queries, means, cells, plan, work, counts)
        lists, begins, ends = _spans(chosen, last, rest, cells)
        query, heap, names = queries.rows[q], best[q], labels[q]
        for s in range(len(lists)):
            i = lists[s]
            vectors = _vectors_at(places.codes[i], places.sizes[i], d)
            ids = _ids_at(places.ids[i], places.sizes[i])
            for row in range(begins[s], ends[s]):
                distance = _distance(query, vectors, row, plan.is_product)
                if distance < heap[0] and _may_find(places, i, row):
                    _replace_worst(heap, names, distance, ids[row])
        order = np.argsort(heap, kind="mergesort")
        heap[:], names[:] = heap[order], names[order]


@_compiled
def within_some(numbers, queries, means, cells, places, plan, radius, found, counts):
    """Entries below a distance, for the queries of some numbers.

    ``found[q]`` says how many of query q there are; returned are their distances and ids, query
    after query. Other parameters are those of `search_some`.
    """
    work = _work(means, cells)
    d, total = queries.rows.shape[1], 0
    distances, labels = np.empty(1024, np.float32), np.empty(1024, np.int64)
    for q in numbers:
        chosen, last, rest = chosen_cells(q, queries, means, cells, plan, work, counts)
        lists, begins, ends = _spans(chosen, last, rest, cells)
        query = queries.rows[q]
        for s in range(len(lists)):
            i = lists[s]
            vectors = _vectors_at(places.codes[i], places.sizes[i], d)
            ids = _ids_at(places.ids[i], places.sizes[i])
            if total + ends[s] - begins[s] > len(labels):
                room = 2 * (total + ends[s] - begins[s])
                distances = np.concatenate((distances, np.empty(room, np.float32)))
                labels = np.concatenate((labels, np.empty(room, np.int64)))
            for row in range(begins[s], ends[s]):
                distance = _distance(query, vectors, row, plan.is_product)
                if distance < radius and _may_find(places, i, row):
                    distances[total], labels[total] = distance, ids[row]
                    total += 1
                    found[q] += 1
    return distances[:total], labels[:total]


@_compiled
def cells_of_some(numbers, queries, means, cells, plan, chosen, counts):
    """Cells to scan for the queries of some numbers, one array each, in the list `chosen`."""
    work = _work(means, cells)
    for q in numbers:
        some, _, _ = chosen_cells(q, queries, means, cells, plan, work, counts)
        chosen.append(some)
