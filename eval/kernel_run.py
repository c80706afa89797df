"""All measurements of `eval.kernels`: our kernels first, then the others by what time is left."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from gmm_ivf.eval.kernel_cases import CURVES, Case
from gmm_ivf.eval.kernel_contenders import Contender
from gmm_ivf.eval.kernel_measure import Measurer, blank, expected_seconds
from gmm_ivf.eval.kernel_results import Row, Store
from gmm_ivf.eval.kernel_timing import Budget, matmul_tflops
from gmm_ivf.eval.kernel_worker import Worker
from gmm_ivf.eval.progress import bar

# The others may take one in so many parts of the time that is left for a case, or equal ones where
# fewer cases are left.
_PARTS = 4


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes
    ----------
    cases : tuple of Case
        The most important first: later ones go when time is short.
    contenders : tuple of Contender
    device : torch.device
    seconds : float
        For everything.
    """

    cases: tuple[Case, ...]
    contenders: tuple[Contender, ...]
    device: torch.device
    seconds: float

    def tasks(self, case: Case, own: bool) -> list["Task"]:
        """What our kernels do on a case, or the others, in order.

        Fits of the kernels come before their iterations, so that the first fit compiles; the others
        make fits on the first case only, last.
        """
        found = [c for c in self.contenders if c.own == own and c.suits(case)]
        iterations = [Task(case, contender, "iteration") for contender in found]
        wanted = case not in CURVES if own else case == self.cases[0]
        able = [c for c in found if c.has_fit(self.device)] if wanted else []
        fits = [Task(case, contender, "fit") for contender in able]
        return [*fits, *iterations] if own else [*iterations, *fits]


@dataclass(frozen=True)
class Task:
    """A measurement to be made, or one that there was no time for."""

    case: Case
    contender: Contender
    job: str


def run(
    plan: Plan, store: Store, clock: Callable[[], float] = time.monotonic
) -> tuple[list[Row], list[Task]]:
    """Measure everything that the store does not hold yet.

    Our kernels on all cases, then the others on each within a part of the time, so that one case
    does not cost the next; what that left out has another chance at the end.

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
        Of the plan, measured now or before.
    left_out : list of Task
    """
    budget = Budget(plan.seconds, clock)
    total = sum(len(plan.tasks(case, own)) for case in plan.cases for own in (True, False))
    with bar(total, "kernels") as progress, Worker(plan.device) as apart:
        session = _Session(plan, store, Measurer(plan.device), apart, progress.update)
        left_out: list[Task] = []
        for case in plan.cases:
            left_out += session.measure(plan.tasks(case, own=True), budget)
        postponed: list[Task] = []
        for number, case in enumerate(plan.cases):
            share = budget.part(min(len(plan.cases) - number, _PARTS))
            postponed += session.measure(plan.tasks(case, own=False), share)
        left_out += session.measure(postponed, budget)
    return session.rows, left_out


@dataclass
class _Session:
    """Rows so far, and who measures: `here`, or `apart` what may hang or crash."""

    plan: Plan
    store: Store
    here: Measurer
    apart: Worker
    progress: Callable[[], object]
    rows: list[Row] = field(default_factory=list)
    cold: bool = True

    def measure(self, tasks: Sequence[Task], budget: Budget) -> list[Task]:
        """Measure within a budget; what there was no time for."""
        late: list[Task] = []
        for task in tasks:
            row = self._row(task, budget)
            if row is None:
                late.append(task)
            else:
                self.rows.append(row)
                self.progress()
        return late

    def _row(self, task: Task, budget: Budget) -> Row | None:
        case, contender, job, device = task.case, task.contender, task.job, self.plan.device
        row = blank(contender, case, job, device)
        if kept := self.store.get(row.key):
            return kept
        reason = contender.obstacle(case, device)
        if reason:
            row = replace(row, status="unsupported", reason=reason)
        elif budget.left() <= expected_seconds(contender, case, job):
            return None
        else:
            place = self.apart if contender.package else self.here
            rate = matmul_tflops(case.mode, device)
            row = place.measure(contender, case, job, budget)
            row = replace(row, matmul_tflops=rate, cold=self.cold and contender.own)
            self.cold = False
        row = replace(row, environment=self.store.environment)
        self.store.append(row)
        return row


def summary(left_out: Sequence[Task]) -> str:
    """What was left out, by case."""
    by_case: dict[Case, list[str]] = {}
    for task in left_out:
        by_case.setdefault(task.case, []).append(f"{task.contender.name} {task.job}")
    return "; ".join(f"{case}: {', '.join(names)}" for case, names in by_case.items())
