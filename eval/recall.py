"""Command line: recall against distance computations, k-means IVF and Gaussian-mixture IVF.

Run ``python -m eval.recall`` in a checkout, ``gmm-ivf-recall`` when installed.
"""

import argparse
import math
import shlex
import sys
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gmm_ivf.eval.commands import Parser, natural, positive, program
from gmm_ivf.eval.environment import (
    require_faiss,
    resolve_device,
    set_threads,
    stamp,
    usable_cores,
)
from gmm_ivf.eval.method_spec import parse_method
from gmm_ivf.eval.metrics import TIES
from gmm_ivf.eval.progress import clock, say
from gmm_ivf.eval.results import OperatingPoint, Store, commits
from gmm_ivf.eval.sweep import Bench, BuildError, Plan, run
from gmm_ivf.eval.tables import to_text

DEFAULT_DATASET = "sift-mini"
_INTERRUPTED = 130
_EPILOG = """\
methods: kmeans | gmm | gmm-soft | kmeans-soft, each with options: NAME:key=value,key=value
  gmm-soft                            replication=1.5, max_lists=2
  gmm-soft:tau=1/K                    every list whose posterior is above 1/K, two at most
  gmm-soft:replication=1.3,max_lists=4
  gmm-soft:rule=air                   further lists by a rule of geometry, on the means of the GMM
  kmeans-soft:rule=soar,strict=true   the same on the centroids of kmeans, niter as there
    rules: air, soar  lambda, strict=false, candidates     spann  rng_factor, eps, candidates
           ratio      eps, candidates                      top2   the second nearest, always
    all take max_lists=2; kmeans-soft alone means rule=air
  gmm:covariance_type=diag            also max_iter, tol, n_init, init_params, reg_covar, precision
Writes results.jsonl, recall.png, recall.svg, report.html and table.txt into --out. A run that was
stopped goes on where it was when the same command is given again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; by default those of the process.

    Returns
    -------
    int
        0, or 130 after Ctrl-C. Bad arguments exit with 2.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    name = program(globals()["__spec__"], "gmm-ivf-recall")
    parser = _parser(name)
    args = parser.parse_args(argv)
    command = " ".join([name, shlex.join(argv)]).strip()
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"note: {message}")
        return _run(parser, args, command)


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace, command: str) -> int:
    store = None
    try:
        try:
            plan, dataset, store = _prepare(args)
        except (ValueError, OSError, ImportError) as error:
            parser.error(str(error))
        _warn_of_other_commits(store, environment := stamp(plan.threads, plan.device))
        try:
            points = run(plan, Bench.prepare(dataset, plan.k), store, environment)
        except BuildError as error:
            parser.error(str(error))
        _write(points, store.path.parent, command)
    except KeyboardInterrupt:
        kept = f"{len(store)} points are in {store.path}" if store else "nothing was measured yet"
        say(f"interrupted: {kept}; give the same command again to go on: {command}")
        return _INTERRUPTED
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=name,
        description="Recall against distance computations: k-means IVF, GMM hard, GMM soft.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dataset", default=DEFAULT_DATASET, metavar="NAME|FILE", help="default: %(default)s")
    add("--nlist", type=positive, action="append", help="repeatable; default: near sqrt(N)")
    add("--method", action="append", metavar="NAME[:key=value,...]", help="repeatable, see below")
    add("--k", type=positive, help="neighbours searched and counted; default: 10")
    add("--nprobe", type=positive, nargs="+", help="default: 1 to 16, then steps of 1.2")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where EM runs")
    add("--threads", type=positive, help="for torch and FAISS alike; default: all cores")
    add(
        "--seed",
        type=natural,
        action="append",
        help="repeatable; default: 0, 1, 2, with --quick 0",
    )
    add("--seeds", type=positive, metavar="COUNT", help="short for --seed 0 --seed 1 ...")
    add("--ties", choices=tuple(TIES), default="strict", help="tolerance at the k-th neighbour")
    add("--limit", type=positive, metavar="N", help="first N vectors only")
    add("--quick", action="store_true", help="a first look in seconds")
    add("--out", type=Path, help="folder for results; default: results/recall-DATASET")
    return parser


def _prepare(args: argparse.Namespace) -> tuple[Plan, Any, Store]:
    """Check everything that can be wrong with the arguments, then load the data.

    Raises
    ------
    ValueError, OSError, ImportError
        In one sentence for the user.
    """
    config = _config("quick" if args.quick else "base")
    methods = tuple(dict.fromkeys(parse_method(m) for m in args.method or config["methods"]))
    if args.seed and args.seeds:
        raise ValueError("give --seed or --seeds, not both")
    seeds = args.seed or (range(args.seeds) if args.seeds else config["seeds"])
    threads = args.threads or usable_cores()
    set_threads(threads)
    require_faiss()
    device = resolve_device(args.device)
    # Imported late: it may load torch, which reads its settings of threads once.
    from gmm_ivf.datasets.registry import load

    with clock(f"loading {args.dataset}"):
        dataset = load(args.dataset, limit=args.limit)
        if args.limit is None and dataset.n > config.get("limit", dataset.n):
            dataset = dataset.subset(config["limit"])
    plan = Plan(
        methods=methods,
        nlists=tuple(dict.fromkeys(args.nlist or [default_nlist(dataset.n)])),
        seeds=tuple(dict.fromkeys(seeds)),
        k=args.k or config["k"],
        nprobes=None if args.nprobe is None else tuple(args.nprobe),
        device=device,
        threads=threads,
        ties=args.ties,
        **{name: config[name] for name in _PROTOCOL},
    )
    _check_sizes(plan, dataset)
    return plan, dataset, Store(_folder(args, dataset.name) / "results.jsonl")


_PROTOCOL = (
    "points_per_centroid",
    "iterations",
    "stop_recall",
    "timing_seconds",
    "timing_passes",
)


def _config(name: str) -> dict[str, Any]:
    path = Path(__file__).with_name("configs") / f"{name}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def default_nlist(n: int) -> int:
    """The power of two nearest to sqrt(n) on a log scale, a common choice for IVF."""
    return 2 ** max(0, round(math.log2(n) / 2))


def _check_sizes(plan: Plan, dataset: Any) -> None:
    for nlist in plan.nlists:
        if nlist > dataset.n:
            raise ValueError(
                f"--nlist {nlist} is above the {dataset.n} vectors of {dataset.name}; choose fewer"
            )
    if plan.k > dataset.n:
        raise ValueError(
            f"--k {plan.k} is above the {dataset.n} vectors of {dataset.name}; choose fewer"
        )
    for nprobe in plan.nprobes or ():
        if nprobe > min(plan.nlists):
            say(f"--nprobe {nprobe} is above nlist {min(plan.nlists)}: all lists are probed there")


def _folder(args: argparse.Namespace, dataset: str) -> Path:
    if args.out is not None:
        folder = args.out
    else:
        parts = ["recall", dataset]
        parts += ["quick"] if args.quick else []
        parts += [f"first{args.limit}"] if args.limit else []
        folder = Path("results") / "-".join(parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {folder} cannot be made a folder: {error.strerror}") from None
    return folder


def _warn_of_other_commits(store: Store, environment: dict[str, Any]) -> None:
    others = [c for c in commits(store.points()) if c != str(environment["commit"] or "unknown")]
    if others:
        say(
            f"{store.path} holds points of commit {', '.join(others)}, which are not measured "
            "again; remove the file to start afresh"
        )


def _write(points: Sequence[OperatingPoint], folder: Path, command: str) -> None:
    from gmm_ivf.eval.plots import save
    from gmm_ivf.eval.report import render

    table = to_text(points)
    (folder / "table.txt").write_text(table, encoding="utf-8")
    with clock("drawing"):
        _, svg = save(points, folder)
        page = render(points, svg.read_text(encoding="utf-8"), command)
    (folder / "report.html").write_text(page, encoding="utf-8")
    print(table)
    print(f"figure: {folder / 'recall.png'}   page: {folder / 'report.html'}")


if __name__ == "__main__":
    sys.exit(main())
