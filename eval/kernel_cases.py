"""Cases of `eval.kernels`: what is measured, on which samples, and the floor under its time."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gmm_ivf.kernels import torch_backend
from gmm_ivf.kernels.components import COVARIANCE_TYPES, Components
from gmm_ivf.kernels.dispatch import ROUNDING_UNITS

# Variance of the components; their means have standard deviation 1.
VARIANCE = 0.5
# Rows that log-densities are compared with float64 on.
CHECKED_ROWS = 4096
_DRAWN_ROWS = 1 << 20
_SUFFIXES = {"": 1, "k": 1_000, "m": 1_000_000}
_EXAMPLE = "spherical:fp16:1M:1024:128"


@dataclass(frozen=True)
class Case:
    """A mixture and a number of samples, in a precision mode of ours.

    Attributes
    ----------
    kind : str
        Covariance type.
    mode : str
    n, k, d : int
        Samples, components, features.
    """

    kind: str
    mode: str
    n: int
    k: int
    d: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Read KIND:MODE:N:K:D; numbers may end in k or M.

        Raises
        ------
        ValueError
            In one sentence that names the part that is wrong.
        """
        parts = text.split(":")
        if len(parts) != 5:
            raise ValueError(f"--case wants KIND:MODE:N:K:D such as {_EXAMPLE}, got {text!r}")
        kind, mode = parts[:2]
        if kind not in COVARIANCE_TYPES:
            raise ValueError(
                f"--case {text}: KIND must be one of {', '.join(COVARIANCE_TYPES)}, got {kind!r}"
            )
        if mode not in ROUNDING_UNITS:
            raise ValueError(
                f"--case {text}: MODE must be one of {', '.join(ROUNDING_UNITS)}, got {mode!r}"
            )
        n, k, d = (
            _whole(part, name, text) for part, name in zip(parts[2:], ("N", "K", "D"), strict=True)
        )
        if n < 2 or k > n:
            raise ValueError(f"--case {text}: N must be at least 2 and at least K, got N={n} K={k}")
        return cls(kind, mode, n, k, d)

    def __str__(self) -> str:
        return f"{self.kind}:{self.mode}:{self.n}:{self.k}:{self.d}"

    @property
    def flop(self) -> float:
        """Floating-point operations that no EM iteration goes without.

        A product for the logits and one for the sums, 4 N K D; diag needs those of the squares
        too, 8 N K D; full a triangular product and a symmetric one, 2 N K D^2.
        """
        per_pair = {"spherical": 4.0, "tied": 4.0, "diag": 8.0, "full": 2.0 * self.d}[self.kind]
        return per_pair * self.n * self.k * self.d

    @property
    def hard_flop(self) -> float:
        """The same for k-means, whose sums take N D additions: one product."""
        return 2.0 * self.n * self.k * self.d


def _whole(part: str, name: str, text: str) -> int:
    found = re.fullmatch(r"(\d{1,12})([kKmM]?)", part)
    value = int(found[1]) * _SUFFIXES[found[2].lower()] if found else 0
    if value < 1:
        raise ValueError(
            f"--case {text}: {name} must be a whole number of at least 1, such as 1024, 200k or "
            f"1M, got {part!r}"
        )
    return value


@dataclass(frozen=True)
class Target:
    """Numbers to reach on one NVIDIA H200.

    Attributes
    ----------
    reach, aim : float
        Milliseconds of an iteration.
    fit_seconds : float or None
        Of a fit of 30 iterations, start included.
    extra_mb : float or None
        Peak memory beyond the samples, MiB.
    """

    reach: float
    aim: float
    fit_seconds: float | None = None
    extra_mb: float | None = None


TARGETS = {
    Case("spherical", "fp16", 1_000_000, 1024, 128): Target(1.5, 1.0, 0.5, 64.0),
    Case("spherical", "fp16", 10_000_000, 1024, 128): Target(15, 9),
    Case("spherical", "fp16", 1_000_000, 4096, 128): Target(6, 3.5),
    Case("spherical", "fp16", 1_000_000, 16384, 128): Target(24, 16),
    Case("spherical", "fp16", 1_000_000, 1024, 960): Target(9, 6),
    Case("diag", "fp16", 1_000_000, 1024, 128): Target(2.8, 2.0),
    Case("tied", "fp16", 1_000_000, 1024, 128): Target(1.7, 1.2),
    # 25 % and 40 % of the rate of the floor, at 787 TFLOP/s.
    Case("full", "fp16", 200_000, 256, 64): Target(2.13, 1.33),
}
# Further points for the figure, last because they may go when time is short.
_CURVES = (
    Case("spherical", "fp16", 100_000, 1024, 128),
    Case("spherical", "fp16", 1_000_000, 256, 128),
    Case("spherical", "fp16", 1_000_000, 1024, 32),
    Case("spherical", "fp16", 1_000_000, 1024, 256),
)
DEFAULT = (*TARGETS, *_CURVES)


def quick(mode: str) -> tuple[Case, ...]:
    """Small cases that show all covariance types and a short curve in each direction."""
    sizes = {
        "spherical": [(4_000, 32, 16), (1_000, 32, 16), (4_000, 128, 16), (4_000, 32, 64)],
        "diag": [(4_000, 32, 16)],
        "tied": [(4_000, 32, 16)],
        "full": [(1_000, 8, 8)],
    }
    return tuple(Case(kind, mode, *size) for kind, found in sizes.items() for size in found)


class Problem:
    """A case with its samples, the same for everybody who is measured on it.

    Attributes
    ----------
    case : Case
    device : torch.device
    x : Tensor of shape (N, D), float32
        On the device.
    components : Components
        Those the samples were drawn from; iterations start from them.
    rows : Tensor of shape (at most 4096,), int64
        Rows that log-densities are checked on, spread evenly.
    """

    def __init__(self, case: Case, device: torch.device):
        self.case = case
        self.device = device
        self.x, self.components = draw(case.kind, case.n, case.k, case.d, device)
        spread = np.linspace(0, case.n - 1, min(CHECKED_ROWS, case.n)).astype(np.int64)
        self.rows = torch.from_numpy(spread).to(device)

    @cached_property
    def host(self) -> np.ndarray:
        """The samples in host memory, float32 (N, D)."""
        return self.x.cpu().numpy()

    @cached_property
    def exact(self) -> Tensor:
        """Log-densities of the checked rows in float64, on the unrounded samples."""
        prepared = torch_backend.prepare(self.components, "fp64")
        size = torch_backend.tile_rows(self.case.k, self.case.d, self.device)
        tiles = self.x[self.rows].double().split(size)
        return torch.cat([torch_backend.log_density(tile, prepared) for tile in tiles])

    def parameters(self) -> dict[str, Any]:
        """Weights, means, precisions and their factors as numpy float64, for other packages."""
        c = self.components
        factor = c.precisions_cholesky
        full = self.case.kind in ("tied", "full")
        return {
            "weights": c.weights.cpu().numpy(),
            "means": c.means.cpu().numpy(),
            "precisions": (factor @ factor.mT if full else factor.square()).cpu().numpy(),
            "precisions_cholesky": factor.cpu().numpy(),
        }


def draw(kind: str, n: int, k: int, d: int, device: torch.device) -> tuple[Tensor, Components]:
    """Clustered samples and the mixture they come from, the same on every device of a type.

    Parameters
    ----------
    kind : {"spherical", "diag", "tied", "full"}
        Form of the covariances, which all are `VARIANCE` times the identity.
    n, k, d : int
    device : torch.device

    Returns
    -------
    x : Tensor of shape (n, d), float32
    components : Components
    """
    generator = torch.Generator(device).manual_seed(0)
    means = torch.randn(k, d, generator=generator, device=device)
    x = torch.empty(n, d, device=device)
    for tile in x.split(_DRAWN_ROWS):
        pick = torch.randint(k, (len(tile),), generator=generator, device=device)
        noise = torch.randn(tile.shape, generator=generator, device=device)
        tile.copy_(means[pick] + VARIANCE**0.5 * noise)
    ball = VARIANCE * torch.eye(d, dtype=torch.float64, device=device)
    shapes = {
        "spherical": ball[0, 0].expand(k),
        "diag": ball[0, 0].expand(k, d),
        "tied": ball,
        "full": ball.expand(k, d, d),
    }
    weights = torch.full((k,), 1.0 / k, dtype=torch.float64, device=device)
    covariances = shapes[kind].clone()
    return x, Components.from_covariances(kind, weights, means.double(), covariances)
