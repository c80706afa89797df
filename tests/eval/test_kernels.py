"""The command `eval.kernels`: arguments, what it writes, time limits, and going on."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from gmm_ivf.eval import kernel_measure, kernel_run, kernel_timing, kernels
from gmm_ivf.eval.kernel_cases import CURVES, DEFAULT, TARGETS, Case, Problem, quick
from gmm_ivf.eval.kernel_contenders import Contender, Iterations
from gmm_ivf.eval.kernel_measure import blank, measure
from gmm_ivf.eval.kernel_results import Row, Store, read_rows
from gmm_ivf.eval.kernel_run import Plan, Task, run, summary
from gmm_ivf.eval.kernel_timing import Budget

CPU = torch.device("cpu")
CASE = Case("spherical", "fp32", 400, 4, 3)
OTHER = Case("diag", "fp32", 400, 4, 3)


class Clock:
    """Seconds that pass only when somebody works."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Fake(Contender):
    """Takes a second of the clock for a job; counts its jobs."""

    def __init__(self, name: str, clock: Clock, own: bool = False, takes: float = 1.0):
        self.name, self.clock, self.own, self.takes = name, clock, own, takes
        self.jobs = 0

    def has_fit(self, device: torch.device) -> bool:
        return False

    def iterations(self, problem: Problem) -> Iterations:
        self.jobs += 1
        self.clock.now += self.takes
        return Iterations(lambda _: problem.components)


@pytest.fixture(autouse=True)
def short_run(monkeypatch):
    """Short medians, and no kernels through the interpreter: a fit would take a minute."""
    monkeypatch.setattr(kernel_timing, "_BENCH_SECONDS", 0.005)
    monkeypatch.setattr(pytest.importorskip("triton").knobs.runtime, "interpret", False)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def plan_of(*contenders: Contender, cases=(CASE, OTHER), seconds: float = 100.0) -> Plan:
    return Plan(cases, contenders, CPU, seconds)


def store_in(folder, **environment) -> Store:
    return Store(folder / "results.jsonl", {"commit": "abc", "threads": 1} | environment)


def command(tmp_path, *more: str) -> int:
    return kernels.main(["--threads", "1", "--out", str(tmp_path), *more])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "spherical:fp16:1M:1024"], "wants KIND:MODE:N:K:D such as spherical:fp16:1M"),
        (["--case", "round:fp16:10:2:2"], "KIND must be one of spherical, diag, tied, full, got"),
        (["--case", "diag:fp8:10:2:2"], "MODE must be one of fp64, fp32, fp16x3, fp16, tf32, bf16"),
        (["--case", "diag:fp16:10:2:2:far"], "DATA must be one of separated, overlapping, got"),
        (["--case", "diag:fp16:10:2:x"], "D must be a whole number of at least 1"),
        (["--case", "diag:fp16:10:20:2"], "N must be at least 2 and at least K, got N=10 K=20"),
        (["--case", "diag:fp16:10:2:2", "--quick"], "give --case or --quick, not both"),
        (["--rival", "cuml"], "argument --rival: invalid choice: 'cuml'"),
        (["--rival", "fastkmeans", "--no-rivals"], "give --rival or --no-rivals, not both"),
        (["--budget", "0"], "argument --budget: wanted a number of seconds above 0, got '0'"),
        (["--threads", "0"], "argument --threads: wanted a whole number of at least 1, got '0'"),
    ],
)
def test_wrong_arguments_are_one_sentence(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        command(tmp_path, *arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command(tmp_path, "--device", "cuda")
    assert "--device cuda: torch sees no CUDA device here" in capsys.readouterr().err


def test_quick_run_end_to_end(tmp_path, capsys):
    before = os.environ.get("TRITON_CACHE_DIR")
    assert command(tmp_path, "--quick", "--device", "cpu", "--rival", "chunked-fp32") == 0
    assert os.environ.get("TRITON_CACHE_DIR") == before
    printed = capsys.readouterr().out
    rows = read_rows(tmp_path / "results.jsonl")
    separated = {case for case in quick("fp32") if case.data == "separated"}
    assert {row.case for row in rows} == separated
    measured = [row for row in rows if row.job == "iteration"]
    assert len(measured) == 2 * len(separated)
    for row in measured:
        assert (row.status, row.reason) == ("ok", "")
        assert row.ms is not None and row.share_of_floor is not None and row.nats_max is not None
        assert row.ms > 0
        # No upper bound: beside other work the floor, timed alone, may come out too slow.
        assert row.share_of_floor > 0
        assert row.nats_max < 1e-3
        assert row.environment["packages"]["torch"] == torch.__version__
    assert all(row.repeats for row in measured)
    assert (tmp_path / "table.txt").read_text() in printed
    assert "chunked-fp32" in printed
    assert (tmp_path / "kernels.png").stat().st_size > 10_000
    assert "</svg>" in (tmp_path / "kernels.svg").read_text()


def test_fits_are_measured_too(tmp_path, capsys):
    arguments = ["--case", str(CASE), "--case", str(OTHER), "--device", "cpu"]
    assert command(tmp_path, *arguments, "--rival", "scikit-learn") == 0
    rows = [row for row in read_rows(tmp_path / "results.jsonl") if row.job == "fit"]
    assert [(row.case, row.contender) for row in rows] == [(CASE, "torch"), (CASE, "scikit-learn")]
    for row in rows:
        assert (row.status, row.iterations, row.flop) == ("ok", 30, 30 * CASE.flop)
        assert row.first_seconds is not None and row.log_likelihood is not None
        assert -5 < row.log_likelihood < -2
    ours = rows[0]
    assert ours.start_share and ours.load_share and ours.iteration_ms and ours.ms
    assert 0 < ours.start_share + ours.load_share < 1
    assert "fit: from float32 in host memory" in " ".join(capsys.readouterr().out.split())


def test_rivals_that_are_not_installed_are_named(tmp_path, capsys):
    arguments = ["--case", "spherical:fp32:100:2:2", "--device", "cpu"]
    assert command(tmp_path, *arguments, "--rival", "flash-kmeans", "--rival", "faiss-gpu") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "flash-kmeans (not installed)" in printed or "flash-kmeans (needs a GPU)" in printed
    assert "faiss-gpu (needs a GPU)" in printed or "faiss-gpu (not installed)" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_default_is_quick(monkeypatch, tmp_path, capsys):
    seen = []
    monkeypatch.setattr(kernel_run, "run", lambda plan, store: (seen.append(plan), ([], []))[1])
    assert command(tmp_path, "--no-rivals") == 1
    assert seen[0].cases == quick("fp32")
    printed = capsys.readouterr().out
    assert "nothing was measured" in printed
    assert "The default cases are for a GPU; these are those of --quick." in printed


def test_ctrl_c_says_what_is_kept(monkeypatch, tmp_path, capsys):
    def stop(plan, store):
        store.append(blank(plan.contenders[-1], CASE, "iteration", CPU))
        raise KeyboardInterrupt

    monkeypatch.setattr(kernel_run, "run", stop)
    assert command(tmp_path, "--no-rivals", "--quick", "--device", "cpu") == 130
    assert "interrupted: 1 rows are in" in capsys.readouterr().err


def test_idle_threads_sleep():
    """OpenMP reads it when torch is loaded, so the command must not load torch before."""
    code = "import sys, gmm_ivf.eval.kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_default_table_is_ordered_by_importance():
    assert DEFAULT[0] == Case.parse("spherical:fp16:1M:1024:128")
    assert DEFAULT[: len(TARGETS)] == tuple(TARGETS)
    assert DEFAULT[-len(CURVES) :] == CURVES
    assert len(set(DEFAULT)) == len(DEFAULT)
    assert {case.data for case in DEFAULT if case.kind == "full"} == {"separated", "overlapping"}


def test_measured_rows_are_not_measured_again(tmp_path, clock):
    fake = Fake("fake", clock)
    first, _ = run(plan_of(fake), store_in(tmp_path), clock)
    again, left_out = run(plan_of(fake), store_in(tmp_path), clock)
    assert (fake.jobs, left_out) == (2, [])
    assert first == again
    more = (CASE, OTHER, Case("tied", "fp32", 400, 4, 3))
    run(plan_of(fake, cases=more), store_in(tmp_path), clock)
    assert fake.jobs == 3


@pytest.mark.parametrize(
    "environment", [{"commit": "def"}, {"commit": "abc-dirty"}, {"threads": 2}, {"gpu": "L4"}]
)
def test_rows_of_other_code_or_machines_count_for_nothing(tmp_path, clock, environment):
    fake = Fake("fake", clock)
    run(plan_of(fake), store_in(tmp_path, **environment), clock)
    run(plan_of(fake), store_in(tmp_path), clock)
    assert fake.jobs == 4
    assert len(read_rows(tmp_path / "results.jsonl")) == 4


@pytest.mark.parametrize("commit", ["abc-dirty", None])
def test_rows_of_unknown_code_are_measured_again(tmp_path, clock, commit):
    fake = Fake("fake", clock)
    for _ in range(2):
        run(plan_of(fake), store_in(tmp_path, commit=commit), clock)
    assert fake.jobs == 4


def test_each_case_has_its_share_of_the_time(tmp_path, clock):
    """Ours come first; a slow rival may cost the rest of its case, but not the next one."""
    own, slow, late = Fake("own", clock, own=True), Fake("slow", clock, takes=9), Fake("z", clock)
    rows, left_out = run(plan_of(own, slow, late, seconds=14), store_in(tmp_path), clock)
    assert [(row.case, row.contender) for row in rows] == [
        (CASE, "own"),
        (OTHER, "own"),
        (CASE, "slow"),
        (OTHER, "slow"),
    ]
    assert left_out == [Task(CASE, late, "iteration"), Task(OTHER, late, "iteration")]
    assert summary(left_out) == (
        "spherical:fp32:400:4:3: z iteration; diag:fp32:400:4:3: z iteration"
    )


def test_a_spent_budget_stops_before_anything_is_drawn(tmp_path, clock, monkeypatch):
    own = Fake("own", clock, own=True, takes=20)
    drawn = []
    monkeypatch.setattr(
        kernel_measure, "Problem", lambda *args: (drawn.append(args[0]), Problem(*args))[1]
    )
    rows, left_out = run(plan_of(own, seconds=10), store_in(tmp_path), clock)
    assert [row.case for row in rows] == drawn == [CASE]
    assert left_out == [Task(OTHER, own, "iteration")]
    assert len(read_rows(tmp_path / "results.jsonl")) == 1


def test_what_would_take_too_long_is_not_begun(tmp_path, clock):
    class Long(Fake):
        def seconds(self, case: Case) -> float:
            return 10.0

    long = Long("long", clock)
    _, left_out = run(plan_of(long), store_in(tmp_path), clock)
    assert (long.jobs, len(left_out)) == (0, 2)


def test_what_its_share_left_out_is_measured_when_time_is_left(tmp_path, clock):
    class Once(Fake):
        def suits(self, case: Case) -> bool:
            return case == CASE

    slow, late = Once("slow", clock, takes=6), Fake("z", clock)
    rows, left_out = run(plan_of(slow, late, seconds=10), store_in(tmp_path), clock)
    measured = [(row.case, row.contender) for row in rows]
    assert measured == [(CASE, "slow"), (OTHER, "z"), (CASE, "z")]
    assert left_out == []


def test_who_is_measured_on_what(clock):
    class Fits(Fake):
        def has_fit(self, device: torch.device) -> bool:
            return True

    hard, own, soft = Fits("hard", clock), Fits("own", clock, own=True), Fits("soft", clock)
    hard.hard = True
    plan = plan_of(hard, own, soft, cases=(CASE, OTHER, replace(CASE, data="overlapping")))

    def names(case: Case, own: bool) -> list[str]:
        return [f"{task.contender.name} {task.job}" for task in plan.tasks(case, own)]

    assert names(CASE, True) == ["own fit", "own iteration"]
    # Fits of others are of the first case only, and k-means stands beside spherical mixtures.
    assert names(CASE, False) == ["hard iteration", "soft iteration", "hard fit", "soft fit"]
    assert names(OTHER, False) == ["soft iteration"]
    assert names(plan.cases[2], False) == []
    assert names(CURVES[0], True) == ["own iteration"]


def test_the_first_of_ours_is_marked_as_cold(tmp_path, clock):
    own, other = Fake("own", clock, own=True), Fake("other", clock)
    rows, _ = run(plan_of(own, other), store_in(tmp_path), clock)
    assert [row.cold for row in rows] == [True, False, False, False]
    assert all(row.matmul_tflops for row in rows)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried\nto"),
            "out of memory (OutOfMemoryError",
        ),
        (MemoryError(), "out of host memory"),
        (KeyError("x"), "KeyError: 'x'"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_whatever_goes_wrong_is_a_row(tmp_path, clock, error, reason):
    class Broken(Fake):
        def iterations(self, problem: Problem) -> Iterations:
            raise error

    good = Fake("good", clock)
    rows, _ = run(plan_of(Broken("broken", clock), good), store_in(tmp_path), clock)
    assert [row.status for row in rows] == ["failed", "ok"] * 2
    assert rows[0].reason.startswith(reason)
    assert json.loads(rows[0].to_json())["ms"] is None


def test_samples_that_do_not_fit_are_a_row(tmp_path, clock, monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(kernel_measure, "Problem", refuse)
    rows, _ = run(plan_of(Fake("fake", clock)), store_in(tmp_path), clock)
    assert [row.reason for row in rows] == ["no samples (OutOfMemoryError: no room)"] * 2


def test_an_unsupported_case_is_a_row(tmp_path, clock):
    class Narrow(Fake):
        def obstacle(self, case: Case, device: torch.device) -> str | None:
            return "too wide" if case == OTHER else None

    rows, _ = run(plan_of(Narrow("narrow", clock)), store_in(tmp_path), clock)
    assert [(row.status, row.reason) for row in rows] == [("ok", ""), ("unsupported", "too wide")]


def test_a_fit_without_time_to_repeat_it_says_so(clock):
    class Fits(Fake):
        def fit(self, problem: Problem, iterations: int) -> dict:
            self.jobs += 1
            clock.now += 1
            return {"log_likelihood": -1.5}

    problem = Problem(CASE, CPU)
    once, often = Fits("once", clock), Fits("often", clock)
    row: Row = measure(once, problem, "fit", Budget(0.5, clock))
    assert (once.jobs, row.reason) == (1, "first fit, none after it for want of time")
    row = measure(often, problem, "fit", Budget(100, clock))
    assert (often.jobs, row.reason, row.log_likelihood) == (4, "", -1.5)


def test_lines_kept_are_shown_without_measuring(tmp_path, capsys, monkeypatch):
    made = tmp_path / "made"
    arguments = ["--device", "cpu", "--no-rivals", "--case", "diag:fp32:400:4:3"]
    assert kernels.main([*arguments, "--out", str(made)]) == 0
    monkeypatch.setattr(kernel_run, "run", lambda *_: pytest.fail("it measured"))
    shown = tmp_path / "shown"
    assert kernels.main(["--show", str(made / "results.jsonl"), "--out", str(shown)]) == 0
    first, second = ((folder / "table.txt").read_text() for folder in (made, shown))
    assert second.split("\n\n")[:2] == first.split("\n\n")[:2]
    assert (shown / "kernels.png").stat().st_size > 10_000
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        kernels.main(["--show", str(tmp_path / "none.jsonl")])
    assert stopped.value.code == 2
    assert "none.jsonl" in capsys.readouterr().err
