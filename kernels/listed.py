"""EM kernels over listed blocks of components: which tiles of samples need which blocks.

A tile of rows runs over the blocks of its list, a block of components over the tiles of its list.
Lists have room for all entries, and their lengths are read on the device: no launch depends on
them, and nothing waits for the host.
"""

# pyright: reportArgumentType=false
# (a tl.constexpr parameter takes plain values, which the type checker cannot know)

import triton
import triton.language as tl

from gmm_ivf.kernels.blocks import (
    LIFT_BITS,
    LOWEST,
    product,
    product2,
    row_logits,
    squares,
    staged_tile,
)


@triton.jit
def _norm_over(
    x, x_low, half_norm, b, q, part_b, gain, offset, members, number, best,
    COV: tl.constexpr, MODE: tl.constexpr, LISTED: tl.constexpr, FIND: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Log-normaliser of each row over `number` blocks, listed or the first ones, and its argmax."""
    top = tl.full((BLOCK_N,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for i in range(0, number):
        block = tl.load(members + i) if LISTED else i
        logits = row_logits(
            x, x_low, half_norm, b, q, part_b, gain, offset, block * BLOCK_K,
            COV, MODE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if FIND:
            here, at = tl.max(logits, axis=1, return_indices=True)
            best = tl.where(here > top, block * BLOCK_K + at, best)
        else:
            here = tl.max(logits, axis=1)
        new_top = tl.maximum(top, here)
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(logits - new_top[:, None]), axis=1)
        top = new_top
    return top + tl.log2(total), best


@triton.jit
def _weigh(
    x, x_low, half_norm, b, q, part_b, gain, offset, shift, inside, blocks, mass,
    COV: tl.constexpr, MODE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum of the powers of 2 of the logits less `shift`: returned by row, stored by block."""
    total = tl.zeros((BLOCK_N,), tl.float32)
    for block in range(0, blocks):
        logits = row_logits(
            x, x_low, half_norm, b, q, part_b, gain, offset, block * BLOCK_K,
            COV, MODE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        part = tl.sum(tl.exp2(logits - shift[:, None]), axis=1)
        total += part
        tl.store(mass + block, tl.sum(tl.where(inside, part, 0.0), axis=0))
    return total


@triton.jit(do_not_specialize=["n"])
def norm_kernel(
    x,  # tiles of (BLOCK_N, all features)
    half_norm,  # (rows,)
    b, q,  # tiles of (BLOCK_K, all features)
    gain, offset,  # (k,)
    tiles,  # (programs,) which tile each program does
    members, counts,  # (all tiles, blocks) and (all tiles,), with LISTED
    out,  # (rows,) base-2 log-normalisers
    best,  # (rows,) the likeliest component, with FIND
    n, blocks, part_x, part_b,
    COV: tl.constexpr, MODE: tl.constexpr, LISTED: tl.constexpr, FIND: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Log-normalisers of the rows of some tiles, over all blocks or those that a tile lists."""
    tile = tl.load(tiles + tl.program_id(0)).to(tl.int64)
    first = (tile * BLOCK_N).to(tl.int32)
    rows = first + tl.arange(0, BLOCK_N)
    xt, x_low = staged_tile(x, first, 0, part_x, MODE)
    half = tl.load(half_norm + rows) if COV == "spherical" else 0.0
    number = tl.load(counts + tile) if LISTED else blocks
    norm, found = _norm_over(
        xt, x_low, half, b, q, part_b, gain, offset, members + tile * blocks, number,
        tl.zeros((BLOCK_N,), tl.int32), COV, MODE, LISTED, FIND, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    tl.store(out + rows, norm, mask=rows < n)
    if FIND:
        tl.store(best + rows, found, mask=rows < n)


@triton.jit(do_not_specialize=["n"])
def weigh_kernel(
    x,  # tiles of (BLOCK_N, all features)
    half_norm,  # (rows,)
    b, q,  # tiles of (BLOCK_K, all features)
    gain, offset,  # (k,)
    shift,  # (rows,) a guess of the result
    out,  # (rows,) base-2 log-normalisers
    mass,  # (tiles, blocks) responsibilities of the rows of a tile, as the guess has them
    n, blocks, part_x, part_b,
    COV: tl.constexpr, MODE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Log-normaliser of each row over all blocks, and the mass of each block in each tile.

    With a guess that is off by so much that sums leave the middle of float32's range, the tile is
    done again with its true log-normalisers for a guess.
    """
    tile = tl.program_id(0).to(tl.int64)
    first = (tile * BLOCK_N).to(tl.int32)
    rows = first + tl.arange(0, BLOCK_N)
    inside = rows < n
    xt, x_low = staged_tile(x, first, 0, part_x, MODE)
    half = tl.load(half_norm + rows) if COV == "spherical" else 0.0
    guess = tl.load(shift + rows)
    total = _weigh(
        xt, x_low, half, b, q, part_b, gain, offset, guess, inside, blocks,
        mass + tile * blocks, COV, MODE, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    sound = ((total > 1e-20) & (total < 1e30)) | ~inside
    if tl.min(sound.to(tl.int32), axis=0) == 0:
        guess, _ = _norm_over(
            xt, x_low, half, b, q, part_b, gain, offset, gain, blocks, 0,
            COV, MODE, False, False, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        total = _weigh(
            xt, x_low, half, b, q, part_b, gain, offset, guess, inside, blocks,
            mass + tile * blocks, COV, MODE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    tl.store(out + rows, guess + tl.log2(tl.where(inside, total, 1.0)), mask=inside)


@triton.jit
def _added(total, resp, resp_low, x, x_low, SPLIT: tl.constexpr, MODE: tl.constexpr):
    """``total + resp @ x / 2``, added by ordinary instructions.

    Tensor cores truncate their sums: over a long list they would lose a thousandth of the first
    moments, and nothing of the counts. The factor keeps the compiler from merging the two.
    """
    part = tl.zeros(total.shape, tl.float32)
    if MODE == "fp16x3":
        part = product(resp_low, x, part, MODE)
    return total + product2(resp, x, x_low, part, MODE, SPLIT) * 0.5


@triton.jit
def listed_moment_kernel(
    x,  # tiles of (BLOCK_N, all features)
    half_norm,  # (rows,)
    b, q,  # tiles of (BLOCK_K, all features)
    gain, offset,  # (k,)
    norm,  # (rows,)
    members, counts,  # (blocks, room) and (blocks,): the tiles of a block
    s0, s1, s2,  # (S, k), (S, k, BLOCK_D), S x (k,) or (k, BLOCK_D): sums of r, r x and r x^2
    room, k, part_x, part_b,
    COV: tl.constexpr, MODE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Moments of one block of components over one slab of the tiles of its list."""
    block, slab = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    ks = block * BLOCK_K + tl.arange(0, BLOCK_K)
    cols = tl.arange(0, BLOCK_D)
    count = tl.zeros((BLOCK_K,), tl.float32)
    radius = tl.zeros((BLOCK_K,), tl.float32)
    first = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    second = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    number = tl.load(counts + block)
    length = tl.cdiv(number, tl.num_programs(1))
    for i in range(slab * length, tl.minimum((slab + 1) * length, number)):
        first_row = tl.load(members + block * room + i) * BLOCK_N
        rows = first_row + tl.arange(0, BLOCK_N)
        xt, x_low = staged_tile(x, first_row, 0, part_x, MODE)
        half = tl.load(half_norm + rows)
        logits = row_logits(
            xt, x_low, half, b, q, part_b, gain, offset, tl.program_id(0) * BLOCK_K,
            COV, MODE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        exact = tl.exp2(logits - (tl.load(norm + rows) - LIFT_BITS)[:, None])
        resp = exact.to(xt.dtype)
        # Counted as they enter the other sums, so that means and variances keep no bias.
        counted = exact if MODE == "fp16x3" else resp.to(tl.float32)
        count += tl.sum(counted, axis=0)
        if COV == "spherical":
            radius += tl.sum(counted * half[:, None], axis=0)
        resp_low = tl.trans((exact - resp.to(tl.float32)).to(xt.dtype))
        resp = tl.trans(resp)
        first = _added(first, resp, resp_low, xt, x_low, MODE == "fp16x3", MODE)
        if COV == "diag":
            sq, sq_low = squares(xt, x_low, MODE)
            split: tl.constexpr = MODE == "fp16x3" or MODE == "tf32"
            second = _added(second, resp, resp_low, sq, sq_low, split, MODE)
    at_out = slab * k + ks
    wide = at_out[:, None] * BLOCK_D + cols[None, :]
    tl.store(s0 + at_out, count)
    tl.store(s1 + wide, first * 2.0)
    if COV == "spherical":
        tl.store(s2 + at_out, radius * 2.0)
    if COV == "diag":
        tl.store(s2 + wide, second * 2.0)
