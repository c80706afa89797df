"""One mixture on one set of samples in some precision, and how far that is from another."""

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from gmm_ivf.estimator import GaussianMixture
from gmm_ivf.kernels.components import IllDefinedCovarianceError
from gmm_ivf.kernels.dispatch import Accuracy

# Posteriors kept of each sample: with the fourth the rest is next to nothing where it matters.
_KEPT = 4


@dataclass(frozen=True)
class Step:
    """Parameters after one EM step, in the caller's units; shapes as in GaussianMixture."""

    weights: np.ndarray
    means: np.ndarray
    covariances: np.ndarray
    precisions_cholesky: np.ndarray


@dataclass(frozen=True)
class Pass:
    """What one precision makes of a mixture and samples.

    Attributes
    ----------
    precision, backend, device : str
        What really ran.
    ids : ndarray of shape (N, m), int64
        Likeliest components of each sample, best first.
    log_resp : ndarray of shape (N, m), float64
        Their log-responsibilities.
    log_density : ndarray of shape (N,), float64
        In nats, in the caller's units.
    step : Step or None
        None where a covariance of the M-step was not positive definite.
    failure : str
        The message in that case.
    """

    precision: str
    backend: str
    device: str
    ids: np.ndarray
    log_resp: np.ndarray
    log_density: np.ndarray
    step: Step | None
    failure: str = ""


def evaluate(gmm: GaussianMixture, X: Any, precision: str, backend: str) -> Pass:
    """E-step of a fitted mixture on X, and one M-step; the mixture stays as it is.

    Parameters
    ----------
    gmm : GaussianMixture
    X : array-like, memmap, h5py.Dataset or Tensor of shape (N, D), N >= K
    precision, backend : str
        In place of those of the mixture.

    Raises
    ------
    ValueError
        As ``fit`` and ``score_samples`` do, but not for covariances of the M-step.
    """
    model = copy.copy(gmm)
    model.set_params(precision=precision, backend=backend)
    ids, log_resp = model.top_components(X, _KEPT)
    log_density = model._log_density(X, torch.float64)
    model.set_params(warm_start=True, max_iter=1, tol=0.0, verbose=0)
    step, failure = None, ""
    try:
        with warnings.catch_warnings():
            # One step converges nowhere, and empty components are no news here.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(X)
        step = Step(model.weights_, model.means_, model.covariances_, model.precisions_cholesky_)
        ran = (model.precision_, model.backend_, model.device_)
    except IllDefinedCovarianceError as error:
        ran = (precision, backend, str(model.device))
        failure = str(error)
    return Pass(
        *ran, _numpy(ids), _numpy(log_resp), _numpy(log_density), step=step, failure=failure
    )


def _numpy(array: Any) -> np.ndarray:
    return array.cpu().numpy() if isinstance(array, Tensor) else array


@dataclass(frozen=True)
class Measured:
    """Errors of a precision against another; see `kernels.dispatch.Accuracy` for the limits.

    Attributes
    ----------
    nats, bias, worst_nats : float
        Error of the log-density: mean absolute, absolute mean (of the log-likelihood per sample),
        largest.
    agreement : float
        Share of the samples with the same likeliest component.
    weights, means, covariances : float
        Relative Frobenius errors after one EM step, over the components that hold a weight above
        1/(10 K); means about the centre of the data. NaN where the M-step failed.
    """

    nats: float
    bias: float
    worst_nats: float
    agreement: float
    weights: float
    means: float
    covariances: float

    def misses(self, limits: Accuracy) -> tuple[str, ...]:
        """Names of what is beyond the limits."""
        within = {
            "nats": self.nats <= limits.nats,
            "agreement": self.agreement >= limits.agreement,
            "weights": self.weights <= limits.parameters,
            "means": self.means <= limits.parameters,
            "covariances": self.covariances <= limits.parameters,
        }
        return tuple(name for name, good in within.items() if not good)


def measure(found: Pass, reference: Pass, center: np.ndarray, tied: bool) -> Measured:
    """How far `found` is from `reference`.

    Parameters
    ----------
    found, reference : Pass
        Of the same mixture and samples.
    center : ndarray of shape (D,)
        Means are taken about it, so that an offset of the data hides no error.
    tied : bool
        All components share one covariance.

    Raises
    ------
    ValueError
        When the M-step of the reference failed.
    """
    wanted = step_of(reference)
    errors = np.abs(found.log_density - reference.log_density)
    bias = abs(float(found.log_density.mean() - reference.log_density.mean()))
    agreement = float((found.ids[:, 0] == reference.ids[:, 0]).mean())
    rows = (float(errors.mean()), bias, float(errors.max()), agreement)
    if found.step is None:
        return Measured(*rows, np.nan, np.nan, np.nan)
    heavy = heavy_components(wanted.weights)
    kept = slice(None) if tied else heavy
    return Measured(
        *rows,
        _relative(found.step.weights[heavy], wanted.weights[heavy]),
        _relative(found.step.means[heavy] - center, wanted.means[heavy] - center),
        _relative(found.step.covariances[kept], wanted.covariances[kept]),
    )


def step_of(reference: Pass) -> Step:
    """The step of the pass that others are compared with.

    Raises
    ------
    ValueError
        When it failed.
    """
    if reference.step is None:
        raise ValueError(
            f"no EM step to compare with in the reference precision {reference.precision}: "
            f"{reference.failure}"
        )
    return reference.step


def heavy_components(weights: np.ndarray) -> np.ndarray:
    """Which components hold enough to be judged: a weight above 1/(10 K)."""
    return weights > 1 / (10 * len(weights))


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    size = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(found - wanted)) / size if size > 0 else 0.0
