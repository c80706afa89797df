"""The same numbers as scikit-learn's GaussianMixture from the same start."""

import warnings
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as SkGaussianMixture

from gmm_ivf import GaussianMixture

TOLERANCE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


def start(X: np.ndarray, k: int, kind: str) -> dict:
    """Weights, means and precisions to start both from."""
    rng = np.random.default_rng(5)
    d = X.shape[1]
    weights = rng.uniform(0.5, 1.5, k)
    shape = {"spherical": (k,), "diag": (k, d)}.get(kind)
    if shape:
        precisions = rng.uniform(0.5, 1.5, shape)
    else:
        root = rng.standard_normal((k, d, d))
        precisions = np.eye(d) + root @ root.swapaxes(1, 2) / d
        precisions = precisions[0] if kind == "tied" else precisions
    return {
        "weights_init": weights / weights.sum(),
        "means_init": X[rng.choice(len(X), k, replace=False)],
        "precisions_init": precisions,
    }


def fit_both(X, k, kind, **options):
    models = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for cls in (GaussianMixture, SkGaussianMixture):
            models.append(cls(k, covariance_type=kind, **options).fit(X))
    return models


def assert_same(ours, theirs, tolerance=TOLERANCE):
    for name in ("weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_"):
        assert_allclose(getattr(ours, name), getattr(theirs, name), err_msg=name, **tolerance)
    assert ours.n_iter_ == theirs.n_iter_
    assert ours.converged_ == theirs.converged_
    assert_allclose(ours.lower_bound_, theirs.lower_bound_, **tolerance)
    assert_allclose(ours.lower_bounds_, theirs.lower_bounds_, **tolerance)


@pytest.mark.parametrize("d", [1, 2, 5, 17])
def test_a_fit_that_converges(blobs, kind, d):
    X = blobs(n=400, d=d, k=3, spread=1.5)
    ours, theirs = fit_both(X, 3, kind, **start(X, 3, kind), tol=1e-5, max_iter=300)
    assert ours.converged_
    assert ours.n_iter_ > 2
    assert_same(ours, theirs)


@pytest.mark.parametrize(("tol", "max_iter"), [(0.0, 30), (1e-3, 4), (0.0, 1), (1.0, 100)])
def test_a_fit_that_is_stopped(overlapping, kind, tol, max_iter):
    ours, theirs = fit_both(
        overlapping, 4, kind, **start(overlapping, 4, kind), tol=tol, max_iter=max_iter
    )
    assert_same(ours, theirs)


def test_no_iteration_at_all(overlapping, kind):
    given = start(overlapping, 4, kind)
    ours = GaussianMixture(4, covariance_type=kind, **given, max_iter=0).fit(overlapping)
    assert ours.n_iter_ == 0
    assert ours.lower_bounds_ == []
    assert not ours.converged_
    assert_allclose(ours.weights_, given["weights_init"], rtol=1e-14)
    assert_allclose(ours.means_, given["means_init"], rtol=1e-14)
    assert_allclose(ours.precisions_, given["precisions_init"], rtol=1e-10)


def test_what_the_fitted_model_says(overlapping, kind):
    ours, theirs = fit_both(overlapping, 4, kind, **start(overlapping, 4, kind))
    X = overlapping + 0.1
    assert_allclose(ours.score_samples(X), theirs.score_samples(X), **TOLERANCE)
    assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), **TOLERANCE)
    assert (ours.predict(X) == theirs.predict(X)).mean() > 0.999
    for name in ("score", "aic", "bic"):
        assert_allclose(getattr(ours, name)(X), getattr(theirs, name)(X), **TOLERANCE)


def test_samples_have_the_same_law(overlapping, kind):
    ours, theirs = fit_both(overlapping, 4, kind, **start(overlapping, 4, kind), random_state=3)
    X, y = ours.sample(4000)
    X_theirs, _ = theirs.sample(4000)
    assert X.shape == (4000, 3)
    assert y.shape == (4000,)
    assert_allclose(X.mean(0), X_theirs.mean(0), atol=0.15)
    assert_allclose(np.cov(X.T), np.cov(X_theirs.T), atol=0.4)
    assert_allclose(np.bincount(y, minlength=4) / 4000, ours.weights_, atol=0.03)
    assert abs(ours.score(X) - ours.score(X_theirs)) < 0.1


def test_warm_start(overlapping, kind):
    """Also that the first iteration is compared with the last bound of the fit before."""
    options = {**start(overlapping, 4, kind), "warm_start": True, "max_iter": 3}
    models = [c(4, covariance_type=kind, **options) for c in (GaussianMixture, SkGaussianMixture)]
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for _ in range(30):
            ours, theirs = (model.fit(overlapping) for model in models)
            assert_same(ours, theirs)
            counts.append(ours.n_iter_)
    assert counts[0] == 3
    assert counts[-1] == 1


@pytest.mark.parametrize("init_params", ["kmeans", "k-means++", "random", "random_from_data"])
def test_the_same_random_state_gives_the_same_fit(overlapping, kind, init_params):
    """On small data: with the draws of scikit-learn, in its order."""
    options = {"init_params": init_params, "random_state": 7, "max_iter": 40, "reg_covar": 1e-2}
    single_rows = init_params in ("k-means++", "random_from_data")
    ours, theirs = fit_both(overlapping, 4, kind, **options)
    if single_rows and kind == "tied":
        # There the scatter of all samples about the origin, whatever the mean, is divided by K.
        assert ours.lower_bound_ > theirs.lower_bound_ - 0.1
        return
    if single_rows:
        # There the first weights sum to K / N instead of 1, a constant of the first bound.
        assert_allclose(ours.lower_bounds_[0] - theirs.lower_bounds_[0], np.log(500 / 4))
        ours.lower_bounds_, theirs.lower_bounds_ = ours.lower_bounds_[1:], theirs.lower_bounds_[1:]
    assert_same(ours, theirs)
    ours, theirs = fit_both(overlapping, 4, kind, **options, n_init=4)
    assert_allclose(ours.lower_bound_, theirs.lower_bound_, **TOLERANCE)


def test_means_init_only(overlapping, kind):
    given = {"means_init": overlapping[:4], "random_state": 0}
    ours, theirs = fit_both(overlapping, 4, kind, **given, tol=1e-5, max_iter=50)
    assert_same(ours, theirs)
    held = GaussianMixture(4, covariance_type=kind, max_iter=0, **given).fit(overlapping)
    assert_allclose(held.means_, overlapping[:4], rtol=1e-12)


def test_gm_g13_log_likelihood_never_falls(overlapping, kind):
    ours = GaussianMixture(
        4, covariance_type=kind, **start(overlapping, 4, kind), reg_covar=0, tol=0, max_iter=50
    )
    with pytest.warns(ConvergenceWarning):
        ours.fit(overlapping)
    bounds = np.array(ours.lower_bounds_)
    assert len(bounds) == 50
    assert (np.diff(bounds) >= -1e-10 * np.abs(bounds[1:])).all()
    assert bounds[-1] > bounds[0] + 0.05


def test_gm_g13_and_in_float32_to_its_rounding(overlapping, kind):
    X = overlapping.astype(np.float32)
    ours = GaussianMixture(
        4, covariance_type=kind, **start(X, 4, kind), reg_covar=0, tol=0, max_iter=50
    )
    with pytest.warns(ConvergenceWarning):
        ours.fit(X)
    assert ours.precision_ == "fp32"
    assert (np.diff(ours.lower_bounds_) >= -1e-6).all()


def test_float32_is_close_to_float64(overlapping, kind):
    X = overlapping.astype(np.float32)
    options = {**start(X, 4, kind), "covariance_type": kind, "max_iter": 500, "tol": 1e-6}
    narrow = GaussianMixture(4, **options).fit(X)
    wide = GaussianMixture(4, **options, precision="fp64").fit(X)
    assert (narrow.precision_, wide.precision_) == ("fp32", "fp64")
    assert_allclose(narrow.lower_bound_, wide.lower_bound_, atol=1e-4)
    assert_allclose(narrow.means_, wide.means_, atol=2e-2)


@pytest.mark.parametrize("k", [1, 2])
def test_more_features_than_samples_hold(kind, k):
    """N < D: full and tied covariances are singular but for reg_covar."""
    X = np.random.default_rng(0).standard_normal((20, 30))
    ours, theirs = fit_both(X, k, kind, **start(X, k, kind), reg_covar=1e-3)
    assert_same(ours, theirs, {"rtol": 1e-5, "atol": 1e-5})
