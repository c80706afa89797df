"""Parameters of a mixture on a device, their sufficient statistics, and the M-step.

Everything here is K-sized work in float64. Values are in the frame of the caller of the kernels
(the estimator centres and scales its data first).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

COVARIANCE_TYPES = ("spherical", "diag", "tied", "full")

# scikit-learn adds ten machine epsilons to the count of each component, so that an empty one has a
# weight of about zero and a finite mean.
COUNT_FLOOR = 10 * torch.finfo(torch.float64).eps

# Rounding unit of an operand of a matrix product.
ROUNDING_UNITS = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "fp16x3": 2.0**-22,
    "fp16": 2.0**-11,
    "tf32": 2.0**-11,
    "bf16": 2.0**-8,
}

# Modes that store the factors of covariances in half precision.
HALF_MODES = ("fp16", "bf16")
# Ridge of the factors of tied and full covariances in those modes, relative to the mean variance:
# what rounding a factor does to a distance grows with the square root of the condition number.
RELATIVE_RIDGE = 5e-4

# Variances outside this range, in the frame of the estimator, leave float64 no room for squares.
_VARIANCE_RANGE = (1e-280, 1e280)


class IllDefinedCovarianceError(ValueError):
    """A covariance is not positive definite; names the first component it happened to."""


@dataclass(frozen=True)
class Components:
    """K Gaussians in D dimensions with their weights; float64 tensors on one device.

    Attributes
    ----------
    covariance_type : {"spherical", "diag", "tied", "full"}
    weights : Tensor of shape (K,)
    means : Tensor of shape (K, D)
    covariances : Tensor
        (K,) spherical, (K, D) diag, (D, D) tied, (K, D, D) full.
    precisions_cholesky : Tensor
        Same shape. ``1 / sigma`` for spherical and diag; for tied and full the upper triangular U
        with ``inverse(covariance) = U U^T``, so that ``|(x - mean) U|^2`` is the Mahalanobis
        distance.
    """

    covariance_type: str
    weights: Tensor
    means: Tensor
    covariances: Tensor
    precisions_cholesky: Tensor

    @classmethod
    def from_covariances(
        cls,
        covariance_type: str,
        weights: Tensor,
        means: Tensor,
        covariances: Tensor,
        check: bool = True,
    ) -> "Components":
        """Components with the precision factors computed from the covariances."""
        factors = precisions_cholesky(covariances, covariance_type, check)
        return cls(covariance_type, weights, means, covariances, factors)

    @classmethod
    def equal(cls, covariance_type: str, means: Tensor, variance: float) -> "Components":
        """Components of equal weight and isotropic covariance about the given means."""
        k, d = means.shape
        if covariance_type in ("tied", "full"):
            eye = torch.eye(d, dtype=means.dtype, device=means.device)
            unit = eye if covariance_type == "tied" else eye.expand(k, d, d)
        else:
            unit = means.new_ones((k, d) if covariance_type == "diag" else (k,))
        weights = means.new_full((k,), 1 / k)
        return cls(covariance_type, weights, means, unit * variance, unit * variance**-0.5)

    def copy(self) -> "Components":
        """The same values in contiguous memory of their own."""
        parts = (self.weights, self.means, self.covariances, self.precisions_cholesky)
        copies = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        return Components(self.covariance_type, *copies)

    def log_constants(self) -> Tensor:
        """``log weight + log |U| - D/2 log(2 pi)`` of each component, shape (K,)."""
        k, d = self.means.shape
        log_det = half_log_determinant(self.precisions_cholesky, self.covariance_type, d)
        return self.weights.log() + log_det.expand(k) - 0.5 * d * math.log(2 * math.pi)

    def squared_radii(self) -> Tensor:
        """Squared Mahalanobis norm of each mean, shape (K,).

        Bounds the cancellation in ``|x|^2 - 2 x.mean + |mean|^2``: what a low precision loses is
        its rounding unit times this.
        """
        if self.covariance_type == "full":
            return torch.einsum("kd,kde->ke", self.means, self.precisions_cholesky).square().sum(1)
        if self.covariance_type == "tied":
            return (self.means @ self.precisions_cholesky).square().sum(1)
        factor = self.precisions_cholesky
        return (self.means * (factor[:, None] if factor.ndim == 1 else factor)).square().sum(1)


@dataclass(frozen=True)
class Statistics:
    """Sums over samples, taken about the means that the responsibilities were computed with.

    Attributes
    ----------
    log_likelihood : Tensor, scalar
        Sum of the log-densities of the samples.
    s0 : Tensor of shape (K,)
        ``sum_n r_nk``
    s1 : Tensor of shape (K, D)
        ``sum_n r_nk (x_n - mean_k)``
    s2 : Tensor
        Second moments about the means: ``sum_n r_nk |x_n - mean_k|^2`` (K,) for spherical, the same
        per feature (K, D) for diag, the matrices ``sum_n r_nk (x_n - mean_k)(x_n - mean_k)^T``
        (K, D, D) for full and their sum over k (D, D) for tied.
    """

    log_likelihood: Tensor
    s0: Tensor
    s1: Tensor
    s2: Tensor


def half_log_determinant(factor: Tensor, covariance_type: str, n_features: int) -> Tensor:
    """``log |U|``, half the log-determinant of the precision; shape (K,), or (1,) for tied."""
    if covariance_type == "spherical":
        return n_features * factor.log()
    if covariance_type == "diag":
        return factor.log().sum(1)
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1).reshape(-1)


def precisions_cholesky(covariances: Tensor, covariance_type: str, check: bool = True) -> Tensor:
    """Upper triangular U of each inverse covariance (see `Components`).

    Without `check` nothing waits for the device, and factors of a bad covariance are not finite.

    Raises
    ------
    IllDefinedCovarianceError
        Where a covariance is not positive definite in float64.
    """
    if covariance_type in ("spherical", "diag"):
        if check:
            _refuse(~_in_range(covariances.reshape(len(covariances), -1)))
        return covariances.rsqrt()
    lower, info = torch.linalg.cholesky_ex(covariances)
    if check:
        pivots = lower.diagonal(dim1=-2, dim2=-1).square()
        _refuse(((info != 0) | ~_in_range(pivots)).reshape(-1))
    eye = torch.eye(covariances.shape[-1], dtype=covariances.dtype, device=covariances.device)
    inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    return inverse.mT.contiguous()


def _in_range(variances: Tensor) -> Tensor:
    """Whether all variances along the last axis are positive and far from overflow."""
    smallest, largest = _VARIANCE_RANGE
    return ((variances > smallest) & (variances < largest)).all(-1)


def _refuse(bad: Tensor) -> None:
    if bool(bad.any()):
        more = int(bad.sum()) - 1
        raise IllDefinedCovarianceError(
            f"Fitting the mixture model failed: the covariance of component "
            f"{int(bad.nonzero()[0])} {f'(and of {more} more) ' if more else ''}is not positive "
            "definite, as happens when its samples coincide or lie in a subspace. Use fewer "
            "components, increase reg_covar, or scale the input data."
        )


def relative_ridge(covariance_type: str, mode: str) -> float:
    """The ridge of a new covariance as a part of its mean variance."""
    half = mode in HALF_MODES and covariance_type in ("tied", "full")
    return RELATIVE_RIDGE if half else 0.0


def m_step(
    stats: Statistics,
    components: Components,
    reg_covar: float,
    check: bool = True,
    mode: str = "fp64",
) -> Components:
    """Maximum-likelihood parameters for given statistics.

    Parameters
    ----------
    stats : Statistics
        About ``components.means``.
    components : Components
        Those the statistics were computed with.
    reg_covar : float
        Added to the diagonal of each covariance, in squared units of the frame.
    check : bool, default=True
        Without it nothing waits for the device, and factors may come out not finite.
    mode : str, default="fp64"
        Precision mode of the E-step to come. Where it stores factors of tied or full covariances in
        half precision, `relative_ridge` of the mean variance is added to their diagonals as well.

    Returns
    -------
    Components

    Raises
    ------
    IllDefinedCovarianceError
        When a new covariance is not positive definite.

    Notes
    -----
    With ``delta = s1 / s0`` the new mean is ``mean + delta`` and a second moment about the new mean
    is the one about the old mean less ``delta delta^T``: near convergence delta vanishes, so
    nothing cancels. A component without samples keeps its mean.
    """
    weights, means, covariances = _maximised(stats, components)
    kind = components.covariance_type
    _add_ridge(covariances, reg_covar, kind, mode)
    return Components.from_covariances(kind, weights, means, covariances, check)


def mended_m_step(
    stats: Statistics, components: Components, reg_covar: float, mode: str
) -> tuple[Components, int]:
    """`m_step`, where tied and full covariances may have lost definiteness to rounding.

    Before the ridge is added, eigenvalues below the rounding of the sums are raised to it: the unit
    of the mode times the norm of the covariance. Set to 0 they would leave the ridge alone to
    variances that may be as large as the rounding, and left as they are errors of either sign would
    decide between components. The host waits for the device.

    Returns
    -------
    components : Components
    mended : int
        Covariances that had such eigenvalues; the others are those of `m_step`.

    Raises
    ------
    IllDefinedCovarianceError
        When a covariance is not positive definite even so: 0 without a ridge, or not finite.
    """
    weights, means, covariances = _maximised(stats, components)
    kind, mended = components.covariance_type, 0
    if kind in ("tied", "full"):
        floor = ROUNDING_UNITS[mode] * covariances.norm(dim=(-2, -1))
        lowered = covariances.clone()
        lowered.diagonal(dim1=-2, dim2=-1).sub_(floor[..., None])
        low = torch.linalg.cholesky_ex(lowered)[1] != 0
        low &= covariances.isfinite().all(-1).all(-1)
        mended = int(low.sum())
        if mended:
            values, vectors = torch.linalg.eigh(covariances[low])
            values = torch.maximum(values, floor[low][..., None])
            covariances[low] = (vectors * values[..., None, :]) @ vectors.mT
    _add_ridge(covariances, reg_covar, kind, mode)
    return Components.from_covariances(kind, weights, means, covariances), mended


def _maximised(stats: Statistics, components: Components) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, means and covariances of maximum likelihood, without a ridge."""
    kind = components.covariance_type
    counts = stats.s0 + COUNT_FLOOR
    delta = stats.s1 / counts[:, None]
    if kind == "spherical":
        moment = stats.s2 / counts - delta.square().sum(1)
        covariances = moment.clamp_min(0) / delta.shape[1]
    elif kind == "diag":
        covariances = (stats.s2 / counts[:, None] - delta.square()).clamp_min(0)
    elif kind == "tied":
        covariances = torch.addmm(stats.s2, stats.s1.T, delta, alpha=-1) / counts.sum()
    else:
        covariances = stats.s2 / counts[:, None, None] - delta[:, :, None] * delta[:, None, :]
    return counts / counts.sum(), components.means + delta, covariances


def _add_ridge(covariances: Tensor, absolute: float, covariance_type: str, mode: str) -> None:
    """Add to variances an absolute value and, if the mode asks for it, a part of their mean."""
    if covariance_type in ("spherical", "diag"):
        covariances += absolute
        return
    diagonal = covariances.diagonal(dim1=-2, dim2=-1)
    relative = relative_ridge(covariance_type, mode)
    if relative:
        diagonal += absolute + relative * diagonal.mean(-1, keepdim=True)
    else:
        diagonal += absolute
