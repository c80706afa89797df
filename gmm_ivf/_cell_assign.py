"""Compiled parts of putting vectors into cells."""

import numba
import numpy as np

_TINY = np.finfo(np.float32).tiny
_compiled = numba.njit(
    cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy"
)


@_compiled
def best_edges(points, own, means, links, gaps, by_list, order, column, fraction):
    """Edge from the own mean of each point to a linked mean that takes most off its residual.

    Or, `by_list`, the one that is best to be found by where the own mean is not: that of least
    SOAR loss ``|x - mu_j|^2 + <r, x - mu_j>^2 / |r|^2`` for the residual r, as of the rule.

    Parameters
    ----------
    points : ndarray of shape (n, d), float32
    own : ndarray of shape (n,), int64
        Nearest mean of each point.
    means : ndarray of shape (K, d), float32
    links : ndarray of shape (K, L), int32
    gaps : ndarray of shape (K, L), float32
        Squared lengths of the edges.
    order : ndarray of int64
        Points to look at, best those of one mean after another.
    column : ndarray of shape (n,), int32
        Becomes the number of the link; L where no edge is of use.
    fraction : ndarray of shape (n,), float32
        Becomes the place of the point's projection on the edge, 0 at its own mean and 1 at the
        other; it may lie outside.
    """
    width = points.shape[1]
    residual = np.empty(width, np.float32)
    for r in order:
        i = own[r]
        square = np.float32(0)
        for t in range(width):
            residual[t] = points[r, t] - means[i, t]
            square += residual[t] * residual[t]
        most = np.float32(-np.inf if by_list else 0)
        column[r], fraction[r] = links.shape[1], 0
        for edge in range(links.shape[1]):
            j, gap = links[i, edge], gaps[i, edge]
            product = np.float32(0)
            for t in range(width):
                product += residual[t] * (means[j, t] - means[i, t])
            if gap == 0 or (product <= 0 and not by_list):
                continue
            taken = _taken(product, gap, square, by_list)
            if taken > most:
                most = taken
                column[r], fraction[r] = edge, product / gap


@_compiled
def _taken(product, gap, square, by_list):
    """What an edge is worth to a residual r: `product` is <r, edge>, `square` |r|^2."""
    if by_list:
        along = square - product  # <r, x - mu_j>
        return 2 * product - gap - along * along / max(square, _TINY)
    along = min(product, gap)
    return (2 * product - along) * along / gap


@_compiled
def _inner(coded, values):
    total = np.float32(0)
    for t in range(len(values)):
        total += np.float32(coded[t]) * values[t]
    return total


@_compiled
def best_anchors(points, own, means, links, gaps, projections, anchors, order, column, fraction):
    """Cell of each point: the one whose anchor is nearest.

    Links without an anchor stand for all points of their edge. Parameters but these are those of
    `best_edges`.

    Parameters
    ----------
    projections : ndarray of shape (n, t), float32
        Of the residuals, on the directions of the sketches.
    anchors : tuple
        Fractions by their codes, (256,) float32, below 0 for none; the codes, (K, L + 1) uint8;
        sketches of shape (K, L + 1, t), int8; the unit of those; squared distances of the anchors
        to mean i, (K, L + 1) float32. Column L is the anchor of what has no edge.
    """
    fractions, codes, sketches, unit, lengths = anchors
    width, count = points.shape[1], links.shape[1]
    residual = np.empty(width, np.float32)
    for r in order:
        i = own[r]
        for t in range(width):
            residual[t] = points[r, t] - means[i, t]
        column[r], fraction[r] = count, 0
        most = 2 * unit * _inner(sketches[i, count], projections[r]) - lengths[i, count]
        for edge in range(count):
            j, gap = links[i, edge], gaps[i, edge]
            if gap == 0:
                continue
            product = np.float32(0)
            for t in range(width):
                product += residual[t] * (means[j, t] - means[i, t])
            a = fractions[codes[i, edge]]
            if a < 0:
                taken = _taken(max(product, np.float32(0)), gap, np.float32(0), False)
            else:
                beside = unit * _inner(sketches[i, edge], projections[r])
                taken = 2 * (a * product + beside) - lengths[i, edge]
            if taken > most:
                most = taken
                column[r], fraction[r] = edge, product / gap


@_compiled
def reorder(order, codes, ids, slots):
    """Put the rows of three arrays into an order, in place.

    In compiled code, so that no KeyboardInterrupt comes between one array and the next.
    """
    codes[:] = codes[order]
    ids[:] = ids[order]
    slots[:] = slots[order]
