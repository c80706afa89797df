"""One measurement of `eval.kernels`: an iteration or a fit of one contender on one problem."""

import statistics
import warnings
from dataclasses import replace
from typing import Any

import torch

from gmm_ivf.eval.kernel_cases import Case, Problem
from gmm_ivf.eval.kernel_contenders import Contender, Loop, first_line
from gmm_ivf.eval.kernel_results import Row
from gmm_ivf.eval.kernel_timing import (
    Budget,
    allocated,
    capture,
    matmul_tflops,
    median_ms,
    peak,
    seconds_of,
    wall_ms,
)
from gmm_ivf.kernels.components import Components
from gmm_ivf.kernels.operands import STORAGE

FIT_ITERATIONS = 30
_MOST_FITS = 3
# Iterations that one is the difference of.
_FEWER, _MORE = 1, 6
# Longer iterations do not notice what launches cost, and are not captured.
_LAUNCH_BOUND_MS = 50.0


def blank(contender: Contender, case: Case, job: str, device: torch.device) -> Row:
    """The row of a measurement before it is made."""
    iterations = FIT_ITERATIONS if job == "fit" else 1
    return Row(
        case.kind,
        case.mode,
        case.n,
        case.k,
        case.d,
        contender.name,
        job,
        device.type,
        hard=contender.hard,
        iterations=iterations,
        flop=iterations * (case.hard_flop if contender.hard else case.flop),
    )


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
            row = replace(row, matmul_tflops=matmul_tflops(problem.case.mode, problem.device))
            if job == "fit":
                return replace(row, **_fit(contender, problem, budget))
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
    loops: list[Loop] = []

    def begin() -> None:
        loops.append(contender.loop(problem))
        loops[0].run(_FEWER)

    found: dict[str, Any] = {"first_seconds": seconds_of(begin, device)}
    loop = loops[0]
    if exact is not None and loop.density is not None:
        error = (loop.density().to(exact) - exact).abs()
        found |= {"nats_max": float(error.max()), "nats_mean": float(error.mean())}
    if not loop.single:
        return found | {"ms": _difference(loop, device)}

    def once() -> Any:
        return loop.run(1)

    highest = peak(once, device)
    if highest is not None:
        found["extra_mb"] = (highest - before - loop.x_bytes) / 2**20
    if contender.own:
        found["repeats"] = _same(once(), once())
    found["ms"] = median_ms(once, device)
    if device.type == "cuda" and found["ms"] < _LAUNCH_BOUND_MS:
        replay = capture(once)
        found["graph_ms"] = median_ms(replay, device) if replay else None
    return found


def _difference(loop: Loop, device: torch.device) -> float:
    """Milliseconds of one iteration, from runs of more and of fewer."""
    more = wall_ms(lambda: loop.run(_MORE), device)
    fewer = wall_ms(lambda: loop.run(_FEWER), device)
    if more <= fewer:
        raise RuntimeError(f"{_MORE} iterations took no longer than {_FEWER}: too short to measure")
    return (more - fewer) / (_MORE - _FEWER)


def _same(one: Components, other: Components) -> bool:
    """Whether two results have the same bits."""
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
    if contender.name == "triton":
        size = STORAGE[case.mode].itemsize * (2 if case.mode == "fp16x3" else 1)
    return size * case.n * case.d
