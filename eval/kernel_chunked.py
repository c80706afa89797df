"""EM as one writes it in torch: logits and responsibilities of a chunk of rows in memory.

A rival, not a backend. Operands are in the dtype of the samples, and so are products; exp,
log-sum-exp and responsibilities are float32, sums over chunks and K-sized work float64.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gmm_ivf.kernels.components import Components, Statistics

# Elements of the logits of a chunk.
_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
# Elements of the whitened samples of a block of components, full covariances.
_BLOCK_ELEMENTS = 1 << 24


class _Coefficients(NamedTuple):
    """Logits are ``y linear + s quadratic + constant``, s the squares of y or their sum."""

    whiten: Tensor | None
    linear: Tensor
    quadratic: Tensor
    constant: Tensor


def e_step(x: Tensor, components: Components, total: Tensor | None = None) -> Statistics:
    """Statistics of all samples about the means.

    Parameters
    ----------
    x : Tensor of shape (N, D)
    components : Components
    total : Tensor of shape (D, D), optional
        `scatter` of the samples; tied covariances need it.
    """
    full = components.covariance_type == "full"
    coefficients = None if full else _coefficients(components, x.dtype)
    log_likelihood = components.means.new_zeros(())
    sums: tuple[Tensor, ...] | None = None
    for chunk in _chunks(x, components):
        logits = _logits(chunk, components, coefficients)
        norm = torch.logsumexp(logits, dim=1)
        log_likelihood += norm.double().sum()
        resp = logits.sub_(norm[:, None]).exp_()
        part = _moments_full(chunk, resp, components) if full else _moments(chunk, resp, components)
        sums = part if sums is None else tuple(a + b for a, b in zip(sums, part, strict=True))
    assert sums is not None, "no samples"
    return _about_means(log_likelihood, sums, components, total)


def log_density(x: Tensor, components: Components) -> Tensor:
    """Log-density of each row, float32 (N,)."""
    full = components.covariance_type == "full"
    coefficients = None if full else _coefficients(components, x.dtype)
    chunks = _chunks(x, components)
    return torch.cat([torch.logsumexp(_logits(c, components, coefficients), 1) for c in chunks])


def scatter(x: Tensor) -> Tensor:
    """``sum_n x_n x_n^T`` in float64."""
    parts = [chunk.double().T @ chunk.double() for chunk in x.split(1 << 18)]
    return torch.stack(parts).sum(0)


def _chunks(x: Tensor, components: Components) -> tuple[Tensor, ...]:
    elements = _CHUNK_ELEMENTS.get(x.device.type, _CHUNK_ELEMENTS["cuda"])
    return x.split(max(64, elements // len(components.means)))


def _coefficients(c: Components, dtype: torch.dtype) -> _Coefficients:
    means, factor = c.means, c.precisions_cholesky
    tied = c.covariance_type == "tied"
    whiten = factor if tied else None
    if tied:
        means = means @ factor
    precision = torch.ones_like(means[:, :1]) if tied else factor.square().reshape(len(means), -1)
    constant = c.log_constants() - 0.5 * (precision * means.square()).sum(1)
    quadratic = -0.5 * precision.T
    diag = c.covariance_type == "diag"
    return _Coefficients(
        None if whiten is None else whiten.to(dtype),
        (precision * means).T.to(dtype),
        quadratic.to(dtype) if diag else quadratic.float(),
        constant.float(),
    )


def _logits(x: Tensor, c: Components, coefficients: _Coefficients | None) -> Tensor:
    """Log of weight times density, float32 (n, K)."""
    if coefficients is None:
        return _logits_full(x, c)
    y = x if coefficients.whiten is None else x @ coefficients.whiten
    logits = (y @ coefficients.linear).float().add_(coefficients.constant)
    if c.covariance_type == "diag":
        return logits.add_((y.square() @ coefficients.quadratic).float())
    norms = y.float().square().sum(1, keepdim=True)
    return logits.addcmul_(norms, coefficients.quadratic)


def _logits_full(x: Tensor, c: Components) -> Tensor:
    means, factors = c.means.to(x.dtype), c.precisions_cholesky.to(x.dtype)
    constants = c.log_constants().float()
    logits = torch.empty(len(x), len(means), dtype=torch.float32, device=x.device)
    for block in _blocks(x, c):
        white = (x - means[block, None]) @ factors[block]
        logits[:, block] = constants[block] - 0.5 * white.float().square().sum(-1).T
    return logits


def _blocks(x: Tensor, c: Components) -> Iterator[slice]:
    k = len(c.means)
    step = max(1, _BLOCK_ELEMENTS // x.numel())
    return (slice(start, min(start + step, k)) for start in range(0, k, step))


def _moments(x: Tensor, resp: Tensor, c: Components) -> tuple[Tensor, ...]:
    """Counts, first and second moments about the origin, float64."""
    s0 = resp.sum(0).double()
    weights = resp.to(x.dtype).T
    s1 = (weights @ x).double()
    if c.covariance_type == "diag":
        return s0, s1, (weights @ x.square()).double()
    if c.covariance_type == "spherical":
        return s0, s1, (resp.T @ x.float().square().sum(1)).double()
    return s0, s1


def _moments_full(x: Tensor, resp: Tensor, c: Components) -> tuple[Tensor, ...]:
    """The same about the means."""
    means = c.means.to(x.dtype)
    k, d = means.shape
    s1, s2 = c.means.new_empty(k, d), c.means.new_empty(k, d, d)
    for block in _blocks(x, c):
        diff = x - means[block, None]
        weighted = resp[:, block].T[:, :, None].to(x.dtype) * diff
        s1[block] = weighted.sum(1).double()
        s2[block] = (weighted.mT @ diff).double()
    return resp.sum(0).double(), s1, s2


def _about_means(
    log_likelihood: Tensor, sums: tuple[Tensor, ...], c: Components, total: Tensor | None
) -> Statistics:
    if c.covariance_type == "full":
        return Statistics(log_likelihood, *sums)
    means, s0, raw1 = c.means, sums[0], sums[1]
    s1 = raw1 - s0[:, None] * means
    if c.covariance_type == "tied":
        assert total is not None, "tied covariances need the scatter of the samples"
        cross = means.T @ raw1
        s2 = total - cross - cross.T + means.T @ (s0[:, None] * means)
        return Statistics(log_likelihood, s0, s1, s2)
    moved = s0[:, None] * means.square() - 2 * means * raw1
    s2 = sums[2] + (moved if c.covariance_type == "diag" else moved.sum(1))
    return Statistics(log_likelihood, s0, s1, s2)
