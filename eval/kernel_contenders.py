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
from gmm_ivf.kernels.components import m_step
from gmm_ivf.kernels.dispatch import TRITON_FEATURES, triton_obstacle

REG_COVAR = 1e-6
# Triton's interpreter takes microseconds for each of N K D.
_INTERPRETED = 1 << 16
# Floating-point operations a second of EM on torch, as measured on an H200.
_FLOAT32_RATE = 15e12


@dataclass(frozen=True)
class Loop:
    """EM iterations (prepare, E-step, M-step) from the parameters of a problem.

    Attributes
    ----------
    run : callable
        Does so many iterations. One iteration returns the new components where `single` is true.
    density : callable or None
        Log-densities of the checked rows; None for hard assignments.
    x_bytes : int
        What copies of the samples that it made take.
    single : bool
        Whether ``run(1)`` is an iteration and nothing else. Otherwise it sets up as well, and an
        iteration is measured as the difference of more and of fewer.
    """

    run: Callable[[int], Any]
    density: Callable[[], Tensor] | None = None
    x_bytes: int = 0
    single: bool = True


class Contender:
    """One implementation. Subclasses say what it can do and how it is called.

    Attributes
    ----------
    name : str
    package : str or None
        Module that has to be installed.
    own : bool
        Whether it is ours: measured first, and never left out in favour of others.
    hard : bool
        Whether it is k-means, which does half the work of EM.
    has_fit : bool
    """

    name = ""
    package: str | None = None
    own = False
    hard = False
    has_fit = True

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

    def obstacle(self, case: Case, device: torch.device) -> str | None:
        """Why it cannot run a case, None where it can."""
        return None

    def seconds(self, case: Case) -> float:
        """Rough seconds of an iteration, where it may exceed the time that there is."""
        return 0.0

    def loop(self, problem: Problem) -> Loop:
        """Iterations from the parameters of the problem."""
        raise NotImplementedError

    def fit(self, problem: Problem, iterations: int) -> dict[str, Any]:
        """Fit from host memory, start included; what the fit says of itself."""
        raise NotImplementedError


class Mixture(Contender):
    """`GaussianMixture` on one of its backends."""

    own = True

    def fit(self, problem: Problem, iterations: int) -> dict[str, Any]:
        """As a user would, with the mode of the case."""
        case = problem.case
        model = GaussianMixture(
            case.k,
            covariance_type=case.kind,
            tol=0.0,
            max_iter=iterations,
            random_state=0,
            device=problem.device,
            backend=self.name,
            precision=case.mode,
        ).fit(problem.host)
        return {
            "start_share": model.fit_report_["init_share"],
            "log_likelihood": model.lower_bound_,
        }


class Triton(Mixture):
    """The fused kernels."""

    name = "triton"

    def missing(self, device: torch.device) -> str | None:
        """Without a GPU there is only Triton's interpreter, where that is switched on."""
        return triton_obstacle(device)

    def obstacle(self, case: Case, device: torch.device) -> str | None:
        """What the kernels cannot take."""
        if case.mode == "fp64":
            return "the kernels have no fp64"
        if case.d > TRITON_FEATURES:
            return f"the kernels take at most {TRITON_FEATURES} features"
        if device.type == "cpu" and case.n * case.k * case.d > _INTERPRETED:
            return f"the interpreter would take too long (N K D over {_INTERPRETED})"
        return None

    def loop(self, problem: Problem) -> Loop:
        """Each iteration gets the normalisers of the one before, as in a fit near convergence."""
        from gmm_ivf.kernels import em

        mode, components = problem.case.mode, problem.components
        samples = em.stage(problem.x, mode)
        # A row pass without a shift; the iterations then have one.
        shift = em.row_pass(samples, em.prepare(components, mode)).norm

        def run(_: int) -> Any:
            prepared = em.prepare(components, mode)
            statistics = em.e_step(samples, prepared, shift=shift)[1]
            return m_step(statistics, components, REG_COVAR, check=False)

        def density() -> Tensor:
            prepared = em.prepare(components, mode)
            rows = em.row_pass(samples, prepared, shift=shift)
            return em.log_density(samples, rows, prepared)[problem.rows]

        x_bytes = samples.values.element_size() * len(samples.values) * problem.x.numel()
        return Loop(run, density, x_bytes)


class Torch(Mixture):
    """The tiled backend in plain torch, which emulates the half modes in float32."""

    name = "torch"

    def seconds(self, case: Case) -> float:
        """At the rate of float32 products of a large GPU; a CPU is given small cases."""
        return case.flop / _FLOAT32_RATE

    def loop(self, problem: Problem) -> Loop:
        """Samples stay on the device in the dtype of the mode."""
        case, components = problem.case, problem.components
        x = problem.x.to(torch_backend.compute_dtype(case.mode))
        tiles = x.split(torch_backend.tile_rows(case.k, case.d, problem.device))
        total = None
        if case.kind == "tied":
            rounded = (torch_backend.round_operand(tile, case.mode) for tile in tiles)
            total = torch_backend.scatter(rounded, case.d, problem.device)

        def run(_: int) -> Any:
            with torch_backend.exact_float32():
                prepared = torch_backend.prepare(components, case.mode)
                statistics = torch_backend.e_step(tiles, prepared, total)
                return m_step(statistics, components, REG_COVAR, check=False)

        def density() -> Tensor:
            with torch_backend.exact_float32():
                prepared = torch_backend.prepare(components, case.mode)
                return torch_backend.log_density(x[problem.rows], prepared)

        return Loop(run, density, 0 if x is problem.x else x.nbytes)


class Chunked(Contender):
    """Plain torch, a chunk of rows at a time, with the logits of a chunk in memory."""

    has_fit = False
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

    def loop(self, problem: Problem) -> Loop:
        """Products in the mode, exp and sums over chunks as in ours."""
        x, components = problem.x.to(self.dtype), problem.components
        precision = "high" if self.mode == "tf32" else "highest"
        total = kernel_chunked.scatter(x) if problem.case.kind == "tied" else None

        def run(_: int) -> Any:
            with float32_products(precision):
                statistics = kernel_chunked.e_step(x, components, total)
                return m_step(statistics, components, REG_COVAR, check=False)

        def density() -> Tensor:
            with float32_products(precision):
                return kernel_chunked.log_density(x[problem.rows], components)

        return Loop(run, density, 0 if x is problem.x else x.nbytes)


def first_line(error: BaseException) -> str:
    """Type and first line of an error, short enough for a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
