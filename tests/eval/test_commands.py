"""What the command lines share: how they run, and files that one run writes."""

import argparse
import subprocess
import sys

import pytest

from gmm_ivf.eval.commands import Parser, UserError, run_command, seconds, share
from gmm_ivf.eval.jsonl import sole_writer


def run(prepare=lambda args: args.n, execute=lambda n: n, argv=("--n", "3")) -> int:
    parser = Parser(prog="tool")
    parser.add_argument("--n", type=int)
    return run_command(parser, argv, prepare, execute, lambda n: f"kept {n}")


def raising(error):
    def call(_):
        raise error

    return call


def test_status_is_that_of_execute():
    assert run() == 3


@pytest.mark.parametrize("error", [ValueError("no"), OSError("no"), ImportError("no")])
def test_errors_of_preparing_are_one_sentence(error, capsys):
    with pytest.raises(SystemExit) as stop:
        run(prepare=raising(error))
    assert stop.value.code == 2
    assert capsys.readouterr().err == "tool: error: no\n"


def test_only_user_errors_of_executing_are(capsys):
    with pytest.raises(SystemExit) as stop:
        run(execute=raising(UserError("busy")))
    assert stop.value.code == 2
    assert "busy" in capsys.readouterr().err
    with pytest.raises(ValueError, match="bug"):
        run(execute=raising(ValueError("bug")))


@pytest.mark.parametrize(
    ("where", "kept"), [("prepare", "kept None"), ("execute", "kept 3")], ids=str
)
def test_ctrl_c_says_what_is_kept(where, kept, capsys):
    assert run(**{where: raising(KeyboardInterrupt)}) == 130
    assert capsys.readouterr().err == f"interrupted: {kept}\n"


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [(seconds, "2.5", ("0", "-1", "inf", "x")), (share, "0.97", ("0", "1.5", "nan", "x"))],
)
def test_numbers_are_checked(parse, good, bad):
    assert parse(good) == float(good)
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"got {text!r}"):
            parse(text)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such locks")
def test_a_file_has_one_writer_at_a_time(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from gmm_ivf.eval.jsonl import sole_writer\n"
        "with sole_writer(Path(sys.argv[1])): print('writing')\n"
    )

    def other() -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", code, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with sole_writer(path):
        refused = other()
    assert refused.returncode != 0
    assert "another run is writing to" in refused.stderr
    assert other().stdout == "writing\n"


@pytest.mark.parametrize("name", ["recall", "precision", "kernels", "pays"])
def test_commands_do_not_load_torch_or_faiss_before_threads_are_set(name):
    """OpenMP reads its settings once, when they are loaded."""
    code = (
        f"import sys, gmm_ivf.eval.{name}; "
        "sys.exit('torch' in sys.modules or 'faiss' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
