"""Truncated EM by the Triton kernels over samples that stay on the GPU."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gmm_ivf.kernels import em, truncated
from gmm_ivf.kernels.components import Components, precisions_cholesky
from gmm_ivf.kernels.launch import Rows
from gmm_ivf.kernels.neighbourhood import order_components
from gmm_ivf.kernels.operands import FUSED_FEATURES, Samples, is_fused
from gmm_ivf.kernels.tuning import Config
from gmm_ivf.params import Frame
from gmm_ivf.rows import Rows as Source
from gmm_ivf.triton_engine import TritonEngine
from gmm_ivf.truncation import CHOSEN_SHARE, Record

# Most iterations of a burst, of which the last chooses anew.
_LONGEST_BURST = 8
# Most bursts that keep to the bound before bursts become longer again.
_LONGEST_PATIENCE = 8
# One tile in so many is measured in the other iterations, but no fewer than this many tiles.
_MEASURED_STEP = 32
_MEASURED_TILES = 64
# With a larger share of the components to visit, exact EM is hardly dearer.
_LARGEST_SHARE = 0.3
# Most exact bursts before truncation is tried again where tiles needed many blocks.
_LONGEST_REST = 8


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
    choice of the tiles, one in 32. What was left out is looked at after the burst: the first
    iteration that exceeds the bound is done again with all components, those after it are dropped,
    and the next bursts are shorter. Where tiles need many blocks, bursts are exact for a while.
    """

    _order: Tensor
    _shape: Config
    _lists: truncated.Lists

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
        self.bound = bound
        self.record = Record()
        self._restart()

    def _restart(self) -> None:
        self.burst = _LONGEST_BURST
        self._sorted: Samples | None = None
        self._chosen = False
        self._sound, self._patience = 0, 1
        self._rest, self._next_rest = 0, 1
        self._draws = np.random.default_rng(0)

    def iterate(
        self, components: Components, count: int, reg_covar: float
    ) -> tuple[Components, Tensor]:
        """See `Engine.iterate`; may stop early, after an iteration with all components."""
        if self.record.begin(components):
            self._restart()
        if self._rest or self._mending:
            self._rest = max(0, self._rest - 1)
            return self._exactly(components, count, reg_covar)
        if self._samples is None or self._samples is not self._sorted:
            self._enter(components)
            if float(self._lists.visited()) > _LARGEST_SHARE:
                self._tire()
                return self._exactly(components, count, reg_covar)
        states, table = self._attempt(components, count, reg_covar)
        # Written so that a loss that is not a number fails as well.
        sound = [row[2] <= self.bound for row in table]
        good = sound.index(False) if False in sound else count
        reached = truncated.reorder(states[good], self._order.argsort())
        self._settle(good == count)
        if good < count:
            return self._exactly(reached, 1, reg_covar, table[:good])
        precisions_cholesky(reached.covariances, reached.covariance_type)
        self.record.add([row[1:] for row in table], reached)
        if table[-1][3] > _LARGEST_SHARE:
            self._tire()
        return reached, reached.means.new_tensor([row[0] for row in table])

    def _staged_in(self, mode: str) -> Samples:
        if self._samples is not None and self._samples.mode != mode:
            # Sorted ones of the old mode would stay beside those that are staged.
            self._sorted = None
        return super()._staged_in(mode)

    def _settle(self, sound: bool) -> None:
        """Bursts of half the length after one that exceeded the bound, longer after some others."""
        self._chosen = sound
        if not sound:
            self.burst = max(1, self.burst // 2)
            self._sound, self._patience = 0, min(2 * self._patience, _LONGEST_PATIENCE)
            return
        self._sound += 1
        if self._sound >= self._patience:
            self.burst, self._sound = min(2 * self.burst, _LONGEST_BURST), 0

    def _tire(self) -> None:
        """Leave truncation alone for a while, longer each time."""
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        self._sorted = None

    def _exactly(
        self, components: Components, count: int, reg_covar: float, before: Sequence[list] = ()
    ) -> tuple[Components, Tensor]:
        """Iterations with all components, after some without."""
        reached, totals = super().iterate(components, count, reg_covar)
        whole = [[0.0, 0.0, 1.0]] * count
        self.record.add([row[1:] for row in before] + whole, reached)
        return reached, torch.cat([totals.new_tensor([row[0] for row in before]), totals])

    def _enter(self, components: Components) -> None:
        """Order components and samples, and choose the blocks of each tile."""
        samples = self._samples or self._staged(components)
        self._order = order_components(components)
        prepared = self._ordered(components)
        self._shape = truncated.shape_for(samples, prepared)
        rows, best = truncated.find(samples, prepared, self._shape)
        place = best.argsort(stable=True)
        samples = self._samples = self._sorted = truncated.sort_samples(samples, place)
        guess = samples.empty_rows()
        guess[: samples.n] = rows.norm[place]
        self._choose(samples, prepared, Rows(guess))

    def _ordered(self, components: Components) -> em.Prepared:
        return em.prepare(truncated.reorder(components, self._order), self.mode)

    def _choose(self, samples: Samples, prepared: em.Prepared, guess: Rows) -> Rows:
        """Choose the blocks of each tile; the log-normalisers over all components."""
        exact, mass = truncated.weigh(samples, prepared, guess, self._shape)
        share = CHOSEN_SHARE * self.bound
        self._lists = truncated.choose_lists(mass, share, self._shape.block_n)
        self._chosen = True
        return exact

    def _attempt(
        self, components: Components, count: int, reg_covar: float
    ) -> tuple[list[Components], list[list[float]]]:
        """Components in order before and after each iteration, and what each iteration measured.

        That is the log-likelihood (where blocks are chosen, as in the last one; in the others the
        lower bound) and the entries of `Record.rows`.
        """
        samples = self._samples or self._staged(components)
        prepared = self._ordered(components)
        states, found = [], []
        for number in range(count):
            # The components may be overwritten.
            states.append(prepared.components.copy())
            exact = None
            kept = truncated.listed_rows(samples, prepared, self._lists, self._shape)
            if number == count - 1 or not self._chosen:
                exact = self._choose(samples, prepared, kept)
                kept = truncated.listed_rows(samples, prepared, self._lists, self._shape)
            lost = self._loss(samples, prepared, exact, kept)
            sums = truncated.listed_sums(samples, kept, prepared, self._lists, self._shape)
            prepared, total = truncated.advance(samples, kept, prepared, sums, reg_covar)
            if exact is not None:
                total = total + lost[1] * samples.n
            found.append(torch.cat([total[None], lost, self._lists.visited()[None]]))
        return [*states, prepared.components], torch.stack(found).tolist()

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
