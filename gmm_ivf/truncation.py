"""EM that leaves out components of little responsibility, within a bound that is measured.

With responsibilities normalised over the components that are kept, an iteration improves a lower
bound on the log-likelihood. The bound lies lower by the mean over the samples of
``-log(1 - discarded mass)``, so that no iteration can lose more likelihood than that, and neither
can the fit, against exact EM, where it converges.
"""

from typing import Any

import torch
from torch import Tensor

from gmm_ivf.engine import Engine
from gmm_ivf.kernels import torch_backend
from gmm_ivf.kernels.components import Components
from gmm_ivf.params import Frame
from gmm_ivf.rows import Rows

# What is left out when components are chosen, as a share of the bound: responsibilities grow until
# they are chosen again, and each tenth less takes few components more.
CHOSEN_SHARE = 0.02
# With more left out it is no longer EM: k-means leaves out half and more where clusters overlap.
LARGEST_BOUND = 0.01


class Record:
    """What was left out in the iterations from one start.

    Attributes
    ----------
    rows : list of list of float
        For each iteration the discarded mass per sample, the mean of ``-log(1 - mass)`` in nats,
        and the share of components visited.
    """

    def __init__(self) -> None:
        self.rows: list[list[float]] = []
        self._reached: Components | None = None

    def begin(self, components: Components) -> bool:
        """Start anew unless the components are those reached; whether it does."""
        anew = components is not self._reached
        if anew:
            self.rows = []
        return anew

    def add(self, rows: list[list[float]], reached: Components) -> None:
        """Append iterations and what they reached."""
        self.rows += rows
        self._reached = reached


def truncation_report(engine: Engine) -> dict[str, Any]:
    """Entries of ``fit_report_`` about the last start; none of an engine that does not truncate."""
    record = getattr(engine, "record", None)
    if record is None:
        return {}
    return {
        "discarded_mass": [row[0] for row in record.rows],
        "discarded_nats": [row[1] for row in record.rows],
        "visited_share": [row[2] for row in record.rows],
        "exact_iterations": sum(row[2] == 1 for row in record.rows),
    }


class TruncatedTorchEngine(Engine):
    """Truncation by torch: each sample keeps its likeliest components, chosen at each iteration.

    All responsibilities are computed, so that nothing is saved, and likelihoods are exact: it says
    what truncation does where the Triton kernels do not run.
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
        self.share = CHOSEN_SHARE * bound
        self.record = Record()

    def iterate(
        self, components: Components, count: int, reg_covar: float
    ) -> tuple[Components, Tensor]:
        """See `Engine.iterate`; M-steps are over the components that a sample keeps."""
        self.record.begin(components)
        totals, lost = [], []
        for _ in range(count):
            keep = _KeepLargest(self.share)
            stats = self.e_step(components, keep)
            components = self.m_step(stats, components, reg_covar)
            totals.append(stats.log_likelihood)
            lost.append(keep.loss())
        self.record.add(torch.stack(lost).tolist(), components)
        return components, torch.stack(totals)


class _KeepLargest:
    """Responder that drops the least responsibilities of a sample, up to a share of them."""

    def __init__(self, share: float):
        self.share = share
        self.seen = 0
        self.sums: list[Tensor] = []

    def __call__(self, x: Tensor, prepared: torch_backend.Prepared) -> tuple[Tensor, Tensor]:
        density, resp = torch_backend.responsibilities(x, prepared)
        values, ids = resp.sort(dim=1)
        dropped = values.cumsum(1) <= self.share
        mass = values.masked_fill(~dropped, 0).sum(1)
        kept = values.masked_fill(dropped, 0)
        visited = (~dropped).double().mean(1)
        nats = -torch.log1p(-mass)
        self.seen += len(x)
        self.sums.append(torch.stack([v.double().sum() for v in (mass, nats, visited)]))
        kept = kept / kept.sum(1, keepdim=True)
        return density, torch.zeros_like(resp).scatter_(1, ids, kept)

    def loss(self) -> Tensor:
        """Means over the samples of discarded mass, nats and share kept, (3,) float64.

        Of samples seen: a pass that ran out of memory and was done again saw some twice.
        """
        return torch.stack(self.sums).sum(0) / self.seen
