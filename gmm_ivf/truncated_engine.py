"""Truncated EM by the Triton kernels over samples that stay on the GPU."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gmm_ivf.kernels import em, truncated
from gmm_ivf.kernels.components import Components, Statistics
from gmm_ivf.kernels.launch import Rows
from gmm_ivf.kernels.neighbourhood import order_components
from gmm_ivf.kernels.operands import FUSED_FEATURES, Samples, is_fused
from gmm_ivf.kernels.tuning import Config
from gmm_ivf.params import Frame
from gmm_ivf.rows import Rows as Source
from gmm_ivf.triton_engine import TritonEngine
from gmm_ivf.truncation import CHOSEN_SHARE

# Most iterations of a burst, of which the last chooses anew.
_LONGEST_BURST = 8
# One tile in so many is measured in the other iterations, but no fewer than this many tiles.
_MEASURED_STEP = 32
_MEASURED_TILES = 64
# With a larger share of the components to visit, exact EM is not dearer.
_LARGEST_SHARE = 0.5


def check_truncation(covariance_type: str, modes: Sequence[str], d: int) -> None:
    """Raise ValueError for a problem that the kernels cannot truncate."""
    if not all(is_fused(covariance_type, mode, d) for mode in modes):
        allowed = {kind: most for kind, most in FUSED_FEATURES.items() if most}
        raise ValueError(
            "truncation: the Triton kernels truncate the covariance types and up to the numbers of "
            f"features {allowed}, in any precision but fp32; got covariance_type="
            f"{covariance_type!r} with {d} features in {'/'.join(modes)}. Set truncation=None, or "
            'backend="torch".'
        )


class TruncatedEngine(TritonEngine):
    """Passes in which a tile of samples meets only the blocks of components it needs.

    Components are taken in an order of neighbourhood, and samples lie in the order of their
    likeliest component. The last iteration of a burst computes all log-densities and chooses the
    blocks of each tile anew; the others visit those, and measure what that leaves out on a random
    choice of the tiles, one in 32. Bursts become shorter when they leave out more than the bound.
    """

    burst = _LONGEST_BURST

    _sorted: Samples | None = None
    _order: Tensor
    _shape: Config
    _lists: truncated.Lists
    _chosen = False
    _pays = True

    def __init__(
        self,
        rows: Source,
        frame: Frame,
        device: torch.device,
        candidates: tuple[str, ...],
        chunk_size: int | None,
        bound: float,
    ):
        super().__init__(rows, frame, device, candidates, chunk_size)
        self.bound_on_loss = bound

    def restart(self) -> None:
        """Forget what was chosen for another start."""
        self._sorted = None
        self._pays = True
        self.burst = _LONGEST_BURST
        self._draws = np.random.default_rng(0)

    def begin(self, components: Components) -> None:
        """Choose the mode, and have the samples in it, sorted by their likeliest component."""
        super().begin(components)
        if self._samples is not self._sorted:
            self._sort(components)

    def _sort(self, components: Components) -> None:
        samples = self._samples or self._staged(components)
        self._order = order_components(components)
        prepared = em.prepare(truncated.reorder(components, self._order), self.mode)
        self._shape = truncated.shape_for(samples, prepared)
        rows, best = truncated.find(samples, prepared, self._shape)
        place = best.argsort(stable=True)
        self._samples = self._sorted = truncated.sort_samples(samples, place)
        self._norm = self._samples.empty_rows()
        self._norm[: samples.n] = rows.norm[place]
        self._chosen = False

    def attempt(self, components: Components, last: bool) -> tuple[Statistics, Tensor]:
        """Statistics of the visited components about the means, and what is left out."""
        samples, guess = self._sorted, self._norm
        if samples is None or guess is None or not (self._pays or last):
            stats = self.e_step(components)
            return stats, stats.s0.new_tensor([0.0, 0.0, 1.0])
        prepared = em.prepare(truncated.reorder(components, self._order), self.mode)
        exact = None
        if last or not self._chosen:
            exact, mass = truncated.weigh(samples, prepared, Rows(guess), self._shape)
            self._lists = truncated.choose_lists(mass, CHOSEN_SHARE * self.bound_on_loss)
            self._chosen = True
        kept = truncated.listed_rows(samples, prepared, self._lists, self._shape)
        lost = self._loss(samples, prepared, exact, kept)
        stats = truncated.listed_step(samples, kept, prepared, self._lists, self._shape)
        if exact is not None:
            missing = lost[1] * samples.n
            stats = replace(stats, log_likelihood=stats.log_likelihood + missing)
        self._norm = kept.norm
        stats = truncated.restore(stats, self._order, components.covariance_type)
        return stats, torch.cat([lost, self._lists.visited()[None]])

    def _loss(
        self, samples: Samples, prepared: em.Prepared, exact: Rows | None, kept: Rows
    ) -> Tensor:
        """Discarded mass and nats per sample; without all normalisers an estimate, unbiased."""
        if exact is not None:
            return truncated.discarded(exact, kept, samples.n)
        tiles = -(-samples.n // self._shape.block_n)
        step = max(1, min(_MEASURED_STEP, tiles // _MEASURED_TILES))
        start = int(self._draws.integers(step))
        exact = truncated.remeasured(samples, prepared, kept, self._shape, start, step)
        return truncated.discarded(exact, kept, samples.n) * step

    def settle(self, sound: bool, visited: float) -> None:
        """Shorter bursts after one that left out too much, and exact ones where lists are long."""
        self.burst = min(2 * self.burst, _LONGEST_BURST) if sound else max(1, self.burst // 2)
        self._chosen = sound
        self._pays = visited <= _LARGEST_SHARE
