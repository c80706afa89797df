"""Compiled parts of putting vectors into cells."""

import numba
import numpy as np

_compiled = numba.njit(
    cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy"
)


@_compiled
def best_edges(points, own, means, links, gaps, to_nearest, order, column, fraction):
    """Edge from the own mean of each point to a linked mean that takes most off its residual.

    Or, `to_nearest`, to the linked mean that is nearest to the point.

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
        for t in range(width):
            residual[t] = points[r, t] - means[i, t]
        most = np.float32(-np.inf if to_nearest else 0)
        column[r], fraction[r] = links.shape[1], 0
        for edge in range(links.shape[1]):
            j, gap = links[i, edge], gaps[i, edge]
            product = np.float32(0)
            for t in range(width):
                product += residual[t] * (means[j, t] - means[i, t])
            if gap == 0 or (product <= 0 and not to_nearest):
                continue
            along = min(product, gap)
            taken = 2 * product - gap if to_nearest else (2 * product - along) * along / gap
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
