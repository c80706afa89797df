"""Components that own no vectors, put to use by splitting the heaviest ones."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from gmm_ivf._vectors import block

_ROUNDS = 5
_EM_STEPS = 3
# Rows of a list among which one to split towards is looked for; all of them where these coincide.
_SAMPLE = 8
_MOST_ROWS = 1 << 16

Assign = Callable[[Any], np.ndarray]


def fill_empty(
    mixture: Any, x: Any, assign: Assign, rng: np.random.RandomState
) -> tuple[int, np.ndarray]:
    """Re-seed empty components of a fitted mixture, in place, with a few EM steps after each round.

    A component is empty when it is the nearest mean of no row, so that an index would keep a list
    that nothing fills; or when fewer than one row is expected of it (with under ten rows per
    component, fewer than a tenth of that average).

    Parameters
    ----------
    mixture : GaussianMixture
        Fitted on x.
    x : matrix of shape (n, d)
    assign : callable
        Takes a mixture, returns the list of the nearest mean of every row of x.
    rng : RandomState

    Returns
    -------
    reseeded : int
        Components moved, over all rounds.
    sizes : ndarray of shape (K,), int64
        Rows per list in the end; zeros remain only where no list can be split.
    """
    reseeded = 0
    n, k = x.shape[0], len(mixture.weights_)
    least = min(1.0, 0.1 * n / k)
    primary = assign(mixture)
    for _ in range(_ROUNDS):
        sizes = np.bincount(primary, minlength=k)
        empty = np.flatnonzero((sizes == 0) | (mixture.weights_ * n < least))
        moved = _split_heaviest(mixture, x, primary, empty, rng) if empty.size else 0
        if not moved:
            break
        reseeded += moved
        primary = assign(mixture)
    return reseeded, np.bincount(primary, minlength=k)


def _split_heaviest(
    mixture: Any, x: Any, primary: np.ndarray, empty: np.ndarray, rng: np.random.RandomState
) -> int:
    """Give each empty component half of the list that is heaviest by then; return how many."""
    sizes = np.bincount(primary, minlength=len(mixture.weights_))
    members = np.split(np.argsort(primary, kind="stable"), np.cumsum(sizes)[:-1])
    means, weights = mixture.means_.copy(), mixture.weights_.copy()
    source = np.arange(len(sizes))
    share = sizes.astype(np.float64)
    # A component about to move may be the nearest mean of a row or two; it is no one to split.
    share[empty] = 0
    moved = 0
    for target in empty:
        step = None
        while step is None and share.max() > 0:
            heavy = int(share.argmax())
            step = _way_out(x, members[source[heavy]], means[heavy], rng)
            if step is None:
                share[heavy] = 0
        if step is None:
            break
        # The plane between the two new means runs through the old one.
        means[target], means[heavy] = means[heavy] + step / 2, means[heavy] - step / 2
        weights[target] = weights[heavy] = weights[heavy] / 2
        share[target] = share[heavy] = share[heavy] / 2
        source[target] = source[heavy]
        moved += 1
    if moved:
        _continue_fit(mixture, x, weights, means, source)
    return moved


def _way_out(
    x: Any, members: np.ndarray, mean: np.ndarray, rng: np.random.RandomState
) -> np.ndarray | None:
    """Vector from the mean of a list to one of its rows; None where its rows coincide."""
    few = np.unique(rng.choice(members, _SAMPLE))
    for chosen in (few, members[:_MOST_ROWS]):
        rows = block(x, "x", chosen).astype(np.float64)
        if (rows != rows[0]).any():
            steps = rows - mean
            return steps[np.einsum("ij,ij->i", steps, steps).argmax()]
    return None


def _continue_fit(
    mixture: Any, x: Any, weights: np.ndarray, means: np.ndarray, source: np.ndarray
) -> None:
    """A few EM steps from the given start; each covariance is that of its source component."""
    precisions = mixture.precisions_
    if mixture.covariance_type != "tied":
        precisions = precisions[source]
    start = {
        "weights_init": weights / weights.sum(),
        "means_init": means,
        "precisions_init": precisions,
        "max_iter": _EM_STEPS,
        "n_init": 1,
        "warm_start": False,
    }
    kept = {name: value for name, value in mixture.get_params().items() if name in start}
    try:
        with warnings.catch_warnings():
            # The fit before converged or warned; these steps are not meant to converge.
            warnings.simplefilter("ignore", ConvergenceWarning)
            mixture.set_params(**start).fit(x)
    finally:
        mixture.set_params(**kept)
