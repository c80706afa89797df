"""Truncated EM: tiles of samples meet only the blocks of components that they need.

    order = order_components(components)                 once
    rows, best = find(samples, prepared)                 once, for `sort_samples`
    rows, mass = weigh(samples, prepared, rows)          now and then: exact, at the price of all K
    lists = choose_lists(mass, share, shape.block_n)
    kept = listed_rows(samples, prepared, lists)         each iteration: at the price of the lists
    sums = listed_sums(samples, kept, prepared, lists)
    prepared, total = advance(samples, kept, prepared, sums, reg_covar)

Responsibilities are normalised over the blocks of a tile's list (`kept`), so that what such EM
improves is a lower bound on the log-likelihood; `discarded` says how far below it lies. As in
`kernels.em` no launch waits for the host, nothing is atomic and the same input gives the same bits.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gmm_ivf.kernels import listed
from gmm_ivf.kernels.components import Components, m_step
from gmm_ivf.kernels.launch import (
    Rows,
    Sums,
    about_means,
    check_match,
    component_tiles,
    device_limits,
    log_total,
    sample_tiles,
    specialise,
    total,
)
from gmm_ivf.kernels.operands import LN2, Prepared, Samples, prepare
from gmm_ivf.kernels.tuning import ELEMENT_BYTES, MAX_ACCUMULATORS, Config, Problem, accumulators
from gmm_ivf.kernels.update import UPDATED_TYPES, update

# Programs of the accumulation per multiprocessor.
WAVES = 6
# Elements of the matrix of masses that are sorted at once.
_SORT_ELEMENTS = 1 << 24
# Tiles and blocks of all kernels of a fit, the largest that fits into shared memory; they share
# one shape, since lists are of such tiles and blocks.
SHAPES = (
    Config(128, 64, 4, 3),
    Config(128, 64, 4, 2),
    Config(128, 64, 8, 2),
    Config(128, 64, 8, 1),
    Config(64, 64, 4, 2),
    Config(64, 64, 8, 1),
    Config(32, 64, 4, 1),
    Config(16, 64, 4, 1),
)


@dataclass(frozen=True)
class Lists:
    """Which tiles of samples and blocks of components meet, from both sides.

    Attributes
    ----------
    tile_blocks : Tensor of shape (tiles, blocks), int32
        Blocks of each tile, the heaviest first; what follows the first `tile_counts` is void.
    tile_counts : Tensor of shape (tiles,), int32
    block_tiles : Tensor of shape (blocks, tiles + 1), int32
        Tiles of each block in ascending order; what follows the first `block_counts` is void.
    block_counts : Tensor of shape (blocks,), int32
    """

    tile_blocks: Tensor
    tile_counts: Tensor
    block_tiles: Tensor
    block_counts: Tensor

    def visited(self) -> Tensor:
        """Share of all pairs of a tile and a block that meet, a float64 scalar."""
        return self.tile_counts.sum(dtype=torch.float64) / self.tile_blocks.numel()


def shape_for(samples: Samples, prepared: Prepared) -> Config:
    """Rows of a tile, components of a block, warps and stages for these samples."""
    shared = device_limits(samples.values.device)[1]
    kind, mode = prepared.components.covariance_type, prepared.mode
    k, block_d = prepared.linear.shape[1:]
    size = ELEMENT_BYTES[mode]
    row = size * block_d * (2 if mode == "fp16x3" else 1)
    # Squares are made of a tile; products in tf32 want their operands laid out another way.
    copies = (2 if kind == "diag" else 0) + (2 if mode == "tf32" else 0)
    problem = Problem("moment", kind, mode, k, block_d)
    for shape in SHAPES:
        streamed = row * (shape.block_n + shape.block_k * (2 if kind == "diag" else 1))
        made = copies * size * block_d * shape.block_n + 2 * size * shape.block_n * shape.block_k
        if (
            streamed * shape.num_stages + made <= shared
            and accumulators(problem, shape) <= MAX_ACCUMULATORS
        ):
            return shape
    return SHAPES[-1]


def block_count(prepared: Prepared, shape: Config) -> int:
    """Blocks of components, without those that are all padding."""
    return -(-len(prepared.components.means) // shape.block_k)


def reorder(components: Components, order: Tensor) -> Components:
    """A copy of the components in another order."""
    c = components
    covariances, factors = c.covariances, c.precisions_cholesky
    if c.covariance_type == "tied":
        covariances, factors = covariances.clone(), factors.clone()
    else:
        covariances, factors = covariances[order], factors[order]
    return Components(c.covariance_type, c.weights[order], c.means[order], covariances, factors)


def sort_samples(samples: Samples, order: Tensor) -> Samples:
    """A copy of the samples in another order, (N,) int64."""
    values, half_norm = torch.zeros_like(samples.values), torch.zeros_like(samples.half_norm)
    for part, target in zip(samples.values, values, strict=True):
        torch.index_select(part, 0, order, out=target[: samples.n])
    torch.index_select(samples.half_norm, 0, order, out=half_norm[: samples.n])
    return replace(samples, values=values, half_norm=half_norm)


def _operands(
    samples: Samples, prepared: Prepared, shape: Config
) -> tuple[tuple[Any, Tensor, Any, Any, Tensor, Tensor], tuple[int, int]]:
    """Samples and components for a kernel, and the rows at which their low parts begin."""
    block_d = prepared.linear.shape[2]
    x, part_x = sample_tiles(samples, shape.block_n, block_d)
    b, q, part_b = component_tiles(prepared, shape.block_k, block_d)
    return (x, samples.half_norm, b, q, prepared.gain, prepared.offset), (part_x, part_b)


def _norms(
    samples: Samples,
    prepared: Prepared,
    shape: Config,
    tiles: Tensor,
    out: Tensor,
    lists: Lists | None = None,
    best: Tensor | None = None,
) -> None:
    """Launch the pass over listed blocks, or all of them, for some tiles."""
    check_match(samples, prepared)
    members, counts = (lists.tile_blocks, lists.tile_counts) if lists else (tiles, tiles)
    flags: dict[str, Any] = {"LISTED": lists is not None, "FIND": best is not None}
    operands, low = _operands(samples, prepared, shape)
    listed.norm_kernel[(len(tiles),)](
        *operands, tiles, members, counts, out, out if best is None else best,
        samples.n, block_count(prepared, shape), *low, **flags, **specialise(prepared, shape),
    )  # fmt: skip


def _all_tiles(samples: Samples, shape: Config, start: int = 0, step: int = 1) -> Tensor:
    tiles = -(-samples.n // shape.block_n)
    return torch.arange(start, tiles, step, dtype=torch.int32, device=samples.values.device)


def find(samples: Samples, prepared: Prepared, shape: Config) -> tuple[Rows, Tensor]:
    """Log-normalisers over all components, and the likeliest component of each sample.

    Returns
    -------
    rows : Rows
    best : Tensor of shape (N,), int32
        Ties go to the lower number within a block, and to the earlier block.
    """
    norm = samples.empty_rows()
    best = torch.zeros(len(norm), dtype=torch.int32, device=norm.device)
    _norms(samples, prepared, shape, _all_tiles(samples, shape), norm, best=best)
    return Rows(norm), best[: samples.n]


def weigh(samples: Samples, prepared: Prepared, guess: Rows, shape: Config) -> tuple[Rows, Tensor]:
    """Log-normalisers over all components, and the mass of each block in each tile.

    Returns
    -------
    rows : Rows
        As from `kernels.em.row_pass`, whatever the guess.
    mass : Tensor of shape (tiles, blocks), float32
        Responsibilities, summed over the samples of the tile and the components of the block;
        those of a sample are too large by the factor by which the power of 2 of its guess is too
        small.
    """
    check_match(samples, prepared)
    norm = samples.empty_rows()
    tiles, blocks = -(-samples.n // shape.block_n), block_count(prepared, shape)
    mass = torch.empty(tiles, blocks, dtype=torch.float32, device=norm.device)
    operands, low = _operands(samples, prepared, shape)
    listed.weigh_kernel[(tiles,)](
        *operands, guess.norm, norm, mass, samples.n, blocks, *low, **specialise(prepared, shape)
    )
    return Rows(norm), mass


def choose_lists(mass: Tensor, share: float, rows: int) -> Lists:
    """The fewest blocks of each tile that hold all but a share of its mass.

    Parameters
    ----------
    mass : Tensor of shape (tiles, blocks), float32
        From `weigh`. After a guess that is too low it is too large: what is left out is then less.
    share : float
        Most that may be left out, as a mean over the samples; 0 keeps whatever has mass.
    rows : int
        Samples of a tile, whose mass is 1 each.
    """
    tiles, blocks = mass.shape
    tile_blocks = torch.empty(tiles, blocks, dtype=torch.int32, device=mass.device)
    meets = torch.zeros(tiles, blocks, dtype=torch.bool, device=mass.device)
    step = max(1, _SORT_ELEMENTS // blocks)
    for start in range(0, tiles, step):
        part = slice(start, start + step)
        # Small masses are added first: their sum is what is compared with a small number.
        values, ids = mass[part].sort(dim=1, stable=True)
        below = values.cumsum(1)
        keep = below > share * below[:, -1:].clamp_max(rows)
        keep[:, -1] = True
        tile_blocks[part] = ids.flip(1)
        meets[part] = torch.zeros_like(keep).scatter_(1, ids, keep)
    # Place of each tile in the list of each block; those that do not meet go past the end.
    met = meets.T.contiguous()
    place = torch.where(met, met.cumsum(1) - 1, tiles)
    block_tiles = torch.empty(blocks, tiles + 1, dtype=torch.int32, device=mass.device)
    numbers = torch.arange(tiles, dtype=torch.int32, device=mass.device).expand(blocks, tiles)
    block_tiles.scatter_(1, place, numbers)
    tile_counts = meets.sum(1, dtype=torch.int32)
    return Lists(tile_blocks, tile_counts, block_tiles, met.sum(1, dtype=torch.int32))


def listed_rows(samples: Samples, prepared: Prepared, lists: Lists, shape: Config) -> Rows:
    """Log-normalisers over the listed components."""
    norm = samples.empty_rows()
    _norms(samples, prepared, shape, _all_tiles(samples, shape), norm, lists)
    return Rows(norm)


def remeasured(
    samples: Samples, prepared: Prepared, kept: Rows, shape: Config, start: int, step: int
) -> Rows:
    """`kept`, with the log-normalisers over all components in every `step`-th tile."""
    norm = kept.norm.clone()
    _norms(samples, prepared, shape, _all_tiles(samples, shape, start, step), norm)
    return Rows(norm)


def discarded(exact: Rows, kept: Rows, n: int) -> Tensor:
    """What is left out, as means over the samples, (2,) float64.

    First the discarded mass: the share of unlisted components in the density. Second
    ``-log(1 - mass)``, in nats: how far the lower bound lies below the log-likelihood, at least the
    first.
    """
    nats = (exact.norm[:n] - kept.norm[:n]) * LN2
    both = torch.stack([-torch.expm1(-nats), nats])
    return both.sum(1, dtype=torch.float64) / n


def listed_sums(
    samples: Samples, kept: Rows, prepared: Prepared, lists: Lists, shape: Config
) -> Sums:
    """Sums about the origin, of the listed components of each tile."""
    check_match(samples, prepared)
    block_d = prepared.linear.shape[2]
    kind, device = prepared.components.covariance_type, samples.values.device
    blocks = block_count(prepared, shape)
    k = blocks * shape.block_k
    slabs = max(1, min(64, WAVES * device_limits(device)[2] // blocks))

    def partial(*size: int) -> Tensor:
        return torch.empty(slabs, k, *size, dtype=torch.float32, device=device)

    s0, s1 = partial(), partial(block_d)
    s2 = {"spherical": partial(), "diag": partial(block_d)}.get(kind, s0)
    operands, low = _operands(samples, prepared, shape)
    block: Any = block_d
    listed.listed_moment_kernel[(blocks, slabs)](
        *operands, kept.norm, lists.block_tiles, lists.block_counts, s0, s1, s2,
        lists.block_tiles.shape[1], k, *low, BLOCK_D=block, **specialise(prepared, shape),
    )  # fmt: skip
    first = total(s1, prepared)[:, : samples.n_features]
    second = first if kind == "tied" else total(s2, prepared)
    if kind == "diag":
        second = second[:, : samples.n_features]
    return Sums(total(s0, prepared), first, second)


def advance(
    samples: Samples, kept: Rows, prepared: Prepared, sums: Sums, reg_covar: float
) -> tuple[Prepared, Tensor]:
    """Components of the next iteration, and the lower bound of this one.

    Parameters
    ----------
    samples, kept, prepared, sums
        Those of this iteration; the components in `prepared` may be overwritten.
    reg_covar : float
        Added to the diagonal of each covariance, in squared units of the samples.

    Returns
    -------
    prepared : Prepared
    total : Tensor, float64 scalar
        Log-likelihood of the listed components.
    """
    if prepared.components.covariance_type in UPDATED_TYPES:
        update(prepared, sums, sums.count.new_full((1,), reg_covar))
        return prepared, log_total(samples, kept)
    stats = about_means(samples, kept, prepared, sums)
    new = m_step(stats, prepared.components, reg_covar, check=False, mode=prepared.mode)
    return prepare(new, prepared.mode), stats.log_likelihood
