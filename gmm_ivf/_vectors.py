"""Vectors of any source, checked and read block by block in the float32 that FAISS stores."""

import numbers
from collections.abc import Iterator
from typing import Any

import numpy as np

_BLOCK_ELEMENTS = 1 << 23
_BLOCK_ROWS = 1 << 16
# FAISS compares squared float32 distances. Below this squared norm none of them overflows.
LARGEST_SQUARED_NORM = float(np.finfo(np.float32).max) / 8


def check_count(value: Any, name: str, fewest: int = 1) -> int:
    """Return an int of at least `fewest`, or raise ValueError naming the argument."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < fewest:
        raise ValueError(f"{name} must be an integer of at least {fewest}; got {value!r}.")
    return int(value)


def as_matrix(x: Any, d: int, name: str) -> Any:
    """Return x, a list or a data frame made an array, after a check that it has d columns."""
    # Rows of a data frame are not what its [] gives.
    if not hasattr(x, "shape") or hasattr(x, "to_numpy"):
        x = np.asarray(x)
    shape = tuple(x.shape)
    if len(shape) != 2 or shape[1] != d:
        hint = " Reshape one vector to (1, d)." if len(shape) == 1 else ""
        raise ValueError(f"{name} must have shape (n, {d}); got {shape}.{hint}")
    return x


def block(x: Any, name: str, where: slice | np.ndarray = slice(None)) -> np.ndarray:
    """Return rows of x as a C-contiguous float32 array; x may be numpy, torch or HDF5."""
    part = x[where]
    if hasattr(part, "detach"):
        part = part.detach().cpu().float()  # numpy knows no bfloat16
    part = np.asarray(part)
    if part.dtype.kind not in "fiub":
        raise ValueError(f"{name} must hold real numbers; got dtype {part.dtype}.")
    # A float64 value beyond float32 becomes infinite here, and is named by `check_rows`.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(part, dtype=np.float32)


def spans(n: int, d: int) -> Iterator[slice]:
    """Slices of consecutive rows, each small enough to be copied a few times."""
    size = min(_BLOCK_ROWS, max(1, _BLOCK_ELEMENTS // d))
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def check_rows(x: Any, name: str, unit: bool = False, first: int = 0) -> None:
    """Refuse rows that FAISS would drop without a word, or answer with garbage.

    Parameters
    ----------
    x : matrix
    name : str
        Argument name for the message.
    unit : bool
        Whether rows will be L2-normalised, so that a zero row has no direction.
    first : int
        Number of the first row for the message.

    Raises
    ------
    ValueError
        Naming the first row that holds NaN or infinity, is too long, or is zero.
    """
    for where in spans(*x.shape):
        rows = block(x, name, where)
        with np.errstate(over="ignore", invalid="ignore"):
            squared = np.einsum("ij,ij->i", rows, rows)
        bad = ~(squared <= LARGEST_SQUARED_NORM)
        if unit:
            bad |= ~rows.any(axis=1)
        if bad.any():
            row = int(bad.argmax())
            _refuse_row(rows[row], first + where.start + row, name)


def _refuse_row(row: np.ndarray, number: int, name: str) -> None:
    if np.isnan(row).any():
        what = "holds NaN"
    elif np.isinf(row).any():
        what = "holds infinity (in float32)"
    elif row.any():
        what = "is so long that its squared distances overflow float32"
    else:
        what = "is zero, and has no direction under METRIC_INNER_PRODUCT"
    raise ValueError(f"{name}: row {number} {what}; remove or repair such rows.")


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """L2-normalised copy, in the dtype given; a zero row stays zero."""
    # Norms in float64: squares of float32 values may vanish or overflow in float32.
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    norms[norms == 0] = 1.0
    return (rows / norms[:, None]).astype(rows.dtype)


def sample_rows(n: int, limit: int, rng: np.random.RandomState | np.random.Generator) -> np.ndarray:
    """Ascending numbers of at most `limit` distinct rows out of n."""
    if n <= limit:
        return np.arange(n)
    return np.sort(rng.choice(n, limit, replace=False))
