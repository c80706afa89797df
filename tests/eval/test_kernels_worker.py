"""Other people's packages in a process of their own, which may die or hang."""

import os
import time
from typing import Any

import torch

from gmm_ivf.eval import kernel_run, kernel_worker
from gmm_ivf.eval.kernel_cases import Case, Problem
from gmm_ivf.eval.kernel_contenders import Contender
from gmm_ivf.eval.kernel_measure import failed
from gmm_ivf.eval.kernel_results import Store
from gmm_ivf.eval.kernel_run import Plan, run
from gmm_ivf.eval.kernel_timing import Budget
from gmm_ivf.eval.kernel_worker import Worker

CPU = torch.device("cpu")
CASE = Case("spherical", "fp32", 400, 4, 3)


class Sound(Contender):
    name = "sound"
    package = "os"

    def fit(self, problem: Problem, iterations: int) -> dict[str, Any]:
        return {"log_likelihood": float(os.getpid())}


class Dies(Sound):
    name = "dies"

    def fit(self, problem: Problem, iterations: int) -> dict[str, Any]:
        os._exit(3)


class Hangs(Sound):
    name = "hangs"

    def fit(self, problem: Problem, iterations: int) -> dict[str, Any]:
        time.sleep(600)
        return {}


def test_who_dies_or_hangs_costs_only_itself(monkeypatch):
    monkeypatch.setattr(kernel_worker, "PATIENCE", 5.0)
    with Worker(CPU) as worker:

        def fit(contender: Contender) -> tuple[str, str]:
            row = worker.measure(contender, CASE, "fit", Budget(5))
            processes.append(row.log_likelihood)
            return row.status, row.reason

        processes: list[float | None] = []
        assert fit(Sound()) == fit(Sound()) == ("ok", "")
        assert processes[0] == processes[1] != os.getpid()
        assert fit(Dies()) == ("failed", "its process ended, status 3")
        assert fit(Sound()) == ("ok", "")
        assert processes[-1] not in (*processes[:2], None)
        monkeypatch.setattr(kernel_worker, "PATIENCE", 0.5)
        began = time.monotonic()
        assert fit(Hangs()) == ("failed", "no answer after 0 s, stopped")
        assert fit(Hangs()) == ("failed", f"not tried, for it did not answer in {CASE}")
        assert time.monotonic() - began < 30


def test_packages_of_others_are_measured_apart(tmp_path, monkeypatch):
    seen = []

    class Apart(Worker):
        def measure(self, contender: Contender, case: Case, job: str, budget: Budget):
            seen.append((contender.name, job))
            return failed(contender, case, job, self.device, "no answer")

    monkeypatch.setattr(kernel_run, "Worker", Apart)
    plan = Plan((CASE,), (Sound(),), CPU, 100.0)
    rows, left_out = run(plan, Store(tmp_path / "results.jsonl", {}))
    assert seen == [("sound", "iteration"), ("sound", "fit")]
    assert [row.reason for row in rows] == ["no answer"] * 2
    assert left_out == []
