"""What the chunked EM kernels of all covariance types share, and those of spherical, diag, tied."""

from typing import Any

import torch
from torch import Tensor

from gmm_ivf.kernels import chunked
from gmm_ivf.kernels.launch import (
    Configs,
    Sums,
    component_tiles,
    config_for,
    device_limits,
    sample_tiles,
    specialise,
    tiles,
    total,
)
from gmm_ivf.kernels.operands import NORM_SCALE, ROW_STEP, Prepared, Samples
from gmm_ivf.kernels.tuning import SUM_BLOCK_D, chunk_block_d

# Scratch for a chunk: small enough to stay in a large L2 cache, at least MIN_CHUNK rows.
SCRATCH_BYTES = 32 << 20
MIN_CHUNK = 2048
# Rows per program of the kernel that scales powers; block sizes of the one that reads whole rows.
STREAM_ROWS = 32
NORMALISE: dict[str, Any] = {"BLOCK_N": 32, "BLOCK_T": 8, "num_warps": 2}
# Programs of the moment sums wanted per multiprocessor.
WAVES = 2


class Chunks:
    """The samples a chunk at a time, `chunk` rows or fewer.

    Attributes
    ----------
    resp : Tensor
        Responsibilities of a chunk times 2**LIFT, (chunk, K'), or (K', chunk) if `turned`.
    turned : bool
    """

    resp: Tensor
    turned: bool

    def __init__(self, samples: Samples, prepared: Prepared, configs: Configs, chunk: int):
        self.samples, self.prepared, self.configs = samples, prepared, configs
        self.parts, self.rows, self.stride = samples.values.shape
        self.k, self.wide = prepared.linear.shape[1:]
        self.chunk = min(chunk // ROW_STEP * ROW_STEP, self.rows - ROW_STEP)
        # Between the high and the low parts of samples.
        self.part_x = self.rows * self.stride * (self.parts - 1)

    def chunks(self) -> list[tuple[int, int]]:
        """First row and number of rows, padding included, of each chunk."""
        end = self.rows - ROW_STEP
        return [(s, min(self.chunk, end - s)) for s in range(0, end, self.chunk)]


class Sweep(Chunks):
    """Scratch of a sweep for spherical, diag and tied, and the launches that fill it."""

    def __init__(self, samples: Samples, prepared: Prepared, configs: Configs, dtype: torch.dtype):
        fit = max(MIN_CHUNK, SCRATCH_BYTES // (prepared.linear.shape[1] * dtype.itemsize))
        super().__init__(samples, prepared, configs, fit)
        self.config = config_for("logit", samples, prepared, configs)
        self.tiles = self.k // self.config.block_k
        device = samples.values.device
        self.resp = torch.empty(self.chunk, self.k, dtype=dtype, device=device)
        self.turned = False
        self.top = torch.empty(self.tiles, self.chunk, dtype=torch.float32, device=device)
        self.total = torch.empty_like(self.top)
        # Made once: a launch takes about as long as its kernel.
        config, block_d = self.config, chunk_block_d(prepared.mode)
        self._flags = {**specialise(prepared, config), "BLOCK_D": block_d}
        x, part_x = sample_tiles(samples, config.block_n, block_d)
        b, q, part_b = component_tiles(prepared, config.block_k, block_d)
        self._operands = x, samples.half_norm, b, q, prepared.gain, prepared.offset
        self._sizes = self.chunk, self.k, samples.width, part_x, part_b

    def norms(self, start: int, chunk: int, norm: Tensor) -> None:
        """Log-normalisers of a chunk."""
        self._logits(start, chunk, "sums")
        self._normalise(start, chunk, norm)

    def shares(self, start: int, chunk: int, norm: Tensor, given: bool) -> None:
        """Responsibilities of a chunk, and its log-normalisers unless they are given."""
        self._logits(start, chunk, "powers")
        if not given:
            self._normalise(start, chunk, norm)
        block_n: Any = STREAM_ROWS
        block_k: Any = self.config.block_k
        chunked.scale_kernel[(self.tiles, chunk // STREAM_ROWS)](
            self.resp, self.top, norm, start, self.chunk, self.k, block_n, block_k
        )

    def logits(self, start: int, chunk: int) -> Tensor:
        """Logits of a chunk, (chunk, K')."""
        self._logits(start, chunk, "logits")
        return self.resp

    def _logits(self, start: int, chunk: int, output: str) -> None:
        out: Any = output
        chunked.logit_kernel[(self.tiles, chunk // self.config.block_n)](
            *self._operands, self.resp, self.top, self.total, start, *self._sizes,
            OUTPUT=out, **self._flags,
        )  # fmt: skip

    def _normalise(self, start: int, chunk: int, norm: Tensor) -> None:
        grid = (-(-chunk // NORMALISE["BLOCK_N"]),)
        chunked.normalise_kernel[grid](
            self.top, self.total, norm, start, self.samples.n, self.chunk, self.tiles, **NORMALISE
        )


class Moments:
    """Partial sums of the moments, one for each slab of a chunk."""

    def __init__(self, sweep: Chunks):
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
        self._flags = {**specialise(prepared, self.config), "BLOCK_D": SUM_BLOCK_D}
        self._flags["TURNED"] = sweep.turned
        shape = self.config.block_n, self.config.block_k
        self._operands = (
            tiles(samples.values, sweep.stride, shape[0], SUM_BLOCK_D),
            tiles(sweep.resp, sweep.resp.shape[1], *(shape[::-1] if sweep.turned else shape)),
        )

    def add(self, start: int, chunk: int) -> None:
        """Add those of a chunk, whose responsibilities are there."""
        sweep = self.sweep
        chunked.sum_kernel[(*self.grid, -(-chunk // self.slab))](
            *self._operands, self.s1, self.s2, start, chunk, self.slab, sweep.k, sweep.wide,
            sweep.rows * (sweep.parts - 1), **self._flags,
        )  # fmt: skip

    def totals(self) -> Sums:
        """The sums of all chunks."""
        samples, prepared = self.sweep.samples, self.sweep.prepared
        d, width = samples.n_features, samples.width
        sums = total(self.s1, prepared)
        second = sums[:, width + 1 : width + 4].sum(1) * (2 * NORM_SCALE)
        if self.diag:
            second = total(self.s2, prepared)[:, :d]
        return Sums(sums[:, width], sums[:, :d], second)
