"""Command line: list, download, verify and convert data sets."""

import argparse
import sys
from pathlib import Path

from gmm_ivf.datasets.dataset import METRICS
from gmm_ivf.datasets.registry import entries, find, locate


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; a download goes on from there when run again", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gmm_ivf.datasets", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument(
        "--data-dir", help="folder of downloads (default: $GMM_IVF_DATA, else ~/.cache/gmm_ivf)"
    )

    command = commands.add_parser("list", parents=[folder], help="what is known by name")
    command.set_defaults(run=_list)

    command = commands.add_parser("download", parents=[folder], help="fetch by name, resuming")
    command.add_argument("name", choices=sorted(entries()))
    command.set_defaults(run=_download)

    command = commands.add_parser(
        "verify", parents=[folder], help="check a file and search some of its queries again"
    )
    command.add_argument("data", metavar="NAME|FILE")
    command.set_defaults(run=_verify)

    command = commands.add_parser(
        "convert", parents=[folder], help="write a data set in another format"
    )
    command.add_argument("source", metavar="NAME|FILE")
    command.add_argument("target", type=Path, help="its suffix gives the format")
    command.add_argument("--query", type=Path, help="file of the queries")
    command.add_argument("--ground-truth", type=Path, help="file of the neighbours' ids")
    command.add_argument("--metric", choices=METRICS)
    command.set_defaults(run=_convert)
    return parser


def _list(args: argparse.Namespace) -> None:
    print(f"{'name':<11}{'vectors':>10}{'d':>6}{'queries':>9}  {'metric':<8}{'MB':>6}  where")
    for entry in entries().values():
        path = entry.path(args.data_dir)
        where = str(path) if path.is_file() else f"not here; {entry.url}"
        print(
            f"{entry.name:<11}{entry.n:>10,}{entry.d:>6}{entry.queries:>9,}  {entry.metric:<8}"
            f"{entry.bytes / 1e6:>6,.0f}  {where}"
        )


def _download(args: argparse.Namespace) -> None:
    print(locate(args.name, args.data_dir))


def _verify(args: argparse.Namespace) -> None:
    # Here, because the other commands need no torch.
    from gmm_ivf.datasets.verify import SAMPLE, verify

    data = verify(args.data, args.data_dir)
    truth = "no ground truth"
    if data.ground_truth is not None:
        some = min(SAMPLE, len(data.query))
        truth = f"ground truth of {data.ground_truth.shape[1]}, {some} queries searched again"
    print(
        f"{data.name}: {data.n} x {data.d}, {len(data.query)} queries, {data.metric}, {truth}: ok"
    )
    print(data.source)


def _convert(args: argparse.Namespace) -> None:
    from gmm_ivf.datasets.convert import convert

    options = {"query": args.query, "ground_truth": args.ground_truth, "metric": args.metric}
    source = find(args.source, args.data_dir, download=False)
    for path in convert(source, args.target, **options):
        print(path)


if __name__ == "__main__":
    raise SystemExit(main())
