"""The ann-benchmarks HDF5 layout: datasets train, test, neighbors, distances."""

from pathlib import Path

import h5py
import numpy as np

from gmm_ivf.datasets.raw import RawVectors

_METRIC_OF = {
    "euclidean": "l2",
    "l2": "l2",
    "angular": "cosine",
    "cosine": "cosine",
    "ip": "ip",
    "dot": "ip",
}
_NAME_OF = {"l2": "euclidean", "cosine": "angular", "ip": "ip"}


def read_hdf5(path: Path) -> RawVectors:
    """Read a file in the ann-benchmarks layout.

    ``train`` may be the only vectors; a file whose single 2-D dataset has another name is read as
    bare vectors too. Uncompressed datasets are memory-mapped, others read.

    Raises
    ------
    ValueError
        If it is no HDF5 file, or the vectors cannot be told, with the names that were found.
    """
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise ValueError(
            f"{path} is not a readable HDF5 file: {error}; download it again"
        ) from error
    with file:
        arrays = {role: _array(path, item) for role, item in _choose(path, file).items()}
        metric = _metric(path, file)
    return RawVectors(
        base=arrays["train"],
        query=arrays.get("test"),
        ground_truth=arrays.get("neighbors"),
        # The sign of a stored inner product differs between writers; nobody needs it.
        distances=None if metric == "ip" else arrays.get("distances"),
        metric=metric,
    )


def write_hdf5(path: Path, raw: RawVectors, source: str = "") -> None:
    """Write the same layout, uncompressed, so that it can be memory-mapped."""
    columns = {"train": raw.base, "test": raw.query, "distances": raw.distances}
    if raw.ground_truth is not None:
        columns["neighbors"] = raw.ground_truth.astype(np.int32)
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            if values is not None:
                file.create_dataset(name, data=values)
        file.attrs.update(
            distance=_NAME_OF[raw.metric],
            dimension=raw.base.shape[1],
            point_type="float",
            source=source,
        )


def _choose(path: Path, file: h5py.File) -> dict[str, h5py.Dataset]:
    """Which dataset plays which role."""
    found = {name: item for name, item in file.items() if isinstance(item, h5py.Dataset)}
    listing = ", ".join(f"{name} {item.shape}" for name, item in found.items()) or "nothing"
    flat = [item for item in found.values() if item.ndim == 2]
    if "train" not in found and len(flat) == 1:
        return {"train": flat[0]}
    if "train" not in found:
        raise ValueError(
            f"{path} must hold the base vectors as 'train' and the queries as 'test' "
            f"(or a single 2-D dataset of vectors), found {listing}"
        )
    roles = [name for name in ("train", "test", "neighbors", "distances") if name in found]
    if "test" not in found and len(roles) > 1:
        raise ValueError(
            f"{path} has {roles[1]!r} but not the queries it belongs to, as 'test'; found {listing}"
        )
    return {name: found[name] for name in roles}


def _array(path: Path, item: h5py.Dataset) -> np.ndarray:
    if item.dtype.kind not in "fiu":
        raise ValueError(f"{item.name} of {path} must hold real numbers, got {item.dtype}")
    offset = item.id.get_offset()
    if offset is None or item.size == 0:
        return item[()]
    # Copy-on-write: the file stays as it is, and the array is writable as torch wants it.
    return np.memmap(path, item.dtype, "c", offset, item.shape)


def _metric(path: Path, file: h5py.File) -> str:
    name = file.attrs.get("distance", "euclidean")
    if isinstance(name, bytes):
        name = name.decode()
    if name not in _METRIC_OF:
        raise ValueError(
            f"attribute 'distance' of {path} must be one of {sorted(_METRIC_OF)}, got {name!r}"
        )
    return _METRIC_OF[name]
