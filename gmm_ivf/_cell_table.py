"""What is known of each cell: means over its vectors, from which queries rank it.

A vector x of component i goes to the edge from mean i to a linked mean j that takes most off its
residual, or once it is known where the cells of the edges lie, to the nearest of these anchors; and
by the length of what is left to one of a few bins. Such a cell has a point on the edge,
``s = (1-a) mu_i + a mu_j``, with a the mean fraction of its vectors, and
``|q-s|^2 = (1-a) |q-mu_i|^2 + a |q-mu_j|^2 - a (1-a) |mu_i-mu_j|^2``. The mean g of its vectors
lies off the edge; a sketch ``z = V (g - s)`` in a few directions V corrects for that:
``|q-s-V'z|^2 = |q-s|^2 - 2 <V q, z> + 2 <V s, z> + |z|^2``. To either, a part of the mean squared
distance of the vectors from that point is added.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gmm_ivf._cell_anchors import Anchors
from gmm_ivf._links import Links

# Columns of the moments of a cell: |x - mu_i|^2, fraction on the edge, norm of x; then its sketch.
_SQUARED, _FRACTION, _NORM, _SKETCH = 0, 1, 2, 3


@dataclass(frozen=True)
class Shape:
    """Which cells there can be, and which directions their sketches have.

    A cell is numbered ``(i * (L + 1) + column) * bins + bin``; column L takes what has no edge.

    Attributes
    ----------
    links : Links
    merged : ndarray of shape (K, L), bool
        Links whose vectors go to column L.
    edges_of_bins : ndarray of shape (K, bins - 1), float32
        Squared residuals that part the bins.
    directions : ndarray of shape (t, d), float32
        Orthonormal.
    units : ndarray of shape (3 + t,), float32
        Sizes of the moments of a vector, above 0.
    by_list : bool
        Whether cells are visited by list, and edges chosen for that; see `best_edges`.
    anchors : Anchors or None
        What vectors are put to instead of edges.
    """

    links: Links
    merged: np.ndarray
    edges_of_bins: np.ndarray
    directions: np.ndarray
    units: np.ndarray
    by_list: bool = False
    anchors: Anchors | None = None

    @property
    def bins(self) -> int:
        """Bins of each link."""
        return self.edges_of_bins.shape[1] + 1

    @property
    def per_component(self) -> int:
        """Cells that a component may have."""
        return (self.links.count + 1) * self.bins

    @property
    def nbytes(self) -> int:
        """Memory of all but the means."""
        arrays = (self.merged, self.edges_of_bins, self.directions, self.units)
        anchors = self.anchors.nbytes if self.anchors else 0
        return self.links.nbytes + anchors + sum(array.nbytes for array in arrays)

    def place(self, points: np.ndarray, own: np.ndarray, norms: np.ndarray):
        """Cells of some vectors within their components, and the moments of each vector.

        Parameters
        ----------
        points : ndarray of shape (n, d), float32
        own : ndarray of shape (n,), int64
            Their components.
        norms : ndarray of shape (n,), float32
            Lengths that `points` had before they were normalised, 1 if they were not.

        Returns
        -------
        local : ndarray of shape (n,), int32
        moments : ndarray of shape (n, 3 + t), float32
        """
        links, residuals = self.links, points - self.links.means[own]
        moments = np.empty((len(points), _SKETCH + len(self.directions)), np.float32)
        moments[:, _SQUARED] = np.einsum("nd,nd->n", residuals, residuals)
        moments[:, _SKETCH:] = residuals @ self.directions.T
        column, fraction = self._columns(points, own, moments[:, _SKETCH:])
        on_edge = column < links.count
        on_edge[on_edge] = ~self.merged[own[on_edge], column[on_edge]]
        column[~on_edge], fraction[~on_edge] = links.count, 0
        moments[:, _FRACTION], moments[:, _NORM] = fraction, norms
        gaps = links.ends(own, column)[1]
        along = np.clip(fraction, 0, 1)
        left = moments[:, _SQUARED] - (2 * fraction - along) * along * gaps
        bins = (left[:, None] > self.edges_of_bins[own]).sum(axis=1)
        return (column * self.bins + bins).astype(np.int32), moments

    def _columns(
        self, points: np.ndarray, own: np.ndarray, sketches: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Column of each point, and the place of its projection on that edge."""
        from gmm_ivf._cell_assign import best_anchors, best_edges

        column = np.empty(len(points), np.int32)
        fraction = np.empty(len(points), np.float32)
        # Those of one component after another read the same means.
        order = np.argsort(own, kind="stable")
        edges = self.links.means, self.links.neighbours, self.links.gaps
        if self.anchors is None:
            best_edges(points, own, *edges, self.by_list, order, column, fraction)
        else:
            projections, anchors = np.ascontiguousarray(sketches), self.anchors.table
            best_anchors(points, own, *edges, projections, anchors, order, column, fraction)
        return column, fraction

    def anchored(self, moments: "Moments") -> "Shape":
        """The same cells of one bin, with anchors where vectors of these moments are."""
        own, column = np.divmod(moments.cells, self.per_component)
        _, fractions, sketches = self.places(own, column, moments.means)
        cells = own, column
        anchors = Anchors.of_cells(
            self.links, self.directions, cells, moments.counts, fractions, sketches
        )
        return replace(self, anchors=anchors)

    def places(
        self, own: np.ndarray, column: np.ndarray, means: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Other ends of the edges of some cells, and the places of the cells.

        Parameters
        ----------
        own, column : ndarray of shape (m,)
        means : ndarray of shape (m, 3 + t), float64
            Mean moments.

        Returns
        -------
        link : ndarray of shape (m,)
        fractions : ndarray of shape (m,), float64
            In [0, 1].
        sketches : ndarray of shape (m, t), float64
            Off that point of the edge.
        """
        link = self.links.ends(own, column)[0]
        a = np.clip(means[:, _FRACTION], 0, 1)
        at_means = self.links.means @ self.directions.T
        return link, a, means[:, _SKETCH:] - a[:, None] * (at_means[link] - at_means[own])


@dataclass
class Moments:
    """Mean moments of the vectors that were ever put in each cell.

    Attributes
    ----------
    cells : ndarray of shape (m,), int64
        Numbers of those cells, ascending.
    counts : ndarray of shape (m,), int64
    scaled : ndarray of shape (m, 3 + t), float16
        Means in units of `units`: half the memory, and better than cells can be told apart.
    units : ndarray of shape (3 + t,), float32
    """

    cells: np.ndarray
    counts: np.ndarray
    scaled: np.ndarray
    units: np.ndarray

    @classmethod
    def none(cls, units: np.ndarray) -> "Moments":
        """No cell."""
        empty = np.empty(0, np.int64)
        return cls(empty, empty.copy(), np.empty((0, len(units)), np.float16), units)

    @classmethod
    def of(cls, cells: np.ndarray, moments: np.ndarray, units: np.ndarray) -> "Moments":
        """Of vectors in these cells, one row each."""
        order = np.argsort(cells, kind="stable")
        numbers, starts = np.unique(cells[order], return_index=True)
        counts = np.diff(np.append(starts, len(cells)))
        sums = np.add.reduceat(moments[order].astype(np.float64), starts) if len(cells) else moments
        return cls(numbers, counts, _scaled(sums, counts, units), units)

    @property
    def means(self) -> np.ndarray:
        """Mean moments: (m, 3 + t) float64."""
        return self.scaled.astype(np.float64) * self.units

    def joined(self, others: "list[Moments]") -> "Moments":
        """Those of the vectors of all."""
        parts = [self, *others]
        cells = np.concatenate([part.cells for part in parts])
        if not len(cells):
            return self
        counts = np.concatenate([part.counts for part in parts])
        sums = counts[:, None] * np.concatenate([part.means for part in parts])
        order = np.argsort(cells, kind="stable")
        numbers, starts = np.unique(cells[order], return_index=True)
        counts = np.add.reduceat(counts[order], starts)
        sums = np.add.reduceat(sums[order], starts)
        return Moments(numbers, counts, _scaled(sums, counts, self.units), self.units)

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self.cells.nbytes + self.counts.nbytes + self.scaled.nbytes


def _scaled(sums: np.ndarray, counts: np.ndarray, units: np.ndarray) -> np.ndarray:
    largest = np.finfo(np.float16).max
    means = sums / np.maximum(counts, 1)[:, None] / units
    return np.clip(means, -largest, largest).astype(np.float16)


@dataclass(frozen=True)
class Occupied:
    """Cells that hold entries, in the order in which they lie in the lists.

    Attributes
    ----------
    cells : ndarray of shape (C,), int64
        Their numbers, ascending.
    sizes, begins : ndarray of shape (C,), int64
        Entries, and the place of the first in the list of its component.
    """

    cells: np.ndarray
    sizes: np.ndarray
    begins: np.ndarray = field(repr=False)

    @classmethod
    def of_sorted(cls, cells: np.ndarray, per_component: int) -> "Occupied":
        """Of the cells of all entries, list after list, ascending."""
        first = np.ones(len(cells), bool)
        first[1:] = cells[1:] != cells[:-1]
        starts = np.flatnonzero(first)
        numbers = cells[starts]
        own = numbers // per_component
        head = np.searchsorted(own, own)  # First cell of the same component.
        return cls(numbers, np.diff(np.append(starts, len(cells))), starts - starts[head])


def ranked_cells(
    shape: Shape, moments: Moments, occupied: Occupied, weight: float, is_product: bool
) -> Any:
    """What the compiled ranking reads, a `gmm_ivf._cell_ranking.Ranked`.

    Parameters
    ----------
    shape : Shape
    moments : Moments
        Of all occupied cells, and perhaps of others.
    occupied : Occupied
    weight : float
        Part of the mean squared residual that counts.
    is_product : bool
        Whether distances are negative inner products with unit vectors.
    """
    from gmm_ivf._cell_ranking import Ranked

    links = shape.links
    means = moments.means[np.searchsorted(moments.cells, occupied.cells)]
    own, local = np.divmod(occupied.cells, shape.per_component)
    gap = links.ends(own, local // shape.bins)[1]
    link, a, sketch = shape.places(own, local // shape.bins, means)
    square = np.einsum("ct,ct->c", sketch, sketch)
    left = np.maximum(means[:, _SQUARED] - a * gap * (2 * means[:, _FRACTION] - a), 0)
    rough, fine = weight * left, weight * np.maximum(left - square, 0)
    if is_product:
        # Half a squared distance less 1, times the mean norm of the cell.
        scale = means[:, _NORM]
        rough, fine, sketch = scale * rough / 2, scale * fine / 2, -scale[:, None] * sketch
    else:
        scale, bend = np.ones(len(a)), a * (1 - a) * gap
        rough = rough - bend
        at_means = links.means @ shape.directions.T
        at_point = (1 - a)[:, None] * at_means[own] + a[:, None] * at_means[link]
        fine = fine - bend + 2 * np.einsum("ct,ct->c", at_point, sketch) + square
        sketch = -2 * sketch
    numbers = (part.astype(np.int32) for part in (own, link))
    scores = (part.astype(np.float32) for part in (scale * (1 - a), scale * a, rough, fine))
    places = (part.astype(np.int32) for part in (occupied.sizes, occupied.begins))
    start = np.searchsorted(own, np.arange(len(links.means) + 1))
    return Ranked._make([start, *numbers, *scores, *_coded(sketch), *places])


def _coded(sketch: np.ndarray) -> tuple[np.ndarray, float]:
    """A sketch in int8, and the unit of that."""
    unit = float(np.abs(sketch).max(initial=0)) / 127 or 1.0
    return np.rint(sketch / unit).astype(np.int8), unit
