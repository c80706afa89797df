"""The comparison as a table: cost at fixed recall, its ratio to k-means, storage, speed, build."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gmm_ivf.eval.metrics import cost_at_recall
from gmm_ivf.eval.results import OperatingPoint

TARGETS = (0.80, 0.90, 0.95, 0.99)
BASELINE = "kmeans"
_TEXT_WIDTH = 118


@dataclass(frozen=True)
class Spread:
    """Mean, smallest and largest of one number over the seeds."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Spread | None":
        """None unless every seed has a value: a mean over some of them would flatter."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return cls(sum(known) / len(known), min(known), max(known))


@dataclass(frozen=True)
class Row:
    """One method at one nlist; `costs` and `ratios` follow `TARGETS`."""

    method: str
    costs: tuple[Spread | None, ...]
    ratios: tuple[Spread | None, ...]
    entries_per_vector: float
    bytes_per_vector: float
    queries_per_second: Spread | None
    train_seconds: float
    add_seconds: float


@dataclass(frozen=True)
class Block:
    """All methods at one nlist, and what they share."""

    nlist: int
    n: int
    train_rows: int
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """Heading of the block, in words."""
        seeds = ", ".join(map(str, self.seeds))
        return (
            f"K = nlist = {self.nlist:,}, N/K = {self.n / self.nlist:,.0f}, flat coarse quantizer, "
            f"trained on {self.train_rows:,} rows, seed{'s' * (len(self.seeds) > 1)} {seeds}"
        )


Curve = list[OperatingPoint]


def curves(points: Iterable[OperatingPoint]) -> dict[tuple[int, str, int], Curve]:
    """Points by (nlist, method, seed), in the order met, each curve by rising nprobe."""
    result: dict[tuple[int, str, int], Curve] = {}
    for point in points:
        key = point.key
        result.setdefault((key.nlist, key.method, key.seed), []).append(point)
    for curve in result.values():
        curve.sort(key=lambda point: point.key.nprobe)
    return result


def curve_cost(curve: Curve | None, target: float) -> float | None:
    """Distance computations per query at a recall; None where the curve does not cross it."""
    if not curve:
        return None
    recalls = [point.recall for point in curve]
    return cost_at_recall(recalls, [point.distance_computations for point in curve], target)


def ratio_to_baseline(curve: Curve | None, baseline: Curve | None, target: float) -> float | None:
    """Baseline cost over this cost at the same recall: above 1 means fewer computations."""
    ours, theirs = curve_cost(curve, target), curve_cost(baseline, target)
    return None if ours is None or theirs is None else theirs / ours


def summarize(points: Sequence[OperatingPoint]) -> list[Block]:
    """One block per nlist. Ratios are paired: each seed against k-means of the same seed."""
    by_key = curves(points)
    blocks = []
    for nlist in dict.fromkeys(nlist for nlist, _, _ in by_key):
        mine = {(method, seed): c for (k, method, seed), c in by_key.items() if k == nlist}
        methods = tuple(dict.fromkeys(method for method, _ in mine))
        seeds = tuple(dict.fromkeys(seed for _, seed in mine))
        first = next(iter(mine.values()))[0]
        blocks.append(
            Block(
                nlist=nlist,
                n=first.n,
                train_rows=first.key.train_rows,
                seeds=seeds,
                rows=tuple(_row(method, mine, seeds) for method in methods),
            )
        )
    return blocks


def _row(method: str, mine: dict[tuple[str, int], Curve], seeds: Sequence[int]) -> Row:
    own = [mine[method, seed] for seed in seeds if (method, seed) in mine]

    def over_seeds(value: Callable[[int], float | None]) -> Spread | None:
        return Spread.of([value(seed) for seed in seeds])

    def cost(target: float) -> Spread | None:
        return over_seeds(lambda seed: curve_cost(mine.get((method, seed)), target))

    def ratio(target: float) -> Spread | None:
        return over_seeds(
            lambda seed: ratio_to_baseline(
                mine.get((method, seed)), mine.get((BASELINE, seed)), target
            )
        )

    def mean(value: Callable[[OperatingPoint], float]) -> float:
        return sum(value(curve[0]) for curve in own) / len(own)

    return Row(
        method=method,
        costs=tuple(cost(target) for target in TARGETS),
        ratios=tuple(ratio(target) for target in TARGETS),
        entries_per_vector=mean(lambda point: point.entries_per_vector),
        bytes_per_vector=mean(lambda point: point.bytes_per_vector),
        queries_per_second=over_seeds(lambda seed: _speed(mine.get((method, seed)), 0.90)),
        train_seconds=mean(lambda point: point.train_seconds),
        add_seconds=mean(lambda point: point.add_seconds),
    )


def _speed(curve: Curve | None, target: float) -> float | None:
    if not curve:
        return None
    recalls = [point.recall for point in curve]
    seconds = cost_at_recall(recalls, [1 / point.queries_per_second for point in curve], target)
    return None if seconds is None else 1 / seconds


def header() -> list[str]:
    """Column titles, for text and HTML alike."""
    return [
        "method",
        *(f"cost at {target:.2f}" for target in TARGETS),
        "entries/vector",
        "bytes/vector",
        "QPS at 0.90",
        "train s",
        "add s",
    ]


def cells(row: Row) -> list[str]:
    """One table row as text, in the order of `header`."""
    costs = []
    for cost, ratio in zip(row.costs, row.ratios, strict=True):
        text = "-" if cost is None else f"{cost.mean:,.0f}"
        costs.append(text if ratio is None else f"{text} {ratio.mean:.2f}x")
    speed = row.queries_per_second
    return [
        row.method,
        *costs,
        f"{row.entries_per_vector:.2f}",
        f"{row.bytes_per_vector:,.0f}",
        "-" if speed is None else f"{speed.mean:,.0f}",
        f"{row.train_seconds:.1f}",
        f"{row.add_seconds:.1f}",
    ]


def ranges(row: Row) -> list[str]:
    """What goes under the cells: smallest and largest ratio where seeds differ, else ""."""
    spreads = [
        "" if ratio is None or ratio.low == ratio.high else f"{ratio.low:.2f}-{ratio.high:.2f}x"
        for ratio in row.ratios
    ]
    return ["", *spreads, *[""] * (len(header()) - 1 - len(spreads))]


def explain(points: Sequence[OperatingPoint]) -> list[str]:
    """What the columns mean, in sentences."""
    first = points[0]
    several = len({point.key.seed for point in points}) > 1
    seeds = " (mean over the seeds, range below, each seed paired with its own k-means)"
    ties = "" if first.key.ties == "strict" else f" (ties as in {first.key.ties})"
    return [
        f"cost: distance computations per query at that recall@{first.key.k}{ties} = vectors "
        "scanned in the probed lists, every copy counted, + nlist comparisons with list centres; "
        f"x: k-means cost / this cost, above 1 means fewer{seeds if several else ''}; "
        "-: the curve does not cross that recall.",
        "entries/vector: lists that hold a vector, on average; bytes/vector: codes, ids, list "
        f"headers and centres; QPS: queries per second, {first.key.threads} threads, best pass; "
        "train s: the start and all iterations; methods that share a mixture are each charged "
        f"for it; {_training(points)}.",
    ]


def _training(points: Sequence[OperatingPoint]) -> str:
    text = f"same training rows, at most {points[0].key.iterations} iterations of EM"
    baseline = [point.settings for point in points if point.key.method == BASELINE]
    if not baseline:
        return text
    values = {
        name: "/".join(map(str, dict.fromkeys(settings.get(name) for settings in baseline)))
        for name in ("niter", "max_points_per_centroid")
    }
    return f"{text}; k-means is FAISS's, " + ", ".join(f"{k}={v}" for k, v in values.items())


def to_text(points: Sequence[OperatingPoint]) -> str:
    """The whole table as plain text, ending in a line break."""
    if not points:
        return "no points yet\n"
    first = points[0]
    lines = [
        f"{first.dataset}: {first.n:,} vectors of {first.d} dimensions, "
        f"{first.queries:,} queries, metric {first.metric}"
    ]
    for block in summarize(points):
        table = [header()]
        for row in block.rows:
            table += [cells(row)] + ([ranges(row)] if any(ranges(row)) else [])
        lines += ["", block.title, *_align(table)]
    for sentence in explain(points):
        lines += ["", *textwrap.wrap(sentence, _TEXT_WIDTH, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def _align(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
