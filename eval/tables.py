"""The comparison as a table: cost at fixed recall, its ratio to k-means, storage, speed, build."""

import textwrap
from collections.abc import Sequence

from gmm_ivf.eval.codes import CONVENTION
from gmm_ivf.eval.results import OperatingPoint
from gmm_ivf.eval.summary import (
    BASELINE,
    BEST_TARGETS,
    TARGETS,
    WIDE_GAP,
    Best,
    Row,
    Spread,
    bests,
    has_several_plain,
    summarize,
)

_TEXT_WIDTH = 118
_BUSY = "Times and QPS are no measurements: other work ran on the machine (--busy)."


def header(with_best: bool) -> list[str]:
    """Column titles, for text and HTML alike."""
    return [
        "method",
        *(f"cost at {target:.2f}" for target in TARGETS),
        *(f"x best {target:.2f}" for target in BEST_TARGETS if with_best),
        "entries/vector",
        "bytes/vector",
        "QPS at 0.90",
        "train s",
        "add s",
    ]


def cells(row: Row, with_best: bool) -> list[str]:
    """One table row as text, in the order of `header`."""
    costs = []
    for cost, ratio, rough in zip(row.costs, row.ratios, row.is_rough, strict=True):
        text = "-" if cost is None else f"{'~' * rough}{cost.mean:,.0f}"
        costs.append(text if ratio is None else f"{text} {_times(ratio)}")
    speed = row.queries_per_second
    return [
        row.method,
        *costs,
        *(_times(ratio) for ratio in row.to_best if with_best),
        f"{row.entries_per_vector:.2f}",
        f"{row.bytes_per_vector:,.0f}",
        "-" if speed is None else f"{speed.mean:,.0f}",
        f"{row.train_seconds:.1f}",
        f"{row.add_seconds:.1f}",
    ]


def _times(ratio: Spread | None) -> str:
    return "-" if ratio is None else f"{ratio.mean:.2f}x"


def ranges(row: Row, with_best: bool) -> list[str]:
    """What goes under the cells: smallest and largest ratio where seeds differ, else ""."""
    spreads = [
        "" if ratio is None or ratio.low == ratio.high else f"{ratio.low:.2f}-{ratio.high:.2f}x"
        for ratio in (*row.ratios, *(row.to_best if with_best else ()))
    ]
    return ["", *spreads, *[""] * (len(header(with_best)) - 1 - len(spreads))]


def best_header() -> list[str]:
    """Column titles of the best over all K."""
    return ["best over all K", "at", "value", "x", "method", "K", "entries/vector", "bytes/vector"]


def best_cells(best: Best) -> list[str]:
    """One row of the best over all K, in the order of `best_header`."""
    value = f"{best.value:,.0f}" + (" QPS" if best.by == "time" else "")
    return [
        best.family,
        f"{best.target:.2f}",
        value,
        _times(best.ratio),
        best.row.method,
        f"{best.row.nlist:,}",
        f"{best.row.entries_per_vector:.2f}",
        f"{best.row.bytes_per_vector:,.0f}",
    ]


def best_rows(points: Sequence[OperatingPoint]) -> list[Best]:
    """The best over all K, where there is more than one FAISS index to be the best of."""
    return bests(points) if has_several_plain(points) else []


def is_busy(points: Sequence[OperatingPoint]) -> bool:
    """Whether some points were measured beside other work, by what the user said."""
    return any(point.environment.get("busy") for point in points)


def explain(points: Sequence[OperatingPoint]) -> list[str]:
    """What the columns mean, in sentences."""
    first = points[0]
    several = len({point.key.seed for point in points}) > 1
    seeds = " (mean over the seeds, range below, each seed paired with its own k-means)"
    ties = "" if first.key.ties == "strict" else f" (ties as in {first.key.ties})"
    return [
        f"cost: distance computations per query at that recall@{first.key.k}{ties} = vectors "
        "scanned in the probed lists, every copy counted, + comparisons with list centres (nlist, "
        "or FAISS's own count of an HNSW search) + other work in units of one distance; "
        f"x: k-means cost / this cost, above 1 means fewer{seeds if several else ''}; "
        "-: the curve does not cross that recall; "
        f"~: read off between two points more than {WIDE_GAP:g} of recall apart.",
        "entries/vector: lists that hold a vector, on average; bytes/vector: codes, ids, list "
        f"headers and centres; QPS: queries per second, {first.key.threads} threads, best pass; "
        "train s: the start and all iterations; methods that share a mixture are each charged "
        f"for it; {_training(points)}.",
        *_more(points),
    ]


def _more(points: Sequence[OperatingPoint]) -> list[str]:
    """Sentences on what only some tables have."""
    sentences = [_BUSY] if is_busy(points) else []
    if has_several_plain(points):
        sentences.append(
            "x best, and x over all K: the least cost (or time) of FAISS's IVF over all K here, "
            "flat or HNSW coarse quantizer, uncompressed / this one; seeds paired."
        )
    if any(point.key.ef_search for point in points):
        sentences.append(
            "coarse=hnsw: nprobe and efSearch (32, 64, 128, nprobe at least) are swept together, "
            "and the best of both counts."
        )
    if any("codec=" in point.key.method for point in points):
        sentences.append(CONVENTION + "; how many are ranked again is swept too.")
    return sentences


def _training(points: Sequence[OperatingPoint]) -> str:
    text = f"same training rows, at most {points[0].key.iterations} iterations of EM"
    if any("rows_of_cells" in point.settings for point in points):
        text += "; cells learned from all vectors"
    baseline = [point.settings for point in points if point.key.method == BASELINE]
    if not baseline:
        return text
    values = {
        name: "/".join(map(str, dict.fromkeys(settings.get(name) for settings in baseline)))
        for name in ("niter", "max_points_per_centroid", "trainer")
    }
    trainer = values.pop("trainer").replace("None", "FAISS's k-means")
    return f"{text}; {trainer}, " + ", ".join(f"{k}={v}" for k, v in values.items())


def to_text(points: Sequence[OperatingPoint]) -> str:
    """The whole table as plain text, ending in a line break."""
    if not points:
        return "no points yet\n"
    first = points[0]
    lines = [
        f"{first.dataset}: {first.n:,} vectors of {first.d} dimensions, "
        f"{first.queries:,} queries, metric {first.metric}"
    ]
    with_best = has_several_plain(points)
    for block in summarize(points):
        table = [header(with_best)]
        for row in block.rows:
            below = ranges(row, with_best)
            table += [cells(row, with_best)] + ([below] if any(below) else [])
        lines += ["", block.title, *_align(table)]
    if best := best_rows(points):
        lines += ["", *_align([best_header(), *map(best_cells, best)])]
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
