"""Starts, stopping, warnings, interruption and repeatability."""

import warnings
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.exceptions import ConvergenceWarning

from gmm_ivf import GaussianMixture, engine, seeding
from gmm_ivf.kernels.components import Components
from gmm_ivf.lloyd import TorchPass, lloyd
from gmm_ivf.rows import Rows

METHODS = ["kmeans", "k-means++", "random", "random_from_data"]


def quiet_fit(model, X):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(X)


@pytest.mark.parametrize("method", METHODS)
def test_every_start_reaches_separated_clusters(blobs, kind, method):
    if (kind, method) == ("tied", "random"):
        pytest.skip("one matrix for all and means that coincide: ten starts are too few")
    X = blobs(n=300, d=2, k=3, spread=12.0)
    options = {"covariance_type": kind, "max_iter": 500}
    model = GaussianMixture(3, init_params=method, n_init=10, random_state=1, **options).fit(X)
    best = GaussianMixture(3, means_init=model.means_, **options).fit(X)
    assert_allclose(model.lower_bound_, best.lower_bound_, atol=1e-2)
    assert_allclose(np.bincount(model.predict(X)), [97, 101, 102], atol=20)


def test_the_kmeans_start_is_the_m_step_of_the_hard_assignment(blobs, kind, kmeans):
    X = blobs(n=300, d=3, k=3, spread=12.0)
    options = {"covariance_type": kind, "random_state": 0, "reg_covar": 1e-3}
    model = quiet_fit(GaussianMixture(3, max_iter=0, **options), X)
    labels = np.square(X[:, None] - model.means_).sum(2).argmin(1)
    groups = [X[labels == j] for j in range(3)]
    assert_allclose(model.means_, [g.mean(0) for g in groups], atol=1e-9)
    assert_allclose(model.weights_, [len(g) / 300 for g in groups], atol=1e-12)
    full = np.stack([np.cov(g.T, bias=True) for g in groups])
    ridge = 1e-3 * np.eye(3)
    wanted = {
        "full": full + ridge,
        "tied": np.einsum("k,kde->de", model.weights_, full) + ridge,
        "diag": np.diagonal(full, axis1=1, axis2=2) + 1e-3,
        "spherical": np.trace(full, axis1=1, axis2=2) / 3 + 1e-3,
    }[kind]
    assert_allclose(model.covariances_, wanted, atol=1e-9)


@pytest.mark.parametrize("method", ["k-means++", "random_from_data"])
def test_starts_from_single_rows(blobs, kind, method):
    X = blobs(n=300, d=3, k=3)
    options = {"covariance_type": kind, "random_state": 0, "reg_covar": 0.5}
    model = quiet_fit(GaussianMixture(4, max_iter=0, init_params=method, **options), X)
    distance = np.square(X[:, None] - model.means_).sum(2).min(0)
    assert_allclose(distance, 0, atol=1e-20)
    assert len(np.unique(model.means_, axis=0)) == 4
    assert_allclose(model.weights_, 0.25)
    if kind == "tied":
        wanted = np.cov(X.T, bias=True) + 0.5 * np.eye(3)
        assert_allclose(model.covariances_, wanted)
    else:
        eigenvalues = np.linalg.eigvalsh(model.covariances_) if kind == "full" else None
        assert_allclose(model.covariances_ if eigenvalues is None else eigenvalues, 0.5)


def test_gm_g27_no_work_when_all_is_given(overlapping, monkeypatch):
    def fail(*_args):
        raise AssertionError("a start was computed")

    monkeypatch.setattr(seeding, "initial_components", fail)
    given = {
        "weights_init": [0.5, 0.5],
        "means_init": overlapping[:2],
        "precisions_init": [1.0, 1.0],
    }
    model = GaussianMixture(2, **given).fit(overlapping)
    assert model.fit_report_["init_share"] < 0.5
    with pytest.raises(AssertionError, match="a start was computed"):
        GaussianMixture(2, **{**given, "means_init": None}).fit(overlapping)


def test_gm_g27_kmeans_sees_a_subsample(monkeypatch):
    sizes = []
    lloyd = seeding.lloyd

    def spy(assign, k, rng):
        sizes.append(len(assign.sample))
        return lloyd(assign, k, rng)

    monkeypatch.setattr(seeding, "lloyd", spy)
    X = np.random.default_rng(0).standard_normal((20_000, 64)).astype(np.float32)
    model = quiet_fit(GaussianMixture(4, random_state=0, max_iter=1), X)
    assert sizes == [256 * 4]
    report = model.fit_report_
    parts = ("load_seconds", "init_seconds", "em_seconds")
    others = {"fit_seconds", "init_share", "relative_ridge", "mended_covariances"}
    assert set(report) == {*parts, *others}
    assert all(report[part] > 0 for part in parts)
    assert sum(report[part] for part in parts) <= report["fit_seconds"]
    assert report["init_share"] == pytest.approx(report["init_seconds"] / report["fit_seconds"])


@pytest.mark.parametrize("k", [1, 2, 1024, 1025])
def test_lloyd_uses_every_centre(k):
    sample = torch.randn(1500, 3, generator=torch.Generator().manual_seed(0))
    centers, inertia = lloyd(TorchPass(sample), k, np.random.RandomState(0))
    distances = torch.cdist(sample.double(), centers).square()
    assert centers.shape == (k, 3)
    assert centers.dtype == torch.float64
    assert len(distances.argmin(1).unique()) > 0.99 * k
    assert inertia == pytest.approx(float(distances.amin(1).mean()), rel=0.05, abs=1e-3)


@pytest.mark.parametrize("name", ["weights_init", "means_init", "precisions_init"])
def test_one_part_given(overlapping, kind, name):
    shape = {"spherical": (4,), "diag": (4, 3), "tied": (3, 3), "full": (4, 3, 3)}[kind]
    eye = 2 * np.eye(3)
    precisions = (
        np.full(shape, 2.0) if kind in ("spherical", "diag") else np.broadcast_to(eye, shape)
    )
    given = {
        "weights_init": np.array([0.1, 0.2, 0.3, 0.4]),
        "means_init": overlapping[:4],
        "precisions_init": precisions,
    }[name]
    model = GaussianMixture(4, covariance_type=kind, max_iter=0, random_state=0, **{name: given})
    quiet_fit(model, overlapping)
    learnt = {"weights_init": "weights_", "means_init": "means_", "precisions_init": "precisions_"}
    assert_allclose(getattr(model, learnt[name]), given, rtol=1e-12)
    assert np.isfinite(model.set_params(max_iter=100).fit(overlapping).lower_bound_)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights_init": [0.5, 0.6]}, "weights_init: .*normalized"),
        ({"weights_init": [-0.5, 1.5]}, r"weights_init: .*range \[0, 1\]"),
        ({"weights_init": [1.0]}, r"weights_init should have the shape of \(2,\), but got \(1,\)"),
        ({"means_init": np.zeros((2, 4))}, r"means_init should have the shape of \(2, 3\)"),
        ({"means_init": np.full((2, 3), np.nan)}, "means_init contains NaN"),
        ({"means_init": np.full((2, 3), 1e200)}, "means_init .* mean 0 lies too far"),
        ({"precisions_init": [1.0, -1.0]}, "precisions_init: 'spherical precision' .*positive"),
        ({"precisions_init": np.ones((2, 3))}, r"precisions_init should have the shape of \(2,\)"),
    ],
)
def test_bad_starts_are_named(overlapping, given, message):
    with pytest.raises(ValueError, match=message):
        GaussianMixture(2, **given).fit(overlapping)


@pytest.mark.parametrize("matrix", [[[1.0, 2.0], [0.0, 1.0]], [[1.0, 2.0], [2.0, 1.0]]])
def test_bad_precision_matrices(blobs, matrix):
    X = blobs(d=2)
    for kind, given in (("tied", matrix), ("full", [matrix] * 2)):
        with pytest.raises(ValueError, match=r"precisions_init: .*symmetric, positive-definite"):
            GaussianMixture(2, covariance_type=kind, precisions_init=given).fit(X)


def test_the_best_of_n_init_is_kept(overlapping):
    options = {"init_params": "random_from_data", "max_iter": 30, "covariance_type": "full"}
    many = quiet_fit(GaussianMixture(4, n_init=6, random_state=0, **options), overlapping)
    state = np.random.RandomState(0)
    alone = [
        quiet_fit(GaussianMixture(4, random_state=state, **options), overlapping) for _ in range(6)
    ]
    best = max(alone, key=lambda m: m.lower_bound_)
    assert len({round(m.lower_bound_, 6) for m in alone}) > 1
    assert_array_equal(many.means_, best.means_)
    assert many.lower_bounds_ == best.lower_bounds_
    assert many.converged_ == best.converged_
    assert many.n_iter_ == best.n_iter_


def test_gm_g16_bounds_of_each_iteration(overlapping, kind):
    model = GaussianMixture(3, covariance_type=kind, random_state=0).fit(overlapping)
    assert model.n_iter_ == len(model.lower_bounds_) > 2
    assert model.lower_bound_ == model.lower_bounds_[-1]
    assert all(type(b) is float for b in model.lower_bounds_)
    assert abs(model.lower_bounds_[-1] - model.lower_bounds_[-2]) < model.tol
    assert model.score(overlapping) >= model.lower_bound_ - 1e-12


def test_gm_g14_a_drop_is_no_convergence(overlapping, monkeypatch):
    """Components that are merged between two iterations."""
    honest = engine.m_step
    calls = []

    def merging(stats, components, reg_covar, **options):
        found = honest(stats, components, reg_covar, **options)
        calls.append(1)
        if len(calls) == 3:
            same = found.means.mean(0).expand_as(found.means).contiguous()
            return Components.from_covariances("diag", found.weights, same, found.covariances / 4)
        return found

    monkeypatch.setattr(engine, "m_step", merging)
    model = GaussianMixture(3, covariance_type="diag", random_state=0, max_iter=4)
    with pytest.warns(ConvergenceWarning, match="did not converge in 4 iterations"):
        model.fit(overlapping)
    assert model.lower_bounds_[3] < model.lower_bounds_[2] - 1
    assert not model.converged_


@pytest.mark.parametrize(
    ("bounds", "iterations", "converged"),
    [
        ([-9.0, -5.0, -4.9995], 3, True),
        ([-9.0, -5.0, -7.0, -7.0005], 4, True),  # each is compared with the one before
        ([-9.0, -5.0, -7.0, -5.0005, -4.0], 5, False),
        ([-9.0, -5.0, -5.001], 3, False),  # a change of tol itself is none below it
    ],
)
def test_gm_g14_when_em_stops(bounds, iterations, converged):
    class Scripted(engine.Run):
        def _steps(self, engine, count):
            return [next(steps) for _ in range(count)]

    steps = iter(bounds)
    run = Scripted(cast(Any, None), 0.0, -np.inf)
    one_by_one = cast(Any, SimpleNamespace(burst=1))
    assert list(run.iterate(one_by_one, len(bounds), 1e-3 - 1e-9)) == bounds[:iterations]
    assert run.bounds == bounds[:iterations]
    assert run.bound == bounds[iterations - 1]
    assert run.converged == converged


def test_warnings_point_at_the_caller(overlapping):
    for call in (GaussianMixture.fit, GaussianMixture.fit_predict):
        with pytest.warns(ConvergenceWarning, match="tol=0") as caught:
            call(GaussianMixture(2, max_iter=2, tol=0, random_state=0), overlapping)
        assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("method", METHODS)
def test_gm_g17_repeatable(overlapping, kind, method, dtype):
    X = overlapping.astype(dtype)
    options = {"covariance_type": kind, "init_params": method, "random_state": 3, "n_init": 2}
    for deterministic in (False, True):
        one, two = (
            quiet_fit(GaussianMixture(4, deterministic=deterministic, **options), X)
            for _ in range(2)
        )
        for name in ("weights_", "means_", "covariances_", "precisions_cholesky_"):
            assert_array_equal(getattr(one, name), getattr(two, name))
        assert one.lower_bounds_ == two.lower_bounds_


def test_fit_predict_is_fit_then_predict(overlapping, kind):
    for options in ({}, {"max_iter": 2, "tol": 0}):
        model = GaussianMixture(4, covariance_type=kind, random_state=0, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            labels = model.fit_predict(overlapping)
        assert_array_equal(labels, model.predict(overlapping))


@pytest.mark.parametrize("after", [0, 1, 4])
def test_ctrl_c_leaves_a_model_that_resumes(overlapping, kind, monkeypatch, after):
    e_step = engine.Engine.e_step
    calls = []

    def interrupted(self, components, *args):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return e_step(self, components, *args)

    options = {"covariance_type": kind, "random_state": 0, "tol": 1e-5, "max_iter": 500}
    model = GaussianMixture(3, warm_start=True, n_init=2, **options)
    with monkeypatch.context() as patch:
        patch.setattr(engine.Engine, "e_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.fit(overlapping)
    assert not model.converged_
    assert model.n_iter_ == len(model.lower_bounds_) == after
    assert model.predict(overlapping).shape == (500,)
    model.fit(overlapping)
    straight = GaussianMixture(3, **options).fit(overlapping)
    assert model.converged_
    assert_allclose(model.means_, straight.means_, atol=1e-10)
    assert model.n_iter_ + after == straight.n_iter_


def test_a_warm_start_in_another_frame(blobs, kind):
    """The centre and the scale of the data change, the parameters that EM starts from do not."""
    X = blobs(n=300, d=3, k=3)
    model = GaussianMixture(3, covariance_type=kind, warm_start=True, random_state=0).fit(X)
    before = {name: getattr(model, name) for name in ("weights_", "means_", "covariances_")}
    center = model.center_
    model.set_params(max_iter=0).fit(1000 * X - 7)
    assert np.abs(model.center_ - center).max() > 5
    for name, value in before.items():
        assert_allclose(getattr(model, name), value, rtol=1e-11, err_msg=name)


@pytest.mark.parametrize(
    "change", [{"n_components": 3}, {"covariance_type": "full"}, {"d": 2}], ids=str
)
def test_a_warm_start_from_other_shapes_is_refused(overlapping, change):
    model = GaussianMixture(2, warm_start=True, random_state=0).fit(overlapping)
    d = change.pop("d", 3)
    model.set_params(**change)
    with pytest.raises(ValueError, match="warm_start=True: the last fit has means of shape"):
        model.fit(overlapping[:, :d])
    model.set_params(warm_start=False).fit(overlapping[:, :d])


def test_verbose_draws_on_stderr(overlapping, capsys):
    GaussianMixture(2, random_state=0, n_init=2).fit(overlapping)
    assert capsys.readouterr() == ("", "")
    GaussianMixture(2, random_state=0, n_init=2, verbose=1).fit(overlapping)
    out, err = capsys.readouterr()
    assert out == ""
    assert "EM 1/2" in err
    assert "EM 2/2" in err


@pytest.mark.parametrize("size", [50, 1000])
def test_a_sample_on_the_device_is_that_of_blocks(size, monkeypatch):
    """A GPU draws it from the samples that it keeps, everything else reads them block by block."""
    rows = Rows(np.random.default_rng(0).normal(3, 2, (400, 5)).astype(np.float32))
    device = torch.device("cpu")
    passes = engine.Engine(rows, rows.scan(device), device, ("fp32",), None)
    read = passes.sample(size, np.random.RandomState(1), "fp32")
    monkeypatch.setattr(engine.Engine, "_stays_on_device", lambda _self, _dtype: True)
    kept = passes.sample(size, np.random.RandomState(1), "fp32")
    assert len(read) == min(size, 400)
    assert torch.equal(read, kept)
    assert kept.data_ptr() != passes.resident(torch.float32).data_ptr()
