"""EM kernels for up to 256 features: nothing of size N x K leaves the chip.

The row pass holds a tile of rows and streams the components past it. The accumulation is attention
turned round: a block of components is the query and keeps its sums in registers, the samples stream
past as keys and values. Each slab of samples writes partial sums of its own, so that the totals
are added in a fixed order and repeat bit for bit.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (a tl.constexpr parameter takes plain values, which the type checker cannot know)

import triton
import triton.language as tl

from gmm_ivf.kernels.blocks import (
    LIFT_BITS,
    LOWEST,
    TAIL,
    centred_product3,
    centring,
    product,
    product3,
    row_logits,
    squares,
    staged_tile,
    sum_of,
)

# Sums of a row that a thread keeps to itself.
LANES = tl.constexpr(8)


@triton.jit
def _running_sum(
    x, x_low, half_norm, b, q, part_b, gain, offset, k,
    COV: tl.constexpr, MODE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Maximum of the logits of each row, and the sum of their powers of 2 relative to it."""
    top = tl.full((BLOCK_N,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for k0 in range(0, k, BLOCK_K):
        logits = row_logits(
            x, x_low, half_norm, b, q, part_b, gain, offset, k0,
            COV, MODE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(logits - new_top[:, None]), axis=1)
        top = new_top
    return top, total


@triton.jit
def _shifted_sum(
    x, x_low, half_norm, b, q, part_b, gain, offset, shift, k,
    COV: tl.constexpr, MODE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum of the powers of 2 of the logits of each row less a given shift: no maximum needed.

    For diag a row keeps 8 sums, each in one thread, which are added at the end. That takes
    registers: it is faster by 6 % there, and slower for the others (H200).
    """
    total = tl.zeros((BLOCK_N, LANES) if COV == "diag" else (BLOCK_N,), tl.float32)
    for k0 in range(0, k, BLOCK_K):
        logits = row_logits(
            x, x_low, half_norm, b, q, part_b, gain, offset, k0,
            COV, MODE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        powers = tl.exp2(logits - shift[:, None])
        if COV == "diag":
            powers = tl.reshape(powers, (BLOCK_N, BLOCK_K // LANES, LANES))
        total += tl.sum(powers, axis=1)
    if COV == "diag":
        total = tl.sum(total, axis=1)
    return total


@triton.jit(do_not_specialize=["n"])
def row_kernel(
    x,  # tiles of (BLOCK_N, all features)
    half_norm,  # (rows,)
    b, q,  # tiles of (BLOCK_K, all features)
    gain, offset,  # (k,)
    shift,  # (rows,) a guess of the result
    out,  # (rows,) base-2 log of the sum of the powers of 2 of the logits
    n, k, part_x, part_b,
    COV: tl.constexpr, MODE: tl.constexpr, SHIFTED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Log-normaliser of each row.

    Where the shift is off by so much that the sum leaves the middle of float32's range the result
    is NaN, for `redo_kernel`: both ways in one kernel cost the good one a tenth of its speed.
    """
    start = tl.program_id(0) * BLOCK_N
    rows = start + tl.arange(0, BLOCK_N)
    xt, x_low = staged_tile(x, start, 0, part_x, MODE)
    half = tl.load(half_norm + rows) if COV == "spherical" else 0.0
    if SHIFTED:
        top = tl.load(shift + rows)
        total = _shifted_sum(
            xt, x_low, half, b, q, part_b, gain, offset, top, k, COV, MODE, BLOCK_N, BLOCK_K
        )
        total = tl.where((total > 1e-20) & (total < 1e30), total, float("nan"))
    else:
        top, total = _running_sum(
            xt, x_low, half, b, q, part_b, gain, offset, k, COV, MODE, BLOCK_N, BLOCK_K
        )
    tl.store(out + rows, top + tl.log2(total), mask=rows < n)


@triton.jit(do_not_specialize=["n"])
def redo_kernel(
    x, half_norm, b, q, gain, offset, out,  # as those of row_kernel
    n, k, part_x, part_b,
    COV: tl.constexpr, MODE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """With a running maximum, the rows that `row_kernel` left NaN; ROWS of them a program."""
    start = tl.program_id(0) * ROWS
    every = start + tl.arange(0, ROWS)
    norm = tl.load(out + every, mask=every < n, other=0.0)
    if tl.min((norm == norm).to(tl.int32), axis=0) == 0:
        for first in range(start, tl.minimum(start + ROWS, n), BLOCK_N):
            rows = first + tl.arange(0, BLOCK_N)
            found = tl.load(out + rows, mask=rows < n, other=0.0)
            if tl.min((found == found).to(tl.int32), axis=0) == 0:
                xt, x_low = staged_tile(x, first, 0, part_x, MODE)
                half = tl.load(half_norm + rows) if COV == "spherical" else 0.0
                top, total = _running_sum(
                    xt, x_low, half, b, q, part_b, gain, offset, k, COV, MODE, BLOCK_N, BLOCK_K
                )
                tl.store(out + rows, top + tl.log2(total), mask=found != found)


@triton.jit(do_not_specialize=["n", "slab"])
def moment_kernel(
    x,  # tiles of (BLOCK_N, BLOCK_D)
    x_tail,  # tiles of (BLOCK_N, TAIL), the tail of a row at column d
    b, q,  # tiles of (BLOCK_K, BLOCK_D)
    b_tail,  # (k, 16)
    gain, offset,  # (k,)
    norm,  # (rows,) from the row pass
    s0, s1, s2,  # (S, k), (S, k, BLOCK_D): sums of r, of r x and of r x^2
    s_tail,  # (S, k, 16) sums of r x_tail
    n, slab, k, d, part_x, part_b,
    COV: tl.constexpr, MODE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Moments of one block of components over one slab of samples (`slab` divides by BLOCK_N)."""
    k0 = tl.program_id(0) * BLOCK_K
    ks = k0 + tl.arange(0, BLOCK_K)
    cols, tail = tl.arange(0, BLOCK_D), tl.arange(0, TAIL)
    bt, bt_low = staged_tile(b, k0, 0, part_b, MODE)
    if COV == "diag":
        qt, qt_low = staged_tile(q, k0, 0, part_b, MODE)
    g, c = tl.load(gain + ks), tl.load(offset + ks)
    CENTRED: tl.constexpr = COV != "diag" and MODE == "fp16x3"
    if CENTRED and COV == "tied":
        base, c = centring(g, c)
    if COV == "spherical":
        bt_tail = tl.load(b_tail + ks[:, None] * TAIL + tail[None, :])
    count = tl.zeros((BLOCK_K,), tl.float32)
    first = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    second = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    extra = tl.zeros((BLOCK_K, TAIL), tl.float32)
    # Said so that a thread loads neighbours together.
    start = tl.multiple_of(tl.program_id(1) * slab, BLOCK_N)
    at_norm = norm + start + tl.arange(0, BLOCK_N)
    # Vectors are not part of the load pipeline: this one is read an iteration ahead by hand.
    z = tl.load(at_norm) - LIFT_BITS
    for row in range(start, tl.minimum(start + slab, n), BLOCK_N):
        xt, x_low = staged_tile(x, row, 0, part_x, MODE)
        at_norm += BLOCK_N
        z_next = tl.load(at_norm) - LIFT_BITS
        acc = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
        if COV == "spherical":
            # Here, so that the products below do not wait for each other's tiles.
            xt_tail = x_tail.load([row, d])
        # In the order of `row_logits`: where a variance is a millionth of squared norms, as that of
        # a component of one sample, the two have to agree to the last bit.
        if CENTRED:
            if COV == "tied":
                acc += base[:, None]
            else:
                acc = product(bt_tail, tl.trans(xt_tail), acc, MODE)
            acc = centred_product3(bt, bt_low, tl.trans(xt), tl.trans(x_low), acc)
        else:
            acc = product3(bt, bt_low, tl.trans(xt), tl.trans(x_low), acc, MODE)
            if COV == "spherical":
                acc = product(bt_tail, tl.trans(xt_tail), acc, MODE)
        if COV == "diag":
            sq, sq_low = squares(xt, x_low, MODE)
            acc = product3(qt, qt_low, tl.trans(sq), tl.trans(sq_low), acc, MODE)
        exact = tl.exp2(acc * g[:, None] + c[:, None] - z[None, :])
        resp = exact.to(xt.dtype)
        resp_low = (exact - resp.to(tl.float32)).to(xt.dtype)
        first = sum_of(first, resp, resp_low, xt, x_low, MODE, MODE == "fp16x3")
        # Counted as they enter the other sums, so that means and variances keep no bias.
        if COV == "spherical":
            extra = sum_of(extra, resp, resp_low, xt_tail, xt_tail, MODE, False)
        else:
            count += tl.sum(exact if MODE == "fp16x3" else resp.to(tl.float32), axis=1)
        if COV == "diag":
            split: tl.constexpr = MODE == "fp16x3" or MODE == "tf32"
            second = sum_of(second, resp, resp_low, sq, sq_low, MODE, split)
        z = z_next
    at_out = tl.program_id(1).to(tl.int64) * k + ks
    wide = at_out[:, None] * BLOCK_D + cols[None, :]
    tl.store(s1 + wide, first)
    if COV == "spherical":
        tl.store(s_tail + at_out[:, None] * TAIL + tail[None, :], extra)
    else:
        tl.store(s0 + at_out, count)
    if COV == "diag":
        tl.store(s2 + wide, second)
