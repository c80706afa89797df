"""The update in one launch, against the M-step and the preparation by torch; loops in place."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from gmm_ivf import GaussianMixture
from gmm_ivf.kernels import em, loop
from gmm_ivf.kernels.blocks import LIFT
from gmm_ivf.kernels.components import COVARIANCE_TYPES, Components, m_step
from gmm_ivf.kernels.launch import Rows, Sums, about_means, log_total, total, total_tail
from gmm_ivf.kernels.loop import Loop
from gmm_ivf.kernels.operands import LN2, MODES, NEVER, Prepared, prepare
from gmm_ivf.kernels.update import update

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    not knobs.runtime.interpret and not CUDA, reason="needs a GPU or TRITON_INTERPRET=1"
)
DEVICE = "cuda" if CUDA else "cpu"
# The interpreter does not round to bfloat16, but truncates; offsets then follow other means.
TRUNCATES = bool(knobs.runtime.interpret)
# Where float64 rounds differently, a value may be stored as its neighbour.
STEP = {"fp16": 2.0**-10, "bf16": 2.0**-6, "fp16x3": 2.0**-10, "tf32": 2.0**-10, "fp32": 2.0**-23}
SHAPES = [(1, 1), (65, 33), (3, 130)]


def on_device(components: Components) -> Components:
    c = components
    parts = (c.weights, c.means, c.covariances, c.precisions_cholesky)
    return Components(c.covariance_type, *(part.to(DEVICE) for part in parts))


def poisoned(prepared: Prepared) -> Prepared:
    """The same without a value in anything that the update is to write."""
    c = prepared.components
    nan = float("nan")
    components = replace(
        c,
        weights=torch.full_like(c.weights, nan),
        means=c.means.clone(),
        covariances=torch.full_like(c.covariances, nan),
        precisions_cholesky=torch.full_like(c.precisions_cholesky, nan),
    )
    linear = torch.full_like(prepared.linear, nan)
    shared = prepared.quadratic is prepared.linear
    return replace(
        prepared,
        components=components,
        linear=linear,
        quadratic=linear if shared else torch.full_like(linear, nan),
        gain=torch.full_like(prepared.gain, nan),
        offset=torch.full_like(prepared.offset, nan),
    )


def sums_near(components: Components, wide: int) -> Sums:
    """Sums over samples that are spread about other means; the second component has none."""
    k, d = components.means.shape
    generator = torch.Generator().manual_seed(k)
    count = 50 * torch.rand(k, generator=generator, dtype=torch.float64)
    count[1:2] = 0
    means = components.means.cpu() + 0.1 * torch.randn(k, d, generator=generator).double()
    moments = count[:, None] * (means.square() + 0.2 + torch.rand(k, d, generator=generator))
    first = torch.zeros(k, wide, dtype=torch.float64)
    second = torch.zeros_like(first)
    first[:, :d], second[:, :d] = count[:, None] * means, moments
    if components.covariance_type == "spherical":
        return Sums(count.to(DEVICE), first.to(DEVICE)[:, :d], second.sum(1).to(DEVICE))
    return Sums(count.to(DEVICE), first.to(DEVICE)[:, :d], second.to(DEVICE)[:, :d])


@pytest.mark.parametrize("kind", ["spherical", "diag"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("k", "d"), SHAPES)
def test_the_update_is_the_m_step_and_the_preparation(mixture, kind, mode, k, d):
    x, components = mixture(kind, n=20, k=k, d=d)
    components = on_device(components)
    samples = em.stage(x.to(DEVICE), mode)
    prepared = prepare(components, mode)
    sums = sums_near(components, prepared.linear.shape[2])
    rows = Rows(samples.empty_rows().zero_())
    want = m_step(about_means(samples, rows, prepared, sums), components, 1e-3, check=False)
    staged = prepare(want, mode)
    got = poisoned(prepared)
    reg_covar = torch.full((1,), 1e-3, dtype=torch.float64, device=DEVICE)
    update(got, sums, reg_covar)
    for name in ("weights", "means", "covariances", "precisions_cholesky"):
        torch.testing.assert_close(
            getattr(got.components, name), getattr(want, name), rtol=1e-12, atol=1e-13
        )
    for name in ("linear", "quadratic"):
        one, other = (getattr(p, name).double().sum(0) for p in (got, staged))
        torch.testing.assert_close(one, other, rtol=STEP[mode], atol=1e-7)
        if not TRUNCATES or mode != "bf16":
            assert float((one != other).double().mean()) < 0.01
    torch.testing.assert_close(got.gain, staged.gain, rtol=2e-7, atol=0)
    if TRUNCATES and mode == "bf16":
        return
    torch.testing.assert_close(got.offset, staged.offset, rtol=1e-6, atol=2e-3)


@pytest.mark.parametrize("kind", ["spherical", "diag"])
def test_frozen_components_move_only(mixture, kind):
    components = on_device(mixture(kind, n=20, k=65, d=33)[1])
    got = prepare(components.copy(), "fp16x3")
    sums = sums_near(components, got.linear.shape[2])
    update(got, sums, torch.zeros(1, dtype=torch.float64, device=DEVICE), frozen=True)
    means = sums.first / sums.count[:, None]
    means[1] = components.means[1]
    want = prepare(replace(components, means=means), "fp16x3")
    torch.testing.assert_close(got.components.means, means, rtol=1e-12, atol=1e-13)
    for name in ("weights", "covariances"):
        assert torch.equal(getattr(got.components, name), getattr(components, name))
    for name in ("linear", "quadratic"):
        one, other = (getattr(part, name).double().sum(0) for part in (got, want))
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(got.gain, want.gain, rtol=2e-7, atol=0)
    torch.testing.assert_close(got.offset, want.offset, rtol=1e-6, atol=2e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("k", "d"), SHAPES)
def test_tied_preparation(mixture, mode, k, d, monkeypatch):
    """Slopes, scaled and rounded, and the log-density at the origin that belongs to them."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: empty(*a, **kw).fill_(torch.nan))
    c = on_device(mixture("tied", n=5, k=k, d=d)[1])
    c.weights[k // 2 :] = 0
    got = prepare(c, mode)
    slope = c.means @ c.precisions_cholesky @ c.precisions_cholesky.T / LN2
    assert float(got.gain.log2().frac().nan_to_num().abs().max()) == 0
    largest = (slope.abs().amax(1) / got.gain[:k]).cpu()
    assert bool(((largest > 511) & (largest < 1024.5)).all())
    rounded = got.linear.double().sum(0)[:k, :d] * got.gain[:k, None]
    torch.testing.assert_close(rounded, slope, rtol=STEP[mode], atol=STEP[mode])
    square = ((rounded @ c.covariances) * rounded).sum(1) * LN2 / 2
    weight = c.weights.clamp_min(1e-300)
    want = (replace(c, weights=weight).log_constants() / LN2 - square).float()
    want[k // 2 :] = NEVER
    torch.testing.assert_close(got.offset[:k], want, rtol=1e-6, atol=1e-6)
    assert bool((got.offset[k:] == NEVER).all())
    assert bool((got.gain[k:] == 0).all())
    assert float(got.linear[:, k:].abs().sum() + got.linear[:, :, d:].abs().sum()) == 0


def test_what_is_not_a_number_stays_so(mixture):
    """A covariance that cannot be is found at the end of a burst, not hidden in it."""
    prepared = prepare(on_device(mixture("diag", n=20, k=3, d=2)[1]), "fp16")
    sums = sums_near(prepared.components, 16)
    sums.second[0, 0] = float("nan")
    update(prepared, sums, torch.ones(1, dtype=torch.float64, device=DEVICE))
    assert bool(prepared.components.covariances[0, 0].isnan())
    assert bool(prepared.offset[0].isnan())
    assert bool(prepared.offset[1:3].isfinite().all())


@pytest.mark.parametrize(("slabs", "k"), [(1, 5), (3, 130), (70, 3)])
def test_totals_over_slabs(mixture, slabs, k):
    _, components = mixture("spherical", n=5, k=k, d=3)
    prepared = prepare(on_device(components), "fp16")
    padded = prepared.linear.shape[1]
    partial = torch.rand(slabs, padded, 16, generator=torch.Generator().manual_seed(k)).to(DEVICE)
    want = partial.double().sum(0)[:k] / 2**LIFT
    torch.testing.assert_close(total(partial, prepared), want, rtol=1e-14, atol=0)
    count, square = total_tail(partial, prepared)
    torch.testing.assert_close(count, want[:, 0], rtol=1e-14, atol=0)
    torch.testing.assert_close(square, want[:, 1:4].sum(1) * 128, rtol=1e-14, atol=0)


@pytest.mark.parametrize("n", [1, 4095, 4097, 9000])
def test_the_log_total_is_a_sum_in_float64(n):
    samples = em.stage(torch.ones(n, 1, device=DEVICE), "fp16")
    norm = samples.empty_rows()
    norm[:n] = 1e4 * torch.rand(n, generator=torch.Generator().manual_seed(n)).to(DEVICE)
    want = norm[:n].double().sum() * LN2
    torch.testing.assert_close(log_total(samples, Rows(norm)), want, rtol=1e-14, atol=0)


def step_by_step(x, components, mode, count):
    """Iterations by the functions that make new tensors."""
    samples, totals = em.stage(x, mode), []
    for _ in range(count):
        _, stats = em.e_step(samples, prepare(components, mode))
        components = m_step(stats, components, 1e-3)
        totals.append(stats.log_likelihood)
    return components, torch.stack(totals)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("spherical", "fp16x3"),
        ("diag", "fp16x3"),
        ("tied", "fp16x3"),
        ("full", "fp16x3"),
        ("spherical", "fp32"),
    ],
)
def test_a_loop_does_the_iterations_in_place(mixture, kind, mode):
    x, components = mixture(kind, n=30, k=3, d=3)
    x, components = x.to(DEVICE), on_device(components)
    kept = components.means.clone()
    want, totals = step_by_step(x, components, mode, 2)
    engine = Loop(em.stage(x, mode), components, 1e-3)
    got = torch.cat([engine.run(1), engine.run(1)])
    torch.testing.assert_close(got, totals, rtol=1e-5, atol=1e-3)
    reached = engine.components()
    for name in ("weights", "means", "covariances", "precisions_cholesky"):
        torch.testing.assert_close(
            getattr(reached, name), getattr(want, name), rtol=1e-4, atol=1e-4
        )
    assert torch.equal(components.means, kept)
    engine.restart(components)
    assert torch.equal(engine.run(1), got[:1])
    assert not torch.equal(engine.components().means, reached.means)


@pytest.mark.parametrize(
    ("kind", "d", "captured"),
    [("spherical", 600, True), ("tied", 600, True), ("full", 512, True), ("full", 513, False)],
)
def test_what_becomes_a_graph(kind, d, captured):
    means = SimpleNamespace(shape=(2, d), is_cuda=True)
    assert (
        loop.is_captured(cast(Any, SimpleNamespace(covariance_type=kind, means=means))) == captured
    )
    means.is_cuda = False
    assert not loop.is_captured(cast(Any, SimpleNamespace(covariance_type=kind, means=means)))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no GPU")
@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
@pytest.mark.parametrize("mode", ["fp16", "fp16x3"])
def test_a_graph_gives_the_same_bits_and_repeats(mixture, kind, mode, monkeypatch):
    x, components = mixture(kind, n=20_000, k=130, d=40)
    x, components = x.to(DEVICE), on_device(components)
    results = []
    for captured in (True, True, False):
        monkeypatch.setattr(loop, "is_captured", lambda _, found=captured: found)
        engine = Loop(em.stage(x, mode), components, 1e-6)
        totals = torch.cat([engine.run(3) for _ in range(4)])
        assert (engine._graph is not None) == captured
        results.append((totals, engine.components()))
    for totals, reached in results[1:]:
        assert torch.equal(totals, results[0][0])
        for name in ("weights", "means", "covariances", "precisions_cholesky"):
            assert torch.equal(getattr(reached, name), getattr(results[0][1], name)), name


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no GPU")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("kind", COVARIANCE_TYPES)
def test_a_fit_with_graphs_is_the_fit_without(mixture, kind, monkeypatch):
    x = mixture(kind, n=5000, k=20, d=10)[0].float()
    options = {"covariance_type": kind, "random_state": 0, "tol": 0, "max_iter": 13}
    fits = []
    for captured in (True, True, False):
        monkeypatch.setattr(loop, "is_captured", lambda _, found=captured: found)
        fits.append(GaussianMixture(20, device="cuda", backend="triton", **options).fit(x))
    for other in fits[1:]:
        assert other.lower_bounds_ == fits[0].lower_bounds_
        for name in ("weights_", "means_", "covariances_"):
            assert (getattr(other, name) == getattr(fits[0], name)).all(), name
