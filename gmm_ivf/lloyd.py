"""k-means: first centres by k-means++, then Lloyd's iterations by any pass that assigns samples."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gmm_ivf.kernels import torch_backend
from gmm_ivf.memory import with_fitting_tiles

_COLUMN_ELEMENTS = 1 << 24
_SUM_ROWS = 1 << 14
_TOLERANCE = 1e-4
# k-means++ takes a pass for each centre, and few samples serve as well as all. Beyond so many
# centres the samples are dealt into groups that find their share of the centres side by side.
_PLUSPLUS_SAMPLES_PER_CENTER = 16
_GROUP_CENTERS = 256


class Pass(Protocol):
    """Lloyd's iterations over samples, `steps` of them a call, `iterations` at most."""

    sample: Tensor
    noise: float
    steps: int
    iterations: int

    def __call__(self, centers: Tensor, inertia: float) -> tuple[Tensor, Tensor, Tensor]:
        """New centres (K, D), and what the last iteration began with: samples of each centre (K,)
        and squared distances (n,). An empty cluster keeps its centre.
        """
        ...

    def pick(self, count: int, rng: np.random.RandomState) -> Tensor:
        """So many distinct rows of the sample."""
        ...

    def spread(self, members: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """See `spread_rows`."""
        ...

    def variance(self, inertia: float) -> float | None:
        """Of the equal components that assign as this pass does; None where none do."""
        ...


class TorchPass:
    """Assignment by torch, in the dtype of the sample.

    Parameters
    ----------
    sample : Tensor of shape (n, D)
    """

    steps = 1
    iterations = 25

    def __init__(self, sample: Tensor):
        self.sample = sample
        self.noise = torch.finfo(sample.dtype).eps * float(sample.square().sum(1).mean())

    def __call__(self, centers: Tensor, inertia: float) -> tuple[Tensor, Tensor, Tensor]:
        """Centres and counts in float64, squared distances in the dtype of the sample."""
        sample, means = self.sample, centers.to(self.sample.dtype)
        size = torch_backend.tile_rows(len(means), sample.shape[1], sample.device)
        parts, _ = with_fitting_tiles(
            lambda rows: [torch_backend.nearest_means(t, means) for t in sample.split(rows)], size
        )
        label, distance = (torch.cat(part) for part in zip(*parts, strict=True))
        sums, counts = sums_by_label(sample, label, len(means))
        moved = sums / counts.clamp_min(0.5)[:, None]
        return torch.where(counts[:, None] > 0.5, moved, centers), counts, distance

    def pick(self, count: int, rng: np.random.RandomState) -> Tensor:
        """So many distinct rows of the sample."""
        return torch.from_numpy(rng.permutation(len(self.sample))[:count]).to(self.sample.device)

    def spread(self, members: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """See `spread_rows`."""
        return spread_rows(members, count, seed)

    def variance(self, inertia: float) -> None:
        """None: assignment is exact."""


def lloyd(assign: Pass, n_components: int, rng: np.random.RandomState) -> tuple[Tensor, float]:
    """Centres of k-means on a sample, (K, D) float64, and the mean squared distance to them.

    Stops after the iterations of the pass, or when they improve the mean squared distance by less
    than 1e-4 of it each. An empty cluster moves to the sample farthest from its centre;
    with fewer distinct samples than clusters some stay empty.
    """
    sample = assign.sample
    centers, inertia = _first_centers(assign, n_components, rng)
    previous = float("inf")
    for _ in range(0, assign.iterations, assign.steps):
        centers, counts, distance = assign(centers, inertia)
        kept, centers = centers, _refill_empty(sample, centers, counts > 0.5, distance)
        inertia = float(distance.mean(dtype=torch.float64))
        if centers is kept and previous - inertia <= assign.steps * _TOLERANCE * inertia:
            break
        previous = inertia
    return centers, inertia


def _refill_empty(sample: Tensor, centers: Tensor, filled: Tensor, distance: Tensor) -> Tensor:
    """The centres, the empty ones of them moved to the samples farthest from theirs."""
    empty = (~filled).nonzero()[:, 0]
    if len(empty) == 0:
        return centers
    far, rows = distance.topk(min(len(empty), len(sample)))
    rows = rows[far > 0]
    if len(rows) == 0:
        return centers
    return centers.index_copy(0, empty[: len(rows)], sample[rows].to(centers.dtype))


def _first_centers(
    assign: Pass, n_components: int, rng: np.random.RandomState
) -> tuple[Tensor, float]:
    """Rows to start from, float64, by k-means++ on a part of the sample; their inertia there.

    The part lies in groups of equal size, each of which finds up to 256 of the centres.
    """
    sample = assign.sample
    n, d = min(len(sample), _PLUSPLUS_SAMPLES_PER_CENTER * n_components), sample.shape[1]
    groups = -(-n_components // _GROUP_CENTERS) if n >= 2 * n_components else 1
    size = n // groups
    members = sample[assign.pick(groups * size, rng)].reshape(groups, size, d)
    rows, closest = assign.spread(members, -(-n_components // groups), int(rng.randint(2**31)))
    # By turns from every group, so that none is short of more than one.
    chosen = torch.gather(members, 1, rows[:, :, None].expand(-1, -1, d)).transpose(0, 1)
    return chosen.reshape(-1, d)[:n_components].double(), float(closest.mean())


def spread_rows(members: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of each group drawn one after another by k-means++, without waiting for the device.

    A row is drawn with probability proportional to its squared distance from those before: the
    largest of ``distance / e`` is, for independent exponential e.

    Parameters
    ----------
    members : Tensor of shape (groups, size, D)
    count : int
        Rows wanted of each group.
    seed : int

    Returns
    -------
    rows : Tensor of shape (groups, count), int64
    closest : Tensor of shape (groups, size)
        Squared distances to the nearest of them.
    """
    noise = torch.Generator(members.device).manual_seed(seed)
    squares = members.square().sum(2)
    closest = torch.ones_like(squares)
    rows = []
    for number in range(count):
        race = torch.empty_like(closest).exponential_(generator=noise)
        row = (closest / race).argmax(1, keepdim=True)
        rows.append(row)
        center = torch.gather(members, 1, row[:, :, None].expand(-1, -1, members.shape[2]))
        distance = torch.baddbmm(squares[:, :, None], members, center.mT, alpha=-2)[:, :, 0]
        distance += center.square().sum(2)
        distance.clamp_min_(0).scatter_(1, row, 0)
        closest = distance if number == 0 else torch.minimum(closest, distance)
    return torch.cat(rows, dim=1), closest


def sums_by_label(sample: Tensor, label: Tensor, n_components: int) -> tuple[Tensor, Tensor]:
    """Sum and count of the samples of each label, float64; added in a fixed order.

    Up to 16,384 samples are added in their own dtype. On a GPU sorted runs, since the order of
    `index_add_` there is up to the hardware.
    """
    counts = torch.bincount(label, minlength=n_components)
    if sample.device.type == "cpu":
        sums = torch.zeros(n_components, sample.shape[1], dtype=torch.float64)
        for part, of in zip(sample.split(_SUM_ROWS), label.split(_SUM_ROWS), strict=True):
            sums += torch.zeros_like(sums, dtype=part.dtype).index_add_(0, of, part)
        return sums, counts.double()
    order = torch.argsort(label, stable=True)
    columns = sample.split(max(1, _COLUMN_ELEMENTS // len(sample)), dim=1)
    sums = [
        torch.segment_reduce(part[order].double(), "sum", lengths=counts, axis=0)
        for part in columns
    ]
    return torch.cat(sums, dim=1), counts.double()
