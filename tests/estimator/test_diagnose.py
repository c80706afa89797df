"""`diagnose`: finds what is wrong with a mixture, and where."""

import copy
import math
import re
from dataclasses import FrozenInstanceError
from importlib import import_module

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError
from sklearn.mixture import GaussianMixture as SklearnMixture

from gmm_ivf import GaussianMixture, GMMQuantizer, diagnose, diagnosis
from gmm_ivf.datasets.synthetic import tight
from gmm_ivf.kernels.dispatch import ACCURACY

SECTIONS = (
    "1. weights",
    "means",
    "2. E-step on fixed parameters",
    "3. diagonals of L",
    "4. variances",
    "smallest: ",
    "5. samples with the largest errors",
)


def with_far_cluster(seed: int = 0) -> np.ndarray:
    """Three wide blobs of 200 samples, and from row 600 on a tight one far from the centre."""
    rng = np.random.default_rng(seed)
    blobs = [rng.normal(centre, 1.0, (200, 4)) for centre in (-6.0, 0.0, 6.0)]
    far = rng.normal((40.0, -40.0, 40.0, -40.0), 0.02, (200, 4))
    return np.concatenate([*blobs, far]).astype(np.float32)


def fitted(x: np.ndarray, k: int, **options) -> GaussianMixture:
    return GaussianMixture(k, tol=1e-5, max_iter=500, random_state=0, **options).fit(x)


def section(text: str, title: str) -> str:
    """Text from one title to the next."""
    following = [t for t in SECTIONS if text.find(t) > text.find(title)]
    ends = [text.find(t) for t in following] or [len(text)]
    return text[text.find(title) : min(ends)]


def test_a_sound_mixture_has_no_findings(kind, blobs):
    x = blobs(n=600, d=3, k=3, spread=4.0).astype(np.float32)
    report = diagnose(fitted(x, 3, covariance_type=kind), x)
    assert report.findings == ()
    assert (report.precision, report.reference_precision) == ("fp32", "fp64")
    assert (report.backend, report.device, report.n) == ("torch", "cpu", 600)
    assert 0 < report.measured.nats < 1e-4
    assert report.measured.agreement == 1
    for item in (report.weights, report.means, report.diagonals, report.variances):
        assert item.error.max() < 1e-4
        assert item.drift.max() < 1e-2


def test_text_follows_the_order_of_a_search(kind, blobs):
    x = blobs(n=300).astype(np.float32)
    text = str(diagnose(fitted(x, 3, covariance_type=kind, precision="bf16"), x))
    places = [text.find(title) for title in SECTIONS]
    assert -1 not in places
    assert places == sorted(places)
    assert text.startswith("bf16 (torch on cpu) against fp64, 300 samples, 3 components\n")


def test_the_same_precision_twice_differs_nowhere(kind, blobs):
    x = blobs(n=300)
    report = diagnose(fitted(x, 3, covariance_type=kind), x)
    assert report.precision == "fp64"
    assert report.measured.nats == 0
    assert report.measured.covariances == 0
    assert report.weights.error.max() == 0
    assert all(row.error == 0 for row in report.worst)


def test_rounding_is_traced_to_component_and_rows():
    """bf16 cannot hold a cluster 4,000 standard deviations away: its samples are the worst."""
    x = with_far_cluster()
    gmm = fitted(x, 4, precision="bf16")
    far = int(np.linalg.norm(gmm.means_ - gmm.center_, axis=1).argmax())
    report = diagnose(gmm, x, rows=20)
    assert report.measured.nats > ACCURACY["bf16"].nats
    assert any(f"component {far} is off by" in finding for finding in report.findings)
    assert report.findings[0].startswith("the E-step in bf16 is off by")
    assert int(np.nanargmax(report.nats)) == far
    assert len(report.worst) == 20
    assert all(row.index >= 600 and row.component == far for row in report.worst)
    errors = [row.error for row in report.worst]
    assert errors == sorted(errors, reverse=True)


def test_intermediate_values_are_those_of_the_formula():
    x = with_far_cluster()
    gmm = fitted(x, 4, precision="fp16")
    row = diagnose(gmm, x, rows=1).worst[0]
    k = row.component
    centred, mean = x[row.index].astype(np.float64) - gmm.center_, gmm.means_[k] - gmm.center_
    precision = 1 / gmm.covariances_[k]
    assert row.reference.cross == pytest.approx(precision * (centred @ mean), rel=1e-12)
    assert row.reference.square == pytest.approx(precision * (centred @ centred), rel=1e-12)
    log_norm = math.log(gmm.weights_[k]) + 2 * math.log(precision / (2 * math.pi))
    distance = row.reference.square - 2 * row.reference.cross + precision * (mean @ mean)
    assert row.reference.logit == pytest.approx(log_norm - distance / 2, abs=1e-6)
    assert row.reference.log_normaliser == pytest.approx(
        gmm.set_params(precision="fp64").score_samples(x.astype(np.float64))[row.index], abs=1e-9
    )
    assert row.reference.responsibility == pytest.approx(1)
    # In fp16 the terms are off by about 2^-11 of themselves, and the difference by that much.
    assert row.found.cross == pytest.approx(row.reference.cross, rel=1e-3)
    assert row.found.cross != row.reference.cross
    assert abs(row.found.logit - row.reference.logit) == pytest.approx(row.error, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_planted_drift_is_named(precision):
    """The weight of one component and the mean of another, whatever the precision."""
    x = tight(3000, 16, 8, shift=100).x
    gmm = fitted(x, 8, covariance_type="diag", precision=precision)
    gmm.weights_ = gmm.weights_ * np.where(np.arange(8) == 5, 2, 1)
    gmm.weights_ = gmm.weights_ / gmm.weights_.sum()
    gmm.means_ = gmm.means_.copy()
    gmm.means_[3, 7] += 0.01
    report = diagnose(gmm, x)
    assert report.weights.worst(report.weights.drift)[0] == (5, 0)
    assert report.means.worst(report.means.drift)[0] == (3, 7)
    text = "\n".join(report.findings)
    assert "weights are no fixed point of EM: one step moves component 5 by" in text
    assert "means are no fixed point of EM: one step moves component 3, feature 7 by" in text
    assert "component 3, feature 7" in section(str(report), "means")
    # What the precision does in one step is far less than what was planted.
    assert report.means.error.max() < 0.02 < report.means.drift.max()


def test_a_variance_that_collapsed_is_named():
    x = tight(2000, 8, 4).x
    gmm = fitted(x, 4, covariance_type="diag", precision="fp32")
    gmm.covariances_ = gmm.covariances_.copy()
    gmm.covariances_[2, 6] /= 50
    gmm.precisions_cholesky_ = 1 / np.sqrt(gmm.covariances_)
    report = diagnose(gmm, x)
    assert report.variances.worst(report.variances.drift)[0] == (2, 6)
    assert report.diagonals.worst(report.diagonals.drift)[0] == (2, 6)
    assert report.variances.held[2, 6] == gmm.covariances_[2, 6]
    assert any("variances are no fixed point" in finding for finding in report.findings)


def test_smallest_variances_are_listed(kind, blobs):
    """The feature with the least variance comes first, with the component that has it."""
    x = blobs(n=600, d=3, k=3, spread=6.0)
    x[:, 1] *= 1e-3
    gmm = fitted(x, 3, covariance_type=kind)
    line = section(str(diagnose(gmm, x)), "smallest: ")
    variances = gmm.covariances_
    if kind in ("tied", "full"):
        variances = np.atleast_2d(np.diagonal(variances, axis1=-2, axis2=-1))
    k = int(variances.argmin()) if kind == "spherical" else int(variances[:, 1].argmin())
    expected = {"spherical": f"component {k}:", "tied": "feature 1:"}
    assert line.startswith(f"smallest: {expected.get(kind, f'component {k}, feature 1:')}")


def test_an_m_step_that_fails_in_low_precision_is_reported():
    """Variances below what float32 sums can resolve, without reg_covar."""
    rng = np.random.default_rng(0)
    centres = np.array([[12.0, -12.0], [-12.0, 12.0]])
    x = (np.repeat(centres, 200, axis=0) + 2e-5 * rng.normal(size=(400, 2))).astype(np.float32)
    gmm = GaussianMixture(2, reg_covar=0, precision="fp64", random_state=0).fit(x)
    gmm.precision = "fp16"
    report = diagnose(gmm, x)
    assert "the M-step in fp16 fails: Fitting the mixture model failed" in report.findings[0]
    assert math.isnan(report.measured.weights)
    assert np.isnan(report.weights.found).all()
    assert "nan" in str(report) or "difference" in str(report)


def test_no_step_in_the_reference_precision_is_an_error():
    x = np.repeat(np.eye(3), 5, axis=0)
    gmm = GaussianMixture(3, random_state=0).fit(x)
    gmm.reg_covar = 0
    with pytest.raises(ValueError, match="no EM step to compare with in the reference precision"):
        diagnose(gmm, x)


def test_the_mixture_stays_as_it_is(blobs):
    x = blobs(n=300).astype(np.float32)
    gmm = fitted(x, 3, precision="fp16")
    before = copy.deepcopy(gmm.__dict__)
    diagnose(gmm, x)
    assert gmm.__dict__.keys() == before.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(gmm, name), value)


def test_report_is_frozen(blobs):
    x = blobs(n=100)
    report = diagnose(fitted(x, 2), x)
    with pytest.raises(FrozenInstanceError):
        report.precision = "fp16"  # type: ignore[misc]


def test_tensors_and_loaded_mixtures(blobs, tmp_path):
    x = blobs(n=300).astype(np.float32)
    gmm = fitted(x, 3)
    gmm.save(tmp_path / "gmm")
    loaded = GaussianMixture.load(tmp_path / "gmm")
    assert str(diagnose(loaded, torch.from_numpy(x))) == str(diagnose(gmm, x))


def test_components_without_samples_do_not_hide_the_others(blobs):
    x = blobs(n=300, k=2)
    gmm = fitted(x, 3)
    gmm.means_ = np.concatenate([gmm.means_[:2], [[1e3, 1e3, 1e3]]])
    report = diagnose(gmm, x)
    assert math.isnan(report.nats[2])
    assert report.weights.worst(report.weights.drift)[0][0] in (0, 1, 2)
    assert report.means.drift[2].max() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x, r"got numpy\.ndarray\.$"),
        (lambda x: None, r"got None\.$"),
        (lambda x: GMMQuantizer(2, 3), r"got gmm_ivf\.quantizer\.GMMQuantizer\. Give its attr"),
        (lambda x: GMMQuantizer.from_centroids(x[:3]).mixture, r"Centroids\. Means alone"),
        (lambda x: SklearnMixture(2).fit(x), r"got sklearn\.mixture\..* goes on from its param"),
    ],
)
def test_what_is_no_mixture_is_named(blobs, make, message):
    x = blobs(n=100).astype(np.float32)
    with pytest.raises(ValueError, match=r"^gmm must be a fitted gmm_ivf\.Gauss") as error:
        diagnose(make(x), x)
    assert re.search(message, str(error.value))
    assert len(str(error.value)) < 400


def test_bad_arguments(blobs):
    x = blobs(n=100)
    gmm = fitted(x, 2)
    with pytest.raises(ValueError, match=r"reference_precision must be one of .* got 'auto'"):
        diagnose(gmm, x, reference_precision="auto")
    with pytest.raises(ValueError, match="rows must be an integer of at least 1, got 0"):
        diagnose(gmm, x, rows=0)
    with pytest.raises(ValueError, match="X has 2 features"):
        diagnose(gmm, x[:, :2])
    with pytest.raises(NotFittedError):
        diagnose(GaussianMixture(2), x)


def test_the_public_name_is_the_function():
    """A module of the same name would take its place once it is imported."""
    assert import_module("gmm_ivf").diagnose is diagnosis.diagnose


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_triton_is_diagnosed_against_torch():
    x = with_far_cluster()
    gmm = fitted(x, 4, precision="bf16", backend="triton")
    far = int(np.linalg.norm(gmm.means_ - gmm.center_, axis=1).argmax())
    report = diagnose(gmm, x)
    assert report.backend == "triton"
    assert int(np.nanargmax(report.nats)) == far
    assert all(row.component == far for row in report.worst)
