"""TEXMEX formats fvecs, bvecs, ivecs: each row is a little-endian int32 dimension, then values."""

from pathlib import Path

import numpy as np

from gmm_ivf.datasets.rows import exact_cast, row_blocks

_DTYPES = {".fvecs": np.dtype("<f4"), ".bvecs": np.dtype("u1"), ".ivecs": np.dtype("<i4")}
_HEADER = np.dtype("<i4")
_LARGEST_D = 1_000_000


def read_vecs(path: Path) -> np.ndarray:
    """Memory-map the rows of an fvecs, bvecs or ivecs file, after a look at every row's header.

    Returns
    -------
    ndarray of shape (n, d), float32, uint8 or int32
        A strided view of the mapped file, writable without changing it.

    Raises
    ------
    ValueError
        If the file is empty or cut off, or a header is not the first one's positive number; it
        names file, row, the wanted and the found number.
    """
    dtype = _DTYPES[path.suffix]
    size = path.stat().st_size
    if size < _HEADER.itemsize:
        raise ValueError(f"{path} must hold at least one row, got {size} bytes")
    data = np.memmap(path, np.uint8, "c")
    d = int(data[: _HEADER.itemsize].view(_HEADER)[0])
    if not 1 <= d <= _LARGEST_D:
        raise ValueError(
            f"{path}: the header of row 0 must be a dimension from 1 to {_LARGEST_D}, "
            f"got {d}{_endian_hint(d)}"
        )
    row = _HEADER.itemsize + d * dtype.itemsize
    n = size // row
    headers = np.ndarray((n,), _HEADER, data, 0, (row,))
    wrong = np.flatnonzero(headers != d)
    if len(wrong):
        raise ValueError(
            f"{path}: the header of row {wrong[0]} must be {d}, as in row 0, "
            f"got {headers[wrong[0]]}; the file is damaged or mixes dimensions"
        )
    if size % row:
        raise ValueError(
            f"{path}: row {n} must have {row} bytes (d = {d}), got {size % row}; "
            "the file is cut off, copy it again"
        )
    return np.ndarray((n, d), dtype, data, _HEADER.itemsize, (row, dtype.itemsize))


def write_vecs(path: Path, rows: np.ndarray) -> None:
    """Write rows as fvecs, bvecs or ivecs, whichever the suffix says.

    Raises
    ------
    ValueError
        If a value does not fit the format's type.
    """
    dtype = _DTYPES[path.suffix]
    with path.open("wb") as out:
        for first, block in row_blocks(rows, path.name):
            cast = exact_cast(block, dtype, first, path)
            record = np.empty(len(block), [("d", _HEADER), ("x", dtype, (rows.shape[1],))])
            record["d"], record["x"] = rows.shape[1], cast
            record.tofile(out)


def _endian_hint(d: int) -> str:
    swapped = int(np.array(d, "<i4").byteswap())
    if 1 <= swapped <= _LARGEST_D:
        return f"; it reads {swapped} in big-endian order, write the file in little-endian order"
    return ""
