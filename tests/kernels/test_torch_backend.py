"""The tiled torch backend against the naive float64 reference."""

import math

import pytest
import torch

from gmm_ivf.kernels import reference
from gmm_ivf.kernels import torch_backend as backend
from gmm_ivf.kernels.components import COVARIANCE_TYPES, Components, m_step
from gmm_ivf.kernels.dispatch import expected_errors

CPU = torch.device("cpu")
# Relative errors of sums: float64 to rounding; float32 a few of its rounding units (6e-8), which
# the expanded square multiplies by |x|^2 / variance (tens here).
SUM_TOLERANCE = {"fp64": 1e-11, "fp32": 2e-5}
# Those that round operands: their rounding unit on x, about 20 standard deviations in all, once in
# the responsibilities and once in the sums.
EMULATED = {"fp16": 1e-2, "tf32": 1e-2, "bf16": 1e-1}

every_kind = pytest.mark.parametrize("kind", COVARIANCE_TYPES)
every_mode = pytest.mark.parametrize("mode", ["fp64", "fp32", "fp16", "bf16", "tf32", "fp16x3"])


def in_mode(x, components, mode):
    return x.to(backend.compute_dtype(mode)), backend.prepare(components, mode)


def statistics(x, components, mode, size=64):
    tiles, prepared = in_mode(x, components, mode)
    total = backend.scatter(tiles.split(size), x.shape[1], CPU)
    return backend.e_step(tiles.split(size), prepared, total)


def relative(got, wanted):
    return float((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-300))


@every_kind
@every_mode
def test_log_joint_within_the_expected_error(mixture, kind, mode):
    """Also what `expected_errors`, by which "auto" chooses, promises of each mode."""
    x, components = mixture(kind, n=500, k=4, d=9)
    got = backend.log_joint(*in_mode(x, components, mode)).double()
    wanted = reference.log_joint(x, components)
    near = wanted > wanted.amax(1, keepdim=True) - 3
    error = torch.where(near, (got - wanted).abs(), 0).sum() / near.sum()
    assert float(error) <= float(expected_errors(mode, components).max()) + 1e-6 * (mode != "fp64")
    if mode == "fp64":
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@every_kind
def test_gm_g8_float32_is_not_tf32(kind):
    """Standard normal data: relative error below 1e-6 at the size of the squared distance."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 128, generator=generator).double()
    means = torch.randn(16, 128, generator=generator).double()
    shape = {"spherical": (16,), "diag": (16, 128)}.get(kind)
    covariances = torch.ones(shape) if shape else torch.eye(128)
    if kind == "full":
        covariances = covariances.repeat(16, 1, 1)
    weights = torch.full((16,), 1 / 16)
    components = Components.from_covariances(
        kind, weights.double(), means, covariances.double().contiguous()
    )
    got = backend.log_joint(*in_mode(x, components, "fp32")).double()
    wanted = reference.log_joint(x, components)
    assert float(((got - wanted) / wanted).abs().max()) < 1e-6


@every_kind
@pytest.mark.parametrize("mode", ["fp64", "fp32"])
def test_responsibilities_and_densities(mixture, kind, mode):
    x, components = mixture(kind)
    density, resp = backend.responsibilities(*in_mode(x, components, mode))
    wanted_density, wanted_resp = reference.e_step(x, components)
    tolerance = {"fp64": 1e-11, "fp32": 2e-4}[mode]
    torch.testing.assert_close(density.double(), wanted_density, rtol=0, atol=tolerance)
    torch.testing.assert_close(resp.double(), wanted_resp.exp(), rtol=0, atol=tolerance)
    torch.testing.assert_close(resp.sum(1), torch.ones_like(density), rtol=0, atol=1e-6)
    same = backend.log_density(*in_mode(x, components, mode))
    torch.testing.assert_close(same, density, rtol=0, atol=0)


@every_kind
@pytest.mark.parametrize("m", [1, 3, 5])
def test_top_components(mixture, kind, m):
    x, components = mixture(kind)
    ids, log_resp = backend.top_components(*in_mode(x, components, "fp64"), m)
    wanted, wanted_ids = reference.e_step(x, components)[1].topk(m, dim=1)
    torch.testing.assert_close(ids, wanted_ids)
    torch.testing.assert_close(log_resp, wanted, rtol=1e-10, atol=1e-11)


@every_kind
@pytest.mark.parametrize("mode", ["fp64", "fp32", *EMULATED])
def test_statistics_are_about_the_means(mixture, kind, mode):
    x, components = mixture(kind, n=400)
    got, wanted = statistics(x, components, mode), reference.statistics(x, components)
    tolerance = {**SUM_TOLERANCE, **EMULATED}[mode]
    for name in ("s0", "s1", "s2"):
        assert relative(getattr(got, name), getattr(wanted, name)) < tolerance, name
        assert getattr(got, name).dtype == torch.float64
    per_sample = float(got.log_likelihood - wanted.log_likelihood) / len(x)
    assert abs(per_sample) < 10 * tolerance


@every_kind
@pytest.mark.parametrize("mode", ["fp64", "fp32"])
def test_statistics_far_from_the_origin_of_the_frame(mixture, kind, mode):
    """About the means nothing may cancel beyond |mean|^2 / variance rounding units."""
    x, components = mixture(kind, n=300)
    shift = torch.full((x.shape[1],), 16.0, dtype=torch.float64)
    shifted = Components.from_covariances(
        kind, components.weights, components.means + shift, components.covariances
    )
    got = statistics((x + shift).float().double(), shifted, mode)
    wanted = reference.statistics((x + shift).float().double(), shifted)
    tolerance = {"fp64": 1e-10, "fp32": 3e-4}[mode]
    assert relative(got.s1, wanted.s1) < tolerance
    assert relative(got.s2, wanted.s2) < tolerance


@every_kind
def test_m_step_equals_the_reference(mixture, kind):
    x, components = mixture(kind, n=400)
    resp = reference.e_step(x, components)[1].exp()
    got = m_step(statistics(x, components, "fp64"), components, 1e-3)
    wanted = reference.m_step(x, resp, kind, 1e-3)
    for name in ("weights", "means", "covariances", "precisions_cholesky"):
        torch.testing.assert_close(
            getattr(got, name), getattr(wanted, name), rtol=1e-10, atol=1e-11, msg=name
        )


@every_kind
@pytest.mark.parametrize("size", [1, 63, 64, 65, 128, 129, 130])
def test_statistics_do_not_depend_on_the_tiles(mixture, kind, size):
    x, components = mixture(kind, n=129)
    got, whole = statistics(x, components, "fp64", size), statistics(x, components, "fp64", 129)
    for name in ("log_likelihood", "s0", "s1", "s2"):
        torch.testing.assert_close(getattr(got, name), getattr(whole, name), rtol=1e-11, atol=1e-10)


@every_kind
@pytest.mark.parametrize("d", [1, 2, 3, 17, 96, 100, 128])
def test_dimensions(mixture, kind, d):
    x, components = mixture(kind, n=40, k=3, d=d)
    got, wanted = statistics(x, components, "fp64", 33), reference.statistics(x, components)
    for name in ("log_likelihood", "s0", "s1", "s2"):
        assert relative(getattr(got, name), getattr(wanted, name)) < 1e-11, name


@every_kind
def test_960_dimensions(mixture, kind):
    x, components = mixture(kind, n=12, k=2, d=960)
    got = backend.log_joint(*in_mode(x, components, "fp64"))
    torch.testing.assert_close(got, reference.log_joint(x, components), rtol=1e-11, atol=1e-9)
    narrow = backend.log_joint(*in_mode(x, components, "fp32")).double()
    torch.testing.assert_close(narrow, got, rtol=2e-6, atol=0)


@every_kind
def test_full_covariances_go_in_blocks_of_components(mixture, kind, monkeypatch):
    x, components = mixture(kind, n=50, k=7)
    whole = statistics(x, components, "fp64")
    monkeypatch.setattr(
        backend, "_component_blocks", lambda k, n, d: (slice(i, min(i + 3, k)) for i in (0, 3, 6))
    )
    for name in ("s0", "s1", "s2"):
        torch.testing.assert_close(
            getattr(statistics(x, components, "fp64"), name), getattr(whole, name)
        )


@every_kind
@pytest.mark.parametrize("distance", [1e3, 1e6, 1e9])
def test_r7_no_underflow_hole(mixture, kind, distance):
    """Far from every component: finite, sum 1, and the argmax of exact arithmetic."""
    _, components = mixture(kind)
    generator = torch.Generator().manual_seed(7)
    x = distance * torch.randn(40, 6, generator=generator, dtype=torch.float64)
    density, resp = backend.responsibilities(*in_mode(x, components, "fp64"))
    assert bool(density.isfinite().all() and resp.isfinite().all())
    torch.testing.assert_close(resp.sum(1), torch.ones_like(density))
    joint = reference.log_joint(x, components)
    lost = joint.amax(1) - joint.gather(1, resp.argmax(1, keepdim=True))[:, 0]
    assert bool((lost <= 1e-13 * joint.amax(1).abs()).all())


@every_kind
def test_a_component_of_weight_zero_takes_nothing(mixture, kind):
    x, c = mixture(kind)
    weights = c.weights.clone()
    weights[2] = 0
    c = Components(kind, weights / weights.sum(), c.means, c.covariances, c.precisions_cholesky)
    _, resp = backend.responsibilities(*in_mode(x, c, "fp32"))
    assert bool(resp.isfinite().all())
    assert float(resp[:, 2].max()) == 0
    ids, log_resp = backend.top_components(*in_mode(x, c, "fp32"), 5)
    assert bool((ids[:, -1] == 2).all())
    assert bool(log_resp[:, -1].isneginf().all())
    assert bool(statistics(x, c, "fp32").s2.isfinite().all())


@pytest.mark.parametrize(("mode", "bits"), [("fp16", 11), ("tf32", 11), ("bf16", 8)])
def test_rounding_of_operands(mode, bits):
    x = torch.cat([torch.linspace(-16, -0.01, 2001), torch.linspace(0.01, 16, 2001)])
    rounded = backend.round_operand(x, mode)
    assert rounded.dtype == torch.float32
    error = ((rounded - x) / x).abs()
    assert 2.0**-bits / 3 < float(error.max()) <= 2.0**-bits
    torch.testing.assert_close(backend.round_operand(rounded, mode), rounded, rtol=0, atol=0)
    wide = backend.round_operand(x.double(), mode)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), rounded, rtol=0, atol=0)


def test_ties_go_to_even_in_tf32():
    """Half units of 1 and of its neighbours, up and down, exactly."""
    unit = 2.0**-10
    x = 1 + unit * torch.tensor([0.5, 1.5, 2.5, 3.5, 0.499, 1.501])
    want = 1 + unit * torch.tensor([0.0, 2.0, 2.0, 4.0, 0.0, 2.0])
    assert torch.equal(backend.round_operand(torch.cat([x, -x]), "tf32"), torch.cat([want, -want]))


@pytest.mark.parametrize("mode", ["fp16x3", "fp32", "fp64"])
def test_wide_modes_round_no_operand(mode):
    x = torch.linspace(-16, 16, 100, dtype=backend.compute_dtype(mode))
    assert backend.round_operand(x, mode) is x


@every_kind
def test_half_precision_saturates(mixture, kind):
    """Samples or means that float16 cannot hold: wrong by much, but never NaN."""
    x, c = mixture(kind)
    tight = Components.from_covariances(kind, c.weights, c.means, c.covariances * 1e-10)
    far = Components.from_covariances(kind, c.weights, c.means * 1e6, c.covariances)
    for components in (tight, far):
        density, resp = backend.responsibilities(*in_mode(x, components, "fp16"))
        assert bool(density.isfinite().all())
        torch.testing.assert_close(resp.sum(1), torch.ones_like(density))


def test_nearest_means(mixture):
    x, components = mixture("spherical", n=300, k=9)
    label, distance = backend.nearest_means(x, components.means)
    wanted = torch.cdist(x, components.means).square()
    torch.testing.assert_close(label, wanted.argmin(1))
    torch.testing.assert_close(distance, wanted.amin(1), rtol=1e-10, atol=1e-10)
    assert float(backend.nearest_means(components.means, components.means)[1].min()) >= 0


def test_scatter_is_float64_from_float32_tiles():
    x = 1 + 1e-4 * torch.randn(5000, 3, generator=torch.Generator().manual_seed(0))
    got = backend.scatter(x.split(700), 3, CPU)
    torch.testing.assert_close(got, x.double().T @ x.double(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("chosen", ["medium", "high", "highest"])
def test_exact_float32_leaves_the_choice_of_the_process(chosen):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(chosen)
    try:
        with pytest.raises(RuntimeError, match="inside"), backend.exact_float32():
            assert torch.get_float32_matmul_precision() == "highest"
            raise RuntimeError("inside")
        assert torch.get_float32_matmul_precision() == chosen
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("k", "d"), [(1, 1), (1, 960), (64, 128), (1024, 128), (65536, 768)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tiles_are_bounded(k, d, device):
    rows = backend.tile_rows(k, d, torch.device(device))
    assert 64 <= rows <= 1 << 16
    assert rows % 64 == 0
    assert rows * max(k, d) <= max({"cpu": 1 << 20, "cuda": 1 << 26}[device], 64 * max(k, d))


def test_misuse_is_refused(mixture):
    x, components = mixture("tied")
    with pytest.raises(ValueError, match="total_scatter"):
        backend.e_step([x], backend.prepare(components, "fp64"))
    with pytest.raises(ValueError, match="at least one tile"):
        backend.e_step([], backend.prepare(components, "fp64"))


def test_reference_of_one_gaussian_by_hand():
    """The oracle itself, against a density written out."""
    one = Components.from_covariances(
        "spherical",
        torch.ones(1).double(),
        torch.zeros(1, 2).double(),
        torch.tensor([4.0]).double(),
    )
    x = torch.tensor([[2.0, 0.0]]).double()
    wanted = -math.log(2 * math.pi * 4) - 0.5
    assert float(reference.log_joint(x, one)) == pytest.approx(wanted, rel=1e-14)
