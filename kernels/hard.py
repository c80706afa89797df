"""Hard assignment by the EM kernels: the limit of the soft one for equal narrow components."""

import math

import torch
from torch import Tensor

from gmm_ivf.kernels import em
from gmm_ivf.kernels.components import Components
from gmm_ivf.kernels.operands import LN2
from gmm_ivf.kernels.spread import spread

# Nats by which the density falls off from a mean to a sample at the mean distance from it. A second
# mean counts only where the two squared distances differ by less than half a percent.
_SHARPNESS = 512.0
# Logits of more nats than this have an error in float32 that shows in their power of 2: a percent.
_LARGEST_LOGIT = 2.0**18


class HardPass:
    """Assigns samples to their nearest means, and sums them, at the price of an EM iteration.

    Parameters
    ----------
    sample : Tensor of shape (n, D), float32
        Centred.
    mode : str
        Precision of the products.

    Attributes
    ----------
    sample : Tensor
    noise : float
        Squared distances below this are not told apart.
    """

    def __init__(self, sample: Tensor, mode: str):
        self.sample = sample
        self._mode = mode
        self._staged = em.stage(sample, mode)
        self._square = float(sample.square().sum(1).mean())
        self.noise = self._square / _LARGEST_LOGIT

    def __call__(self, centers: Tensor, inertia: float) -> tuple[Tensor, Tensor, Tensor]:
        """Counts and sums of the samples of each centre, and their squared distances.

        Parameters
        ----------
        centers : Tensor of shape (K, D), float64
        inertia : float
            Mean squared distance of the samples to their centres, about.

        Returns
        -------
        counts : Tensor of shape (K,), float64
        sums : Tensor of shape (K, D), float64
        distance : Tensor of shape (n,), float32
        """
        k, d = centers.shape
        variance = self.variance(inertia)
        components = Components.equal("spherical", centers, variance)
        rows, stats = em.e_step(self._staged, em.prepare(components, self._mode))
        density = rows.norm[: self._staged.n] * LN2
        constant = -math.log(k) - d / 2 * math.log(2 * math.pi * variance)
        distance = ((constant - density) * (2 * variance)).clamp_min_(0)
        return stats.s0, stats.s1 + stats.s0[:, None] * centers, distance

    def spread(self, members: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Rows by k-means++; see `gmm_ivf.kernels.spread`."""
        return spread(members, count, seed)

    def variance(self, inertia: float) -> float:
        """Variance at which responsibilities are hard."""
        return max(inertia / _SHARPNESS, self.noise, torch.finfo(torch.float32).tiny) / 2
