"""The data set that readers return and everything else consumes."""

from dataclasses import dataclass, replace

import numpy as np

METRICS = ("l2", "ip", "cosine")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Base vectors, query vectors and, where known, the exact nearest neighbours of the queries.

    Parameters
    ----------
    name : str
        Name in the registry, or the file's name without its suffix.
    base : ndarray of shape (n, d), float32
        Vectors to search; may be memory-mapped. Unit rows when the metric is "cosine".
    query : ndarray of shape (n_queries, d), float32
        Vectors to search for.
    metric : {"l2", "ip", "cosine"}
        Euclidean distance, inner product, or cosine.
    ground_truth : ndarray of shape (n_queries, k), int64, or None
        Rows of ``base`` that are nearest to each query, nearest first.
    distances : ndarray of shape (n_queries, k), float32, or None
        Their Euclidean (not squared) distances for "l2", inner products for "ip", one minus the
        cosine for "cosine".
    source : str
        Where the vectors come from and what was done to them on the way.
    """

    name: str
    base: np.ndarray
    query: np.ndarray
    metric: str = "l2"
    ground_truth: np.ndarray | None = None
    distances: np.ndarray | None = None
    source: str = ""

    def __post_init__(self) -> None:
        self.check_sizes()

    @property
    def n(self) -> int:
        """Number of base vectors."""
        return self.base.shape[0]

    @property
    def d(self) -> int:
        """Number of dimensions."""
        return self.base.shape[1]

    def check_sizes(self) -> None:
        """Check shapes, types and the range of the neighbour ids.

        Raises
        ------
        ValueError
            If any of them contradicts another. The values of the vectors are not looked at.
        """
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {METRICS}, got {self.metric!r}")
        for name in ("base", "query"):
            _check_vectors(getattr(self, name), f"{name} of {self.name}")
        if self.query.shape[1] != self.d:
            raise ValueError(
                f"query of {self.name} must have the base's {self.d} dimensions, "
                f"got {self.query.shape[1]}"
            )
        if self.ground_truth is not None:
            self._check_ground_truth(self.ground_truth)
        if self.distances is not None:
            self._check_distances(self.distances)

    def subset(self, limit: int) -> "Dataset":
        """Return the data set of the first ``limit`` base vectors, ground truth recomputed.

        Raises
        ------
        ValueError
            If limit is not between 1 and ``n``.
        """
        check_limit(limit, self.n, self.name)
        k = 100 if self.ground_truth is None else self.ground_truth.shape[1]
        shorter = replace(
            self,
            base=self.base[:limit],
            ground_truth=None,
            distances=None,
            source=f"{self.source}; first {limit} of {self.n} base vectors",
        )
        return shorter.with_ground_truth(k)

    def first_queries(self, count: int) -> "Dataset":
        """Return the data set with its first ``count`` queries, or all if there are no more.

        Raises
        ------
        ValueError
            If count is below 1.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        truth, distances = (
            None if part is None else part[:count] for part in (self.ground_truth, self.distances)
        )
        return replace(self, query=self.query[:count], ground_truth=truth, distances=distances)

    def with_ground_truth(self, k: int = 100) -> "Dataset":
        """Return the same vectors with the exact ``min(k, n)`` nearest neighbours computed."""
        # Here, because it loads torch and imports this module.
        from gmm_ivf.datasets.ground_truth import exact_neighbors

        ids, distances = exact_neighbors(self.base, self.query, min(k, self.n), self.metric)
        return replace(self, ground_truth=ids, distances=distances)

    def _check_ground_truth(self, ids: np.ndarray) -> None:
        wanted = f"({len(self.query)}, k) with k between 1 and {self.n}"
        if ids.ndim != 2 or len(ids) != len(self.query) or not 1 <= ids.shape[1] <= self.n:
            raise ValueError(
                f"ground_truth of {self.name} must have shape {wanted}, got {ids.shape}"
            )
        if ids.dtype != np.int64:
            raise ValueError(f"ground_truth of {self.name} must be int64, got {ids.dtype}")
        outside = (ids < 0) | (ids >= self.n)
        if outside.any():
            row, column = np.argwhere(outside)[0]
            raise ValueError(
                f"ground_truth of {self.name} must hold rows of the base, 0 to {self.n - 1}; "
                f"query {row} has {ids[row, column]} at rank {column}"
            )
        ordered = np.sort(ids, axis=1)
        repeated = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
        if repeated.any():
            raise ValueError(
                f"ground_truth of {self.name} must name each neighbour of a query once; "
                f"query {int(np.argmax(repeated))} has one twice"
            )

    def _check_distances(self, distances: np.ndarray) -> None:
        if self.ground_truth is None:
            raise ValueError(f"distances of {self.name} came without ground_truth; give both")
        if distances.shape != self.ground_truth.shape or distances.dtype != np.float32:
            raise ValueError(
                f"distances of {self.name} must be float32 of ground_truth's shape "
                f"{self.ground_truth.shape}, got {distances.dtype} of shape {distances.shape}"
            )


def _check_vectors(rows: np.ndarray, name: str) -> None:
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(
            f"{name} must be 2-D with at least one row and one column, got shape {rows.shape}"
        )
    if rows.dtype != np.float32:
        raise ValueError(f"{name} must be float32, got {rows.dtype}; cast it")


def check_limit(limit: int, n: int, name: str) -> None:
    """Raise ValueError unless the first ``limit`` of ``n`` rows can be taken."""
    if not 1 <= limit <= n:
        raise ValueError(f"limit must be between 1 and the {n} base vectors of {name}, got {limit}")
