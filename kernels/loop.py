"""EM iterations in place: the memory of one iteration serves all, and a CUDA graph replays them."""

from dataclasses import replace

import torch
from torch import Tensor

from gmm_ivf.kernels import em
from gmm_ivf.kernels.components import Components, m_step, mended_m_step
from gmm_ivf.kernels.launch import about_means, capture, log_total
from gmm_ivf.kernels.operands import Samples, prepare
from gmm_ivf.kernels.sweep import sweep_sums
from gmm_ivf.kernels.update import UPDATED_TYPES, update

# Rows of the largest batches of triangular systems that torch leaves to cuBLAS; larger ones go to
# MAGMA, which waits for the device.
_LARGEST_BATCHED = 512
_PARAMETERS = ("weights", "means", "covariances", "precisions_cholesky")


def is_captured(components: Components) -> bool:
    """Whether iterations become a CUDA graph: no part of them waits for the device."""
    few = components.means.shape[1] <= _LARGEST_BATCHED
    return components.means.is_cuda and (few or components.covariance_type != "full")


class Loop:
    """Iterations over staged samples; nothing in them waits for the device.

    On CUDA all bursts but the first are replays of a graph of one iteration. The first runs launch
    by launch, which compiles and loads the kernels; so do all for full covariances of over 512
    features.

    Parameters
    ----------
    samples : Samples
    components : Components
        Those to start from, which are copied.
    reg_covar : float
        Added to the diagonal of each covariance, in squared units of the samples.
    frozen : bool, default=False
        Only the means change; for spherical and diag.
    fused : bool, optional
        Which kernels to run; by default the faster ones for the number of features.
    mending : bool, default=False
        M-steps are `components.mended_m_step`, for which every iteration waits for the device.

    Attributes
    ----------
    norm : Tensor of shape (rows,), float32
        Log-normalisers of the samples that the last iteration found; see `kernels.launch.Rows`.
    counts : Tensor of shape (K,), float64
        Sums of responsibilities that it found.
    mending : bool
    mended : int
        Covariances mended in the last run.
    """

    counts: Tensor
    mended: int = 0

    def __init__(
        self,
        samples: Samples,
        components: Components,
        reg_covar: float,
        *,
        frozen: bool = False,
        fused: bool | None = None,
        mending: bool = False,
    ):
        self.samples = samples
        self._frozen = frozen
        self.mending = mending
        self.reg_covar = reg_covar
        prepared = prepare(components, samples.mode, fused=fused)
        self.prepared = replace(prepared, components=components.copy())
        device = samples.values.device
        self._reg_covar = torch.full((1,), reg_covar, dtype=torch.float64, device=device)
        self.norm = samples.empty_rows()
        self._forget()
        self._partials = em.partials(samples, self.prepared) if self.prepared.fused else None
        self._captured = is_captured(components) and not mending
        self._warm = False
        # With the place of its result.
        self._graph: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def restart(self, components: Components) -> None:
        """Go on from other components, of the same type and shape."""
        self._overwrite(components)
        self._forget()

    def _forget(self) -> None:
        """Guess normalisers of 1: those of rows for which a guess is far off are computed twice."""
        self.norm[: self.samples.n] = 0

    def components(self) -> Components:
        """A copy of the components reached."""
        return self.prepared.components.copy()

    def run(self, count: int) -> Tensor:
        """So many iterations; the log-likelihood that each began with, (count,) float64."""
        totals, self.mended = self._reg_covar.new_empty(count), 0
        if self._captured and self._warm and self._graph is None:
            with torch.cuda.device(self.norm.device):
                self._graph = capture(self._iterate)
        for i in range(count):
            if self._graph is None:
                totals[i] = self._iterate()
            else:
                graph, total = self._graph
                graph.replay()
                totals[i] = total
        self._warm = True
        return totals

    def _iterate(self) -> Tensor:
        """One iteration; the log-likelihood before it."""
        samples, prepared = self.samples, self.prepared
        if self._partials is None:
            rows, sums = sweep_sums(samples, prepared, None)
        else:
            # Distances in units of a narrow variance change by more than a guess may be off.
            shift = None if self._frozen else self.norm
            rows = em.row_pass(samples, prepared, shift=shift, out=self.norm)
            sums = em.moments(samples, rows, prepared, scratch=self._partials)
        self.norm, self.counts = rows.norm, sums.count
        if prepared.components.covariance_type in UPDATED_TYPES:
            update(prepared, sums, self._reg_covar, frozen=self._frozen)
            return log_total(samples, rows)
        statistics = about_means(samples, rows, prepared, sums)
        old, mode = prepared.components, prepared.mode
        if self.mending:
            new, mended = mended_m_step(statistics, old, self.reg_covar, mode)
            self.mended += mended
        else:
            new = m_step(statistics, old, self.reg_covar, check=False, mode=mode)
        self._overwrite(new)
        return statistics.log_likelihood

    def _overwrite(self, components: Components) -> None:
        """Copy the values of these components, and of their staged form."""
        prepared = self.prepared
        new = prepare(components, prepared.mode, fused=prepared.fused)
        for name in _PARAMETERS:
            getattr(prepared.components, name).copy_(getattr(components, name))
        for name in ("linear", "tail", "gain", "offset"):
            getattr(prepared, name).copy_(getattr(new, name))
        if prepared.quadratic is not prepared.linear:
            prepared.quadratic.copy_(new.quadratic)
