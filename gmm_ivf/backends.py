"""Which engine runs for a backend."""

from collections.abc import Callable
from functools import partial

from gmm_ivf.engine import Engine
from gmm_ivf.truncation import TruncatedTorchEngine


def engine_type(
    backend: str,
    bound: float | None,
    covariance_type: str,
    candidates: tuple[str, ...],
    n_features: int,
) -> Callable[..., Engine]:
    """What makes the engine of a backend, with truncation where a bound is given.

    Raises
    ------
    ValueError
        Where the kernels do not truncate.
    """
    if backend == "torch":
        return Engine if bound is None else partial(TruncatedTorchEngine, bound=bound)
    # Imported only where they run: triton may not be installed.
    from gmm_ivf.triton_engine import TritonEngine
    from gmm_ivf.truncated_engine import TruncatedEngine, check_truncation

    if bound is None:
        return TritonEngine
    check_truncation(covariance_type, candidates, n_features)
    return partial(TruncatedEngine, bound=bound)
