"""The methods that `eval.recall` compares: how each is built, searched and counted."""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from gmm_ivf.eval.environment import require_faiss
from gmm_ivf.eval.method_spec import DEFAULTS, FIT_KEYS, RESPONSIBILITY, MethodSpec, rule_of

_ADD_BYTES = 64 << 20
_LIST_HEADER_BYTES = 48  # two std::vector headers, codes and ids, of FAISS's ArrayInvertedLists
_ID_BYTES = 8


@dataclass(frozen=True)
class SearchCost:
    """Distance computations of one search, one entry per query: float64 arrays of shape (q,)."""

    scanned: np.ndarray
    coarse: np.ndarray
    ranking: np.ndarray


@dataclass(frozen=True)
class BuildReport:
    """What a build cost and holds; `settings` are those that the builder chose or was given."""

    train_seconds: float
    add_seconds: float
    entries_per_vector: float
    bytes_per_vector: float
    imbalance: float
    settings: dict[str, Any]


class Searcher(Protocol):
    """A built index."""

    report: BuildReport

    def search(self, queries: np.ndarray, k: int, nprobe: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (int64) and distances, both (q, k), best first. This is what is timed."""
        ...

    def cost(self, queries: np.ndarray, nprobe: int) -> SearchCost:
        """Cost of the search just made with the same arguments. Not timed."""
        ...


@dataclass(frozen=True)
class BuildContext:
    """What every method of one comparison shares: data, training rows, K and the seed.

    Parameters
    ----------
    base : array-like of shape (n, d), float32
    train : ndarray of shape (rows, d), float32
        Training rows, the same for every method.
    metric : {"l2", "ip", "cosine"}
        Cosine data is normalised already, so it is searched by inner product.
    nlist, seed, iterations : int
        `iterations` caps k-means and EM alike.
    device : {"cpu", "cuda"}
        Where EM runs; FAISS runs on the CPU.
    quantizers : dict
        Trained mixtures and k-means by their options. Methods that differ in assignment only
        share one.
    """

    base: Any
    train: np.ndarray
    metric: str
    nlist: int
    seed: int
    iterations: int
    device: str
    quantizers: dict[MethodSpec, Any] = field(default_factory=dict)

    @property
    def faiss_metric(self) -> int:
        """FAISS's number for the metric."""
        faiss = require_faiss()
        return faiss.METRIC_L2 if self.metric == "l2" else faiss.METRIC_INNER_PRODUCT


class ListSearcher:
    """A stock IVF index; its cost comes from the sizes of the lists that a query probes."""

    def __init__(self, index: Any, train_seconds: float, add_seconds: float, settings: dict):
        self._index = index
        self._sizes = list_sizes(index)
        n = index.ntotal
        self.report = BuildReport(
            train_seconds=train_seconds,
            add_seconds=add_seconds,
            entries_per_vector=float(self._sizes.sum() / n),
            bytes_per_vector=payload_bytes(index) / n,
            imbalance=imbalance(self._sizes),
            settings=settings,
        )

    def search(self, queries: np.ndarray, k: int, nprobe: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Searcher`."""
        params = require_faiss().SearchParametersIVF(nprobe=nprobe)
        distances, ids = self._index.search(queries, k, params=params)
        return ids, distances

    def cost(self, queries: np.ndarray, nprobe: int) -> SearchCost:
        """See `Searcher`."""
        _, lists = self._index.quantizer.search(queries, nprobe)
        # FAISS writes -1 where it has no list to offer; such a probe scans nothing.
        scanned = np.where(lists >= 0, self._sizes[lists], 0).sum(axis=1, dtype=np.float64)
        coarse = np.full(len(queries), float(self._index.nlist))
        return SearchCost(scanned, coarse, np.zeros(len(queries)))


class SoftSearcher:
    """`IndexIVFGMM`, which counts its own searches."""

    def __init__(self, soft: Any, train_seconds: float, add_seconds: float, settings: dict):
        self._soft = soft
        stats = soft.stats()
        self.report = BuildReport(
            train_seconds=train_seconds,
            add_seconds=add_seconds,
            entries_per_vector=float(stats["entries_per_vector"]),
            bytes_per_vector=float(stats["bytes_per_vector"]),
            imbalance=float(stats["imbalance"]),
            settings=settings,
        )

    def search(self, queries: np.ndarray, k: int, nprobe: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Searcher`."""
        self._soft.nprobe = nprobe
        distances, ids = self._soft.search(queries, k)
        return ids, distances

    def cost(self, queries: np.ndarray, nprobe: int) -> SearchCost:
        """See `Searcher`."""
        last = self._soft.last_search
        shape = (len(queries),)
        return SearchCost(
            *(
                np.broadcast_to(np.asarray(part, dtype=np.float64), shape)
                for part in (last.scanned, last.coarse, last.ranking)
            )
        )


def build(spec: MethodSpec, context: BuildContext) -> Searcher:
    """Train and fill the index of a method, timing both steps."""
    return _BUILDERS[spec.name](spec, context)


def list_sizes(index: Any) -> np.ndarray:
    """Entries of every list of a FAISS IVF index: int64 of shape (nlist,)."""
    sizes = (index.invlists.list_size(i) for i in range(index.nlist))
    return np.fromiter(sizes, dtype=np.int64, count=index.nlist)


def payload_bytes(index: Any) -> int:
    """Bytes of an IVF index: codes, ids, list headers and the float32 list centres.

    Spare capacity that FAISS's growing lists may hold is not in it.
    """
    entries = int(list_sizes(index).sum())
    per_list = _LIST_HEADER_BYTES + 4 * index.d
    return entries * (index.code_size + _ID_BYTES) + index.nlist * per_list


def imbalance(sizes: np.ndarray) -> float:
    """FAISS's imbalance factor, 1 for equal lists: nlist * sum(s^2) / sum(s)^2."""
    sizes = sizes.astype(np.float64)
    return float(len(sizes) * (sizes**2).sum() / sizes.sum() ** 2)


def blocks(base: Any) -> Iterator[np.ndarray]:
    """Consecutive rows of `base` as contiguous float32, 64 MiB at a time."""
    rows = max(1, _ADD_BYTES // (4 * base.shape[1]))
    for start in range(0, len(base), rows):
        yield np.ascontiguousarray(base[start : start + rows], dtype=np.float32)


def _build_kmeans(spec: MethodSpec, context: BuildContext) -> Searcher:
    quantizer, seconds, settings = _trained_kmeans(spec, context)
    index = _empty_index(quantizer, context)
    return ListSearcher(index, seconds, _fill(index, context.base), settings)


def _build_kmeans_soft(spec: MethodSpec, context: BuildContext) -> Searcher:
    """k-means under a rule; for inner products its centroids are normalised, as rules need."""
    from gmm_ivf.quantizer import GMMQuantizer

    trained, seconds, settings = _trained_kmeans(spec, context)
    centroids = trained.reconstruct_n(0, context.nlist)
    quantizer = GMMQuantizer.from_centroids(centroids, context.faiss_metric)
    return _filled_by_rule(spec, context, quantizer, seconds, settings)


def _trained_kmeans(spec: MethodSpec, context: BuildContext) -> tuple[Any, float, dict[str, Any]]:
    """k-means of a spec, its seconds and settings; trained once and charged to each in full."""
    niter = spec.get("niter", context.iterations)
    fit = MethodSpec("kmeans", (("niter", niter),))
    if fit not in context.quantizers:
        quantizer = require_faiss().IndexFlat(context.train.shape[1], context.faiss_metric)
        index = _empty_index(quantizer, context)
        cp = index.cp
        cp.niter = niter
        cp.seed = context.seed
        # FAISS would sample 256 rows per centroid and warn below 39: all rows given are used.
        cp.max_points_per_centroid = -(-len(context.train) // context.nlist)
        cp.min_points_per_centroid = 1
        settings = {
            "niter": cp.niter,
            "nredo": cp.nredo,
            "max_points_per_centroid": cp.max_points_per_centroid,
        }
        start = time.perf_counter()
        index.train(context.train)
        context.quantizers[fit] = (quantizer, time.perf_counter() - start, settings)
    quantizer, seconds, settings = context.quantizers[fit]
    return quantizer, seconds, dict(settings)


def _empty_index(quantizer: Any, context: BuildContext) -> Any:
    d = context.train.shape[1]
    return require_faiss().IndexIVFFlat(quantizer, d, context.nlist, context.faiss_metric)


def _build_hard(spec: MethodSpec, context: BuildContext) -> Searcher:
    quantizer, settings = _trained_quantizer(spec, context)
    index = _empty_index(quantizer, context)
    return ListSearcher(index, settings["fit_seconds"], _fill(index, context.base), settings)


def _build_soft(spec: MethodSpec, context: BuildContext) -> Searcher:
    from gmm_ivf.index import IndexIVFGMM

    quantizer, settings = _trained_quantizer(spec, context)
    if rule_of(spec) != RESPONSIBILITY:
        return _filled_by_rule(spec, context, quantizer, settings["fit_seconds"], settings)
    options = {key: value for key, value in spec.options if key not in FIT_KEYS}
    options.setdefault("max_lists", DEFAULTS["gmm-soft"]["max_lists"])
    if "tau" in options:
        options["tau"] = options["tau"].resolve(context.nlist)
    else:
        options.setdefault("replication", DEFAULTS["gmm-soft"]["replication"])
    soft = IndexIVFGMM(_empty_index(quantizer, context), quantizer, **options)
    start = time.perf_counter()
    soft.train(context.train)  # the mixture is trained already: solves the threshold only
    threshold_seconds = time.perf_counter() - start
    add_seconds = _fill(soft, context.base)
    settings |= options | {"tau": soft.tau, "threshold_seconds": threshold_seconds}
    train_seconds = settings["fit_seconds"] + threshold_seconds
    return SoftSearcher(soft, train_seconds, add_seconds, settings)


def _filled_by_rule(
    spec: MethodSpec, context: BuildContext, quantizer: Any, train_seconds: float, settings: dict
) -> Searcher:
    """An index whose rule goes by geometry: there is nothing to train but the centroids."""
    from gmm_ivf.index import IndexIVFGMM

    rule = rule_of(spec)
    max_lists = spec.get("max_lists", DEFAULTS[spec.name]["max_lists"])
    soft = IndexIVFGMM(_empty_index(quantizer, context), quantizer, rule=rule, max_lists=max_lists)
    add_seconds = _fill(soft, context.base)
    settings = settings | {"rule": str(rule), "max_lists": max_lists}
    return SoftSearcher(soft, train_seconds, add_seconds, settings)


def _trained_quantizer(spec: MethodSpec, context: BuildContext) -> tuple[Any, dict[str, Any]]:
    """The mixture of a spec, fitted once per comparison and charged to each method in full."""
    from gmm_ivf.quantizer import GMMQuantizer

    options = {"covariance_type": DEFAULTS[spec.name]["covariance_type"]}
    options |= {"max_iter": context.iterations}
    options |= {key: value for key, value in spec.options if key in FIT_KEYS}
    fit = MethodSpec("gmm", tuple(sorted(options.items())))
    if fit not in context.quantizers:
        quantizer = GMMQuantizer(
            context.train.shape[1],
            context.nlist,
            context.faiss_metric,
            random_state=context.seed,
            device=context.device,
            **options,
        )
        start = time.perf_counter()
        with warnings.catch_warnings():
            # The cap on iterations is meant; `converged` is in the settings of every row.
            warnings.filterwarnings("ignore", "EM did not converge", ConvergenceWarning)
            quantizer.train(context.train)
        context.quantizers[fit] = (quantizer, time.perf_counter() - start)
    quantizer, seconds = context.quantizers[fit]
    mixture = quantizer.mixture
    settings = options | {
        "fit_seconds": seconds,
        "init_params": options.get("init_params", mixture.init_params),
        "n_iter": int(mixture.n_iter_),
        "converged": bool(mixture.converged_),
        "reseeded": int(quantizer.reseeded),
        "backend": mixture.backend_,
        "precision": mixture.precision_,
    }
    return quantizer, settings


def _fill(index: Any, base: Any) -> float:
    start = time.perf_counter()
    for block in blocks(base):
        index.add(block)
    return time.perf_counter() - start


_BUILDERS: dict[str, Callable[[MethodSpec, BuildContext], Searcher]] = {
    "kmeans": _build_kmeans,
    "gmm": _build_hard,
    "gmm-soft": _build_soft,
    "kmeans-soft": _build_kmeans_soft,
}
