"""One measurement of `eval.kernels`: an iteration or a fit of one contender on one problem."""

import gc
import statistics
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gmm_ivf import GaussianMixture
from gmm_ivf.eval.kernel_cases import Case, Problem
from gmm_ivf.eval.kernel_contenders import (
    Contender,
    Iterations,
    Truncated,
    first_line,
    truncation_of,
)
from gmm_ivf.eval.kernel_results import Row
from gmm_ivf.eval.kernel_timing import (
    Budget,
    allocated,
    median_ms,
    peak,
    seconds_of,
    wall_ms,
)
from gmm_ivf.kernels.components import Components

FIT_ITERATIONS = 30
_MOST_FITS = 3
# Iterations that one is the difference of, and what that takes when neither is repeated.
_FEWER, _MORE = 1, 6
_DIFFERENCE_ITERATIONS = 10


def blank(contender: Contender, case: Case, job: str, device: torch.device) -> Row:
    """The row of a measurement before it is made."""
    iterations = FIT_ITERATIONS if job == "fit" else 1
    return Row(
        case.kind,
        case.mode,
        case.n,
        case.k,
        case.d,
        case.data,
        contender.name,
        job,
        device.type,
        hard=contender.hard,
        iterations=iterations,
        flop=iterations * (case.hard_flop if contender.hard else case.flop),
    )


def failed(contender: Contender, case: Case, job: str, device: torch.device, reason: str) -> Row:
    """The row of a measurement that could not be made."""
    return replace(blank(contender, case, job, device), status="failed", reason=reason)


def expected_seconds(contender: Contender, case: Case, job: str) -> float:
    """Of a measurement at least, where the contender is known to take long."""
    iterations = FIT_ITERATIONS if job == "fit" else _DIFFERENCE_ITERATIONS
    return iterations * contender.seconds(case)


class Measurer:
    """Measures on samples that it keeps until another case comes.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._problem: Problem | None = None

    def measure(self, contender: Contender, case: Case, job: str, budget: Budget) -> Row:
        """`measure` on the samples of a case."""
        if self._problem is None or self._problem.case != case:
            self.forget()
            try:
                self._problem = Problem(case, self.device)
            except Exception as error:  # too large for the memory, mostly
                reason = f"no samples ({first_line(error)})"
                return failed(contender, case, job, self.device, reason)
        row = measure(contender, self._problem, job, budget)
        release(self.device)
        return row

    def forget(self) -> None:
        """Let go of the samples."""
        self._problem = None
        release(self.device)


def measure(contender: Contender, problem: Problem, job: str, budget: Budget) -> Row:
    """Measure; whatever goes wrong is the reason in a row that failed.

    Parameters
    ----------
    contender : Contender
    problem : Problem
    job : {"iteration", "fit"}
    budget : Budget
        Fits are repeated only while it lasts.
    """
    row = blank(contender, problem.case, job, problem.device)
    try:
        with warnings.catch_warnings():
            # 30 iterations without convergence are what was asked for.
            warnings.simplefilter("ignore")
            if job == "fit":
                return replace(row, **_fit(contender, problem, budget))
            if isinstance(contender, Truncated):
                return replace(row, **_mean_iteration(contender, problem))
            return replace(row, **_iteration(contender, problem))
    except torch.OutOfMemoryError as error:
        return replace(row, status="failed", reason=f"out of memory ({first_line(error)})")
    except MemoryError:
        return replace(row, status="failed", reason="out of host memory")
    except Exception as error:  # other people's code may raise anything; the rest goes on
        return replace(row, status="failed", reason=first_line(error))


def _iteration(contender: Contender, problem: Problem) -> dict[str, Any]:
    """Numbers of an EM iteration."""
    device = problem.device
    exact = None if contender.hard else problem.exact
    before = allocated(device)
    made: list[Iterations] = []
    first = seconds_of(lambda: made.append(contender.iterations(problem)), device)
    em = made[0]
    count = em.burst or _FEWER

    def begin() -> None:
        em.run(count)
        if em.burst > 1:
            em.run(count)  # captures its graph

    begun: list[float] = []
    highest = peak(lambda: begun.append(seconds_of(begin, device)), device)
    found: dict[str, Any] = {"first_seconds": first + begun[0]}
    if exact is not None and em.density is not None:
        error = (em.density().to(exact) - exact).abs()
        found |= {"nats_max": float(error.max()), "nats_mean": float(error.mean())}
    if not em.burst:
        return found | {"ms": _difference(em, device)}
    if highest is not None:
        found["extra_mb"] = (highest - before - em.x_bytes) / 2**20
    if em.result is not None:
        found["repeats"] = _same(em.result(), em.result())
    return found | {"ms": median_ms(lambda: em.run(em.burst), device) / em.burst}


def _mean_iteration(contender: Truncated, problem: Problem) -> dict[str, Any]:
    """Numbers of truncated iterations: means over fits, parameters given and samples on the device.

    All of truncation is in them: order, choices of blocks, and iterations with all components.
    """
    start = problem.near()
    models: list[GaussianMixture] = []

    def fit(**options: Any) -> None:
        models.append(contender.model(problem, FIT_ITERATIONS, **start, **options).fit(problem.x))

    first = seconds_of(fit, problem.device)
    for _ in range(_MOST_FITS):
        fit()
    cut = models[-1]
    times = [1e3 * model.fit_report_["em_seconds"] / model.n_iter_ for model in models[1:]]
    fit(truncation=None)
    found = {
        "first_seconds": first,
        "ms": statistics.median(times),
        "log_likelihood": cut.lower_bound_,
        "likelihood_loss": models[-1].lower_bound_ - cut.lower_bound_,
        "repeats": np.array_equal(models[0].means_, cut.means_),
    }
    return found | truncation_of(cut)


def _difference(em: Iterations, device: torch.device) -> float:
    """Milliseconds of one iteration, from runs of more and of fewer."""
    more = wall_ms(lambda: em.run(_MORE), device)
    fewer = wall_ms(lambda: em.run(_FEWER), device)
    if more <= fewer:
        raise RuntimeError(f"{_MORE} iterations took no longer than {_FEWER}: too short to measure")
    return (more - fewer) / (_MORE - _FEWER)


def _same(one: Components, other: Components) -> bool:
    """Whether two runs gave the same bits."""
    names = ("weights", "means", "covariances")
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)


def _fit(contender: Contender, problem: Problem, budget: Budget) -> dict[str, Any]:
    """Numbers of a fit; the first, which compiles, is told apart from the others."""
    device, said = problem.device, {}
    _ = problem.host  # copied from the device once, outside the clock
    before = allocated(device)

    def fit() -> None:
        said.update(contender.fit(problem, FIT_ITERATIONS))

    first = seconds_of(fit, device)
    found: dict[str, Any] = {"first_seconds": first, "ms": 1e3 * first}
    if budget.left() < first:
        return found | said | {"reason": "first fit, none after it for want of time"}
    times: list[float] = []
    highest = peak(lambda: times.append(seconds_of(fit, device)), device)
    while len(times) < _MOST_FITS and budget.left() > times[-1]:
        times.append(seconds_of(fit, device))
    if highest is not None and contender.own:
        found["extra_mb"] = (highest - before - _storage(contender, problem.case)) / 2**20
    return found | said | {"ms": 1e3 * statistics.median(times)}


def _storage(contender: Contender, case: Case) -> int:
    """Bytes of the samples as our backends keep them."""
    size = 8 if case.mode == "fp64" else 4
    if contender.own:
        # Imported only where they run: triton may not be installed.
        from gmm_ivf.kernels.operands import STORAGE

        size = STORAGE[case.mode].itemsize * (2 if case.mode == "fp16x3" else 1)
    return size * case.n * case.d


def release(device: torch.device) -> None:
    """Give back what the last one held on a GPU, so that the next one meets the same memory."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
