"""Parameters, precision factors and the M-step: K-sized float64 work."""

import math
from dataclasses import replace

import pytest
import torch

from gmm_ivf.kernels import reference
from gmm_ivf.kernels.components import (
    COVARIANCE_TYPES,
    ROUNDING_UNITS,
    Components,
    IllDefinedCovarianceError,
    Statistics,
    half_log_determinant,
    m_step,
    mended_m_step,
    precisions_cholesky,
    relative_ridge,
)

every_kind = pytest.mark.parametrize("kind", COVARIANCE_TYPES)


def as_matrices(covariances: torch.Tensor, kind: str, k: int, d: int) -> torch.Tensor:
    """(K, D, D) whatever the type."""
    if kind == "spherical":
        return covariances[:, None, None] * torch.eye(d, dtype=covariances.dtype)
    if kind == "diag":
        return torch.diag_embed(covariances)
    return covariances.expand(k, d, d)


@every_kind
def test_precision_factors(mixture, kind):
    _, c = mixture(kind, k=4, d=7)
    factor = c.precisions_cholesky
    assert factor.shape == c.covariances.shape
    if kind in ("spherical", "diag"):
        torch.testing.assert_close(factor, 1 / c.covariances.sqrt())
        return
    torch.testing.assert_close(factor @ factor.mT, torch.linalg.inv(c.covariances))
    torch.testing.assert_close(factor, factor.triu())
    assert bool((factor.diagonal(dim1=-2, dim2=-1) > 0).all())


@every_kind
def test_determinants_and_constants(mixture, kind):
    _, c = mixture(kind, k=4, d=7)
    matrices = as_matrices(c.covariances, kind, 4, 7)
    wanted = -0.5 * torch.linalg.slogdet(matrices).logabsdet
    got = half_log_determinant(c.precisions_cholesky, kind, 7)
    torch.testing.assert_close(got.expand(4), wanted)
    constants = c.weights.log() + wanted - 3.5 * math.log(2 * math.pi)
    torch.testing.assert_close(c.log_constants(), constants)


@every_kind
def test_squared_radii(mixture, kind):
    _, c = mixture(kind, k=4, d=7)
    inverse = torch.linalg.inv(as_matrices(c.covariances, kind, 4, 7))
    wanted = torch.einsum("kd,kde,ke->k", c.means, inverse, c.means)
    torch.testing.assert_close(c.squared_radii(), wanted)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e-300, 1e300])
@every_kind
def test_covariances_that_are_refused(kind, bad):
    """Also what is positive but leaves float64 no room for squares."""
    covariances = {
        "spherical": torch.tensor([1.0, bad, 1.0]),
        "diag": torch.tensor([[1.0, 1.0], [1.0, bad], [1.0, 1.0]]),
        "tied": torch.diag(torch.tensor([1.0, bad])),
        "full": torch.diag_embed(torch.tensor([[1.0, 1.0], [1.0, bad], [1.0, 1.0]])),
    }
    with pytest.raises(IllDefinedCovarianceError, match="increase reg_covar") as caught:
        precisions_cholesky(covariances[kind].double().nan_to_num(nan=bad, posinf=bad), kind)
    number = 0 if kind == "tied" else 1
    assert f"component {number} " in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("kind", ["tied", "full"])
def test_an_indefinite_matrix_is_refused(kind):
    matrix = torch.tensor([[1.0, 2.0], [2.0, 1.0]]).double()
    with pytest.raises(IllDefinedCovarianceError, match="component 0 "):
        precisions_cholesky(matrix if kind == "tied" else matrix[None], kind)


def empty_statistics(c: Components) -> Statistics:
    return Statistics(
        c.means.new_zeros(()),
        c.means.new_zeros(len(c.means)),
        torch.zeros_like(c.means),
        torch.zeros_like(c.covariances),
    )


@every_kind
def test_an_empty_component_keeps_its_mean(mixture, kind):
    x, c = mixture(kind)
    stats = reference.statistics(x, c)
    s0, s1, s2 = stats.s0.clone(), stats.s1.clone(), stats.s2.clone()
    s0[1], s1[1] = 0, 0
    if kind != "tied":
        s2[1] = 0
    got = m_step(replace(stats, s0=s0, s1=s1, s2=s2), c, 1e-2)
    torch.testing.assert_close(got.means[1], c.means[1], rtol=0, atol=0)
    assert 0 < float(got.weights[1]) < 1e-15
    torch.testing.assert_close(got.weights.sum(), torch.ones(()).double())
    if kind != "tied":
        matrix = as_matrices(got.covariances, kind, *c.means.shape)[1]
        torch.testing.assert_close(matrix, 1e-2 * torch.eye(6).double())
    assert bool(got.log_constants().isfinite().all())


@every_kind
def test_nothing_at_all_stays_finite(mixture, kind):
    _, c = mixture(kind)
    got = m_step(empty_statistics(c), c, 1e-6)
    assert all(bool(t.isfinite().all()) for t in (got.weights, got.means, got.covariances))
    torch.testing.assert_close(got.means, c.means, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["spherical", "diag"])
def test_rounding_never_makes_a_variance_negative(mixture, kind):
    x, c = mixture(kind)
    stats = reference.statistics(x, c)
    delta = stats.s1 / stats.s0[:, None]
    square = delta.square().sum(1) if kind == "spherical" else delta.square()
    count = stats.s0 if kind == "spherical" else stats.s0[:, None]
    short = replace(stats, s2=count * square * (1 - 1e-6))
    got = m_step(short, c, 1e-6)
    torch.testing.assert_close(got.covariances, torch.full_like(got.covariances, 1e-6))
    with pytest.raises(IllDefinedCovarianceError):
        m_step(short, c, 0.0)


def as_one(kind, matrix: torch.Tensor) -> tuple[Components, Statistics]:
    """Statistics of two components, of which the first has 4 samples and this second moment."""
    d = len(matrix)
    c = Components.equal(kind, torch.zeros(2, d).double(), 1.0)
    moments = torch.stack([4 * matrix, torch.eye(d).double()])
    counts = torch.tensor([4.0, 1.0]).double()
    s2 = moments if kind == "full" else 5 * matrix
    return c, Statistics(torch.zeros(()), counts, torch.zeros(2, d).double(), s2)


@pytest.mark.parametrize("mode", ["fp16", "fp16x3", "tf32"])
@pytest.mark.parametrize("kind", ["tied", "full"])
@pytest.mark.parametrize("least", [-1e-3, -1e-7, 0.0, 1e-7, 1e-5, 1e-2])
def test_eigenvalues_below_the_rounding_of_sums_are_raised_to_it(kind, mode, least):
    """What is above it stays; the ridge is added after that."""
    axes = torch.linalg.qr(torch.arange(9.0).view(3, 3).cos().double()).Q
    found = torch.tensor([1.0, 0.5, least]).double()
    c, stats = as_one(kind, (axes * found) @ axes.T)
    reg_covar, floor = 1e-6, ROUNDING_UNITS[mode] * float(found.norm())
    got, mended = mended_m_step(stats, c, reg_covar, mode)
    first = got.covariances[0] if kind == "full" else got.covariances
    assert mended == (least < floor)
    true = found.clamp_min(floor)
    ridge = reg_covar + relative_ridge(kind, mode) * float(true.mean())
    wanted = (axes * true) @ axes.T + ridge * torch.eye(3).double()
    torch.testing.assert_close(first, wanted, rtol=0, atol=1e-14)
    if kind == "full":
        other = (1 + reg_covar + relative_ridge(kind, mode)) * torch.eye(3).double()
        torch.testing.assert_close(got.covariances[1], other, rtol=0, atol=1e-14)


@every_kind
def test_mending_changes_nothing_that_is_definite(mixture, kind):
    x, c = mixture(kind)
    stats = reference.statistics(x, c)
    got, mended = mended_m_step(stats, c, 1e-6, "fp16")
    want = m_step(stats, c, 1e-6, mode="fp16")
    assert mended == 0
    for name in ("weights", "means", "covariances", "precisions_cholesky"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["tied", "full"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_mended(kind, value):
    c, stats = as_one(kind, torch.diag(torch.tensor([1.0, value])).double())
    with pytest.raises(IllDefinedCovarianceError, match="component 0 "):
        mended_m_step(stats, c, 1e-6, "fp16")


@pytest.mark.parametrize("kind", ["tied", "full"])
def test_without_spread_or_ridge_a_covariance_is_refused(kind):
    c, stats = as_one(kind, torch.zeros(2, 2).double())
    with pytest.raises(IllDefinedCovarianceError, match="component 0 "):
        mended_m_step(stats, c, 0.0, "fp16x3")


@every_kind
@pytest.mark.parametrize("reg_covar", [0.0, 1e-6, 10.0])
def test_reg_covar_is_added_to_the_diagonal(mixture, kind, reg_covar):
    x, c = mixture(kind)
    stats = reference.statistics(x, c)
    plain, ridged = m_step(stats, c, 0.0), m_step(stats, c, reg_covar)
    difference = as_matrices(ridged.covariances - plain.covariances, kind, *c.means.shape)
    wanted = reg_covar * torch.eye(6).double().expand_as(difference)
    torch.testing.assert_close(difference, wanted, rtol=1e-9, atol=1e-13)


@every_kind
def test_m_step_leaves_its_arguments_alone(mixture, kind):
    x, c = mixture(kind)
    stats = reference.statistics(x, c)
    before = [t.clone() for t in (stats.s0, stats.s1, stats.s2, c.means, c.covariances)]
    m_step(stats, c, 1.0)
    for old, new in zip(
        before, (stats.s0, stats.s1, stats.s2, c.means, c.covariances), strict=True
    ):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
