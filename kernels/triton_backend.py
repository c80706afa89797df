"""Passes over a tile by the Triton kernels, under the names that `torch_backend` gives them."""

from torch import Tensor

from gmm_ivf.kernels import em
from gmm_ivf.kernels.components import Components
from gmm_ivf.kernels.operands import Prepared

__all__ = ["likeliest", "log_density", "prepare", "top_components"]


def prepare(components: Components, mode: str) -> Prepared:
    """Coefficients of the log-densities, once for many tiles."""
    return em.prepare(components, mode)


def log_density(x: Tensor, prepared: Prepared) -> Tensor:
    """``log sum_k weight_k N(x_n; mean_k, Sigma_k)`` of a tile, (n,), float32."""
    samples = em.stage(x, prepared.mode)
    return em.log_density(samples, em.row_pass(samples, prepared), prepared)


def top_components(x: Tensor, prepared: Prepared, m: int) -> tuple[Tensor, Tensor]:
    """The m likeliest components of each row, best first, and their log-responsibilities."""
    samples = em.stage(x, prepared.mode)
    _, ids, log_resp = em.top(samples, prepared, m)
    return ids, log_resp.clamp_max_(0)


def likeliest(x: Tensor, prepared: Prepared) -> Tensor:
    """The likeliest component of each row, (n,); ties by the lower index."""
    return top_components(x, prepared, 1)[0][:, 0]
