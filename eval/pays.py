"""Command line: the page "When soft assignment pays" from the lines of eval.recall.

Run ``python -m eval.pays FILE.jsonl ...`` in a checkout, one file (or FILE.jsonl.gz) a data set.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gmm_ivf.eval.commands import Parser, let_idle_threads_sleep, program, run_command
from gmm_ivf.eval.results import OperatingPoint, read_points

PAGE = "when-soft-assignment-pays"


class _Job(NamedTuple):
    """Points of each data set, largest last, and where the page goes."""

    sets: list[list[OperatingPoint]]
    folder: Path
    command: str


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and its figures.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; by default those of the process.

    Returns
    -------
    int
        0. Bad arguments exit with 2.
    """
    let_idle_threads_sleep()
    argv = list(sys.argv[1:] if argv is None else argv)
    name = program(globals()["__spec__"], "eval.pays")
    command = " ".join([name, shlex.join(argv)])
    return run_command(
        _parser(name),
        argv,
        lambda args: _prepare(args, command),
        _execute,
        lambda _: "nothing was changed, or a part",
    )


def _parser(name: str) -> argparse.ArgumentParser:
    parser = Parser(prog=name, description='The page "When soft assignment pays" from results.')
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE", help="results.jsonl, or .gz, a data set")
    add("--out", type=Path, default=Path("docs"), help="folder of the page; default: %(default)s")
    return parser


def _prepare(args: argparse.Namespace, command: str) -> _Job:
    """Read the files.

    Raises
    ------
    ValueError, OSError
        In one sentence for the user.
    """
    sets = []
    for path in args.files:
        points = read_points(path)
        if not points:
            raise ValueError(f"{path} holds no complete line of results")
        if len({point.key.fingerprint for point in points}) > 1:
            raise ValueError(f"{path} holds several data sets; give each a file of its own")
        sets.append(points)
    args.out.mkdir(parents=True, exist_ok=True)
    return _Job(sorted(sets, key=lambda points: points[0].n), args.out, command)


def _execute(job: _Job) -> int:
    from gmm_ivf.eval.pays_page import figure_name, page
    from gmm_ivf.eval.plots import draw_page

    for points in job.sets:
        path = job.folder / figure_name(PAGE, points)
        draw_page(points).savefig(path, dpi=110, metadata={"Software": None})
    path = job.folder / f"{PAGE}.md"
    path.write_text(page(PAGE, job.sets, job.command), encoding="utf-8")
    print(f"page: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
