"""NumPy's npy files, memory-mapped."""

from pathlib import Path

import numpy as np


def read_npy(path: Path) -> np.ndarray:
    """Memory-map a 2-D array of real numbers.

    Raises
    ------
    ValueError
        If it is no npy file, cut off, holds Python objects, or is not a 2-D array of real numbers.
    """
    try:
        rows = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a whole npy file of plain numbers: {error}") from error
    if not isinstance(rows, np.ndarray):
        rows.close()
        raise ValueError(f"{path} must hold one array, got an archive of several; save one as npy")
    if rows.ndim != 2 or rows.dtype.kind not in "fiu":
        raise ValueError(
            f"{path} must hold a 2-D array of real numbers (one vector a row), "
            f"got {rows.dtype} of shape {rows.shape}"
        )
    return rows


def write_npy(path: Path, rows: np.ndarray) -> None:
    """Write an array as it is."""
    np.save(path, rows, allow_pickle=False)
