"""Checks of the parameters that a user starts EM from."""

from typing import Any

import numpy as np
from scipy import linalg
from sklearn.utils import check_array

from gmm_ivf.params import covariance_shape


def check_initial_parameters(
    weights: Any, means: Any, precisions: Any, covariance_type: str, n_components: int, d: int
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """The three given arrays in float64, each None where not given.

    Raises
    ------
    ValueError
        Naming the parameter whose shape or values do not fit.
    """
    k = n_components
    if weights is not None:
        weights = _check_array("weights_init", weights, (k,))
        if (weights < 0).any() or (weights > 1).any():
            raise ValueError(
                "weights_init: the parameter 'weights' should be in the range [0, 1], got min "
                f"value {weights.min():.5f}, max value {weights.max():.5f}."
            )
        if abs(1 - weights.sum()) > 1e-6:
            raise ValueError(
                "weights_init: the parameter 'weights' should be normalized, got sum(weights) = "
                f"{weights.sum():.5f}."
            )
    if means is not None:
        means = _check_array("means_init", means, (k, d))
    if precisions is not None:
        shape = covariance_shape(covariance_type, k, d)
        precisions = _check_array("precisions_init", precisions, shape)
        _check_positive_definite(precisions, covariance_type)
    return weights, means, precisions


def _check_array(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    array = check_array(value, dtype="float64", ensure_2d=False, allow_nd=True, input_name=name)
    if array.shape != shape:
        raise ValueError(f"{name} should have the shape of {shape}, but got {array.shape}.")
    return array


def _check_positive_definite(precisions: np.ndarray, covariance_type: str) -> None:
    if covariance_type in ("spherical", "diag"):
        good = bool((precisions > 0).all())
    else:
        stack = precisions.reshape(-1, *precisions.shape[-2:])
        symmetric = np.allclose(stack, stack.swapaxes(1, 2))
        good = symmetric and bool((np.linalg.eigvalsh(stack) > 0).all())
    if not good:
        wanted = (
            "positive"
            if covariance_type in ("spherical", "diag")
            else "symmetric, positive-definite"
        )
        raise ValueError(f"precisions_init: '{covariance_type} precision' should be {wanted}.")


def covariances_from_precisions(precisions: np.ndarray, covariance_type: str) -> np.ndarray:
    """Covariances whose inverses are the given precisions; same shape, float64."""
    if covariance_type in ("spherical", "diag"):
        return 1.0 / precisions
    eye = np.eye(precisions.shape[-1])
    stack = precisions.reshape(-1, *eye.shape)
    inverse = np.stack(
        [linalg.cho_solve((linalg.cholesky(p, lower=True), True), eye) for p in stack]
    )
    return ((inverse + inverse.swapaxes(1, 2)) / 2).reshape(precisions.shape)
