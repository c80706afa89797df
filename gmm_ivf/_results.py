"""Result rows of a search: copies of one id taken out, and what the search cost."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SearchCost:
    """Distance computations of the last search, one entry per query.

    Attributes
    ----------
    scanned : ndarray of shape (q,), int64
        Entries in the probed lists; every copy counts.
    coarse : ndarray of shape (q,), int64
        Comparisons with means. FAISS counts those of a graph for many queries together, so each
        query has an equal share of them.
    ranking : ndarray of shape (q,), float64
        Other work, in units of one distance: ranking of cells, and exact distances of `refine`.
    """

    scanned: np.ndarray
    coarse: np.ndarray
    ranking: np.ndarray

    @property
    def distance_computations(self) -> np.ndarray:
        """Sum of the three parts, (q,) float64."""
        return self.scanned + self.coarse + self.ranking


def first_of_each_id(
    distances: np.ndarray, labels: np.ndarray, k: int, worst: np.float32
) -> tuple[np.ndarray, np.ndarray]:
    """Keep the best entry of every id and the first k of them, row by row.

    Parameters
    ----------
    distances : ndarray of shape (q, w), float32
        Best first within a row.
    labels : ndarray of shape (q, w), int64
        -1 where a slot is empty.
    k : int
        Columns wanted; may exceed w.
    worst : float32
        Distance of an empty slot.

    Returns
    -------
    distances : ndarray of shape (q, k), float32
    labels : ndarray of shape (q, k), int64
        Unique within a row, padded with -1.
    """
    # Copies need not be neighbours: a residual codec gives each its own distance. A stable sort by
    # id leaves the best of each id in front of its copies.
    order = np.argsort(labels, axis=1, kind="stable")
    ordered = np.take_along_axis(labels, order, axis=1)
    is_first = np.ones(labels.shape, bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    keep = np.empty(labels.shape, bool)
    np.put_along_axis(keep, order, is_first & (ordered >= 0), axis=1)

    column = np.cumsum(keep, axis=1) - 1
    rows, entries = np.nonzero(keep & (column < k))
    columns = column[rows, entries]
    out_distances = np.full((len(labels), k), worst, np.float32)
    out_labels = np.full((len(labels), k), -1, np.int64)
    out_distances[rows, columns] = distances[rows, entries]
    out_labels[rows, columns] = labels[rows, entries]
    return out_distances, out_labels


def first_within_each_row(
    lims: np.ndarray, distances: np.ndarray, labels: np.ndarray, is_product: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keep the best entry of every id of a range search, query by query.

    Parameters
    ----------
    lims : ndarray of shape (q + 1,), int64
        Where the results of each query begin and end.
    distances : ndarray of shape (lims[-1],), float32
    labels : ndarray of shape (lims[-1],), int64
    is_product : bool
        Whether larger is better.

    Returns
    -------
    lims, distances, labels
        As given, with each id once within a query. What remains keeps its order.
    """
    query = np.repeat(np.arange(len(lims) - 1), np.diff(lims))
    order = np.lexsort((-distances if is_product else distances, labels, query))
    is_first = np.ones(len(labels), bool)
    same = labels[order][1:] == labels[order][:-1]
    is_first[1:] = ~(same & (query[order][1:] == query[order][:-1]))
    keep = np.sort(order[is_first])
    counts = np.bincount(query[keep], minlength=len(lims) - 1)
    return np.concatenate([[0], np.cumsum(counts)]), distances[keep], labels[keep]
