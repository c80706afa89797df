"""Offsets, scales, ill-conditioned covariances and precision modes."""

import warnings

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy import linalg
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as SkGaussianMixture

from gmm_ivf import GaussianMixture


def fit(X, k=3, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return GaussianMixture(k, random_state=0, **options).fit(X)


def exact_shift(X32: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float32 samples minus their first row, which float64 holds exactly, and that row."""
    first = X32[0].astype(np.float64)
    return X32.astype(np.float64) - first, first


def test_gm_g1_two_distant_points(kind):
    """float32, an offset of half the range: the variances are reg_covar and nothing else."""
    X = np.array([[9999.0], [0.0]], dtype=np.float32)
    model = fit(X, 2, covariance_type=kind, reg_covar=0.1)
    assert_allclose(model.covariances_.ravel(), 0.1, rtol=1e-5)
    assert_allclose(np.sort(model.means_[:, 0]), [0, 9999], rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e4, 1e6])
def test_gm_g3_translation_of_float32(overlapping, kind, offset):
    """As the float64 fit of the same rounded samples, shifted back without rounding."""
    X = (overlapping + offset).astype(np.float32)
    exact, first = exact_shift(X)
    shifted, plain = (fit(x, covariance_type=kind) for x in (X, exact))
    assert_allclose(shifted.covariances_, plain.covariances_, rtol=2e-3, atol=2e-3)
    assert_allclose(shifted.means_ - first, plain.means_, atol=2e-3)
    assert_allclose(shifted.lower_bound_, plain.lower_bound_, atol=1e-4)
    margin = np.sort(plain.predict_proba(exact), axis=1)
    clear = margin[:, -1] - margin[:, -2] > 1e-2
    assert (shifted.predict(X) == plain.predict(exact))[clear].all()
    assert clear.mean() > 0.9


@pytest.mark.parametrize("offset", [1e3, 1e4, 1e6])
def test_gm_g3_translation_of_float64(overlapping, kind, offset):
    """The means keep as many digits below the offset as float64 has."""
    X = overlapping + offset
    exact = X - X[0]
    shifted, plain = (fit(x, covariance_type=kind, max_iter=30, tol=0) for x in (X, exact))
    assert_allclose(shifted.covariances_, plain.covariances_, rtol=1e-9, atol=1e-9)
    assert_allclose(shifted.means_ - X[0], plain.means_, atol=1e-9 + 1e-15 * offset)
    assert (shifted.predict(X) == plain.predict(exact)).all()
    assert_allclose(shifted.lower_bounds_, plain.lower_bounds_, rtol=1e-11)


@pytest.mark.parametrize("power", [-300, -100, -40, 40, 120])
def test_scaling_by_a_power_of_two_changes_nothing(overlapping, kind, power):
    scale = 2.0**power
    plain = fit(overlapping, covariance_type=kind, reg_covar=1e-6)
    scaled = fit(overlapping * scale, covariance_type=kind, reg_covar=1e-6 * scale**2)
    assert_allclose(scaled.means_ / scale, plain.means_, rtol=1e-10)
    assert_allclose(scaled.covariances_ / scale**2, plain.covariances_, rtol=1e-10, atol=1e-13)
    assert scaled.n_iter_ == plain.n_iter_
    volume = 3 * power * np.log(2)
    assert_allclose(scaled.lower_bound_ + volume, plain.lower_bound_, rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-42, 1e30])
def test_extreme_scales(blobs, kind, dtype, scale):
    """Denormal numbers included: with the default reg_covar finite, with none as the data are."""
    with np.errstate(under="ignore"):
        X = (blobs() * scale).astype(dtype)
    model = fit(X, covariance_type=kind)
    assert np.isfinite(model.predict_proba(X)).all()
    assert np.isfinite(model.score_samples(X)).all()
    if scale == 1e-42 and dtype == np.float32:
        return  # a dozen distinct values are left
    bare = fit(X, covariance_type=kind, reg_covar=0)
    plain = fit(blobs(), covariance_type=kind, reg_covar=0)
    assert_allclose(bare.covariances_ / scale / scale, plain.covariances_, rtol=1e-3, atol=1e-3)


def test_scales_whose_squares_vanish(blobs, kind):
    model = fit(blobs() * 1e-200, covariance_type=kind)
    assert np.isfinite(model.score_samples(blobs() * 1e-200)).all()
    diagonal = model.covariances_
    diagonal = diagonal if kind in ("spherical", "diag") else np.linalg.eigvalsh(diagonal)
    assert_allclose(diagonal, 1e-6)


def test_values_too_large_for_squares(blobs, kind):
    with pytest.raises(ValueError, match="scale the input data below 1e\\+140"):
        fit(blobs() * 1e200, covariance_type=kind)
    model = fit(blobs() * 1e130, covariance_type=kind)
    assert np.isfinite(model.covariances_).all()
    assert np.isfinite(model.lower_bound_)


def test_one_cluster_far_away(blobs, kind, kmeans):
    X = blobs(n=300, d=2, k=2, spread=6.0)
    far = np.concatenate([X, [[1e7, -1e7]] + 0.1 * X[:20]])
    for dtype in (np.float64, np.float32):
        model = fit(far.astype(dtype), 3, covariance_type=kind)
        near = np.argsort(model.means_[:, 0])[:2]
        assert_allclose(model.weights_[near].sum(), 300 / 320, rtol=1e-6)
        assert np.abs(model.means_[near]).max() < 30
        assert len(set(model.predict(X.astype(dtype)))) == 2


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("condition", [1e4, 1e6, 1e8, 1e10, 1e12])
@pytest.mark.parametrize("kind", ["tied", "full"])
def test_gm_g2_ill_conditioned(kind, condition, dtype):
    """score_samples against a singular value decomposition of the samples in float64.

    Forming the covariance costs 1e-16 times the condition number, whoever does it.
    """
    rng = np.random.default_rng(0)
    axes, _ = np.linalg.qr(rng.standard_normal((16, 16)))
    spread = np.sqrt(np.logspace(0, -np.log10(condition), 16))
    X = ((rng.standard_normal((1000, 16)) * spread) @ axes.T + 3.0).astype(dtype)
    model = fit(X, 1, covariance_type=kind, reg_covar=0)
    wide = X.astype(np.float64)
    left, values, _ = linalg.svd(wide - wide.mean(0), full_matrices=False)
    squared = 1000 * np.square(left).sum(1)
    log_determinant = 2 * np.log(values / np.sqrt(1000)).sum()
    wanted = -0.5 * (squared + log_determinant + 16 * np.log(2 * np.pi))
    tolerance = 1e-15 * condition + (2e-3 if dtype == np.float32 else 1e-9)
    assert_allclose(model.score_samples(X).astype(np.float64), wanted, atol=tolerance, rtol=1e-6)


def test_tight_clusters_in_float32_without_a_ridge(kind, kmeans):
    """The start must not lose variances of 1e-10 of the squared range, nor the iterations."""
    rng = np.random.default_rng(0)
    X = np.concatenate([c + 0.01 * rng.standard_normal((200, 2)) for c in (-1000, 1000)])
    X = X.astype(np.float32)
    model = fit(X, 2, covariance_type=kind, reg_covar=0)
    half = [part - part.mean(0) for part in (X[:200].astype(float), X[200:].astype(float))]
    full = np.stack([h.T @ h / 200 for h in half])[np.argsort(np.argsort(model.means_[:, 0]))]
    wanted = {
        "full": full,
        "tied": full.mean(0),
        "diag": np.diagonal(full, axis1=1, axis2=2),
        "spherical": np.trace(full, axis1=1, axis2=2) / 2,
    }[kind]
    assert_allclose(model.covariances_, wanted, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("distance", [1e2, 1e4, 1e7])
def test_r7_far_samples_in_float32(overlapping, kind, distance):
    """Argmax and score as scikit-learn in float64 on the same parameters."""
    X = overlapping.astype(np.float32)
    model = fit(X, covariance_type=kind)
    theirs = SkGaussianMixture(3, covariance_type=kind).fit(overlapping)
    for name in ("weights_", "means_", "covariances_", "precisions_cholesky_"):
        setattr(theirs, name, getattr(model, name))
    far = (distance * np.random.default_rng(1).standard_normal((200, 3))).astype(np.float32)
    assert (model.predict(far) == theirs.predict(far.astype(float))).mean() >= 0.99
    assert_allclose(model.score_samples(far), theirs.score_samples(far.astype(float)), rtol=1e-5)
    proba = model.predict_proba(far)
    assert np.isfinite(proba).all()
    assert_allclose(proba.sum(1), 1, rtol=1e-5)


def test_gm_g4_a_query_of_1e25(overlapping, kind):
    """One-hot, and -inf where float32 cannot hold the score; never NaN."""
    X = overlapping.astype(np.float32)
    model = fit(X, covariance_type=kind)
    query = np.array(
        [[1e25, 1e25, 1e25], [0, 0, 0], [-1e25, 3, 0], [3e38, -3e38, 0]], dtype=np.float32
    )
    assert model.score_samples(query)[[0, 2, 3]].tolist() == [-np.inf] * 3
    assert np.isfinite(model.score_samples(query.astype(float))).all()
    assert np.isfinite(model.score(query))
    proba = model.predict_proba(query)
    assert np.isfinite(proba).all()
    assert_allclose(proba.sum(1), 1)
    assert set(model.predict(query)) <= {0, 1, 2}
    ids, log_resp = model.top_components(query, 3)
    assert np.sort(ids, axis=1).tolist() == [[0, 1, 2]] * 4
    assert not np.isnan(log_resp).any()


def test_gm_g4_a_query_beyond_float64(overlapping, kind):
    model = fit(overlapping, covariance_type=kind)
    query = np.zeros((3, 3))
    query[1, 2] = 1e200
    for method in (model.predict, model.predict_proba, model.score_samples):
        with pytest.raises(ValueError, match="too large in row 1"):
            method(query)


@pytest.mark.parametrize("d", [40, 512])
def test_gm_g5_many_dimensions(kind, d):
    if kind == "full" and d > 100:
        pytest.skip("needs more samples than a test has time for")
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((16, d))
    X = (centres[rng.integers(16, size=1000)] + rng.standard_normal((1000, d))).astype(np.float32)
    model = fit(X, 16, covariance_type=kind)
    assert model.lower_bounds_[-1] >= model.lower_bounds_[0] - 1e-4  # may start at the optimum
    assert np.abs(model.means_).max() > 1
    diagonal = model.covariances_ if kind in ("spherical", "diag") else None
    diagonal = np.diagonal(model.covariances_, axis1=-2, axis2=-1) if diagonal is None else diagonal
    assert 0.2 < np.median(diagonal) < 2


MODE_BOUNDS = {
    # nats per sample, agreement of the labels, relative error of the means
    "fp32": (1e-3, 0.999, 1e-4),
    "fp16x3": (1e-3, 0.999, 1e-4),
    "fp16": (0.03, 0.99, 2e-3),
    "tf32": (0.03, 0.99, 2e-3),
    "bf16": (0.2, 0.95, 1e-2),
}


@pytest.mark.parametrize("mode", MODE_BOUNDS)
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_emulated_modes(kind, mode, offset):
    """One EM step on separated unit-variance data against fp64 (R5's bounds)."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((16, 32))
    X = centres[rng.integers(16, size=1500)] + np.sqrt(0.5) * rng.standard_normal((1500, 32))
    X = (X + offset).astype(np.float32)
    options = {"covariance_type": kind, "max_iter": 1, "means_init": centres + offset}
    narrow, wide = (fit(X, 16, precision=p, **options) for p in (mode, "fp64"))
    assert narrow.precision_ == mode
    nats, agreement, relative = MODE_BOUNDS[mode]
    assert abs(narrow.lower_bound_ - wide.lower_bound_) < nats
    assert (narrow.predict(X) == wide.predict(X)).mean() >= agreement
    error = np.linalg.norm(narrow.means_ - wide.means_) / np.linalg.norm(wide.means_ - offset)
    assert error < relative
    assert np.linalg.norm(narrow.covariances_ - wide.covariances_) < 3 * relative * np.linalg.norm(
        wide.covariances_
    )


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
@pytest.mark.parametrize(("low", "high"), [(0, 100), (49, 51), (0, 1000)])
def test_gm_g7_sums_do_not_overflow_in_half(kind, mode, low, high):
    """uniform data with sums and squared norms far above 65504."""
    X = np.random.default_rng(0).uniform(low, high, (2000, 32)).astype(np.float32)
    model = fit(X, 4, covariance_type=kind, precision=mode, max_iter=5)
    assert np.isfinite(model.means_).all()
    assert np.isfinite(model.covariances_).all()
    counts = np.bincount(model.predict(X), minlength=4)
    assert counts.min() > 0
    wide = fit(X, 4, covariance_type=kind, precision="fp64", max_iter=5)
    assert abs(model.lower_bound_ - wide.lower_bound_) < 0.5


@pytest.mark.parametrize("chosen", ["medium", "highest"])
def test_the_float32_setting_of_the_process(overlapping, kind, chosen):
    X = overlapping.astype(np.float32)
    wanted = fit(X, covariance_type=kind)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(chosen)
    try:
        model = fit(X, covariance_type=kind)
        assert torch.get_float32_matmul_precision() == chosen
        assert (model.means_ == wanted.means_).all()
        assert (model.predict_proba(X) == wanted.predict_proba(X)).all()
        assert torch.get_float32_matmul_precision() == chosen
        with pytest.raises(ValueError, match="NaN"):
            model.fit(X * np.float32(np.nan))
        assert torch.get_float32_matmul_precision() == chosen
    finally:
        torch.set_float32_matmul_precision(before)
