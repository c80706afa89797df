"""Centroids for the methods of one comparison: trained once, charged to each method in full."""

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from gmm_ivf.eval.environment import require_faiss
from gmm_ivf.eval.method_spec import DEFAULTS, FIT_KEYS, MethodSpec

_ADD_BYTES = 64 << 20


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
        Where EM runs, and k-means too where faiss has GPU support; searches run on the CPU.
    trained : dict
        Mixtures and k-means by their options. Methods that differ in assignment, coarse quantizer
        or codec only share one.
    """

    base: Any
    train: np.ndarray
    metric: str
    nlist: int
    seed: int
    iterations: int
    device: str
    trained: dict[MethodSpec, Any] = field(default_factory=dict)

    @property
    def d(self) -> int:
        """Dimensions."""
        return self.train.shape[1]

    @property
    def faiss_metric(self) -> int:
        """FAISS's number for the metric."""
        faiss = require_faiss()
        return faiss.METRIC_L2 if self.metric == "l2" else faiss.METRIC_INNER_PRODUCT


@dataclass(frozen=True)
class Centroids:
    """Trained list centres: (nlist, d) float32, the seconds they took, and how."""

    table: np.ndarray
    seconds: float
    settings: dict[str, Any]


def trained_kmeans(spec: MethodSpec, context: BuildContext) -> Centroids:
    """FAISS's k-means on all training rows, by its GPU code where that is installed and asked for.

    ``settings["trainer"]`` says which ran.
    """
    niter = spec.get("niter", context.iterations)
    fit = MethodSpec("kmeans", (("niter", niter),))
    if fit not in context.trained:
        faiss = require_faiss()
        clustering = faiss.Clustering(context.d, context.nlist)
        clustering.niter = niter
        clustering.seed = context.seed
        clustering.spherical = context.metric != "l2"
        # FAISS would sample 256 rows per centroid and warn below 39: all rows given are used.
        clustering.max_points_per_centroid = -(-len(context.train) // context.nlist)
        clustering.min_points_per_centroid = 1
        index, trainer = _kmeans_index(context)
        start = time.perf_counter()
        clustering.train(context.train, index)
        seconds = time.perf_counter() - start
        table = faiss.vector_to_array(clustering.centroids).reshape(context.nlist, context.d)
        settings = {
            "niter": clustering.niter,
            "nredo": clustering.nredo,
            "max_points_per_centroid": clustering.max_points_per_centroid,
            "trainer": trainer,
        }
        context.trained[fit] = Centroids(table, seconds, settings)
    return context.trained[fit]


def _kmeans_index(context: BuildContext) -> tuple[Any, str]:
    """The index that k-means assigns with, and its name."""
    faiss = require_faiss()
    flat = faiss.IndexFlat(context.d, context.faiss_metric)
    # By what is there, not by the package's name: every wheel is called faiss.
    if context.device == "cuda" and hasattr(faiss, "StandardGpuResources"):
        resources = faiss.StandardGpuResources()
        return faiss.index_cpu_to_gpu(resources, 0, flat), "faiss k-means, GPU"
    return flat, f"faiss k-means, CPU, {faiss.omp_get_max_threads()} threads"


def trained_mixture(spec: MethodSpec, context: BuildContext) -> tuple[Any, dict[str, Any]]:
    """The quantizer over the mixture of a spec, and its settings."""
    from gmm_ivf.quantizer import GMMQuantizer

    options = {"covariance_type": DEFAULTS[spec.name]["covariance_type"]}
    options |= {"max_iter": context.iterations}
    options |= {key: value for key, value in spec.options if key in FIT_KEYS}
    fit = MethodSpec("gmm", tuple(sorted(options.items())))
    if fit not in context.trained:
        quantizer = GMMQuantizer(
            context.d,
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
        context.trained[fit] = (quantizer, time.perf_counter() - start)
    quantizer, seconds = context.trained[fit]
    mixture = quantizer.mixture
    return quantizer, options | {
        "fit_seconds": seconds,
        "init_params": options.get("init_params", mixture.init_params),
        "n_iter": int(mixture.n_iter_),
        "converged": bool(mixture.converged_),
        "reseeded": int(quantizer.reseeded),
        "backend": mixture.backend_,
        "precision": mixture.precision_,
    }


def filled(index: Any, base: Any) -> float:
    """Add all rows of `base`; return the seconds that it took."""
    start = time.perf_counter()
    for block in blocks(base):
        index.add(block)
    return time.perf_counter() - start


def blocks(base: Any) -> Iterator[np.ndarray]:
    """Consecutive rows of `base` as contiguous float32, 64 MiB at a time."""
    rows = max(1, _ADD_BYTES // (4 * base.shape[1]))
    for start in range(0, len(base), rows):
        yield np.ascontiguousarray(base[start : start + rows], dtype=np.float32)
