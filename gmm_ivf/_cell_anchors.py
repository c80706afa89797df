"""Anchors: the place of each cell as the training vectors showed it, to which vectors are put."""

from dataclasses import dataclass

import numpy as np

from gmm_ivf._links import Links

# Fractions are kept in steps of 1 / _STEPS; _NONE stands for a link without an anchor.
_STEPS, _NONE = 254, 255
# The fraction of each code, below 0 for that of none.
_FRACTIONS = np.append(np.arange(_NONE) / _STEPS, -1).astype(np.float32)
# Vectors that a sketch of zero counts as: cells that few training vectors showed are known badly.
_PRIOR = 2.0


@dataclass(frozen=True)
class Anchors:
    """Points ``(1-a) mu_i + a mu_j + V'z`` of cells, those of component i in row i.

    Attributes
    ----------
    fractions : ndarray of shape (K, L + 1), uint8
        a in steps of 1/254; 255 where there is no anchor. Column L is that of no edge.
    sketches : ndarray of shape (K, L + 1, t), int8
        z in units of `unit`.
    unit : float
    lengths : ndarray of shape (K, L + 1), float32
        Squared distances of the anchors to their means.
    """

    fractions: np.ndarray
    sketches: np.ndarray
    unit: float
    lengths: np.ndarray

    @classmethod
    def of_codes(
        cls,
        links: Links,
        directions: np.ndarray,
        fractions: np.ndarray,
        sketches: np.ndarray,
        unit: float,
    ) -> "Anchors":
        """Anchors of given codes, on the directions of the sketches: (t, d)."""
        lengths = np.zeros(fractions.shape, np.float32)
        at_means = links.means @ directions.T
        a = np.where(fractions == _NONE, 0, fractions / _STEPS)
        for i, linked in enumerate(links.neighbours):
            z = unit * sketches[i].astype(np.float32)
            lengths[i] = np.einsum("ct,ct->c", z, z)
            along = np.einsum("ct,ct->c", z[:-1], at_means[linked] - at_means[i])
            lengths[i, :-1] += a[i, :-1] * (a[i, :-1] * links.gaps[i] + 2 * along)
        return cls(fractions, sketches, unit, lengths)

    @classmethod
    def of_cells(
        cls,
        links: Links,
        directions: np.ndarray,
        cells: tuple[np.ndarray, np.ndarray],
        counts: np.ndarray,
        fractions: np.ndarray,
        sketches: np.ndarray,
    ) -> "Anchors":
        """Anchors of some cells.

        Parameters
        ----------
        links : Links
        directions : ndarray of shape (t, d), float32
        cells : tuple of ndarray of shape (m,)
            Components, and columns in [0, L].
        counts : ndarray of shape (m,)
            Training vectors of each.
        fractions : ndarray of shape (m,)
            In [0, 1].
        sketches : ndarray of shape (m, t)
            Means over those vectors.
        """
        shape = len(links.means), links.count + 1
        shrunk = sketches * (counts / (counts + _PRIOR))[:, None]
        unit = float(np.abs(shrunk).max(initial=0)) / 127 or 1.0
        coded = np.full(shape, _NONE, np.uint8)
        coded[cells] = np.rint(fractions * _STEPS)
        codes = np.zeros((*shape, len(directions)), np.int8)
        codes[cells] = np.rint(shrunk / unit)
        return cls.of_codes(links, directions, coded, codes, unit)

    @property
    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.float32, np.ndarray]:
        """What `gmm_ivf._cell_assign.best_anchors` reads."""
        return _FRACTIONS, self.fractions, self.sketches, np.float32(self.unit), self.lengths

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self.fractions.nbytes + self.sketches.nbytes + self.lengths.nbytes
