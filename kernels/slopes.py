"""Tied covariances as the EM kernels read them: the slopes of the logits, and the offsets."""

# pyright: reportArgumentType=false
# (a tl.constexpr parameter takes plain values, which the type checker cannot know)

import math

import triton
import triton.language as tl

from gmm_ivf.kernels.blocks import split64

LOG_2PI = tl.constexpr(math.log(2 * math.pi))
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def slope_kernel(
    slope,  # (k, d) float64: means times the precision
    linear,  # (P, padded, wide), written
    gain,  # (padded,), written
    rounded,  # (k, d) float64, written: what the other two represent
    k, d, padded, wide, scaled_max,
    MODE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Slopes in base 2, scaled by a power of two so that the largest is under `scaled_max`."""
    ks = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    cols = tl.arange(0, BLOCK_D)
    place = ks[:, None].to(tl.int64)
    inside = (ks < k)[:, None] & (cols < d)[None, :]
    exact = tl.load(slope + place * d + cols[None, :], mask=inside, other=0.0) * LOG2E
    largest = tl.maximum(tl.max(tl.abs(exact), axis=1), 1e-30)
    scale = tl.exp2(tl.ceil(tl.log2(largest / scaled_max)))
    high, low, kept = split64(exact / scale[:, None], MODE)
    written = (ks < padded)[:, None] & (cols < wide)[None, :]
    to = linear + place * wide + cols[None, :]
    tl.store(to, high, mask=written)
    if MODE == "fp16x3":
        tl.store(to + padded * wide, low, mask=written)
    tl.store(rounded + place * d + cols[None, :], kept * scale[:, None], mask=inside)
    tl.store(gain + ks, tl.where(ks < k, scale, 0.0).to(tl.float32), mask=ks < padded)


@triton.jit
def offset_kernel(
    weights,  # (k,) float64
    factor,  # (d, d) float64 upper triangular
    white,  # (d, k) float64 with any strides: the rounded slopes, whitened
    offset,  # (padded,), written
    k, d, padded, row, column, never,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Log-density of each component at the origin with its log-weight, in base 2."""
    ks = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    cols = tl.arange(0, BLOCK_D)
    at = white + ks[:, None].to(tl.int64) * column + cols[None, :].to(tl.int64) * row
    inside = (ks < k)[:, None] & (cols < d)[None, :]
    values = tl.load(at, mask=inside, other=0.0)
    pivots = tl.load(factor + cols.to(tl.int64) * (d + 1), mask=cols < d, other=1.0)
    log_peak = tl.sum(tl.where(cols < d, tl.log(pivots) - LOG_2PI / 2, 0.0), axis=0)
    weight = tl.load(weights + ks, mask=ks < k, other=1.0)
    constant = (tl.log(tl.where(weight <= 0, 1.0, weight)) + log_peak) * LOG2E
    constant -= tl.sum(values * values, axis=1) / (2 * LOG2E)
    # Comparisons, since a maximum would make a number of a NaN.
    dead = (ks >= k) | (weight <= 0) | (constant < never)
    tl.store(offset + ks, tl.where(dead, never, constant).to(tl.float32), mask=ks < padded)
