"""EM kernels for full covariances: distances, responsibilities with lists, scatter.

A Mahalanobis distance is ``|x U - mean U|^2``, one matrix product for each component. The factors
are packed (`operands.pack`): panels of columns, of several components side by side, without the
zero blocks below the diagonal.

The scatter of a component is ``sum r (x - m) x^T`` about a reference point m, the rounded mean:
centring one operand keeps the terms as small as centring both would, up to the rounding of x
itself, and leaves the other operand the same for every component. The launcher subtracts
``sum r (x - m)  m^T``. Where x is kept in more than half precision both operands are centred.

Most samples are far from most components. The scatter runs over lists of the rows that have a
responsibility for a component of its group that is not zero as stored: what it leaves out is
exactly zero.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
# (a tl.constexpr parameter takes plain values, which the type checker cannot know)
# ruff: noqa: RUF005
# (Triton unpacks no tuples)

import triton
import triton.language as tl

from gmm_ivf.kernels.blocks import (
    INTERPRETED,
    LIFT,
    LIFT_BITS,
    LOWEST,
    load_tile,
    product,
    product3,
    round_tf32,
    tile_at,
)

# Listed responsibilities are multiplied by 2**LIST_LIFT only: times a difference of features of up
# to 4096 they stay in the range of float16, which keeps them down to 2**-28.
LIST_LIFT = 4
RELIFT = tl.constexpr(2.0 ** (LIST_LIFT - LIFT))


@triton.jit
def _row_tile(
    x, part_x, d, stride, first,
    MODE: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The first DEPTH features of a tile of rows: high part, low part."""
    cols = tl.arange(0, DEPTH)
    at = tile_at(x, first, cols, stride, BLOCK_N)
    high = load_tile(at, cols, d, EVEN_D)
    low = load_tile(at + part_x, cols, d, EVEN_D) if MODE == "fp16x3" else high
    return high, low


@triton.jit
def _panel(
    high, low, at, part_f,
    MODE: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Product of rows on chip with a panel of the factors of a group, in one piece."""
    at += tl.arange(0, DEPTH)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    ft = tl.load(at)
    ft_low = tl.load(at + part_f) if MODE == "fp16x3" else ft
    return product3(high, low, ft, ft_low, tl.zeros((BLOCK_N, COLS), tl.float32), MODE)


@triton.jit
def _streamed_panel(
    at_x, at, part_x, part_f, e, d,
    MODE: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The same where a row has too many features to stay on chip, a block of them at a time."""
    acc = tl.zeros((BLOCK_N, COLS), tl.float32)
    cols = tl.arange(0, BLOCK_D)
    at += e * (e + 1) // 2 * BLOCK_D * COLS + cols[:, None] * COLS + tl.arange(0, COLS)[None, :]
    for d0 in range(0, (e + 1) * BLOCK_D, BLOCK_D):
        xt = load_tile(at_x, cols, d - d0, EVEN_D)
        x_low = load_tile(at_x + part_x, cols, d - d0, EVEN_D) if MODE == "fp16x3" else xt
        ft = tl.load(at)
        ft_low = tl.load(at + part_f) if MODE == "fp16x3" else ft
        acc = product3(xt, x_low, ft, ft_low, acc, MODE)
        at_x += BLOCK_D
        at += BLOCK_D * COLS
    return acc


@triton.jit
def _squares(
    acc, shift, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Squares of a panel, every eighth column of a component added up: that takes no shuffle."""
    acc -= shift[None, :]
    return tl.sum(tl.reshape(acc * acc, (BLOCK_N, GROUP, BLOCK_D // 8, 8)), axis=2)


@triton.jit
def distance_kernel(
    x,  # (P, rows, stride)
    factor,  # (P, groups, pairs, BLOCK_D, GROUP * BLOCK_D) packed
    shift,  # (groups, panels, GROUP * BLOCK_D) means times factors
    gain, offset,  # (k,)
    top, total,  # (splits, chunk) largest logit of a row in a split, and the sum of the powers
    out,  # (k, chunk) logits, written unless STORE is off
    start, chunk, k, span, panels, d, stride, part_x, part_f,
    MODE: tl.constexpr, EVEN_D: tl.constexpr, STORE: tl.constexpr, PANELS: tl.constexpr,
    BLOCK_N: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Logits of a tile of rows and a split of `span` components.

    PANELS is 1 or 2 where rows stay on chip, else 0.
    """
    COLS: tl.constexpr = GROUP * BLOCK_D
    ALL: tl.constexpr = 2 * BLOCK_D if PANELS == 2 else BLOCK_D
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    rows = first + tl.arange(0, BLOCK_N)
    at_x = tile_at(x, start + first, tl.arange(0, BLOCK_D), stride, BLOCK_N)
    if PANELS > 0:
        xh, xl = _row_tile(x, part_x, d, stride, start + first, MODE, EVEN_D, BLOCK_N, BLOCK_D)
        wh, wl = _row_tile(x, part_x, d, stride, start + first, MODE, EVEN_D, BLOCK_N, ALL)
    ks, cols = tl.arange(0, GROUP), tl.arange(0, COLS)
    begin = tl.program_id(1) * span
    at_out = out + (begin + ks)[None, :].to(tl.int64) * chunk + rows[:, None]
    factor += (begin // GROUP).to(tl.int64) * (panels * (panels + 1) // 2) * BLOCK_D * COLS
    shift += begin // GROUP * panels * COLS
    largest = tl.full((BLOCK_N,), LOWEST, tl.float32)
    summed = tl.zeros((BLOCK_N,), tl.float32)
    for k0 in range(begin, tl.minimum(k, begin + span), GROUP):
        # Loaded here they arrive while the products run.
        g, c = tl.load(gain + k0 + ks), tl.load(offset + k0 + ks)
        square = tl.zeros((BLOCK_N, GROUP, 8), tl.float32)
        if PANELS > 0:
            moved, moved_2 = tl.load(shift + cols), tl.load(shift + (panels - 1) * COLS + cols)
            acc = _panel(xh, xl, factor, part_f, MODE, BLOCK_N, BLOCK_D, COLS)
            square = _squares(acc, moved, BLOCK_N, GROUP, BLOCK_D)
            if PANELS == 2:
                at_f = factor + BLOCK_D * COLS
                acc = _panel(wh, wl, at_f, part_f, MODE, BLOCK_N, ALL, COLS)
                square += _squares(acc, moved_2, BLOCK_N, GROUP, BLOCK_D)
        else:
            for e in range(panels):
                moved = tl.load(shift + e * COLS + cols)
                acc = _streamed_panel(
                    at_x, factor, part_x, part_f, e, d, MODE, EVEN_D, BLOCK_N, BLOCK_D, COLS
                )
                square += _squares(acc, moved, BLOCK_N, GROUP, BLOCK_D)
        logits = c[None, :] - g[None, :] * tl.sum(square, axis=2)
        if STORE:
            tl.store(at_out, logits)
        new = tl.maximum(largest, tl.max(logits, axis=1))
        powers = tl.sum(tl.exp2(logits - new[:, None]), axis=1)
        summed = summed * tl.exp2(largest - new) + powers
        largest = new
        factor += panels * (panels + 1) // 2 * BLOCK_D * COLS
        shift += panels * COLS
        at_out += GROUP * chunk
    tl.store(top + tl.program_id(1) * chunk + rows, largest)
    tl.store(total + tl.program_id(1) * chunk + rows, summed)


@triton.jit
def share_kernel(
    logits,  # (k, chunk)
    norm,  # (rows,)
    resp,  # (k, chunk) responsibilities times 2**LIFT
    listed,  # (k, chunk) those of the listed rows, slab by slab, times 2**LIST_LIFT
    index,  # (groups, chunk) listed rows, from the first of the chunk
    count,  # (groups, slabs) listed rows
    start, slab, chunk, length, least,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Responsibilities of a group of components for a slab of a chunk of `length` rows.

    Listed are the rows where one of them exceeds `least`, in order, with what is stored of them as
    float32, which the scatter can load ahead. Lists are filled up with responsibilities of zero to
    a multiple of BLOCK_L, which divides a slab.
    """
    group = tl.program_id(0).to(tl.int64)
    begin = tl.multiple_of(tl.program_id(1).to(tl.int64) * slab, 16)
    logits += group * GROUP * chunk
    resp += group * GROUP * chunk
    listed += group * GROUP * chunk
    index += group * chunk
    end = tl.minimum(length, begin + slab)
    found = 0
    for n0 in range(begin, end, BLOCK_N):
        rows = n0 + tl.arange(0, BLOCK_N)
        inside = rows < end
        z = tl.load(norm + start + rows, mask=inside, other=0.0) - LIFT_BITS
        largest = tl.zeros((BLOCK_N,), tl.float32)
        shares = ()
        for g in tl.static_range(GROUP):
            logit = tl.load(logits + g * chunk + rows, mask=inside, other=LOWEST)
            share = tl.exp2(logit - z)
            tl.store(resp + g * chunk + rows, share.to(resp.dtype.element_ty), mask=inside)
            share = (share * RELIFT).to(resp.dtype.element_ty).to(tl.float32)
            shares = shares + (share,)
            largest = tl.maximum(largest, share)
        hit = largest > least
        place = begin + found + tl.cumsum(hit.to(tl.int32), axis=0) - 1
        tl.store(index + place, rows.to(tl.int32), mask=hit)
        for g in tl.static_range(GROUP):
            tl.store(listed + g * chunk + place, shares[g], mask=hit)
        found += tl.sum(hit.to(tl.int32), axis=0)
    rest = begin + found + tl.arange(0, BLOCK_L)
    open_ = rest < begin + (found + BLOCK_L - 1) // BLOCK_L * BLOCK_L
    none = tl.zeros((BLOCK_L,), tl.float32)
    tl.store(index + rest, none.to(tl.int32), mask=open_)
    for g in tl.static_range(GROUP):
        tl.store(listed + g * chunk + rest, none, mask=open_)
    tl.store(count + group * tl.num_programs(1) + tl.program_id(1), found)


@triton.jit
def _split(value, like, MODE: tl.constexpr):
    """Float32 as a high and, in mode fp16x3, a low part of the type of `like`."""
    high = round_tf32(value) if MODE == "tf32" else value.to(like.dtype)
    low = (value - high.to(tl.float32)).to(like.dtype) if MODE == "fp16x3" else high
    return high, low


@triton.jit
def _scattered(xa, xb, xa_low, xb_low, mean_a, mean_b, r, acc, MODE: tl.constexpr):
    """`acc` plus the scatter of a tile: features x rows, rows x features, rows."""
    if MODE == "bf16" and INTERPRETED:
        weighted = (xa.to(tl.float32) - mean_a.to(tl.float32)[:, None]) * r[None, :]
        acc = product(weighted.to(xa.dtype), xb, acc, MODE)
    elif MODE == "fp16" or MODE == "bf16":
        # In half precision throughout: two roundings of a unit each, at a third of the work.
        acc = product((xa - mean_a[:, None]) * r.to(xa.dtype)[None, :], xb, acc, MODE)
    else:
        left = xa.to(tl.float32) - mean_a[:, None]
        right = xb.to(tl.float32) - mean_b[None, :]
        if MODE == "fp16x3":
            left += xa_low.to(tl.float32)
            right += xb_low.to(tl.float32)
        high, low = _split(left * r[None, :], xa, MODE)
        other, other_low = _split(right, xb, MODE)
        acc = product3(high, low, other, other_low, acc, MODE)
    return acc


@triton.jit
def scatter_kernel(
    x,  # (P, rows, stride) from the first row of the chunk
    means,  # (k, wide) reference points
    listed,  # (k, chunk)
    index,  # (groups, chunk)
    count,  # (groups, slabs)
    out,  # (slabs, k, side, side) sums times 2**LIST_LIFT, upper tiles, added to
    slab, chunk, k, d, stride, wide, side, part_x,
    MODE: tl.constexpr, EVEN_D: tl.constexpr, SQUARE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of the scatter of a group over one slab: on the diagonal with SQUARE, else above."""
    group = tl.program_id(0).to(tl.int64)
    i = tl.program_id(2)
    j = i
    if not SQUARE:
        # The strictly upper pairs in order: (0, 1), (0, 2), (1, 2), (0, 3) ... The root of a square
        # may come out a little low.
        j = ((tl.sqrt(8.0 * i.to(tl.float32) + 1.0) + 1.002) * 0.5).to(tl.int32)
        i -= j * (j - 1) // 2
    left = i * BLOCK_D + tl.arange(0, BLOCK_D)
    right = j * BLOCK_D + tl.arange(0, BLOCK_D)
    begin = tl.program_id(1).to(tl.int64) * slab
    at_index = index + group * chunk + begin + tl.arange(0, BLOCK_N)
    at_resp = listed + group * GROUP * chunk + begin + tl.arange(0, BLOCK_N)
    means += group * GROUP * wide
    accs = ()
    points_a = ()
    points_b = ()
    for g in tl.static_range(GROUP):
        accs = accs + (tl.zeros((BLOCK_D, BLOCK_D), tl.float32),)
        points_a = points_a + (tl.load(means + g * wide + left),)
        points_b = points_b + (tl.load(means + g * wide + right),)
    rows = tl.load(at_index)
    for _ in range(0, tl.load(count + group * tl.num_programs(1) + tl.program_id(1)), BLOCK_N):
        # Loaded a step ahead: the loads of samples then wait for no other load.
        at_index += BLOCK_N
        following = tl.load(at_index)
        at = x + rows[:, None] * stride
        xb = load_tile(at + right[None, :], right, d, EVEN_D)
        xb_low = (
            load_tile(at + part_x + right[None, :], right, d, EVEN_D) if MODE == "fp16x3" else xb
        )
        if SQUARE:
            xa = tl.trans(xb)
            xa_low = tl.trans(xb_low)
        else:
            xa = tl.trans(load_tile(at + left[None, :], left, d, EVEN_D))
            xa_low = xa
            if MODE == "fp16x3":
                xa_low = tl.trans(load_tile(at + part_x + left[None, :], left, d, EVEN_D))
        sums = ()
        for g in tl.static_range(GROUP):
            r = tl.load(at_resp + g * chunk)
            acc = _scattered(xa, xb, xa_low, xb_low, points_a[g], points_b[g], r, accs[g], MODE)
            sums = sums + (acc,)
        accs = sums
        rows = following
        at_resp += BLOCK_N
    to = (tl.program_id(1).to(tl.int64) * k + group * GROUP) * side * side
    to = out + to + left[:, None] * side + right[None, :]
    for g in tl.static_range(GROUP):
        tl.store(to, tl.load(to) + accs[g])
        to += side * side
