"""Passes of a fitted mixture over samples, a tile at a time, and the checks before them."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from gmm_ivf.engine import Engine
from gmm_ivf.kernels import torch_backend
from gmm_ivf.kernels.components import Components
from gmm_ivf.kernels.dispatch import resolve_backend, resolve_device
from gmm_ivf.params import Frame
from gmm_ivf.rows import Rows, check_lazy, is_lazy

# Of a backend's module, what it prepared, and a tile.
TileFunction = Callable[[Any, Any, Tensor], Tensor]


class TiledMixture:
    """A mixture in the caller's units that is evaluated in its frame, tile by tile."""

    # Set by GaussianMixture.
    n_components: int
    covariance_type: str
    device: Any
    backend: str
    precision: str
    chunk_size: int | None
    weights_: np.ndarray
    means_: np.ndarray
    covariances_: np.ndarray
    precisions_cholesky_: np.ndarray
    center_: np.ndarray
    n_features_in_: int
    feature_names_in_: np.ndarray
    _exponent: int

    def _frame(self) -> Frame:
        check_is_fitted(self)
        if not hasattr(self, "center_"):  # parameters that the user set by hand
            means = np.asarray(self.means_, np.float64)
            return Frame.of_range(means.mean(0), means.min(0), means.max(0))
        return Frame(self.center_, self._exponent)

    def _components(self, frame: Frame, device: torch.device) -> Components:
        return frame.components_inside(
            self.covariance_type,
            self.weights_,
            self.means_,
            self.covariances_,
            device,
            self.precisions_cholesky_,
        )

    def _check_rows(self, X: Any, *, reset: bool) -> Rows:
        """X as rows that can be read by tiles; its values are checked when they are read."""
        if isinstance(X, Iterator):
            raise ValueError(
                f"X is a {type(X).__name__}, which can be read only once while EM reads X many "
                "times; pass an array, a memmap or an h5py.Dataset."
            )
        if is_lazy(X):
            check_lazy(X)
            if reset:
                self.n_features_in_ = X.shape[1]
                self.__dict__.pop("feature_names_in_", None)  # of an earlier fit
            elif X.shape[1] != self.means_.shape[1]:
                raise ValueError(
                    f"X has {X.shape[1]} features, but {type(self).__name__} is expecting "
                    f"{self.means_.shape[1]} features as input."
                )
        else:
            X = validate_data(
                self,  # type: ignore[arg-type]
                X,
                reset=reset,
                ensure_all_finite=False,
                ensure_min_samples=2 if reset else 1,
            )
        rows = Rows(X)
        if reset and rows.n < max(2, self.n_components):
            raise ValueError(
                "Expected n_samples >= n_components but got "
                f"n_components = {self.n_components}, n_samples = {rows.n}"
            )
        return rows

    def _resolve(self, rows: Rows) -> tuple[torch.device, str, tuple[str, ...]]:
        """Device, backend and precision modes for these samples."""
        device = resolve_device(self.device, rows.device)
        wide = not rows.fits_float32 or (rows.is_half and not rows.is_tensor)
        return device, *resolve_backend(self.backend, self.precision, device, wide, rows.d)

    def _by_tile(
        self, X: Any, function: TileFunction, dtype: torch.dtype | None, dense: bool = False
    ) -> Any:
        """Rows of results of a function of a tile, as numpy or, for a tensor X, on its device.

        A dtype of None means float32 for float32 input (what is below its range becomes -inf) and
        float64 otherwise. A `dense` function has no Triton kernel and runs on torch.
        """
        frame = self._frame()
        rows = self._check_rows(X, reset=False)
        device, name, candidates = self._resolve(rows)
        engine = Engine(rows, frame, device, candidates, self.chunk_size)
        if dtype is None:
            narrow = rows.fits_float32 and (rows.is_tensor or not rows.is_half)
            dtype = torch.float32 if narrow else torch.float64
        with torch_backend.exact_float32():
            components = self._components(frame, device)
            prepared, tile_dtype = engine.prepare(components)
            kernels = _kernels(components, engine.mode) if name == "triton" and not dense else None

            def run(size: int) -> list[Tensor]:
                parts = []
                for start, stop in rows.spans(size):
                    tile = rows.tile(start, stop, frame, tile_dtype, device, engine.reach)
                    # A float64 tile where float32 was asked for holds samples no mode serves.
                    if kernels and tile.dtype == torch.float32:
                        part = function(*kernels, tile)
                    else:
                        part = function(torch_backend, prepared, tile)
                    parts.append(part.to(rows.device or "cpu", dtype))
                return parts

            parts = engine.fitting(run, len(self.weights_))
        out = torch.cat(parts)
        return out if rows.is_tensor else out.numpy()


def _kernels(components: Components, mode: str) -> tuple[ModuleType, Any]:
    """The Triton backend, imported only where it runs, and what it prepared."""
    from gmm_ivf.kernels import triton_backend

    return triton_backend, triton_backend.prepare(components, mode)
