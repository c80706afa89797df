"""Which reader reads which file, by its suffix, and which files belong together by their names."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from gmm_ivf.datasets.bins import read_bin, read_bin_ids
from gmm_ivf.datasets.hdf5 import read_hdf5
from gmm_ivf.datasets.npy import read_npy
from gmm_ivf.datasets.raw import RawVectors
from gmm_ivf.datasets.vecs import read_vecs

HDF5 = (".hdf5", ".h5")
_ROWS: dict[str, Callable[[Path], np.ndarray]] = {
    ".fvecs": read_vecs,
    ".bvecs": read_vecs,
    ".ivecs": read_vecs,
    ".fbin": read_bin,
    ".u8bin": read_bin,
    ".i8bin": read_bin,
    ".ibin": read_bin,
    ".npy": read_npy,
}
SUFFIXES = (*HDF5, *_ROWS)
_GROUND_TRUTH = (
    "groundtruth.ivecs",
    "groundtruth.ibin",
    "groundtruth.neighbors.ibin",
    "groundtruth.npy",
)


def read_rows(path: Path) -> np.ndarray:
    """Read one 2-D array in any format but HDF5, as the file holds it, memory-mapped.

    Raises
    ------
    ValueError
        If the suffix is unknown or the file's content contradicts its format.
    """
    _check_suffix(path, tuple(_ROWS))
    return _ROWS[path.suffix](path)


def read_ids(path: Path) -> np.ndarray:
    """Read neighbour ids from ivecs, npy, ibin, or big-ann's ibin with distances behind the ids."""
    _check_suffix(path, (".ivecs", ".ibin", ".bin", ".npy"))
    return read_bin_ids(path) if path.suffix in (".ibin", ".bin") else read_rows(path)


def read_raw(path: Path) -> RawVectors:
    """Read a file with everything that belongs to it.

    HDF5 files hold their queries. For others, beside ``NAME_base.fvecs`` (or ``base.fbin``) the
    files ``NAME_query.fvecs`` and ``NAME_groundtruth.ivecs`` (or ibin, npy) are read when they are
    there.
    """
    _check_suffix(path, SUFFIXES)
    if path.suffix in HDF5:
        return read_hdf5(path)
    base = read_rows(path)
    prefix = name_before_base(path)
    if prefix is None:
        return RawVectors(base)
    query = path.with_name(f"{prefix}query{path.suffix}")
    if not query.is_file():
        return RawVectors(base)
    ids = [path.with_name(prefix + name) for name in _GROUND_TRUTH]
    ids = [file for file in ids if file.is_file()]
    return RawVectors(base, read_rows(query), read_ids(ids[0]) if ids else None)


def name_before_base(path: Path) -> str | None:
    """Return "sift_" for sift_base.fvecs, "" for base.fvecs, None for any other name."""
    stem = path.stem
    return stem.removesuffix("base") if stem == "base" or stem.endswith("_base") else None


def _check_suffix(path: Path, known: tuple[str, ...]) -> None:
    if path.suffix not in known:
        raise ValueError(f"{path} must end in one of {', '.join(known)}, got {path.suffix!r}")
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
