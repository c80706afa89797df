"""What curves say: cost and speed at fixed recall, ratios to k-means, the best of each family."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gmm_ivf.eval.curves import Curve, Curves, curve_cost, curve_gap, curve_seconds, curves
from gmm_ivf.eval.method_spec import MethodSpec, parse_method
from gmm_ivf.eval.results import OperatingPoint

TARGETS = (0.80, 0.90, 0.95, 0.99)
#: Recalls at which the best over all K are compared.
BEST_TARGETS = (0.90, 0.95)
BASELINE = "kmeans"
#: Storage up to which an index counts as one that stores each vector once.
ONCE = 1.1
#: Recall between two points from which on a cost read off between them is marked.
WIDE_GAP = 0.05
SCHEMA = 1
_ENVELOPE_RECALLS = [percent / 100 for percent in range(50, 100)]


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
    """One method at one nlist; `costs`, `ratios` and `is_rough` follow `TARGETS`.

    `to_best` follows `BEST_TARGETS`: cost of the best plain FAISS index over all K / this cost.
    """

    method: str
    nlist: int
    seeds: tuple[int, ...]
    costs: tuple[Spread | None, ...]
    ratios: tuple[Spread | None, ...]
    is_rough: tuple[bool, ...]
    to_best: tuple[Spread | None, ...]
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
    baseline: str
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """Heading of the block, in words."""
        seeds = ", ".join(map(str, self.seeds))
        against = "" if self.baseline == BASELINE else f", x against {self.baseline}"
        return (
            f"K = nlist = {self.nlist:,}, N/K = {self.n / self.nlist:,.0f}, "
            f"trained on {self.train_rows:,} rows, seed{'s' * (len(self.seeds) > 1)} {seeds}"
            + against
        )


@dataclass(frozen=True)
class Best:
    """The best curve of a family at one recall, over all K; `ratio` is to that of plain FAISS."""

    family: str
    target: float
    by: str
    row: Row
    value: float
    ratio: Spread | None


def ratio_to_baseline(curve: Curve | None, baseline: Curve | None, target: float) -> float | None:
    """Baseline cost over this cost at the same recall: above 1 means fewer computations."""
    ours, theirs = curve_cost(curve, target), curve_cost(baseline, target)
    return None if ours is None or theirs is None else theirs / ours


def is_plain_faiss(spec: MethodSpec) -> bool:
    """Whether a method is FAISS's own IVF over uncompressed vectors, by any coarse quantizer."""
    return spec.name == BASELINE and spec.get("codec", "Flat") == "Flat"


def _family(spec: MethodSpec, entries: float) -> str:
    if is_plain_faiss(spec):
        return FAISS
    if spec.get("codec", "Flat") != "Flat":
        return FAISS_CODES if spec.name == BASELINE else OUR_CODES
    return OURS_ONCE if entries <= ONCE else OURS


FAISS = "FAISS IVF, flat or HNSW"
FAISS_CODES = "FAISS, codes"
OURS_ONCE = f"ours, up to {ONCE} entries a vector"
OURS = "ours, more entries"
OUR_CODES = "ours, codes"
_FAMILIES = (FAISS, FAISS_CODES, OURS_ONCE, OURS, OUR_CODES)


def summarize(points: Sequence[OperatingPoint]) -> list[Block]:
    """One block per nlist. Ratios are paired: each seed against k-means of the same seed."""
    by_key = curves(points)
    best = {target: _best_plain(by_key, target) for target in BEST_TARGETS}
    blocks = []
    for nlist in dict.fromkeys(nlist for nlist, _, _ in by_key):
        own = {key: curve for key, curve in by_key.items() if key[0] == nlist}
        first = next(iter(own.values()))[0]
        baseline = _baseline(by_key, nlist)
        blocks.append(
            Block(
                nlist=nlist,
                n=first.n,
                train_rows=first.key.train_rows,
                seeds=tuple(dict.fromkeys(seed for _, _, seed in own)),
                baseline=baseline,
                rows=tuple(
                    _row(nlist, method, by_key, best, baseline)
                    for method in dict.fromkeys(method for _, method, _ in own)
                ),
            )
        )
    return blocks


def has_several_plain(points: Sequence[OperatingPoint]) -> bool:
    """Whether there is more than one plain FAISS index to be the best of."""
    return len(_plain(curves(points))) > 1


def _plain(by_key: Curves) -> list[tuple[int, str]]:
    kinds = dict.fromkeys((nlist, method) for nlist, method, _ in by_key)
    return [(nlist, method) for nlist, method in kinds if is_plain_faiss(parse_method(method))]


def _seeds(by_key: Curves, nlist: int, method: str) -> list[int]:
    return [seed for k, m, seed in by_key if (k, m) == (nlist, method)]


def _best_plain(by_key: Curves, target: float) -> tuple[int, str] | None:
    """(nlist, method) of the plain FAISS index of least mean cost."""
    costs = {}
    for nlist, method in _plain(by_key):
        seeds = _seeds(by_key, nlist, method)
        costs[nlist, method] = Spread.of(
            [curve_cost(by_key[nlist, method, seed], target) for seed in seeds]
        )
    known = {kind: cost.mean for kind, cost in costs.items() if cost is not None}
    return min(known, key=lambda kind: known[kind]) if known else None


def _baseline(by_key: Curves, nlist: int) -> str:
    """k-means with a flat coarse quantizer, or where it is missing the first plain FAISS index."""
    own = [method for k, method in _plain(by_key) if k == nlist]
    return BASELINE if BASELINE in own or not own else own[0]


def _row(
    nlist: int,
    method: str,
    by_key: Curves,
    best: Mapping[float, tuple[int, str] | None],
    baseline: str,
) -> Row:
    seeds = _seeds(by_key, nlist, method)
    own = [by_key[nlist, method, seed] for seed in seeds]

    def ratio(target: float, other: tuple[int, str] | None) -> Spread | None:
        # A rival that was measured with fewer seeds is compared on those.
        shared = [seed for seed in seeds if other and (*other, seed) in by_key]
        return Spread.of(
            [
                ratio_to_baseline(by_key[nlist, method, s], by_key[(*other, s)], target)
                for s in shared
                if other
            ]
        )

    def mean(value: Callable[[OperatingPoint], float]) -> float:
        return sum(value(curve[0]) for curve in own) / len(own)

    seconds = [curve_seconds(curve, 0.90) for curve in own]
    return Row(
        method=method,
        nlist=nlist,
        seeds=tuple(seeds),
        costs=tuple(Spread.of([curve_cost(c, t) for c in own]) for t in TARGETS),
        ratios=tuple(ratio(target, (nlist, baseline)) for target in TARGETS),
        is_rough=tuple(any(_is_rough(c, t) for c in own) for t in TARGETS),
        to_best=tuple(ratio(target, best[target]) for target in BEST_TARGETS),
        entries_per_vector=mean(lambda point: point.entries_per_vector),
        bytes_per_vector=mean(lambda point: point.bytes_per_vector),
        queries_per_second=Spread.of([None if s is None else 1 / s for s in seconds]),
        train_seconds=mean(lambda point: point.train_seconds),
        add_seconds=mean(lambda point: point.add_seconds),
    )


def _is_rough(curve: Curve, target: float) -> bool:
    gap = curve_gap(curve, target)
    return gap is not None and gap > WIDE_GAP


def bests(points: Sequence[OperatingPoint]) -> list[Best]:
    """The best of each family over all K at `BEST_TARGETS`, by cost, and by speed at the first."""
    by_key = curves(points)
    rows = [row for block in summarize(points) for row in block.rows]
    found: list[Best] = []
    for by, target in [*(("cost", t) for t in BEST_TARGETS), ("time", BEST_TARGETS[0])]:
        read = curve_cost if by == "cost" else curve_seconds
        winners = {}
        for row in rows:
            seeds = _seeds(by_key, row.nlist, row.method)
            values = {s: read(by_key[row.nlist, row.method, s], target) for s in seeds}
            mean = Spread.of(list(values.values()))
            family = _family(parse_method(row.method), row.entries_per_vector)
            if mean and (family not in winners or mean.mean < winners[family][1].mean):
                winners[family] = (row, mean, values)
        reference = winners[FAISS][2] if FAISS in winners else {}
        for family in _FAMILIES:
            if family in winners:
                row, mean, values = winners[family]
                ratios = [reference[s] / values[s] for s in values if s in reference]
                value = mean.mean if by == "cost" else 1 / mean.mean
                found.append(Best(family, target, by, row, value, Spread.of(ratios)))
    return found


def envelopes(points: Sequence[OperatingPoint]) -> dict[str, tuple[list[float], list[float]]]:
    """Least mean cost of each family over all K: recalls and costs, by family."""
    by_key = curves(points)
    kinds = dict.fromkeys((nlist, method) for nlist, method, _ in by_key)
    found: dict[str, tuple[list[float], list[float]]] = {}
    for family in _FAMILIES:
        own = []
        for nlist, method in kinds:
            mine = [by_key[nlist, method, seed] for seed in _seeds(by_key, nlist, method)]
            if _family(parse_method(method), mine[0][0].entries_per_vector) == family:
                own.append(mine)
        for recall in _ENVELOPE_RECALLS:
            costs = [Spread.of([curve_cost(curve, recall) for curve in mine]) for mine in own]
            known = [cost.mean for cost in costs if cost is not None]
            if known:
                x, y = found.setdefault(family, ([], []))
                x.append(recall)
                y.append(min(known))
    return found


def write_summary(points: Sequence[OperatingPoint], path: Path) -> None:
    """Write the rows of the table and the best over all K as JSON lines, anew."""
    lines = [_row_json(row, points[0]) for block in summarize(points) for row in block.rows]
    lines += [_best_json(best, points[0]) for best in bests(points)]
    text = "".join(json.dumps(line, sort_keys=True, allow_nan=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")


def _spread_json(spread: Spread | None) -> list[float] | None:
    return None if spread is None else [spread.mean, spread.low, spread.high]


def _row_json(row: Row, first: OperatingPoint) -> dict[str, Any]:
    """One method at one nlist; spreads are [mean, low, high], ratios above 1 are better."""
    at = {
        f"{target:.2f}": {
            "cost": _spread_json(cost),
            "ratio_to_kmeans": _spread_json(ratio),
            "is_rough": rough,
        }
        for target, cost, ratio, rough in zip(
            TARGETS, row.costs, row.ratios, row.is_rough, strict=True
        )
    }
    for target, spread in zip(BEST_TARGETS, row.to_best, strict=True):
        at[f"{target:.2f}"]["ratio_to_best_faiss"] = _spread_json(spread)
    return _common(first) | {
        "kind": "method",
        "method": row.method,
        "nlist": row.nlist,
        "seeds": row.seeds,
        "at": at,
        "entries_per_vector": row.entries_per_vector,
        "bytes_per_vector": row.bytes_per_vector,
        "queries_per_second_at_0.90": _spread_json(row.queries_per_second),
        "train_seconds": row.train_seconds,
        "add_seconds": row.add_seconds,
    }


def _best_json(best: Best, first: OperatingPoint) -> dict[str, Any]:
    return _common(first) | {
        "kind": "best",
        "family": best.family,
        "recall": best.target,
        "by": best.by,
        "method": best.row.method,
        "nlist": best.row.nlist,
        "cost" if best.by == "cost" else "queries_per_second": best.value,
        "ratio_to_best_faiss": _spread_json(best.ratio),
        "entries_per_vector": best.row.entries_per_vector,
        "bytes_per_vector": best.row.bytes_per_vector,
    }


def _common(first: OperatingPoint) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "dataset": first.dataset,
        "n": first.n,
        "d": first.d,
        "k": first.key.k,
        "threads": first.key.threads,
    }
