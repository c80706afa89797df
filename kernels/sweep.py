"""Launches the chunked EM kernels: one sweep over the samples, any number of features."""

from typing import Any

import torch
from torch import Tensor

from gmm_ivf.kernels import chunked
from gmm_ivf.kernels.launch import Configs, Rows, Sums, config_for, device_limits, specialise, total
from gmm_ivf.kernels.operands import NORM_SCALE, ROW_STEP, Prepared, Samples
from gmm_ivf.kernels.tuning import SUM_BLOCK_D, chunk_block_d

# Scratch for a chunk: small enough to stay in a large L2 cache, at least MIN_CHUNK rows.
SCRATCH_BYTES = 32 << 20
MIN_CHUNK = 2048
# Rows per program of the kernel that scales powers; block sizes of the two that read whole rows.
STREAM_ROWS = 32
TOP: dict[str, Any] = {"BLOCK_N": 8, "BLOCK_K": 128, "num_warps": 4}
NORMALISE: dict[str, Any] = {"BLOCK_N": 64, "num_warps": 2}
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
        chunked.normalise_kernel[grid](
            self.top, self.total, norm, start, self.samples.n, self.chunk, self.tiles, **NORMALISE
        )

    def scale(self, start: int, chunk: int, norm: Tensor) -> None:
        block_n: Any = STREAM_ROWS
        block_k: Any = self.config.block_k
        chunked.scale_kernel[(self.tiles, chunk // STREAM_ROWS)](
            self.out, self.top, norm, start, self.chunk, self.k, block_n, block_k
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


def sweep_rows(samples: Samples, prepared: Prepared, configs: Configs = None) -> Rows:
    """Log-normalisers only."""
    sweep = _Sweep(samples, prepared, configs, samples.values.dtype)
    norm = samples.empty_rows()
    for start, chunk in sweep.chunks():
        sweep.logits(start, chunk, "sums")
        sweep.normalise(start, chunk, norm)
    return Rows(norm)


def sweep_sums(
    samples: Samples, prepared: Prepared, rows: Rows | None, configs: Configs = None
) -> tuple[Rows, Sums]:
    """Sums about the origin, and the log-normalisers unless they are given."""
    sweep = _Sweep(samples, prepared, configs, samples.values.dtype)
    norm = rows.norm if rows else samples.empty_rows()
    moments = _Moments(sweep)
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
    sweep = _Sweep(samples, prepared, configs, torch.float32)
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
