"""`GaussianMixture`: EM for mixtures of Gaussians with scikit-learn's names."""

import time
import warnings
from collections.abc import Iterable, Iterator
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, DensityMixin, _fit_context
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from tqdm import tqdm

from gmm_ivf import seeding
from gmm_ivf.backends import engine_type
from gmm_ivf.engine import Engine, Run, check_reach
from gmm_ivf.inference import MixtureInference
from gmm_ivf.initial import check_initial_parameters, covariances_from_precisions
from gmm_ivf.kernels import torch_backend
from gmm_ivf.kernels.components import COVARIANCE_TYPES, Components, relative_ridge
from gmm_ivf.kernels.dispatch import BACKENDS, PRECISIONS
from gmm_ivf.params import covariance_shape
from gmm_ivf.persistence import MixtureFiles
from gmm_ivf.rows import Rows
from gmm_ivf.truncation import LARGEST_BOUND, truncation_report


class GaussianMixture(MixtureInference, MixtureFiles, DensityMixin, BaseEstimator):
    """Gaussian mixture fitted by EM; unlike scikit-learn's, spherical by default.

    Memory beyond X is a tile of samples and the parameters: the N x K matrix of responsibilities
    never exists. Data are centred and scaled by a power of two inside, and every attribute is in
    the caller's units.

    Parameters
    ----------
    n_components : int, default=1
        Number of components K.
    covariance_type : {"spherical", "diag", "tied", "full"}, default="spherical"
        One variance per component; one per component and feature; one matrix for all; one matrix
        per component.
    tol : float, default=1e-3
        EM stops when the mean log-likelihood (nats per sample) changes by less; the Triton backend
        looks every four iterations.
    reg_covar : float, default=1e-6
        Added to the diagonal of each covariance, in squared units of X.
    max_iter : int, default=100
        Most EM iterations.
    n_init : int, default=1
        Starts, of which the one with the highest likelihood is kept.
    init_params : {"kmeans", "k-means++", "random", "random_from_data"}, default="kmeans"
        Start; k-means and the choice of rows see at most 256 samples per component. On small data
        the start is scikit-learn's from the same random_state.
    weights_init : array-like of shape (K,), default=None
    means_init : array-like of shape (K, D), default=None
    precisions_init : array-like, default=None
        Initial inverse covariances, of the shape of ``covariances_``. With all three given no
        other start is computed.
    random_state : int, RandomState or None, default=None
    warm_start : bool, default=False
        Start from the parameters of the last fit. Also resumes a fit that was interrupted.
    verbose : int, default=0
        1 shows the iterations on stderr.
    device : str or torch.device, default="auto"
        "auto" is where X lies if that is a GPU, else a GPU if there is one, else the CPU.
    backend : {"auto", "triton", "torch"}, default="auto"
        "auto" is the Triton kernels on a CUDA device, for up to 4096 features and any precision but
        fp64, and torch elsewhere. The kernels keep all samples on the device; torch streams them.
    precision : {"auto", "fp16", "bf16", "fp16x3", "tf32", "fp32", "fp64"}, default="auto"
        Of storage and matrix products. "auto" is fp64; for float32 input it is fp32 on torch, or
        fp64 where log-densities would be off by over 1e-3 nats, and fp16 on Triton, or fp16x3 where
        they would be off by over 0.03 nats. torch emulates the half modes in float32.
    deterministic : bool, default=False
        Both backends are repeatable bit by bit on one machine with or without it.
    chunk_size : int or None, default=None
        Samples of a tile; None bounds the tile by memory.
    truncation : float in (0, 0.01] or None, default=None
        Leave out components of little responsibility where that costs at most so many nats per
        sample and iteration, on average; 1e-4 is a good value. What is left out is measured: an
        iteration that would exceed the bound is done with all components. Pays for thousands of
        components on Triton (spherical, diag and tied; up to 256 features, 128 for diag), where
        samples have few likely ones; costs a little elsewhere. On torch it saves nothing.

    Attributes
    ----------
    weights_ : ndarray of shape (K,), float64
    means_ : ndarray of shape (K, D), float64
    covariances_ : ndarray, float64
        ::

            (n_components,)                        if "spherical",
            (n_features, n_features)               if "tied",
            (n_components, n_features)             if "diag",
            (n_components, n_features, n_features) if "full"
    precisions_ : ndarray, float64
        Inverse covariances, same shape.
    precisions_cholesky_ : ndarray, float64
        Same shape: ``1 / sigma``, or upper triangular U with precision ``U U^T``.
    converged_ : bool
    n_iter_ : int
    lower_bound_ : float
        Mean log-likelihood of the samples (nats) at the last E-step of the best start.
    lower_bounds_ : list of float
        The same at each iteration.
    n_features_in_ : int
    feature_names_in_ : ndarray of str
        Only for input with string column names.
    backend_, device_, precision_ : str
        What really ran; the precision is that of the last iteration.
    center_ : ndarray of shape (D,), float64
        Subtracted from the samples inside.
    fit_report_ : dict
        "fit_seconds", of which "load_seconds" (reading, checking, rounding, copy to a GPU),
        "init_seconds" (with its share, "init_share") and "em_seconds"; "relative_ridge", added to
        the diagonals of tied and full covariances beside `reg_covar`, as a part of the mean
        variance; "mended_covariances", how many, over all iterations of the best start, had
        eigenvalues below the rounding of their sums, which were raised to it. With `truncation`
        also, by iteration, "discarded_mass" (responsibility left out, a mean over samples),
        "discarded_nats" (``-log(1 - mass)``) and "visited_share" (of the components), and
        "exact_iterations", the number of those that visited all.

    See Also
    --------
    GMMQuantizer : the mixture as coarse quantizer of a FAISS index.

    Notes
    -----
    ``fit`` raises ValueError, naming the row, for NaN or infinity in X, and for covariances that
    are not positive definite (possible only with a tiny ``reg_covar``). A component that loses all
    its samples keeps a weight of about zero and brings a ConvergenceWarning, as in scikit-learn.

    Examples
    --------
    >>> import numpy as np
    >>> from gmm_ivf import GaussianMixture
    >>> X = np.array([[1.0, 2], [1, 4], [1, 0], [10, 2], [10, 4], [10, 0]])
    >>> gmm = GaussianMixture(n_components=2, random_state=0).fit(X)
    >>> sorted(gmm.means_[:, 0].round().tolist())
    [1.0, 10.0]
    """

    _parameter_constraints: dict = {  # noqa: RUF012 - scikit-learn's protocol
        "n_components": [Interval(Integral, 1, None, closed="left")],
        "covariance_type": [StrOptions(set(COVARIANCE_TYPES))],
        "tol": [Interval(Real, 0.0, None, closed="left")],
        "reg_covar": [Interval(Real, 0.0, None, closed="left")],
        "max_iter": [Interval(Integral, 0, None, closed="left")],
        "n_init": [Interval(Integral, 1, None, closed="left")],
        "init_params": [StrOptions(set(seeding.METHODS))],
        "weights_init": ["array-like", None],
        "means_init": ["array-like", None],
        "precisions_init": ["array-like", None],
        "random_state": ["random_state"],
        "warm_start": ["boolean"],
        "verbose": ["verbose"],
        "device": [str, torch.device],
        "backend": [StrOptions(set(BACKENDS))],
        "precision": [StrOptions(set(PRECISIONS))],
        "deterministic": ["boolean"],
        "chunk_size": [Interval(Integral, 1, None, closed="left"), None],
        "truncation": [Interval(Real, 0.0, LARGEST_BOUND, closed="right"), None],
    }

    def __init__(
        self,
        n_components=1,
        *,
        covariance_type="spherical",
        tol=1e-3,
        reg_covar=1e-6,
        max_iter=100,
        n_init=1,
        init_params="kmeans",
        weights_init=None,
        means_init=None,
        precisions_init=None,
        random_state=None,
        warm_start=False,
        verbose=0,
        device="auto",
        backend="auto",
        precision="auto",
        deterministic=False,
        chunk_size=None,
        truncation=None,
    ):
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.tol = tol
        self.reg_covar = reg_covar
        self.max_iter = max_iter
        self.n_init = n_init
        self.init_params = init_params
        self.weights_init = weights_init
        self.means_init = means_init
        self.precisions_init = precisions_init
        self.random_state = random_state
        self.warm_start = warm_start
        self.verbose = verbose
        self.device = device
        self.backend = backend
        self.precision = precision
        self.deterministic = deterministic
        self.chunk_size = chunk_size
        self.truncation = truncation

    def fit(self, X: Any, y: Any = None) -> "GaussianMixture":
        """Estimate the parameters with EM.

        Parameters
        ----------
        X : array-like, memmap, h5py.Dataset or Tensor of shape (N, D)
            Samples; read tile by tile, neither changed nor copied whole on the CPU.
        y : ignored

        Returns
        -------
        self

        Raises
        ------
        ValueError
            For bad parameters, fewer than two samples or than components, values that are not
            finite, and covariances that are not positive definite.
        """
        self._fit(X)
        return self

    def fit_predict(self, X: Any, y: Any = None) -> Any:
        """Fit, and the likeliest component of each sample: ``fit(X).predict(X)``.

        Parameters
        ----------
        X : array-like of shape (N, D)
        y : ignored

        Returns
        -------
        labels : ndarray or Tensor of shape (N,), int64
        """
        return self._fit(X).predict(X)

    @_fit_context(prefer_skip_nested_validation=True)
    @torch_backend.exact_float32()
    def _fit(self, X: Any) -> "GaussianMixture":
        started = time.perf_counter()
        rows = self._check_rows(X, reset=True)
        engine = self._engine(rows).loaded()
        load_seconds = time.perf_counter() - started
        given = self._given(rows.d)
        resume = self.warm_start and hasattr(self, "converged_")
        if resume:
            self._check_resumable(rows.d)
        rng = check_random_state(self.random_state)
        best = -np.inf
        init_seconds = em_seconds = 0.0
        extra: dict[str, Any] = {}
        for number in range(1 if resume else self.n_init):
            start = time.perf_counter()
            if resume:
                components = self._components(engine.frame, engine.device)
            else:
                components = self._start(engine, given, rng)
            begun = time.perf_counter()
            init_seconds += begun - start
            check_reach(components)
            engine.mended = 0
            previous = self.lower_bound_ if resume else -np.inf
            reg_covar = self.reg_covar / engine.frame.scale**2
            run = Run(components, reg_covar, previous)
            try:
                for _ in self._progress(run.iterate(engine, self.max_iter, self.tol), number):
                    pass
            except KeyboardInterrupt:
                # What was reached stays usable, and warm_start goes on from it.
                if number == 0:
                    self._store(run, engine)
                raise
            em_seconds += time.perf_counter() - begun
            if number == 0 or run.bound > best:
                best = run.bound
                self._store(run, engine)
                extra = {"mended_covariances": engine.mended, **truncation_report(engine)}
        total = time.perf_counter() - started
        self.fit_report_ = {
            "fit_seconds": total,
            "load_seconds": load_seconds,
            "init_seconds": init_seconds,
            "em_seconds": em_seconds,
            "init_share": init_seconds / total,
            "relative_ridge": relative_ridge(self.covariance_type, self.precision_),
            **extra,
        }
        self._warn(rows.n)
        return self

    def _given(self, d: int) -> tuple:
        parts = self.weights_init, self.means_init, self.precisions_init
        return check_initial_parameters(*parts, self.covariance_type, self.n_components, d)

    def _engine(self, rows: Rows) -> Engine:
        """The passes that EM is made of, on the device and backend that are to run."""
        device, backend, candidates = self._resolve(rows)
        kind = engine_type(backend, self.truncation, self.covariance_type, candidates, rows.d)
        rows = rows.on_gpu(device) if device.type == "cuda" else rows
        frame = rows.scan(device, keep_whole=self.covariance_type != "tied")
        return kind(rows, frame, device, candidates, self.chunk_size)

    def _check_resumable(self, d: int) -> None:
        """Refuse a warm start from parameters of other shapes."""
        wanted = covariance_shape(self.covariance_type, self.n_components, d)
        if self.means_.shape != (self.n_components, d) or self.covariances_.shape != wanted:
            raise ValueError(
                f"warm_start=True: the last fit has means of shape {self.means_.shape} and "
                f"covariances of shape {self.covariances_.shape}, this one wants "
                f"{(self.n_components, d)} and {wanted}; set warm_start=False to start afresh."
            )

    def _progress(self, iterations: Iterator[float], number: int) -> Iterable[float]:
        return tqdm(
            iterations,
            desc=f"EM {number + 1}/{self.n_init}",
            total=self.max_iter,
            unit="iteration",
            leave=False,
            disable=not self.verbose,
        )

    def _start(self, engine: Engine, given: tuple, rng: np.random.RandomState) -> Components:
        """First components in the frame: the given parts, the rest by `init_params`."""
        weights, means, precisions = given
        frame, kind = engine.frame, self.covariance_type
        if any(part is None for part in given):
            found = seeding.initial_components(
                engine,
                self.n_components,
                kind,
                self.init_params,
                self.reg_covar / frame.scale**2,
                rng,
            )
            if weights is None:
                weights = found.weights.cpu().numpy()
            if means is None:
                means = frame.means_outside(found)
            if precisions is None:
                covariances = frame.covariances_outside(found)
        if precisions is not None:
            covariances = covariances_from_precisions(precisions, kind)
        return frame.components_inside(kind, weights, means, covariances, engine.device)

    def _store(self, run: Run, engine: Engine) -> None:
        frame, components = engine.frame, run.components
        self.weights_ = components.weights.cpu().numpy()
        self.means_ = frame.means_outside(components)
        self.covariances_ = frame.covariances_outside(components)
        self.precisions_cholesky_ = frame.factors_outside(components)
        self.center_ = frame.center
        self._exponent = frame.exponent
        self.converged_ = run.converged
        self.n_iter_ = len(run.bounds)
        self.lower_bound_ = run.bound
        self.lower_bounds_ = run.bounds
        self.backend_, self.device_ = engine.backend, str(engine.device)
        self.precision_ = engine.mode

    def _warn(self, n: int) -> None:
        if not self.converged_ and self.max_iter > 0:
            warnings.warn(
                f"EM did not converge in {self.n_iter_} iterations (the mean log-likelihood still "
                f"changes by more than tol={self.tol}). Try different init parameters, or increase "
                "max_iter, tol, or check for degenerate data.",
                ConvergenceWarning,
                stacklevel=6,
            )
        empty = int((self.weights_ * n < 1e-3).sum())
        if empty:
            warnings.warn(
                f"{empty} of {self.n_components} components hold no samples; X may have fewer "
                "distinct samples than n_components.",
                ConvergenceWarning,
                stacklevel=6,
            )
