"""R6: the relative ridge of tied and full covariances in half precision, at both ends."""

import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor

from gmm_ivf.kernels import components as parameters
from gmm_ivf.kernels import dispatch, reference, torch_backend
from gmm_ivf.kernels.components import RELATIVE_RIDGE, Components, Statistics, m_step

D = 12
both_kinds = pytest.mark.parametrize("kind", ["full", "tied"])


def thin(n: int = 400) -> Tensor:
    """Correlated samples whose variances along their axes span eight decades."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.standard_normal((D, D)))[0]
    x = rng.standard_normal((n, D)) * np.logspace(0, -4, D) @ axes.T
    return torch.from_numpy(x.astype(np.float32)).double()


def fitted(x: Tensor, kind: str, mode: str) -> Components:
    """One Gaussian, by an M-step from a start of unit variance."""
    start = Components.equal(kind, x.mean(0, keepdim=True), 1.0)
    return m_step(reference.statistics(x, start), start, 0.0, mode=mode)


def eigenvalues(c: Components) -> Tensor:
    return torch.linalg.eigvalsh(c.covariances.reshape(D, D))


def by_torch(x: Tensor, c: Components) -> Tensor:
    return torch_backend.log_density(x.float(), torch_backend.prepare(c, "fp16"))


def by_triton(x: Tensor, c: Components) -> Tensor:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from triton import knobs

    if not knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    from gmm_ivf.kernels import triton_backend

    return triton_backend.log_density(x.float(), triton_backend.prepare(c, "fp16"))


def error(x: Tensor, c: Components, evaluate) -> float:
    """Mean error of a log-density in nats, the parameters being the same."""
    return float((evaluate(x, c).double() - reference.e_step(x, c)[0]).abs().mean())


# Torch whitens samples for tied covariances with a factor that it does not round.
@pytest.mark.parametrize(
    ("kind", "evaluate"), [("full", by_torch), ("full", by_triton), ("tied", by_triton)]
)
def test_too_small_a_ridge_does_not_save_a_thin_gaussian(kind, evaluate, monkeypatch):
    x = thin()
    saved = error(x, fitted(x, kind, "fp16"), evaluate)
    monkeypatch.setattr(parameters, "RELATIVE_RIDGE", RELATIVE_RIDGE / 1000)
    lost = error(x, fitted(x, kind, "fp16"), evaluate)
    assert saved < dispatch.WORST_ERROR_NATS
    assert lost > 10 * saved


@both_kinds
def test_too_large_a_ridge_makes_the_gaussian_spherical(kind, monkeypatch):
    x = thin()
    kept = fitted(x, kind, "fp16")
    monkeypatch.setattr(parameters, "RELATIVE_RIDGE", RELATIVE_RIDGE * 1000)
    spherical = fitted(x, kind, "fp16")
    assert float(eigenvalues(kept)[-1] / eigenvalues(kept)[0]) > 1000
    assert float(eigenvalues(spherical)[-1] / eigenvalues(spherical)[0]) < 25
    nats = [float(reference.e_step(x, c)[0].mean()) for c in (kept, spherical)]
    assert nats[0] > nats[1] + 10


@both_kinds
@pytest.mark.parametrize("mode", ["fp16", "bf16", "fp16x3", "tf32", "fp32", "fp64"])
def test_the_m_step_is_that_of_the_reference(kind, mode):
    """The ridge is 5e-4 of trace / D, in half precision only."""
    x = thin()
    start = Components.equal(kind, x[:2].clone(), 1.0)
    _, log_resp = reference.e_step(x, start)
    stats: Statistics = reference.statistics(x, start)
    ridge = 5e-4 if mode in ("fp16", "bf16") else 0.0
    wanted = reference.m_step(x, log_resp.exp(), kind, 1e-3, ridge)
    got = m_step(stats, start, 1e-3, mode=mode)
    torch.testing.assert_close(got.covariances, wanted.covariances, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["spherical", "diag"])
def test_variances_without_factors_get_none(kind):
    x = thin()
    one, other = (fitted(x, kind, mode) for mode in ("fp16", "fp64"))
    assert torch.equal(one.covariances, other.covariances)


@both_kinds
def test_auto_notices_what_the_ridge_would_hide(kind):
    """Where it would change densities, the mode without it is taken; else fp16 stays."""
    modes = ("fp16", "fp16x3")
    x = thin()
    assert dispatch.choose_precision(modes, fitted(x, kind, "fp16")) == "fp16x3"
    assert dispatch.choose_precision(modes, fitted(x, kind, "fp64")) == "fp16x3"
    generator = torch.Generator().manual_seed(0)
    even = torch.randn(400, D, generator=generator, dtype=torch.float64)
    assert dispatch.choose_precision(modes, fitted(even, kind, "fp16")) == "fp16"
