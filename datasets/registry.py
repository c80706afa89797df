"""Data sets by name, or by the path of a file: ``load`` gives a checked `Dataset` of either."""

import os
import tomllib
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from gmm_ivf.datasets.dataset import METRICS, Dataset, check_limit
from gmm_ivf.datasets.fetch import data_folder, fetch
from gmm_ivf.datasets.files import HDF5, SUFFIXES, read_raw
from gmm_ivf.datasets.hdf5 import read_hdf5
from gmm_ivf.datasets.raw import RawVectors, hold_out_queries
from gmm_ivf.datasets.rows import check_finite, to_float32, unit_rows

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    """What ``registry.toml`` knows of one data set; ``url`` is None for the bundled one."""

    name: str
    about: str
    file: str
    metric: str
    n: int
    d: int
    queries: int
    k: int
    bytes: int
    url: str | None = None
    sha256: str | None = None

    def path(self, data_dir: str | os.PathLike | None = None) -> Path:
        """Where the file is, or will be."""
        return (data_folder(data_dir) if self.url else _HERE) / self.file

    def check(self, raw: RawVectors, path: Path) -> None:
        """Raise ValueError unless what was read has the entry's shapes and metric."""
        got = (
            raw.base.shape,
            None if raw.query is None else raw.query.shape,
            None if raw.ground_truth is None else raw.ground_truth.shape,
            raw.metric,
        )
        wanted = ((self.n, self.d), (self.queries, self.d), (self.queries, self.k), self.metric)
        if got != wanted:
            raise ValueError(
                f"{path} must have train, test, neighbors and metric {wanted}, got {got}"
            )


@cache
def entries() -> dict[str, Entry]:
    """All data sets known by name."""
    table = tomllib.loads((_HERE / "registry.toml").read_text(encoding="utf-8"))
    return {name: Entry(name, **fields) for name, fields in table.items()}


def locate(name: str, data_dir: str | os.PathLike | None = None, download: bool = True) -> Path:
    """Return the path of a known data set's file, downloading it first if need be.

    Raises
    ------
    ValueError
        If the name is unknown, or the file is not there and ``download`` is false, or what came is
        not the expected file.
    ConnectionError
        If it cannot be downloaded; the message says where to put the file by hand.
    """
    if name not in entries():
        raise ValueError(f"name must be one of {', '.join(entries())}, got {name!r}")
    entry = entries()[name]
    path = entry.path(data_dir)
    if path.is_file():
        return path
    if entry.url is None or not download:
        raise ValueError(
            f"{name} needs the file {path}, which is not there; "
            + (f"put {entry.url} there" if entry.url else "install the package again")
        )
    return fetch(
        entry.url,
        path,
        size=entry.bytes,
        sha256=entry.sha256,
        check=lambda part: entry.check(read_hdf5(part), part),
    )


def find(
    name_or_path: str, data_dir: str | os.PathLike | None = None, download: bool = True
) -> Path:
    """Return the path of what is meant: a known data set, as by `locate`, or a file that is there.

    Raises
    ------
    ValueError
        If it is neither, and as `locate` does.
    """
    if name_or_path in entries():
        return locate(name_or_path, data_dir, download)
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        raise ValueError(
            f"no file {name_or_path!r}, nor a data set of that name: known are "
            f"{', '.join(entries())}, and files ending in {', '.join(SUFFIXES)}"
        )
    return path


def load(
    name_or_path: str | os.PathLike,
    *,
    data_dir: str | os.PathLike | None = None,
    limit: int | None = None,
    download: bool = True,
    metric: str | None = None,
) -> Dataset:
    """Load a data set by its name or from a file.

    A file without queries gets some held out of its vectors: a tenth of them, at most 1,000, at
    random with a fixed seed; ``source`` says so. Vectors are cast to float32; those of a file whose
    metric is the cosine are brought to unit length.

    Parameters
    ----------
    name_or_path : str or path
        "sift-mini" (bundled), "sift1m", "gist1m", or a file: HDF5 in ann-benchmarks' layout, or
        fvecs, bvecs, ivecs, fbin, u8bin, i8bin, ibin, npy, whose queries and ground truth are
        found by name (see `gmm_ivf.datasets.files.read_raw`).
    data_dir : str or path, optional
        Folder of downloads; by default $GMM_IVF_DATA, else ~/.cache/gmm_ivf.
    limit : int, optional
        Take the first so many base vectors and compute the ground truth anew.
    download : bool, default=True
        Whether a known data set that is not there may be downloaded.
    metric : {"l2", "ip", "cosine"}, optional
        Of a file whose format has no place for it; by default "l2". Ground truth beside the file
        has to be by the same.

    Returns
    -------
    Dataset
        ``ground_truth`` is None when the file has none (see `Dataset.with_ground_truth`).

    Raises
    ------
    ValueError
        If there is no such data set or file, or its content contradicts itself or is not finite,
        or a metric is given for one that has its own.
    ConnectionError
        If it cannot be downloaded; the message says where to put the file by hand.
    """
    raw, name, source = _read(os.fspath(name_or_path), data_dir, download)
    if metric is not None:
        raw = _with_metric(raw, metric, os.fspath(name_or_path))
    return assemble(raw, name, source, limit)


def _read(
    name: str, data_dir: str | os.PathLike | None, download: bool
) -> tuple[RawVectors, str, str]:
    """Arrays, name and source of what a name or path stands for."""
    path = find(name, data_dir, download)
    raw = read_raw(path)
    if name not in entries():
        return raw, path.stem, str(path)
    entry = entries()[name]
    entry.check(raw, path)
    return raw, name, entry.about


def _with_metric(raw: RawVectors, metric: str, name: str) -> RawVectors:
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {METRICS}, got {metric!r}")
    if (name in entries() or Path(name).suffix in HDF5) and metric != raw.metric:
        raise ValueError(
            f"metric {metric!r} contradicts {name}, which says {raw.metric!r}; leave it out"
        )
    return raw._replace(metric=metric)


def assemble(raw: RawVectors, name: str, source: str, limit: int | None = None) -> Dataset:
    """Cast, check and complete what a reader returned."""
    base, query = raw.base, raw.query
    if query is None:
        # Before rows change places, so that the error names the row of the file.
        check_finite(base, f"vectors of {source}")
        base, query = hold_out_queries(base)
        source += f"; {len(query)} random rows held out as queries (seed 0)"
    n = len(base)
    if limit is not None:
        check_limit(limit, n, name)
        base = base[:limit]
    base = to_float32(base, f"base vectors of {source}")
    query = to_float32(query, f"query vectors of {source}")
    if raw.metric == "cosine":
        base, query = unit_rows(base), unit_rows(query)
    dataset = partial(Dataset, name, base, query, raw.metric)
    if len(base) < n:
        k = 100 if raw.ground_truth is None else raw.ground_truth.shape[1]
        return dataset(source=f"{source}; first {limit} of {n} base vectors").with_ground_truth(k)
    if raw.ground_truth is None:
        return dataset(source=source)
    if raw.ground_truth.dtype.kind not in "iu":
        raise ValueError(f"neighbours of {source} must be integers, got {raw.ground_truth.dtype}")
    distances = None if raw.distances is None else np.asarray(raw.distances, np.float32)
    return dataset(np.asarray(raw.ground_truth, np.int64), distances, source)
