"""Adapters to other packages, against stand-ins with the signatures that the packages have."""

import importlib.machinery
import sys
import time
import types

import numpy as np
import pytest
import torch

from gmm_ivf.eval import kernel_rivals
from gmm_ivf.eval.kernel_cases import Case, Problem
from gmm_ivf.eval.kernel_measure import FIT_ITERATIONS, measure
from gmm_ivf.eval.kernel_rivals import FaissKMeans, FastKMeans, FlashKMeans, Sklearn, TorchGMM
from gmm_ivf.eval.kernel_timing import Budget
from gmm_ivf.eval.kernels import RIVALS

CPU = torch.device("cpu")
CASE = Case("spherical", "fp16", 300, 4, 3)


@pytest.fixture
def problem() -> Problem:
    return Problem(CASE, CPU)


@pytest.fixture
def install(monkeypatch):
    """install(name, **contents): a module that counts as installed."""

    def make(name: str, **contents) -> None:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)

    return make


def test_every_rival_has_a_name_of_its_own():
    known = kernel_rivals.rivals()
    assert tuple(known) == RIVALS
    assert all(name == contender.name for name, contender in known.items())
    assert {name for name, c in known.items() if c.hard} == {
        "flash-kmeans",
        "fastkmeans",
        "faiss-cpu",
        "faiss-gpu",
    }


def test_flash_kmeans_gets_half_samples_and_a_start(install, problem):
    calls = []

    def batch_kmeans_Euclid(x, n_clusters, max_iters=100, tol=0.0, init_centroids=None):
        calls.append((x.dtype, tuple(x.shape), n_clusters, max_iters, tol, init_centroids))

    install("flash_kmeans", batch_kmeans_Euclid=batch_kmeans_Euclid)
    loop = FlashKMeans().iterations(problem)
    loop.run(6)
    dtype, shape, k, iterations, tol, start = calls[0]
    assert (dtype, shape, k, iterations, tol) == (torch.float16, (1, 300, 3), 4, 6, 0.0)
    assert tuple(start.shape) == (1, 4, 3)
    assert loop.x_bytes == 300 * 3 * 2
    assert loop.burst == 0
    assert FlashKMeans().missing(CPU) == "needs a GPU"


def test_flash_kmeans_fits_from_host_memory(install, problem):
    seen = {}

    class Model:
        def __init__(self, d, k, niter=25, tol=1e-8, dtype=None, device=None):
            seen.update(d=d, k=k, niter=niter, tol=tol, dtype=dtype, device=device)

        def fit(self, data):
            seen["data"] = data

    install("flash_kmeans", FlashKMeans=Model)
    assert FlashKMeans().fit(problem, 30) == {}
    assert (seen["d"], seen["k"], seen["niter"], seen["tol"]) == (3, 4, 30, 0.0)
    assert (seen["dtype"], seen["device"]) == (torch.float16, CPU)
    assert seen["data"].device == CPU
    assert seen["data"].dtype == torch.float32


def test_fastkmeans_is_measured_by_difference(install, problem):
    iterations = []

    class Model:
        def __init__(self, d, k, niter=25, tol=1e-8, gpu=True):
            assert (d, k, tol, gpu) == (3, 4, 0.0, False)
            self.niter = niter

        def train(self, data):
            assert data.dtype == np.float32
            iterations.append(self.niter)
            time.sleep(0.002 * self.niter)

    install("fastkmeans", FastKMeans=Model)
    row = measure(FastKMeans(), problem, "iteration", Budget(10))
    assert (row.status, row.hard, row.nats_max) == ("ok", True, None)
    assert row.flop == CASE.hard_flop
    assert set(iterations) == {1, 6}
    row = measure(FastKMeans(), problem, "fit", Budget(10))
    assert (row.status, row.iterations, iterations[-1]) == ("ok", 30, FIT_ITERATIONS)


def test_torchgmm_starts_from_the_means_and_gives_densities(install, problem):
    seen = {}

    class Model:
        nll_ = 3.25

        def __init__(self, num_components=1, **options):
            seen.update(options, k=num_components)

        def fit(self, data):
            seen["data"] = data
            return self

    class Config:
        def __init__(self, num_components, num_features, covariance_type):
            assert (num_components, num_features, covariance_type) == (4, 3, "spherical")

    class Density(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.component_probs = torch.nn.Buffer(torch.empty(4))
            self.means = torch.nn.Buffer(torch.empty(4, 3))
            self.precisions_cholesky = torch.nn.Buffer(torch.empty(4))

        def forward(self, x):
            return None, self.means.sum() + self.component_probs.sum() + x[:, 0]

    install("torchgmm")
    install("torchgmm.bayes", GaussianMixture=Model)
    install(
        "torchgmm.bayes.gmm.model", GaussianMixtureModel=Density, GaussianMixtureModelConfig=Config
    )
    loop = TorchGMM().iterations(problem)
    loop.run(6)
    assert (seen["k"], seen["covariance_type"], seen["convergence_tolerance"]) == (
        4,
        "spherical",
        0,
    )
    assert seen["trainer_params"]["max_epochs"] == 6
    assert torch.equal(seen["init_means"], problem.components.means.float())
    assert loop.density is not None
    assert loop.density().shape == problem.rows.shape
    assert TorchGMM().fit(problem, 30) == {"log_likelihood": -3.25}
    assert "init_means" in seen and seen["trainer_params"]["max_epochs"] == 30


def test_faiss_trains_on_all_samples_from_the_means(monkeypatch, problem):
    seen = {}

    class Kmeans:
        def __init__(self, d, k, **options):
            seen.update(options, d=d, k=k)

        def train(self, x, init_centroids=None):
            seen.update(x=x, start=init_centroids)

    fake = types.SimpleNamespace(Kmeans=Kmeans, get_num_gpus=lambda: 0)
    monkeypatch.setattr(kernel_rivals, "require_faiss", lambda: fake)
    FaissKMeans(gpu=False).iterations(problem).run(6)
    assert (seen["d"], seen["k"], seen["niter"], seen["gpu"]) == (3, 4, 6, False)
    assert seen["max_points_per_centroid"] == CASE.n
    assert seen["start"].dtype == np.float32
    FaissKMeans(gpu=True).fit(problem, 30)
    assert (seen["niter"], seen["gpu"], seen["start"]) == (30, True, None)


def test_faiss_on_a_gpu_needs_a_build_for_it(monkeypatch, install):
    install("faiss")
    monkeypatch.setattr(kernel_rivals, "require_faiss", lambda: types.SimpleNamespace())
    gpu = torch.device("cuda")
    assert FaissKMeans(gpu=True).missing(gpu) == "this build of FAISS has no GPU support"
    assert FaissKMeans(gpu=True).missing(CPU) == "needs a GPU"
    assert FaissKMeans(gpu=False).missing(gpu) is None
    one = types.SimpleNamespace(get_num_gpus=lambda: 1)
    monkeypatch.setattr(kernel_rivals, "require_faiss", lambda: one)
    assert FaissKMeans(gpu=True).missing(gpu) is None


@pytest.mark.parametrize("kind", ["spherical", "diag", "tied", "full"])
def test_sklearn_starts_from_the_parameters(kind):
    problem = Problem(Case(kind, "fp32", 300, 4, 3), CPU)
    loop = Sklearn().iterations(problem)
    assert loop.density is not None
    torch.testing.assert_close(loop.density().double(), problem.exact, rtol=0, atol=1e-4)
    with pytest.warns(UserWarning, match="did not converge"):
        loop.run(1)


def test_sklearn_is_for_small_cases():
    large = Case.parse("spherical:fp16:1M:1024:128")
    reason = "would take 26 GB of memory; small cases only"
    assert Sklearn().obstacle(large, CPU) == reason
    assert Sklearn().obstacle(CASE, CPU) is None
    assert Sklearn().seconds(large) > 1 > Sklearn().seconds(CASE)


def test_sklearn_is_measured(problem):
    row = measure(Sklearn(), problem, "fit", Budget(0))
    assert (row.status, row.hard) == ("ok", False)
    # As many clusters as there are: the fit ends near the density of the mixture itself.
    assert row.log_likelihood == pytest.approx(float(problem.exact.mean()), abs=0.2)
