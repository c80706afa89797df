"""What a fitted mixture says of samples: labels, densities, sparse responsibilities."""

from numbers import Integral
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from gmm_ivf.tiled import TiledMixture


class MixtureInference(TiledMixture):
    """Methods of `GaussianMixture` that use fitted parameters."""

    random_state: Any

    def predict(self, X: Any) -> Any:
        """Likeliest component of each sample.

        Parameters
        ----------
        X : array-like, memmap, h5py.Dataset or Tensor of shape (N, D)

        Returns
        -------
        labels : ndarray or Tensor of shape (N,), int64
            A Tensor on the device of X if X is one. May differ from
            ``GMMQuantizer.assign``, which takes the nearest mean.
        """
        return self._by_tile(X, lambda on, prepared, x: on.likeliest(x, prepared), torch.int64)

    def predict_proba(self, X: Any) -> Any:
        """Responsibilities of all components, a dense (N, K) array.

        Parameters
        ----------
        X : array-like of shape (N, D)

        Returns
        -------
        resp : ndarray or Tensor of shape (N, K)
            Rows sum to 1; float32 for float32 input, else float64. Always computed by torch. For
            large N and K see `responsibilities`.
        """
        return self._by_tile(
            X, lambda on, prepared, x: on.responsibilities(x, prepared)[1], None, dense=True
        )

    def score_samples(self, X: Any) -> Any:
        """Log-density of each sample in nats.

        Parameters
        ----------
        X : array-like of shape (N, D)

        Returns
        -------
        log_density : ndarray or Tensor of shape (N,)
            float32 for float32 input (-inf below its range, from about 1e19 standard deviations
            on), else float64.
        """
        return self._log_density(X, None)

    def score(self, X: Any, y: Any = None) -> float:
        """Mean log-density of the samples in nats.

        Parameters
        ----------
        X : array-like of shape (N, D)
        y : ignored

        Returns
        -------
        log_likelihood : float
        """
        return float(self._log_density(X, torch.float64).mean())

    def _log_density(self, X: Any, dtype: torch.dtype | None) -> Any:
        """Log-densities in nats; a dtype of None follows that of X."""
        volume = self._frame().log_volume()
        return self._by_tile(
            X,
            lambda on, prepared, x: on.log_density(x, prepared).double() - volume,
            dtype,
        )

    def top_components(self, X: Any, m: int) -> tuple[Any, Any]:
        """The m likeliest components of each sample and their log-responsibilities.

        Parameters
        ----------
        X : array-like of shape (N, D)
        m : int
            Clamped to K.

        Returns
        -------
        ids : ndarray or Tensor of shape (N, m), int64
            Best first.
        log_resp : ndarray or Tensor of shape (N, m), float64
            Natural logarithms: responsibilities of many dimensions underflow.
        """
        _check_count("m", m)
        check_is_fitted(self)
        m = min(m, len(self.weights_))

        def top(on: Any, prepared: Any, x: Tensor) -> Tensor:
            ids, log_resp = on.top_components(x, prepared, m)
            # Component numbers are exact in float64 and travel with the values.
            return torch.cat([ids.double(), log_resp.double()], dim=1)

        both = self._by_tile(X, top, torch.float64)
        ids = both[:, :m]
        return (ids.long() if isinstance(ids, Tensor) else ids.astype(np.int64)), both[:, m:]

    def responsibilities(
        self,
        X: Any,
        max_components: int = 4,
        threshold: float | None = None,
        format: str = "ids",
    ) -> Any:
        """Largest responsibilities of each sample, without an N x K matrix.

        Parameters
        ----------
        X : array-like of shape (N, D)
        max_components : int, default=4
            At most so many per sample, best first.
        threshold : float in [0, 1), optional
            Keep only responsibilities above it.
        format : {"ids", "csr"}, default="ids"

        Returns
        -------
        ids, resp : ndarray or Tensor of shape (N, m), int64 and float32
            For "ids": component numbers, -1 where fewer than m pass the threshold, and their
            responsibilities, 0 there; m is ``min(max_components, K)``.
        matrix : scipy.sparse.csr_array of shape (N, K), float32
            For "csr".
        """
        if format not in ("ids", "csr"):
            raise ValueError(f'format must be "ids" or "csr", got {format!r}.')
        if threshold is not None and not 0 <= threshold < 1:
            raise ValueError(f"threshold must be in [0, 1), got {threshold!r}.")
        _check_count("max_components", max_components)
        ids, log_resp = self.top_components(X, max_components)
        keep = log_resp > (-np.inf if not threshold else np.log(threshold))
        if isinstance(ids, Tensor):
            ids = torch.where(keep, ids, -1)
            resp: Any = torch.where(keep, log_resp.exp(), 0.0).float()
        else:
            ids = np.where(keep, ids, -1)
            resp = np.where(keep, np.exp(log_resp), 0.0).astype(np.float32)
        if format == "ids":
            return ids, resp
        if isinstance(ids, Tensor):
            ids, resp = ids.cpu().numpy(), resp.cpu().numpy()
        return _to_csr(ids, resp, len(self.weights_))

    def sample(self, n_samples: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Draw random samples from the mixture.

        Parameters
        ----------
        n_samples : int, default=1

        Returns
        -------
        X : ndarray of shape (n_samples, D), float64
            In blocks of one component after another.
        y : ndarray of shape (n_samples,), int64
        """
        check_is_fitted(self)
        if n_samples < 1:
            raise ValueError(
                f"Invalid value for 'n_samples': {n_samples} . "
                "The sampling requires at least one sample."
            )
        rng = check_random_state(self.random_state)
        k, d = self.means_.shape
        counts = rng.multinomial(n_samples, self.weights_ / self.weights_.sum())
        y = np.repeat(np.arange(k), counts)
        noise = rng.standard_normal((n_samples, d))
        if self.covariance_type == "spherical":
            noise *= np.sqrt(self.covariances_)[y, None]
        elif self.covariance_type == "diag":
            noise *= np.sqrt(self.covariances_)[y]
        else:
            lower = np.linalg.cholesky(self.covariances_)
            ends = np.cumsum(counts)
            for j, (stop, count) in enumerate(zip(ends, counts, strict=True)):
                factor = lower if self.covariance_type == "tied" else lower[j]
                noise[stop - count : stop] = noise[stop - count : stop] @ factor.T
        return self.means_[y] + noise, y

    def bic(self, X: Any) -> float:
        """Bayesian information criterion of the mixture on X; lower is better."""
        n = X.shape[0] if hasattr(X, "shape") else len(X)
        return -2 * self.score(X) * n + self._n_parameters() * float(np.log(n))

    def aic(self, X: Any) -> float:
        """Akaike information criterion of the mixture on X; lower is better."""
        n = X.shape[0] if hasattr(X, "shape") else len(X)
        return -2 * self.score(X) * n + 2 * self._n_parameters()

    def _n_parameters(self) -> int:
        k, d = self.means_.shape
        matrix = d * (d + 1) // 2
        shapes = {"full": k * matrix, "diag": k * d, "tied": matrix, "spherical": k}
        return shapes[self.covariance_type] + k * d + k - 1

    @property
    def precisions_(self) -> np.ndarray:
        """Inverse covariances, of the shape of ``covariances_``, float64."""
        check_is_fitted(self)
        factor = self.precisions_cholesky_
        if self.covariance_type in ("spherical", "diag"):
            return factor**2
        return factor @ factor.swapaxes(-1, -2)


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")


def _to_csr(ids: np.ndarray, resp: np.ndarray, n_components: int) -> sparse.csr_array:
    """Sparse (N, K) matrix of the responsibilities whose id is not -1."""
    held = ids >= 0
    row_ends = np.concatenate([[0], np.cumsum(held.sum(axis=1))])
    matrix = sparse.csr_array((resp[held], ids[held], row_ends), shape=(len(ids), n_components))
    matrix.sort_indices()
    return matrix
