"""Command line: what each precision mode does to densities, assignments and parameters.

Run ``python -m eval.precision`` in a checkout, ``python -m gmm_ivf.eval.precision`` when installed.
"""

# What loads torch is imported late, after `let_idle_threads_sleep`: it reads that setting once.
import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gmm_ivf.datasets.synthetic import GENERATORS
from gmm_ivf.eval.commands import Parser, let_idle_threads_sleep, positive, program, run_command
from gmm_ivf.eval.environment import resolve_device, set_threads, stamp, usable_cores
from gmm_ivf.eval.progress import bar

if TYPE_CHECKING:
    from gmm_ivf.eval.accuracy import Problem, Result

_DIMENSIONS = (32, 64, 128, 960)
_COMPONENTS = (16, 256, 1024)
_QUICK = {"d": (32, 128), "k": (16, 256)}
_SHIFTS = (0.0, 1000.0)
# Samples a component: by default, and at least.
_PER_COMPONENT, _FEWEST = 16, 8
_FEWEST_SAMPLES = 2048
# Elements of the covariances of all components that a step may hold several times.
_LARGEST_FULL = 1 << 27
_MISSED = 1
_EPILOG = """\
Samples are drawn with the public generators of gmm_ivf.datasets.synthetic and evaluated, with the
parameters they were drawn with, against float64 on the same float32 samples.
Writes results.jsonl and table.txt into --out. Exit status: 0, or 1 when a mode misses its limits
where "auto" would take it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the modes.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; by default those of the process.

    Returns
    -------
    int
        0, 1 when a mode misses its limits where "auto" would take it, 130 after Ctrl-C. Bad
        arguments exit with 2.
    """
    let_idle_threads_sleep()
    return run_command(_parser(), argv, _prepare, _execute, _kept)


class _Job(NamedTuple):
    """What was asked for, checked; `results` grows while it runs."""

    args: argparse.Namespace
    problems: "list[Problem]"
    device: str
    environment: dict[str, Any]
    folder: Path
    results: "list[Result]"


def _execute(job: _Job) -> int:
    from gmm_ivf.eval.accuracy_table import to_text

    _run(job)
    table = to_text(job.results)
    (job.folder / "table.txt").write_text(table, encoding="utf-8")
    print(table)
    if job.args.diagnose:
        print(_diagnosis(job.results, job.device))
    print(f"lines: {job.folder / 'results.jsonl'}")
    return _MISSED if any(result.verdict == "missed" for result in job.results) else 0


def _kept(job: _Job | None) -> str:
    return f"{len(job.results) if job else 0} results were measured"


def _parser() -> argparse.ArgumentParser:
    from gmm_ivf.kernels.components import COVARIANCE_TYPES
    from gmm_ivf.kernels.dispatch import BACKENDS, ROUNDING_UNITS

    parser = Parser(
        prog=program(globals()["__spec__"], "eval.precision"),
        description="Accuracy of the precision modes of GaussianMixture against float64.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--mode", action="append", choices=tuple(ROUNDING_UNITS), help="repeatable; default: all")
    add("--backend", choices=BACKENDS, default="auto", help="of the modes; default: %(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--n", type=positive, help=f"samples; default: {_PER_COMPONENT} a component")
    add("--d", type=positive, action="append", help="repeatable; default: 32, 64, 128, 960")
    add("--k", type=positive, action="append", help="repeatable; default: 16, 256, 1024")
    add("--set", action="append", choices=tuple(GENERATORS), help="repeatable; default: all three")
    add("--shift", type=float, action="append", help="repeatable; default: 0 and 1000")
    add(
        "--covariance-type",
        action="append",
        choices=COVARIANCE_TYPES,
        help="repeatable; default: spherical",
    )
    add("--seed", type=int, default=0)
    add("--threads", type=positive, help="default: all cores")
    add("--quick", action="store_true", help="D 32 and 128, K 16 and 256, fewer samples")
    add("--diagnose", action="store_true", help="explain the worst result sample by sample")
    add("--out", type=Path, help="folder for results; default: results/precision")
    return parser


def _prepare(args: argparse.Namespace) -> _Job:
    """Check everything that can be wrong with the arguments.

    Raises
    ------
    ValueError, OSError, ImportError
        In one sentence for the user.
    """
    from gmm_ivf.kernels.dispatch import resolve_device as torch_device
    from gmm_ivf.kernels.dispatch import triton_obstacle

    device = resolve_device(args.device)
    obstacle = triton_obstacle(torch_device(device, None))
    if args.backend == "triton" and obstacle:
        raise ValueError(f"--backend triton cannot run its kernels: {obstacle}")
    problems = _problems(args)
    threads = args.threads or usable_cores()
    set_threads(threads)
    folder = args.out or Path("results") / ("precision-quick" if args.quick else "precision")
    folder.mkdir(parents=True, exist_ok=True)
    return _Job(args, problems, device, stamp(threads, device), folder, [])


def _problems(args: argparse.Namespace) -> "list[Problem]":
    """The grid, small sizes first."""
    from gmm_ivf.eval.accuracy import Problem

    sizes = _QUICK if args.quick else {"d": _DIMENSIONS, "k": _COMPONENTS}
    grid = itertools.product(
        dict.fromkeys(args.covariance_type or ["spherical"]),
        dict.fromkeys(args.d or sizes["d"]),
        dict.fromkeys(args.k or sizes["k"]),
        dict.fromkeys(args.set or GENERATORS),
        dict.fromkeys(_SHIFTS if args.shift is None else args.shift),
    )
    problems = []
    for kind, d, k, dataset, shift in grid:
        n = args.n or max(_FEWEST_SAMPLES, (_FEWEST if args.quick else _PER_COMPONENT) * k)
        if n < _FEWEST * k:
            raise ValueError(
                f"--n {n} is too few for --k {k}: give at least {_FEWEST} samples a component, "
                f"{_FEWEST * k}"
            )
        if kind == "full" and k * d * d > _LARGEST_FULL:
            raise ValueError(
                f"--covariance-type full with --d {d} and --k {k} takes {8e-9 * k * d * d:.1f} GB "
                "for each copy of the covariances; choose smaller ones"
            )
        problems.append(Problem(dataset, shift, n, d, k, kind, args.seed))
    return problems


def _run(job: _Job) -> None:
    """Measure all problems; each result is on the disk before the next one starts."""
    from gmm_ivf.eval.accuracy import run_problem
    from gmm_ivf.kernels.dispatch import ROUNDING_UNITS

    args = job.args
    modes = tuple(dict.fromkeys(args.mode or ROUNDING_UNITS))
    path = job.folder / "results.jsonl"
    with (
        path.open("w", encoding="utf-8") as file,
        bar(len(job.problems) * len(modes), "precision") as progress,
    ):
        for problem in job.problems:
            for result in run_problem(problem, modes, args.backend, job.device, job.environment):
                file.write(result.to_json() + "\n")
                file.flush()
                os.fsync(file.fileno())
                job.results.append(result)
                progress.update()


def _diagnosis(results: "list[Result]", device: str) -> str:
    """The report of `diagnose` for the result that comes nearest to its limit, or goes beyond."""
    from gmm_ivf import diagnose

    ran = [result for result in results if result.measured is not None]
    if not ran:
        return "nothing to diagnose: no mode ran"
    worst = max(ran, key=lambda result: result.strain)
    x, mixture = worst.problem.build(device)
    mixture.set_params(precision=worst.mode, backend=worst.backend)
    problem = worst.problem
    return (
        f"{problem.dataset}, shift {problem.shift:g}, D={problem.d}, K={problem.k}, "
        f"{problem.covariance_type}. The parameters are those that the samples were drawn with, so "
        f"distances to a fixed point are sampling noise.\n{diagnose(mixture, x)}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
