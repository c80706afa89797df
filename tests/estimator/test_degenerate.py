"""Data that a mixture cannot be fitted to, or only just."""

import warnings

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.exceptions import ConvergenceWarning

from gmm_ivf import GaussianMixture
from gmm_ivf.kernels.dispatch import ROUNDING_UNITS

DTYPES = [np.float32, np.float64]


def quiet_fit(X, k, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return GaussianMixture(k, random_state=0, **options).fit(X)


def assert_sane(model, X):
    for name in ("weights_", "means_", "covariances_", "precisions_cholesky_", "lower_bounds_"):
        assert np.isfinite(getattr(model, name)).all(), name
    assert_allclose(model.weights_.sum(), 1, rtol=1e-12)
    proba = np.asarray(model.predict_proba(X))
    assert np.isfinite(proba).all()
    assert_allclose(proba.sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("init_params", ["kmeans", "k-means++", "random", "random_from_data"])
def test_gm_g10_fewer_distinct_points(kind, dtype, init_params):
    X = np.repeat(np.array([[0, 0], [5, 1], [-3, 7]], dtype=dtype), 100, axis=0)
    model = quiet_fit(X, 5, covariance_type=kind, init_params=init_params)
    assert_sane(model, X)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gm_g10_two_of_five_components_stay_empty(kind, dtype, kmeans):
    X = np.repeat(np.array([[0, 0], [5, 1], [-3, 7]], dtype=dtype), 100, axis=0)
    model = GaussianMixture(5, covariance_type=kind, random_state=0)
    with pytest.warns(ConvergenceWarning, match="2 of 5 components hold no samples"):
        model.fit(X)
    assert_allclose(np.sort(model.weights_), [0, 0, 1 / 3, 1 / 3, 1 / 3], atol=1e-9)
    assert_sane(model, X)
    ids, resp = model.responsibilities(X)
    assert (ids[:, 0] == model.predict(X)).all()
    assert_allclose(resp[:, 0], 1, atol=1e-6)
    again, y = model.sample(50)
    assert np.isfinite(again).all()
    assert len(y) == 50


@pytest.mark.parametrize("dtype", DTYPES)
def test_gm_g10_without_a_ridge_is_an_error(kind, dtype):
    X = np.repeat(np.array([[0, 0], [5, 1], [-3, 7]], dtype=dtype), 100, axis=0)
    with pytest.raises(ValueError, match=r"component .* increase reg_covar"):
        quiet_fit(X, 5, covariance_type=kind, reg_covar=0)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1e6 / 3, 1e20, 1e-20])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 3])
def test_all_points_equal(kind, value, dtype, k, kmeans):
    X = np.full((40, 3), value, dtype=dtype)
    model = quiet_fit(X, k, covariance_type=kind)
    assert_sane(model, X)
    assert_allclose(model.means_, float(X[0, 0]), rtol=1e-15)
    diagonal = {"spherical": (k,), "diag": (k, 3), "tied": (3,), "full": (k, 3)}[kind]
    got = model.covariances_
    got = got if kind in ("spherical", "diag") else np.diagonal(got, axis1=-2, axis2=-1)
    assert_allclose(got, np.full(diagonal, 1e-6), rtol=1e-9)
    with pytest.raises(ValueError, match="increase reg_covar"):
        quiet_fit(X, k, covariance_type=kind, reg_covar=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constant", [0.0, 7.0, 1e4 / 3])
@pytest.mark.parametrize("kind", ["diag", "tied", "full"])
def test_gm_g11_a_constant_feature_has_reg_covar(blobs, kind, dtype, constant):
    X = blobs(n=200, d=3).astype(dtype)
    X[:, 1] = constant
    model = quiet_fit(X, 3, covariance_type=kind)
    diagonal = (
        model.covariances_
        if kind == "diag"
        else np.diagonal(model.covariances_, axis1=-2, axis2=-1)
    )
    assert_allclose(diagonal[..., 1], 1e-6, rtol=1e-6)
    assert_sane(model, X)


@pytest.mark.parametrize("kind", ["diag", "tied", "full"])
def test_a_constant_feature_beside_huge_ones(blobs, kind):
    """float32 squares of the precision would overflow: auto must notice."""
    X = (blobs(n=200, d=3) * 1e20).astype(np.float32)
    X[:, 1] = 0
    model = quiet_fit(X, 2, covariance_type=kind)
    assert model.precision_ == "fp64"
    assert_sane(model, X)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["tied", "full"])
def test_gm_g9_rank_deficient(kind, dtype):
    rng = np.random.default_rng(0)
    X = (rng.standard_normal((200, 5)) @ rng.standard_normal((5, 32))).astype(dtype)
    model = quiet_fit(X, 2, covariance_type=kind)
    assert_sane(model, X)
    assert np.linalg.eigvalsh(model.covariances_).min() > 0.5e-6
    with pytest.raises(ValueError, match=r"is not positive definite, .* increase reg_covar"):
        quiet_fit(X, 2, covariance_type=kind, reg_covar=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reg_covar", [1e-12, 1e3, 1e12])
def test_r6_both_ends_of_the_ridge(overlapping, kind, dtype, reg_covar):
    X = overlapping.astype(dtype)
    model = quiet_fit(X, 3, covariance_type=kind, reg_covar=reg_covar)
    assert_sane(model, X)
    if reg_covar >= 1e3:  # far above the variances of the data: spherical whatever was asked for
        got = model.covariances_
        got = got if kind in ("spherical", "diag") else np.diagonal(got, axis1=-2, axis2=-1)
        assert_allclose(got, reg_covar, rtol=2e-2)
    else:
        plain = quiet_fit(X, 3, covariance_type=kind, reg_covar=0)
        assert_allclose(model.covariances_, plain.covariances_, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 3), (10, 11)])
def test_fewer_samples_than_components(kind, n, k):
    X = np.random.default_rng(0).standard_normal((n, 2))
    with pytest.raises(ValueError, match=r"n_samples|sample\(s\)"):
        GaussianMixture(k, covariance_type=kind).fit(X)
    with pytest.raises(ValueError, match=r"n_samples|sample\(s\)"):
        GaussianMixture(k, covariance_type=kind).fit(torch.from_numpy(X))


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_many_components_as_samples(kind, dtype, kmeans):
    X = np.random.default_rng(0).standard_normal((12, 2)).astype(dtype)
    model = quiet_fit(X, 12, covariance_type=kind)
    assert_sane(model, X)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 2, 17])
def test_one_component_is_mean_and_covariance(kind, dtype, d):
    X = (np.random.default_rng(0).standard_normal((300, d)) * 3 + 5).astype(dtype)
    model = GaussianMixture(1, covariance_type=kind, reg_covar=0).fit(X)
    wide = X.astype(np.float64)
    covariance = np.cov(wide.T, bias=True).reshape(d, d)
    wanted = {
        "full": covariance[None],
        "tied": covariance,
        "diag": wide.var(0)[None],
        "spherical": wide.var(0).mean(keepdims=True),
    }[kind]
    assert_allclose(model.covariances_, wanted, rtol=2e-5, atol=1e-5)
    assert_allclose(model.means_[0], wide.mean(0), rtol=1e-6)
    assert model.weights_ == [1.0]
    assert model.converged_
    assert model.n_iter_ == 2
    assert (model.predict(X) == 0).all()
    assert (model.predict_proba(X) == 1).all()


@pytest.mark.parametrize("k", [63, 65, 1000, 1025])
@pytest.mark.parametrize("kind", ["spherical", "diag", "tied"])
def test_gm_g20_every_id_is_a_component(kind, k, kmeans):
    """All log-densities negative (large D), K beside powers of two."""
    X = 100 * np.random.default_rng(0).standard_normal((1100, 8)).astype(np.float32)
    model = quiet_fit(X, k, covariance_type=kind, max_iter=2, reg_covar=100.0)
    assert model.score_samples(X).max() < 0
    labels = model.predict(X)
    ids, resp = model.responsibilities(X, max_components=6)
    top, log_resp = model.top_components(X, 5)
    for found in (labels, ids, top):
        assert found.dtype == np.int64
        assert found.min() >= 0
        assert found.max() < k
    assert_allclose(resp[:, :5], np.exp(log_resp), atol=1e-6)
    assert len(np.unique(labels)) > 0.8 * k


def test_gm_g20_full(kind):
    if kind != "full":
        pytest.skip("has a test with more components")
    X = 100 * np.random.default_rng(0).standard_normal((300, 3)).astype(np.float32)
    for k in (5, 63, 65):
        model = quiet_fit(X, k, covariance_type=kind, max_iter=2, reg_covar=1.0)
        ids, _ = model.top_components(X, k)
        assert (np.sort(ids, axis=1) == np.arange(k)).all()


def test_gm_g15_a_smaller_tol_reaches_the_truth():
    rng = np.random.default_rng(0)
    X = np.concatenate([rng.normal(0, 1, 1000), rng.normal(2.5, 1, 3000)])[:, None]
    options = {"init_params": "random", "random_state": 0, "covariance_type": "full"}
    early = GaussianMixture(2, tol=1e-2, **options).fit(X)
    late = GaussianMixture(2, tol=1e-9, max_iter=5000, **options).fit(X)
    assert late.n_iter_ > 10 * early.n_iter_
    assert abs(np.sort(late.weights_)[0] - 0.25) < 0.05
    assert (np.diff(late.lower_bounds_) > -1e-12).all()
    narrow = GaussianMixture(2, tol=1e-6, max_iter=5000, **options).fit(X.astype(np.float32))
    assert abs(np.sort(narrow.weights_)[0] - 0.25) < 0.06


def in_a_plane(scale: float) -> np.ndarray:
    """Samples of clusters in three of twelve dimensions."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(6, 3)) * 3
    x = centers[rng.integers(6, size=200)] + rng.normal(size=(200, 3))
    return (scale * x @ rng.normal(size=(3, 12))).astype(np.float32)


@pytest.mark.parametrize("init_params", ["kmeans", "random"])
@pytest.mark.parametrize("precision", ["fp32", "fp16x3", "tf32"])
@pytest.mark.parametrize("scale", [1.0, 10.0, 1000.0])
def test_mended_fits_settle(scale, precision, init_params):
    """Eigenvalues left as rounding made them decided between components, and EM never ended."""
    x = in_a_plane(scale)
    options = {"covariance_type": "full", "precision": precision, "init_params": init_params}
    model = quiet_fit(x, 6, max_iter=60, **options)
    report = model.fit_report_
    assert report["mended_covariances"] > 0
    assert model.converged_
    assert_sane(model, x)
    ends = np.array(model.lower_bounds_[-5:])
    assert ends[-1] > ends.max() - 0.3
    # The ridge is far below the rounding of the largest variances, to which others are raised.
    values = np.linalg.eigvalsh(model.covariances_)
    assert (values[:, 0] > ROUNDING_UNITS[precision] / 2 * values[:, -1]).all()


@pytest.mark.parametrize("init_params", ["kmeans", "random"])
def test_auto_widens_before_it_mends(init_params):
    model = quiet_fit(in_a_plane(10.0), 6, covariance_type="full", init_params=init_params)
    assert model.precision_ == "fp64"
    assert model.fit_report_["mended_covariances"] == 0


def test_covariances_mended_are_counted_for_the_best_start():
    x = in_a_plane(10.0)
    options = {"covariance_type": "full", "precision": "fp32", "max_iter": 3, "tol": 0}
    model = quiet_fit(x, 6, n_init=4, **options)
    assert 0 < model.fit_report_["mended_covariances"] <= 3 * 6


def test_nothing_is_mended_without_a_ridge():
    with pytest.raises(ValueError, match="increase reg_covar"):
        quiet_fit(in_a_plane(10.0), 6, covariance_type="full", precision="fp32", reg_covar=0)
