"""Other people's packages under the calls of `eval.kernels`; each works only where installed.

Their iterations are the difference of longer and shorter fits from the same start, so that what a
package does once (checks, copies, norms) does not count.
"""

import importlib
import logging
from typing import Any

import torch
from sklearn.mixture import GaussianMixture as SklearnMixture
from threadpoolctl import threadpool_limits
from torch import Tensor

from gmm_ivf.eval.environment import require_faiss, usable_cores
from gmm_ivf.eval.kernel_cases import Case, Problem
from gmm_ivf.eval.kernel_contenders import REG_COVAR, Chunked, Contender, Iterations

# What a core does in a second on products of float32, roughly; scikit-learn's passes over N x K
# matrices take ten times as long.
_CORE_FLOPS = 1e10
_SKLEARN_FLOPS = 1e9
# scikit-learn's peak in units of an N x K matrix of float32, and what it may take.
_SKLEARN_MATRICES = 6.3
_SKLEARN_BYTES = 8e9
# Bytes that go from host memory to a GPU in a second, by the way of pages that are not pinned.
_UPLOAD_RATE = 5e9
_HALF_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Sklearn(Contender):
    """scikit-learn's GaussianMixture, on the CPU with all cores."""

    name = "scikit-learn"

    def obstacle(self, case: Case, device: torch.device) -> str | None:
        """It holds several N x K matrices."""
        needed = _SKLEARN_MATRICES * 4 * case.n * case.k
        if needed > _SKLEARN_BYTES:
            return f"would take {needed / 1e9:.0f} GB of memory; small cases only"
        return None

    def seconds(self, case: Case) -> float:
        """By the flop of an iteration."""
        return case.flop / (_SKLEARN_FLOPS * usable_cores())

    def _model(self, problem: Problem, iterations: int, **start: Any) -> SklearnMixture:
        return SklearnMixture(
            problem.case.k,
            covariance_type=problem.case.kind,
            tol=0.0,
            reg_covar=REG_COVAR,
            max_iter=iterations,
            random_state=0,
            **start,
        )

    def iterations(self, problem: Problem) -> Iterations:
        """Fits from given parameters."""
        given = problem.parameters()
        start = {f"{name}_init": given[name] for name in ("weights", "means", "precisions")}

        def run(iterations: int) -> None:
            # The command gives numpy's BLAS one thread, since ours does not use it.
            with threadpool_limits(usable_cores(), user_api="blas"):
                self._model(problem, iterations, init_params="random_from_data", **start).fit(
                    problem.host
                )

        def density() -> Tensor:
            model = self._model(problem, 1)
            for name, value in given.items():
                setattr(model, f"{name}_", value)
            sample = problem.x[problem.rows].cpu().numpy()
            return torch.from_numpy(model.score_samples(sample))

        return Iterations(run, 0, density)

    def fit(self, problem: Problem, iterations: int) -> dict[str, Any]:
        """With its k-means start."""
        with threadpool_limits(usable_cores(), user_api="blas"):
            model = self._model(problem, iterations).fit(problem.host)
        return {"log_likelihood": float(model.lower_bound_)}


class FlashKMeans(Contender):
    """flash-kmeans: Triton kernels, samples on the GPU in the type of the mode."""

    name = "flash-kmeans"
    package = "flash_kmeans"
    hard = True

    def missing(self, device: torch.device) -> str | None:
        """Without a GPU it falls back to something slow."""
        return super().missing(device) or (None if device.type == "cuda" else "needs a GPU")

    def iterations(self, problem: Problem) -> Iterations:
        """Without early stop, from the means of the problem."""
        flash = importlib.import_module("flash_kmeans")
        dtype = _HALF_TYPES.get(problem.case.mode, torch.float32)
        x = problem.x.to(dtype)
        means = problem.components.means.to(dtype)[None]

        def run(iterations: int) -> None:
            flash.batch_kmeans_Euclid(
                x[None], problem.case.k, max_iters=iterations, tol=0.0, init_centroids=means
            )

        return Iterations(run, 0, x_bytes=0 if x is problem.x else x.nbytes)

    def fit(self, problem: Problem, iterations: int) -> dict[str, Any]:
        """Its class, on a tensor in host memory; the start is random rows."""
        flash = importlib.import_module("flash_kmeans")
        case = problem.case
        flash.FlashKMeans(
            case.d,
            case.k,
            niter=iterations,
            tol=0.0,
            dtype=_HALF_TYPES.get(case.mode, torch.float32),
            device=problem.device,
        ).fit(torch.from_numpy(problem.host))
        return {}


class FastKMeans(Contender):
    """fastkmeans: chunks from host memory, on the GPU if there is one."""

    name = "fastkmeans"
    package = "fastkmeans"
    hard = True

    def seconds(self, case: Case) -> float:
        """Each iteration sends all samples to the device."""
        return 4.0 * case.n * case.d / _UPLOAD_RATE

    def iterations(self, problem: Problem) -> Iterations:
        """It always reads from host memory and draws its own start."""
        return Iterations(lambda iterations: self.fit(problem, iterations), 0)

    def fit(self, problem: Problem, iterations: int) -> dict[str, Any]:
        """All samples, no early stop."""
        fast = importlib.import_module("fastkmeans")
        case = problem.case
        fast.FastKMeans(
            case.d, case.k, niter=iterations, tol=0.0, gpu=problem.device.type == "cuda"
        ).train(problem.host)
        return {}


class TorchGMM(Contender):
    """torchgmm, all samples as one batch; it makes two passes for each iteration then."""

    name = "torchgmm"
    package = "torchgmm"

    def _model(self, problem: Problem, iterations: int, **start: Any) -> Any:
        bayes = importlib.import_module("torchgmm.bayes")
        # Lightning, whose import sets its level, reports every trainer on stderr.
        for name in [name for name in logging.root.manager.loggerDict if "lightning" in name]:
            logging.getLogger(name).setLevel(logging.ERROR)
        gpu = problem.device.type == "cuda"
        trainer = {
            "max_epochs": iterations,
            "accelerator": "gpu" if gpu else "cpu",
            "devices": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
        }
        return bayes.GaussianMixture(
            problem.case.k,
            covariance_type=problem.case.kind,
            convergence_tolerance=0.0,
            covariance_regularization=REG_COVAR,
            trainer_params=trainer,
            **start,
        )

    def iterations(self, problem: Problem) -> Iterations:
        """Samples on the device, from the means of the problem."""
        means = problem.components.means.float().cpu()

        def run(iterations: int) -> None:
            self._model(problem, iterations, init_means=means).fit(problem.x)

        return Iterations(run, 0, lambda: self._density(problem))

    def _density(self, problem: Problem) -> Tensor:
        gmm = importlib.import_module("torchgmm.bayes.gmm.model")
        case, c = problem.case, problem.components
        model = gmm.GaussianMixtureModel(gmm.GaussianMixtureModelConfig(case.k, case.d, case.kind))
        model = model.to(problem.device)
        model.component_probs.copy_(c.weights)
        model.means.copy_(c.means)
        model.precisions_cholesky.copy_(c.precisions_cholesky)
        return model(problem.x[problem.rows])[1]

    def fit(self, problem: Problem, iterations: int) -> dict[str, Any]:
        """With its k-means start."""
        model = self._model(problem, iterations).fit(torch.from_numpy(problem.host))
        return {"log_likelihood": -float(model.nll_)}


class FaissKMeans(Contender):
    """FAISS's k-means from host memory, on the CPU with all cores or on all GPUs."""

    package = "faiss"
    hard = True

    def __init__(self, gpu: bool):
        self.gpu = gpu
        self.name = "faiss-gpu" if gpu else "faiss-cpu"

    def missing(self, device: torch.device) -> str | None:
        """The GPU needs a build of FAISS that has it."""
        reason = super().missing(device)
        if reason or not self.gpu:
            return reason
        if device.type != "cuda":
            return "needs a GPU"
        # Builds for the CPU count no GPU, or cannot count them.
        count = getattr(require_faiss(), "get_num_gpus", int)()
        return None if count else "this build of FAISS has no GPU support"

    def seconds(self, case: Case) -> float:
        """By the flop of an iteration, on a CPU."""
        return 0.0 if self.gpu else case.hard_flop / (_CORE_FLOPS * usable_cores())

    def _train(self, problem: Problem, iterations: int, **start: Any) -> None:
        case = problem.case
        require_faiss().Kmeans(
            case.d,
            case.k,
            niter=iterations,
            gpu=self.gpu,
            min_points_per_centroid=1,
            max_points_per_centroid=case.n,
        ).train(problem.host, **start)

    def iterations(self, problem: Problem) -> Iterations:
        """From the means of the problem, all samples."""
        means = problem.components.means.float().cpu().numpy()
        return Iterations(
            lambda iterations: self._train(problem, iterations, init_centroids=means), 0
        )

    def fit(self, problem: Problem, iterations: int) -> dict[str, Any]:
        """All samples; the start is random rows."""
        self._train(problem, iterations)
        return {}


def rivals() -> dict[str, Contender]:
    """All of them by name, in the order of the table."""
    found = [
        FlashKMeans(),
        Chunked("bf16"),
        Chunked("tf32"),
        Chunked("fp32"),
        FastKMeans(),
        TorchGMM(),
        FaissKMeans(gpu=True),
        FaissKMeans(gpu=False),
        Sklearn(),
    ]
    return {contender.name: contender for contender in found}
