"""All measurements of `eval.kernels`, each case within its share of the time."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gmm_ivf.eval.kernel_cases import Case, Problem
from gmm_ivf.eval.kernel_contenders import Contender, first_line
from gmm_ivf.eval.kernel_measure import FIT_ITERATIONS, blank, measure
from gmm_ivf.eval.kernel_results import Row, Store
from gmm_ivf.eval.kernel_timing import Budget
from gmm_ivf.eval.progress import bar

# What the difference of a longer and a shorter fit takes when neither is repeated.
_DIFFERENCE_ITERATIONS = 10


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes
    ----------
    cases : tuple of Case
        The most important first: later ones go when time is short.
    contenders : tuple of Contender
    with_fit : bool
    device : torch.device
    seconds : float
        For everything.
    """

    cases: tuple[Case, ...]
    contenders: tuple[Contender, ...]
    with_fit: bool
    device: torch.device
    seconds: float

    def tasks(self, case: Case) -> list[tuple[Contender, str]]:
        """Contenders and jobs for a case, in order.

        Ours come first, and their fits before their iterations, so that the first fit compiles.
        k-means is measured beside spherical mixtures only.
        """
        own = [c for c in self.contenders if c.own]
        others = [c for c in self.contenders if not c.own]
        if case.kind != "spherical":
            others = [c for c in others if not c.hard]
        fits = [(c, "fit") for c in own if c.has_fit and self.with_fit]
        late = [(c, "fit") for c in others if c.has_fit and self.with_fit]
        return [*fits, *((c, "iteration") for c in (*own, *others)), *late]


@dataclass(frozen=True)
class LeftOut:
    """A measurement that there was no time for."""

    case: Case
    contender: str
    job: str


def run(
    plan: Plan, store: Store, clock: Callable[[], float] = time.monotonic
) -> tuple[list[Row], list[LeftOut]]:
    """Measure everything that the store does not hold yet.

    Parameters
    ----------
    plan : Plan
    store : Store
        Gets each row as soon as it is measured.
    clock : callable, optional
        Seconds since some moment.

    Returns
    -------
    rows : list of Row
        Of the plan, measured now or before, in order.
    left_out : list of LeftOut
    """
    budget = Budget(plan.seconds, clock)
    rows: list[Row] = []
    left_out: list[LeftOut] = []
    total = sum(len(plan.tasks(case)) for case in plan.cases)
    with bar(total, "kernels") as progress:
        for number, case in enumerate(plan.cases):
            share = budget.part(len(plan.cases) - number)
            for found in _case(plan, case, store, budget, share):
                if isinstance(found, Row):
                    rows.append(found)
                else:
                    left_out.append(found)
                progress.update()
    return rows, left_out


def _case(
    plan: Plan, case: Case, store: Store, budget: Budget, share: Budget
) -> Iterator[Row | LeftOut]:
    """Rows of a case, or what was left out of it."""
    kept = {row.key: row for row in store.rows()}
    problem: Problem | None = None
    for contender, job in plan.tasks(case):
        row = blank(contender, case, job, plan.device)
        if row.key in kept:
            yield kept[row.key]
            continue
        reason = contender.obstacle(case, plan.device)
        if reason:
            row = replace(row, status="unsupported", reason=reason)
        # The first of ours may use up the time of later cases, which are less important.
        elif not _in_time(
            contender, case, job, budget if contender is plan.contenders[0] else share
        ):
            yield LeftOut(case, contender.name, job)
            continue
        else:
            try:
                problem = problem or Problem(case, plan.device)
            except Exception as error:  # too large for the memory, mostly
                row = replace(row, status="failed", reason=f"no samples ({first_line(error)})")
            else:
                row = measure(contender, problem, job, share)
                _release(plan.device)
        row = replace(row, environment=store.environment)
        store.append(row)
        yield row
    del problem
    _release(plan.device)


def _in_time(contender: Contender, case: Case, job: str, budget: Budget) -> bool:
    iterations = FIT_ITERATIONS if job == "fit" else _DIFFERENCE_ITERATIONS
    return budget.left() > iterations * contender.seconds(case)


def _release(device: torch.device) -> None:
    """Give back what the last one held on a GPU, so that the next one meets the same memory."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def summary(left_out: Sequence[LeftOut]) -> str:
    """What was left out, shortened to cases where nothing of a case was left."""
    by_case: dict[Case, list[str]] = {}
    for item in left_out:
        by_case.setdefault(item.case, []).append(f"{item.contender} {item.job}")
    return "; ".join(f"{case}: {', '.join(names)}" for case, names in by_case.items())
