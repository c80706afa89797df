"""Which backend, device and precision run: decided and checked in one place.

An explicit request either runs as asked or raises; only "auto" chooses.
"""

import importlib.util

import torch

from gmm_ivf.kernels.components import Components

BACKENDS = ("auto", "triton", "torch")
# Rounding unit of an operand of a matrix product.
ROUNDING_UNITS = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "fp16x3": 2.0**-22,
    "fp16": 2.0**-11,
    "tf32": 2.0**-11,
    "bf16": 2.0**-8,
}
PRECISIONS = ("auto", *ROUNDING_UNITS)

# Coordinates up to this keep their squares in float32 as precise as those of the data, which are at
# most 16; beyond the second bound, times the precision factor, squares overflow.
_FLOAT32_REACH = 64.0
_SAFE_SQUARE = {torch.float32: 1e15, torch.float64: 1e150}

# Expected error of a log-density in nats, averaged over the samples, and for the worst component,
# beyond which "auto" takes the next more precise mode.
MEAN_ERROR_NATS = 1e-3
WORST_ERROR_NATS = 0.1


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
            f"device={device!r} cannot be used here: {str(error).splitlines()[0]} "
            'Use "auto", "cpu" or a device that torch lists.'
        ) from error
    return wanted


def resolve_backend(backend: str, device: torch.device) -> str:
    """The backend that runs on the device: "torch".

    Raises
    ------
    ValueError
        For an unknown name, and for "triton" where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}.")
    if backend == "triton":
        missing = "" if importlib.util.find_spec("triton") else " (nor is triton installed)"
        raise ValueError(
            f'backend="triton" has no fitted path on {device} in this version{missing}; '
            'use backend="torch" or "auto".'
        )
    return "torch"


def candidate_precisions(precision: str, wide_input: bool) -> tuple[str, ...]:
    """Modes that may run, cheapest first; one unless `precision` is "auto".

    Parameters
    ----------
    precision : str
    wide_input : bool
        The samples do not fit float32 exactly, or are so few bits (float16) that
        scikit-learn computes in float64: "auto" then means fp64.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}.")
    if precision != "auto":
        return (precision,)
    return ("fp64",) if wide_input else ("fp32", "fp64")


def expected_errors(mode: str, components: Components) -> torch.Tensor:
    """Rough error in nats of the log-densities near each component, shape (K,).

    A mode loses its rounding unit times what cancels: the squared Mahalanobis norm of the mean in
    ``|x|^2 - 2 x.mean + |mean|^2``; for tied and full covariances also the rounding of x, or of
    the second moments, stretched along the directions of small variance. A mode in which squares
    would overflow has an infinite error.
    """
    c = components
    unit = ROUNDING_UNITS[mode]
    k, d = c.means.shape
    if mode != "fp64" and float(c.precisions_cholesky.abs().max()) > _SAFE_SQUARE[torch.float32]:
        return c.means.new_full((k,), torch.inf)
    if c.covariance_type in ("spherical", "diag"):
        return 2 * unit * (c.squared_radii() + d)
    # Diagonal of the precision: with that of the covariance it gives variance inflation factors,
    # which are 1 for uncorrelated features.
    precision = c.precisions_cholesky.square().sum(-1)
    inflation = (c.covariances.diagonal(dim1=-2, dim2=-1) * precision).sum(-1)
    stretched = (c.means.square() * precision).sum(-1)
    if c.covariance_type == "full":
        return 2 * unit * (inflation + stretched.sqrt())
    whitening = min(unit, ROUNDING_UNITS["fp32"]) * (inflation + stretched).sqrt()
    return 2 * (unit * (c.squared_radii() + d) + whitening)


def safe_reach(dtype: torch.dtype, components: Components) -> float:
    """Largest coordinate of a sample that a dtype serves; beyond it float32 gives way to float64.

    Beyond the reach of float64 squared distances overflow.
    """
    stretch = max(1.0, float(components.precisions_cholesky.abs().max()))
    reach = _SAFE_SQUARE[dtype] / stretch
    return min(reach, _FLOAT32_REACH) if dtype == torch.float32 else reach


def choose_precision(candidates: tuple[str, ...], components: Components) -> str:
    """The cheapest candidate whose expected errors are in bounds, else the last."""
    for mode in candidates[:-1]:
        errors = expected_errors(mode, components)
        mean = (errors * components.weights).sum()
        if float(mean) <= MEAN_ERROR_NATS and float(errors.max()) <= WORST_ERROR_NATS:
            return mode
    return candidates[-1]
