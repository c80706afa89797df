"""Write the content of one file in another format."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from gmm_ivf.datasets.bins import write_bin
from gmm_ivf.datasets.files import HDF5, SUFFIXES, name_before_base, read_ids, read_raw, read_rows
from gmm_ivf.datasets.ground_truth import distances_to
from gmm_ivf.datasets.hdf5 import write_hdf5
from gmm_ivf.datasets.npy import write_npy
from gmm_ivf.datasets.raw import RawVectors
from gmm_ivf.datasets.registry import assemble
from gmm_ivf.datasets.rows import check_finite
from gmm_ivf.datasets.vecs import write_vecs

# By the end of the suffix: bvecs and fvecs share theirs.
_IDS_BESIDE = {"vecs": ".ivecs", ".npy": ".npy"}


def convert(
    source: Path,
    target: Path,
    *,
    query: Path | None = None,
    ground_truth: Path | None = None,
    metric: str | None = None,
) -> list[Path]:
    """Convert a file, with everything that belongs to it, and return the paths written.

    HDF5 takes it all in one file. Other formats get up to three: the vectors in ``NAME_base``, and
    ``NAME_query`` and ``NAME_groundtruth`` beside it; without queries, one file named as asked.

    Parameters
    ----------
    source : Path
        Any file that `gmm_ivf.datasets.registry.load` reads.
    target : Path
        Its suffix gives the format.
    query, ground_truth : Path, optional
        Used instead of the source's own.
    metric : {"l2", "ip", "cosine"}, optional
        Noted instead of the source's, whose ground truth is then left out.

    Raises
    ------
    ValueError
        If a file exists already, or the content contradicts itself, or the format cannot hold it.
    """
    raw = _gather(source, query, ground_truth, metric)
    writers = _plan(raw, target, str(source))
    for path in writers:
        if path.exists():
            raise ValueError(f"{path} exists; delete it or choose another name")
    for path, write in writers.items():
        # Keeps its suffix, which tells the writers the format.
        part = path.with_name(f"part-{path.name}")
        try:
            write(part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return list(writers)


def _gather(
    source: Path, query: Path | None, ground_truth: Path | None, metric: str | None
) -> RawVectors:
    raw = read_raw(source)
    if metric is not None and metric != raw.metric:
        raw = raw._replace(metric=metric, ground_truth=None, distances=None)
    if query is not None:
        raw = raw._replace(query=read_rows(query), ground_truth=None, distances=None)
    if ground_truth is not None:
        if raw.query is None:
            raise ValueError(f"ground_truth needs queries, and {source} has none; give query too")
        raw = raw._replace(ground_truth=read_ids(ground_truth), distances=None)
    if raw.query is None:
        check_finite(raw.base, f"vectors of {source}")
        return raw
    checked = assemble(raw, source.stem, str(source))
    if checked.ground_truth is not None and raw.distances is None and raw.metric != "ip":
        ids = checked.ground_truth
        found = distances_to(checked.base, checked.query, ids, checked.metric)
        raw = raw._replace(distances=found)
    return raw


def _plan(raw: RawVectors, target: Path, source: str) -> dict[Path, Callable[[Path], None]]:
    """Which file gets what."""
    if target.suffix not in SUFFIXES:
        raise ValueError(f"{target} must end in one of {', '.join(SUFFIXES)}")
    if target.suffix in HDF5:
        return {target: partial(write_hdf5, raw=raw, source=source)}
    if raw.metric != "l2":
        raise ValueError(
            f"{target.suffix} files cannot say that the metric is {raw.metric}; convert to .hdf5"
        )
    if raw.query is None:
        return {target: _rows_writer(target.suffix, raw.base)}
    prefix = name_before_base(target)
    prefix = f"{target.stem}_" if prefix is None else prefix
    plan = {
        target.with_name(f"{prefix}{part}{target.suffix}"): _rows_writer(target.suffix, rows)
        for part, rows in (("base", raw.base), ("query", raw.query))
    }
    if raw.ground_truth is not None:
        kind = _IDS_BESIDE.get(target.suffix[-4:], ".ibin")
        path = target.with_name(f"{prefix}groundtruth{kind}")
        plan[path] = _rows_writer(kind, raw.ground_truth)
    return plan


def _rows_writer(suffix: str, rows: np.ndarray) -> Callable[[Path], None]:
    if suffix == ".npy":
        return partial(write_npy, rows=rows)
    return partial(write_vecs if suffix.endswith("vecs") else write_bin, rows=rows)
