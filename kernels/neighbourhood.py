"""An order of the components in which near ones have near numbers, made on their device.

Truncated EM leaves out whole blocks of consecutive components, so the components of a block should
be neighbours of each other. The order is that of the leaves of a tree: each node is split in two
halves of equal size along its direction of largest variance.
"""

import torch
from torch import Tensor

from gmm_ivf.kernels.components import Components

# Power iterations for the direction of largest variance: any direction close to it serves.
_POWER_ITERATIONS = 6


def order_components(components: Components) -> Tensor:
    """Numbers of the components in an order of neighbourhood, (K,) int64.

    Blocks of a power of two consecutive components are leaves of the tree. Nothing waits for the
    device.
    """
    points = _comparable_means(components)
    k, d = points.shape
    size = 1 << (k - 1).bit_length()
    points = torch.nn.functional.pad(points, (0, 0, 0, size - k))
    order = torch.arange(size, device=points.device)
    while size > 1:
        groups = points.index_select(0, order).view(-1, size, d)
        # Padding sorts to the end at every level, so that all real components stay in front.
        real = (order < k).view(-1, size)
        place = _along_main_axis(groups, real).argsort(dim=1, stable=True)
        order = order.view(-1, size).gather(1, place).view(-1)
        size //= 2
    return order[:k]


def _comparable_means(c: Components) -> Tensor:
    """Means in coordinates in which Euclidean distances say how much components overlap."""
    means, factor = c.means, c.precisions_cholesky
    if c.covariance_type == "tied":
        means = means @ factor
    elif c.covariance_type == "diag":
        means = means * (c.weights @ c.covariances).rsqrt()
    return means.float()


def _along_main_axis(groups: Tensor, real: Tensor) -> Tensor:
    """Coordinates of the points of each group along its main axis, (G, m); padding at infinity."""
    count = real.sum(1).clamp_min(1)[:, None, None]
    inside = real[:, :, None]
    centred = (groups - (groups * inside).sum(1, keepdim=True) / count) * inside
    far = centred.square().sum(2).argmax(1)
    axis = centred.gather(1, far[:, None, None].expand(-1, 1, centred.shape[2])).mT
    for _ in range(_POWER_ITERATIONS):
        axis = centred.mT @ (centred @ axis)
        axis = axis / axis.norm(dim=1, keepdim=True).clamp_min(1e-30)
    return (centred @ axis)[:, :, 0].masked_fill(~real, torch.inf)
