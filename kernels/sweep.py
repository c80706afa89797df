"""One sweep of the chunked EM kernels over the samples: any number of features."""

from typing import Any

import torch
from torch import Tensor

from gmm_ivf.kernels import chunked
from gmm_ivf.kernels.full import FullMoments, FullSweep
from gmm_ivf.kernels.launch import Configs, Rows, Sums
from gmm_ivf.kernels.operands import Prepared, Samples
from gmm_ivf.kernels.passes import Moments, Sweep

# Block sizes of the kernel that reads whole rows of logits.
TOP: dict[str, Any] = {"BLOCK_N": 8, "BLOCK_K": 128, "num_warps": 4}


def _sweep(
    samples: Samples, prepared: Prepared, configs: Configs, dtype: torch.dtype | None = None
) -> Sweep | FullSweep:
    if prepared.components.covariance_type == "full":
        return FullSweep(samples, prepared, configs)
    # fp16x3 multiplies by both parts of a responsibility.
    stored = torch.float32 if samples.mode == "fp16x3" else samples.values.dtype
    return Sweep(samples, prepared, configs, dtype or stored)


def sweep_rows(samples: Samples, prepared: Prepared, configs: Configs = None) -> Rows:
    """Log-normalisers."""
    sweep = _sweep(samples, prepared, configs)
    norm = samples.empty_rows()
    for start, chunk in sweep.chunks():
        sweep.norms(start, chunk, norm)
    return Rows(norm)


def sweep_sums(
    samples: Samples, prepared: Prepared, rows: Rows | None, configs: Configs = None
) -> tuple[Rows, Sums]:
    """Sums about the origin, and the log-normalisers unless they are given."""
    sweep = _sweep(samples, prepared, configs)
    norm = rows.norm if rows else samples.empty_rows()
    moments = FullMoments(sweep) if isinstance(sweep, FullSweep) else Moments(sweep)
    for start, chunk in sweep.chunks():
        sweep.shares(start, chunk, norm, rows is not None)
        moments.add(start, chunk)
    return Rows(norm), moments.totals()


def sweep_top(
    samples: Samples, prepared: Prepared, m: int, configs: Configs = None
) -> tuple[Rows, Tensor, Tensor]:
    """Log-normalisers, and the m best components with their log-posteriors, (N, m)."""
    sweep = _sweep(samples, prepared, configs, torch.float32)
    norm = samples.empty_rows()
    components, device = prepared.components.means.shape[0], norm.device
    ids = torch.full((samples.n, m), -1, dtype=torch.int64, device=device)
    log_resp = torch.empty(samples.n, m, dtype=torch.float32, device=device)
    for start, chunk in sweep.chunks():
        logits = sweep.logits(start, chunk)
        chunked.top_kernel[(chunk // TOP["BLOCK_N"],)](
            logits, norm, ids, log_resp, start, samples.n, sweep.k, components, m, **TOP
        )
    return Rows(norm), ids, log_resp
