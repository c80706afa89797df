"""Links: the means near each mean, towards which its vectors are told apart."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._faiss import faiss
from gmm_ivf._vectors import spans


@dataclass(frozen=True)
class Links:
    """Means and the edges between them.

    Attributes
    ----------
    means : ndarray of shape (K, d), float32
        In the space of `CoarseRanker.points`.
    neighbours : ndarray of shape (K, L), int32
        Linked means of each mean.
    gaps : ndarray of shape (K, L), float32
        Squared lengths of those edges.
    """

    means: np.ndarray
    neighbours: np.ndarray
    gaps: np.ndarray

    @classmethod
    def of_neighbours(cls, means: np.ndarray, neighbours: np.ndarray) -> "Links":
        """Links of given neighbours."""
        gaps = np.empty(neighbours.shape, np.float32)
        for where in spans(len(means), means.shape[1] * max(1, neighbours.shape[1])):
            # In float64, and by differences: what FAISS ranks by is rounded by the norms.
            edges = means[neighbours[where]].astype(np.float64) - means[where, None]
            gaps[where] = np.einsum("kld,kld->kl", edges, edges)
        return cls(means, neighbours, gaps)

    @property
    def count(self) -> int:
        """Links of each mean."""
        return self.neighbours.shape[1]

    def ends(self, own: np.ndarray, column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Other ends and squared lengths of edges; column L is no edge, and ends where it began."""
        other, gaps = own.copy(), np.zeros(len(own), np.float32)
        on_edge = column < self.count
        other[on_edge] = self.neighbours[own[on_edge], column[on_edge]]
        gaps[on_edge] = self.gaps[own[on_edge], column[on_edge]]
        return other, gaps

    @property
    def nbytes(self) -> int:
        """Memory of the edges; the means are not ours."""
        return self.neighbours.nbytes + self.gaps.nbytes


def nearest_links(ranker: CoarseRanker, count: int) -> Links:
    """Links of every mean to the `count` nearest others, at most all."""
    means = ranker.table
    count = min(count, len(means) - 1)
    flat: Any = faiss.IndexFlatL2(means.shape[1])
    flat.add(means)
    near = flat.search(means, count + 1)[1]
    return Links.of_neighbours(means, _without_own(near)[:, :count].astype(np.int32))


def _without_own(near: np.ndarray) -> np.ndarray:
    """Each row without its own number, or without the last one where that is not there."""
    keep = near != np.arange(len(near))[:, None]
    keep[keep.all(axis=1), -1] = False
    return near[keep].reshape(len(near), -1)
