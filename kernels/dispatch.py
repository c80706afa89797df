"""Which backend, device and precision run: decided and checked in one place.

An explicit request either runs as asked or raises; only "auto" chooses.
"""

import importlib.util
from dataclasses import dataclass

import torch

from gmm_ivf.kernels.components import ROUNDING_UNITS, Components, relative_ridge

BACKENDS = ("auto", "triton", "torch")
PRECISIONS = ("auto", *ROUNDING_UNITS)
TRITON_FEATURES = 4096

# Coordinates up to this keep their squares in float32 as precise as those of the data, which are at
# most 16; beyond the second bound, times the precision factor, squares overflow.
_FLOAT32_REACH = 64.0
_SAFE_SQUARE = {torch.float32: 1e15, torch.float64: 1e150}


@dataclass(frozen=True)
class Accuracy:
    """What a mode has to keep, against float64 with the same parameters and samples.

    Attributes
    ----------
    nats : float
        Largest mean error of a log-density. "auto" takes a mode only where it expects less.
    agreement : float
        Smallest share of samples whose likeliest component is the same.
    parameters : float
        Largest relative error (Frobenius) of updated means, covariances and weights.
    """

    nats: float
    agreement: float
    parameters: float


_FLOAT32_GRADE = Accuracy(1e-3, 0.9999, 1e-4)
_HALF_GRADE = Accuracy(0.03, 0.999, 2e-3)
ACCURACY = {
    "fp64": _FLOAT32_GRADE,
    "fp32": _FLOAT32_GRADE,
    "fp16x3": _FLOAT32_GRADE,
    "fp16": _HALF_GRADE,
    "tf32": _HALF_GRADE,
    "bf16": Accuracy(0.2, 0.995, 1e-2),
}
# The same for the worst component that is not light: expected nats from which "auto" takes the next
# more precise mode.
WORST_ERROR_NATS = 0.1

# Mean error of rounding to nearest in units of the largest, with some room: it is 0.34 for digits
# that are spread as those of data usually are.
_TYPICAL_ROUNDING = 0.5


def resolve_device(device: str | torch.device, data_device: torch.device | None) -> torch.device:
    """The device to run on.

    Parameters
    ----------
    device : str or torch.device
        "auto" takes the device of the data when that is a GPU, else a GPU if torch has one,
        else the CPU.
    data_device : torch.device or None
        Where the samples lie, when they are a tensor.

    Raises
    ------
    ValueError
        For a device that torch does not know or cannot use here.
    """
    if isinstance(device, str) and device == "auto":
        if data_device is not None:
            return data_device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(device)
        torch.empty(1, device=wanted).item()
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(
            f"device={device!r} cannot be used here: {str(error).splitlines()[0].rstrip('.')}. "
            'Use "auto", "cpu" or a device that torch lists.'
        ) from error
    return wanted


def triton_obstacle(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on a device, None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda":
        return None
    from triton import knobs

    if device.type == "cpu" and knobs.runtime.interpret:
        return None
    return f"they need a CUDA device (or TRITON_INTERPRET=1 on a CPU), got {device}"


def resolve_backend(
    backend: str, precision: str, device: torch.device, wide_input: bool, n_features: int
) -> tuple[str, tuple[str, ...]]:
    """The backend that runs, and the precision modes it may run in, cheapest first.

    Parameters
    ----------
    backend : {"auto", "triton", "torch"}
        "auto" takes Triton on a CUDA device wherever it can, and torch elsewhere.
    precision : str
    device : torch.device
    wide_input : bool
        As for `candidate_precisions`.
    n_features : int

    Raises
    ------
    ValueError
        For an unknown name, and for "triton" where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}.")
    by_torch = candidate_precisions(precision, wide_input)
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return "torch", by_torch
    by_triton = candidate_precisions(precision, wide_input, half_products=True)
    obstacle = triton_obstacle(device)
    if obstacle is None and by_triton == ("fp64",):
        obstacle = "they have no fp64; pass float32 samples or another precision"
    if obstacle is None and n_features > TRITON_FEATURES:
        obstacle = f"they take at most {TRITON_FEATURES} features, got {n_features}"
    if obstacle is None:
        return "triton", by_triton
    if backend == "auto":
        return "torch", by_torch
    raise ValueError(
        f'backend="triton" cannot run its kernels: {obstacle}. Or use backend="torch".'
    )


def candidate_precisions(
    precision: str, wide_input: bool, half_products: bool = False
) -> tuple[str, ...]:
    """Modes that may run, cheapest first; one unless `precision` is "auto".

    Parameters
    ----------
    precision : str
    wide_input : bool
        The samples do not fit float32 exactly, or are so few bits (float16) that
        scikit-learn computes in float64: "auto" then means fp64.
    half_products : bool, default=False
        The fit is to run where products of half precision are fast: "auto" then means fp16 or,
        where that does not serve, fp16x3.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}.")
    if precision != "auto":
        return (precision,)
    if wide_input:
        return ("fp64",)
    return ("fp16", "fp16x3") if half_products else ("fp32", "fp64")


def expected_errors(mode: str, components: Components) -> torch.Tensor:
    """Expected error in nats of the log-densities of the samples of each component, shape (K,).

    Two errors add up. Operands are rounded to the mode, and since norms are taken of the rounded
    values, an error e of x or of a mean enters only as ``e . precision . (x - mean)``: it grows
    with the square root of the squared Mahalanobis norm of the mean, not with the norm itself.
    Sums are rounded to float32 (float64 in fp64), in proportion to what cancels in
    ``|x|^2 - 2 x.mean + |mean|^2``. Full covariances multiply ``x - mean`` and instead lose the
    rounding of the second moments where correlations stretch it. A mode in which squares would
    overflow has an infinite error; one that adds a relative ridge errs by that too.
    """
    c = components
    unit = ROUNDING_UNITS[mode]
    sum_unit = min(unit, ROUNDING_UNITS["fp32"])
    k, d = c.means.shape
    if mode != "fp64" and float(c.precisions_cholesky.abs().max()) > _SAFE_SQUARE[torch.float32]:
        return c.means.new_full((k,), torch.inf)
    if c.covariance_type in ("spherical", "diag"):
        rounding = unit * _squared_roundings(c).sqrt()
        return _TYPICAL_ROUNDING * rounding + 2 * sum_unit * (c.squared_radii() + d)
    # Diagonal of the precision: with that of the covariance it gives variance inflation factors,
    # which are 1 for uncorrelated features.
    precision = c.precisions_cholesky.square().sum(-1)
    variances = c.covariances.diagonal(dim1=-2, dim2=-1)
    inflation = (variances * precision).sum(-1)
    stretched = (c.means.square() * precision).sum(-1)
    ridge = _ridge_error(c, relative_ridge(c.covariance_type, mode))
    if c.covariance_type == "full":
        return 2 * unit * (inflation + stretched.sqrt()) + ridge
    # Either the whitened samples and means are rounded, or the samples and ``precision . mean``.
    slopes = (c.means @ c.precisions_cholesky) @ c.precisions_cholesky.T
    apart = stretched + 3 * inflation + (slopes.square() * variances).sum(-1)
    rounding = unit * torch.maximum(apart, _squared_roundings(c)).sqrt()
    whitening = (inflation + stretched).sqrt()
    rounded = _TYPICAL_ROUNDING * rounding
    return rounded + 2 * sum_unit * (c.squared_radii() + d + whitening) + ridge


def _ridge_error(c: Components, relative: float) -> torch.Tensor:
    """What a relative ridge changes in nats, shape (K,) or () for tied.

    A ridge that is the share u of the variance along an axis costs ``(-u - log(1 - u)) / 2`` nats
    on average, about ``u^2 / 4``; and the sum of the squares of 1 / variance over the axes is the
    squared norm of the precision.
    """
    if not relative:
        return c.means.new_zeros(())
    variance = c.covariances.diagonal(dim1=-2, dim2=-1).mean(-1)
    precision = c.precisions_cholesky @ c.precisions_cholesky.mT
    return (relative * variance * precision.norm(dim=(-2, -1))).square() / 4


def _squared_roundings(c: Components) -> torch.Tensor:
    """Mean square of the error of a log-density per relative error of the operands, shape (K,).

    With ``r = mean^2 / variance`` of a feature, the mean of ``x^2 (x - mean)^2 / variance^2`` is
    ``r + 3``, that of ``mean^2 (x - mean)^2 / variance^2`` is r, and that of
    ``x^4 / (4 variance^2)``, for the squares that are operands of diag, ``(r^2 + 6 r + 3) / 4``.
    """
    d = c.means.shape[1]
    if c.covariance_type != "diag":
        return 2 * c.squared_radii() + 3 * d
    ratio = (c.means * c.precisions_cholesky).square()
    return (2 * ratio + 3 + (ratio.square() + 6 * ratio + 3) / 4).sum(1)


def safe_reach(dtype: torch.dtype, components: Components) -> float:
    """Largest coordinate of a sample that a dtype serves; beyond it float32 gives way to float64.

    Beyond the reach of float64 squared distances overflow.
    """
    stretch = max(1.0, float(components.precisions_cholesky.abs().max()))
    reach = _SAFE_SQUARE[dtype] / stretch
    return min(reach, _FLOAT32_REACH) if dtype == torch.float32 else reach


def choose_precision(candidates: tuple[str, ...], components: Components) -> str:
    """The cheapest candidate whose expected errors are in bounds, else the last.

    Components of weight below 1 / (10 K) are held to keeping their samples only: one of a few
    samples is so narrow that float32 errs by nats in a log-density that exceeds the next best by
    more than D / 2 nats.
    """
    k, d = components.means.shape
    is_heavy = components.weights > 0.1 / k
    worst = torch.where(is_heavy, WORST_ERROR_NATS, max(WORST_ERROR_NATS, d / 4))
    for mode in candidates[:-1]:
        errors = expected_errors(mode, components)
        mean = float((errors * components.weights)[is_heavy].sum())
        if mean <= ACCURACY[mode].nats and bool((errors <= worst).all()):
            return mode
    return candidates[-1]
