"""Checks and conversions of vectors, one block of rows at a time: the rows may be memory-mapped."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

_BLOCK_VALUES = 1 << 22


def row_blocks(rows: np.ndarray, label: str = "") -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first row, block) over a 2-D array, each block about 4 million numbers large.

    With a label, a progress bar appears when it takes over two seconds.
    """
    step = max(1, _BLOCK_VALUES // max(1, rows.shape[1]))
    starts = range(0, len(rows), step)
    for first in tqdm(starts, desc=label, delay=2, disable=not label):
        yield first, rows[first : first + step]


def exact_cast(block: np.ndarray, dtype: np.dtype, first: int, path: Path) -> np.ndarray:
    """Rows from `first` on as contiguous `dtype`; ValueError where an integer type cannot."""
    cast = np.ascontiguousarray(block, dtype)
    if dtype.kind in "iu" and (cast != block).any():
        raise ValueError(f"rows from {first} on must fit {dtype} to be written as {path}")
    return cast


def check_finite(rows: np.ndarray, name: str) -> None:
    """Raise ValueError naming the first row with a NaN or an infinity; reads block by block."""
    for first, block in row_blocks(rows, "checking"):
        # One pass without a mask: the sum is finite unless a value is not, or the values are huge.
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(block.sum(dtype=np.float64)):
                continue
        bad = ~np.isfinite(block).all(axis=1)
        if bad.any():
            raise ValueError(
                f"{name} must be finite; row {first + int(np.argmax(bad))} holds NaN or infinity, "
                "remove or repair it"
            )


def to_float32(rows: np.ndarray, name: str) -> np.ndarray:
    """Return real numbers as native float32, the same array (mapped or not) when it already is.

    Raises
    ------
    ValueError
        If the values are not real numbers, not a 2-D array, or not finite in float32.
    """
    if rows.dtype.kind not in "fiu":
        raise ValueError(f"{name} must hold real numbers, got {rows.dtype}")
    if rows.ndim != 2:
        raise ValueError(f"{name} must be 2-D (one vector a row), got shape {rows.shape}")
    if rows.dtype == np.float32 and rows.dtype.isnative:
        check_finite(rows, name)
        return rows
    cast = np.empty(rows.shape, np.float32)
    with np.errstate(over="ignore"):
        for first, block in row_blocks(rows, "casting"):
            cast[first : first + len(block)] = block
    check_finite(cast, name)
    return cast


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Return a copy with every row divided by its length; rows of zeros stay as they are."""
    out = np.empty(rows.shape, np.float32)
    for first, block in row_blocks(rows):
        wide = block.astype(np.float64)
        length = np.linalg.norm(wide, axis=1, keepdims=True)
        out[first : first + len(block)] = wide / np.where(length == 0, 1, length)
    return out
