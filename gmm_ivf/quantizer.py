"""GMMQuantizer: a FAISS coarse quantizer whose centroids are the means of a Gaussian mixture."""

import copy
import time
import warnings
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state

from gmm_ivf._attaching import adopt, attach
from gmm_ivf._coarse import Centroids, CoarseRanker
from gmm_ivf._faiss import check_metric, faiss, metric_name
from gmm_ivf._given_mixture import check_mixture
from gmm_ivf._graph import WithGraph, checked_coarse
from gmm_ivf._reseed import fill_empty
from gmm_ivf._training import check_training_rows, check_untrained, warn_of_empty_lists
from gmm_ivf._vectors import (
    as_matrix,
    block,
    check_count,
    sample_rows,
    spans,
    unit_rows,
)
from gmm_ivf.estimator import GaussianMixture

# As many as k-means of this size is customarily given. The likelihood goes on rising in its fourth
# digit for a hundred iterations and more, but recall at a given cost does not.
_MAX_ITER = 25


class GMMQuantizer(WithGraph, faiss.IndexFlat):
    """A flat FAISS index over the means of a Gaussian mixture, trained by EM.

    It goes wherever FAISS takes a coarse quantizer. Train it first, through its own `train`:
    FAISS never calls a Python method, and an index over an untrained one raises
    ``'is_trained' failed`` in its `train` and `add`. From then on the index is stock FAISS, every
    vector in the list of its nearest mean.

    Parameters
    ----------
    d : int
        Dimensions of the vectors.
    nlist : int
        Number of components, which is the number of lists.
    metric : int, default=faiss.METRIC_L2
        METRIC_L2, or METRIC_INNER_PRODUCT: the mixture is then fitted on L2-normalised rows and
        the means are normalised before they become centroids. For cosine normalise the vectors
        yourself, as everywhere in FAISS.
    max_points_per_centroid : int, default=None
        At most nlist times as many rows are drawn, by `random_state`, to train on; None takes
        all. It limits training only: it is no limit on the size of a list.
    coarse : str, default="flat"
        How `IndexIVFGMM` finds the lists to probe: "flat" compares a query with all means,
        "hnsw32" with those that an HNSW graph of 32 links leads to, for thousands of lists and
        more. Stored vectors go to the nearest of all means as long as there are at most 16,384.
        As a plain FAISS quantizer this object stays flat.
    ef_search : int, default=64
        For the graph; it may be changed at any time.
    **gmm_options
        Options of `GaussianMixture`, such as ``covariance_type="spherical"``, ``random_state``,
        ``device``. ``max_iter`` is 25 unless given: lists need no converged likelihood.

    Attributes
    ----------
    nlist, coarse, ef_search
    mixture : GaussianMixture, Centroids or None
        The fitted mixture. Under METRIC_INNER_PRODUCT it models L2-normalised rows. After
        `from_centroids` it has means only.
        ``mixture.predict`` takes the largest posterior, the index the nearest mean: they may
        differ.
    reseeded : int
        Components that owned no vectors after EM and were moved to split a heavy one.
    train_report : dict or None
        ``"seconds"``, ``"rows"`` trained on, ``"iterations"`` of EM before any re-seeding,
        ``"converged"`` whether they reached `tol`, ``"empty_lists"`` that hold no training row.

    Notes
    -----
    ``faiss.clone_index``, ``write_index`` and ``read_index`` know only the table of means; the
    mixture stays with this object, its copies and its pickles. A table that was trained for nlist
    lists must not be given to an index with another nlist: FAISS would replace it by k-means.
    """

    # SWIG objects refuse attributes that their class does not declare.
    nlist: int = 0
    mixture: Any = None
    reseeded: int = 0
    train_report: dict | None = None
    generation: int = 0
    _options: Any = None
    _max_points: Any = None
    _means: Any = None
    _ends: Any = None

    def __init__(
        self,
        d: int,
        nlist: int,
        metric: int = faiss.METRIC_L2,
        *,
        max_points_per_centroid: int | None = None,
        coarse: str = "flat",
        ef_search: int = 64,
        **gmm_options: Any,
    ):
        d, nlist = check_count(d, "d"), check_count(nlist, "nlist")
        if max_points_per_centroid is not None:
            check_count(max_points_per_centroid, "max_points_per_centroid")
        known = set(GaussianMixture().get_params()) - {"n_components"}
        unknown = sorted(set(gmm_options) - known)
        if unknown:
            raise TypeError(
                f"GMMQuantizer has no option {unknown[0]!r}; those of GaussianMixture are "
                f"{', '.join(sorted(known))} (nlist takes the place of n_components)."
            )
        super().__init__(d, check_metric(metric))
        self.is_trained = False
        self.nlist = nlist
        self._max_points = max_points_per_centroid
        self.coarse = checked_coarse(coarse)
        self.ef_search = ef_search
        self._options = {"max_iter": _MAX_ITER, **gmm_options}

    @classmethod
    def from_mixture(
        cls, mixture: Any, metric: int = faiss.METRIC_L2, **coarse_options: Any
    ) -> "GMMQuantizer":
        """Quantizer over the means of a fitted mixture.

        Parameters
        ----------
        mixture : GaussianMixture
            Fitted. For METRIC_INNER_PRODUCT it has to be fitted on L2-normalised rows.
        metric : int, default=faiss.METRIC_L2
        **coarse_options
            `coarse` and `ef_search`.

        Raises
        ------
        ValueError
            When it is no fitted `gmm_ivf.GaussianMixture`.
        """
        check_mixture(mixture, "mixture")
        nlist, d = mixture.means_.shape
        options = {k: v for k, v in mixture.get_params().items() if k != "n_components"}
        quantizer = cls(d, nlist, metric, **coarse_options, **options)
        quantizer._install(mixture)
        return quantizer

    @classmethod
    def from_centroids(
        cls, centroids: Any, metric: int = faiss.METRIC_L2, **coarse_options: Any
    ) -> "GMMQuantizer":
        """Quantizer over given centroids, such as those of k-means: hard, or soft by geometry.

        Parameters
        ----------
        centroids : array-like of shape (nlist, d)
            For METRIC_INNER_PRODUCT they are L2-normalised.
        metric : int, default=faiss.METRIC_L2
        **coarse_options
            `coarse` and `ef_search`.

        Raises
        ------
        ValueError
            Naming a row that holds NaN or infinity (or, under METRIC_INNER_PRODUCT, is zero).
        """
        given = Centroids.checked(centroids, metric == faiss.METRIC_INNER_PRODUCT)
        quantizer = cls(given.means_.shape[1], len(given.means_), metric, **coarse_options)
        quantizer._install(given)
        return quantizer

    def train(self, x: Any) -> None:
        """Fit the mixture and make its means the centroids.

        Parameters
        ----------
        x : array-like of shape (n, d)
            numpy array or memmap of any real dtype, torch tensor, or HDF5 dataset.

        Raises
        ------
        ValueError
            When n is below nlist, or naming a row that holds NaN or infinity (or, under
            METRIC_INNER_PRODUCT, is zero).
        RuntimeError
            When it is trained already: call `reset` first.

        Warns
        -----
        UserWarning
            Below 39 rows per list, or when there are fewer distinct rows than lists.
        """
        x = as_matrix(x, self.d, "x")
        check_untrained(self.is_trained)
        check_training_rows(x, self.nlist, self._is_product)
        started = time.perf_counter()
        rng = check_random_state((self._options or {}).get("random_state"))
        if self._max_points is not None and x.shape[0] > self._max_points * self.nlist:
            x = x[sample_rows(x.shape[0], self._max_points * self.nlist, rng)]
        if self._is_product:
            x = unit_rows(block(x, "x"))
        mixture = self._fitted(x)
        iterations, converged = int(mixture.n_iter_), bool(mixture.converged_)
        reseeded, sizes = fill_empty(mixture, x, lambda fitted: self._assign(fitted, x), rng)
        self._install(mixture)
        self.reseeded = reseeded
        empty = int((sizes == 0).sum())
        self.train_report = {
            "seconds": time.perf_counter() - started,
            "rows": int(x.shape[0]),
            "iterations": iterations,
            "converged": converged,
            "empty_lists": empty,
        }
        if empty:
            warn_of_empty_lists(x, self.nlist, empty)

    def _fitted(self, x: Any) -> GaussianMixture:
        mixture = GaussianMixture(n_components=self.nlist, **self._options)
        with warnings.catch_warnings():
            # The cap on iterations is meant, and components without samples are re-seeded next;
            # both are in the report, and what cannot be helped is warned of there.
            warnings.simplefilter("ignore", ConvergenceWarning)
            return mixture.fit(x)

    @property
    def _is_product(self) -> bool:
        return self.metric_type == faiss.METRIC_INNER_PRODUCT

    def _table(self, mixture: Any) -> np.ndarray:
        """Centroids of a mixture, (nlist, d) float32."""
        means = np.asarray(mixture.means_, np.float64)
        return (unit_rows(means) if self._is_product else means).astype(np.float32)

    def _assign(self, mixture: Any, x: Any) -> np.ndarray:
        """List of every row of x if the mixture were installed, (n,) int64."""
        flat = faiss.IndexFlat(self.d, self.metric_type)
        flat.add(self._table(mixture))
        ranker = CoarseRanker(flat, mixture)
        return np.concatenate([ranker.nearest(block(x, "x", where)) for where in spans(*x.shape)])

    def _install(self, mixture: Any) -> None:
        """Make the means of a mixture the centroids."""
        self.reset()
        self.is_trained = True
        table = self._table(mixture)
        super().add(table)
        self.mixture = mixture
        self._means, self._ends = mixture.means_, table[[0, -1]]

    def reset(self) -> None:
        """Forget mixture and means, back to the untrained state.

        An index over this quantizer has no usable lists after that: reset or rebuild it too.
        """
        super().reset()
        self.is_trained = False
        self.mixture = self._means = self._ends = self.train_report = self._graph = None
        self.reseeded = 0
        self.generation += 1

    def check_intact(self) -> None:
        """Check that the centroids still are the means of the mixture.

        Raises
        ------
        RuntimeError
            When FAISS trained or filled the table itself, or the mixture was fitted anew.
        """
        if self.ntotal != (self.nlist if self.is_trained else 0) or self._is_foreign():
            raise RuntimeError(
                f"the quantizer holds {self.ntotal} centroids that are not the {self.nlist} means "
                "of its mixture: FAISS replaced them by its own (an index of another nlist was "
                "trained with it). Build a new quantizer with GMMQuantizer.from_mixture."
            )
        if self.is_trained and self.mixture.means_ is not self._means:
            raise RuntimeError(
                "q.mixture was fitted again after its means became the centroids: build a new "
                "quantizer with GMMQuantizer.from_mixture."
            )

    def _is_foreign(self) -> bool:
        """Whether the first or the last centroid is not that of the mixture.

        Two of them tell: FAISS replaces all, and every search asks.
        """
        if not self.is_trained:
            return False
        rows = [self.reconstruct(0), self.reconstruct(self.nlist - 1)]
        return not np.array_equal(rows, self._ends)

    def attach(self, index: Any) -> None:
        """Make this the coarse quantizer of an existing, empty IVF index.

        A codec that was trained on residuals of other centroids does not fit: apart from
        IndexIVFFlat the index counts as untrained afterwards, so call its `train`.

        Parameters
        ----------
        index : faiss.IndexIVF, or faiss.IndexPreTransform over one
            For example from ``faiss.index_factory``. It keeps a reference to this object. Behind
            transforms the mixture lives in the transformed space.

        Raises
        ------
        ValueError
            When it is no IVF index, holds vectors, or differs in d, nlist or metric.
        RuntimeError
            When FAISS replaced the centroids of this quantizer; see `check_intact`.
        """
        attach(self, index)

    def adopt(self, index: Any) -> None:
        """Take the place of a coarse quantizer that holds the same centroids, vectors or not.

        As after ``faiss.read_index``, which gives an index a plain quantizer of its own.

        Parameters
        ----------
        index : faiss.IndexIVF, or faiss.IndexPreTransform over one

        Raises
        ------
        ValueError
            When its quantizer is no flat index, or the centroids differ in any bit.
        """
        adopt(self, index)

    def __reduce__(self):
        state = {"mixture": self.mixture, "reseeded": self.reseeded, "report": self.train_report}
        own = {"max_points_per_centroid": self._max_points, "coarse": self.coarse}
        options = {**own, "ef_search": self.ef_search, **self._options}
        arguments = (self.d, self.nlist, self.metric_type)
        return _restore, (type(self), arguments, options, state)

    def __copy__(self):
        restore, arguments = self.__reduce__()
        return restore(*arguments)

    def __deepcopy__(self, memo: dict):
        restore, arguments = self.__reduce__()
        return restore(*copy.deepcopy(arguments, memo))

    def __repr__(self) -> str:
        state = "trained" if self.is_trained else "untrained"
        return (
            f"GMMQuantizer(d={self.d}, nlist={self.nlist}, metric={metric_name(self.metric_type)},"
            f" {state})"
        )


def _restore(cls: type, arguments: tuple, options: dict, state: dict) -> GMMQuantizer:
    """Rebuild a quantizer from what `GMMQuantizer.__reduce__` saved."""
    quantizer = cls(*arguments, **options)
    if state["mixture"] is not None:
        quantizer._install(state["mixture"])
        quantizer.reseeded = state["reseeded"]
        quantizer.train_report = state["report"]
    return quantizer


def _refuse(name: str):
    def method(self, *args: Any, **kwargs: Any):
        raise RuntimeError(
            f"GMMQuantizer.{name} would part the centroids from the mixture; use train, reset or "
            "GMMQuantizer.from_mixture."
        )

    method.__name__ = name
    method.__doc__ = "Not allowed: the centroids are the means of the mixture."
    return method


for _name in ("add", "add_with_ids", "add_sa_codes", "remove_ids", "merge_from", "permute_entries"):
    setattr(GMMQuantizer, _name, _refuse(_name))
