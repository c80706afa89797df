"""Mixtures with samples for the tests of the kernels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gmm_ivf.kernels.components import Components

Case = tuple[Tensor, Components]


def _covariances(kind: str, k: int, d: int, generator: torch.Generator) -> Tensor:
    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    if kind == "spherical":
        return 0.3 + rand(k)
    if kind == "diag":
        return 0.3 + rand(k, d)
    root = torch.randn(k, d, d, generator=generator, dtype=torch.float64) / d**0.5
    full = 0.3 * torch.eye(d, dtype=torch.float64) + root @ root.mT
    return full[0] if kind == "tied" else full


@pytest.fixture
def mixture() -> Callable[..., Case]:
    """``mixture(kind, n, k, d)``: float32-representable samples in float64, and components.

    The components are near the samples without being fitted to them.
    """

    def make(kind: str, n: int = 200, k: int = 5, d: int = 6, spread: float = 2.0) -> Case:
        generator = torch.Generator().manual_seed(1000 * n + 10 * k + d)
        means = spread * torch.randn(k, d, generator=generator, dtype=torch.float64)
        weights = 0.2 + torch.rand(k, generator=generator, dtype=torch.float64)
        covariances = _covariances(kind, k, d, generator)
        components = Components.from_covariances(kind, weights / weights.sum(), means, covariances)
        pick = torch.randint(k, (n,), generator=generator)
        x = means[pick] + torch.randn(n, d, generator=generator, dtype=torch.float64)
        return x.float().double(), components

    return make
