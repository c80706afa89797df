"""EM passes by the Triton kernels over samples that stay on the GPU."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gmm_ivf.engine import Engine
from gmm_ivf.kernels import em, torch_backend
from gmm_ivf.kernels.components import Components, Statistics
from gmm_ivf.kernels.dispatch import choose_precision
from gmm_ivf.kernels.hard import HardPass
from gmm_ivf.kernels.operands import Samples
from gmm_ivf.lloyd import Pass, TorchPass


class TritonEngine(Engine):
    """Passes over all samples, which lie on the device in the storage type of the mode.

    The mode is chosen at the beginning of each burst, so that no iteration within it waits for the
    device. Starts (any other responder than that of EM) run on torch, tile by tile.
    """

    backend = "triton"
    burst = 4

    _samples: Samples | None = None
    _norm: Tensor | None = None

    def begin(self, components: Components) -> None:
        """Choose the mode and stage the samples in it."""
        self._staged(components)

    def _staged(self, components: Components) -> Samples:
        self.mode = choose_precision(self.candidates, components)
        if self._samples is None or self._samples.mode != self.mode:
            self._norm = None
            self._samples = em.stage(self._whole(), self.mode)
            # What the start read of them may go.
            self._resident.clear()
        return self._samples

    def _whole(self) -> Tensor:
        if self.device.type == "cuda" and not self._stays_on_device(torch.float32):
            needed = self.rows.n * self.rows.d * 4 / 2**30
            raise ValueError(
                f'backend="triton" keeps all samples on the device, and {needed:.1f} GiB are too '
                'many for the memory that is free; use backend="torch", which streams them.'
            )
        return self.resident(torch.float32)

    def kmeans_passes(self, size: int, rng: np.random.RandomState) -> Iterator[Pass]:
        """By the kernels first; by torch in float32 where the data are too tight for them."""
        mode = self.candidates[0]
        yield HardPass(self.sample(size, rng, mode), mode)
        yield TorchPass(self.sample(size, rng, mode))

    def e_step(
        self,
        components: Components,
        respond: torch_backend.Responder | None = None,
    ) -> Statistics:
        """Sufficient statistics of all samples about the means of the components."""
        if respond is not None:
            return super().e_step(components, respond)
        samples = self._samples or self._staged(components)
        prepared = em.prepare(components, self.mode)
        # The last normalisers are a good guess of these, which saves a running maximum.
        rows, stats = em.e_step(samples, prepared, shift=self._norm)
        self._norm = rows.norm
        return stats
