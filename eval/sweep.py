"""Builds every method at every nlist and seed, and probes it from one list upwards."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gmm_ivf.eval.method_spec import MethodSpec
from gmm_ivf.eval.methods import BuildContext, Searcher, build
from gmm_ivf.eval.metrics import exact_scores, kth_scores, recall_per_query
from gmm_ivf.eval.progress import bar, clock, say
from gmm_ivf.eval.results import Key, OperatingPoint, Store, fingerprint

_WARM_UP_QUERIES = 64


class BuildError(ValueError):
    """A method cannot be built on this data; the message names method, reason and what to do."""


@dataclass(frozen=True)
class Plan:
    """Everything that a comparison fixes before it starts.

    Parameters
    ----------
    methods : tuple of MethodSpec
    nlists, seeds : tuple of int
    k : int
        Neighbours searched and counted.
    nprobes : tuple of int or None
        None: `nprobe_grid`, until `stop_recall` is reached.
    device, threads, ties
        Stored with every point; `threads` must already be in force (see `set_threads`).
    points_per_centroid : int
        Training rows are at most nlist times this, drawn by the seed, the same for every method.
    iterations : int
        Cap for k-means and EM alike.
    stop_recall : float
        The sweep ends at the first point of at least this recall.
    timing_seconds, timing_passes : float, int
        Every point is searched over all queries until either is reached; the fastest pass counts,
        since other work on the machine only ever slows one down.
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


def run(plan: Plan, bench: Bench, store: Store, environment: dict) -> list[OperatingPoint]:
    """Measure what the store does not hold yet.

    An index is built only when one of its points is missing. Points are stored one by one, so
    that an interrupted run loses at most the one being measured.

    Returns
    -------
    list of OperatingPoint
        All points of the plan, those found in the store included.

    Raises
    ------
    BuildError
        If a method refuses the data; what was measured before is in the store.
    """
    points: list[OperatingPoint] = []
    for nlist in plan.nlists:
        for seed in plan.seeds:
            context = _Lazy(lambda n=nlist, s=seed: _context(plan, bench, n, s))
            for spec in plan.methods:
                curve = _Curve(plan, bench, store, environment, spec, nlist, seed)
                points += _measure_curve(curve, context)
    return points


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

    @property
    def title(self) -> str:
        return f"{self.spec}, nlist {self.nlist}, seed {self.seed}"

    def key(self, nprobe: int) -> Key:
        plan = self.plan
        return Key(
            fingerprint=self.bench.fingerprint,
            method=str(self.spec),
            nlist=self.nlist,
            k=plan.k,
            nprobe=nprobe,
            seed=self.seed,
            device=plan.device,
            threads=plan.threads,
            train_rows=min(self.bench.dataset.n, self.nlist * plan.points_per_centroid),
            iterations=plan.iterations,
            ties=plan.ties,
        )

    def nprobes(self) -> Iterator[int]:
        given = self.plan.nprobes
        if given is None:
            yield from nprobe_grid(self.nlist)
        else:
            yield from sorted({min(nprobe, self.nlist) for nprobe in given})


def _context(plan: Plan, bench: Bench, nlist: int, seed: int) -> BuildContext:
    dataset = bench.dataset
    return BuildContext(
        base=dataset.base,
        train=training_rows(dataset.base, nlist * plan.points_per_centroid, seed),
        metric=dataset.metric,
        nlist=nlist,
        seed=seed,
        iterations=plan.iterations,
        device=plan.device,
    )


def _measure_curve(curve: _Curve, context: _Lazy) -> list[OperatingPoint]:
    plan = curve.plan
    searcher = _Lazy(lambda: _build(curve, context.get()))
    points: list[OperatingPoint] = []
    measured = 0
    nprobes = list(curve.nprobes())
    with bar(len(nprobes), curve.title) as progress:
        for nprobe in nprobes:
            point = curve.store.get(curve.key(nprobe))
            if point is None:
                point = _measure_point(curve, searcher.get(), nprobe)
                curve.store.append(point)
                measured += 1
            points.append(point)
            progress.update()
            if plan.nprobes is None and point.recall >= plan.stop_recall:
                break
    known = len(points) - measured
    found = f", {known} of them found in {curve.store.path.name}" if known else ""
    say(
        f"{curve.title}: {len(points)} points{found}, "
        f"recall {points[-1].recall:.3f} at nprobe {points[-1].key.nprobe}"
    )
    return points


def _build(curve: _Curve, context: BuildContext) -> Searcher:
    with clock(f"building {curve.title}"):
        try:
            searcher = build(curve.spec, context)
        except ValueError as error:
            raise BuildError(f"{curve.title} cannot be built: {error}") from error
        searcher.search(curve.bench.dataset.query[:_WARM_UP_QUERIES], curve.plan.k, 1)
    return searcher


def _measure_point(curve: _Curve, searcher: Searcher, nprobe: int) -> OperatingPoint:
    plan, dataset = curve.plan, curve.bench.dataset
    queries, k = dataset.query, plan.k
    passes: list[float] = []
    while True:
        start = time.perf_counter()
        ids, _ = searcher.search(queries, k, nprobe)
        passes.append(time.perf_counter() - start)
        if sum(passes) >= plan.timing_seconds or len(passes) >= plan.timing_passes:
            break
    cost = searcher.cost(queries, nprobe)
    scores = exact_scores(dataset.base, queries, ids, dataset.metric)
    recall = recall_per_query(ids, scores, curve.bench.kth, dataset.metric, plan.ties)
    report = searcher.report
    return OperatingPoint(
        key=curve.key(nprobe),
        dataset=dataset.name,
        n=dataset.n,
        d=dataset.d,
        queries=len(queries),
        metric=dataset.metric,
        recall=float(recall.mean()),
        scanned=float(cost.scanned.mean()),
        coarse=float(cost.coarse.mean()),
        ranking=float(cost.ranking.mean()),
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
