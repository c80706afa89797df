"""Launches the EM kernels for full covariances, a chunk of rows at a time.

Three launches give the responsibilities of a chunk and the lists of rows that have any; the sums
about the origin are those of the other covariance types; the last launch is the scatter.
"""

from typing import Any

import torch
from torch import Tensor

from gmm_ivf.kernels import chunked, covariance, factors
from gmm_ivf.kernels.components import HALF_MODES
from gmm_ivf.kernels.launch import Configs, Sums, device_limits
from gmm_ivf.kernels.operands import (
    FULL_STEP,
    NEVER,
    ROW_STEP,
    Prepared,
    Samples,
    full_group,
    full_panel,
)
from gmm_ivf.kernels.passes import NORMALISE, Chunks, Moments
from gmm_ivf.kernels.tuning import Config

# Scratch for the logits of a chunk, and the rows that it has at least.
LOGIT_BYTES = 128 << 20
MIN_CHUNK = 8192
# Panels up to which the rows of a tile stay on chip: 128 features. Tiles of rows, the programs that
# share the registers of a multiprocessor, and more warps where a panel is twice as wide.
RESIDENT_PANELS = 2
DISTANCE: dict[str, Any] = {"BLOCK_N": 128, "num_warps": 4, "num_stages": 3}
DISTANCE_RESIDENT = 3
WIDE_WARPS = 8
# Float32 products run on the ordinary units, which large tiles make spill.
DISTANCE_FP32: dict[str, Any] = {"BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
SHARE: dict[str, Any] = {"BLOCK_N": 1024, "num_warps": 4}
# Sums about the origin, whose responsibilities lie component by component.
SUM = Config(64, 64, 4, 4)
# Features of a tile of the scatter, and the components that one tile of samples serves in half
# precision; where it is split into two parts, or centred twice, one has the registers to itself.
SCATTER_BLOCK = 64
SCATTER: dict[str, Any] = {"BLOCK_N": 128, "num_warps": 4, "num_stages": 3}
SCATTER_CENTRED: dict[str, Any] = {"BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
LIST_GROUP = 2
# Programs of the scatter wanted per multiprocessor.
SCATTER_WAVES = 6
# Rows and columns of a tile of the scatter about the means.
CENTRE_BLOCK = 32


def distance_plan(prepared: Prepared, d: int, shared_limit: int) -> tuple[dict[str, Any], int]:
    """Flags of the distances, and how many of their programs a multiprocessor holds.

    Rows stay on chip where they fit, with a pipeline as long as fits too, else they are streamed.
    """
    width, fp32 = full_panel(d), prepared.mode == "fp32"
    flags = dict(DISTANCE_FP32 if fp32 else DISTANCE)
    panels = -(-d // width)
    pairs = panels * (panels + 1) // 2
    item = prepared.quadratic.itemsize * prepared.quadratic.shape[0]
    tile = width * width * full_group(d) * item
    rows = flags["BLOCK_N"] * width * item
    for stages in (flags["num_stages"], 2):
        needed = rows * pairs + stages * pairs * tile
        if panels <= RESIDENT_PANELS and needed <= shared_limit:
            if full_group(d) * width > 64 and not fp32:
                flags["num_warps"] = WIDE_WARPS
            resident = min(DISTANCE_RESIDENT, shared_limit // needed)
            return {**flags, "PANELS": panels, "num_stages": stages}, resident
    return {**flags, "PANELS": 0}, 2


def chunk_rows(rows: int, components: int, wave: int) -> int:
    """Rows of a chunk: as many waves of programs as the logits have room for.

    A last wave that is not full costs as much as one that is. Without room for one wave the chunk
    is a part of it, for whose rows the components are split.
    """
    fit = max(MIN_CHUNK, LOGIT_BYTES // (4 * components))
    chunk = fit // wave * wave if fit >= wave else wave // -(-wave // fit)
    return min(rows, -(-chunk // ROW_STEP) * ROW_STEP)


class FullSweep(Chunks):
    """Scratch of a sweep for full covariances, and the launches that fill it."""

    def __init__(self, samples: Samples, prepared: Prepared, configs: Configs):
        half, d = prepared.mode in HALF_MODES, samples.n_features
        self.components = -(-prepared.components.means.shape[0] // FULL_STEP) * FULL_STEP
        _, shared, multiprocessors = device_limits(samples.values.device)
        self.flags, resident = distance_plan(prepared, d, shared)
        programs = multiprocessors * resident
        rows = samples.values.shape[1] - ROW_STEP
        padded = prepared.linear.shape[1]
        chunk = chunk_rows(rows, padded, programs * self.flags["BLOCK_N"])
        if configs is None and half:
            configs = {"sum": SUM}
        super().__init__(samples, prepared, configs, chunk)
        # Components of a split: all of them where the tiles of rows are enough programs.
        splits = max(1, programs * self.flags["BLOCK_N"] // self.chunk)
        self.span = -(-self.components // splits // FULL_STEP) * FULL_STEP
        # Half precision lists what it does not round to zero, float32 what may show in its sums.
        self.least = 0.0 if half else 2.0 ** (covariance.LIST_LIFT - 48)
        self.group = LIST_GROUP if half else 1
        self.groups = self.components // self.group
        self.scatter = SCATTER if half else SCATTER_CENTRED
        self.side = -(-d // SCATTER_BLOCK) * SCATTER_BLOCK
        wanted = SCATTER_WAVES * multiprocessors // (self.groups * (self.side // SCATTER_BLOCK))
        self.slab = -(-self.chunk // max(1, wanted) // ROW_STEP) * ROW_STEP
        self._allocate(samples.values.dtype if half else torch.float32)

    def _allocate(self, dtype: torch.dtype) -> None:
        shape, device = (self.components, self.chunk), self.samples.values.device
        self._logits = torch.empty(shape, dtype=torch.float32, device=device)
        self.resp = torch.empty(self.k, self.chunk, dtype=dtype, device=device)
        # Components past the last are never written.
        self.resp[self.components :] = 0
        self.turned = True
        self.listed = torch.empty_like(self._logits)
        # The kernel reads one tile ahead.
        size = self.groups * self.chunk + ROW_STEP
        self.index = torch.empty(size, dtype=torch.int32, device=device)
        slabs = -(-self.chunk // self.slab)
        self.count = torch.empty(self.groups, slabs, dtype=torch.int32, device=device)
        splits = -(-self.components // self.span)
        self._top = torch.empty(splits, self.chunk, dtype=torch.float32, device=device)
        self._total = torch.empty_like(self._top)

    def _distances(self, start: int, chunk: int, store: bool) -> None:
        s, p = self.samples, self.prepared
        width = full_panel(s.n_features)
        panels = -(-s.n_features // width)
        tile = width * max(1, self.flags["PANELS"])
        flags: dict[str, Any] = {
            **self.flags, "MODE": p.mode, "EVEN_D": s.width % tile == 0, "STORE": store,
            "GROUP": full_group(s.n_features), "BLOCK_D": width,
        }  # fmt: skip
        covariance.distance_kernel[(chunk // flags["BLOCK_N"], len(self._top))](
            s.values, p.quadratic, p.tail, p.gain, p.offset, self._top, self._total, self._logits,
            start, self.chunk, self.components, self.span, panels, s.width, self.stride,
            self.part_x, p.quadratic[0].numel() * (self.parts - 1), **flags,
        )  # fmt: skip

    def _normalise(self, start: int, chunk: int, norm: Tensor) -> None:
        chunked.normalise_kernel[(-(-chunk // NORMALISE["BLOCK_N"]),)](
            self._top, self._total, norm, start, self.samples.n, self.chunk, len(self._top),
            **NORMALISE,
        )  # fmt: skip

    def norms(self, start: int, chunk: int, norm: Tensor) -> None:
        """Log-normalisers of a chunk."""
        self._distances(start, chunk, False)
        self._normalise(start, chunk, norm)

    def shares(self, start: int, chunk: int, norm: Tensor, given: bool) -> None:
        """Responsibilities of a chunk, and its log-normalisers unless they are given."""
        self._distances(start, chunk, True)
        if not given:
            self._normalise(start, chunk, norm)
        flags: dict[str, Any] = {**SHARE, "GROUP": self.group, "BLOCK_L": self.scatter["BLOCK_N"]}
        covariance.share_kernel[(self.groups, self.count.shape[1])](
            self._logits, norm, self.resp, self.listed, self.index, self.count,
            start, self.slab, self.chunk, chunk, self.least, **flags,
        )  # fmt: skip

    def logits(self, start: int, chunk: int) -> Tensor:
        """Logits of a chunk, (chunk, K')."""
        self._distances(start, chunk, True)
        out = self._logits.new_full((self.chunk, self.k), NEVER)
        out[:, : self.components] = self._logits.T
        return out


class FullMoments(Moments):
    """Sums about the origin, and the scatter of each component about its reference point."""

    def __init__(self, sweep: FullSweep):
        super().__init__(sweep)
        self.full = sweep
        shape = (sweep.count.shape[1], sweep.components, sweep.side, sweep.side)
        self.s2 = self.s1.new_zeros(shape)

    def add(self, start: int, chunk: int) -> None:
        """Add those of a chunk, whose responsibilities are there."""
        super().add(start, chunk)
        sweep = self.full
        tiles = sweep.side // SCATTER_BLOCK
        self._scatter(start, tiles, True)
        if tiles > 1:
            self._scatter(start, tiles * (tiles - 1) // 2, False)

    def _scatter(self, start: int, tiles: int, square: bool) -> None:
        sweep, samples = self.full, self.full.samples
        even = samples.width % SCATTER_BLOCK == 0
        flags: dict[str, Any] = {
            **sweep.scatter, "MODE": sweep.prepared.mode, "EVEN_D": even, "SQUARE": square,
            "GROUP": sweep.group, "BLOCK_D": SCATTER_BLOCK,
        }  # fmt: skip
        covariance.scatter_kernel[(sweep.groups, sweep.count.shape[1], tiles)](
            samples.values[:, start:], sweep.prepared.linear, sweep.listed, sweep.index,
            sweep.count, self.s2, sweep.slab, sweep.chunk, sweep.components, samples.width,
            sweep.stride, sweep.wide, sweep.side, sweep.part_x, **flags,
        )  # fmt: skip

    def totals(self) -> Sums:
        """The sums of all chunks, the second ones about the means."""
        sums = super().totals()
        prepared = self.full.prepared
        k, d = prepared.components.means.shape
        points = prepared.linear[0]
        out = torch.empty(k, d, d, dtype=torch.float64, device=points.device)
        flags: dict[str, Any] = {
            "ONE_SIDED": prepared.mode in HALF_MODES, "BLOCK": CENTRE_BLOCK, "num_warps": 4
        }  # fmt: skip
        slabs, padded, side = self.s2.shape[:3]
        factors.centre_kernel[(k, (side // CENTRE_BLOCK) ** 2)](
            self.s2, sums.count.contiguous(), sums.first, prepared.components.means.contiguous(),
            points, out, slabs, padded, d, side, sums.first.stride(0), points.stride(0),
            2.0**-covariance.LIST_LIFT, **flags,
        )  # fmt: skip
        return Sums(sums.count, sums.first, out)
