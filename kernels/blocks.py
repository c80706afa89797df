"""Triton functions shared by the EM kernels: masked loads, products by precision, logit tiles.

Logits are in base 2. With ``acc`` the inner product of the staged row and the staged component,

    logit = gain_k * (acc - half_norm_n) + offset_k        spherical
    logit = gain_k * acc + offset_k                        tied, diag

The row term ``x^T P x`` of a tied covariance is the same for every component and is left out; for
diag the inner product runs over the features and their squares.
"""

# pyright: reportArgumentType=false
# (a tl.constexpr parameter takes plain values, which the type checker cannot know)

import triton
import triton.language as tl
from triton import knobs

# The interpreter multiplies bfloat16 bit patterns as if they were integers.
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))

# Responsibilities are multiplied by 2**LIFT before they are rounded to half precision, so that
# float16 keeps them down to 2**-36; the sums are divided by it again.
LIFT = 12
LIFT_BITS = tl.constexpr(LIFT)
LIFTED = tl.constexpr(2.0**LIFT)
LOWERED = tl.constexpr(2.0**-LIFT)

# Below every logit, and finite, so that no difference of infinities arises.
LOWEST = tl.constexpr(-3e38)
LN2 = tl.constexpr(0.6931471805599453)

# Columns of the tail of a sample: 1, the three parts of its half norm, zeros.
TAIL_COLUMNS = 16
TAIL = tl.constexpr(TAIL_COLUMNS)


@triton.jit
def product(a, b, acc, MODE: tl.constexpr):
    """``acc + a @ b`` with float32 accumulation."""
    if MODE == "fp32":
        out = tl.dot(a, b, acc, input_precision="ieee")
    elif MODE == "tf32":
        out = tl.dot(a, b, acc, input_precision="tf32")
    elif MODE == "bf16" and INTERPRETED:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        out = tl.dot(a, b, acc)
    return out


@triton.jit
def product3(a, a_low, b, b_low, acc, MODE: tl.constexpr):
    """`product`, with the low parts of both operands in mode fp16x3.

    There the products start from zero and are added by ordinary instructions: tensor cores truncate
    their sums, which over many features is a bias.
    """
    if MODE == "fp16x3":
        small = tl.dot(a, b_low, tl.dot(a_low, b))
        out = acc + (small + tl.dot(a, b))
    else:
        out = product(a, b, acc, MODE)
    return out


@triton.jit
def centred_product3(a, a_low, b, b_low, start):
    """``start + a @ b`` in mode fp16x3, for sums that end about as far above 0 as they start below.

    Tensor cores truncate towards 0 with every step: on the two sides of it that cancels.
    """
    small = tl.dot(a, b_low, tl.dot(a_low, b))
    return small + tl.dot(a, b, start)


@triton.jit
def centring(gain, offset):
    """Where sums of `centred_product3` start, the offset before the gain; and what is left of it.

    For tied; offsets lie half the way below: at minus half the squared norm of the mean, but for
    the weight. For spherical the half norm of the sample does.
    """
    start = tl.where(gain > 0, offset / tl.where(gain > 0, gain, 1.0), 0.0)
    return start, tl.where(gain > 0, 0.0, offset)


@triton.jit
def product2(a, b, b_low, acc, MODE: tl.constexpr, SPLIT: tl.constexpr):
    """`product`, with the low part of the second operand when it is split."""
    if SPLIT:
        acc = product(a, b_low, acc, MODE)
    return product(a, b, acc, MODE)


@triton.jit
def sum_of(total, r, r_low, x, x_low, MODE: tl.constexpr, SPLIT: tl.constexpr):
    """``total + r @ x``; x with its low part if SPLIT, and r with its own in mode fp16x3.

    There the products of a tile start from zero, as in `product3`.
    """
    if MODE == "fp16x3":
        part = product(r_low, x, tl.zeros(total.shape, tl.float32), MODE)
        out = total + product2(r, x, x_low, part, MODE, SPLIT)
    else:
        out = product2(r, x, x_low, total, MODE, SPLIT)
    return out


@triton.jit
def staged_tile(matrix, row, col, part, MODE: tl.constexpr):
    """A tile of a staged matrix from a tensor descriptor (see `launch.tiles`), and its low part.

    The low parts begin `part` rows below; modes other than fp16x3 have none.
    """
    high = matrix.load([row, col])
    low = matrix.load([row + part, col]) if MODE == "fp16x3" else high
    return high, low


@triton.jit
def tile_at(base, start, cols, stride, BLOCK_N: tl.constexpr):
    """Pointers to a tile of a row-major matrix; only `start` needs 64 bits."""
    rows = tl.arange(0, BLOCK_N)
    return base + start * stride + rows[:, None] * stride + cols[None, :]


@triton.jit
def load_tile(at, cols, d, EVEN: tl.constexpr):
    """A tile of rows at a block of pointers; columns from `d` on are 0.

    Rows need no mask: staged samples are padded with rows of zeros.
    """
    return tl.load(at) if EVEN else tl.load(at, mask=cols[None, :] < d, other=0.0)


@triton.jit
def round_tf32(value):
    """`torch_backend.round_operand` of float32 values in mode tf32."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 4095 + ((bits >> 13) & 1)) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def squares(x, x_low, MODE: tl.constexpr):
    """Squares of the staged values, as a high and a low part in the storage type.

    The square of a float16, bfloat16 or tf32 value has twice its bits, so that the two parts hold
    it exactly; in mode fp16x3 the low part of x enters to first order. In mode fp32 low is 0.
    """
    value = x.to(tl.float32)
    exact = value * value
    if MODE == "fp16x3":
        exact += 2.0 * value * x_low.to(tl.float32)
    high = round_tf32(exact) if MODE == "tf32" else exact.to(x.dtype)
    low = (exact - high.to(tl.float32)).to(x.dtype)
    return high, low


@triton.jit
def split64(value, MODE: tl.constexpr):
    """`operands.split` of float64 values: high part, low part, and what they represent."""
    single = value.to(tl.float32)
    if MODE == "tf32":
        high = round_tf32(single)
    elif MODE == "fp32":
        high = single
    elif MODE == "bf16":
        high = single.to(tl.bfloat16)
    else:
        high = single.to(tl.float16)
    rounded = high.to(tl.float32).to(tl.float64)
    low = high
    if MODE == "fp16x3":
        low = (value - rounded).to(tl.float32).to(tl.float16)
        rounded += low.to(tl.float32).to(tl.float64)
    return high, low, rounded


@triton.jit
def row_logits(
    x, x_low, half_norm, b, q, part_b, gain, offset, k0,
    COV: tl.constexpr, MODE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Logits of a tile of rows, (BLOCK_N, BLOCK_K), for the components from `k0` on.

    All features are in one block.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    bt, bt_low = staged_tile(b, k0, 0, part_b, MODE)
    ks = k0 + tl.arange(0, BLOCK_K)
    # Loaded here they arrive while the product runs; any earlier they join the load pipeline and
    # take twice the registers, any later every tile waits for them.
    g, c = tl.load(gain + ks), tl.load(offset + ks)
    if COV != "diag" and MODE == "fp16x3":
        if COV == "tied":
            base, c = centring(g, c)
            acc += base[None, :]
        else:
            acc -= half_norm[:, None]
        acc = centred_product3(x, x_low, tl.trans(bt), tl.trans(bt_low), acc)
    else:
        acc = product3(x, x_low, tl.trans(bt), tl.trans(bt_low), acc, MODE)
        if COV == "spherical":
            acc -= half_norm[:, None]
    if COV == "diag":
        sq, sq_low = squares(x, x_low, MODE)
        qt, qt_low = staged_tile(q, k0, 0, part_b, MODE)
        acc = product3(sq, sq_low, tl.trans(qt), tl.trans(qt_low), acc, MODE)
    return acc * g[None, :] + c[None, :]


@triton.jit
def total_kernel(partial, out, slabs, size, SLABS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum over the slabs, (slabs, size) to (size,), in float64, in fixed order, not lifted."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float64)
    for s0 in range(0, slabs, SLABS):
        s = s0 + tl.arange(0, SLABS)
        inside = (s < slabs)[:, None] & (cols < size)[None, :]
        at = partial + s[:, None].to(tl.int64) * size + cols[None, :]
        acc += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float64), axis=0)
    tl.store(out + cols, acc * LOWERED, mask=cols < size)


@triton.jit
def total_tail_kernel(
    partial,  # (slabs, padded, 16)
    count, square,  # (k,)
    slabs, k, padded,
    SCALE: tl.constexpr, SLABS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`total_kernel` of the sums of r x_tail: sums of r, and of r times SCALE times a half norm."""
    ks = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK,), tl.float64)
    halves = tl.zeros((BLOCK,), tl.float64)
    for s0 in range(0, slabs, SLABS):
        s = s0 + tl.arange(0, SLABS)
        inside = (s < slabs)[:, None] & (ks < k)[None, :]
        at = partial + (s[:, None].to(tl.int64) * padded + ks[None, :]) * TAIL
        counts += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float64), axis=0)
        for column in range(1, 4):
            part = tl.load(at + column, mask=inside, other=0.0)
            halves += tl.sum(part.to(tl.float64), axis=0)
    tl.store(count + ks, counts * LOWERED, mask=ks < k)
    tl.store(square + ks, halves * (LOWERED * SCALE), mask=ks < k)


@triton.jit(do_not_specialize=["n"])
def log_total_kernel(norm, out, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Log-normalisers of ROWS rows in natural units, added in float64; one sum a program."""
    start = tl.program_id(0).to(tl.int64) * ROWS
    acc = tl.zeros((BLOCK,), tl.float64)
    for step in range(0, ROWS, BLOCK):
        rows = start + step + tl.arange(0, BLOCK)
        acc += tl.load(norm + rows, mask=rows < n, other=0.0).to(tl.float64)
    tl.store(out + tl.program_id(0), tl.sum(acc, axis=0) * LN2)
