"""EM passes by the Triton kernels over samples that stay on the GPU."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gmm_ivf.engine import Engine
from gmm_ivf.kernels import em
from gmm_ivf.kernels.components import (
    Components,
    IllDefinedCovarianceError,
    Statistics,
    precisions_cholesky,
)
from gmm_ivf.kernels.dispatch import choose_precision
from gmm_ivf.kernels.hard import HardPass
from gmm_ivf.kernels.loop import Loop
from gmm_ivf.kernels.operands import Samples
from gmm_ivf.lloyd import Pass, TorchPass
from gmm_ivf.memory import needed


class TritonEngine(Engine):
    """Passes over all samples, which lie on the device in the storage type of the mode.

    The mode is chosen at the beginning of each burst, so that no iteration within it waits for the
    device. Starts (any other responder than that of EM) run on torch, tile by tile.
    """

    backend = "triton"
    burst = 4

    _samples: Samples | None = None
    _loop: Loop | None = None
    _reached: Components | None = None

    def loaded(self) -> Engine:
        """This engine, with the samples staged in the mode of the start, most often that of EM."""
        self._staged_in(self.candidates[0])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self

    def begin(self, components: Components) -> None:
        """Choose the mode and stage the samples in it."""
        self._staged(components)
        # What the start read of them may go.
        self._resident.clear()

    def _staged(self, components: Components) -> Samples:
        return self._staged_in(choose_precision(self.candidates, components))

    def _staged_in(self, mode: str) -> Samples:
        self.mode = mode
        if self._samples is None or self._samples.mode != self.mode:
            # Two modes need not fit at once.
            self._loop = self._samples = None
            whole = self._whole()
            # Two parts in the storage type, and copies on the way there.
            with needed("the samples that the kernels read", 4 * whole.numel()):
                self._samples = em.stage(whole, self.mode)
        return self._samples

    def _whole(self) -> Tensor:
        if self.device.type == "cuda" and not self._stays_on_device(torch.float32):
            wanted = self.rows.n * self.rows.d * 4 / 2**30
            raise ValueError(
                f'backend="triton" keeps all samples on the device, and {wanted:.1f} GiB are too '
                'many for the memory that is free; use backend="torch", which streams them.'
            )
        return self.resident(torch.float32)

    def kmeans_passes(self, size: int, rng: np.random.RandomState) -> Iterator[Pass]:
        """By the kernels first; by torch in float32 where the data are too tight for them.

        On at most half of the samples, but where that would be few: an iteration of k-means costs
        as much as one of EM here, and EM ends no worse.
        """
        mode = self.candidates[0]
        size = min(size, max(self.rows.n // 2, size // 8))
        yield HardPass(self.sample(size, rng, mode), mode)
        yield TorchPass(self.sample(size, rng, mode))

    def hard_step(self, components: Components) -> Statistics:
        """In the mode of the k-means: what its products cannot tell apart does not matter."""
        samples = self._staged_in(self.candidates[0])
        self._resident.clear()
        return em.e_step(samples, em.prepare(components, self.mode))[1]

    def iterate(
        self, components: Components, count: int, reg_covar: float
    ) -> tuple[Components, Tensor]:
        """See `Engine.iterate`; without mending covariances are looked at after the last only."""
        loop = self._loop_from(components, reg_covar)
        self._reached = None
        totals = loop.run(count)
        self.mended += loop.mended
        reached = loop.components()
        try:
            precisions_cholesky(reached.covariances, reached.covariance_type)
        except IllDefinedCovarianceError:
            return self._once_more(loop.samples, components, count, reg_covar)
        self._reached = reached
        return reached, totals

    def _once_more(
        self, samples: Samples, components: Components, count: int, reg_covar: float
    ) -> tuple[Components, Tensor]:
        """A burst that failed, by the kernels that compute logits once.

        Where variances are so narrow that logits are rounded by several bits, as those of a start
        from single samples, normalisers and responsibilities of the others differ by so many, and
        overflow. Looks after each iteration: a covariance that is none makes NaN of all others.
        """
        loop, totals, reached = Loop(samples, components, reg_covar, fused=False), [], components
        for _ in range(count):
            totals.append(loop.run(1))
            reached = loop.components()
            precisions_cholesky(reached.covariances, reached.covariance_type)
        return reached, torch.cat(totals)

    def _loop_from(self, components: Components, reg_covar: float) -> Loop:
        """The loop where it reached the components, else started from them."""
        samples = self._samples or self._staged(components)
        loop = self._loop
        if (
            loop is None
            or loop.samples is not samples
            or (loop.reg_covar, loop.mending) != (reg_covar, self._mending)
        ):
            # Covariances to mend may be as narrow as those of `_once_more`.
            fused = False if self._mending else None
            loop = Loop(samples, components, reg_covar, fused=fused, mending=self._mending)
            self._loop = loop
        elif components is not self._reached:
            loop.restart(components)
        return loop
