"""What numpy and torch spell differently, so that a formula stands once."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

#: A numpy array, or a torch tensor on any device.
Array = Any


def namespace(x: Array) -> Any:
    """Module whose functions take this kind of array: numpy or torch."""
    return torch if isinstance(x, Tensor) else np


def float64(x: Array) -> Array:
    """The array in float64."""
    return x.double() if isinstance(x, Tensor) else x.astype(np.float64)


def filled(like: Array, value: Any) -> Array:
    """Array of the shape of another, on its device, of the type of the value (bool or float64)."""
    if isinstance(like, Tensor):
        kind = torch.bool if isinstance(value, bool) else torch.float64
        return torch.full(like.shape, value, dtype=kind, device=like.device)
    return np.full(like.shape, value)


def order(first: Array, then: Array) -> Array:
    """Columns of each row in ascending order of `first`, equal ones in that of `then`."""
    if not isinstance(first, Tensor):
        return np.lexsort((then, first), axis=1)
    by_then = torch.argsort(then, dim=1, stable=True)
    by_first = torch.argsort(first.gather(1, by_then), dim=1, stable=True)
    return by_then.gather(1, by_first)


def take(x: Array, columns: Array) -> Array:
    """``out[i, j] = x[i, columns[i, j]]``."""
    return x.gather(1, columns) if isinstance(x, Tensor) else np.take_along_axis(x, columns, axis=1)


def true_places(mask: Array) -> tuple[Array, ...]:
    """Indices of the true elements, one array per axis, in order of rows."""
    return mask.nonzero(as_tuple=True) if isinstance(mask, Tensor) else np.nonzero(mask)


def first_true(mask: Array) -> Array:
    """Column of the first true element of each row; 0 where there is none."""
    return (mask.byte() if isinstance(mask, Tensor) else mask).argmax(1)


def ascending(x: Array) -> Array:
    """Sorted copy of a vector."""
    return torch.sort(x)[0] if isinstance(x, Tensor) else np.sort(x)
