"""Frame of the data inside the estimator, and the parameters of a mixture as a file."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gmm_ivf.kernels.components import COVARIANCE_TYPES, Components

_FORMAT = "gmm_ivf.mixture"
_VERSION = 1

# Squares of the samples and of the inner unit, and products with variances, stay in float64.
_LARGEST_REACH = 1e140
_SMALLEST_EXPONENT = -200


@dataclass(frozen=True)
class Frame:
    """Inside, a sample is ``(x - center) * 2**-exponent``.

    Subtracting the centre before anything is rounded keeps distances exact whatever the offset of
    the data; a power of two changes no digit and keeps half precision in range.

    Attributes
    ----------
    center : ndarray of shape (D,), float64
    exponent : int
    """

    center: np.ndarray
    exponent: int

    @classmethod
    def of_range(cls, center: np.ndarray, low: np.ndarray, high: np.ndarray) -> "Frame":
        """Frame in which the samples between low and high are at most 16 in magnitude."""
        reach = float(np.maximum(high - center, center - low).max())
        if not reach < _LARGEST_REACH:
            raise ValueError(
                f"X spreads over {reach:.3g} about its mean, too far for float64 variances; "
                f"scale the input data below {_LARGEST_REACH:g}."
            )
        exponent = math.frexp(reach / 16)[1] if reach > 0 else 0
        return cls(center, max(exponent, _SMALLEST_EXPONENT))

    @property
    def scale(self) -> float:
        """``2**exponent``: size of the inner unit in the caller's units."""
        return math.ldexp(1.0, self.exponent)

    def log_volume(self) -> float:
        """What the log-density of a sample loses when it returns to the caller's units."""
        return len(self.center) * self.exponent * math.log(2)

    def components_inside(
        self,
        covariance_type: str,
        weights: np.ndarray,
        means: np.ndarray,
        covariances: np.ndarray,
        device: torch.device,
        precisions_cholesky: np.ndarray | None = None,
    ) -> Components:
        """Components in the frame from arrays in the caller's units.

        Without `precisions_cholesky` the factors are computed from the covariances.
        """

        def tensor(array) -> torch.Tensor:
            return torch.tensor(np.asarray(array), dtype=torch.float64, device=device)

        arrays = (
            tensor(weights),
            tensor((np.asarray(means, np.float64) - self.center) / self.scale),
            tensor(np.asarray(covariances, np.float64) / self.scale**2),
        )
        if precisions_cholesky is None:
            return Components.from_covariances(covariance_type, *arrays)
        factors = tensor(np.asarray(precisions_cholesky, np.float64) * self.scale)
        return Components(covariance_type, *arrays, factors)

    def means_outside(self, components: Components) -> np.ndarray:
        """Means of components in the caller's units, (K, D) float64."""
        return components.means.cpu().numpy() * self.scale + self.center

    def covariances_outside(self, components: Components) -> np.ndarray:
        """Covariances of components in the caller's squared units, float64."""
        return components.covariances.cpu().numpy() * self.scale**2

    def factors_outside(self, components: Components) -> np.ndarray:
        """`Components.precisions_cholesky` in the caller's inverse units, float64."""
        return components.precisions_cholesky.cpu().numpy() / self.scale


def as_number(value: Any) -> Any:
    """JSON form of a numpy scalar."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be saved.")


def file_to_replace(path: str | os.PathLike) -> Path:
    """The file that a rename may put a new one in the place of, behind links.

    Raises
    ------
    FileNotFoundError
        When its folder does not exist.
    ValueError
        When it is a folder, a device or a pipe: a rename would put a file in the place of
        /dev/null.
    """
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to save {path.name} in")
    if path.exists() and not path.is_file():
        raise ValueError(f"path must name a file, old or new; {path} is a folder, device or pipe.")
    return path


def check_readable(path: str | os.PathLike, kind: str) -> None:
    """Raise FileNotFoundError where there is no file, PermissionError where it may not be read."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no {kind} file at {path}")
    # safetensors calls a file that may not be read one that is not there.
    open(path, "rb").close()


def covariance_shape(covariance_type: str, n_components: int, n_features: int) -> tuple[int, ...]:
    """Shape of ``covariances_`` and its relatives."""
    k, d = n_components, n_features
    return {"spherical": (k,), "diag": (k, d), "tied": (d, d), "full": (k, d, d)}[covariance_type]


@dataclass(frozen=True)
class MixtureParams:
    """Parameters of a fitted mixture in the caller's units; shapes are checked once, here.

    Attributes
    ----------
    covariance_type : {"spherical", "diag", "tied", "full"}
    weights : ndarray of shape (K,)
    means : ndarray of shape (K, D)
    covariances : ndarray, shape by covariance type
    frame : Frame
    """

    covariance_type: str
    weights: np.ndarray
    means: np.ndarray
    covariances: np.ndarray
    frame: Frame

    def __post_init__(self) -> None:
        if self.covariance_type not in COVARIANCE_TYPES:
            raise ValueError(
                f"covariance_type must be one of {COVARIANCE_TYPES}, got {self.covariance_type!r}."
            )
        if self.means.ndim != 2:
            raise ValueError(f"means must have shape (K, D), got {self.means.shape}.")
        k, d = self.means.shape
        wanted = {
            "weights": (k,),
            "covariances": covariance_shape(self.covariance_type, k, d),
            "center": (d,),
        }
        for name, shape in wanted.items():
            array = self.frame.center if name == "center" else getattr(self, name)
            if array.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {array.shape}.")
            if not np.isfinite(array).all():
                raise ValueError(f"{name} must be finite, got NaN or infinity.")

    def save(self, path: str | os.PathLike, extra: dict) -> None:
        """Write one safetensors file, replacing an older one only when complete.

        Parameters
        ----------
        path : path
        extra : dict
            JSON values to keep beside the parameters; numpy scalars are taken as numbers.

        Raises
        ------
        FileNotFoundError
            When the folder does not exist.
        ValueError
            When the path names a folder, a device or a pipe.
        """
        path = file_to_replace(path)
        header, arrays = self.parts()
        header |= {"version": _VERSION, "extra": extra}
        partial = path.with_name(path.name + ".partial")
        try:
            save_file(arrays, partial, metadata={_FORMAT: json.dumps(header, default=as_number)})
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike) -> tuple["MixtureParams", dict]:
        """Read what `save` wrote.

        Returns
        -------
        params : MixtureParams
        extra : dict

        Raises
        ------
        FileNotFoundError
            When there is no such file.
        ValueError
            When the file is truncated, of another kind, or of a newer version.
        """
        check_readable(path, "mixture")
        try:
            with safe_open(path, framework="numpy") as file:
                text = (file.metadata() or {}).get(_FORMAT)
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        if text is None:
            raise ValueError(f"{path} is a safetensors file, but not one of GaussianMixture.save.")
        header = json.loads(text)
        if header.get("version", 0) > _VERSION:
            raise ValueError(
                f"{path} has version {header['version']}, newer than {_VERSION}: update gmm_ivf."
            )
        if missing := {"version", "extra"} - header.keys():
            raise ValueError(f"{path} lacks {sorted(missing)}.")
        return cls.from_parts(header, arrays, path), header["extra"]

    def parts(self) -> tuple[dict, dict[str, np.ndarray]]:
        """JSON values and float64 arrays that say all."""
        arrays = {
            "weights": self.weights,
            "means": self.means,
            "covariances": self.covariances,
            "center": self.frame.center,
        }
        values = {"covariance_type": self.covariance_type, "exponent": self.frame.exponent}
        return values, {name: np.ascontiguousarray(a, np.float64) for name, a in arrays.items()}

    @classmethod
    def from_parts(
        cls, values: dict, arrays: dict[str, np.ndarray], source: str | os.PathLike
    ) -> "MixtureParams":
        """The inverse of `parts`.

        Raises
        ------
        ValueError
            Naming the source, and what it lacks.
        """
        missing = {"weights", "means", "covariances", "center"} - arrays.keys()
        missing |= {"covariance_type", "exponent"} - values.keys()
        if missing:
            raise ValueError(f"{source} lacks {sorted(missing)}.")
        return cls(
            values["covariance_type"],
            arrays["weights"],
            arrays["means"],
            arrays["covariances"],
            Frame(arrays["center"], int(values["exponent"])),
        )
