"""What the EM kernels read: staged samples and staged components.

Both are rounded to the storage type of the mode once, and every norm and constant is computed from
the rounded values, so that what the kernels evaluate is an exact mixture of slightly moved means,
never a difference of inconsistent terms.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gmm_ivf.kernels.blocks import TAIL_COLUMNS
from gmm_ivf.kernels.components import HALF_MODES, Components
from gmm_ivf.kernels.factors import pack_kernel
from gmm_ivf.kernels.slopes import offset_kernel, slope_kernel
from gmm_ivf.kernels.torch_backend import round_operand

MODES = ("fp16", "bf16", "fp16x3", "tf32", "fp32")
STORAGE = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp16x3": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
}

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# Offset of a component of weight zero: finite, so that no difference of infinities arises.
NEVER = -1e30
# Normaliser of rows past the end: their responsibilities are exactly zero.
NO_ROW = 1e30
# Rows are padded to whole tiles and one more, which the kernels may read ahead.
ROW_STEP = 256
# Half norms are kept divided by this, so that float16 holds those of any |x| < 2000.
NORM_SCALE = 64.0
# Rows and columns of staged matrices are padded so that every load is a whole aligned vector.
COLUMN_STEP = 16
COMPONENT_STEP = 128
MAX_FEATURES = 4096
# Full covariances: the number of components is padded to a multiple of this.
FULL_STEP = 8
FUSED_FEATURES = {"spherical": 256, "tied": 256, "diag": 128, "full": 0}
# Largest entry of scaled components: room for products in float16, none lost to underflow.
SCALED_MAX = 1024.0


@dataclass
class Samples:
    """Samples on the device in the storage type of a mode.

    Attributes
    ----------
    values : Tensor of shape (P, rows, columns)
        P is 2 in mode fp16x3 (high and low parts), else 1. Rows past `n` are zero. The last 16
        columns of the first part are the tail: 1 and three parts of the half norm, times 2**-6,
        which let a matrix product count rows and subtract half norms. Other columns from
        `n_features` on are zero.
    half_norm : Tensor of shape (rows,), float32
        Half the squared norm of each rounded row.
    mode : str
    n, n_features : int
    scatter : Tensor of shape (D, D), float64, or None
        Sum of the outer products of the rounded rows; made on first use, by tied covariances.
    """

    values: Tensor
    half_norm: Tensor
    mode: str
    n: int
    n_features: int
    scatter: Tensor | None = None

    @property
    def width(self) -> int:
        """Columns in front of the tail."""
        return self.values.shape[2] - TAIL_COLUMNS

    def empty_rows(self) -> Tensor:
        """A new float32 value for each row; rows past `n` hold NO_ROW."""
        out = torch.empty(self.values.shape[1], dtype=torch.float32, device=self.values.device)
        out[self.n :] = NO_ROW
        return out


@dataclass(frozen=True)
class Prepared:
    """Components in the form that the kernels read, padded in K and D; made once per iteration.

    Attributes
    ----------
    components : Components
    mode : str
    fused : bool
        For the kernels that keep all features of a component on chip, else for the chunked ones.
    linear : Tensor of shape (P, K', D')
        What the row is multiplied by, in the storage type. full: the means, rounded in half
        precision, else float32.
    quadratic : Tensor of shape (P, K', D')
        diag: what the squares of the row are multiplied by. full: the factors of the precisions,
        (P, groups, pairs, panel, group * panel): of the blocks on and above the diagonal, (0, 0),
        (0, 1), (1, 1), (0, 2) ... as (row, column), each with those of the other components of its
        group beside it. Otherwise `linear` itself.
    tail : Tensor of shape (K', 16)
        What the tail of a row is multiplied by: minus its half norm. full: the means times
        the factors, (groups, panels, group * panel), float32.
    gain, offset : Tensor of shape (K',), float32
        See `kernels.blocks`; an offset of -1e30 marks padding and weight zero.
    """

    components: Components
    mode: str
    fused: bool
    linear: Tensor
    quadratic: Tensor
    tail: Tensor
    gain: Tensor
    offset: Tensor


def check_mode(mode: str) -> None:
    """Raise ValueError for a mode that the kernels do not have."""
    if mode not in MODES:
        raise ValueError(
            f"mode must be one of {MODES} for the Triton kernels, got {mode!r}; "
            'fp64 runs with backend="torch".'
        )


def is_fused(covariance_type: str, mode: str, d: int) -> bool:
    """Whether the moments of a block of components fit into registers.

    Float32 products have no matrix unit: all features of a tile at once do not fit.
    """
    return mode != "fp32" and d <= FUSED_FEATURES[covariance_type]


def padded_features(d: int, fused: bool) -> int:
    """Columns of staged components: a power of two, or with the tail a multiple of 128."""
    if fused:
        return max(COLUMN_STEP, 1 << (d - 1).bit_length())
    return -(-(sample_width(d) + TAIL_COLUMNS) // 128) * 128


def sample_width(d: int) -> int:
    """Columns of staged samples in front of the tail."""
    return -(-d // COLUMN_STEP) * COLUMN_STEP


def split(x: Tensor, mode: str) -> Tensor:
    """Round to the storage type: (P, ...), high part first. The sum over P is the rounded value."""
    if mode == "tf32":
        return round_operand(x.float(), mode)[None]
    high = x.to(STORAGE[mode])
    if mode != "fp16x3":
        return high[None]
    return torch.stack([high, (x - high.to(x.dtype)).to(STORAGE[mode])])


def stage(x: Tensor, mode: str) -> Samples:
    """Copy samples into the storage type.

    Parameters
    ----------
    x : Tensor of shape (N, D), floating point
        Centred and scaled (|x| < 16 keeps every mode in range); any strides.
    mode : {"fp16", "bf16", "fp16x3", "tf32", "fp32"}

    Raises
    ------
    ValueError
        For another mode, shape or type.
    """
    check_mode(mode)
    if x.ndim != 2 or not x.is_floating_point() or 0 in x.shape or x.shape[1] > MAX_FEATURES:
        raise ValueError(
            f"x must be a floating-point tensor of shape (N >= 1, 1 <= D <= {MAX_FEATURES}), "
            f"got {x.dtype} of shape {tuple(x.shape)}; use backend='torch' for more features."
        )
    n, d = x.shape
    parts = 2 if mode == "fp16x3" else 1
    columns = sample_width(d) + TAIL_COLUMNS
    padded = (-(-n // ROW_STEP) + 1) * ROW_STEP
    values = torch.zeros(parts, padded, columns, dtype=STORAGE[mode], device=x.device)
    half_norm = torch.zeros(padded, dtype=torch.float32, device=x.device)
    step = max(1, (1 << 24) // columns)
    for start in range(0, n, step):
        stop = min(start + step, n)
        values[:, start:stop, :d] = split(x[start:stop], mode)
        rounded = values[:, start:stop, :d].sum(0, dtype=torch.float64)
        half_norm[start:stop] = torch.linalg.vector_norm(rounded, dim=1).square_() / 2
    tail = values[0, :, -TAIL_COLUMNS:]
    tail[:n, 0] = 1
    rest = half_norm / NORM_SCALE
    for column in (1, 2, 3):
        tail[:, column] = split(rest, mode)[0]
        rest -= tail[:, column].float()
    return Samples(values, half_norm, mode, n, d)


def scatter(samples: Samples) -> Tensor:
    """Sum of the outer products of the rounded rows, (D, D) float64; kept in the samples."""
    if samples.scatter is None:
        d = samples.n_features
        total = torch.zeros(d, d, dtype=torch.float64, device=samples.values.device)
        rows = max(1, (1 << 20) // d)
        for start in range(0, samples.n, rows):
            parts = samples.values[:, start : start + rows, :d].double()
            tile = parts[0] if len(parts) == 1 else parts.sum(0)
            total.addmm_(tile.T, tile)
        samples.scatter = total
    return samples.scatter


def _scale(largest: Tensor) -> Tensor:
    """The power of two that brings `largest` under SCALED_MAX."""
    exponent = torch.ceil(torch.log2(largest.clamp_min(1e-30) / SCALED_MAX))
    return torch.exp2(exponent)


def _spherical(c: Components, mode: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    linear = split(c.means, mode)
    # The kernel multiplies by the float32 gain: the offset has to be consistent with that one.
    gain = (c.precisions_cholesky.square() * LOG2E).float().double()
    radius = linear.double().sum(0).square().sum(1)
    return linear, linear, gain, -gain * radius / 2


def _diag(c: Components, mode: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    quadratic = c.precisions_cholesky.square() * LOG2E / 2
    gain = _scale(torch.maximum(quadratic, quadratic * c.means.abs() * 2).amax(1))[:, None]
    quad = split(-quadratic / gain, mode)
    rounded = -quad.double().sum(0) * gain
    linear = split(2 * rounded * c.means / gain, mode)
    slope = linear.double().sum(0) * gain
    kept = rounded > 0
    peak = torch.where(kept, slope.square() / rounded.where(kept, 1.0) / 4, 0.0)
    # The determinant of the rounded precisions: their errors then cancel to first order.
    ratio = torch.where(kept, rounded / quadratic, 1.0).log2() / 2
    return linear, quad, gain[:, 0], (ratio - peak).sum(1)


def full_panel(d: int) -> int:
    """Columns of a panel of the factors of full covariances: half of up to 128 features."""
    return 16 if d <= 16 else 32 if d <= 64 else 64


def full_group(d: int) -> int:
    """Components side by side in a panel."""
    return (128 if d > 64 else 64) // full_panel(d)


def _prepare_full(c: Components, mode: str) -> Prepared:
    k, d = c.means.shape
    width, group, parts = full_panel(d), full_group(d), 2 if mode == "fp16x3" else 1
    padded, panels = -(-k // FULL_STEP) * FULL_STEP, -(-d // width)
    shape = (parts, padded // group, panels * (panels + 1) // 2, width, group * width)
    device = c.means.device
    packed = torch.empty(shape, dtype=STORAGE[mode], device=device)
    shift = torch.empty(shape[1], panels, shape[4], dtype=torch.float32, device=device)
    gain, offset = torch.empty(2, padded, dtype=torch.float32, device=device)
    flags: dict[str, Any] = {"MODE": mode, "GROUP": group, "BLOCK_D": width, "num_warps": 4}
    pack_kernel[(padded,)](
        c.weights, c.means.contiguous(), c.precisions_cholesky.contiguous(), packed, shift,
        gain, offset, k, d, panels, packed[0].numel() * (parts - 1), SCALED_MAX, NEVER, **flags,
    )  # fmt: skip
    more, wide = -k % COMPONENT_STEP, padded_features(d, False)
    points = c.means.to(STORAGE[mode] if mode in HALF_MODES else torch.float32)
    points = torch.nn.functional.pad(points, (0, wide - d, 0, more))[None]
    return Prepared(c, mode, False, points, packed, shift, gain, offset)


def _prepare_tied(c: Components, mode: str, fused: bool) -> Prepared:
    (k, d), factor, device = c.means.shape, c.precisions_cholesky, c.means.device
    padded, wide = -(-k // COMPONENT_STEP) * COMPONENT_STEP, padded_features(d, fused)
    slope = (c.means @ factor) @ factor.T
    parts = 2 if mode == "fp16x3" else 1
    linear = torch.empty(parts, padded, wide, dtype=STORAGE[mode], device=device)
    gain, offset = torch.empty(2, padded, dtype=torch.float32, device=device)
    rounded = torch.empty_like(slope)
    block_k, flags = block_shape(wide)
    grid: Any = (-(-padded // block_k),)
    staged: dict[str, Any] = {"MODE": mode, **flags}
    slope_kernel[grid](slope, linear, gain, rounded, k, d, padded, wide, SCALED_MAX, **staged)
    # The inverse of the factor is the transposed Cholesky factor of the covariance.
    white = (rounded @ (c.covariances @ factor)).T
    row, column = white.stride()
    offset_kernel[grid](
        c.weights, factor.contiguous(), white, offset, k, d, padded, row, column, NEVER, **flags
    )
    tail = torch.zeros(padded, TAIL_COLUMNS, dtype=linear.dtype, device=device)
    return Prepared(c, mode, fused, linear, linear, tail, gain, offset)


def block_shape(wide: int) -> tuple[int, dict[str, Any]]:
    """Components of a program of K-sized work on rows of `wide` values, and its block sizes.

    Few values a program, so that many share the work.
    """
    block_d = 1 << (wide - 1).bit_length()
    block_k = max(1, 512 // block_d)
    warps = min(16, max(4, block_d // 512))
    return block_k, {"BLOCK_K": block_k, "BLOCK_D": block_d, "num_warps": warps}


def prepare(components: Components, mode: str, *, fused: bool | None = None) -> Prepared:
    """Constants of each component in the storage type and in base 2, on the components' device.

    Parameters
    ----------
    components : Components
    mode : {"fp16", "bf16", "fp16x3", "tf32", "fp32"}
    fused : bool, optional
        Which kernels to prepare for; by default the faster ones for the number of features.

    Raises
    ------
    ValueError
        For a mode that the kernels do not have.
    """
    check_mode(mode)
    if components.covariance_type == "full":
        return _prepare_full(components, mode)
    kind, (k, d) = components.covariance_type, components.means.shape
    fused = is_fused(kind, mode, d) if fused is None else fused
    if kind == "tied":
        return _prepare_tied(components, mode, fused)
    build = {"spherical": _spherical, "diag": _diag}
    linear, quadratic, gain, radius = build[kind](components, mode)
    offset = (components.log_constants() * LOG2E + radius).clamp_min(NEVER)
    more, wide = -k % COMPONENT_STEP, padded_features(d, fused)
    shared = quadratic is linear

    def pad(matrix: Tensor) -> Tensor:
        return torch.nn.functional.pad(matrix, (0, wide - d, 0, more))

    linear = pad(linear)
    tail = torch.zeros(k + more, TAIL_COLUMNS, dtype=linear.dtype, device=linear.device)
    if kind == "spherical":
        tail[:, 1:4] = -NORM_SCALE
    return Prepared(
        components,
        mode,
        fused,
        linear,
        linear if shared else pad(quadratic),
        tail,
        torch.nn.functional.pad(gain.float(), (0, more)),
        torch.nn.functional.pad(offset.float(), (0, more), value=NEVER),
    )
