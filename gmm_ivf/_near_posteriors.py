"""Posteriors over a few near components of each vector, where looking at all is too dear."""

from typing import Any

import numpy as np
from scipy.special import logsumexp

# Elements of the means that are gathered at a time.
_GATHERED = 1 << 20


def near_posteriors(
    mixture: Any, rows: np.ndarray, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Components of each row by falling posterior, as if the mixture had no other components.

    Parameters
    ----------
    mixture : GaussianMixture
        Fitted.
    rows : ndarray of shape (n, d), float32
    ids : ndarray of shape (n, m), int64
        Near components of each row, -1 for none.

    Returns
    -------
    ids : ndarray of shape (n, m), int64
    log_resp : ndarray of shape (n, m), float64
        Natural logarithms, -inf where there is no component.
    """
    log_joint = np.empty(ids.shape)
    size = max(1, _GATHERED // (ids.shape[1] * rows.shape[1]))
    for start in range(0, len(rows), size):
        where = slice(start, start + size)
        log_joint[where] = _log_joint(mixture, rows[where], np.maximum(ids[where], 0))
    log_joint[ids < 0] = -np.inf
    order = np.argsort(-log_joint, axis=1, kind="stable")
    log_joint = np.take_along_axis(log_joint, order, axis=1)
    log_resp = log_joint - logsumexp(log_joint, axis=1, keepdims=True)
    return np.take_along_axis(ids, order, axis=1), log_resp


def _log_joint(mixture: Any, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Logarithm of weight times density, up to a constant: (n, m) float64."""
    difference = mixture.means_[ids] - rows[:, None].astype(np.float64)
    factors, kind = mixture.precisions_cholesky_, mixture.covariance_type
    d = rows.shape[1]
    if kind == "spherical":
        scaled, log_det = difference * factors[ids][..., None], d * np.log(factors)[ids]
    elif kind == "diag":
        scaled, log_det = difference * factors[ids], np.log(factors).sum(axis=1)[ids]
    elif kind == "tied":
        scaled, log_det = difference @ factors, 0.0
    else:
        scaled = np.einsum("nmd,nmde->nme", difference, factors[ids])
        log_det = np.log(np.einsum("kdd->kd", factors)).sum(axis=1)[ids]
    with np.errstate(divide="ignore"):
        log_weights = np.log(mixture.weights_)[ids]
    return log_weights + log_det - 0.5 * np.einsum("nmd,nmd->nm", scaled, scaled)
