"""Factors of full covariances as the distance kernel reads them, and their scatter in float64."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (a tl.constexpr parameter takes plain values, which the type checker cannot know)

import math

import triton
import triton.language as tl

from gmm_ivf.kernels.blocks import split64

LOG_2PI = tl.constexpr(math.log(2 * math.pi))
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _factor_tile(factor, row, column, d, BLOCK_D: tl.constexpr):
    """A block of an upper triangular matrix, zero from row and column d on."""
    rows = row * BLOCK_D + tl.arange(0, BLOCK_D)
    cols = column * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (rows < d)[:, None] & (cols < d)[None, :]
    return tl.load(factor + rows[:, None] * d + cols[None, :], mask=inside, other=0.0)


@triton.jit
def _scale(factor, panels, d, scaled_max, BLOCK_D: tl.constexpr):
    """The power of two that brings the largest entry under `scaled_max`."""
    largest = tl.zeros((BLOCK_D,), tl.float64)
    for column in range(panels):
        for row in range(column + 1):
            tile = tl.abs(_factor_tile(factor, row, column, d, BLOCK_D))
            largest = tl.maximum(largest, tl.max(tile, axis=0))
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(largest, axis=0), 1e-30) / scaled_max)))


@triton.jit
def pack_kernel(
    weights, means, factor,  # (k,), (k, d) and (k, d, d), float64
    packed,  # (P, groups, pairs, BLOCK_D, GROUP * BLOCK_D), written
    shift,  # (groups, panels, GROUP * BLOCK_D), written
    gain, offset,  # (padded,), written
    k, d, panels, part_f, scaled_max, never,
    MODE: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Factor of one component, scaled and rounded, with what belongs to the rounded factor.

    Its determinant is that of the rounded factor: the errors of the diagonal then cancel.
    """
    component = tl.program_id(0).to(tl.int64)
    real = component < k
    d = tl.where(real, d, 0)
    COLS: tl.constexpr = GROUP * BLOCK_D
    group, place = component // GROUP, component % GROUP * BLOCK_D
    factor += component * d * d
    scale = _scale(factor, panels, d, scaled_max, BLOCK_D)
    block = tl.arange(0, BLOCK_D)
    to = packed + group * (panels * (panels + 1) // 2) * BLOCK_D * COLS + place
    to += block[:, None] * COLS + block[None, :]
    log_det = tl.zeros((), tl.float64)
    for column in range(panels):
        moved = tl.zeros((BLOCK_D,), tl.float64)
        for row in range(column + 1):
            tile = _factor_tile(factor, row, column, d, BLOCK_D) / scale
            high, low, kept = split64(tile, MODE)
            tl.store(to, high)
            if MODE == "fp16x3":
                tl.store(to + part_f, low)
            rows = row * BLOCK_D + block
            mean = tl.load(means + component * d + rows, mask=rows < d, other=0.0)
            moved += tl.sum(mean[:, None] * kept, axis=0)
            pivot = (rows[:, None] == (column * BLOCK_D + block)[None, :]) & (rows < d)[:, None]
            log_det += tl.sum(tl.log2(tl.where(pivot, tl.abs(kept) * scale, 1.0)))
            to += BLOCK_D * COLS
        at = (group * panels + column) * COLS + place + block
        tl.store(shift + at, moved.to(tl.float32))
    weight = tl.load(weights + component, mask=real, other=1.0)
    constant = tl.log2(tl.where(weight <= 0, 1.0, weight)) + log_det - 0.5 * LOG_2PI * LOG2E * d
    # Comparisons, since a maximum would make a number of a NaN.
    dead = ~real | (weight <= 0) | (constant < never)
    constant = tl.where(dead, never, constant)
    tl.store(offset + component, constant.to(tl.float32))
    tl.store(gain + component, tl.where(real, scale * scale * LOG2E / 2, 0.0).to(tl.float32))


@triton.jit
def centre_kernel(
    partial,  # (slabs, padded, side, side) lifted sums of r (x - a)(x - b)^T, upper tiles
    count, first,  # (k,) and (k, stride) sums of r and r x, float64
    means, points,  # (k, d) float64 and (k, wide): the reference points
    out,  # (k, d, d) float64: sums about the means, written
    slabs, padded, d, side, stride, wide, lowered,
    ONE_SIDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One upper tile of the scatter of one component about its mean, and its mirror image.

    a is the reference point; b is 0 if ONE_SIDED, else the point as well.
    """
    component = tl.program_id(0).to(tl.int64)
    tiles = side // BLOCK
    i, j = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    if i > j:
        return
    rows, cols = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    at = partial + component * side * side + rows[:, None] * side + cols[None, :]
    # Tiles of the scatter are larger: what lies below their diagonal is there but not needed.
    total = tl.zeros((BLOCK, BLOCK), tl.float64)
    for _ in range(slabs):
        total += tl.load(at).to(tl.float64)
        at += padded.to(tl.int64) * side * side
    s0 = tl.load(count + component)
    left, above = rows < d, cols < d
    mean_a = tl.load(means + component * d + rows, mask=left, other=0.0)
    mean_b = tl.load(means + component * d + cols, mask=above, other=0.0)
    point_a = tl.load(points + component * wide + rows, mask=left, other=0.0).to(tl.float64)
    point_b = tl.load(points + component * wide + cols, mask=above, other=0.0).to(tl.float64)
    sum_a = tl.load(first + component * stride + rows, mask=left, other=0.0) - s0 * point_a
    sum_b = tl.load(first + component * stride + cols, mask=above, other=0.0) - s0 * mean_b
    moved_b = mean_b if ONE_SIDED else mean_b - point_b
    total = total * lowered - sum_a[:, None] * moved_b[None, :]
    total -= (mean_a - point_a)[:, None] * sum_b[None, :]
    out += component * d * d
    inside = left[:, None] & above[None, :]
    upper = inside & (rows[:, None] <= cols[None, :])
    tl.store(out + rows[:, None] * d + cols[None, :], total, mask=upper)
    tl.store(out + cols[None, :] * d + rows[:, None], total, mask=upper)
