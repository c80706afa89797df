"""Labels, sparse responsibilities, scores, samples, and the memory they take."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy import sparse
from sklearn.exceptions import NotFittedError

from gmm_ivf import GaussianMixture

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(overlapping, kind):
    return GaussianMixture(4, covariance_type=kind, random_state=0, tol=1e-2).fit(overlapping)


@pytest.mark.parametrize("m", [1, 2, 4, 9])
def test_responsibilities_are_the_largest_of_predict_proba(model, overlapping, m):
    ids, resp = model.responsibilities(overlapping, max_components=m)
    proba = model.predict_proba(overlapping)
    width = min(m, 4)
    assert ids.shape == resp.shape == (500, width)
    assert (ids.dtype, resp.dtype) == (np.int64, np.float32)
    order = np.argsort(-proba, axis=1, kind="stable")[:, :width]
    assert_allclose(resp, np.take_along_axis(proba, order, axis=1), atol=1e-6)
    assert_allclose(np.take_along_axis(proba, ids, axis=1), resp, atol=1e-6)
    assert_array_equal(ids[:, 0], model.predict(overlapping))


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.25, 0.5, 0.999])
def test_threshold(model, overlapping, threshold):
    ids, resp = model.responsibilities(overlapping, max_components=4, threshold=threshold)
    proba = model.predict_proba(overlapping)
    for row in range(0, 500, 7):
        kept = ids[row][ids[row] >= 0]
        assert set(kept) == set(np.flatnonzero(proba[row] > threshold))
        assert (np.diff(resp[row]) <= 0).all()
    assert (resp[ids < 0] == 0).all()
    assert (resp[ids >= 0] > threshold - 1e-7).all()


@pytest.mark.parametrize("threshold", [None, 0.1, 0.9])
@pytest.mark.parametrize("m", [1, 3, 4])
def test_csr_holds_the_same(model, overlapping, m, threshold):
    ids, resp = model.responsibilities(overlapping, m, threshold)
    matrix = model.responsibilities(overlapping, m, threshold, format="csr")
    assert isinstance(matrix, sparse.csr_array)
    assert matrix.shape == (500, 4)
    assert matrix.dtype == np.float32
    assert matrix.has_canonical_format
    wanted = np.zeros((500, 5), np.float32)
    np.put_along_axis(wanted, ids, resp, axis=1)  # -1 goes to a column of its own
    assert_array_equal(matrix.toarray(), wanted[:, :4])
    if threshold is None and m == 4:
        assert_allclose(matrix.sum(axis=1), 1, rtol=1e-5)


def test_csr_of_a_tensor_is_scipy(model, overlapping):
    tensor = torch.from_numpy(overlapping)
    ids, resp = model.responsibilities(tensor, 2, 0.2)
    assert isinstance(ids, torch.Tensor)
    assert (ids.dtype, resp.dtype) == (torch.int64, torch.float32)
    wanted = model.responsibilities(overlapping, 2, 0.2, format="csr")
    got = model.responsibilities(tensor, 2, 0.2, format="csr")
    assert_array_equal(got.toarray(), wanted.toarray())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "coo"}, 'format must be "ids" or "csr", got \'coo\''),
        ({"threshold": 1.0}, r"threshold must be in \[0, 1\), got 1.0"),
        ({"threshold": -0.1}, "threshold must be in"),
        ({"threshold": np.nan}, "threshold must be in"),
        ({"max_components": 0}, "max_components must be .* at least 1, got 0"),
        ({"max_components": 2.5}, "max_components must be an integer .* got 2.5"),
    ],
)
def test_bad_arguments_of_responsibilities(overlapping, arguments, message):
    model = GaussianMixture(2, random_state=0).fit(overlapping)
    with pytest.raises(ValueError, match=message):
        model.responsibilities(overlapping, **arguments)


@pytest.mark.parametrize("m", [0, -1, 1.5])
def test_bad_m(overlapping, m):
    model = GaussianMixture(2, random_state=0).fit(overlapping)
    with pytest.raises(ValueError, match="m must be an integer of at least 1"):
        model.top_components(overlapping, m)


def test_top_components_log_values(model, overlapping):
    ids, log_resp = model.top_components(overlapping, 3)
    proba = model.predict_proba(overlapping)
    assert (ids.dtype, log_resp.dtype) == (np.int64, np.float64)
    assert_allclose(np.exp(log_resp), np.take_along_axis(proba, ids, axis=1), rtol=1e-9)
    assert (np.diff(log_resp, axis=1) <= 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_top_components_where_posteriors_underflow(dtype):
    """960 dimensions: all but one responsibility is 0, their logarithms are not."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((3, 960))
    X = (centres[rng.integers(3, size=60)] + 0.5 * rng.standard_normal((60, 960))).astype(dtype)
    model = GaussianMixture(3, random_state=0).fit(X)
    ids, log_resp = model.top_components(X, 3)
    assert np.isfinite(log_resp).all()
    assert (np.exp(log_resp[:, 1]) == 0).all()
    wide, means = X.astype(float), model.means_
    squared = np.square(wide[:, None] - means).sum(2)
    joint = np.log(model.weights_) - 0.5 * squared / model.covariances_
    joint -= 480 * np.log(model.covariances_)
    wanted = np.take_along_axis(joint, ids, axis=1)
    assert_allclose(log_resp - log_resp[:, :1], wanted - wanted[:, :1], rtol=1e-4)


def test_scores_agree_with_each_other(model, overlapping):
    scores = model.score_samples(overlapping)
    assert model.score(overlapping) == pytest.approx(scores.mean(), rel=1e-12)
    n, p = 500, model._n_parameters()
    assert model.aic(overlapping) == pytest.approx(-2 * scores.sum() + 2 * p, rel=1e-12)
    assert model.bic(overlapping) == pytest.approx(-2 * scores.sum() + np.log(n) * p, rel=1e-12)
    assert isinstance(model.score(overlapping), float)


def test_score_of_float32_is_summed_in_float64():
    X = np.full((200_000, 1), 0.1, dtype=np.float32)
    X[::2] = -0.1
    model = GaussianMixture(1).fit(X)
    assert model.score(X) == pytest.approx(float(model.score_samples(X)[0]), rel=1e-6)


def test_one_row_and_row_by_row(model, overlapping):
    together = model.predict_proba(overlapping[:20])
    apart = np.concatenate([model.predict_proba(row[None]) for row in overlapping[:20]])
    assert_allclose(apart, together, atol=1e-12)


def test_parameters_set_by_hand(overlapping, model, kind):
    """As with scikit-learn's: fitted attributes make a model that can be asked."""
    other = GaussianMixture(4, covariance_type=kind)
    for name in ("weights_", "means_", "covariances_", "precisions_cholesky_"):
        setattr(other, name, getattr(model, name))
    for X in (overlapping, torch.from_numpy(overlapping)):
        assert_allclose(other.predict_proba(X), model.predict_proba(X), atol=1e-12)
        assert_allclose(other.score_samples(X), model.score_samples(X), rtol=1e-12)
    with pytest.raises(ValueError, match="X has 2 features"):
        other.predict(torch.zeros(3, 2))


def test_samples_of_the_model(model):
    X, y = model.sample(300)
    assert (X.shape, X.dtype) == ((300, 3), np.float64)
    assert (y.shape, y.dtype) == ((300,), np.int64)
    assert (np.diff(y) >= 0).all()
    again, _ = model.sample(300)
    assert_array_equal(X, again)  # random_state is an integer
    with pytest.raises(ValueError, match="n_samples"):
        model.sample(0)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.predict([[0.0]]),
        lambda m: m.predict_proba([[0.0]]),
        lambda m: m.score_samples([[0.0]]),
        lambda m: m.score([[0.0]]),
        lambda m: m.bic([[0.0]]),
        lambda m: m.responsibilities([[0.0]]),
        lambda m: m.top_components([[0.0]], 1),
        lambda m: m.sample(),
        lambda m: m.precisions_,
        lambda m: m.save("never-written"),
    ],
)
def test_nothing_works_before_fit(call):
    with pytest.raises(NotFittedError):
        call(GaussianMixture())


MEMORY = """
import resource, sys
import numpy as np
from gmm_ivf import GaussianMixture

X = np.memmap(sys.argv[1], dtype=np.float32, mode="r", shape=(160_000, 64))
warm = GaussianMixture(64, covariance_type=sys.argv[2], random_state=0, max_iter=1, tol=1e9)
warm.fit(np.array(X[:3000]))
warm.responsibilities(np.array(X[:3000]))


def anonymous():
    # Pages of the mapped file come and go as the system likes: only private memory counts.
    fields = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return int(fields["RssAnon"].split()[0]) / 1024


class Peak:
    def __init__(self):
        import threading
        self.base, self.top, self.going = anonymous(), 0.0, True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self):
        import time
        while self.going:
            self.top = max(self.top, anonymous())
            time.sleep(0.002)

    def stop(self):
        self.going = False
        self.thread.join()
        return self.top - self.base


peak = Peak()
warm.fit(X)
fitted = peak.stop()
peak = Peak()
labels = warm.predict(X)
predicted = peak.stop()
peak = Peak()
ids, resp = warm.responsibilities(X, max_components=2)
sparse = peak.stop()
print(fitted, predicted, sparse, len(labels), len(ids))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("kind", ["spherical", "tied"])
def test_gm_g22_memory_is_a_tile(tmp_path, kind):
    """160,000 x 64 floats are 41 MB, responsibilities of 64 components another 41 MB."""
    rng = np.random.default_rng(0)
    path = tmp_path / "x.f32"
    X = np.memmap(path, dtype=np.float32, mode="w+", shape=(160_000, 64))
    for start in range(0, 160_000, 20_000):
        X[start : start + 20_000] = rng.standard_normal((20_000, 64), dtype=np.float32)
    X.flush()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(path), kind],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    fitted, predicted, few, *counts = (float(v) for v in done.stdout.split())
    assert counts == [160_000, 160_000]
    assert fitted < 36  # MB
    assert predicted < 25
    assert few < 25
