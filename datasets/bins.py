"""Big-ann-benchmarks formats fbin, u8bin, i8bin, ibin: two little-endian uint32, then the rows."""

from pathlib import Path

import numpy as np

from gmm_ivf.datasets.rows import exact_cast, row_blocks

_DTYPES = {
    ".fbin": np.dtype("<f4"),
    ".u8bin": np.dtype("u1"),
    ".i8bin": np.dtype("i1"),
    ".ibin": np.dtype("<i4"),
}
_HEADER = np.dtype("<u4")
_HEADER_BYTES = 8
_ID = np.dtype("<i4")


def read_bin(path: Path, d: int | None = None) -> np.ndarray:
    """Memory-map a file of n rows of d values.

    Parameters
    ----------
    path : Path
        Its suffix gives the type of the values.
    d : int, optional
        Dimension to go by where the header is known to be wrong; n then follows from the size.

    Returns
    -------
    ndarray of shape (n, d), float32, uint8, int8 or int32

    Raises
    ------
    ValueError
        If the size of the file is not what n and d say, with all three numbers.
    """
    dtype = _DTYPES[path.suffix]
    n, told = _header(path)
    size = path.stat().st_size
    if d is not None:
        n, rest = divmod(size - _HEADER_BYTES, d * dtype.itemsize) if d > 0 else (0, 1)
        if rest or not n:
            raise ValueError(f"d must divide the {size - _HEADER_BYTES} bytes of {path}, got {d}")
        told = d
    wanted = _HEADER_BYTES + n * told * dtype.itemsize
    if not n or not told or size != wanted:
        raise ValueError(
            f"{path}: the header says n = {n}, d = {told}, which makes {wanted} bytes of {dtype}, "
            f"got {size}; the file is cut off, or its header wrong (then give d)"
        )
    return np.memmap(path, dtype, "c", _HEADER_BYTES, (n, told))


def read_bin_ids(path: Path) -> np.ndarray:
    """Memory-map neighbour ids, int32 [n, k], from an ibin file or big-ann's ground truth.

    The latter has the n * k distances as float32 behind the ids; the size of the file tells which
    one it is. The distances are not returned: files differ in whether they are squared.

    Raises
    ------
    ValueError
        If the file is neither.
    """
    n, k = _header(path)
    size = path.stat().st_size
    plain = _HEADER_BYTES + n * k * _ID.itemsize
    both = plain + n * k * 4
    if not n or not k or size not in (plain, both):
        raise ValueError(
            f"{path}: the header says n = {n}, k = {k}, which makes {plain} bytes of ids or {both} "
            f"with distances, got {size}; the file is cut off or no ground truth"
        )
    return np.memmap(path, _ID, "c", _HEADER_BYTES, (n, k))


def write_bin(path: Path, rows: np.ndarray) -> None:
    """Write rows in the format that the suffix says.

    Raises
    ------
    ValueError
        If a value does not fit the format's type.
    """
    dtype = _DTYPES[path.suffix]
    with path.open("wb") as out:
        np.array(rows.shape, _HEADER).tofile(out)
        for first, block in row_blocks(rows, path.name):
            exact_cast(block, dtype, first, path).tofile(out)


def _header(path: Path) -> tuple[int, int]:
    size = path.stat().st_size
    if size < _HEADER_BYTES:
        raise ValueError(f"{path} must begin with two numbers in 8 bytes, got {size} bytes")
    n, d = np.fromfile(path, _HEADER, 2)
    return int(n), int(d)
