"""Fits with `truncation`, by torch and, through the interpreter or on a GPU, by the kernels."""

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from gmm_ivf import GaussianMixture
from gmm_ivf.kernels.dispatch import triton_obstacle
from gmm_ivf.truncation import CHOSEN_SHARE

CUDA = torch.cuda.is_available()
KINDS = ("spherical", "diag", "tied")
NEEDS_TRITON = pytest.mark.skipif(
    triton_obstacle(torch.device("cpu")) is not None, reason="needs TRITON_INTERPRET=1"
)
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="no GPU")]
KERNELS = [
    pytest.param("cpu", marks=NEEDS_TRITON),
    pytest.param("cuda", marks=NEEDS_GPU),
]
# Rows whose last normaliser is far off overflow, and are done again for that reason.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")


def blobs(n: int, d: int, k: int, spread: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centers = spread * rng.normal(size=(k, d))
    return (centers[rng.integers(0, k, n)] + rng.normal(size=(n, d))).astype(np.float32)


def fit(x: np.ndarray, k: int, **options) -> GaussianMixture:
    options = {"max_iter": 4, "tol": 0, "reg_covar": 0.01, "random_state": 0} | options
    options = {"precision": "fp16x3"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return GaussianMixture(k, **options).fit(x)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and blocks of 16, so that a small fit has many of them, half of the tiles measured."""
    from gmm_ivf import truncated_engine
    from gmm_ivf.kernels import truncated
    from gmm_ivf.kernels.tuning import Config

    monkeypatch.setattr(truncated, "SHAPES", (Config(16, 16, 4, 1),))
    monkeypatch.setattr(truncated_engine, "_LARGEST_SHARE", 0.6)
    monkeypatch.setattr(truncated_engine, "_MEASURED_TILES", 3)
    monkeypatch.setattr(truncated_engine, "_MEASURED_STEP", 2)


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_separated_clusters_end_as_in_exact_em(device, kind, small_tiles):
    x = blobs(64, 5, 33, 12.0)
    options = {"covariance_type": kind, "device": device, "backend": "triton"}
    exact, cut = fit(x, 33, **options), fit(x, 33, truncation=1e-4, **options)
    report = cut.fit_report_
    assert cut.n_iter_ == exact.n_iter_ == 4
    assert abs(cut.lower_bound_ - exact.lower_bound_) < 1e-4
    assert abs(cut.score(x) - exact.score(x)) < 1e-4
    np.testing.assert_allclose(cut.lower_bounds_, exact.lower_bounds_, atol=2e-4)
    for name in ("discarded_mass", "discarded_nats", "visited_share"):
        assert len(report[name]) == 4
    assert max(report["discarded_nats"]) <= 1e-4
    assert max(report["visited_share"]) < 0.9
    assert report["exact_iterations"] == 0
    np.testing.assert_allclose(cut.means_, exact.means_, atol=1e-2)
    np.testing.assert_allclose(cut.weights_, exact.weights_, atol=1e-4)


@pytest.mark.parametrize("device", KERNELS)
def test_overlapping_clusters_take_the_exact_path(device, small_tiles):
    x = blobs(64, 2, 33, 0.5)
    options = {"device": device, "backend": "triton", "max_iter": 6}
    exact, cut = fit(x, 33, **options), fit(x, 33, truncation=1e-6, **options)
    assert cut.fit_report_["exact_iterations"] == 6
    assert cut.fit_report_["visited_share"] == [1.0] * 6
    assert abs(cut.lower_bound_ - exact.lower_bound_) < 1e-4


@pytest.mark.parametrize("device", KERNELS)
def test_lists_that_are_too_short_are_caught(device, small_tiles, monkeypatch):
    """k-means by another name: one block for each tile, whatever it discards."""
    from gmm_ivf import truncated_engine

    monkeypatch.setattr(truncated_engine, "CHOSEN_SHARE", 1e6)
    x = blobs(64, 3, 33, 2.0)
    options = {"device": device, "backend": "triton", "max_iter": 3}
    exact, cut = fit(x, 33, **options), fit(x, 33, truncation=1e-4, **options)
    assert cut.fit_report_["exact_iterations"] == 3
    np.testing.assert_allclose(cut.lower_bounds_, exact.lower_bounds_, atol=1e-4)
    np.testing.assert_allclose(cut.means_, exact.means_, atol=2e-2)


@pytest.mark.parametrize("device", KERNELS)
def test_the_first_iteration_that_exceeds_the_bound_is_done_exactly(
    device, small_tiles, monkeypatch
):
    """Later ones of the burst are dropped; the next burst is shorter, and chooses first."""
    from gmm_ivf.truncated_engine import TruncatedEngine

    measure, calls = TruncatedEngine._loss, []

    def third_exceeds(*args):
        calls.append(args)
        return measure(*args) + (2e-4 if len(calls) == 3 else 0.0)

    monkeypatch.setattr(TruncatedEngine, "_loss", third_exceeds)
    x = blobs(64, 5, 33, 12.0)
    options = {"device": device, "backend": "triton", "precision": "fp16x3", "max_iter": 5}
    exact, cut = fit(x, 33, **options), fit(x, 33, truncation=1e-4, **options)
    share = np.array(cut.fit_report_["visited_share"])
    assert (share == 1).tolist() == [False, False, True, False, False]
    assert cut.fit_report_["exact_iterations"] == 1
    assert cut.fit_report_["discarded_mass"][2] == 0
    np.testing.assert_allclose(cut.lower_bounds_, exact.lower_bounds_, atol=1e-4)


@pytest.mark.parametrize("device", KERNELS)
def test_hard_assignment_does_not_pass(device, small_tiles):
    """k-means on overlapping clusters loses far more than the bound; truncated EM does not."""
    x = blobs(100, 2, 8, 0.7)
    options = {"device": device, "backend": "triton", "max_iter": 4}
    exact, cut = fit(x, 8, **options), fit(x, 8, truncation=1e-4, **options)
    resp = exact.predict_proba(x)
    assert -np.log(resp.max(axis=1)).mean() > 0.1
    assert abs(cut.score(x) - exact.score(x)) < 1e-4


@pytest.mark.parametrize("device", KERNELS)
def test_repeated_fits_are_equal_bit_by_bit(device, small_tiles):
    x = blobs(64, 5, 33, 6.0)
    one, two = (
        fit(x, 33, device=device, backend="triton", truncation=1e-3, n_init=2, max_iter=2)
        for _ in range(2)
    )
    np.testing.assert_array_equal(one.means_, two.means_)
    assert one.fit_report_["discarded_mass"] == two.fit_report_["discarded_mass"]


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize(
    ("options", "d"),
    [
        ({"covariance_type": "full"}, 3),
        ({"covariance_type": "diag"}, 129),
        ({"covariance_type": "tied"}, 257),
        ({"precision": "fp32"}, 3),
    ],
)
def test_what_the_kernels_cannot_truncate_is_refused(device, options, d):
    x = np.zeros((4, d), np.float32)
    with pytest.raises(ValueError, match="truncation: the Triton kernels"):
        fit(x, 2, device=device, backend="triton", truncation=1e-4, **options)


@pytest.mark.parametrize("kind", (*KINDS, "full"))
@pytest.mark.parametrize("spread", [12.0, 0.5])
def test_torch_keeps_to_the_bound_for_each_sample(kind, spread):
    x = blobs(400, 3, 6, spread)
    options = {"covariance_type": kind, "backend": "torch", "precision": "fp32", "chunk_size": 100}
    exact, cut = fit(x, 6, **options), fit(x, 6, truncation=1e-4, **options)
    report = cut.fit_report_
    assert abs(cut.lower_bound_ - exact.lower_bound_) < 1e-4
    assert max(report["discarded_mass"]) <= CHOSEN_SHARE * 1e-4
    assert 0 < report["visited_share"][-1] <= 1
    if spread > 1:
        assert report["visited_share"][-1] < 0.5


def test_what_torch_discards_equals_a_loop():
    x = blobs(60, 3, 5, 1.5)
    start = fit(x, 5, backend="torch", precision="fp64", max_iter=1)
    cut: Any = clone(start)
    cut.set_params(truncation=1e-2, max_iter=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        cut.fit(x)
    second: Any = clone(cut)
    second.set_params(max_iter=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        second.fit(x)
    masses, nats, kept = [], [], 0
    for row in second.predict_proba(x):
        gone = 0.0
        for value in sorted(row):
            if gone + value > CHOSEN_SHARE * 1e-2:
                break
            gone += value
            kept -= 1
        masses.append(gone)
        nats.append(-np.log1p(-gone))
        kept += 5
    report = cut.fit_report_
    assert report["discarded_mass"][1] == pytest.approx(np.mean(masses), rel=1e-4)
    assert report["discarded_nats"][1] == pytest.approx(np.mean(nats), rel=1e-4)
    assert report["visited_share"][1] == pytest.approx(kept / 300)
    assert 0 < report["discarded_mass"][1] < 1e-3


@pytest.mark.parametrize("bad", [0.5, 0, -1e-4, "1e-4", float("nan")])
def test_bounds_that_would_be_k_means_are_refused(bad):
    x = blobs(20, 2, 2, 3.0)
    with pytest.raises(ValueError, match="'truncation' parameter of GaussianMixture must be"):
        fit(x, 2, truncation=bad)


def test_without_truncation_nothing_is_reported():
    report = fit(blobs(20, 2, 2, 3.0), 2).fit_report_
    phases = {"load_seconds", "init_seconds", "em_seconds", "fit_seconds"}
    assert set(report) == {*phases, "init_share", "relative_ridge", "mended_covariances"}


def test_samples_in_order_go_when_others_are_staged(device):
    """Those of two modes need not fit beside one another."""
    x = blobs(200, 2, 2, 3.0)
    model = GaussianMixture(2, truncation=1e-3, backend="triton", precision="fp16", device=device)
    engine: Any = model._engine(model._check_rows(x, reset=True)).loaded()
    engine._sorted = engine._samples
    engine._staged_in("fp16")
    assert engine._sorted is engine._samples
    engine._staged_in("fp16x3")
    assert engine._sorted is None
    assert engine._samples.mode == "fp16x3"


def test_the_option_is_a_parameter_and_is_saved(tmp_path):
    model = fit(blobs(50, 2, 2, 3.0), 2, truncation=1e-3, precision="fp32")
    copies: list[Any] = [clone(model), pickle.loads(pickle.dumps(model))]
    assert [copy.truncation for copy in copies] == [1e-3, 1e-3]
    model.save(tmp_path / "mixture.safetensors")
    assert GaussianMixture.load(tmp_path / "mixture.safetensors").truncation == 1e-3


def test_warm_start_and_resuming():
    x = blobs(200, 2, 3, 2.0)
    whole = fit(x, 3, truncation=1e-4, precision="fp32", max_iter=6)
    parts = fit(x, 3, truncation=1e-4, precision="fp32", max_iter=3, warm_start=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        parts.fit(x)
    np.testing.assert_allclose(parts.means_, whole.means_, atol=1e-4)
    assert len(parts.fit_report_["discarded_mass"]) == 3
