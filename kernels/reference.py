"""Plain mixture formulas for tests: nothing tiled, nothing fused, N x K and N x K x D in memory.

Every function takes and returns float64 tensors. It shares no formula with the backends that it is
the oracle of.
"""

import math

import torch
from torch import Tensor

from gmm_ivf.kernels.components import Components, Statistics


def mahalanobis(x: Tensor, components: Components) -> Tensor:
    """Squared Mahalanobis distance of every row from every mean, (N, K), by explicit inverses."""
    diff = x[:, None, :] - components.means[None, :, :]
    cov = components.covariances
    if components.covariance_type == "spherical":
        return diff.square().sum(-1) / cov
    if components.covariance_type == "diag":
        return (diff.square() / cov).sum(-1)
    inverse = torch.linalg.inv(cov)
    if components.covariance_type == "tied":
        return torch.einsum("nkd,de,nke->nk", diff, inverse, diff)
    return torch.einsum("nkd,kde,nke->nk", diff, inverse, diff)


def log_determinants(components: Components) -> Tensor:
    """``log |Sigma_k|`` of each component, (K,)."""
    k, d = components.means.shape
    cov = components.covariances
    if components.covariance_type == "spherical":
        return d * cov.log()
    if components.covariance_type == "diag":
        return cov.log().sum(1)
    return torch.linalg.slogdet(cov).logabsdet.expand(k)


def log_joint(x: Tensor, components: Components) -> Tensor:
    """``log(weight_k N(x_n; mean_k, Sigma_k))``, (N, K)."""
    d = x.shape[1]
    log_norm = -0.5 * (d * math.log(2 * math.pi) + log_determinants(components))
    return components.weights.log() + log_norm - 0.5 * mahalanobis(x, components)


def e_step(x: Tensor, components: Components) -> tuple[Tensor, Tensor]:
    """Log-density of each row, (N,), and log-responsibilities, (N, K)."""
    joint = log_joint(x, components)
    log_density = torch.logsumexp(joint, dim=1)
    return log_density, joint - log_density[:, None]


def statistics(x: Tensor, components: Components) -> Statistics:
    """Sufficient statistics about the components' means."""
    log_density, log_resp = e_step(x, components)
    resp = log_resp.exp()
    diff = x[:, None, :] - components.means[None, :, :]
    weighted = resp[:, :, None] * diff
    if components.covariance_type == "spherical":
        s2 = (weighted * diff).sum((0, 2))
    elif components.covariance_type == "diag":
        s2 = (weighted * diff).sum(0)
    elif components.covariance_type == "tied":
        s2 = torch.einsum("nkd,nke->de", weighted, diff)
    else:
        s2 = torch.einsum("nkd,nke->kde", weighted, diff)
    return Statistics(log_density.sum(), resp.sum(0), weighted.sum(0), s2)


def m_step(
    x: Tensor, resp: Tensor, covariance_type: str, reg_covar: float, ridge: float = 0.0
) -> Components:
    """Maximum-likelihood components for given responsibilities (N, K), from differences.

    `ridge` is that of full and tied covariances, relative to ``trace / D``.
    """
    counts = resp.sum(0)
    means = (resp.T @ x) / counts[:, None]
    diff = x[:, None, :] - means[None, :, :]
    scatter = torch.einsum("nk,nkd,nke->kde", resp, diff, diff)
    eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    full = scatter / counts[:, None, None]
    if covariance_type in ("full", "tied"):
        moment = full if covariance_type == "full" else scatter.sum(0) / counts.sum()
        mean_variance = torch.einsum("...dd->...", moment)[..., None, None] / x.shape[1]
        covariances = moment + (reg_covar + ridge * mean_variance) * eye
    else:
        covariances = full.diagonal(dim1=-2, dim2=-1) + reg_covar
        if covariance_type == "spherical":
            covariances = covariances.mean(1)
    return Components.from_covariances(covariance_type, counts / counts.sum(), means, covariances)
