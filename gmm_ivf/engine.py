"""One set of samples bound to a device, backend and precision, and EM over it from one start."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from gmm_ivf.kernels import torch_backend
from gmm_ivf.kernels.components import (
    HALF_MODES,
    Components,
    IllDefinedCovarianceError,
    Statistics,
    m_step,
    mended_m_step,
)
from gmm_ivf.kernels.dispatch import choose_precision, safe_reach
from gmm_ivf.lloyd import Pass, TorchPass
from gmm_ivf.memory import Result, free_bytes, needed, with_fitting_tiles
from gmm_ivf.params import Frame
from gmm_ivf.rows import DATA_REACH, INSIDE, Rows

# Share of the free GPU memory that the samples may take to stay there between iterations.
_RESIDENT_SHARE = 0.5


class Engine:
    """Passes over all samples by torch, a tile at a time.

    Attributes
    ----------
    backend : str
    burst : int
        EM iterations between looks at the likelihood.
    mended : int
        Covariances that were mended, summed over iterations; see `mend`.

    Parameters
    ----------
    rows : Rows
    frame : Frame
    device : torch.device
    candidates : tuple of str
        Precision modes, cheapest first; each pass takes the first that is accurate enough.
    chunk_size : int or None
        Rows of a tile; None bounds the tile by memory.
    """

    backend = "torch"
    burst = 1
    mended = 0
    _mending = False

    def __init__(
        self,
        rows: Rows,
        frame: Frame,
        device: torch.device,
        candidates: tuple[str, ...],
        chunk_size: int | None,
    ):
        self.rows = rows
        self.frame = frame
        self.device = device
        self.candidates = candidates
        self.chunk_size = chunk_size
        self.mode = candidates[0]
        self.reach: Mapping[torch.dtype, float] = DATA_REACH
        self._resident: dict[torch.dtype, Tensor] = {}
        self._scatters: dict[str, Tensor] = {}

    def loaded(self) -> "Engine":
        """This engine, with the samples where passes read them."""
        return self

    def tile_rows(self, n_components: int) -> int:
        """Rows of a tile for so many components."""
        if self.chunk_size is not None:
            return self.chunk_size
        return torch_backend.tile_rows(n_components, self.rows.d, self.device)

    def tiles(self, size: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """First row and content of each tile, in the frame."""
        if self._stays_on_device(dtype):
            whole = self.resident(dtype)
            for start, stop in self.rows.spans(size):
                yield start, whole[start:stop]
        else:
            for start, stop in self.rows.spans(size):
                # The scan has seen all samples: where the mode serves the frame it serves them.
                reach = None if self.reach[dtype] >= INSIDE else self.reach
                yield start, self.rows.tile(start, stop, self.frame, dtype, self.device, reach)

    def _stays_on_device(self, dtype: torch.dtype) -> bool:
        """A GPU keeps the samples if they fit; on a CPU they lie in memory already."""
        if self.device.type != "cuda":
            return False
        if dtype in self._resident:
            return True
        size = self.rows.n * self.rows.d * dtype.itemsize
        return size <= _RESIDENT_SHARE * free_bytes(self.device)

    def resident(self, dtype: torch.dtype) -> Tensor:
        """All samples in the frame, kept on the device."""
        if dtype not in self._resident:
            with needed("all samples", self.rows.n * self.rows.d * dtype.itemsize):
                whole = torch.empty(self.rows.n, self.rows.d, dtype=dtype, device=self.device)
            for start, stop in self.rows.spans(self.tile_rows(1)):
                tile = self.rows.tile(start, stop, self.frame, dtype, self.device, None)
                whole[start:stop] = tile
            self._resident[dtype] = whole
        return self._resident[dtype]

    def prepare(self, components: Components) -> tuple[torch_backend.Prepared, torch.dtype]:
        """Components ready for a pass, and the dtype of its tiles."""
        self.mode = choose_precision(self.candidates, components)
        self.reach = {t: safe_reach(t, components) for t in (torch.float32, torch.float64)}
        return torch_backend.prepare(components, self.mode), torch_backend.compute_dtype(self.mode)

    def e_step(
        self,
        components: Components,
        respond: torch_backend.Responder | None = None,
    ) -> Statistics:
        """Sufficient statistics of all samples about the means of the components."""
        prepared, dtype = self.prepare(components)
        tied = components.covariance_type == "tied"
        scatter = self.total_scatter(self.mode) if tied else None

        def run(size: int) -> Statistics:
            tiles = (tile for _, tile in self.tiles(size, dtype))
            return torch_backend.e_step(tiles, prepared, scatter, respond)

        return self.fitting(run, len(components.means))

    def fitting(self, run: Callable[[int], Result], n_components: int) -> Result:
        """Result of a pass by the size of its tiles; a size that did not fit is not tried again."""
        wanted = min(self.tile_rows(n_components), self.rows.n)
        result, size = with_fitting_tiles(run, wanted)
        if size < wanted:
            self.chunk_size = size
        return result

    def begin(self, components: Components) -> None:
        """Get ready for a burst of iterations from the given components."""

    def iterate(
        self, components: Components, count: int, reg_covar: float
    ) -> tuple[Components, Tensor]:
        """So many EM iterations, and the log-likelihood that each began with, (count,) float64.

        Raises
        ------
        IllDefinedCovarianceError
            When a covariance is not positive definite.
        """
        totals = []
        for _ in range(count):
            stats = self.e_step(components)
            components = self.m_step(stats, components, reg_covar)
            totals.append(stats.log_likelihood)
        return components, torch.stack(totals)

    def m_step(self, stats: Statistics, components: Components, reg_covar: float) -> Components:
        """Components of the next iteration, in the mode of the last pass."""
        if not self._mending:
            return m_step(stats, components, reg_covar, mode=self.mode)
        components, mended = mended_m_step(stats, components, reg_covar, self.mode)
        self.mended += mended
        return components

    def can_mend(self, covariance_type: str, reg_covar: float) -> bool:
        """Whether covariances that are indefinite may be so by rounding, see `mended_m_step`.

        Not in fp64 or without a ridge, where they are what scikit-learn refuses as well.
        """
        return covariance_type in ("tied", "full") and self.mode != "fp64" and reg_covar > 0

    def mend(self, covariance_type: str, reg_covar: float) -> bool:
        """From now on mend such covariances; whether that is a change."""
        changed = not self._mending and self.can_mend(covariance_type, reg_covar)
        self._mending |= changed
        return changed

    def widen(self) -> bool:
        """From now on only the most precise mode; whether that is a change."""
        changed = self.mode != self.candidates[-1]
        self.candidates = self.candidates[-1:]
        return changed

    def total_scatter(self, mode: str) -> Tensor:
        """`torch_backend.scatter` of all samples as the mode rounds them, computed once."""
        if mode not in self._scatters:
            dtype = torch_backend.compute_dtype(mode)
            tiles = (
                torch_backend.round_operand(tile, mode)
                for _, tile in self.tiles(self.tile_rows(1), dtype)
            )
            self._scatters[mode] = torch_backend.scatter(tiles, self.rows.d, self.device)
        return self._scatters[mode]

    def sample(self, size: int, rng: np.random.RandomState, mode: str) -> Tensor:
        """`size` distinct samples (or all) in the frame, in the order of the source."""
        dtype = torch_backend.compute_dtype(mode)
        if size >= self.rows.n:
            indices = torch.arange(self.rows.n, device=self.device)
        else:
            draw = torch.Generator(self.device).manual_seed(int(rng.randint(2**31)))
            order = torch.randperm(self.rows.n, generator=draw, device=self.device)
            indices = order[:size].sort().values
        if self._stays_on_device(dtype):
            return self.resident(dtype)[indices]
        return self.rows.take(indices.cpu().numpy(), self.frame, dtype, self.device)

    def kmeans_passes(self, size: int, rng: np.random.RandomState) -> Iterator[Pass]:
        """Assignment of `size` samples, in each precision that may run, cheapest first."""
        for mode in self.candidates:
            yield TorchPass(self.sample(size, rng, mode))

    def hard_step(self, components: Components) -> Statistics:
        """`e_step` with components so narrow that responsibilities are hard."""
        return self.e_step(components)

    def mean_log_likelihood(self, total: float) -> float:
        """Average log-density of the samples in the caller's units, from the sum in the frame."""
        return total / self.rows.n - self.frame.log_volume()


def check_reach(components: Components) -> None:
    """Refuse a start so far from the data that squared distances overflow."""
    reach = safe_reach(torch.float64, components)
    far = ~(components.means.abs() < reach).all(dim=1)
    if bool(far.any()):
        raise ValueError(
            f"means_init (or the last fit, with warm_start): mean {int(far.nonzero()[0])} lies too "
            "far from X for float64; give means within the range of the data."
        )


def _advised(error: IllDefinedCovarianceError, mode: str) -> IllDefinedCovarianceError:
    """The error with what serves data that a mode is too coarse for."""
    more = 'precision="auto" takes as much as they need.'
    if mode not in HALF_MODES:
        more = 'backend="torch" with precision="fp64" tells narrower ones apart.'
    return IllDefinedCovarianceError(
        f"{error} Products ran in {mode}: where the data are not to blame, {more}"
    )


class Run:
    """EM from one start: components, the bound at each iteration, and whether it converged.

    `previous` is the bound that the first iteration is compared with.
    """

    def __init__(self, components: Components, reg_covar: float, previous: float):
        self.components = components
        self.reg_covar = reg_covar
        self.previous = previous
        self.bounds: list[float] = []
        self.converged = False

    @property
    def bound(self) -> float:
        return self.bounds[-1] if self.bounds else -np.inf

    def iterate(self, engine: Engine, max_iter: int, tol: float) -> Iterator[float]:
        """Do the iterations, yielding the bound after each."""
        while len(self.bounds) < max_iter and not self.converged:
            for bound in self._steps(engine, min(engine.burst, max_iter - len(self.bounds))):
                self.bounds.append(bound)
                yield bound
                self.converged |= abs(bound - self.previous) < tol
                self.previous = bound

    def _steps(self, engine: Engine, count: int) -> list[float]:
        """Mean log-likelihoods of the next iterations, whose last components are kept."""
        start = self.components
        while True:
            try:
                return self._burst(engine, count)
            except IllDefinedCovarianceError as error:
                # Means that move far leave little of a narrow variance in low precision.
                if not (engine.widen() or engine.mend(start.covariance_type, self.reg_covar)):
                    if engine.mode == "fp64":
                        raise
                    raise _advised(error, engine.mode) from error
            self.components = start

    def _burst(self, engine: Engine, count: int) -> list[float]:
        """Several iterations, after which alone the host waits for the device."""
        engine.begin(self.components)
        self.components, totals = engine.iterate(self.components, count, self.reg_covar)
        return [engine.mean_log_likelihood(total) for total in totals.tolist()]
