"""Accuracy of the precision modes against float64, and the command that measures it."""

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from gmm_ivf.comparison import Measured, Step, evaluate, measure
from gmm_ivf.datasets.synthetic import GENERATORS, Sample
from gmm_ivf.eval import accuracy, precision
from gmm_ivf.eval.accuracy import Problem, Result, components_of, run_problem
from gmm_ivf.eval.accuracy_table import to_text
from gmm_ivf.kernels import dispatch, reference
from gmm_ivf.kernels.components import Components
from gmm_ivf.kernels.dispatch import ACCURACY, Accuracy, choose_precision

MODES = ("fp64", "fp32", "fp16x3", "fp16", "tf32", "bf16")
HALF = ("fp16", "tf32", "bf16")
SETS = tuple(GENERATORS)
SIZES = [(2048, 32, 16), (2048, 64, 256), (2048, 128, 16), (1024, 960, 16), (8192, 32, 1024)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cache
def measured(problem: Problem, modes: tuple[str, ...] = MODES) -> dict[str, Result]:
    """Results of the torch backend by mode; several tests look at the same ones."""
    return {result.mode: result for result in run_problem(problem, modes, "torch", "cpu", {})}


def tighter(n: int, d: int, n_components: int, *, shift: float, seed: int) -> Sample:
    """As `tight`, with a third of its standard deviation."""
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((n_components, d))
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    labels = rng.integers(n_components, size=n)
    x = means[labels] + 0.0065 * rng.standard_normal((n, d))
    return Sample((x + shift).astype(np.float32), labels, means + shift, 0.0065**2)


def problems(kind: str = "spherical") -> list[Problem]:
    return [
        Problem(name, shift, n, d, k, kind)
        for n, d, k in SIZES
        for name in SETS
        for shift in ((0.0, 1000.0) if n * k < 1e6 else (1000.0,))
    ]


def name_of(problem: Problem) -> str:
    return f"{problem.dataset}+{problem.shift:g}-D{problem.d}-K{problem.k}"


every_problem = pytest.mark.parametrize("problem", problems(), ids=name_of)


@every_problem
def test_limits_of_every_mode(problem):
    for mode, result in measured(problem).items():
        assert result.verdict == "ok", f"{mode}: {result.misses} {result.measured}"
    exact = measured(problem)["fp64"].measured
    assert exact == Measured(0, 0, 0, 1, 0, 0, 0)


@every_problem
def test_expected_errors_predict_the_measured_ones(problem):
    """What "auto" goes by: right within a factor of four, and never too low by three."""
    for mode, result in measured(problem).items():
        if mode != "fp64":
            assert result.measured is not None
            ratio = result.expected_nats / result.measured.nats
            assert 1 / 3 < ratio < 4, f"{mode}: {ratio}"


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(("n", "d", "kind"), [(2048, 32, "spherical"), (1024, 960, "diag")])
def test_an_offset_costs_nothing(name, n, d, kind):
    """Such samples lie on a coarse grid: rounded with a bias, 960 squares lose 0.02 nats."""
    near, far = (measured(Problem(name, shift, n, d, 16, kind)) for shift in (0.0, 1000.0))
    for mode in MODES[1:]:
        one, other = near[mode].measured, far[mode].measured
        assert one is not None and other is not None
        assert other.nats < 1.3 * one.nats


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kind", ["diag", "tied", "full"])
def test_limits_of_other_covariances(kind, name):
    """Half modes of full round nothing in the torch backend, and are left to the kernels."""
    modes = MODES[:3] if kind == "full" else MODES
    for shift in (0.0, 1000.0):
        results = measured(Problem(name, shift, 2048, 32, 16, kind), modes)
        assert [result.verdict for result in results.values()] == ["ok"] * len(modes)


def test_auto_notices_where_half_precision_does_not_serve(monkeypatch):
    monkeypatch.setitem(GENERATORS, "tighter", tighter)
    results = measured(Problem("tighter", 0.0, 2048, 32, 16))
    half, triple = results["fp16"], results["fp16x3"]
    assert half.measured is not None and triple.measured is not None
    assert half.measured.nats > ACCURACY["fp16"].nats
    assert (half.misses, half.verdict, half.trusted) == (("nats",), "avoided", False)
    assert half.auto_half == "fp16x3"
    assert triple.measured.nats < 2e-3


def test_auto_notices_what_the_kernels_cannot_do():
    """diag multiplies squares: rounded to fp16, those of the tight set cost 0.06 nats."""
    for d in (32, 128, 960):
        _, mixture = Problem("tight", 0.0, 256, d, 16, "diag").build("cpu")
        assert choose_precision(("fp16", "fp16x3"), components_of(mixture)) == "fp16x3"
        for name in ("overlapping", "clustered"):
            _, mixture = Problem(name, 0.0, 256, d, 16, "diag").build("cpu")
            assert choose_precision(("fp16", "fp16x3"), components_of(mixture)) == "fp16"


def test_auto_takes_half_precision_on_the_sets_that_it_serves():
    for problem in problems():
        assert measured(problem)["fp16"].auto_half == "fp16"
        assert measured(problem)["fp16"].auto == "fp32"


@pytest.mark.parametrize("kind", ["spherical", "diag", "tied", "full"])
def test_the_float64_side_is_right(kind):
    """Against the naive formulas, which share none with the backend."""
    problem = Problem("clustered", 1000.0, 300, 8, 4, kind)
    x, mixture = problem.build("cpu")
    found = evaluate(mixture, x, "fp64", "torch")
    components = Components.from_covariances(
        kind,
        torch.tensor(mixture.weights_),
        torch.tensor(mixture.means_),
        torch.tensor(mixture.covariances_),
    )
    samples = torch.tensor(x, dtype=torch.float64)
    log_density, log_resp = reference.e_step(samples, components)
    np.testing.assert_allclose(found.log_density, log_density, rtol=0, atol=1e-8)
    np.testing.assert_array_equal(found.ids[:, 0], log_resp.argmax(1))
    wanted = reference.m_step(samples, log_resp.exp(), kind, 1e-6)
    assert found.step is not None
    np.testing.assert_allclose(found.step.weights, wanted.weights, rtol=1e-9)
    np.testing.assert_allclose(found.step.means, wanted.means, rtol=1e-12)
    np.testing.assert_allclose(found.step.covariances, wanted.covariances, atol=1e-9)


def test_each_measure_sees_its_own_error():
    problem = Problem("clustered", 0.0, 400, 4, 8)
    x, mixture = problem.build("cpu")
    right = evaluate(mixture, x, "fp64", "torch")
    assert right.step is not None

    def misses(step: Step | None = right.step, **changes) -> tuple[str, ...]:
        wrong = replace(right, step=step, **changes)
        return measure(wrong, right, mixture.center_, tied=False).misses(ACCURACY["fp32"])

    ids = right.ids.copy()
    ids[0] = ids[0, ::-1]
    assert misses() == ()
    assert misses(log_density=right.log_density + 0.002) == ("nats",)
    assert misses(ids=ids) == ("agreement",)
    for name in ("weights", "means", "covariances"):
        changed = replace(right.step, **{name: getattr(right.step, name) * 1.001})
        assert misses(step=changed) == (name,)
    assert misses(step=None) == ("weights", "means", "covariances")


def test_means_are_judged_about_the_centre():
    """An offset of 1e6 would hide an error of a standard deviation."""
    x, mixture = Problem("clustered", 1e6, 400, 4, 8).build("cpu")
    right = evaluate(mixture, x, "fp64", "torch")
    assert right.step is not None
    moved = replace(right, step=replace(right.step, means=right.step.means + 0.7))
    assert measure(moved, right, mixture.center_, tied=False).means > 0.3


def test_components_of_little_weight_are_not_judged():
    x, mixture = Problem("clustered", 0.0, 400, 4, 8).build("cpu")
    right = evaluate(mixture, x, "fp64", "torch")
    assert right.step is not None
    weights = right.step.weights.copy()
    weights[3] = 1e-3
    step = replace(right.step, weights=weights)
    means = right.step.means.copy()
    means[3] += 10
    light = replace(right, step=step)
    wrong = replace(right, step=replace(step, means=means))
    assert measure(wrong, light, mixture.center_, tied=False).means == 0


@pytest.fixture
def no_kernels(monkeypatch):
    """Triton's interpreter off, as for users."""
    monkeypatch.setattr(pytest.importorskip("triton").knobs.runtime, "interpret", False)


def test_a_mode_that_is_refused_is_a_result(no_kernels):
    problem = Problem("clustered", 0.0, 256, 8, 4)
    (refused,) = run_problem(problem, ("fp16",), "triton", "cpu", {})
    assert (refused.verdict, refused.auto, refused.strain) == ("refused", "none", 0)
    assert refused.refusal.startswith('backend="triton"')
    row = json.loads(refused.to_json())
    assert (row["nats"], row["verdict"], row["misses"]) == (None, "refused", [])
    text = to_text([refused])
    assert "refused: clustered" in text
    assert 'fp16 refused: backend="triton"' in text


def test_lines_hold_problem_measures_limits_and_environment():
    result = measured(Problem("tight", 1000.0, 2048, 32, 16))["bf16"]
    row = json.loads(replace(result, environment={"commit": "abc"}).to_json())
    assert result.measured is not None
    wanted = {
        "dataset": "tight",
        "shift": 1000.0,
        "mode": "bf16",
        "backend": "torch",
        "nats": result.measured.nats,
        "limits": {"nats": 0.2, "agreement": 0.995, "parameters": 0.01},
        "misses": [],
        "verdict": "ok",
        "environment": {"commit": "abc"},
    }
    assert {name: row[name] for name in wanted} == wanted


def test_table_shows_the_worst_set_and_what_auto_took():
    results = [
        measured(Problem(name, shift, 2048, 32, 16))[mode]
        for name in SETS
        for shift in (0.0, 1000.0)
        for mode in ("fp32", "fp16")
    ]
    worst = measured(Problem("tight", 1000.0, 2048, 32, 16))["fp16"].measured
    assert worst is not None
    bad = replace(results[-1], measured=replace(worst, means=math.nan, agreement=0.5))
    text = to_text([*results[:-1], bad])
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("fp")}
    assert f"{worst.nats:.1e}" in rows["fp16"]
    assert "50.000%" in rows["fp16"]
    assert rows["fp16"].endswith("missed: tight+1000 (agreement, means)")
    assert rows["fp32"].endswith("ok")
    assert 'precision="auto" took here: fp32 everywhere' in text
    assert "of fp16 and fp16x3 it takes: fp16 everywhere" in text


def command(tmp_path, *more: str) -> int:
    """A run of a second."""
    common = ["--threads", "1", "--n", "256", "--d", "8", "--k", "4", "--set", "clustered"]
    return precision.main([*common, "--out", str(tmp_path), *more])


def test_command_writes_lines_and_table(tmp_path, capsys):
    assert command(tmp_path, "--mode", "fp32", "--mode", "fp16") == 0
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["mode"], row["shift"]) for row in rows] == [
        ("fp32", 0.0),
        ("fp16", 0.0),
        ("fp32", 1000.0),
        ("fp16", 1000.0),
    ]
    assert rows[0]["environment"]["threads"] == 1
    printed = capsys.readouterr().out
    assert (tmp_path / "table.txt").read_text() in printed
    assert "spherical, torch on cpu, 256 samples" in printed


def test_command_explains_the_worst_result(tmp_path, capsys):
    assert command(tmp_path, "--shift", "0", "--mode", "bf16", "--diagnose") == 0
    printed = capsys.readouterr().out
    assert "clustered, shift 0, D=8, K=4, spherical. The parameters are those" in printed
    assert "bf16 (torch on cpu) against fp64, 256 samples, 4 components" in printed


def test_command_fails_when_a_mode_misses_its_limits(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(dispatch.ACCURACY, "bf16", Accuracy(0.2, 0.995, 1e-9))
    assert command(tmp_path, "--shift", "0") == 1
    assert "missed: clustered (" in capsys.readouterr().out


def test_interrupted_command_keeps_what_it_has(tmp_path, monkeypatch):
    def stop(*args):
        yield from run_problem(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(accuracy, "run_problem", stop)
    assert command(tmp_path, "--mode", "fp32") == 130
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n", "10", "--k", "4"], "--n 10 is too few for --k 4: give at least 8 samples"),
        (["--mode", "fp8"], "argument --mode: invalid choice: 'fp8'"),
        (["--d", "0"], "argument --d: wanted a whole number of at least 1, got '0'"),
        (["--covariance-type", "full"], "full with --d 960 and --k 256 takes 1.9 GB"),
        pytest.param(
            ["--device", "cpu", "--backend", "triton"],
            "--backend triton cannot run its kernels: they need a CUDA device",
            id="triton-on-cpu",
        ),
    ],
)
def test_bad_arguments_end_in_one_sentence(arguments, message, capsys, no_kernels):
    with pytest.raises(SystemExit) as stopped:
        precision.main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["spherical", "diag", "tied"])
@every_problem
def test_limits_of_the_kernels(problem, kind):
    """Beyond them only where "auto" knows it."""
    modes = ("fp32", "fp16x3", *HALF)
    problem = replace(problem, covariance_type=kind)
    for result in run_problem(problem, modes, "triton", "cuda", {}):
        assert result.backend == "triton"
        assert result.verdict in ("ok", "avoided"), f"{result.mode}: {result.measured}"
        if result.mode in ("fp32", "fp16x3"):
            assert result.verdict == "ok", f"{result.mode}: {result.measured}"
