"""Command line: recall against distance computations, k-means IVF and Gaussian-mixture IVF.

Run ``python -m eval.recall`` in a checkout, ``gmm-ivf-recall`` when installed.
"""

# What loads torch or FAISS is imported late, after `let_idle_threads_sleep`: they read that once.
import argparse
import math
import shlex
import sys
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gmm_ivf.eval.commands import (
    Parser,
    UserError,
    let_idle_threads_sleep,
    natural,
    positive,
    program,
    run_command,
    seconds,
    share,
)
from gmm_ivf.eval.environment import (
    require_faiss,
    resolve_device,
    set_threads,
    stamp,
    usable_cores,
)
from gmm_ivf.eval.jsonl import sole_writer
from gmm_ivf.eval.metrics import TIES
from gmm_ivf.eval.progress import clock, say
from gmm_ivf.eval.results import OperatingPoint, Store, commits

if TYPE_CHECKING:
    from gmm_ivf.eval.sweep import Plan

DEFAULT_DATASET = "sift-mini"
_NOTHING = 1
_METRICS = ("l2", "ip", "cosine")
_EPILOG = """\
methods: kmeans | gmm | gmm-soft | kmeans-soft | gmm-cells | kmeans-cells, each with options:
  NAME:key=value,key=value
  kmeans:nlist=4096,coarse=hnsw32     its own K; an HNSW coarse quantizer, efSearch swept
  kmeans:codec=PQ32,refine=true       codes, ranked again with the originals; also rotation=RR
  gmm-soft                            replication=1.5, max_lists=2
  gmm-soft:tau=1/K                    every list whose posterior is above 1/K, two at most
  gmm-soft:replication=1.3,max_lists=4
  gmm-soft:rule=air                   further lists by a rule of geometry, on the means of the GMM
  kmeans-soft:rule=soar,strict=true   the same on the centroids of kmeans, niter as there
    rules: air, soar  lambda, strict=false, candidates     spann  rng_factor, eps, candidates
           ratio      eps, candidates                      top2   the second nearest, always
    all take max_lists=2; kmeans-soft alone means rule=air
  gmm-soft:adaptive=true              a query probes lists by their distances, nprobe on average
  gmm:covariance_type=diag            also max_iter, tol, n_init, init_params, reg_covar, precision
  gmm-cells:links=64,visit=list       layout "cells"; the options of gmm_ivf.CellOptions
  all take nlist, coarse, refine and codec (Flat, SQ8, SQ4, SQfp16, PQ32, PQ32x4, PQ32x4fs, RaBitQ,
  RaBitQ4, RaBitQfs); kmeans and gmm, which are stock FAISS, also rotation (RR, OPQ32)
Writes results.jsonl, summary.jsonl, recall.png, recall.svg, report.html and table.txt into --out. A
run that was stopped goes on where it was when the same command is given again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; by default those of the process.

    Returns
    -------
    int
        0, 1 when the budget left nothing measured, or 130 after Ctrl-C. Bad arguments exit with 2.
    """
    let_idle_threads_sleep()
    argv = list(sys.argv[1:] if argv is None else argv)
    name = program(globals()["__spec__"], "gmm-ivf-recall")
    command = " ".join([name, shlex.join(argv)]).strip()

    def kept(job: _Job | None) -> str:
        what = f"{len(job.store)} points are in {job.store.path}" if job else "nothing was measured"
        return f"{what}; give the same command again to go on: {command}"

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say(f"note: {message}")
        return run_command(_parser(name), argv, _prepare, lambda job: _run(job, command), kept)


class _Job(NamedTuple):
    """What was asked for, checked and loaded."""

    plan: "Plan"
    dataset: Any
    store: Store
    busy: bool


def _run(job: _Job, command: str) -> int:
    from gmm_ivf.eval.sweep import Bench, run

    plan, dataset, store, busy = job
    environment = stamp(plan.threads, plan.device) | {"busy": busy}
    _warn_of_other_commits(store, environment)
    with sole_writer(store.path):
        outcome = run(plan, Bench.prepare(dataset, plan.k), store, environment)
        if outcome.left_out:
            say(f"left out, or cut, for want of time (--budget): {'; '.join(outcome.left_out)}")
        if outcome.points:
            _write(outcome.points, store.path.parent, command)
    if outcome.failed:
        raise UserError("; ".join(map(str, outcome.failed)))
    return 0 if outcome.points else _NOTHING


def _parser(name: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=name,
        description="Recall against distance computations: k-means IVF, GMM IVF, and their rivals.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dataset", default=DEFAULT_DATASET, metavar="NAME|FILE", help="default: %(default)s")
    add("--nlist", type=positive, action="append", help="repeatable; default: near sqrt(N)")
    add("--method", action="append", metavar="NAME[:key=value,...]", help="repeatable, see below")
    add("--k", type=positive, help="neighbours searched and counted; default: 10")
    add("--nprobe", type=positive, nargs="+", help="default: 1 to 16, then steps of 1.2")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where EM trains, and k-means where faiss has GPU support",
    )
    add("--threads", type=positive, help="for torch and FAISS alike; default: all cores")
    add(
        "--seed",
        type=natural,
        action="append",
        help="repeatable; default: 0, 1, 2, with --quick 0",
    )
    add("--seeds", type=positive, metavar="COUNT", help="short for --seed 0 --seed 1 ...")
    add("--ties", choices=tuple(TIES), default="strict", help="tolerance at the k-th neighbour")
    add("--metric", choices=_METRICS, help="of a file that does not say; default: l2")
    add("--limit", type=positive, metavar="N", help="first N vectors only")
    add("--queries", type=positive, metavar="N", help="first N queries only")
    add("--train-limit", type=positive, metavar="N", help="at most N training rows")
    add("--stop-recall", type=share, help="where a sweep ends; default: 0.995, --quick 0.99")
    add("--budget", type=seconds, metavar="SECONDS", help="begin nothing new after so long")
    add("--busy", action="store_true", help="other work runs here: mark times as none")
    add("--quick", action="store_true", help="a first look in seconds")
    add("--out", type=Path, help="folder for results; default: results/recall-DATASET")
    return parser


def _prepare(args: argparse.Namespace) -> _Job:
    """Check everything that can be wrong with the arguments, then load the data.

    Raises
    ------
    ValueError, OSError, ImportError
        In one sentence for the user.
    """
    from gmm_ivf.eval.method_spec import parse_method
    from gmm_ivf.eval.sweep import Plan

    config = _config("quick" if args.quick else "base")
    methods = tuple(dict.fromkeys(parse_method(m) for m in args.method or config["methods"]))
    if args.seed and args.seeds:
        raise ValueError("give --seed or --seeds, not both")
    seeds = args.seed or (range(args.seeds) if args.seeds else config["seeds"])
    threads = args.threads or usable_cores()
    set_threads(threads)
    require_faiss()
    device = resolve_device(args.device)
    with clock(f"loading {args.dataset}"):
        dataset = _load(args, config)
    protocol = {name: config[name] for name in _PROTOCOL}
    if args.stop_recall is not None:
        protocol["stop_recall"] = args.stop_recall
    plan = Plan(
        methods=methods,
        nlists=tuple(dict.fromkeys(args.nlist or [default_nlist(dataset.n)])),
        seeds=tuple(dict.fromkeys(seeds)),
        k=args.k or config["k"],
        nprobes=None if args.nprobe is None else tuple(args.nprobe),
        device=device,
        threads=threads,
        ties=args.ties,
        train_limit=args.train_limit,
        budget_seconds=args.budget,
        **protocol,
    )
    _check_sizes(plan, dataset)
    return _Job(plan, dataset, Store(_folder(args, dataset.name) / "results.jsonl"), args.busy)


def _load(args: argparse.Namespace, config: dict[str, Any]) -> Any:
    """The data set, as far as it is wanted."""
    from gmm_ivf.datasets.registry import load

    dataset = load(args.dataset, limit=args.limit, metric=args.metric)
    if args.queries is not None:
        dataset = dataset.first_queries(args.queries)
    if args.limit is None and dataset.n > config.get("limit", dataset.n):
        dataset = dataset.subset(config["limit"])
    return dataset


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


def _check_sizes(plan: "Plan", dataset: Any) -> None:
    rows = min(dataset.n, plan.train_limit or dataset.n)
    for nlist in plan.groups():
        if nlist > rows:
            what = "training rows" if rows < dataset.n else f"vectors of {dataset.name}"
            raise ValueError(f"nlist {nlist} is above the {rows} {what}; choose fewer lists")
    if plan.k > dataset.n:
        raise ValueError(
            f"--k {plan.k} is above the {dataset.n} vectors of {dataset.name}; choose fewer"
        )
    fewest = min(plan.groups())
    for nprobe in plan.nprobes or ():
        if nprobe > fewest:
            say(f"--nprobe {nprobe} is above nlist {fewest}: all lists are probed there")


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
    from gmm_ivf.eval.summary import write_summary
    from gmm_ivf.eval.tables import to_text

    table = to_text(points)
    (folder / "table.txt").write_text(table, encoding="utf-8")
    write_summary(points, folder / "summary.jsonl")
    with clock("drawing"):
        _, svg = save(points, folder)
        page = render(points, svg.read_text(encoding="utf-8"), command)
    (folder / "report.html").write_text(page, encoding="utf-8")
    print(table)
    print(f"figure: {folder / 'recall.png'}   page: {folder / 'report.html'}")


if __name__ == "__main__":
    sys.exit(main())
