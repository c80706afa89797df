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
from gmm_ivf.kernels.components import Components, Statistics, m_step
from gmm_ivf.params import covariance_shape

METHODS = ("kmeans", "k-means++", "random", "random_from_data")

# Up to so many samples x features x components k-means is scikit-learn's own, so that the start is
# the same from the same random_state.
_SMALL_ELEMENTS = 1 << 22
# Ours sees so many samples per component, as FAISS does by default, within a bound on memory.
_SAMPLES_PER_COMPONENT = 256
_SAMPLE_ELEMENTS = 1 << 28
_COLUMN_ELEMENTS = 1 << 24
_SUM_ROWS = 1 << 14
_LLOYD_ITERATIONS = 25
_LLOYD_TOLERANCE = 1e-4
# Squared distances within clusters stand out from rounding by so much, on average, or k-means is
# done again in the next precision.
_RESOLVED = 100
# k-means++ takes a pass for each component, and few samples serve as well as all.
_PLUSPLUS_SAMPLES_PER_COMPONENT = 16


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
        centers, dtype = _kmeans_centers(engine, n_components, rng)
        reference = _unit_components(centers, covariance_type)
        return m_step(_hard_statistics(engine, reference, dtype), reference, reg_covar)
    if method == "random":
        zeros = torch.zeros(n_components, engine.rows.d, dtype=torch.float64, device=engine.device)
        reference = _unit_components(zeros, covariance_type)
        return m_step(engine.e_step(reference, _Random(rng)), reference, reg_covar)
    size = _sample_size(n_components, engine.rows.d)
    sample = engine.sample(size, rng, engine.candidates[0])
    rows = _chosen_rows(sample, n_components, method == "k-means++", rng)
    reference = _unit_components(sample[rows].double(), covariance_type)
    return m_step(_of_single_samples(engine, reference), reference, reg_covar)


def _sample_size(n_components: int, n_features: int) -> int:
    bounded = max(40 * n_components, _SAMPLE_ELEMENTS // n_features)
    return min(_SAMPLES_PER_COMPONENT * n_components, bounded)


def _unit_components(means: Tensor, covariance_type: str) -> Components:
    """Components that only say about which means statistics are to be taken."""
    k, d = means.shape
    shape = covariance_shape(covariance_type, k, d)
    if covariance_type in ("spherical", "diag"):
        unit = means.new_ones(shape)
    else:
        unit = torch.eye(d, dtype=means.dtype, device=means.device).expand(shape)
    weights = means.new_full((k,), 1 / k)
    return Components(covariance_type, weights, means, unit, unit)


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
    s0, s1 = means.new_zeros(k), torch.zeros_like(means)
    s2 = torch.zeros_like(reference.covariances)
    for _, tile in engine.tiles(engine.tile_rows(k), dtype):
        label, _ = torch_backend.nearest_means(tile, means.to(tile.dtype))
        diff = tile.double() - means[label]
        sums, counts = _sums_by_label(diff, label, k)
        s0 += counts
        s1 += sums
        s2 += _second_moments(diff, label, counts, reference.covariance_type)
    return Statistics(means.new_zeros(()), s0, s1, s2)


def _second_moments(diff: Tensor, label: Tensor, counts: Tensor, covariance_type: str) -> Tensor:
    """`Statistics.s2` of differences from the means of their labels."""
    if covariance_type == "tied":
        return diff.T @ diff
    if covariance_type == "full":
        parts = diff[torch.argsort(label, stable=True)].split(counts.long().tolist())
        return torch.stack([part.T @ part for part in parts])
    squares = diff.square()
    if covariance_type == "spherical":
        return _sums_by_label(squares.sum(1, keepdim=True), label, len(counts))[0][:, 0]
    return _sums_by_label(squares, label, len(counts))[0]


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


def _first_centers(sample: Tensor, n_components: int, rng: np.random.RandomState) -> Tensor:
    """Rows to start k-means from: k-means++ on a part of the sample."""
    size = _PLUSPLUS_SAMPLES_PER_COMPONENT * n_components
    if size < len(sample):
        picked = np.sort(rng.choice(len(sample), size, replace=False))
        sample = sample[torch.from_numpy(picked).to(sample.device)]
    return sample[_spread_rows(sample, n_components, rng)]


def _spread_rows(sample: Tensor, n_components: int, rng: np.random.RandomState) -> Tensor:
    """Indices of rows drawn one after another by k-means++, without waiting for the device.

    A row is drawn with probability proportional to its squared distance from those before: the
    largest of ``distance / e`` is, for independent exponential e.
    """
    noise = torch.Generator(sample.device).manual_seed(int(rng.randint(2**31)))
    squares = sample.square().sum(1)
    closest = torch.ones_like(squares)
    rows = []
    for number in range(n_components):
        race = torch.empty_like(closest).exponential_(generator=noise)
        # A one-element index: to index by a scalar the host would have to wait for it.
        row = (closest / race).argmax(0, keepdim=True)
        rows.append(row)
        center = sample.index_select(0, row)[0]
        distance = torch.addmv(squares, sample, center, alpha=-2).add_(center.square().sum())
        distance.clamp_min_(0).index_fill_(0, row, 0)
        closest = distance if number == 0 else torch.minimum(closest, distance)
    return torch.cat(rows)


def _kmeans_centers(
    engine: Engine, n_components: int, rng: np.random.RandomState
) -> tuple[Tensor, torch.dtype]:
    """Centres of k-means on a sample of the data, and the dtype that was precise enough for it."""
    if engine.rows.n * engine.rows.d * n_components <= _SMALL_ELEMENTS:
        whole = engine.sample(engine.rows.n, rng, "fp64")
        return _sklearn_centers(whole, n_components, rng), torch.float64
    size = _sample_size(n_components, engine.rows.d)
    *cheaper, last = engine.candidates
    for mode in cheaper:
        sample = engine.sample(size, rng, mode)
        centers, inertia = lloyd(sample, n_components, rng)
        noise = torch.finfo(sample.dtype).eps * float(sample.square().sum(1).mean())
        if inertia > _RESOLVED * noise:
            return centers, sample.dtype
    sample = engine.sample(size, rng, last)
    return lloyd(sample, n_components, rng)[0], sample.dtype


def _sklearn_centers(sample: Tensor, n_components: int, rng: np.random.RandomState) -> Tensor:
    """k-means by scikit-learn; on one thread, since several add in an order that changes."""
    kmeans = KMeans(n_components, n_init=1, random_state=rng)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        # Of fewer distinct samples than clusters the mixture warns itself.
        warnings.simplefilter("ignore", ConvergenceWarning)
        with threadpool_limits(1):
            kmeans.fit(sample.cpu().numpy())
    return torch.from_numpy(kmeans.cluster_centers_).to(sample.device)


def lloyd(sample: Tensor, n_components: int, rng: np.random.RandomState) -> tuple[Tensor, float]:
    """Centres of k-means on a sample, (K, D) float64, and the mean squared distance to them.

    Stops after 25 iterations, or when one improves the mean squared distance by less than 1e-4 of
    it. An empty cluster moves to the sample farthest from its centre; with fewer distinct samples
    than clusters some stay empty.
    """
    centers = _first_centers(sample, n_components, rng)
    previous = float("inf")
    size = torch_backend.tile_rows(n_components, sample.shape[1], sample.device)
    for _ in range(_LLOYD_ITERATIONS):
        label, distance = _assign(sample, centers, size)
        sums, counts = _sums_by_label(sample, label, n_components)
        filled = counts > 0
        means = (sums / counts.clamp_min(1)[:, None]).to(sample.dtype)
        centers = torch.where(filled[:, None], means, centers)
        moved = _refill_empty(sample, centers, filled, distance)
        inertia = float(distance.double().mean())
        if not moved and previous - inertia <= _LLOYD_TOLERANCE * inertia:
            break
        previous = inertia
    return centers.double(), inertia


def _assign(sample: Tensor, centers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    parts = [torch_backend.nearest_means(tile, centers) for tile in sample.split(size)]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _sums_by_label(sample: Tensor, label: Tensor, n_components: int) -> tuple[Tensor, Tensor]:
    """Sum and count of the samples of each label, float64; added in a fixed order.

    Up to 16,384 samples are added in their own dtype. On a GPU sorted runs, since the order of
    `index_add_` there is up to the hardware.
    """
    counts = torch.bincount(label, minlength=n_components)
    if sample.device.type == "cpu":
        sums = torch.zeros(n_components, sample.shape[1], dtype=torch.float64)
        for part, of in zip(sample.split(_SUM_ROWS), label.split(_SUM_ROWS), strict=True):
            sums += torch.zeros_like(sums, dtype=part.dtype).index_add_(0, of, part)
        return sums, counts.double()
    order = torch.argsort(label, stable=True)
    columns = sample.split(max(1, _COLUMN_ELEMENTS // len(sample)), dim=1)
    sums = [
        torch.segment_reduce(part[order].double(), "sum", lengths=counts, axis=0)
        for part in columns
    ]
    return torch.cat(sums, dim=1), counts.double()


def _refill_empty(sample: Tensor, centers: Tensor, filled: Tensor, distance: Tensor) -> bool:
    """Move empty centres, in place, to the samples farthest from theirs; whether any moved."""
    empty = (~filled).nonzero()[:, 0]
    if len(empty) == 0:
        return False
    far, rows = distance.topk(min(len(empty), len(sample)))
    rows = rows[far > 0]
    centers[empty[: len(rows)]] = sample[rows]
    return len(rows) > 0
