"""EM kernels for full covariances: Mahalanobis distances and scatter of one component at a time.

The difference from the mean is taken in float32 before it is rounded for the product, so that
nothing of the size of the data cancels. The rest of a sweep is that of `kernels.chunked`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (a tl.constexpr parameter takes plain values, which the type checker cannot know)

import triton
import triton.language as tl

from gmm_ivf.kernels.blocks import LIFT_BITS, LOWERED, LOWEST, load_tile, product, product3, tile_at


@triton.jit
def _split(value, like, MODE: tl.constexpr):
    """Float32 as a high and, in mode fp16x3, a low part of the type of `like`."""
    if MODE == "tf32":
        high = ((value.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    else:
        high = value.to(like.dtype)
    low = (value - high.to(tl.float32)).to(like.dtype) if MODE == "fp16x3" else high
    return high, low


@triton.jit
def _difference(at, part_x, means, cols, d, MODE: tl.constexpr, EVEN: tl.constexpr):
    """A tile of rows less a mean, float32; and the tile itself."""
    xt = load_tile(at, cols, d, EVEN)
    value = xt.to(tl.float32)
    if MODE == "fp16x3":
        value += load_tile(at + part_x, cols, d, EVEN).to(tl.float32)
    return value - tl.load(means + cols, mask=cols < d, other=0.0)[None, :], xt


@triton.jit(do_not_specialize=["start", "chunk"])
def distance_kernel(
    x,  # (P, rows, stride)
    means,  # (k, wide)
    factor,  # (P, k, side, side) upper triangular
    gain, offset,  # (k,)
    out,  # (k, chunk) logits
    start, chunk, d, stride, wide, side, part_x, part_f,
    MODE: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Logits of one component for a tile of rows."""
    k = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * BLOCK_N
    means += k * wide
    factor += k * side * side
    block = tl.arange(0, BLOCK_D)
    distance = tl.zeros((BLOCK_N,), tl.float32)
    for e0 in range(0, side, BLOCK_D):
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for d0 in range(0, e0 + BLOCK_D, BLOCK_D):
            at = tile_at(x, start + first, d0 + block, stride, BLOCK_N)
            diff, xt = _difference(at, part_x, means, d0 + block, d, MODE, EVEN_D)
            high, low = _split(diff, xt, MODE)
            at_f = factor + (d0 + block)[:, None] * side + (e0 + block)[None, :]
            ft = tl.load(at_f)
            ft_low = tl.load(at_f + part_f) if MODE == "fp16x3" else ft
            acc = product3(high, low, ft, ft_low, acc, MODE)
        distance += tl.sum(acc * acc, axis=1)
    logits = tl.load(offset + k) - tl.load(gain + k) * distance
    tl.store(out + k * chunk + first + tl.arange(0, BLOCK_N), logits)


@triton.jit(do_not_specialize=["start", "chunk"])
def share_kernel(
    logits,  # (k, chunk)
    norm,  # (rows,)
    resp,  # (chunk, padded)
    start, chunk, k, padded,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Responsibilities times 2**LIFT, transposed."""
    first = tl.program_id(1).to(tl.int64) * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    ks = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    at = logits + ks[:, None].to(tl.int64) * chunk + rows[None, :]
    tile = tl.load(at, mask=(ks < k)[:, None], other=LOWEST)
    z = tl.load(norm + start + rows) - LIFT_BITS
    powers = tl.trans(tl.exp2(tile - z[None, :])).to(resp.dtype.element_ty)
    tl.store(tile_at(resp, first, ks, padded, BLOCK_N), powers, mask=(ks < k)[None, :])


@triton.jit(do_not_specialize=["start", "slab", "chunk"])
def scatter_kernel(
    x,  # (P, rows, stride)
    means,  # (k, wide)
    resp,  # (chunk, padded)
    out,  # (S, k, side, side) sums of r (x - mean)(x - mean)^T, upper tiles, added to
    start, chunk, slab, k, padded, d, stride, wide, side, part_x,
    MODE: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One upper tile of the scatter of one component over one slab of a chunk."""
    component = tl.program_id(0).to(tl.int64)
    tiles = side // BLOCK_D
    i, j = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    if i > j:
        return
    means += component * wide
    left, right = i * BLOCK_D + tl.arange(0, BLOCK_D), j * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.program_id(2).to(tl.int64) * slab
    at_left = tile_at(x, start + begin, left, stride, BLOCK_N)
    at_right = tile_at(x, start + begin, right, stride, BLOCK_N)
    at_resp = resp + (begin + tl.arange(0, BLOCK_N)).to(tl.int64) * padded + component
    acc = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    for _ in range(0, tl.minimum(slab, chunk - begin), BLOCK_N):
        r = tl.load(at_resp).to(tl.float32) * LOWERED
        diff, xt = _difference(at_left, part_x, means, left, d, MODE, EVEN_D)
        weighted, weighted_low = _split(diff * r[:, None], xt, MODE)
        other, _xt = _difference(at_right, part_x, means, right, d, MODE, EVEN_D)
        high, low = _split(other, xt, MODE)
        if MODE == "fp16x3":
            acc = product(tl.trans(weighted), low, acc, MODE)
            acc = product(tl.trans(weighted_low), high, acc, MODE)
        acc = product(tl.trans(weighted), high, acc, MODE)
        at_left += BLOCK_N * stride
        at_right += BLOCK_N * stride
        at_resp += BLOCK_N * padded
    to = (tl.program_id(2).to(tl.int64) * k + component) * side * side
    to = out + to + left[:, None] * side + right[None, :]
    tl.store(to, tl.load(to) + acc)
