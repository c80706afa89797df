"""k-means++ by one launch per centre: distances to the last centre, and the draw of the next.

A row is drawn with probability proportional to its squared distance from the rows drawn before: the
largest of ``distance / e`` is, for independent exponential e.
"""

# pyright: reportArgumentType=false
# (a tl.constexpr parameter takes plain values, which the type checker cannot know)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gmm_ivf.kernels.launch import capture

_BLOCK_N = 128
# Launches of a CUDA graph.
_STEPS = 32


@triton.jit
def _last_winner(best, best_row, blocks, BLOCKS: tl.constexpr):
    """Row of the largest entry over the blocks of a group, the lowest of equal ones."""
    b = tl.arange(0, BLOCKS)
    value = tl.load(best + b, mask=b < blocks, other=-1.0)
    row = tl.load(best_row + b, mask=b < blocks, other=0)
    return tl.min(tl.where(value == tl.max(value, axis=0), row, 2147483647), axis=0)


@triton.jit(do_not_specialize=["offset", "seed"])
def spread_kernel(
    members,  # (groups, size, d)
    closest,  # (groups, size) squared distance to the rows drawn so far
    best, best_row,  # (2, groups, blocks) largest score of a block, and its row
    chosen,  # (groups, count) rows
    step,  # (1,) of the first launch of a batch; `offset` counts launches within it
    offset, seed, size, d, count, groups, blocks,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Distances to the row that the last launch drew, and a score for each row of a block."""
    t = tl.load(step).to(tl.int32) + offset
    group = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < size
    at_rows = group.to(tl.int64) * size + rows
    distance = tl.full((BLOCK_N,), 1.0, tl.float32)
    if t > 0:
        last = (((t - 1) % 2) * groups + group) * blocks
        winner = _last_winner(best + last, best_row + last, blocks, BLOCKS)
        if tl.program_id(0) == 0:  # noqa: SIM102 - Triton has no short circuit
            # The launches after the last draw leave what it found.
            if t <= count:
                tl.store(chosen + group * count + t - 1, winner)
        at_center = members + (group.to(tl.int64) * size + winner) * d
        distance = tl.zeros((BLOCK_N,), tl.float32)
        for d0 in range(0, d, BLOCK_D):
            cols = d0 + tl.arange(0, BLOCK_D)
            at = members + at_rows[:, None] * d + cols[None, :]
            x = tl.load(at, mask=inside[:, None] & (cols < d)[None, :], other=0.0)
            c = tl.load(at_center + cols, mask=cols < d, other=0.0)
            apart = tl.where(inside[:, None], x - c[None, :], 0.0)
            distance += tl.sum(apart * apart, axis=1)
        if t > 1:
            before = tl.load(closest + at_rows, mask=inside, other=0.0)
            distance = tl.minimum(distance, before)
    if t <= count:
        tl.store(closest + at_rows, distance, mask=inside)
    exponential = -tl.log(tl.rand(seed + t, at_rows.to(tl.int32)))
    score = tl.where(inside, distance / exponential, -1.0)
    top = tl.max(score, axis=0)
    here = ((t % 2) * groups + group) * blocks + tl.program_id(0)
    tl.store(best + here, top)
    tl.store(best_row + here, tl.min(tl.where(score == top, rows, 2147483647), axis=0))


def spread(members: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of each group by k-means++, without waiting for the device.

    Parameters
    ----------
    members : Tensor of shape (groups, size, D), float32
    count : int
        Rows wanted of each group.
    seed : int

    Returns
    -------
    rows : Tensor of shape (groups, count), int64
    closest : Tensor of shape (groups, size), float32
        Squared distances to the nearest of them.
    """
    members = members.contiguous()
    groups, size, d = members.shape
    blocks = -(-size // _BLOCK_N)
    device = members.device
    closest = torch.empty(groups, size, device=device)
    best = torch.empty(2, groups, blocks, device=device)
    best_row = torch.empty(2, groups, blocks, dtype=torch.int32, device=device)
    chosen = torch.empty(groups, count, dtype=torch.int32, device=device)
    step = torch.zeros(1, dtype=torch.int64, device=device)
    flags: dict[str, Any] = {
        "BLOCK_N": _BLOCK_N,
        "BLOCK_D": min(128, triton.next_power_of_2(d)),
        "BLOCKS": triton.next_power_of_2(blocks),
    }

    steps = min(_STEPS, (count + 2) // 2 * 2)

    def batch() -> None:
        for offset in range(steps):
            spread_kernel[(blocks, groups)](
                members, closest, best, best_row, chosen, step, offset, seed,
                size, d, count, groups, blocks, **flags,
            )  # fmt: skip
        step.add_(steps)

    batches = -(-(count + 1) // steps)
    batch()
    if device.type == "cuda" and batches > 1:
        graph, _ = capture(batch)
        for _ in range(batches - 1):
            graph.replay()
    else:
        for _ in range(batches - 1):
            batch()
    return chosen.long(), closest
