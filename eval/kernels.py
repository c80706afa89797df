"""Command line: time, memory and accuracy of EM on the kernels, and of what else is installed.

Run ``python -m eval.kernels`` in a checkout, ``python -m gmm_ivf.eval.kernels`` when installed.
"""

# torch is imported late, after `set_threads`: it reads its settings of threads once.
import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gmm_ivf.eval.commands import Parser, positive, program, run_command, seconds
from gmm_ivf.eval.environment import resolve_device, set_threads, stamp, usable_cores
from gmm_ivf.eval.jsonl import sole_writer

if TYPE_CHECKING:
    from gmm_ivf.eval.kernel_contenders import Contender
    from gmm_ivf.eval.kernel_results import Row, Store
    from gmm_ivf.eval.kernel_run import Plan, Task

RIVALS = (
    "flash-kmeans",
    "chunked-bf16",
    "chunked-tf32",
    "chunked-fp32",
    "fastkmeans",
    "torchgmm",
    "faiss-gpu",
    "faiss-cpu",
    "scikit-learn",
)
_BUDGET_SECONDS = 200.0
_NOTHING = 1
_PACKAGES = ("triton", "flash-kmeans", "fastkmeans", "torchgmm")
_EPILOG = """\
cases: KIND:MODE:N:K:D, such as spherical:fp16:1M:1024:128, or KIND:MODE:N:K:D:overlapping
  KIND spherical, diag, tied or full; MODE the precision of our kernels; N, K, D may end in k or M;
  samples of an overlapping case have many likely components each, those of others few
Our kernels come first, with an iteration and a fit from host memory for each case; then the torch
backend and the rivals, whose fits are of the first case only. Other people's packages run in a
process of their own, which is ended when it does not answer.
Writes results.jsonl (each line at once), kernels.png, kernels.svg and table.txt into --out. What is
too large, too slow or not installed is said in the table. A run that was stopped goes on where it
was when the same command is given again in the same checkout without changes. The environment
variable GIT_COMMIT names the commit in the lines, for copies of a checkout."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; by default those of the process.

    Returns
    -------
    int
        0, 1 when nothing could be measured, 130 after Ctrl-C. Bad arguments exit with 2.
    """
    return run_command(_parser(), argv, _prepare, _execute, _kept)


@dataclass(frozen=True)
class _Shown:
    """Rows of an earlier run, their file, and the folder for table and figure."""

    rows: "Sequence[Row]"
    lines: Path
    folder: Path


def _execute(prepared: "tuple[Plan, list[str], Store] | _Shown") -> int:
    from gmm_ivf.eval import kernel_run

    if isinstance(prepared, _Shown):
        _write(prepared.rows, [], prepared.lines, prepared.folder)
        return 0
    plan, notes, store = prepared
    began = time.monotonic()
    with sole_writer(store.path), _empty_cache():
        rows, left_out = kernel_run.run(plan, store)
    took = f"The run took {time.monotonic() - began:.0f} s."
    _write(rows, [*notes, *_left(left_out, plan.seconds), took], store.path, store.path.parent)
    return 0 if any(row.status == "ok" for row in rows) else _NOTHING


def _kept(prepared: "tuple[Plan, list[str], Store] | _Shown | None") -> str:
    if prepared is None or isinstance(prepared, _Shown):
        return "nothing was measured yet"
    store = prepared[2]
    return f"{len(store)} rows are in {store.path}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program(globals()["__spec__"], "eval.kernels"),
        description="Time, memory and accuracy of EM: our backends beside what else is installed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--case", action="append", metavar="KIND:MODE:N:K:D", help="repeatable, see below")
    add("--quick", action="store_true", help="small cases, seconds")
    add("--rival", action="append", choices=RIVALS, help="repeatable; default: all")
    add("--no-rivals", action="store_true", help="our backends only")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--threads", type=positive, help="default: all cores")
    add(
        "--budget",
        type=seconds,
        default=_BUDGET_SECONDS,
        metavar="SECONDS",
        help="for everything; default: %(default)g",
    )
    add(
        "--show", type=Path, metavar="FILE", help="measure nothing: table and figure of these lines"
    )
    add("--out", type=Path, help="folder for results; default: results/kernels")
    return parser


def _prepare(args: argparse.Namespace) -> "tuple[Plan, list[str], Store] | _Shown":
    """Check everything that can be wrong with the arguments.

    Raises
    ------
    ValueError, OSError, ImportError
        In one sentence for the user.
    """
    if args.rival and args.no_rivals:
        raise ValueError("give --rival or --no-rivals, not both")
    if args.case and args.quick:
        raise ValueError("give --case or --quick, not both")
    folder = args.out or Path("results") / ("kernels-quick" if args.quick else "kernels")
    if args.show:
        from gmm_ivf.eval.kernel_results import read_rows

        rows = read_rows(args.show)
        folder.mkdir(parents=True, exist_ok=True)
        return _Shown(rows, args.show, folder)
    threads = args.threads or usable_cores()
    set_threads(threads)
    import torch

    from gmm_ivf.eval.kernel_cases import DEFAULT, Case, quick
    from gmm_ivf.eval.kernel_results import Store
    from gmm_ivf.eval.kernel_run import Plan

    cases = tuple(dict.fromkeys(Case.parse(text) for text in args.case or ()))
    device = resolve_device(args.device)
    notes = []
    if not cases:
        small = args.quick or device == "cpu"
        cases = quick("fp32" if device == "cpu" else "fp16") if small else DEFAULT
        if small and not args.quick:
            notes.append("The default cases are for a GPU; these are those of --quick.")
    place = torch.device(device)
    contenders, note = _contenders(args, place)
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / "results.jsonl", _environment(threads, device))
    plan = Plan(cases, contenders, place, args.budget)
    return plan, [*notes, *note], store


def _contenders(args: argparse.Namespace, device: Any) -> "tuple[tuple[Contender, ...], list[str]]":
    """Those who can run here, and a sentence on the others."""
    from gmm_ivf.eval.kernel_contenders import Torch, Triton, Truncated
    from gmm_ivf.eval.kernel_rivals import rivals

    known = rivals()
    names = [] if args.no_rivals else dict.fromkeys(args.rival or RIVALS)
    wanted = [Triton(), Truncated(), Torch(), *(known[name] for name in names)]
    reasons = {contender.name: contender.missing(device) for contender in wanted}
    usable = tuple(contender for contender in wanted if reasons[contender.name] is None)
    absent = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    return usable, [f"Not measured: {', '.join(absent)}."] if absent else []


def _environment(threads: int, device: str) -> dict[str, Any]:
    """The stamp of this machine, with triton and the rivals."""
    environment = stamp(threads, device)
    for name in _PACKAGES:
        try:
            environment["packages"][name] = version(name)
        except PackageNotFoundError:
            environment["packages"][name] = None
    return environment


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Let Triton compile as on a machine that has never run it, unless the user chose a cache."""
    if "TRITON_CACHE_DIR" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="eval-kernels-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TRITON_CACHE_DIR"]


def _left(left_out: "Sequence[Task]", seconds: float) -> list[str]:
    from gmm_ivf.eval.kernel_run import summary

    if not left_out:
        return []
    return [f"Left out for want of time (--budget {seconds:g}): {summary(left_out)}."]


def _write(rows: "Sequence[Row]", notes: Sequence[str], lines: Path, folder: Path) -> None:
    from gmm_ivf.eval.kernel_plots import save
    from gmm_ivf.eval.kernel_table import to_text

    table = to_text(rows, notes)
    (folder / "table.txt").write_text(table, encoding="utf-8")
    print(table)
    line = f"lines: {lines}"
    if any(row.job == "iteration" and row.ms is not None for row in rows):
        line += f"   figure: {save(rows, folder)[0]}"
    print(line)


if __name__ == "__main__":
    sys.exit(main())
