"""The command line, end to end on small files."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest

from gmm_ivf.eval import recall, sweep
from gmm_ivf.eval.environment import set_threads, usable_cores
from gmm_ivf.eval.jsonl import sole_writer
from gmm_ivf.eval.method_spec import parse_method
from gmm_ivf.eval.results import Store, read_points

ROOT = Path(__file__).resolve().parents[2]
ARTEFACTS = {
    "recall.png",
    "recall.svg",
    "report.html",
    "results.jsonl",
    "summary.jsonl",
    "table.txt",
}


@pytest.fixture
def vectors(tmp_path, tiny) -> str:
    """A user's own vectors as a .npy file, without queries or ground truth."""
    path = tmp_path / "mine.npy"
    np.save(path, tiny.base)
    return str(path)


@pytest.fixture(autouse=True)
def restore_threads():
    import faiss
    import torch

    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    yield
    torch.set_num_threads(before[0])
    faiss.omp_set_num_threads(before[1])


def run_main(*arguments) -> int:
    return recall.main([str(argument) for argument in arguments])


def test_all_methods_on_own_vectors_end_to_end(vectors, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_main("--dataset", vectors, "--nlist", 8, "--threads", 1, "--out", out) == 0
    assert {path.name for path in out.iterdir()} == ARTEFACTS
    points = read_points(out / "results.jsonl")
    methods = ["kmeans", "gmm", "gmm-soft", "gmm-soft:tau=1/K", "gmm-cells"]
    assert list(dict.fromkeys(point.key.method for point in points)) == methods
    for method in methods:
        own = [point for point in points if point.key.method == method]
        assert own[-1].recall >= 0.995
        assert {point.coarse for point in own} == {8.0}
    environment = points[0].environment
    assert environment["threads"] == 1
    assert environment["packages"]["torch"]
    assert environment["faiss_options"]
    table = (out / "table.txt").read_text()
    assert table in capsys.readouterr().out
    assert "gmm-soft:tau=1/K" in table
    assert "http" not in (out / "report.html").read_text()


def test_a_second_run_measures_nothing_and_writes_the_same_table(vectors, tmp_path, monkeypatch):
    command = ("--dataset", vectors, "--nlist", 8, "--method", "kmeans", "--out", tmp_path / "out")
    assert run_main(*command) == 0
    rows = (tmp_path / "out" / "results.jsonl").read_bytes()
    table = (tmp_path / "out" / "table.txt").read_bytes()
    monkeypatch.setattr(sweep, "build", lambda *_: pytest.fail("built again"))
    assert run_main(*command) == 0
    assert (tmp_path / "out" / "results.jsonl").read_bytes() == rows
    assert (tmp_path / "out" / "table.txt").read_bytes() == table


def test_metric_of_own_vectors_is_that_asked_for(vectors, tmp_path):
    out = tmp_path / "out"
    grid = ("--nlist", 8, "--nprobe", 8, "--method", "kmeans", "--seed", 0, "--queries", 20)
    assert run_main("--dataset", vectors, "--metric", "ip", "--out", out, *grid) == 0
    (point,) = read_points(out / "results.jsonl")
    assert (point.metric, point.queries, point.recall) == ("ip", 20, 1.0)


def test_a_second_run_into_the_same_folder_is_refused_while_one_writes(vectors, tmp_path, capsys):
    arguments = ["--dataset", vectors, "--nlist", "8", "--out", str(tmp_path)]
    with sole_writer(tmp_path / "results.jsonl"):
        assert_refused(arguments, ["another run is writing to", "another --out"], capsys)


def test_a_budget_that_leaves_nothing_is_no_success(vectors, tmp_path, capsys):
    arguments = ("--dataset", vectors, "--nlist", 8, "--seed", 0, "--method", "kmeans")
    assert run_main(*arguments, "--budget", 1e-9, "--out", tmp_path) == 1
    assert "left out, or cut, for want of time (--budget): kmeans" in capsys.readouterr().err


def test_methods_of_the_script_for_a_million_vectors_are_known():
    script = (ROOT / "scripts" / "recall_1m.sh").read_text()
    methods = re.findall(r"--method (\S+)", script)
    assert len(methods) > 15
    for method in methods:
        parse_method(method)


def test_several_nlists_seeds_and_explicit_nprobes(vectors, tmp_path):
    out = tmp_path / "out"
    grid = ("--nlist", 4, "--nlist", 8, "--seeds", 2, "--nprobe", 1, 3, "--method", "kmeans")
    assert run_main("--dataset", vectors, "--k", 3, "--out", out, *grid) == 0
    keys = [point.key for point in read_points(out / "results.jsonl")]
    got = [(key.nlist, key.seed, key.nprobe) for key in keys]
    assert got == [(n, s, p) for n in (4, 8) for s in (0, 1) for p in (1, 3)]
    assert {key.k for key in keys} == {3}


def test_quick_and_limit_take_part_of_the_data(vectors, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("--dataset", vectors, "--quick", "--limit", 500, "--method", "kmeans")
    assert run_main(*arguments) == 0
    folder = tmp_path / "results" / "recall-mine-quick-first500"
    (first, *_) = read_points(folder / "results.jsonl")
    assert first.n == 500
    assert first.key.nlist == recall.default_nlist(500) == 16


@pytest.mark.parametrize(
    ("n", "nlist"), [(1, 1), (2, 1), (1000, 32), (51_672, 256), (200_000, 512), (1_000_000, 1024)]
)
def test_default_nlist_is_near_the_square_root(n, nlist):
    assert recall.default_nlist(n) == nlist


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset", "nothing-such"], ["sift-mini", "sift1m", "'nothing-such'"]),
        (["--method", "kmeanz"], ["unknown method 'kmeanz'", "kmeans, gmm, gmm-soft"]),
        (["--method", "gmm:tau=1"], ["no such option"]),
        (["--nlist", "0"], ["--nlist", "at least 1", "'0'"]),
        (["--k", "ten"], ["--k", "'ten'"]),
        (["--seed", "-1"], ["--seed", "at least 0"]),
        (["--seed", "1", "--seeds", "2"], ["--seed or --seeds"]),
        (["--device", "tpu"], ["--device", "auto"]),
        (["--metric", "dot"], ["--metric", "cosine"]),
        (["--metric", "ip"], ["metric 'ip' contradicts sift-mini"]),
        (["--budget", "0"], ["--budget", "above 0"]),
        (["--stop-recall", "2"], ["--stop-recall", "at most 1"]),
        (["--bogus"], ["--bogus"]),
    ],
    ids=lambda value: " ".join(value[:2]) if value[0].startswith("--") else "",
)
def test_bad_arguments_give_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    assert_refused([*arguments, "--out", str(tmp_path)], words, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nlist", "5000"], ["nlist 5000", "1080 vectors"]),
        (["--k", "2000"], ["--k 2000", "1080 vectors"]),
        (["--limit", "5000"], ["limit", "5000"]),
        (["--method", "kmeans:nlist=5000"], ["nlist 5000", "1080 vectors"]),
        (["--nlist", "50", "--train-limit", "40"], ["nlist 50", "40 training rows"]),
    ],
)
def test_arguments_that_do_not_fit_the_data(arguments, words, vectors, tmp_path, capsys):
    assert_refused(["--dataset", vectors, "--out", str(tmp_path / "o"), *arguments], words, capsys)


def test_data_that_a_method_refuses_end_with_one_sentence(tmp_path, capsys):
    rows = np.random.default_rng(0).normal(size=(600, 4)).astype(np.float32)
    rows[5] = 0
    with h5py.File(tmp_path / "zero.hdf5", "w") as file:
        file["train"], file["test"] = rows, rows[100:120]
        file.attrs["distance"] = "ip"
    arguments = ["--dataset", str(tmp_path / "zero.hdf5"), "--nlist", "4", "--method", "gmm"]
    words = ["gmm, nlist 4, seed 0 cannot be built", "row 5 is zero"]
    assert_refused([*arguments, "--out", str(tmp_path / "out")], words, capsys)


def test_out_that_is_a_file_is_refused(vectors, capsys):
    assert_refused(["--dataset", vectors, "--out", vectors], ["--out", "mine.npy"], capsys)


def test_library_warnings_become_one_line_notes(vectors, tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        arguments = ("--limit", 100, "--nlist", 8, "--method", "gmm", "--out", tmp_path / "out")
        assert run_main("--dataset", vectors, "--seed", 0, *arguments) == 0
    errors = capsys.readouterr().err
    assert "note: training 8 lists on 100 rows" in errors
    assert "UserWarning" not in errors


def test_device_cuda_without_one_is_refused(vectors, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert_refused(["--dataset", vectors, "--device", "cuda"], ["--device cuda"], capsys)


def test_missing_faiss_is_one_sentence(vectors, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert_refused(["--dataset", vectors], ["faiss is not installed", "faiss-cpu"], capsys)


def test_a_results_file_of_something_else_is_refused(vectors, tmp_path, capsys):
    (tmp_path / "results.jsonl").write_text('{"schema": 99}\n')
    arguments = ["--dataset", vectors, "--out", str(tmp_path)]
    assert_refused(arguments, ["results.jsonl, line 1", "another --out"], capsys)


def assert_refused(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        recall.main(arguments)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines


def test_threads_are_set_for_torch_and_faiss_together():
    import faiss
    import torch

    for threads in (1, usable_cores()):
        set_threads(threads)
        assert (torch.get_num_threads(), faiss.omp_get_max_threads()) == (threads, threads)


def test_points_of_another_commit_are_mentioned(tmp_path, point, capsys):
    store = Store(tmp_path / "results.jsonl")
    store.append(point(0.5, 100))
    recall._warn_of_other_commits(store, {"commit": "abc"})
    assert capsys.readouterr().err == ""
    recall._warn_of_other_commits(store, {"commit": "def"})
    assert "commit abc" in capsys.readouterr().err


def start(arguments: list[str]) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "eval.recall", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def sigint_reaches_children():
    """A shell that starts the tests in the background makes all children ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
@pytest.mark.usefixtures("sigint_reaches_children")
def test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on(tmp_path, clustered):
    # Exhaustive probing of 12,000 vectors by 1,000 held-out queries: a second or more of points.
    np.save(tmp_path / "many.npy", clustered(12_000, 1, 48).base)
    arguments = ["--dataset", str(tmp_path / "many.npy"), "--method", "kmeans", "--seed", "0"]
    arguments += ["--nlist", "64", "--threads", "1", "--out", str(tmp_path / "out")]
    arguments += ["--nprobe", *map(str, range(1, 65, 2))]
    rows = tmp_path / "out" / "results.jsonl"
    process = start(arguments)
    try:
        deadline = time.monotonic() + 60
        while not (rows.exists() and rows.read_text().count("\n") >= 2):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "go on" in errors
    assert "--nlist 64" in errors
    kept = rows.read_text()
    assert kept.endswith("\n")
    assert 2 <= kept.count("\n") < 32
    process = start(arguments)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"{kept.count(chr(10))} of them found" in errors
    assert rows.read_text().startswith(kept)
    assert len([json.loads(line) for line in rows.read_text().splitlines()]) == 32
