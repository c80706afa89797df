"""`eval` where triton is not installed: the CPU builds of torch bring none."""

import subprocess
import sys
from pathlib import Path

import pytest

from gmm_ivf.eval.kernel_results import read_rows

ROOT = Path(__file__).resolve().parents[2]
# An entry of None makes every import of triton fail as if it were not there.
BLOCKED = "import sys; sys.modules['triton'] = None\n"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )


def command(folder: Path, *arguments: str) -> str:
    """What ``eval.kernels`` prints, as one line."""
    code = "from gmm_ivf.eval.kernels import main\nsys.exit(main(sys.argv[1:]))"
    done = run(code, "--threads", "1", "--out", str(folder), *arguments)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_torch_is_measured_and_triton_is_said_to_be_missing(tmp_path):
    case = "spherical:fp32:400:4:3"
    printed = command(tmp_path, "--case", case, "--no-rivals", "--device", "cpu")
    assert "Not measured: triton (triton is not installed)" in printed
    rows = read_rows(tmp_path / "results.jsonl")
    assert {row.contender for row in rows} == {"torch"}
    assert {(row.job, row.status) for row in rows} == {("iteration", "ok"), ("fit", "ok")}


def test_lines_of_an_earlier_run_are_shown(tmp_path):
    lines = ROOT / "benchmarks" / "em_kernels.jsonl"
    if not lines.is_file():
        pytest.skip("needs the lines of a checkout")
    printed = command(tmp_path, "--show", str(lines))
    assert "triton" in printed
    assert (tmp_path / "kernels.svg").is_file()


def test_no_module_of_eval_needs_triton():
    names = [path.stem for path in sorted((ROOT / "eval").glob("*.py"))]
    imports = "\n".join(f"import gmm_ivf.eval.{name}" for name in names if name != "__init__")
    done = run(imports)
    assert done.returncode == 0, done.stderr
