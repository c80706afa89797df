"""Launches the chunked EM kernels: one sweep over the samples, any number of features."""

from typing import Any

import torch
from torch import Tensor

from gmm_ivf.kernels import chunked, covariance
from gmm_ivf.kernels.launch import Configs, Rows, Sums, config_for, device_limits, specialise, total
from gmm_ivf.kernels.operands import NEVER, NORM_SCALE, ROW_STEP, Prepared, Samples, full_block
from gmm_ivf.kernels.tuning import SUM_BLOCK_D, chunk_block_d

# Scratch for a chunk: small enough to stay in a large L2 cache, at least MIN_CHUNK rows.
SCRATCH_BYTES = 32 << 20
MIN_CHUNK = 2048
# Rows per program of the kernel that scales powers; block sizes of the two that read whole rows.
STREAM_ROWS = 32
TOP: dict[str, Any] = {"BLOCK_N": 8, "BLOCK_K": 128, "num_warps": 4}
NORMALISE: dict[str, Any] = {"BLOCK_N": 32, "BLOCK_T": 8, "num_warps": 2}
# Rows of a tile of distances from one component; the transposition of their powers.
FULL_ROWS = 128
SHARE: dict[str, Any] = {"BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4}
# Rows per step of the scatter, and programs of it wanted per multiprocessor.
SCATTER_ROWS = 64
SCATTER_WAVES = 4
# Programs of the moment sums wanted per multiprocessor.
WAVES = 2


class _Sweep:
    """Scratch of one sweep and the launches that fill it."""

    def __init__(self, samples: Samples, prepared: Prepared, configs: Configs, dtype: torch.dtype):
        self.samples, self.prepared, self.configs = samples, prepared, configs
        self.parts, self.rows, self.stride = samples.values.shape
        self.k, self.wide = prepared.linear.shape[1:]
        self.config = config_for("logit", samples, prepared, configs)
        self.tiles = self.k // self.config.block_k
        fit = max(MIN_CHUNK, SCRATCH_BYTES // (self.k * dtype.itemsize))
        self.chunk = min(fit // ROW_STEP * ROW_STEP, self.rows - ROW_STEP)
        device = samples.values.device
        self.out = torch.empty(self.chunk, self.k, dtype=dtype, device=device)
        self.top = torch.empty(self.tiles, self.chunk, dtype=torch.float32, device=device)
        self.total = torch.empty_like(self.top)

    def chunks(self) -> list[tuple[int, int]]:
        """First row and number of rows, padding included, of each chunk."""
        end = self.rows - ROW_STEP
        return [(s, min(self.chunk, end - s)) for s in range(0, end, self.chunk)]

    def logits(self, start: int, chunk: int, output: str) -> None:
        s, p, config = self.samples, self.prepared, self.config
        flags = specialise(s, p, config, chunk_block_d(p.mode))
        flags.update(OUTPUT=output, EVEN_D=self.stride % flags["BLOCK_D"] == 0)
        chunked.logit_kernel[(self.tiles, chunk // config.block_n)](
            s.values, p.linear, p.quadratic, p.gain, p.offset, self.out, self.top, self.total,
            start, self.chunk, self.k, s.width, self.stride, self.wide,
            self.rows * self.stride * (self.parts - 1), self.k * self.wide * (self.parts - 1),
            **flags,
        )  # fmt: skip

    def normalise(self, start: int, chunk: int, norm: Tensor) -> None:
        grid = (-(-chunk // NORMALISE["BLOCK_N"]),)
        flags: dict[str, Any] = {"SUMMED": True, **NORMALISE}
        chunked.normalise_kernel[grid](
            self.top, self.total, norm, start, self.samples.n, self.chunk, self.tiles, **flags
        )

    def scale(self, start: int, chunk: int, norm: Tensor) -> None:
        block_n: Any = STREAM_ROWS
        block_k: Any = self.config.block_k
        chunked.scale_kernel[(self.tiles, chunk // STREAM_ROWS)](
            self.out, self.top, norm, start, self.chunk, self.k, block_n, block_k
        )


class _FullSweep(_Sweep):
    """The same for full covariances, whose tiles are single components."""

    def __init__(self, samples: Samples, prepared: Prepared, configs: Configs, dtype: torch.dtype):
        super().__init__(samples, prepared, configs, dtype)
        self.components = prepared.components.means.shape[0]
        # Components past the last are never written: zero responsibilities to begin with.
        self.out.zero_()
        self.top = self.top.new_empty(self.components, self.chunk)
        self.side = prepared.quadratic.shape[-1]
        self.block = full_block(samples.n_features)
        self.flags: dict[str, Any] = {
            "MODE": prepared.mode, "EVEN_D": self.side == samples.width,
            "BLOCK_D": self.block, "num_warps": 4, "num_stages": 3,
        }  # fmt: skip

    def logits(self, start: int, chunk: int, output: str) -> None:
        s, p = self.samples, self.prepared
        factor_part = self.components * self.side**2 * (self.parts - 1)
        flags = {**self.flags, "BLOCK_N": FULL_ROWS}
        covariance.distance_kernel[(self.components, chunk // FULL_ROWS)](
            s.values, p.linear, p.quadratic, p.gain, p.offset, self.top,
            start, self.chunk, s.width, self.stride, self.wide, self.side,
            self.rows * self.stride * (self.parts - 1), factor_part, **flags,
        )  # fmt: skip
        if output == "logits":
            self.out[:chunk, self.components :] = NEVER
            self.out[:chunk, : self.components] = self.top[:, :chunk].T

    def normalise(self, start: int, chunk: int, norm: Tensor) -> None:
        grid = (-(-chunk // NORMALISE["BLOCK_N"]),)
        flags: dict[str, Any] = {"SUMMED": False, **NORMALISE}
        chunked.normalise_kernel[grid](
            self.top, self.top, norm, start, self.samples.n, self.chunk, self.components, **flags
        )

    def scale(self, start: int, chunk: int, norm: Tensor) -> None:
        grid = (-(-self.components // SHARE["BLOCK_K"]), chunk // SHARE["BLOCK_N"])
        covariance.share_kernel[grid](
            self.top, norm, self.out, start, self.chunk, self.components, self.k, **SHARE
        )


class _Moments:
    """Partial sums of the moments, one for each slab of a chunk."""

    def __init__(self, sweep: _Sweep):
        self.sweep, samples, prepared = sweep, sweep.samples, sweep.prepared
        self.diag = prepared.components.covariance_type == "diag"
        self.config = config_for("sum", samples, prepared, sweep.configs)
        self.grid = (sweep.k // self.config.block_k, sweep.wide // SUM_BLOCK_D)
        multiprocessors = device_limits(samples.values.device)[2]
        wanted = max(1, WAVES * multiprocessors // (self.grid[0] * self.grid[1]))
        self.slab = -(-sweep.chunk // wanted // ROW_STEP) * ROW_STEP
        shape = (-(-sweep.chunk // self.slab), sweep.k, sweep.wide)
        self.s1 = torch.zeros(shape, dtype=torch.float32, device=samples.values.device)
        self.s2 = torch.zeros_like(self.s1) if self.diag else self.s1

    def add(self, start: int, chunk: int) -> None:
        sweep = self.sweep
        flags = specialise(sweep.samples, sweep.prepared, self.config, SUM_BLOCK_D)
        flags.update(EVEN_D=sweep.stride % SUM_BLOCK_D == 0)
        chunked.sum_kernel[(*self.grid, -(-chunk // self.slab))](
            sweep.samples.values, sweep.out, self.s1, self.s2, start, chunk, self.slab,
            sweep.k, sweep.stride, sweep.wide, sweep.rows * sweep.stride * (sweep.parts - 1),
            **flags,
        )  # fmt: skip

    def totals(self) -> Sums:
        samples, prepared = self.sweep.samples, self.sweep.prepared
        d, width = samples.n_features, samples.width
        sums = total(self.s1, prepared)
        second = sums[:, width + 1 : width + 4].sum(1) * (2 * NORM_SCALE)
        if self.diag:
            second = total(self.s2, prepared)[:, :d]
        return Sums(sums[:, width], sums[:, :d], second)


class _FullMoments(_Moments):
    """The same for full covariances, with the scatter of each component about its mean."""

    def __init__(self, sweep: _FullSweep):
        super().__init__(sweep)
        self.full = sweep
        tiles = (sweep.side // sweep.block) ** 2
        wanted = SCATTER_WAVES * device_limits(self.s1.device)[2] // (sweep.components * tiles)
        self.scatter_slab = -(-sweep.chunk // max(1, wanted) // ROW_STEP) * ROW_STEP
        self.scatter_grid = (sweep.components, tiles)
        slabs = -(-sweep.chunk // self.scatter_slab)
        self.s2 = self.s1.new_zeros(slabs, sweep.components, sweep.side, sweep.side)

    def add(self, start: int, chunk: int) -> None:
        super().add(start, chunk)
        sweep, prepared = self.full, self.full.prepared
        flags = {**sweep.flags, "BLOCK_N": SCATTER_ROWS}
        covariance.scatter_kernel[(*self.scatter_grid, -(-chunk // self.scatter_slab))](
            sweep.samples.values, prepared.linear, sweep.out, self.s2,
            start, chunk, self.scatter_slab, sweep.components, sweep.k, sweep.samples.width,
            sweep.stride, sweep.wide, sweep.side, sweep.rows * sweep.stride * (sweep.parts - 1),
            **flags,
        )  # fmt: skip

    def totals(self) -> Sums:
        sums = super().totals()
        d = self.sweep.samples.n_features
        upper = self.s2.sum(0, dtype=torch.float64)[:, :d, :d].triu()
        return Sums(sums.count, sums.first, upper + upper.triu(1).mT)


def _sweep(
    samples: Samples, prepared: Prepared, configs: Configs, dtype: torch.dtype | None = None
) -> _Sweep:
    kind = _FullSweep if prepared.components.covariance_type == "full" else _Sweep
    # fp16x3 multiplies by both parts of a responsibility.
    stored = torch.float32 if samples.mode == "fp16x3" else samples.values.dtype
    return kind(samples, prepared, configs, dtype or stored)


def sweep_rows(samples: Samples, prepared: Prepared, configs: Configs = None) -> Rows:
    """Log-normalisers only."""
    sweep = _sweep(samples, prepared, configs)
    norm = samples.empty_rows()
    for start, chunk in sweep.chunks():
        sweep.logits(start, chunk, "sums")
        sweep.normalise(start, chunk, norm)
    return Rows(norm)


def sweep_sums(
    samples: Samples, prepared: Prepared, rows: Rows | None, configs: Configs = None
) -> tuple[Rows, Sums]:
    """Sums about the origin, and the log-normalisers unless they are given."""
    sweep = _sweep(samples, prepared, configs)
    norm = rows.norm if rows else samples.empty_rows()
    moments = _FullMoments(sweep) if isinstance(sweep, _FullSweep) else _Moments(sweep)
    for start, chunk in sweep.chunks():
        sweep.logits(start, chunk, "powers")
        if rows is None:
            sweep.normalise(start, chunk, norm)
        sweep.scale(start, chunk, norm)
        moments.add(start, chunk)
    return Rows(norm), moments.totals()


def sweep_top(
    samples: Samples, prepared: Prepared, m: int, configs: Configs = None
) -> tuple[Rows, Tensor, Tensor]:
    """Log-normalisers, and the m best components with their log-posteriors, (N, m)."""
    sweep = _sweep(samples, prepared, configs, torch.float32)
    norm = samples.empty_rows()
    components, device = prepared.components.means.shape[0], norm.device
    ids = torch.full((samples.n, m), -1, dtype=torch.int64, device=device)
    log_resp = torch.empty(samples.n, m, dtype=torch.float32, device=device)
    for start, chunk in sweep.chunks():
        sweep.logits(start, chunk, "logits")
        chunked.top_kernel[(chunk // TOP["BLOCK_N"],)](
            sweep.out, norm, ids, log_resp, start, samples.n, sweep.k, components, m, **TOP
        )
    return Rows(norm), ids, log_resp
