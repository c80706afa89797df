"""Fixtures of the datasets tests."""

import h5py
import numpy as np
import pytest


@pytest.fixture
def vectors():
    """60 small vectors of 5 dimensions, float32."""
    return np.random.default_rng(0).standard_normal((60, 5)).astype(np.float32)


@pytest.fixture
def make_hdf5(tmp_path):
    """Write an HDF5 file from datasets and attributes, and return its path."""

    def make(name="data.hdf5", *, attributes=None, options=None, **columns):
        path = tmp_path / name
        with h5py.File(path, "w") as file:
            for key, values in columns.items():
                file.create_dataset(key, data=values, **(options or {}))
            file.attrs.update(attributes or {})
        return path

    return make


@pytest.fixture
def brute_force():
    """Exact neighbours by float64 differences and a sort by (cost, id): ids and costs."""

    def search(base, query, k, metric="l2"):
        x, q = base.astype(np.float64), query.astype(np.float64)
        if metric == "l2":
            costs = np.stack([np.square(x - row).sum(axis=1) for row in q])
        else:
            costs = -np.stack([(x * row).sum(axis=1) for row in q])
        if metric == "cosine":
            costs /= np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(x, axis=1)
            costs += 1
        ids = np.lexsort((np.broadcast_to(np.arange(len(x)), costs.shape), costs), axis=1)[:, :k]
        return ids, np.take_along_axis(costs, ids, axis=1)

    return search
