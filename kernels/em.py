"""EM on the device by Triton kernels: log-normalisers, sufficient statistics, best components.

    samples = stage(x, mode)               once
    prepared = prepare(components, mode)   once per iteration
    rows, statistics = e_step(samples, prepared, shift=rows.norm)

`kernels.loop` does whole iterations in place.

`x` is already centred and scaled by the caller. Products run in the precision of the mode, exp, log
and accumulation in float32, totals in float64. No launch waits for the host and no kernel uses
atomics: the same input gives the same bits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gmm_ivf.kernels import fused
from gmm_ivf.kernels.blocks import TAIL_COLUMNS
from gmm_ivf.kernels.components import Statistics
from gmm_ivf.kernels.launch import (
    Configs,
    Rows,
    Sums,
    about_means,
    check_match,
    component_tiles,
    config_for,
    device_limits,
    sample_tiles,
    specialise,
    tiles,
    total,
    total_tail,
)
from gmm_ivf.kernels.operands import LN2, Prepared, Samples, prepare, stage
from gmm_ivf.kernels.sweep import sweep_rows, sweep_sums, sweep_top
from gmm_ivf.kernels.tuning import Config, slab_count

__all__ = [
    "Partials",
    "Rows",
    "accumulate",
    "e_step",
    "log_density",
    "prepare",
    "row_pass",
    "stage",
    "top",
]

# Rows that a program looks through for those to compute again.
REDO_ROWS = 4096
# Samples per slab of the accumulation at least.
MIN_SLAB = 1024
# And at most: tensor cores truncate their sums, which is a bias that grows with their number; over
# so many samples of small responsibilities each it reaches a quarter of a thousandth. More waves of
# programs also end closer together: 2 % of an iteration at ten million samples.
MAX_SLAB = 1 << 16


def row_pass(
    samples: Samples,
    prepared: Prepared,
    *,
    shift: Tensor | None = None,
    out: Tensor | None = None,
    configs: Configs = None,
) -> Rows:
    """Log-normaliser of every sample over all components.

    Parameters
    ----------
    samples, prepared
        From `stage` and `prepare`, with one mode.
    shift : Tensor of shape (rows,), float32, optional
        A guess of the result, such as the `norm` of the previous iteration. It makes the pass
        cheaper and does not change what is computed: rows for which it is far off are done again.
    out : Tensor of shape (rows,), float32, optional
        Written and returned; `samples.empty_rows()` or a `norm`, and may be `shift`.
    configs : mapping of job to Config, optional
        Overrides the tuned block sizes.
    """
    check_match(samples, prepared)
    if not prepared.fused:
        return sweep_rows(samples, prepared, configs)
    config = config_for("row", samples, prepared, configs)
    n, (k, block_d) = samples.n, prepared.linear.shape[1:]
    norm = samples.empty_rows() if out is None else out
    x, part_x = sample_tiles(samples, config.block_n, block_d)
    b, q, part_b = component_tiles(prepared, config.block_k, block_d)
    tensors = (x, samples.half_norm, b, q, prepared.gain, prepared.offset)
    sizes, flags = (n, k, part_x, part_b), specialise(prepared, config)
    guess = norm if shift is None else shift
    shifted: Any = shift is not None
    grid = (-(-n // config.block_n),)
    fused.row_kernel[grid](*tensors, guess, norm, *sizes, SHIFTED=shifted, **flags)
    if shifted:
        redone: Any = REDO_ROWS
        fused.redo_kernel[(-(-n // REDO_ROWS),)](*tensors, norm, *sizes, ROWS=redone, **flags)
    return Rows(norm)


def log_density(samples: Samples, rows: Rows, prepared: Prepared) -> Tensor:
    """Natural log-density of every sample, float32 (N,); adds the row term of tied covariances."""
    density = rows.norm[: samples.n] * LN2
    if prepared.components.covariance_type != "tied":
        return density
    d = samples.n_features
    factor = prepared.components.precisions_cholesky.float()
    step = max(1, (1 << 24) // d)
    for start in range(0, samples.n, step):
        stop = min(start + step, samples.n)
        white = samples.values[:, start:stop, :d].float().sum(0) @ factor
        density[start:stop] -= white.square().sum(1) / 2
    return density


def top(samples: Samples, prepared: Prepared, m: int) -> tuple[Rows, Tensor, Tensor]:
    """The m most probable components of every sample.

    Returns
    -------
    rows : Rows
    ids : Tensor of shape (N, m), int64
        Best first, ties by the lower index.
    log_resp : Tensor of shape (N, m), float32
        Natural log-posteriors.

    Raises
    ------
    ValueError
        When m is not between 1 and the number of components.
    """
    check_match(samples, prepared)
    k = prepared.components.means.shape[0]
    if not 1 <= m <= k:
        raise ValueError(f"m must be between 1 and the {k} components, got {m}.")
    if prepared.fused:
        prepared = prepare(prepared.components, prepared.mode, fused=False)
    return sweep_top(samples, prepared, m)


def accumulate(
    samples: Samples, rows: Rows, prepared: Prepared, *, configs: Configs = None
) -> Statistics:
    """Sufficient statistics about the components' current means, float64.

    Parameters
    ----------
    samples, prepared
        From `stage` and `prepare`.
    rows
        From `row_pass` with the same two.
    configs : mapping of job to Config, optional
        Overrides the tuned block sizes.
    """
    check_match(samples, prepared)
    if prepared.fused:
        sums = moments(samples, rows, prepared, configs)
    else:
        _, sums = sweep_sums(samples, prepared, rows, configs)
    return about_means(samples, rows, prepared, sums)


def e_step(
    samples: Samples,
    prepared: Prepared,
    *,
    shift: Tensor | None = None,
    configs: Configs = None,
) -> tuple[Rows, Statistics]:
    """`row_pass` and `accumulate` in one.

    Where no kernel holds all features on chip (over 256, 128 for diag; full; mode fp32) it computes
    the logits once, where the two calls compute them twice.
    """
    check_match(samples, prepared)
    if prepared.fused:
        rows = row_pass(samples, prepared, shift=shift, configs=configs)
        return rows, accumulate(samples, rows, prepared, configs=configs)
    rows, sums = sweep_sums(samples, prepared, None, configs)
    return rows, about_means(samples, rows, prepared, sums)


@dataclass(frozen=True)
class Partials:
    """Where the fused kernel writes the sums over each slab of samples.

    Attributes
    ----------
    slab : int
        Samples of a slab.
    s0, s1, s2, tail : Tensor
        (slabs, K', ...) sums of r, of r x, of r x^2 and of r times the tails of the samples; those
        that a covariance type does not need are `s1`.
    """

    slab: int
    s0: Tensor
    s1: Tensor
    s2: Tensor
    tail: Tensor


def partials(samples: Samples, prepared: Prepared, configs: Configs = None) -> Partials:
    """Memory for `moments`, which an iteration after the other may use again."""
    config = config_for("moment", samples, prepared, configs)
    k, block_d = prepared.linear.shape[1:]
    kind, device = prepared.components.covariance_type, samples.values.device
    slab = _slab(samples.n, k // config.block_k, config, device_limits(device)[2])
    count = -(-samples.n // slab)

    def partial(*shape: int) -> Tensor:
        return torch.empty(count, k, *shape, dtype=torch.float32, device=device)

    s1 = partial(block_d)
    return Partials(
        slab,
        s1 if kind == "spherical" else partial(),
        s1,
        partial(block_d) if kind == "diag" else s1,
        partial(TAIL_COLUMNS) if kind == "spherical" else s1,
    )


def _slab(n: int, k_blocks: int, config: Config, multiprocessors: int) -> int:
    """Samples of a slab, a multiple of those of a tile."""
    count = slab_count(k_blocks, config.waves * multiprocessors, -(-n // MAX_SLAB))
    length = max(MIN_SLAB, -(-n // count))
    return -(-length // config.block_n) * config.block_n


def moments(
    samples: Samples,
    rows: Rows,
    prepared: Prepared,
    configs: Configs = None,
    scratch: Partials | None = None,
) -> Sums:
    """Sums about the origin by the fused kernel."""
    config = config_for("moment", samples, prepared, configs)
    k, block_d = prepared.linear.shape[1:]
    x, part_x = sample_tiles(samples, config.block_n, block_d)
    x_tail = tiles(samples.values, samples.values.shape[2], config.block_n, TAIL_COLUMNS)
    b, q, part_b = component_tiles(prepared, config.block_k, block_d)
    block: Any = block_d
    s = partials(samples, prepared, configs) if scratch is None else scratch
    fused.moment_kernel[(k // config.block_k, len(s.s1))](
        x, x_tail, b, q, prepared.tail, prepared.gain, prepared.offset, rows.norm,
        s.s0, s.s1, s.s2, s.tail, samples.n, s.slab, k, samples.width, part_x, part_b,
        BLOCK_D=block, **specialise(prepared, config),
    )  # fmt: skip
    first = total(s.s1, prepared)[:, : samples.n_features]
    if prepared.components.covariance_type == "spherical":
        count, second = total_tail(s.tail, prepared)
        return Sums(count, first, second)
    second = first if s.s2 is s.s1 else total(s.s2, prepared)[:, : samples.n_features]
    return Sums(total(s.s0, prepared), first, second)
