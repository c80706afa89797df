"""Small data and plans for the tests of eval/."""

from dataclasses import replace

import numpy as np
import pytest

from gmm_ivf.datasets.dataset import Dataset
from gmm_ivf.eval.method_spec import parse_method
from gmm_ivf.eval.results import Key, OperatingPoint
from gmm_ivf.eval.sweep import Plan


def _clustered(n: int, queries: int, d: int, metric: str = "l2", seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(20, d))
    rows = centres[rng.integers(20, size=n + queries)] + 0.4 * rng.normal(size=(n + queries, d))
    if metric == "cosine":
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows.astype(np.float32)
    return Dataset("clustered", rows[:n], rows[n:], metric).with_ground_truth(20)


@pytest.fixture(scope="session")
def clustered():
    """Make a data set: clustered(n, queries, d, metric="l2", seed=0)."""
    return _clustered


@pytest.fixture(scope="session")
def tiny() -> Dataset:
    """1,200 x 8 clustered vectors and 40 queries, ground truth of 20."""
    return _clustered(1200, 40, 8)


@pytest.fixture
def plan() -> Plan:
    """k-means only, nlist 12, quick timing; change it with dataclasses.replace."""
    return Plan(
        methods=(parse_method("kmeans"),),
        nlists=(12,),
        seeds=(0,),
        k=5,
        nprobes=None,
        device="cpu",
        threads=1,
        ties="strict",
        points_per_centroid=512,
        iterations=5,
        stop_recall=0.995,
        timing_seconds=0.0,
        timing_passes=1,
    )


@pytest.fixture
def point():
    """Make an operating point: point(recall, cost, method="kmeans", nlist=10, ...)."""
    key = Key("f" * 16, "kmeans", 10, 10, 1, 0, "cpu", 2, 1000, 25, "strict")
    blank = OperatingPoint(
        key=key,
        dataset="made-up",
        n=1000,
        d=4,
        queries=100,
        metric="l2",
        recall=0.5,
        scanned=90.0,
        coarse=10.0,
        ranking=0.0,
        queries_per_second=1000.0,
        passes=3,
        entries_per_vector=1.0,
        bytes_per_vector=24.0,
        imbalance=1.1,
        train_seconds=1.5,
        add_seconds=0.5,
        settings={"niter": 25},
        environment={"commit": "abc", "packages": {"numpy": "2"}, "python": "3.12"},
    )

    def make(recall: float, cost: float, **changes) -> OperatingPoint:
        in_key = {name: changes.pop(name) for name in list(changes) if hasattr(key, name)}
        new_key = replace(key, **in_key)
        changes = {"scanned": float(cost - new_key.nlist), "coarse": float(new_key.nlist)} | changes
        return replace(blank, key=new_key, recall=recall, **changes)

    return make
