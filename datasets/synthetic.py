"""Small artificial vectors that are the same on every machine with the same NumPy.

The three mixtures are the ones that low-precision modes are accepted on: components that overlap,
components that are clear of each other, and unit vectors in tight bundles. Each can be shifted away
from the origin, which is what breaks formulas that subtract large numbers.
"""

from typing import NamedTuple

import numpy as np

from gmm_ivf.datasets.dataset import Dataset


class Sample(NamedTuple):
    """Vectors and the mixture they were drawn from."""

    x: np.ndarray
    """Vectors, float32 [n, d]."""
    labels: np.ndarray
    """Component of each, int64 [n]."""
    means: np.ndarray
    """Means of the components, float64 [n_components, d], shift included."""
    variance: float
    """Variance along every axis; of `tight` before the vectors are brought to length 1."""


def overlapping(
    n: int, d: int, n_components: int = 16, *, shift: float = 0.0, seed: int = 0
) -> Sample:
    """Draw from components of variance 1 whose means have standard deviation 1 an axis."""
    return _draw(n, d, n_components, 1.0, shift, seed)


def clustered(
    n: int, d: int, n_components: int = 16, *, shift: float = 0.0, seed: int = 0
) -> Sample:
    """Draw from components of variance 0.5 whose means have standard deviation 1 an axis."""
    return _draw(n, d, n_components, 0.5, shift, seed)


def tight(n: int, d: int, n_components: int = 1000, *, shift: float = 0.0, seed: int = 0) -> Sample:
    """Draw unit vectors with standard deviation 0.02 an axis around random directions."""
    rng = np.random.default_rng(seed)
    means = _unit(rng.standard_normal((n_components, d)))
    labels = rng.integers(n_components, size=n)
    x = _unit(means[labels] + 0.02 * rng.standard_normal((n, d)))
    return Sample((x + shift).astype(np.float32), labels, means + shift, 0.02**2)


GENERATORS = {"overlapping": overlapping, "clustered": clustered, "tight": tight}


def dataset(
    kind: str = "clustered",
    n: int = 2000,
    n_query: int = 50,
    d: int = 16,
    *,
    metric: str = "l2",
    k: int = 10,
    shift: float = 0.0,
    seed: int = 0,
) -> Dataset:
    """Draw a `Dataset` whose base and queries come from one mixture, with exact ground truth.

    Raises
    ------
    ValueError
        If ``kind`` is not one of `GENERATORS`.
    """
    if kind not in GENERATORS:
        raise ValueError(f"kind must be one of {', '.join(GENERATORS)}, got {kind!r}")
    x = GENERATORS[kind](n + n_query, d, shift=shift, seed=seed).x
    name = f"synthetic-{kind}"
    return Dataset(name, x[:n], x[n:], metric, source=f"{name}, seed {seed}").with_ground_truth(k)


def _draw(n: int, d: int, n_components: int, variance: float, shift: float, seed: int) -> Sample:
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((n_components, d))
    labels = rng.integers(n_components, size=n)
    x = means[labels] + np.sqrt(variance) * rng.standard_normal((n, d))
    return Sample((x + shift).astype(np.float32), labels, means + shift, variance)


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
