"""What scikit-learn expects of an estimator, and the documented types of attributes."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils._param_validation import InvalidParameterError
from sklearn.utils.estimator_checks import estimator_checks_generator

from gmm_ivf import GaussianMixture

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("n_components", [1, 2])
def test_estimator_checks(kind, n_components):
    """No expected failure: sample_weight is not in the signature yet."""
    model = GaussianMixture(n_components, covariance_type=kind)
    failed = []
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pair in estimator_checks_generator(model):
            estimator, check = cast(tuple[Any, Any], pair)
            count += 1
            try:
                check(estimator)
            except Exception as error:
                skipped = type(error).__name__ == "SkipTest"
                if not skipped:
                    failed.append(f"{check}: {error}")
    assert failed == []
    assert count > 40


def test_attributes(overlapping, kind):
    k, d = 4, 3
    for X in (overlapping, overlapping.astype(np.float32), torch.from_numpy(overlapping)):
        model = GaussianMixture(k, covariance_type=kind, random_state=0, tol=1e-2).fit(X)
        shape = {"spherical": (k,), "diag": (k, d), "tied": (d, d), "full": (k, d, d)}[kind]
        shapes = {
            "weights_": (k,),
            "means_": (k, d),
            "center_": (d,),
            "covariances_": shape,
            "precisions_": shape,
            "precisions_cholesky_": shape,
        }
        for name, wanted in shapes.items():
            array = getattr(model, name)
            assert type(array) is np.ndarray
            assert array.dtype == np.float64
            assert array.shape == wanted
            assert array.flags.writeable
        for name, wanted in {
            "converged_": bool,
            "n_iter_": int,
            "lower_bound_": float,
            "lower_bounds_": list,
            "n_features_in_": int,
            "backend_": str,
            "device_": str,
            "precision_": str,
            "fit_report_": dict,
        }.items():
            assert type(getattr(model, name)) is wanted, name
        assert (model.backend_, model.device_) == ("torch", "cpu")


def test_precisions_are_inverse_covariances(overlapping, kind):
    model = GaussianMixture(4, covariance_type=kind, random_state=0, tol=1e-2).fit(overlapping)
    if kind in ("spherical", "diag"):
        assert_allclose(model.precisions_ * model.covariances_, 1)
        return
    eye = np.broadcast_to(np.eye(3), model.covariances_.shape)
    assert_allclose(model.precisions_ @ model.covariances_, eye, atol=1e-10)
    assert_allclose(model.precisions_cholesky_, np.triu(model.precisions_cholesky_))


def test_clone_keeps_every_option(overlapping):
    options = {
        "covariance_type": "tied",
        "tol": 1e-2,
        "means_init": overlapping[:3],
        "device": torch.device("cpu"),
        "precision": "fp64",
        "random_state": 0,
        "chunk_size": 100,
        "deterministic": True,
        "backend": "torch",
    }
    model = GaussianMixture(3, **options).fit(overlapping)
    other = clone(model)
    assert not hasattr(other, "means_")
    assert repr(other.get_params()) == repr(model.get_params())
    assert_allclose(other.fit(overlapping).means_, model.means_, rtol=0)


def test_in_a_pipeline(overlapping):
    pipeline = make_pipeline(StandardScaler(), GaussianMixture(3, random_state=0, tol=1e-2))
    labels = pipeline.fit_predict(overlapping)
    assert labels.shape == (500,)
    assert np.isfinite(pipeline.score(overlapping))
    assert pipeline.set_params(gaussianmixture__n_components=2).fit(overlapping)


def test_in_a_grid_search(blobs):
    X = blobs(n=300, d=2, k=3, spread=10.0)
    search = GridSearchCV(
        GaussianMixture(random_state=0, max_iter=300),
        {"n_components": [1, 3], "covariance_type": ["spherical", "full"]},
        cv=3,
    )
    search.fit(X)
    assert search.best_params_["n_components"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_components": 0}, "'n_components' parameter .* must be an int in the range"),
        ({"n_components": 2.0}, "'n_components'"),
        ({"covariance_type": "round"}, "'covariance_type' parameter .*'diag'.*Got 'round'"),
        ({"tol": -1}, "'tol'"),
        ({"reg_covar": -1e-6}, "'reg_covar'"),
        ({"max_iter": -1}, "'max_iter'"),
        ({"n_init": 0}, "'n_init'"),
        ({"init_params": "furthest"}, "'init_params' .*'k-means\\+\\+'"),
        ({"chunk_size": 0}, "'chunk_size'"),
        ({"backend": "cuml"}, "'backend' parameter .*'torch'.*Got 'cuml'"),
        ({"precision": "half"}, "'precision' parameter .*'bf16'.*Got 'half'"),
        ({"device": 3.5}, "'device'"),
        ({"random_state": "a"}, "'random_state'"),
        ({"deterministic": "yes"}, "'deterministic'"),
    ],
)
def test_bad_parameters_are_named(overlapping, options, message):
    with pytest.raises(InvalidParameterError, match=message):
        GaussianMixture(**options).fit(overlapping)


def test_a_backend_or_device_that_cannot_run(overlapping, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("triton").knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match='backend="triton" cannot run its kernels'):
        GaussianMixture(backend="triton", device="cpu").fit(overlapping)
    with pytest.raises(ValueError, match="device='abacus' cannot be used here"):
        GaussianMixture(device="abacus").fit(overlapping)
    model = GaussianMixture().fit(overlapping).set_params(backend="triton")
    with pytest.raises(ValueError, match='backend="triton"'):
        model.predict(overlapping)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16x3", "tf32", "fp32", "fp64"])
def test_the_precision_that_ran(overlapping, precision):
    model = GaussianMixture(2, precision=precision, random_state=0, tol=1e-2).fit(overlapping)
    assert model.precision_ == precision
    assert model.predict_proba(overlapping).dtype == np.float64


def test_the_automatic_precision(overlapping):
    for X, wanted in (
        (overlapping, "fp64"),
        (overlapping.astype(np.float32), "fp32"),
        (overlapping.astype(np.float16), "fp64"),
        ((10 * overlapping).astype(np.int64), "fp64"),
        (torch.from_numpy(overlapping).half(), "fp32"),
    ):
        assert GaussianMixture(2, random_state=0, tol=1e-2).fit(X).precision_ == wanted


def test_only_convergence_warns(overlapping, kind):
    """Under `-W error` (pyproject) no numpy or torch warning may leak from a fit."""
    for X in (overlapping, overlapping.astype(np.float32), np.asfortranarray(overlapping)[::-1]):
        with pytest.warns(ConvergenceWarning, match="did not converge in 2 iterations"):
            GaussianMixture(3, covariance_type=kind, max_iter=2, tol=0, random_state=0).fit(X)


def test_importing_the_package_loads_neither_torch_nor_faiss():
    code = "import sys, gmm_ivf; assert not {'torch', 'faiss', 'sklearn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, check=True)


def test_the_example_of_the_docstring():
    import doctest

    from gmm_ivf import estimator

    results = doctest.testmod(estimator)
    assert results.attempted >= 3
    assert results.failed == 0
