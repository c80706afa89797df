"""Saving and loading a fitted mixture."""

import os
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted

from gmm_ivf.params import MixtureParams
from gmm_ivf.tiled import TiledMixture

_SAVED_OPTIONS = ("tol", "reg_covar", "max_iter", "n_init", "init_params", "truncation")
_SAVED_RESULTS = ("converged_", "n_iter_", "lower_bound_", "lower_bounds_")


class MixtureFiles(TiledMixture):
    """Methods of `GaussianMixture` that write and read files."""

    def save(self, path: str | os.PathLike) -> None:
        """Write the fitted mixture as one safetensors file.

        Parameters
        ----------
        path : path
            Replaced only when the new file is complete.
        """
        params, extra = self.saved_parts()
        params.save(path, extra)

    def saved_parts(self) -> tuple[MixtureParams, dict[str, Any]]:
        """What a file keeps of a fitted mixture: parameters, and values fit for JSON."""
        check_is_fitted(self)
        params = MixtureParams(
            self.covariance_type, self.weights_, self.means_, self.covariances_, self._frame()
        )
        extra: dict[str, Any] = {
            "options": {name: getattr(self, name) for name in _SAVED_OPTIONS},
            "results": {name: getattr(self, name) for name in _SAVED_RESULTS},
        }
        if hasattr(self, "feature_names_in_"):
            extra["feature_names"] = list(self.feature_names_in_)
        return params, extra

    @classmethod
    def load(cls, path: str | os.PathLike) -> Any:
        """Read a mixture that `save` wrote.

        Raises
        ------
        FileNotFoundError
            When there is no such file.
        ValueError
            When the file is truncated, of another kind, or newer than this version.
        """
        return cls.from_saved_parts(*MixtureParams.load(path))

    @classmethod
    def from_saved_parts(cls, params: MixtureParams, extra: dict[str, Any]) -> Any:
        """The inverse of `saved_parts`."""
        mixture: Any = cls()
        mixture.set_params(
            n_components=len(params.weights),
            covariance_type=params.covariance_type,
            **extra["options"],
        )
        mixture._set_parameters(params)
        for name, value in extra["results"].items():
            setattr(mixture, name, value)
        if "feature_names" in extra:
            mixture.feature_names_in_ = np.asarray(extra["feature_names"], dtype=object)
        return mixture

    def _set_parameters(self, params: MixtureParams) -> None:
        frame = params.frame
        inside = frame.components_inside(
            params.covariance_type,
            params.weights,
            params.means,
            params.covariances,
            torch.device("cpu"),
        )
        self.weights_, self.means_ = params.weights, params.means
        self.covariances_ = params.covariances
        self.precisions_cholesky_ = frame.factors_outside(inside)
        self.center_, self._exponent = frame.center, frame.exponent
        self.n_features_in_ = params.means.shape[1]
