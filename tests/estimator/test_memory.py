"""Device memory that runs out, simulated by a pass that takes no tile above a size."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from gmm_ivf import GaussianMixture
from gmm_ivf.kernels import torch_backend
from gmm_ivf.memory import needed


def limit_tiles(monkeypatch, name, largest):
    """Make a function of the backend fail for tiles of over `largest` rows; sizes it was given."""
    sizes = []
    real = getattr(torch_backend, name)

    def limited(tile, *args):
        sizes.append(len(tile))
        if len(tile) > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(tile, *args)

    monkeypatch.setattr(torch_backend, name, limited)
    return sizes


@pytest.fixture
def fitted(blobs):
    X = blobs(n=900, d=3, k=3)
    return X, GaussianMixture(3, random_state=0, max_iter=5, tol=0.1).fit(X)


def test_a_fit_goes_on_with_smaller_tiles(fitted, monkeypatch):
    X, wanted = fitted
    sizes = limit_tiles(monkeypatch, "responsibilities", 300)
    model = GaussianMixture(3, random_state=0, max_iter=5, tol=0.1).fit(X)
    assert sizes[:3] == [900, 450, 225]
    assert max(sizes[3:]) == 225
    assert_allclose(model.means_, wanted.means_, rtol=1e-10)
    assert_allclose(model.lower_bound_, wanted.lower_bound_, rtol=1e-12)


def test_scores_come_from_smaller_tiles(fitted, monkeypatch):
    X, model = fitted
    wanted = model.score_samples(X)
    limit_tiles(monkeypatch, "log_density", 100)
    assert_allclose(model.score_samples(X), wanted, rtol=1e-12)


def test_too_little_memory_for_any_tile_says_what_was_asked_for(fitted, monkeypatch):
    X, _ = fitted
    limit_tiles(monkeypatch, "responsibilities", 10)
    with pytest.raises(MemoryError, match=r"tile of 64 rows: .* 2\.00 GiB"):
        GaussianMixture(3, random_state=0).fit(X)


def test_what_needed_the_memory_is_named():
    with (
        pytest.raises(MemoryError, match=r"all samples need 1\.50 GiB"),
        needed("all samples", 3 << 29),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_other_errors_pass(fitted, monkeypatch):
    X, model = fitted
    monkeypatch.setattr(torch_backend, "log_density", lambda *_: np.zeros(0)[1])
    with pytest.raises(IndexError):
        model.score_samples(X)
