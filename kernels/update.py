"""The M-step and the preparation of the next E-step in one launch, for spherical and diag.

A program takes a few components from their sums to their constants, all in float64. What it
computes is `components.m_step` of `launch.about_means`, then `operands.prepare`: those are the
definition, which the tests hold it to, and the path of tied and full covariances.
"""

# pyright: reportArgumentType=false
# (a tl.constexpr parameter takes plain values, which the type checker cannot know)

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gmm_ivf.kernels import components, operands
from gmm_ivf.kernels.blocks import split64
from gmm_ivf.kernels.launch import Sums
from gmm_ivf.kernels.operands import Prepared

UPDATED_TYPES = ("spherical", "diag")
COUNT_BLOCK = 1024

LOG2E = tl.constexpr(operands.LOG2E)
LOG_2PI = tl.constexpr(math.log(2 * math.pi))
NEVER = tl.constexpr(operands.NEVER)
SCALED_MAX = tl.constexpr(operands.SCALED_MAX)
COUNT_FLOOR = tl.constexpr(components.COUNT_FLOOR)


@triton.jit
def _spherical(mean, factor, MODE: tl.constexpr):
    """`operands._spherical`: linear part, gain, and the offset less the log constants."""
    high, low, rounded = split64(mean, MODE)
    gain = (factor * factor * LOG2E).to(tl.float32).to(tl.float64)
    return high, low, gain, -gain * tl.sum(rounded * rounded, axis=1) / 2


@triton.jit
def _diag(mean, factor, inside, MODE: tl.constexpr):
    """`operands._diag`: linear and quadratic parts, gain, and the offset less the log constants."""
    quadratic = tl.where(inside, factor * factor * LOG2E / 2, 0.0)
    largest = tl.max(tl.maximum(quadratic, quadratic * tl.abs(mean) * 2), axis=1)
    exponent = tl.ceil(tl.log2(tl.maximum(largest, 1e-30) / SCALED_MAX))
    gain = tl.exp2(exponent)
    scale = gain[:, None]
    quad, quad_low, rounded = split64(-quadratic / scale, MODE)
    kept = inside & (rounded < 0)
    rounded *= -scale
    high, low, slope = split64(2 * rounded * mean / scale, MODE)
    slope *= scale
    peak = tl.where(kept, slope * slope / tl.where(kept, rounded, 1.0) / 4, 0.0)
    ratio = tl.log2(tl.where(kept, rounded / tl.where(inside, quadratic, 1.0), 1.0)) / 2
    return high, low, quad, quad_low, gain, tl.sum(ratio - peak, axis=1)


@triton.jit
def _new_moments(
    count, first, second, means, reg, ks, cols, k, d, stride,
    COV: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`components.m_step` of `launch.about_means`: counts, means, covariances."""
    real, inside = ks < k, (ks < k)[:, None] & (cols < d)[None, :]
    place = ks[:, None].to(tl.int64)
    s0 = tl.load(count + ks, mask=real, other=0.0)
    old = tl.load(means + place * d + cols[None, :], mask=inside, other=0.0)
    s1 = tl.load(first + place * stride + cols[None, :], mask=inside, other=0.0)
    s1 -= s0[:, None] * old
    moved = old * (2 * s1 + s0[:, None] * old)
    counts = s0 + COUNT_FLOOR
    delta = s1 / counts[:, None]
    # Comparisons, since a maximum would make zero of a NaN, which is to be found and reported.
    if COV == "spherical":
        s2 = tl.load(second + ks, mask=real, other=0.0) - tl.sum(moved, axis=1)
        moment = s2 / counts - tl.sum(delta * delta, axis=1)
        covariance = tl.where(real, tl.where(moment < 0, 0.0, moment) / d + reg, 1.0)
    else:
        s2 = tl.load(second + place * stride + cols[None, :], mask=inside, other=0.0) - moved
        moment = s2 / counts[:, None] - delta * delta
        covariance = tl.where(inside, tl.where(moment < 0, 0.0, moment) + reg, 1.0)
    return counts, old + delta, covariance


@triton.jit
def _total_count(count, k, BLOCK: tl.constexpr):
    """Sum of the counts of all components, each with its floor."""
    acc = tl.zeros((BLOCK,), tl.float64)
    for k0 in range(0, k, BLOCK):
        ks = k0 + tl.arange(0, BLOCK)
        s0 = tl.load(count + ks, mask=ks < k, other=0.0)
        acc += tl.where(ks < k, s0 + COUNT_FLOOR, 0.0)
    return tl.sum(acc, axis=0)


@triton.jit
def update_kernel(
    count, first, second,  # float64 (k,), (k, stride) and (k,) or (k, stride): sums about 0
    reg_covar,  # (1,) float64
    weights, means, covariances, factors,  # float64, written; the means are read too
    linear, quadratic,  # (P, padded, wide), written
    gain, offset,  # (padded,), written
    k, d, stride, padded, wide,
    COV: tl.constexpr, MODE: tl.constexpr, FROZEN: tl.constexpr,
    COUNT_BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """New parameters of a few components and their staged form, padding included.

    If FROZEN only the means are new.
    """
    ks = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    cols = tl.arange(0, BLOCK_D)
    real, inside = ks < k, (ks < k)[:, None] & (cols < d)[None, :]
    place = ks[:, None].to(tl.int64)
    counts, mean, covariance = _new_moments(
        count, first, second, means, tl.load(reg_covar), ks, cols, k, d, stride, COV, BLOCK_K
    )
    if FROZEN:
        weight = tl.load(weights + ks, mask=real, other=1.0)
        if COV == "spherical":
            covariance = tl.load(covariances + ks, mask=real, other=1.0)
        else:
            at_old = covariances + place * d + cols[None, :]
            covariance = tl.load(at_old, mask=inside, other=1.0)
    else:
        weight = counts / _total_count(count, k, COUNT_BLOCK)
        tl.store(weights + ks, weight, mask=real)
    factor = 1 / tl.sqrt(covariance)
    tl.store(means + place * d + cols[None, :], mean, mask=inside)
    if COV == "spherical":
        tl.store(covariances + ks, covariance, mask=real)
        tl.store(factors + ks, factor, mask=real)
        log_peak = (tl.log(factor) - LOG_2PI / 2) * d
        high, low, scale, radius = _spherical(mean, factor, MODE)
    else:
        tl.store(covariances + place * d + cols[None, :], covariance, mask=inside)
        tl.store(factors + place * d + cols[None, :], factor, mask=inside)
        log_peak = tl.sum(tl.where(inside, tl.log(factor) - LOG_2PI / 2, 0.0), axis=1)
        high, low, quad, quad_low, scale, radius = _diag(mean, factor, inside, MODE)
    bits = (tl.log(weight) + log_peak) * LOG2E + radius
    bits = tl.where((bits < NEVER) | (ks >= k), NEVER, bits)
    written = (ks < padded)[:, None] & (cols < wide)[None, :]
    at, part = place * wide + cols[None, :], padded * wide
    tl.store(linear + at, high, mask=written)
    if COV == "diag":
        tl.store(quadratic + at, quad, mask=written)
    if MODE == "fp16x3":
        tl.store(linear + part + at, tl.where(inside, low, 0.0).to(low.dtype), mask=written)
        if COV == "diag":
            tl.store(quadratic + part + at, quad_low, mask=written)
    tl.store(gain + ks, tl.where(real, scale, 0.0).to(tl.float32), mask=ks < padded)
    tl.store(offset + ks, bits.to(tl.float32), mask=ks < padded)


def update(prepared: Prepared, sums: Sums, reg_covar: Tensor, *, frozen: bool = False) -> None:
    """Overwrite components and their staged form with those of the next iteration.

    Parameters
    ----------
    prepared : Prepared
        Those the sums were computed with; covariances spherical or diag.
    sums : Sums
        About the origin.
    reg_covar : Tensor of shape (1,), float64
        Added to each variance.
    frozen : bool, default=False
        Leave weights and covariances as they are.
    """
    c = prepared.components
    k, d = c.means.shape
    padded, wide = prepared.linear.shape[1:]
    block_k, shape = operands.block_shape(wide)
    flags: dict[str, Any] = {
        "COV": c.covariance_type, "MODE": prepared.mode, "FROZEN": frozen,
        "COUNT_BLOCK": COUNT_BLOCK, **shape,
    }  # fmt: skip
    update_kernel[(-(-padded // block_k),)](
        sums.count.contiguous(), sums.first, sums.second, reg_covar,
        c.weights, c.means, c.covariances, c.precisions_cholesky,
        prepared.linear, prepared.quadratic, prepared.gain, prepared.offset,
        k, d, sums.first.stride(0), padded, wide, **flags,
    )  # fmt: skip
