"""The parts of `eval.kernels`: cases, accuracy, clocks, rows, table and figure."""

import json
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from gmm_ivf.eval import kernel_chunked, kernel_measure, kernel_timing
from gmm_ivf.eval.kernel_cases import DATA, TARGETS, Case, Problem
from gmm_ivf.eval.kernel_contenders import (
    REG_COVAR,
    Chunked,
    Contender,
    Iterations,
    Torch,
    Triton,
    Truncated,
)
from gmm_ivf.eval.kernel_measure import measure
from gmm_ivf.eval.kernel_plots import draw, save, series
from gmm_ivf.eval.kernel_results import Row, Store, read_rows
from gmm_ivf.eval.kernel_table import to_text
from gmm_ivf.eval.kernel_timing import Budget, matmul_tflops, median_ms, peak, seconds_of
from gmm_ivf.kernels import reference
from gmm_ivf.kernels.components import m_step

CPU = torch.device("cpu")
KINDS = ("spherical", "diag", "tied", "full")
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def short_medians(monkeypatch):
    monkeypatch.setattr(kernel_timing, "_BENCH_SECONDS", 0.005)


def small(kind: str, mode: str = "fp32", data: str = "separated") -> Case:
    return Case(kind, mode, 300, 5, 4, data)


def row_of(case: Case, contender: str = "triton", **changes) -> Row:
    """A row as the H200 would write it, at 1 ms."""
    case_of = (case.kind, case.mode, case.n, case.k, case.d, case.data)
    blank = Row(*case_of, contender, "iteration", "cuda")
    environment = {"gpu": "NVIDIA H200", "commit": "abc", "packages": {"torch": "2.11"}}
    common = {"ms": 1.0, "flop": case.flop, "matmul_tflops": 787.0}
    return replace(blank, environment=environment, **(common | changes))


@pytest.mark.parametrize(
    ("text", "flop"),
    [
        ("spherical:fp16:1M:1024:128", 4 * 1e6 * 1024 * 128),
        ("tied:bf16:1m:1k:128", 4 * 1e6 * 1000 * 128),
        ("diag:tf32:200K:256:64", 8 * 2e5 * 256 * 64),
        ("full:fp16x3:200k:256:64", 2 * 2e5 * 256 * 64**2),
        ("full:fp16:200k:256:64:overlapping", 2 * 2e5 * 256 * 64**2),
    ],
)
def test_cases_and_their_flop(text, flop):
    case = Case.parse(text)
    assert case.flop == flop
    assert case.hard_flop == 2.0 * case.n * case.k * case.d
    assert Case.parse(str(case)) == case


def test_floor_is_the_flop_over_the_matmul_rate():
    row = row_of(Case.parse("spherical:fp16:1M:1024:128"))
    assert row.floor_ms == pytest.approx(0.666, abs=5e-4)
    assert row.share_of_floor == pytest.approx(0.666, abs=5e-4)
    assert row.tflops == pytest.approx(524.3, abs=0.1)
    slow = replace(row, ms=1.5)
    assert slow.share_of_floor == pytest.approx(0.444, abs=5e-4)
    none = replace(slow, ms=None)
    assert (none.tflops, none.share_of_floor) == (None, None)


def test_the_numbers_to_reach_for_full_are_shares_of_its_floor():
    case = Case.parse("full:fp16:200k:256:64")
    floor = case.flop / 787e9
    assert TARGETS[case].reach == pytest.approx(floor / 0.25, rel=5e-3)
    assert TARGETS[case].aim == pytest.approx(floor / 0.40, rel=5e-3)


@every_kind
def test_problems_are_the_same_twice_and_follow_their_parameters(kind):
    one, other = Problem(small(kind), CPU), Problem(small(kind), CPU)
    assert torch.equal(one.x, other.x)
    assert one.x.dtype == torch.float32
    wanted, _ = reference.e_step(one.x.double(), one.components)
    torch.testing.assert_close(one.exact, wanted[one.rows], rtol=0, atol=1e-10)
    assert -8 < float(wanted.mean()) < -2
    given = one.parameters()
    inverse = torch.linalg.inv(one.components.covariances) if kind in ("tied", "full") else None
    wanted_precisions = 1 / one.components.covariances if inverse is None else inverse
    torch.testing.assert_close(torch.from_numpy(given["precisions"]), wanted_precisions)


def test_overlapping_components_share_their_samples():
    largest = {}
    for data in DATA:
        problem = Problem(small("spherical", data=data), CPU)
        _, log_resp = reference.e_step(problem.x.double(), problem.components)
        largest[data] = float(log_resp.exp().amax(1).mean())
    assert largest["separated"] > 0.8
    assert largest["overlapping"] < 0.4


@pytest.mark.filterwarnings("ignore:EM did not converge")
@every_kind
def test_em_moves_away_from_parameters_nearby(kind):
    problem = Problem(small(kind), CPU)
    start = problem.near()
    moved = start["means_init"] - problem.parameters()["means"]
    assert 0.1 < float(np.abs(moved).mean()) < 0.4
    fits = [Torch().model(problem, n, **start).fit(problem.x) for n in (1, 10)]
    assert fits[1].lower_bound_ > fits[0].lower_bound_ + 0.05


@every_kind
@pytest.mark.parametrize("contender", [Torch(), Chunked("fp32")], ids=lambda c: c.name)
def test_an_iteration_is_that_of_the_reference(kind, contender):
    problem = Problem(small(kind), CPU)
    found = contender.iterations(problem).run(1)
    _, log_resp = reference.e_step(problem.x.double(), problem.components)
    wanted = reference.m_step(problem.x.double(), log_resp.exp(), kind, REG_COVAR)
    for name in ("weights", "means", "covariances"):
        torch.testing.assert_close(
            getattr(found, name), getattr(wanted, name), rtol=1e-4, atol=1e-5
        )


@every_kind
def test_accuracy_is_that_against_float64(kind):
    problem = Problem(small(kind), CPU)
    row = measure(Chunked("fp32"), problem, "iteration", Budget(10))
    wanted, _ = reference.e_step(problem.x.double(), problem.components)
    found = kernel_chunked.log_density(problem.x, problem.components)
    error = (found.double() - wanted)[problem.rows].abs()
    assert row.nats_max == pytest.approx(float(error.max()), rel=1e-3, abs=1e-9)
    assert row.nats_mean == pytest.approx(float(error.mean()), rel=1e-3, abs=1e-9)
    assert 0 < float(error.max()) < 1e-4


@every_kind
def test_chunked_torch_in_bf16_is_coarse_and_right(kind):
    problem = Problem(small(kind), CPU)
    x = problem.x.bfloat16()
    total = kernel_chunked.scatter(x)
    found = kernel_chunked.e_step(x, problem.components, total)
    wanted = reference.statistics(problem.x.double(), problem.components)
    torch.testing.assert_close(found.s0, wanted.s0, rtol=0.1, atol=1)
    one, other = (m_step(s, problem.components, REG_COVAR) for s in (found, wanted))
    torch.testing.assert_close(one.covariances, other.covariances, rtol=0.1, atol=0.05)


def test_chunks_do_not_change_the_sums(monkeypatch):
    problem = Problem(small("diag"), CPU)
    whole = kernel_chunked.e_step(problem.x, problem.components)
    monkeypatch.setitem(kernel_chunked._CHUNK_ELEMENTS, "cpu", 5 * 64)
    parts = kernel_chunked.e_step(problem.x, problem.components)
    torch.testing.assert_close(parts.s2, whole.s2, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(parts.log_likelihood, whole.log_likelihood, rtol=1e-6, atol=0)


def test_the_kernels_say_what_they_cannot_take():
    triton = Triton()
    assert triton.obstacle(small("spherical", "fp64"), CPU) == "the kernels have no fp64"
    wide = Case("spherical", "fp16", 10, 2, 5000)
    assert triton.obstacle(wide, CPU) == "the kernels take at most 4096 features"
    large = Case("spherical", "fp16", 100_000, 64, 64)
    assert "interpreter would take too long" in str(triton.obstacle(large, CPU))
    assert triton.obstacle(small("full"), CPU) is None


def test_the_kernels_are_measured_under_the_interpreter():
    knobs = pytest.importorskip("triton").knobs
    if not knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    row = measure(
        Triton(), Problem(Case("spherical", "fp16", 64, 4, 4), CPU), "iteration", Budget(9)
    )
    assert (row.status, row.reason, row.repeats) == ("ok", "", True)
    assert row.nats_max is not None and row.nats_max < 0.03


@pytest.mark.parametrize("kind", ["spherical", "tied"])
def test_truncated_em_is_a_mean_over_fits(kind, device, monkeypatch):
    monkeypatch.setattr(kernel_measure, "FIT_ITERATIONS", 3)
    monkeypatch.setattr(kernel_measure, "_MOST_FITS", 1)
    place = torch.device(device)
    problem = Problem(Case(kind, "fp16", 64, 4, 4), place)
    row = measure(Truncated(), problem, "iteration", Budget(9))
    assert (row.status, row.reason, row.repeats) == ("ok", "", True)
    assert row.ms and row.visited_share == 1.0 and row.exact_iterations == 3
    # So few components are all visited: that is exact EM.
    assert row.likelihood_loss == pytest.approx(0, abs=1e-5)


def test_fits_by_the_kernels_tell_their_phases(device, monkeypatch):
    monkeypatch.setattr(kernel_measure, "FIT_ITERATIONS", 2)
    problem = Problem(Case("spherical", "fp16", 64, 2, 4), torch.device(device))
    exact, cut = (measure(c, problem, "fit", Budget(0)) for c in (Triton(), Truncated()))
    for row in (exact, cut):
        assert row.reason == "first fit, none after it for want of time"
        assert row.start_share and row.load_share and row.iteration_ms and row.ms
        assert row.iteration_ms * 2 < row.ms * (1 - row.start_share - row.load_share)
    assert (exact.visited_share, cut.visited_share) == (None, 1.0)
    assert cut.log_likelihood == pytest.approx(exact.log_likelihood, abs=1e-5)


def test_truncation_is_for_many_components():
    cut = Truncated()
    many = Case("diag", "fp16", 1_000_000, 4096, 128, "overlapping")
    assert cut.suits(many) and not cut.suits(replace(many, k=1024))
    assert cut.obstacle(many, torch.device("cuda")) is None
    refused = cut.obstacle(replace(many, kind="full"), torch.device("cuda"))
    assert "got covariance_type='full' with 128 features in fp16" in str(refused)


def test_reduced_precision_of_chunked_torch_needs_a_gpu():
    assert Chunked("tf32").missing(CPU) == Chunked("bf16").missing(CPU) == "needs a GPU"
    assert Chunked("fp32").missing(CPU) is None


def test_a_package_that_cannot_be_imported_is_told_from_one_that_is_not_there(
    tmp_path, monkeypatch
):
    (tmp_path / "broken_rival.py").write_text("raise OSError('libcudart is not there')\n")
    monkeypatch.syspath_prepend(tmp_path)
    contender = Contender()
    contender.package = "broken_rival"
    assert contender.missing(CPU) == "cannot be imported (OSError: libcudart is not there)"
    contender.package = "no_such_rival"
    assert contender.missing(CPU) == "not installed"


def test_budget_and_its_parts():
    ticks = count()
    budget = Budget(10, clock=lambda: float(next(ticks)))
    assert budget.left() == 9
    part = budget.part(4)  # 8 left: 2 for it, from the next tick on
    assert part.left() == 1
    assert part.left() == 0
    assert budget.left() == 4


def test_clocks_on_a_cpu(monkeypatch):
    monkeypatch.setattr(kernel_timing, "_BENCH_SECONDS", 0.0)
    calls: list[int] = []
    assert seconds_of(lambda: calls.append(1), CPU) >= 0
    assert median_ms(lambda: calls.append(1), CPU) >= 0
    assert len(calls) == 4
    assert peak(lambda: calls.append(1), CPU) is None
    assert len(calls) == 5
    assert matmul_tflops("fp16", CPU) > 0


def test_matmul_precision_is_put_back():
    chosen = torch.get_float32_matmul_precision()
    with kernel_timing.float32_products("high"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == chosen


def test_an_iteration_by_difference(monkeypatch):
    times = {1: 0.5, 6: 1.75}
    seconds = []
    em = Iterations(lambda iterations: seconds.append(times[iterations]), 0)
    monkeypatch.setattr(kernel_measure, "wall_ms", lambda call, _: (call(), 1e3 * seconds.pop())[1])
    assert kernel_measure._difference(em, CPU) == pytest.approx(250)
    times[6] = 0.4
    with pytest.raises(RuntimeError, match="too short to measure"):
        kernel_measure._difference(em, CPU)


def test_rows_survive_the_file(tmp_path):
    row = row_of(small("diag"), nats_max=float("nan"), repeats=True, first_seconds=2.5)
    path = tmp_path / "results.jsonl"
    Store(path, {}).append(row)
    assert read_rows(path) == [replace(row, nats_max=None)]
    line = json.loads(path.read_text())
    assert line["ms"] == 1.0
    assert {"tflops", "floor_ms", "share_of_floor"} <= set(line)
    assert line["environment"]["gpu"] == "NVIDIA H200"


def test_a_line_that_was_cut_off_goes_and_a_wrong_one_is_named(tmp_path):
    path = tmp_path / "results.jsonl"
    environment = row_of(small("diag")).environment
    Store(path, environment).append(row_of(small("diag")))
    whole = path.read_text()
    path.write_text(whole + '{"kind": "di')
    assert len(Store(path, environment)) == 1
    assert path.read_text() == whole
    path.write_text(whole + '{"schema": 2, "kind": "diag"}\n')
    with pytest.raises(ValueError, match=r"line 2: kernel row lacks 'mode'.*choose another --out"):
        Store(path, environment)
    path.write_text("[]\n")
    with pytest.raises(ValueError, match="line 1: not a kernel row of schema 2"):
        read_rows(path)


def test_table_shows_times_marks_and_reasons():
    case = Case.parse("spherical:fp16:1M:1024:128")
    rows = [
        row_of(case, ms=1.2, extra_mb=70.0, nats_max=0.03, nats_mean=0.004),
        row_of(case, "flash-kmeans", ms=0.99, hard=True, flop=case.hard_flop),
        row_of(case, "torchgmm", ms=None, status="failed", reason="out of memory"),
        row_of(case, job="fit", ms=450.0, flop=30 * case.flop, start_share=0.2, load_share=0.3),
    ]
    text = to_text(rows, ["Not measured: fastkmeans (not installed)."])
    assert text.startswith("NVIDIA H200; torch 2.11; commit abc\n")
    assert "floor 0.666 ms an iteration at 787 TFLOP/s" in text
    cells = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("  ")}
    assert cells["flash-kmeans"][1:4] == ["(hard)", "0.99", "265"]
    assert cells["torchgmm:"] == ["torchgmm:", "out", "of", "memory"]
    assert "triton iteration: to reach 1.5 ms, aim 1: reached; to reach 64 MiB: missed by" in text
    assert "triton fit: to reach 0.5 s a fit: reached" in text
    assert "0.45  30.0%  20.0%" in text
    assert "Not measured: fastkmeans (not installed)." in text
    assert max(map(len, text.splitlines())) <= 118


def test_table_of_truncated_em_and_of_a_cold_start():
    case = Case.parse("spherical:fp16:1M:16384:128")
    cut = row_of(case, "triton-truncated", ms=3.95, likelihood_loss=1e-8)
    cut = replace(cut, visited_share=0.031, exact_iterations=1)
    text = to_text([cut, row_of(case, job="fit", first_seconds=5.8, cold=True)])
    assert "3.1% of the components visited, 1 of 30 iterations with all" in text
    assert "exact EM ends +1.0e-08 nats a sample higher" in text
    assert "triton-truncated iteration: to reach 14 ms, aim 8: aim met" in text
    assert "triton: the first of this process took 5.80 s" in text
    assert "truncation=0.0001" in text


def test_numbers_to_reach_are_for_their_machine_only():
    row = row_of(Case.parse("spherical:fp16:1M:1024:128"))
    assert "to reach" in to_text([row])
    assert "to reach" not in to_text([replace(row, environment={"gpu": "NVIDIA L4"})])
    assert "triton: a second time gave other bits" in to_text([replace(row, repeats=False)])


def curve_rows() -> list[Row]:
    sizes = [(1000, 16, 8), (4000, 16, 8), (1000, 64, 8), (1000, 16, 32), (4000, 64, 32)]
    cases = [Case("spherical", "fp16", *size) for size in sizes]
    rows = [row_of(case, ms=case.n / 1e3) for case in cases]
    rows += [row_of(case, "chunked-fp32", ms=case.k / 2) for case in cases[:3]]
    overlapping = Case("spherical", "fp16", 1000, 16, 8, "overlapping")
    return [*rows, *(row_of(c, ms=99.0) for c in (overlapping, Case("full", "fp16", 1000, 16, 8)))]


def test_curves_fix_the_other_two_sizes():
    rows = curve_rows()[:-2]
    base = (1000, 16, 8)
    assert series(rows, "n", base) == {
        "triton": [(1000, 1.0), (4000, 4.0)],
        "chunked-fp32": [(1000, 8.0), (4000, 8.0)],
    }
    assert series(rows, "k", base)["chunked-fp32"] == [(16, 8.0), (64, 32.0)]
    assert series(rows, "d", base)["triton"] == [(8, 1.0), (32, 1.0)]


def test_figure_from_lines(tmp_path):
    path = tmp_path / "results.jsonl"
    store = Store(path, {})
    for row in curve_rows():
        store.append(row)
    rows = read_rows(path)
    figure = draw(rows)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["K = 16, D = 8", "N = 1,000, D = 8", "N = 1,000, K = 16"]
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 2]
    first = [path.read_bytes() for path in save(rows, tmp_path)]
    assert [path.name for path in save(rows, tmp_path)] == ["kernels.png", "kernels.svg"]
    assert first[1] == (tmp_path / "kernels.svg").read_bytes()


def test_no_figure_without_times():
    with pytest.raises(ValueError, match="rows must hold at least one time"):
        draw([row_of(small("diag"), ms=None)])
