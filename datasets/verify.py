"""Check a data set's file against the registry and its ground truth against a new search."""

import os

import numpy as np

from gmm_ivf.datasets.dataset import Dataset
from gmm_ivf.datasets.fetch import check_file
from gmm_ivf.datasets.ground_truth import distances_to, exact_neighbors
from gmm_ivf.datasets.registry import entries, load, locate

SAMPLE = 50


def verify(name_or_path: str, data_dir: str | os.PathLike | None = None) -> Dataset:
    """Check size, hash and structure where the registry knows them, and the ground truth anyway.

    Returns
    -------
    Dataset
        What was checked.

    Raises
    ------
    ValueError
        Naming the first thing that is wrong.
    """
    if name_or_path in entries():
        entry = entries()[name_or_path]
        path = locate(name_or_path, data_dir, download=False)
        check_file(path, size=entry.bytes, sha256=entry.sha256)
    dataset = load(name_or_path, data_dir=data_dir, download=False)
    check_ground_truth(dataset)
    return dataset


def check_ground_truth(dataset: Dataset, sample: int = SAMPLE) -> None:
    """Search some queries again and compare distances, so that another order of ties passes.

    Raises
    ------
    ValueError
        Naming a query whose neighbours, or whose noted distances, are not the exact ones.
    """
    if dataset.ground_truth is None:
        return
    rows = np.random.default_rng(0).permutation(len(dataset.query))[:sample]
    query, ids = dataset.query[rows], dataset.ground_truth[rows]
    _, exact = exact_neighbors(dataset.base, query, ids.shape[1], dataset.metric)
    _compare(distances_to(dataset.base, query, ids, dataset.metric), exact, rows, dataset.name)
    if dataset.distances is not None:
        _compare(dataset.distances[rows], exact, rows, f"the noted distances of {dataset.name}")


def _compare(got: np.ndarray, exact: np.ndarray, rows: np.ndarray, what: str) -> None:
    # Published files were made in float32, where the cosine of near neighbours loses digits.
    wrong = ~np.isclose(got, exact, rtol=1e-4, atol=1e-5)
    if wrong.any():
        i, rank = np.argwhere(wrong)[0]
        raise ValueError(
            f"ground truth of {what}: query {rows[i]} must have distance {exact[i, rank]} at rank "
            f"{rank}, got {got[i, rank]}; recompute it, or check metric and units (distances are "
            f"Euclidean, not squared)"
        )
