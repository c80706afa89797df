"""Data for the tests of GaussianMixture."""

from collections.abc import Callable

import numpy as np
import pytest

from gmm_ivf import seeding

KINDS = ("spherical", "diag", "tied", "full")


def _blobs(n: int = 400, d: int = 3, k: int = 3, spread: float = 4.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = spread * rng.standard_normal((k, d))
    scales = rng.uniform(0.5, 1.5, (k, d))
    pick = rng.integers(k, size=n)
    return centres[pick] + scales[pick] * rng.standard_normal((n, d))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each covariance type."""
    return request.param


@pytest.fixture
def blobs() -> Callable[..., np.ndarray]:
    """``blobs(n, d, k, spread, seed)``: float64 samples around k centres."""
    return _blobs


@pytest.fixture(params=["sklearn", "ours"])
def kmeans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which k-means starts a fit: scikit-learn's, as on small data, or that for large data."""
    if request.param == "ours":
        monkeypatch.setattr(seeding, "_SMALL_ELEMENTS", 0)
    return request.param


@pytest.fixture
def overlapping(blobs: Callable[..., np.ndarray]) -> np.ndarray:
    """Samples on which EM needs tens of iterations."""
    return blobs(n=500, d=3, k=4, spread=1.2, seed=1)
