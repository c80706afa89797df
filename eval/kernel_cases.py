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

# Standard deviation of the means of the components, and their variance.
DATA = {"separated": (1.0, 0.5), "overlapping": (0.15, 1.0)}
# How far from the parameters that samples were drawn with EM starts where it has to get to them:
# in standard deviations of the means, and as a factor of the variances.
_MOVED, _WIDENED = 0.3, 1.2
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
    data : {"separated", "overlapping"}
        Whether a sample has few likely components or many; exact EM of all but full covariances
        takes the same time on both.
    """

    kind: str
    mode: str
    n: int
    k: int
    d: int
    data: str = "separated"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Read KIND:MODE:N:K:D or KIND:MODE:N:K:D:DATA; numbers may end in k or M.

        Raises
        ------
        ValueError
            In one sentence that names the part that is wrong.
        """
        parts = text.split(":")
        if len(parts) not in (5, 6):
            raise ValueError(f"--case wants KIND:MODE:N:K:D such as {_EXAMPLE}, got {text!r}")
        kind, mode = parts[:2]
        data = parts[5] if len(parts) == 6 else "separated"
        known = (("KIND", kind, COVARIANCE_TYPES), ("MODE", mode, ROUNDING_UNITS))
        for name, part, allowed in (*known, ("DATA", data, DATA)):
            if part not in allowed:
                raise ValueError(
                    f"--case {text}: {name} must be one of {', '.join(allowed)}, got {part!r}"
                )
        sizes = zip(parts[2:5], ("N", "K", "D"), strict=True)
        n, k, d = (_whole(part, name, text) for part, name in sizes)
        if n < 2 or k > n:
            raise ValueError(f"--case {text}: N must be at least 2 and at least K, got N={n} K={k}")
        return cls(kind, mode, n, k, d, data)

    def __str__(self) -> str:
        sizes = f"{self.kind}:{self.mode}:{self.n}:{self.k}:{self.d}"
        return sizes if self.data == "separated" else f"{sizes}:{self.data}"

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
    truncated : (float, float) or None
        The same of truncated EM, a mean with all that truncation costs.
    fit_seconds : float or None
        Of a fit of 30 iterations, start included.
    extra_mb : float or None
        Peak memory beyond the samples, MiB.
    """

    reach: float
    aim: float
    truncated: tuple[float, float] | None = None
    fit_seconds: float | None = None
    extra_mb: float | None = None


# 25 % and 40 % of the rate of the floor, at 787 TFLOP/s.
_FULL = Target(2.13, 1.33)
# The most important first: the last ones go when time is short.
TARGETS = {
    Case("spherical", "fp16", 1_000_000, 1024, 128): Target(
        1.5, 1.0, fit_seconds=0.5, extra_mb=64.0
    ),
    Case("spherical", "fp16", 1_000_000, 16384, 128): Target(24, 16, truncated=(14, 8)),
    Case("spherical", "fp16", 10_000_000, 1024, 128): Target(15, 9),
    Case("diag", "fp16", 1_000_000, 1024, 128): Target(2.8, 2.0),
    Case("tied", "fp16", 1_000_000, 1024, 128): Target(1.7, 1.2),
    Case("full", "fp16", 200_000, 256, 64): _FULL,
    Case("full", "fp16", 200_000, 256, 64, "overlapping"): _FULL,
    Case("spherical", "fp16", 1_000_000, 1024, 960): Target(9, 6),
    Case("spherical", "fp16", 1_000_000, 4096, 128): Target(6, 3.5),
}
# Without a number to reach: where truncation cannot pay, and further points for the figure.
_OVERLAPPING = Case("spherical", "fp16", 1_000_000, 16384, 128, "overlapping")
CURVES = (
    Case("spherical", "fp16", 100_000, 1024, 128),
    Case("spherical", "fp16", 1_000_000, 256, 128),
    Case("spherical", "fp16", 1_000_000, 1024, 32),
    Case("spherical", "fp16", 1_000_000, 1024, 256),
)
DEFAULT = (*TARGETS, _OVERLAPPING, *CURVES)


def quick(mode: str) -> tuple[Case, ...]:
    """Small cases that show all covariance types and a short curve in each direction."""
    sizes = {
        "spherical": [(4_000, 32, 16), (1_000, 32, 16), (4_000, 128, 16), (4_000, 32, 64)],
        "diag": [(4_000, 32, 16)],
        "tied": [(4_000, 32, 16)],
        "full": [(1_000, 8, 8)],
    }
    cases = [Case(kind, mode, *size) for kind, found in sizes.items() for size in found]
    return (*cases, Case("full", mode, 1_000, 8, 8, "overlapping"))


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
        self.x, self.components = draw(case, device)
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

    def near(self) -> dict[str, np.ndarray]:
        """Parameters that EM moves away from, as `GaussianMixture` takes them to start from."""
        given = self.parameters()
        spread, _ = DATA[self.case.data]
        noise = np.random.default_rng(1).standard_normal(given["means"].shape)
        return {
            "weights_init": given["weights"],
            "means_init": given["means"] + _MOVED * spread * noise,
            "precisions_init": given["precisions"] / _WIDENED,
        }


def draw(case: Case, device: torch.device) -> tuple[Tensor, Components]:
    """Samples of a mixture and the mixture, the same on every device of a type.

    Parameters
    ----------
    case : Case
        All covariances are the same multiple of the identity.
    device : torch.device

    Returns
    -------
    x : Tensor of shape (n, d), float32
    components : Components
    """
    n, k, d = case.n, case.k, case.d
    spread, variance = DATA[case.data]
    generator = torch.Generator(device).manual_seed(0)
    means = spread * torch.randn(k, d, generator=generator, device=device)
    x = torch.empty(n, d, device=device)
    for tile in x.split(_DRAWN_ROWS):
        pick = torch.randint(k, (len(tile),), generator=generator, device=device)
        noise = torch.randn(tile.shape, generator=generator, device=device)
        tile.copy_(means[pick] + variance**0.5 * noise)
    ball = variance * torch.eye(d, dtype=torch.float64, device=device)
    shapes = {
        "spherical": ball[0, 0].expand(k),
        "diag": ball[0, 0].expand(k, d),
        "tied": ball,
        "full": ball.expand(k, d, d),
    }
    weights = torch.full((k,), 1.0 / k, dtype=torch.float64, device=device)
    covariances = shapes[case.kind].clone()
    return x, Components.from_covariances(case.kind, weights, means.double(), covariances)
