"""Those who are measured by `eval.kernels`: ours, and the loop that one writes in plain torch."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gmm_ivf import GaussianMixture
from gmm_ivf.eval import kernel_chunked
from gmm_ivf.eval.kernel_cases import Case, Problem
from gmm_ivf.eval.kernel_timing import float32_products
from gmm_ivf.kernels import torch_backend
from gmm_ivf.kernels.components import Components, m_step
from gmm_ivf.kernels.dispatch import TRITON_FEATURES, triton_obstacle

REG_COVAR = 1e-6
# Iterations after which two runs are compared bit by bit.
_COMPARED = 3
# Iterations that a fit on Triton does without looking at the likelihood.
_BURST = 4
# The bound of truncated EM, and from how many components on it is worth a measurement.
TRUNCATION = 1e-4
_TRUNCATED_COMPONENTS = 4096
# Triton's interpreter takes microseconds for each of N K D.
_INTERPRETED = 1 << 16
# Floating-point operations a second of EM on torch, as measured on an H200.
_FLOAT32_RATE = 15e12


@dataclass(frozen=True)
class Iterations:
    """EM iterations from the parameters of a problem.

    Attributes
    ----------
    run : callable
        Does so many iterations.
    burst : int
        How many to time at once, from the second call on; 0 where each call sets up as well, and
        an iteration is measured as the difference of more and of fewer.
    density : callable or None
        Log-densities of the checked rows; None for hard assignments.
    result : callable or None
        Components after the same iterations each time.
    x_bytes : int
        What copies of the samples that it made take.
    """

    run: Callable[[int], Any]
    burst: int = 1
    density: Callable[[], Tensor] | None = None
    result: Callable[[], Components] | None = None
    x_bytes: int = 0


class Contender:
    """One implementation. Subclasses say what it can do and how it is called.

    Attributes
    ----------
    name : str
    package : str or None
        Module that has to be installed.
    own : bool
        Whether it is our kernels: they are measured on all cases before the others.
    hard : bool
        Whether it is k-means, which does half the work of EM.
    """

    name = ""
    package: str | None = None
    own = False
    hard = False

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run here at all, None where it can."""
        if self.package is None:
            return None
        if importlib.util.find_spec(self.package) is None:
            return "not installed"
        try:
            importlib.import_module(self.package)
        except Exception as error:  # what other packages raise on import is theirs
            return f"cannot be imported ({first_line(error)})"
        return None

    def suits(self, case: Case) -> bool:
        """Whether a case says anything of it.

        Overlapping components cost only those who leave some out; k-means stands beside spherical
        mixtures.
        """
        return case.data == "separated" and (not self.hard or case.kind == "spherical")

    def obstacle(self, case: Case, device: torch.device) -> str | None:
        """Why it cannot run a case, None where it can."""
        return None

    def has_fit(self, device: torch.device) -> bool:
        """Whether it makes whole fits."""
        return True

    def seconds(self, case: Case) -> float:
        """Rough seconds of an iteration, where it may exceed the time that there is."""
        return 0.0

    def iterations(self, problem: Problem) -> Iterations:
        """Iterations from the parameters of the problem."""
        raise NotImplementedError

    def fit(self, problem: Problem, iterations: int) -> dict[str, Any]:
        """Fit from host memory, start included; what the fit says of itself."""
        raise NotImplementedError


class Mixture(Contender):
    """`GaussianMixture` on one of its backends."""

    backend = ""

    def model(self, problem: Problem, iterations: int, **options: Any) -> GaussianMixture:
        """An estimator as a user would make it, with the mode of the case."""
        given = {"random_state": 0, "device": problem.device, "backend": self.backend}
        return GaussianMixture(
            problem.case.k,
            covariance_type=problem.case.kind,
            tol=0.0,
            max_iter=iterations,
            precision=problem.case.mode,
            **given | options,
        )

    def fit(self, problem: Problem, iterations: int) -> dict[str, Any]:
        """From numpy, with the k-means start."""
        model = self.model(problem, iterations).fit(problem.host)
        report = model.fit_report_
        found = {
            "start_share": report["init_share"],
            "load_share": report["load_seconds"] / report["fit_seconds"],
            "iteration_ms": 1e3 * report["em_seconds"] / model.n_iter_,
            "log_likelihood": model.lower_bound_,
        }
        return found | truncation_of(model)


def truncation_of(model: GaussianMixture) -> dict[str, Any]:
    """What a fit with truncation says of it; nothing of another."""
    report = model.fit_report_
    if "visited_share" not in report:
        return {}
    visited = report["visited_share"]
    return {
        "visited_share": sum(visited) / len(visited),
        "exact_iterations": report["exact_iterations"],
    }


class Triton(Mixture):
    """The fused kernels."""

    name = backend = "triton"
    own = True

    def missing(self, device: torch.device) -> str | None:
        """Without a GPU there is only Triton's interpreter, where that is switched on."""
        return triton_obstacle(device)

    def suits(self, case: Case) -> bool:
        """Whatever the data."""
        return True

    def obstacle(self, case: Case, device: torch.device) -> str | None:
        """What the kernels cannot take."""
        if case.mode == "fp64":
            return "the kernels have no fp64"
        if case.d > TRITON_FEATURES:
            return f"the kernels take at most {TRITON_FEATURES} features"
        if device.type == "cpu" and case.n * case.k * case.d > _INTERPRETED:
            return f"the interpreter would take too long (N K D over {_INTERPRETED})"
        return None

    def has_fit(self, device: torch.device) -> bool:
        """The interpreter would take minutes."""
        return device.type == "cuda"

    def iterations(self, problem: Problem) -> Iterations:
        """As in a fit: a CUDA graph after the first burst, each iteration from the one before."""
        from gmm_ivf.kernels import em, triton_backend
        from gmm_ivf.kernels.loop import Loop

        mode, components = problem.case.mode, problem.components
        samples = em.stage(problem.x, mode)
        loop = Loop(samples, components, REG_COVAR)

        def density() -> Tensor:
            prepared = triton_backend.prepare(components, mode)
            return triton_backend.log_density(problem.x[problem.rows], prepared)

        def result() -> Components:
            loop.restart(components)
            loop.run(_COMPARED)
            return loop.components()

        x_bytes = samples.values.element_size() * len(samples.values) * problem.x.numel()
        return Iterations(loop.run, _BURST, density, result, x_bytes)


class Truncated(Triton):
    """The kernels with `truncation`; an iteration is a mean over a fit from nearby parameters."""

    name = "triton-truncated"

    def suits(self, case: Case) -> bool:
        """What it is for."""
        return case.k >= _TRUNCATED_COMPONENTS

    def obstacle(self, case: Case, device: torch.device) -> str | None:
        """What the kernels cannot truncate."""
        from gmm_ivf.truncated_engine import check_truncation

        reason = super().obstacle(case, device)
        if reason is None:
            try:
                check_truncation(case.kind, (case.mode,), case.d)
            except ValueError as error:
                reason = str(error)
        return reason

    def model(self, problem: Problem, iterations: int, **options: Any) -> GaussianMixture:
        """With the bound, unless the options have another."""
        return super().model(problem, iterations, **{"truncation": TRUNCATION} | options)


class Torch(Mixture):
    """The tiled backend in plain torch, which emulates the half modes in float32."""

    name = backend = "torch"

    def seconds(self, case: Case) -> float:
        """At the rate of float32 products of a large GPU; a CPU is given small cases."""
        return case.flop / _FLOAT32_RATE

    def iterations(self, problem: Problem) -> Iterations:
        """Samples stay on the device in the dtype of the mode."""
        case, components = problem.case, problem.components
        x = problem.x.to(torch_backend.compute_dtype(case.mode))
        tiles = x.split(torch_backend.tile_rows(case.k, case.d, problem.device))
        total = None
        if case.kind == "tied":
            rounded = (torch_backend.round_operand(tile, case.mode) for tile in tiles)
            total = torch_backend.scatter(rounded, case.d, problem.device)

        def once() -> Components:
            with torch_backend.exact_float32():
                prepared = torch_backend.prepare(components, case.mode)
                statistics = torch_backend.e_step(tiles, prepared, total)
                return m_step(statistics, components, REG_COVAR, check=False)

        def density() -> Tensor:
            with torch_backend.exact_float32():
                prepared = torch_backend.prepare(components, case.mode)
                return torch_backend.log_density(x[problem.rows], prepared)

        x_bytes = 0 if x is problem.x else x.nbytes
        return Iterations(lambda _: once(), 1, density, once, x_bytes)


class Chunked(Contender):
    """Plain torch, a chunk of rows at a time, with the logits of a chunk in memory."""

    _types = (("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16))

    def __init__(self, mode: str):
        self.mode = mode
        self.name = f"chunked-{mode}"
        self.dtype = dict(self._types)[mode]

    def missing(self, device: torch.device) -> str | None:
        """Reduced precision pays on a GPU only."""
        if self.mode != "fp32" and device.type != "cuda":
            return "needs a GPU"
        return None

    def has_fit(self, device: torch.device) -> bool:
        """An E-step and an M-step are all there is of it."""
        return False

    def iterations(self, problem: Problem) -> Iterations:
        """Products in the mode, exp and sums over chunks as in ours."""
        x, components = problem.x.to(self.dtype), problem.components
        precision = "high" if self.mode == "tf32" else "highest"
        total = kernel_chunked.scatter(x) if problem.case.kind == "tied" else None

        def once() -> Components:
            with float32_products(precision):
                statistics = kernel_chunked.e_step(x, components, total)
                return m_step(statistics, components, REG_COVAR, check=False)

        def density() -> Tensor:
            with float32_products(precision):
                return kernel_chunked.log_density(x[problem.rows], components)

        x_bytes = 0 if x is problem.x else x.nbytes
        return Iterations(lambda _: once(), 1, density, once, x_bytes)


def first_line(error: BaseException) -> str:
    """Type and first line of an error, short enough for a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
