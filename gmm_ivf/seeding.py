"""Starting points of EM: k-means on a subsample, k-means++, random rows or responsibilities."""

import warnings

import numpy as np
import torch
from sklearn.cluster import KMeans, kmeans_plusplus
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits
from torch import Tensor

from gmm_ivf.engine import Engine
from gmm_ivf.kernels import torch_backend
from gmm_ivf.kernels.components import (
    Components,
    IllDefinedCovarianceError,
    Statistics,
    m_step,
    mended_m_step,
)
from gmm_ivf.lloyd import lloyd, sums_by_label

METHODS = ("kmeans", "k-means++", "random", "random_from_data")

# Up to so many samples x features x components k-means is scikit-learn's own, so that the start is
# the same from the same random_state.
_SMALL_ELEMENTS = 1 << 22
# Ours sees so many samples per component, as FAISS does by default, within a bound on memory.
_SAMPLES_PER_COMPONENT = 256
_SAMPLE_ELEMENTS = 1 << 28
# Squared distances within clusters stand out from rounding by so much, on average, or k-means is
# done again in the next precision.
_RESOLVED = 100


def initial_components(
    engine: Engine,
    n_components: int,
    covariance_type: str,
    method: str,
    reg_covar: float,
    rng: np.random.RandomState,
) -> Components:
    """Components to start EM from.

    Parameters
    ----------
    engine : Engine
    n_components : int
    covariance_type : str
    method : {"kmeans", "k-means++", "random", "random_from_data"}
        As in scikit-learn: the M-step of the hard assignment of every sample to the nearest
        k-means centre; of the chosen rows alone (but tied covariances are those of all samples);
        of uniform random responsibilities. With so few samples that none is left out, also from the
        same draws.
    reg_covar : float
        In squared units of the frame.
    rng : RandomState

    Returns
    -------
    Components
    """
    if method == "kmeans":
        return _of_kmeans(engine, n_components, covariance_type, reg_covar, rng)
    if method == "random":
        zeros = torch.zeros(n_components, engine.rows.d, dtype=torch.float64, device=engine.device)
        reference = Components.equal(covariance_type, zeros, 1.0)
        return _of_random(engine, reference, reg_covar, rng)
    size = _sample_size(n_components, engine.rows.d)
    sample = engine.sample(size, rng, engine.candidates[0])
    rows = _chosen_rows(sample, n_components, method == "k-means++", rng)
    reference = Components.equal(covariance_type, sample[rows].double(), 1.0)
    return m_step(_of_single_samples(engine, reference), reference, reg_covar)


def _of_random(
    engine: Engine, reference: Components, reg_covar: float, rng: np.random.RandomState
) -> Components:
    """M-step of random responsibilities; in a more precise mode where sums were too coarse."""
    stats = engine.e_step(reference, _Random(rng))
    try:
        return m_step(stats, reference, reg_covar)
    except IllDefinedCovarianceError:
        if engine.widen():
            return _of_random(engine, reference, reg_covar, rng)
        if not engine.can_mend(reference.covariance_type, reg_covar):
            raise
    return mended_m_step(stats, reference, reg_covar, engine.mode)[0]


def _of_kmeans(
    engine: Engine,
    n_components: int,
    covariance_type: str,
    reg_covar: float,
    rng: np.random.RandomState,
) -> Components:
    """M-step of the assignment of every sample to the nearest centre of k-means."""
    centers, dtype, variance = _kmeans_centers(engine, n_components, rng)
    if variance is not None:
        narrow = Components.equal(covariance_type, centers, variance)
        try:
            return m_step(engine.hard_step(narrow), narrow, reg_covar)
        except IllDefinedCovarianceError:
            # A feature too narrow for sums about the origin: by differences, below.
            pass
    reference = Components.equal(covariance_type, centers, 1.0)
    return m_step(_hard_statistics(engine, reference, dtype), reference, reg_covar)


def _sample_size(n_components: int, n_features: int) -> int:
    bounded = max(40 * n_components, _SAMPLE_ELEMENTS // n_features)
    return min(_SAMPLES_PER_COMPONENT * n_components, bounded)


def _of_single_samples(engine: Engine, reference: Components) -> Statistics:
    """Statistics of one sample for each component, lying on its mean.

    Nothing would ever leave a tied covariance of reg_covar alone: it starts as that of all samples.
    """
    means = reference.means
    s2 = torch.zeros_like(reference.covariances)
    if reference.covariance_type == "tied":
        s2 = engine.total_scatter(engine.candidates[0]) * (len(means) / engine.rows.n)
    return Statistics(means.new_zeros(()), means.new_ones(len(means)), torch.zeros_like(means), s2)


def _hard_statistics(engine: Engine, reference: Components, dtype: torch.dtype) -> Statistics:
    """Statistics of the assignment of every sample to the nearest mean, by distances in `dtype`.

    From differences in float64: no precision mode is known to suffice before there are variances.
    """
    means = reference.means
    k = len(means)

    def run(size: int) -> Statistics:
        s0, s1 = means.new_zeros(k), torch.zeros_like(means)
        s2 = torch.zeros_like(reference.covariances)
        for _, tile in engine.tiles(size, dtype):
            label, _ = torch_backend.nearest_means(tile, means.to(tile.dtype))
            diff = tile.double() - means[label]
            sums, counts = sums_by_label(diff, label, k)
            s0 += counts
            s1 += sums
            s2 += _second_moments(diff, label, counts, reference.covariance_type)
        return Statistics(means.new_zeros(()), s0, s1, s2)

    return engine.fitting(run, k)


def _second_moments(diff: Tensor, label: Tensor, counts: Tensor, covariance_type: str) -> Tensor:
    """`Statistics.s2` of differences from the means of their labels."""
    if covariance_type == "tied":
        return diff.T @ diff
    if covariance_type == "full":
        parts = diff[torch.argsort(label, stable=True)].split(counts.long().tolist())
        return torch.stack([part.T @ part for part in parts])
    squares = diff.square()
    if covariance_type == "spherical":
        return sums_by_label(squares.sum(1, keepdim=True), label, len(counts))[0][:, 0]
    return sums_by_label(squares, label, len(counts))[0]


class _Random:
    """Responder of uniform random responsibilities; scikit-learn draws the same ones."""

    def __init__(self, rng: np.random.RandomState):
        self.rng = rng

    def __call__(self, x: Tensor, prepared: torch_backend.Prepared) -> tuple[Tensor, Tensor]:
        draw = self.rng.uniform(size=(len(x), len(prepared.components.means)))
        draw /= draw.sum(axis=1, keepdims=True)
        return x.new_zeros(len(x)), torch.from_numpy(draw).to(x)


def _chosen_rows(
    sample: Tensor, n_components: int, plusplus: bool, rng: np.random.RandomState
) -> Tensor:
    """Indices of the rows of the sample to start from."""
    n = len(sample)
    if not plusplus:
        chosen = rng.choice(n, n_components, replace=False)
        return torch.from_numpy(chosen).to(sample.device)
    with threadpool_limits(1):
        _, chosen = kmeans_plusplus(sample.cpu().numpy(), n_components, random_state=rng)
    return torch.from_numpy(np.asarray(chosen, np.int64)).to(sample.device)


def _kmeans_centers(
    engine: Engine, n_components: int, rng: np.random.RandomState
) -> tuple[Tensor, torch.dtype, float | None]:
    """Centres of k-means on a sample of the data.

    With the dtype that was precise enough for it, and the variance of the equal components that
    assign alike, None where assignment is exact.
    """
    if engine.rows.n * engine.rows.d * n_components <= _SMALL_ELEMENTS:
        whole = engine.sample(engine.rows.n, rng, "fp64")
        return _sklearn_centers(whole, n_components, rng), torch.float64, None
    size = _sample_size(n_components, engine.rows.d)
    found = torch.empty(0), torch.float64, None
    for assign in engine.kmeans_passes(size, rng):
        centers, inertia = lloyd(assign, n_components, rng)
        found = centers, assign.sample.dtype, assign.variance(inertia)
        # Centres that coincide share their samples evenly where assignment is a limit.
        distinct = len(torch.unique(centers, dim=0)) == n_components
        if distinct and inertia > _RESOLVED * assign.noise:
            break
    return found


def _sklearn_centers(sample: Tensor, n_components: int, rng: np.random.RandomState) -> Tensor:
    """k-means by scikit-learn; on one thread, since several add in an order that changes."""
    kmeans = KMeans(n_components, n_init=1, random_state=rng)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        # Of fewer distinct samples than clusters the mixture warns itself.
        warnings.simplefilter("ignore", ConvergenceWarning)
        with threadpool_limits(1):
            kmeans.fit(sample.cpu().numpy())
    return torch.from_numpy(kmeans.cluster_centers_).to(sample.device)
