"""Fits and passes by the Triton kernels, through the interpreter here and on a GPU under `gpu`."""

import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from gmm_ivf import GaussianMixture, seeding, triton_engine

# Rows whose last normaliser is far off overflow, and are done again for that reason.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
KINDS = ("spherical", "diag", "tied", "full")


def blobs(n=150, d=5, k=3, shift=0.0):
    rng = np.random.default_rng(0)
    centers = 3 * rng.normal(size=(k, d))
    x = centers[rng.integers(0, k, n)] + rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) * 0.5
    return (x + shift).astype(np.float32)


def fit(x, device, **options):
    model = GaussianMixture(3, random_state=0, device=device, **{"max_iter": 5, "tol": 0} | options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("precision", "rtol"), [("fp16x3", 2e-4), ("fp32", 2e-4), ("fp16", 2e-2)])
def test_a_fit_equals_that_of_torch_in_float64(device, kind, precision, rtol):
    x = blobs(shift=1000.0)
    model = fit(x, device, covariance_type=kind, backend="triton", precision=precision)
    oracle = fit(x, "cpu", covariance_type=kind, backend="torch", precision="fp64")
    assert (model.backend_, model.precision_, model.device_) == ("triton", precision, device)
    assert model.n_iter_ == oracle.n_iter_ == 5
    spread = np.sqrt(oracle.covariances_.max())
    np.testing.assert_allclose(model.means_, oracle.means_, rtol=0, atol=rtol * spread)
    np.testing.assert_allclose(
        model.covariances_, oracle.covariances_, rtol=5 * rtol, atol=5 * rtol * spread**2
    )
    np.testing.assert_allclose(model.weights_, oracle.weights_, rtol=5 * rtol)
    np.testing.assert_allclose(model.lower_bounds_, oracle.lower_bounds_, atol=5 * rtol)


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_says_of_samples_equals_torch(device, kind):
    x = blobs()
    model = fit(x, device, covariance_type=kind, backend="torch", precision="fp64")
    want = model.predict_proba(x), model.score_samples(x), model.predict(x)
    model.set_params(backend="triton", precision="fp16x3", chunk_size=128)
    np.testing.assert_allclose(model.score_samples(x), want[1], atol=2e-3)
    assert (model.predict(x) == want[2]).mean() > 0.99
    ids, resp = model.responsibilities(x, 2)
    np.testing.assert_allclose(resp, np.take_along_axis(want[0], ids, 1), atol=2e-3)
    np.testing.assert_allclose(model.predict_proba(x), want[0], atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_by_the_kernels_is_that_of_hard_assignment(device, kind, monkeypatch):
    monkeypatch.setattr(seeding, "_SMALL_ELEMENTS", 0)
    x = blobs()
    start = {"covariance_type": kind, "max_iter": 0}
    model = fit(x, device, backend="triton", precision="fp16", **start)
    near = np.square(x[:, None].astype(np.float64) - model.means_).sum(2).argmin(1)
    for k, mean in enumerate(model.means_):
        np.testing.assert_allclose(mean, x[near == k].mean(0), atol=0.05)
        assert model.weights_[k] == pytest.approx((near == k).mean(), abs=0.02)
    apart = x - model.means_[near]
    wanted = {
        "spherical": np.square(apart).mean(),
        "diag": np.square(apart).mean(0),
        "tied": apart.T @ apart / len(x),
        "full": apart.T @ apart / len(x),
    }[kind]
    got = model.covariances_
    pooled = got if kind == "tied" else np.tensordot(model.weights_, got, 1)
    np.testing.assert_allclose(pooled, wanted, atol=0.05 * np.square(apart).mean())


def test_coinciding_samples_leave_the_start_to_exact_assignment(device, monkeypatch):
    monkeypatch.setattr(seeding, "_SMALL_ELEMENTS", 0)
    x = np.repeat(np.eye(2, 5, dtype=np.float32), 60, axis=0)
    model = fit(x, device, backend="triton", precision="fp16x3", max_iter=0, reg_covar=1e-3)
    assert np.isfinite(model.means_).all()
    assert sorted(np.round(model.weights_, 3)) == [0.0, 0.5, 0.5]


def test_samples_too_far_for_the_mode_are_served_by_float64(device):
    x = blobs()
    model = fit(x, device, backend="triton", precision="fp16")
    far = np.vstack([x[:5], np.full((1, x.shape[1]), 1e25, np.float32)])
    score = model.set_params(precision="fp16").score_samples(far.astype(np.float64))
    assert np.isfinite(score).all()
    assert score[-1] < -1e30
    assert 0 <= model.predict(far)[-1] < 3


def test_auto_takes_the_mode_that_serves(device):
    x = blobs()
    assert fit(x, device, backend="triton").precision_ == "fp16"
    x[:75] = 100 + 1e-3 * x[:75]  # a cluster far narrower than its distance from the others
    assert fit(x, device, backend="triton").precision_ == "fp16x3"


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("kind", ["spherical", "diag"])
def test_a_start_from_single_samples_does_not_overflow(device, kind):
    """Its variances are reg_covar alone, and logits of 1e8 bits are rounded by eight."""
    rng = np.random.default_rng(0)
    centers = 2 * rng.normal(size=(8, 16))
    x = (centers[rng.integers(0, 8, 500)] + rng.normal(size=(500, 16))).astype(np.float32)
    options = {"covariance_type": kind, "init_params": "random_from_data", "max_iter": 4}
    model = fit(x, device, backend="triton", **options)
    oracle = fit(x, "cpu", backend="torch", precision="fp64", **options)
    np.testing.assert_allclose(model.lower_bounds_[1:], oracle.lower_bounds_[1:], atol=1e-2)


def test_counts_of_one_total_serve_tied_covariances(device):
    """They lie in a plane, through the origin only about their mean, whole numbers as they are."""
    rng = np.random.default_rng(1)
    shares = rng.dirichlet(np.ones(6), 3)
    x = np.stack([rng.multinomial(50, shares[i % 3]) for i in range(200)]).astype(np.float32)
    options = {"covariance_type": "tied", "max_iter": 4}
    model = fit(x, device, backend="triton", **options)
    assert model.precision_ == "fp16x3"
    oracle = fit(x, "cpu", backend="torch", precision="fp64", **options)
    np.testing.assert_allclose(model.lower_bounds_, oracle.lower_bounds_, atol=1e-3)
    np.testing.assert_allclose(model.covariances_, oracle.covariances_, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("precision", "nats"), [("auto", 2.0), ("tf32", 6.0)])
def test_counts_of_one_total_fit_with_full_covariances(device, precision, nats):
    """They lie in a plane; across it variances are the ridge, or the rounding of larger ones."""
    rng = np.random.default_rng(1)
    shares = rng.dirichlet(np.ones(20), 3)
    x = np.stack([rng.multinomial(300, shares[i % 3]) for i in range(600)]).astype(np.float32)
    model = fit(x, device, backend="triton", covariance_type="full", precision=precision)
    oracle = fit(x, device, backend="torch", covariance_type="full")
    assert oracle.precision_ == "fp64"
    assert model.lower_bound_ == pytest.approx(oracle.lower_bound_, abs=nats)
    rises = np.diff(model.lower_bounds_[1:])
    assert (rises > -0.05).all()
    np.testing.assert_array_equal(model.predict(x), oracle.predict(x))


def test_samples_are_staged_once_and_before_the_start(device, monkeypatch):
    """A start and EM share them, so that staging is no part of what a start costs."""
    monkeypatch.setattr(seeding, "_SMALL_ELEMENTS", 0)
    order = []

    def staged(x, mode):
        order.append(len(x))
        return stage(x, mode)

    def started(*args):
        order.append("start")
        return start(*args)

    stage, start = triton_engine.em.stage, seeding.initial_components
    monkeypatch.setattr(triton_engine.em, "stage", staged)
    monkeypatch.setattr(seeding, "initial_components", started)
    fit(blobs(n=2000), device, backend="triton", precision="fp16", n_init=2)
    # Each start stages the part of them that k-means sees.
    assert order == [2000, "start", 768, "start", 768]


def test_the_likelihood_is_looked_at_every_few_iterations(device):
    x = blobs()
    few = fit(x, device, backend="triton", precision="fp16x3", max_iter=100, tol=1e-2)
    assert few.converged_
    assert few.n_iter_ % 4 == 0
    assert few.lower_bound_ == few.lower_bounds_[-1]
    assert len(few.lower_bounds_) == few.n_iter_
    seven = fit(x, device, backend="triton", precision="fp16x3", max_iter=7)
    assert seven.n_iter_ == 7


def test_repeated_fits_are_equal_bit_by_bit(device):
    x = blobs()
    one, two = (fit(x, device, backend="triton", covariance_type="diag") for _ in range(2))
    np.testing.assert_array_equal(one.means_, two.means_)
    np.testing.assert_array_equal(one.covariances_, two.covariances_)


def test_covariances_that_are_not_defined_are_refused(device):
    x = blobs()
    x[:, 1] = x[:, 0]
    with pytest.raises(ValueError, match="not positive definite"):
        fit(x, device, backend="triton", covariance_type="full", reg_covar=0.0)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("precision", ["auto", "fp16", "bf16", "tf32"])
@pytest.mark.parametrize("kind", ["tied", "full"])
def test_gm_g9_samples_in_a_plane_fit_in_every_precision(device, kind, precision):
    """The ridge alone makes their covariances definite, which rounding may undo."""
    plane = np.random.default_rng(0).standard_normal((5, 24))
    x = (blobs() @ plane).astype(np.float32)
    options = {"covariance_type": kind, "max_iter": 6}
    model = fit(x, device, backend="triton", precision=precision, **options)
    oracle = fit(x, "cpu", backend="torch", precision="fp64", **options)
    assert oracle.fit_report_["mended_covariances"] == 0
    # Mended or not, which depends on how the machine rounds.
    assert np.linalg.eigvalsh(model.covariances_).min() > 0
    np.testing.assert_allclose(model.means_, oracle.means_, rtol=0, atol=0.1)
    assert np.isfinite(model.score_samples(x)).all()


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_components_of_fewer_samples_than_features_fit_in_low_precision(device):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 24)).astype(np.float32)
    model = GaussianMixture(
        6,
        covariance_type="full",
        backend="triton",
        precision="bf16",
        device=device,
        max_iter=6,
        tol=0,
        random_state=0,
    )
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        model.fit(x)
    assert model.fit_report_["mended_covariances"] > 0
    assert model.n_iter_ == 6
    assert np.linalg.eigvalsh(model.covariances_).min() > 0.4e-6


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_the_component_that_failed_first_is_named(device):
    """It makes NaN of all others within the burst that ends before anybody looks."""
    x = np.random.default_rng(0).standard_normal((150, 3)).astype(np.float32)
    x[7] = 90.0
    means = np.array([[-1.0, 0, 0], [1, 0, 0], [90, 90, 90]])
    mixture = GaussianMixture(
        3, covariance_type="full", precision="fp16", backend="triton", device=device,
        max_iter=4, tol=0, reg_covar=0.0, weights_init=np.full(3, 1 / 3), means_init=means,
        precisions_init=np.stack([np.eye(3)] * 3),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"of component 2 is not .*ran in fp16: .*\"auto\""):
        mixture.fit(x)


def test_float64_samples_want_a_named_mode(device):
    x = blobs().astype(np.float64)
    with pytest.raises(ValueError, match="no fp64"):
        fit(x, device, backend="triton")
    assert fit(x, device, backend="triton", precision="fp16x3").precision_ == "fp16x3"
