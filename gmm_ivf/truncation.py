"""EM that leaves out components of little responsibility, within a bound that is measured.

With responsibilities normalised over the components that are kept, an iteration improves a lower
bound on the log-likelihood. The bound lies lower by the mean over the samples of
``-log(1 - discarded mass)``, so that no iteration can lose more likelihood than that, and neither
can the fit, against exact EM, where it converges.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from gmm_ivf.engine import Engine, Run
from gmm_ivf.kernels import torch_backend
from gmm_ivf.kernels.components import Components, Statistics, m_step, precisions_cholesky
from gmm_ivf.params import Frame
from gmm_ivf.rows import Rows

# What is left out when components are chosen, as a share of the bound: responsibilities grow until
# they are chosen again.
CHOSEN_SHARE = 0.1
# With more left out it is no longer EM: k-means leaves out half and more where clusters overlap.
LARGEST_BOUND = 0.01


class Truncating(Protocol):
    """An engine whose E-steps can leave components out."""

    def restart(self) -> None:
        """Forget what was chosen for another start."""
        ...

    def begin(self, components: Components) -> None:
        """Get ready for a burst of iterations from the given components."""
        ...

    def attempt(self, components: Components, last: bool) -> tuple[Statistics, Tensor]:
        """Statistics of kept components, and what is left out.

        The log-likelihood is that of all components in the `last` iteration of a burst. The second
        result holds the discarded mass per sample, the mean of ``-log(1 - mass)`` in nats, and the
        share of components visited, (3,) float64; without waiting for the device.
        """
        ...

    def e_step(self, components: Components) -> Statistics:
        """Statistics of all components."""
        ...

    def settle(self, sound: bool, visited: float) -> None:
        """Learn whether the burst kept to its bound, and the share visited in the end."""
        ...


class TruncatedRun(Run):
    """EM from one start by a `Truncating` engine.

    What is left out is looked at after each burst: the first iteration that exceeds the bound is
    done again with all components, and those after it are dropped.

    Attributes
    ----------
    measured : list of list of float
        For each iteration the discarded mass per sample, the same in nats, and the share visited.
    """

    def __init__(self, components: Components, reg_covar: float, previous: float, bound: float):
        super().__init__(components, reg_covar, previous)
        self.bound_on_loss = bound
        self.measured: list[list[float]] = []

    def iterate(self, engine: Any, max_iter: int, tol: float) -> Iterator[float]:
        """Do the iterations, yielding the bound after each."""
        engine.restart()
        return super().iterate(engine, max_iter, tol)

    def _burst(self, engine: Any, count: int) -> list[float]:
        truncating: Truncating = engine
        truncating.begin(self.components)
        states, found = [self.components], []
        for number in range(count):
            stats, lost = truncating.attempt(states[-1], number == count - 1)
            states.append(m_step(stats, states[-1], self.reg_covar, False, truncating.mode))
            found.append(torch.cat([stats.log_likelihood[None], lost]))
        table = torch.stack(found).tolist()
        # Written so that a loss that is not a number fails as well.
        sound = [row[2] <= self.bound_on_loss for row in table]
        good = sound.index(False) if False in sound else count
        truncating.settle(good == count, table[-1][3])
        self.components = states[good]
        if good < count:
            stats = truncating.e_step(self.components)
            self.components = m_step(stats, self.components, self.reg_covar, mode=truncating.mode)
            table[good:] = [[float(stats.log_likelihood), 0.0, 0.0, 1.0]]
        else:
            precisions_cholesky(self.components.covariances, self.components.covariance_type)
        self.measured += [row[1:] for row in table]
        return [engine.mean_log_likelihood(row[0]) for row in table]


def new_run(
    components: Components, reg_covar: float, previous: float, truncation: float | None
) -> Run:
    """EM from one start, truncated or not."""
    if truncation is None:
        return Run(components, reg_covar, previous)
    return TruncatedRun(components, reg_covar, previous, truncation)


def truncation_report(run: Run) -> dict[str, Any]:
    """Entries of ``fit_report_`` about truncation; none of a run without it."""
    if not isinstance(run, TruncatedRun):
        return {}
    return {
        "discarded_mass": [row[0] for row in run.measured],
        "discarded_nats": [row[1] for row in run.measured],
        "visited_share": [row[2] for row in run.measured],
        "exact_iterations": sum(row[2] == 1 for row in run.measured),
    }


class TruncatedTorchEngine(Engine):
    """Truncation by torch: each sample keeps its likeliest components, chosen at each iteration.

    All responsibilities are computed, so that nothing is saved: it says what truncation does, where
    the Triton kernels do not run.
    """

    def __init__(
        self,
        rows: Rows,
        frame: Frame,
        device: torch.device,
        candidates: tuple[str, ...],
        chunk_size: int | None,
        bound: float,
    ):
        super().__init__(rows, frame, device, candidates, chunk_size)
        self.bound_on_loss = bound

    def restart(self) -> None:
        """Nothing is kept between iterations."""

    def attempt(self, components: Components, last: bool) -> tuple[Statistics, Tensor]:
        """Statistics of kept components about the means, exact log-likelihood, and the loss."""
        keep = _KeepLargest(CHOSEN_SHARE * self.bound_on_loss)
        stats = self.e_step(components, keep)
        return stats, keep.loss() / self.rows.n

    def settle(self, sound: bool, visited: float) -> None:
        """Nothing is adapted: the bound holds for each sample."""


class _KeepLargest:
    """Responder that drops the least responsibilities of a sample, up to a share of them."""

    def __init__(self, share: float):
        self.share = share
        self.sums: list[Tensor] = []

    def __call__(self, x: Tensor, prepared: torch_backend.Prepared) -> tuple[Tensor, Tensor]:
        density, resp = torch_backend.responsibilities(x, prepared)
        values, ids = resp.sort(dim=1)
        dropped = values.cumsum(1) <= self.share
        mass = values.masked_fill(~dropped, 0).sum(1)
        kept = values.masked_fill(dropped, 0)
        visited = (~dropped).double().mean(1)
        nats = -torch.log1p(-mass)
        self.sums.append(torch.stack([v.double().sum() for v in (mass, nats, visited)]))
        kept = kept / kept.sum(1, keepdim=True)
        return density, torch.zeros_like(resp).scatter_(1, ids, kept)

    def loss(self) -> Tensor:
        """Sums over the samples of discarded mass, nats and share kept."""
        return torch.stack(self.sums).sum(0)
