"""Nearest means of vectors, exact also where the data lie far from the origin."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gmm_ivf._faiss import faiss
from gmm_ivf._graph import WithGraph, graph_search
from gmm_ivf._vectors import as_matrix, check_rows, spans, unit_rows

# FAISS forms |x|^2 + |c|^2 - 2<x, c> in float32, with an error of about 2**-22 of the squared norm.
# Past this ratio of |centre|^2 to the variance about it (an offset of 8 standard deviations) that
# error is over 1.5e-5 of the variance, and begins to change which mean is nearest.
_OFFSET_LIMIT = 64.0
# Up to so many means a vector to store is compared with all of them, as stock FAISS does.
EXACT_LIMIT = 1 << 14
# A vector is stored once and looked for often: its nearest means are sought with more care.
_EF_TO_STORE = 128


@dataclass(frozen=True)
class Centroids:
    """Means alone: the limit of a mixture of equal weights whose variance vanishes.

    It stands where a quantizer has its mixture, and has no posteriors.

    Attributes
    ----------
    means_ : ndarray of shape (K, d), float64
    """

    means_: np.ndarray

    covariance_type = "spherical"

    @classmethod
    def checked(cls, centroids: Any, unit: bool) -> "Centroids":
        """Centroids of a matrix, after a check that its rows are finite (and not zero if `unit`).

        Raises
        ------
        ValueError
            Naming the row.
        """
        centroids = np.asarray(centroids)
        width = centroids.shape[-1] if centroids.ndim else 1
        check_rows(as_matrix(centroids, width, "centroids"), "centroids", unit)
        return cls(np.array(centroids, np.float64))

    @property
    def center_(self) -> np.ndarray:
        """Their mean: (d,) float64."""
        return self.means_.mean(axis=0)

    @property
    def weights_(self) -> np.ndarray:
        """Equal weights: (K,) float64."""
        return np.full(len(self.means_), 1 / len(self.means_))

    @property
    def covariances_(self) -> np.ndarray:
        """Zeros: (K,) float64."""
        return np.zeros(len(self.means_))


def _total_variance(mixture: Any) -> float:
    """Mean squared distance of the modelled data from their centre."""
    means = np.asarray(mixture.means_, np.float64) - mixture.center_
    covariances = np.asarray(mixture.covariances_, np.float64)
    k, d = means.shape
    within = {
        "spherical": lambda: covariances * d,
        "diag": lambda: covariances.sum(axis=1),
        "tied": lambda: np.full(k, np.trace(covariances)),
        "full": lambda: np.trace(covariances, axis1=1, axis2=2),
    }[mixture.covariance_type]()
    return float(mixture.weights_ @ (np.einsum("ij,ij->i", means, means) + within))


class CoarseRanker:
    """Ranks lists by distance of a vector to the means.

    For ordinary data it is the quantizer's own search, bit for bit. Where the centre of the data
    is far from the origin, means and vectors are centred in float64 first and searched then.
    Inner products change with a shift, so they are never centred.

    Parameters
    ----------
    quantizer : faiss.IndexFlat or GMMQuantizer
        Holds the means. A graph over them, where the quantizer wants one, serves queries, and
        stored vectors too where there are many means.
    mixture : GaussianMixture or Centroids
        Fitted; gives `means_` in float64, and the centre.
    """

    def __init__(self, quantizer: Any, mixture: Any):
        self._flat = quantizer
        self._quantizer = quantizer
        self._center = None
        if quantizer.metric_type == faiss.METRIC_L2:
            center = np.asarray(mixture.center_, np.float64)
            if center @ center > _OFFSET_LIMIT * _total_variance(mixture):
                self._center = center
                self._flat = faiss.IndexFlatL2(quantizer.d)
                self._flat.add((mixture.means_ - center).astype(np.float32))
        self._graph = None
        if isinstance(quantizer, WithGraph):
            self._graph = quantizer.graph_over(self.table, quantizer.metric_type)

    @property
    def is_centred(self) -> bool:
        """Whether vectors are centred before they are compared."""
        return self._center is not None

    @property
    def is_product(self) -> bool:
        """Whether distances are inner products."""
        return self._flat.metric_type == faiss.METRIC_INNER_PRODUCT

    @property
    def has_graph(self) -> bool:
        """Whether queries go by a graph, which finds distances to a few means only."""
        return self._graph is not None

    @property
    def finds_by_graph(self) -> bool:
        """Whether `search` and `nearest` go by the graph, being too dear otherwise."""
        return self._graph is not None and self._flat.ntotal > EXACT_LIMIT

    @property
    def nbytes(self) -> int:
        """Memory of a second table of means, and of a graph with its own."""
        table = self._flat.ntotal * self._flat.d * 4
        found = table if self.is_centred else 0
        if self._graph is not None:
            # Below all levels each mean has twice the links; those of the levels above are few.
            found += table + self._flat.ntotal * 4 * self._graph.hnsw.nb_neighbors(0)
        return found

    @property
    def table(self) -> np.ndarray:
        """Means in the space of `points`: a view of shape (nlist, d), float32."""
        flat = self._flat
        return faiss.rev_swig_ptr(flat.get_xb(), flat.ntotal * flat.d).reshape(flat.ntotal, flat.d)

    def points(self, rows: np.ndarray) -> np.ndarray:
        """Rows in the space where L2 distances to `table` rank the means: (n, d) float32.

        Centred where the means are; L2-normalised under inner products, as the means are.
        """
        if self._flat.metric_type == faiss.METRIC_INNER_PRODUCT:
            return unit_rows(rows)
        return rows if self._center is None else (rows - self._center).astype(np.float32)

    def search(self, rows: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (distances, lists) of the m best means for vectors to store, as FAISS does.

        Parameters
        ----------
        rows : ndarray of shape (n, d), float32
        m : int

        Returns
        -------
        distances : ndarray of shape (n, m), float32
            Squared L2 distances, or inner products, best first.
        lists : ndarray of shape (n, m), int64
            -1 where a distance overflows, or a graph leads no further.
        """
        if self._center is not None:
            rows = self.points(rows)
        if self.finds_by_graph:
            ef_search = max(_EF_TO_STORE, self._quantizer.ef_search)
            return graph_search(self._graph, rows, m, ef_search)[:2]
        return faiss.IndexFlat.search(self._flat, rows, m)

    def counted_search(self, rows: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `search`, for queries; and the comparisons with means of each row, (n,) int64.

        The sum of the comparisons of a graph is exact, unless other threads search graphs too.
        """
        if self._center is not None:
            rows = self.points(rows)
        # A graph need not lead to all means, above all where some are equal: who wants all of them
        # gets all, at the same cost.
        if self._graph is not None and m < self._flat.ntotal:
            return graph_search(self._graph, rows, m, self._quantizer.ef_search)
        found = faiss.IndexFlat.search(self._flat, rows, m)
        return *found, np.full(len(rows), self._flat.ntotal)

    def nearest(self, rows: np.ndarray) -> np.ndarray:
        """List of the best mean of every row, (n,) int64."""
        return self.search(rows, 1)[1][:, 0]

    def distances(self, rows: np.ndarray, lists: np.ndarray) -> np.ndarray:
        """Squared L2 distances, or inner products, of rows to means of the caller's choice.

        Parameters
        ----------
        rows : ndarray of shape (n, d), float32
        lists : ndarray of shape (n, m), int64
            -1 for none; the distance is that to mean 0 then.

        Returns
        -------
        ndarray of shape (n, m), float32
        """
        product = self._flat.metric_type == faiss.METRIC_INNER_PRODUCT
        points = rows if product else self.points(rows)
        found = np.empty(lists.shape, np.float32)
        for where in spans(len(rows), self._flat.d * lists.shape[1]):
            means = self.table[np.maximum(lists[where], 0)].astype(np.float64)
            near = points[where][:, None]
            pair = (means, near) if product else (means - near, means - near)
            found[where] = np.einsum("nmd,nmd->nm", *np.broadcast_arrays(*pair))
        return found
