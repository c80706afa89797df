"""What the launchers of the EM kernels share: checks, block sizes, totals in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gmm_ivf.kernels.blocks import log_total_kernel, total_kernel, total_tail_kernel
from gmm_ivf.kernels.components import Statistics
from gmm_ivf.kernels.operands import NORM_SCALE, Prepared, Samples, scatter
from gmm_ivf.kernels.tuning import SAFE_SHARED_BYTES, Config, Problem, choose

Result = TypeVar("Result")
# Rows that a program adds up for the log-likelihood.
LOG_TOTAL: dict[str, Any] = {"ROWS": 4096, "BLOCK": 1024}

# Block sizes by job ("row", "moment", "logit", "sum") in place of the tuned ones.
Configs = Mapping[str, Config] | None


@dataclass(frozen=True)
class Rows:
    """Result of a row pass.

    Attributes
    ----------
    norm : Tensor of shape (rows,), float32
        Base-2 logarithm of the sum of the powers of 2 of a row's logits (see `kernels.blocks`),
        with the padding of the samples. A good `shift` for the row pass of the next iteration.
    """

    norm: Tensor


@dataclass(frozen=True)
class Sums:
    """Sums over samples about the origin, float64, without padding.

    Attributes
    ----------
    count : Tensor of shape (K,)
        Responsibilities.
    first : Tensor of shape (K, D)
        r x
    second : Tensor
        r |x|^2, (K,), for spherical; r x^2, (K, D), for diag; for full r (x - mean)(x - mean)^T,
        (K, D, D), already about the means; unused by tied.
    """

    count: Tensor
    first: Tensor
    second: Tensor


def device_limits(device: torch.device) -> tuple[str, int, int]:
    """Name, shared memory of a block and number of multiprocessors; safe ones for no GPU."""
    if device.type != "cuda":
        return "", SAFE_SHARED_BYTES, 8
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", SAFE_SHARED_BYTES)
    return found.name, shared, found.multi_processor_count


def config_for(job: str, samples: Samples, prepared: Prepared, configs: Configs) -> Config:
    """Block sizes of a job: those given, else the tuned ones, else the default."""
    if configs and job in configs:
        return configs[job]
    gpu, shared, _ = device_limits(samples.values.device)
    problem = Problem(
        job,
        prepared.components.covariance_type,
        prepared.mode,
        prepared.components.means.shape[0],
        prepared.linear.shape[-1],
    )
    return choose(problem, gpu, shared)


def specialise(prepared: Prepared, config: Config) -> dict[str, Any]:
    """Compile-time arguments that kernels share."""
    bound = {"maxnreg": config.registers} if config.registers else {}
    return bound | {
        "COV": prepared.components.covariance_type,
        "MODE": prepared.mode,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def tiles(matrix: Tensor, width: int, rows: int, columns: int) -> TensorDescriptor:
    """A matrix as the kernels load it, (rows, columns) values at a time.

    On a Hopper GPU one instruction of one thread fetches a tile, which leaves registers and issue
    slots to the others; elsewhere Triton makes pointers of it.

    Parameters
    ----------
    matrix : Tensor of shape (P, n, stride) or (n, stride)
        The rows of part p begin at row p n. Rows are multiples of 16 bytes.
    width : int
        Columns from here on read as 0, and so do rows past the last part.
    rows, columns : int
        Of a tile.
    """
    stride = matrix.shape[-1]
    shape = [matrix.numel() // stride, width]
    return TensorDescriptor(matrix, shape, [stride, 1], [rows, columns])


def sample_tiles(samples: Samples, rows: int, columns: int) -> tuple[TensorDescriptor, int]:
    """`tiles` of the samples without their tails, and the row at which the low parts begin."""
    parts, padded, _ = samples.values.shape
    return tiles(samples.values, samples.width, rows, columns), padded * (parts - 1)


def component_tiles(
    prepared: Prepared, rows: int, columns: int
) -> tuple[TensorDescriptor, TensorDescriptor, int]:
    """`tiles` of what rows and their squares are multiplied by, and where the low parts begin."""
    parts, k, wide = prepared.linear.shape
    linear, quadratic = prepared.linear, prepared.quadratic
    both = tiles(linear, wide, rows, columns), tiles(quadratic, wide, rows, columns)
    return *both, k * (parts - 1)


def check_match(samples: Samples, prepared: Prepared) -> None:
    """Raise ValueError where samples and components were not staged for each other."""
    wanted = (samples.mode, samples.n_features, samples.values.device)
    got = (prepared.mode, prepared.components.means.shape[1], prepared.linear.device)
    if wanted != got:
        raise ValueError(
            f"samples and components must share mode, number of features and device, got "
            f"{wanted} and {got}; stage and prepare them alike."
        )


def _steps(slabs: int, values: int) -> dict[str, Any]:
    """Block sizes of a total: nearly always all slabs in one step, so that no load waits."""
    step = min(64, triton.next_power_of_2(slabs))
    return {"SLABS": step, "BLOCK": values // step}


def total(partial: Tensor, prepared: Prepared) -> Tensor:
    """Sum over the slabs in float64, without the padding and the lift of the responsibilities."""
    out = torch.empty(partial.shape[1:], dtype=torch.float64, device=partial.device)
    slabs, size = len(partial), out.numel()
    flags = _steps(slabs, 2048)
    total_kernel[(-(-size // flags["BLOCK"]),)](partial, out, slabs, size, **flags)
    return out[: prepared.components.means.shape[0]]


def total_tail(partial: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
    """`total` of the sums of r times the tails of the samples: those of r and of r |x|^2."""
    slabs, padded, _ = partial.shape
    k = prepared.components.means.shape[0]
    count, square = torch.empty(2, k, dtype=torch.float64, device=partial.device)
    flags = {"SCALE": 2 * NORM_SCALE, **_steps(slabs, 512)}
    total_tail_kernel[(-(-k // flags["BLOCK"]),)](partial, count, square, slabs, k, padded, **flags)
    return count, square


def log_total(samples: Samples, rows: Rows) -> Tensor:
    """Sum of the log-normalisers in natural units, a float64 scalar.

    That is the log-likelihood, but for the row term of tied covariances.
    """
    programs = -(-samples.n // LOG_TOTAL["ROWS"])
    out = torch.empty(programs, dtype=torch.float64, device=rows.norm.device)
    log_total_kernel[(programs,)](rows.norm, out, samples.n, **LOG_TOTAL)
    return out.sum()


@cache
def _side_stream(device: int, _thread: int) -> torch.cuda.Stream:
    """One for all captures of a thread: cuBLAS keeps 32 MiB for every stream it ever worked on."""
    return torch.cuda.Stream(device)


def capture(work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of the launches of `work`, of which none runs yet, and what it returned.

    `torch.cuda.graph` would give all unused memory of the process back first, which costs as much
    as several iterations.
    """
    graph, stream = torch.cuda.CUDAGraph(), _side_stream(torch.cuda.current_device(), get_ident())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, result


def about_means(samples: Samples, rows: Rows, prepared: Prepared, sums: Sums) -> Statistics:
    """Statistics about the means from sums about the origin, K-sized work in float64."""
    c = prepared.components
    means, s0 = c.means, sums.count
    s1 = sums.first - s0[:, None] * means
    log_likelihood = log_total(samples, rows)
    if c.covariance_type == "tied":
        scattered = scatter(samples)
        s2 = torch.addmm(scattered, sums.first.T, means, alpha=-1).addmm_(means.T, s1, alpha=-1)
        factor = c.precisions_cholesky
        log_likelihood = log_likelihood - torch.sum((factor.T @ scattered) * factor.T) / 2
    elif c.covariance_type == "full":
        s2 = sums.second
    else:
        moved = means * (2 * s1 + s0[:, None] * means)
        s2 = sums.second - (moved.sum(1) if c.covariance_type == "spherical" else moved)
    return Statistics(log_likelihood, s0, s1, s2)
