"""Builds every method at every nlist and seed, and probes it from one list upwards."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gmm_ivf.eval.commands import UserError
from gmm_ivf.eval.method_spec import MethodSpec
from gmm_ivf.eval.methods import build
from gmm_ivf.eval.metrics import exact_scores, kth_scores, recall_per_query
from gmm_ivf.eval.progress import bar, clock, say
from gmm_ivf.eval.results import Key, OperatingPoint, Store, fingerprint
from gmm_ivf.eval.searchers import EF_SEARCH, REFINE_FACTORS, Probe, Searcher
from gmm_ivf.eval.training import BuildContext

# Cells are scanned in parts of an average list: shares of it that come below each nprobe.
_CELL_STEPS = {
    1: (0.06, 0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.32, 0.4, 0.5, 0.63, 0.8),
    2: (1.25, 1.6),
    3: (2.5,),
    4: (3.5,),
}
_LEAST_GAIN = 1e-3
_FLAT_STEPS = 3
_WARM_UP_QUERIES = 64


class BuildError(UserError):
    """A method cannot be built on this data; the message names method, reason and what to do."""


@dataclass(frozen=True)
class Plan:
    """Everything that a comparison fixes before it starts.

    Parameters
    ----------
    methods : tuple of MethodSpec
    nlists, seeds : tuple of int
        A method that names its own nlist is measured at that one only.
    k : int
        Neighbours searched and counted.
    nprobes : tuple of int or None
        None: `nprobe_grid`, until `stop_recall` is reached.
    device, threads, ties
        Stored with every point; `threads` must already be in force (see `set_threads`).
    points_per_centroid, train_limit : int, int or None
        Training rows are at most nlist times the first, and at most the second; drawn by the seed,
        the same for every method of that nlist.
    iterations : int
        Cap for k-means and EM alike.
    stop_recall : float
        The sweep ends at the first point of at least this recall.
    timing_seconds, timing_passes : float, int
        Every point is searched over all queries until either is reached; the fastest pass counts,
        since other work on the machine only ever slows one down.
    budget_seconds : float or None
        Nothing new is begun after so many seconds; None sets no limit.
    """

    methods: tuple[MethodSpec, ...]
    nlists: tuple[int, ...]
    seeds: tuple[int, ...]
    k: int
    nprobes: tuple[int, ...] | None
    device: str
    threads: int
    ties: str
    points_per_centroid: int
    iterations: int
    stop_recall: float
    timing_seconds: float
    timing_passes: int
    train_limit: int | None = None
    budget_seconds: float | None = None

    def groups(self) -> dict[int, list[MethodSpec]]:
        """Methods by nlist, none of them naming it any more."""
        found: dict[int, list[MethodSpec]] = {}
        for nlist in (*self.nlists, *(spec.get("nlist") for spec in self.methods)):
            if nlist is not None:
                found[nlist] = []
        for spec in self.methods:
            own = spec.get("nlist")
            for nlist in (own,) if own else self.nlists:
                found[nlist].append(spec.without("nlist"))
        return {nlist: list(dict.fromkeys(specs)) for nlist, specs in found.items() if specs}

    def train_rows(self, n: int, nlist: int) -> int:
        """Rows that n vectors give for training nlist lists."""
        return min(n, nlist * self.points_per_centroid, self.train_limit or n)


@dataclass(frozen=True)
class Bench:
    """A data set ready to be judged on: its true k-th scores are known in float64."""

    dataset: Any
    fingerprint: str
    kth: np.ndarray

    @classmethod
    def prepare(cls, dataset: Any, k: int) -> "Bench":
        """Compute the k-th scores, and the ground truth first where the data set lacks it."""
        truth = dataset.ground_truth
        if truth is None or truth.shape[1] < k:
            from gmm_ivf.datasets.ground_truth import exact_neighbors

            with clock(f"exact {k} nearest neighbours of {len(dataset.query)} queries"):
                truth, _ = exact_neighbors(dataset.base, dataset.query, k, dataset.metric)
        kth = kth_scores(dataset.base, dataset.query, truth, k, dataset.metric)
        return cls(dataset, fingerprint(dataset.base, dataset.query, dataset.metric), kth)


def nprobe_grid(nlist: int) -> list[int]:
    """1 to 16 one by one, then steps of at most 1.2, ending at `nlist`."""
    grid = list(range(1, min(nlist, 16) + 1))
    while grid[-1] < nlist:
        grid.append(min(nlist, int(grid[-1] * 1.2)))
    return grid


def training_rows(base: Any, limit: int, seed: int) -> np.ndarray:
    """All rows of `base`, or `limit` of them drawn without replacement, as contiguous float32."""
    if len(base) <= limit:
        rows = base[:]
    else:
        drawn = np.random.default_rng(seed).choice(len(base), size=limit, replace=False)
        rows = base[np.sort(drawn)]
    return np.ascontiguousarray(rows, dtype=np.float32)


class Outcome(NamedTuple):
    """Points of a plan, the titles of curves that the budget left out or cut, and failed builds."""

    points: list[OperatingPoint]
    left_out: list[str]
    failed: list[BuildError]


def run(plan: Plan, bench: Bench, store: Store, environment: dict) -> Outcome:
    """Measure what the store does not hold yet, and gather what it holds.

    An index is built only when one of its points is missing. Points are stored one by one, so
    that an interrupted run loses at most the one being measured. A method that refuses the data
    leaves the others alone.
    """
    outcome = Outcome([], [], [])
    deadline = time.monotonic() + (plan.budget_seconds or math.inf)
    for nlist, methods in plan.groups().items():
        for seed in plan.seeds:
            context = _Lazy(lambda n=nlist, s=seed: _context(plan, bench, n, s))
            for spec in methods:
                curve = _Curve(plan, bench, store, environment, spec, nlist, seed, deadline)
                try:
                    points, is_whole = _measure_curve(curve, context)
                except BuildError as error:
                    outcome.failed.append(error)
                    continue
                outcome.points.extend(points)
                outcome.left_out.extend([] if is_whole else [curve.title])
    return outcome


class _Lazy:
    """Calls `make` on first use and keeps what it returned."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._value: Any = None

    def get(self) -> Any:
        if self._value is None:
            self._value = self._make()
        return self._value


@dataclass(frozen=True)
class _Curve:
    """One method at one nlist and seed."""

    plan: Plan
    bench: Bench
    store: Store
    environment: dict[str, Any]
    spec: MethodSpec
    nlist: int
    seed: int
    deadline: float

    @property
    def title(self) -> str:
        return f"{self.spec}, nlist {self.nlist}, seed {self.seed}"

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def key(self, probe: Probe) -> Key:
        plan = self.plan
        return Key(
            fingerprint=self.bench.fingerprint,
            method=str(self.spec),
            nlist=self.nlist,
            k=plan.k,
            nprobe=probe.nprobe,
            seed=self.seed,
            device=plan.device,
            threads=plan.threads,
            train_rows=plan.train_rows(self.bench.dataset.n, self.nlist),
            iterations=plan.iterations,
            ties=plan.ties,
            ef_search=probe.ef_search,
            refine_factor=probe.refine_factor,
            max_codes=probe.max_codes,
        )

    def nprobes(self) -> list[int]:
        given = self.plan.nprobes
        if given is None:
            return nprobe_grid(self.nlist)
        return sorted({min(nprobe, self.nlist) for nprobe in given})

    def ladders(self, nprobe: int) -> list[list[Probe]]:
        """Searches of so many lists, one ladder of rising re-ranking for each breadth and limit."""
        is_graph = self.spec.get("coarse", "flat") != "flat"
        breadths = sorted({max(nprobe, ef) for ef in EF_SEARCH}) if is_graph else [0]
        factors = REFINE_FACTORS if self.spec.get("refine") else (0,)
        return [
            [Probe(nprobe, ef, factor, limit) for factor in factors]
            for limit in self._limits(nprobe)
            for ef in breadths
        ]

    def _limits(self, nprobe: int) -> list[int]:
        """Most entries scanned: finer steps where a layout can stop between lists."""
        shares = _CELL_STEPS.get(nprobe, ()) if self.spec.name.endswith("-cells") else ()
        mean = self.bench.dataset.n / self.nlist
        return [*(max(1, round(share * mean)) for share in shares), 0]


def _context(plan: Plan, bench: Bench, nlist: int, seed: int) -> BuildContext:
    dataset = bench.dataset
    return BuildContext(
        base=dataset.base,
        train=training_rows(dataset.base, plan.train_rows(dataset.n, nlist), seed),
        metric=dataset.metric,
        nlist=nlist,
        seed=seed,
        iterations=plan.iterations,
        device=plan.device,
    )


def _measure_curve(curve: _Curve, context: _Lazy) -> tuple[list[OperatingPoint], bool]:
    """Points of a curve, and whether they are all that it wants."""
    plan = curve.plan
    searcher = _Lazy(lambda: _build(curve, context.get()))
    points: list[OperatingPoint] = []
    known = len(curve.store)
    nprobes = curve.nprobes()
    best: list[float] = []
    is_whole = True
    with bar(len(nprobes), curve.title) as progress:
        for nprobe in nprobes:
            found, is_whole = _measure_nprobe(curve, searcher, nprobe)
            points += found
            progress.update()
            best.append(max((point.recall for point in found), default=0.0))
            if not is_whole or (plan.nprobes is None and _is_enough(best, plan.stop_recall)):
                break
    known = len(points) - (len(curve.store) - known)
    if points:
        found_too = f", {known} of them found in {curve.store.path.name}" if known else ""
        say(
            f"{curve.title}: {len(points)} points{found_too}, "
            f"recall {points[-1].recall:.3f} at nprobe {points[-1].key.nprobe}"
        )
    return points, is_whole


def _is_enough(best: list[float], stop_recall: float) -> bool:
    """Whether the recalls found so far, by rising nprobe, end a sweep."""
    # A codec may end below the recall wanted; the dense part of the grid is always measured.
    is_flat = len(best) > 16 + _FLAT_STEPS and best[-1] < best[-1 - _FLAT_STEPS] + _LEAST_GAIN
    return best[-1] >= stop_recall or is_flat


def _measure_nprobe(
    curve: _Curve, searcher: _Lazy, nprobe: int
) -> tuple[list[OperatingPoint], bool]:
    """All searches of so many lists that tell something; False when time ran out before."""
    points: list[OperatingPoint] = []
    for ladder in curve.ladders(nprobe):
        last = -1.0
        for probe in ladder:
            point = curve.store.get(curve.key(probe))
            if point is None:
                if curve.is_late:
                    return points, False
                point = _measure_point(curve, searcher.get(), probe)
                curve.store.append(point)
            points.append(point)
            # More re-ranking than helps costs more and finds nothing.
            if point.recall < last + _LEAST_GAIN:
                break
            last = point.recall
    return points, True


def _build(curve: _Curve, context: BuildContext) -> Searcher:
    with clock(f"building {curve.title}"):
        try:
            searcher = build(curve.spec, context)
        except (ValueError, NotImplementedError) as error:
            raise BuildError(f"{curve.title} cannot be built: {error}") from error
        probe = curve.ladders(1)[0][0]
        searcher.search(curve.bench.dataset.query[:_WARM_UP_QUERIES], curve.plan.k, probe)
    return searcher


def _measure_point(curve: _Curve, searcher: Searcher, probe: Probe) -> OperatingPoint:
    plan, dataset = curve.plan, curve.bench.dataset
    queries, k = dataset.query, plan.k
    passes: list[float] = []
    while True:
        start = time.perf_counter()
        ids, _ = searcher.search(queries, k, probe)
        passes.append(time.perf_counter() - start)
        if sum(passes) >= plan.timing_seconds or len(passes) >= plan.timing_passes:
            break
    cost = searcher.cost(queries, k, probe)
    scores = exact_scores(dataset.base, queries, ids, dataset.metric)
    recall = recall_per_query(ids, scores, curve.bench.kth, dataset.metric, plan.ties)
    report = searcher.report
    return OperatingPoint(
        key=curve.key(probe),
        dataset=dataset.name,
        n=dataset.n,
        d=dataset.d,
        queries=len(queries),
        metric=dataset.metric,
        recall=float(recall.mean()),
        scanned=float(cost.scanned.mean()),
        coarse=float(cost.coarse.mean()),
        ranking=float(cost.ranking.mean()),
        scan_unit=cost.scan_unit,
        queries_per_second=len(queries) / min(passes),
        passes=len(passes),
        entries_per_vector=report.entries_per_vector,
        bytes_per_vector=report.bytes_per_vector,
        imbalance=report.imbalance,
        train_seconds=report.train_seconds,
        add_seconds=report.add_seconds,
        settings=report.settings,
        environment=curve.environment,
    )
