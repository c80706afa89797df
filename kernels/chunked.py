"""EM kernels for any number of features: a chunk of rows goes through scratch memory.

Above 256 features, where sums of a component do not fit into registers, computing the logits twice
costs more than writing them once. A chunk is a few thousand rows, whatever N is, and is worked off
by three launches: powers of the logits relative to the maximum of their tile, in the storage type;
their scaling to responsibilities; moments.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
# (a tl.constexpr parameter takes plain values, which the type checker cannot know)

import triton
import triton.language as tl

from gmm_ivf.kernels.blocks import (
    LIFTED,
    LN2,
    LOWEST,
    product,
    product2,
    product3,
    squares,
    staged_tile,
    tile_at,
)


@triton.jit(do_not_specialize=["start"])
def logit_kernel(
    x,  # tiles of (BLOCK_N, BLOCK_D), without the tails of the rows
    half_norm,  # (rows,)
    b, q,  # tiles of (BLOCK_K, BLOCK_D)
    gain, offset,  # (k,)
    out,  # (chunk, k) logits, or their powers relative to `top`
    top, total,  # (tiles, chunk) largest logit of a row in a tile, and the sum of the powers
    start, chunk, k, d, part_x, part_b,
    COV: tl.constexpr, MODE: tl.constexpr, OUTPUT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of a chunk that begins at row `start`; OUTPUT is "logits", "powers" or "sums"."""
    first = tl.program_id(1).to(tl.int64) * BLOCK_N
    row = start + tl.program_id(1) * BLOCK_N
    k0 = tl.program_id(0) * BLOCK_K
    ks = k0 + tl.arange(0, BLOCK_K)
    g, c = tl.load(gain + ks), tl.load(offset + ks)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for d0 in range(0, d, BLOCK_D):
        xt, x_low = staged_tile(x, row, d0, part_x, MODE)
        bt, bt_low = staged_tile(b, k0, d0, part_b, MODE)
        acc = product3(xt, x_low, tl.trans(bt), tl.trans(bt_low), acc, MODE)
        if COV == "diag":
            sq, sq_low = squares(xt, x_low, MODE)
            qt, qt_low = staged_tile(q, k0, d0, part_b, MODE)
            acc = product3(sq, sq_low, tl.trans(qt), tl.trans(qt_low), acc, MODE)
    if COV == "spherical":
        acc -= tl.load(half_norm + row + tl.arange(0, BLOCK_N))[:, None]
    logits = acc * g[None, :] + c[None, :]
    if OUTPUT == "logits":
        tl.store(tile_at(out, first, ks, k, BLOCK_N), logits)
    else:
        largest = tl.max(logits, axis=1)
        powers = tl.exp2(logits - largest[:, None])
        at_row = tl.program_id(0).to(tl.int64) * chunk + first + tl.arange(0, BLOCK_N)
        tl.store(top + at_row, largest)
        tl.store(total + at_row, tl.sum(powers, axis=1))
        if OUTPUT == "powers":
            lifted = (powers * LIFTED).to(out.dtype.element_ty)
            tl.store(tile_at(out, first, ks, k, BLOCK_N), lifted)


@triton.jit(do_not_specialize=["start", "n"])
def normalise_kernel(
    top, total,  # (tiles, chunk)
    norm,  # (rows,) written
    start, n, chunk, tiles,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Log-normalisers of a chunk from the sums of its tiles."""
    local = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.arange(0, BLOCK_T)
    inside = (local < chunk)[None, :]
    largest = tl.full((BLOCK_N,), LOWEST, tl.float32)
    summed = tl.zeros((BLOCK_N,), tl.float32)
    for t0 in range(0, tiles, BLOCK_T):
        mask = inside & (t0 + part < tiles)[:, None]
        at = (t0 + part)[:, None].to(tl.int64) * chunk + local[None, :]
        tops = tl.load(top + at, mask=mask, other=LOWEST)
        sums = tl.load(total + at, mask=mask, other=0.0)
        new = tl.maximum(largest, tl.max(tops, axis=0))
        summed *= tl.exp2(largest - new)
        summed += tl.sum(sums * tl.exp2(tops - new[None, :]), axis=0)
        largest = new
    rows = start + local
    tl.store(norm + rows, largest + tl.log2(summed), mask=(rows < n) & (local < chunk))


@triton.jit(do_not_specialize=["start"])
def scale_kernel(
    powers,  # (chunk, k) in; responsibilities out
    top,  # (tiles, chunk)
    norm,  # (rows,)
    start, chunk, k,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Responsibilities of a chunk in place, times 2**LIFT; BLOCK_K is that of the logits."""
    first = tl.program_id(1).to(tl.int64) * BLOCK_N
    rows = tl.arange(0, BLOCK_N)
    ks = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    largest = tl.load(top + tl.program_id(0).to(tl.int64) * chunk + first + rows)
    scale = tl.exp2(largest - tl.load(norm + start + first + rows))
    at = tile_at(powers, first, ks, k, BLOCK_N)
    tl.store(at, (tl.load(at).to(tl.float32) * scale[:, None]).to(powers.dtype.element_ty))


@triton.jit(do_not_specialize=["start", "slab", "chunk"])
def sum_kernel(
    x,  # tiles of (BLOCK_N, BLOCK_D), with the tails of the rows
    resp,  # tiles of (BLOCK_N, BLOCK_K), or the other way round if TURNED; float32 in mode fp16x3
    s1, s2,  # (S, k, wide) sums of r x and of r x^2, added to
    start, chunk, slab, k, wide, part_x,
    COV: tl.constexpr, MODE: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Moments of a block of components and columns, tail included, over one slab of a chunk."""
    k0, d0 = tl.program_id(0) * BLOCK_K, tl.program_id(1) * BLOCK_D
    ks, cols = k0 + tl.arange(0, BLOCK_K), d0 + tl.arange(0, BLOCK_D)
    begin = tl.program_id(2) * slab
    first = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    second = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    for row in range(begin, tl.minimum(begin + slab, chunk), BLOCK_N):
        xt, x_low = staged_tile(x, start + row, d0, part_x, MODE)
        exact = resp.load([k0, row]) if TURNED else tl.trans(resp.load([row, k0]))
        rt = exact.to(xt.dtype)
        if MODE == "fp16x3":
            rt_low = (exact - rt.to(tl.float32)).to(xt.dtype)
            first = product(rt_low, xt, first, MODE)
        first = product2(rt, xt, x_low, first, MODE, MODE == "fp16x3")
        if COV == "diag":
            sq, sq_low = squares(xt, x_low, MODE)
            if MODE == "fp16x3":
                second = product(rt_low, sq, second, MODE)
            second = product2(rt, sq, sq_low, second, MODE, MODE == "fp16x3" or MODE == "tf32")
    to = (tl.program_id(2).to(tl.int64) * k + ks)[:, None] * wide + cols[None, :]
    tl.store(s1 + to, tl.load(s1 + to) + first)
    if COV == "diag":
        tl.store(s2 + to, tl.load(s2 + to) + second)


@triton.jit(do_not_specialize=["start", "n"])
def top_kernel(
    logits,  # (chunk, k)
    norm,  # (rows,) written
    ids, log_resp,  # (n, m)
    start, n, k, n_components, m,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Log-normaliser and the m largest logits of each row, best first, ties by the lower index."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    rows = start + first + tl.arange(0, BLOCK_N)
    z = _row_sum(tile_at(logits, first, tl.arange(0, BLOCK_K), k, BLOCK_N), k, BLOCK_N, BLOCK_K)
    tl.store(norm + rows, z, mask=rows < n)
    last = tl.full((BLOCK_N,), float("inf"), tl.float32)
    last_id = tl.full((BLOCK_N,), -1, tl.int32)
    for j in range(m):
        best = tl.full((BLOCK_N,), LOWEST, tl.float32)
        best_id = tl.full((BLOCK_N,), -1, tl.int32)
        for k0 in range(0, k, BLOCK_K):
            ks = k0 + tl.arange(0, BLOCK_K)
            tile = tl.load(tile_at(logits, first, ks, k, BLOCK_N))
            later = (tile == last[:, None]) & (ks[None, :] > last_id[:, None])
            free = ((tile < last[:, None]) | later) & (ks < n_components)[None, :]
            tile = tl.where(free, tile, LOWEST)
            largest = tl.max(tile, axis=1)
            found = tl.min(tl.where(tile == largest[:, None], ks[None, :], k), axis=1)
            best_id = tl.where(largest > best, found, best_id)
            best = tl.maximum(largest, best)
        at = rows * m + j
        tl.store(ids + at, best_id.to(tl.int64), mask=rows < n)
        tl.store(log_resp + at, (best - z) * LN2, mask=rows < n)
        last = best
        last_id = best_id


@triton.jit
def _row_sum(at, k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Base-2 log of the sum of the powers of 2 along each row."""
    top = tl.full((BLOCK_N,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for _ in range(0, k, BLOCK_K):
        logits = tl.load(at)
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(logits - new_top[:, None]), axis=1)
        top = new_top
        at += BLOCK_K
    return top + tl.log2(total)
