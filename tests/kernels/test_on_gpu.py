"""The EM kernels at sizes and counts that only a GPU reaches: long offsets, races, capture."""

import pytest
import torch

pytest.importorskip("triton")

from gmm_ivf.kernels import em
from gmm_ivf.kernels.components import Components, Statistics
from gmm_ivf.kernels.launch import Rows
from gmm_ivf.kernels.operands import MODES
from gmm_ivf.kernels.torch_backend import e_step as exact_step
from gmm_ivf.kernels.torch_backend import prepare as exact_prepare
from gmm_ivf.kernels.torch_backend import scatter as exact_scatter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
KINDS = ("spherical", "diag", "tied", "full")
# Relative error of sums by mode.
TOLERANCE = {"fp32": 2e-4, "fp16x3": 1e-3, "tf32": 5e-3, "fp16": 5e-3, "bf16": 4e-2}


def make(kind: str, n: int, k: int, d: int) -> tuple[torch.Tensor, Components]:
    """Float32 samples around k means, and narrow components at these."""
    generator = torch.Generator("cuda").manual_seed(n + k + d)
    means = torch.randn(k, d, generator=generator, device="cuda", dtype=torch.float64)
    x = torch.randn(n, d, generator=generator, device="cuda").mul_(0.7)
    for start in range(0, n, 1 << 20):
        part = x[start : start + (1 << 20)]
        pick = torch.randint(k, (len(part),), generator=generator, device="cuda")
        part += means.float()[pick]
    return x, Components.equal(kind, means, 0.5)


def spoil_free_memory() -> None:
    """Leave NaN in what the allocator hands out next."""
    blocks = [
        torch.full((size,), float("nan"), device="cuda") for size in (1 << 27, 1 << 22, 1 << 16)
    ]
    del blocks


def run(x: torch.Tensor, components: Components, mode: str) -> tuple[Rows, Statistics]:
    spoil_free_memory()
    return em.e_step(em.stage(x, mode), em.prepare(components, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "d"), [(70_001, 200, 96), (3_001, 65, 300)])
def test_statistics_of_large_cases(kind, mode, n, k, d):
    x, components = make(kind, n, k, d)
    _, got = run(x, components, mode)
    scatter = exact_scatter([x], d, x.device) if kind == "tied" else None
    tiles = x.double().split(1 << 14)
    want = exact_step(tiles, exact_prepare(components, "fp64"), scatter)
    for name in ("s0", "s2"):
        mine, exact = getattr(got, name), getattr(want, name)
        assert float((mine - exact).norm() / exact.norm()) < TOLERANCE[mode], name
    gap = float((got.log_likelihood - want.log_likelihood).abs()) / n
    assert gap < 100 * TOLERANCE[mode]


@pytest.mark.parametrize("mode", ["fp16", "fp16x3"])
@pytest.mark.parametrize(("kind", "d"), [*((kind, 128) for kind in KINDS), ("diag", 300)])
def test_no_run_differs_from_another(kind, d, mode):
    """A race would show as a bit that changes."""
    x, components = make(kind, 50_000, 320 if kind != "full" else 48, d)
    _, first = run(x, components, mode)
    for _ in range(15):
        _, again = run(x, components, mode)
        for name in ("log_likelihood", "s0", "s1", "s2"):
            assert torch.equal(getattr(again, name), getattr(first, name)), name


@pytest.mark.parametrize(
    ("kind", "n", "d"), [("spherical", 17_000_000, 128), ("tied", 7_200_000, 300)]
)
def test_offsets_past_31_bits(kind, n, d):
    free, _ = torch.cuda.mem_get_info()
    if free < 14 * n * d:
        pytest.skip("too little memory")
    x, components = make(kind, n, 64, d)
    rows, got = run(x, components, "fp16")
    assert n * d > 2**31
    assert float(got.s0.sum()) == pytest.approx(n, rel=1e-3)
    for start in (0, n // 2, n - 1000):
        few, _ = run(x[start : start + 1000].clone(), components, "fp16")
        torch.testing.assert_close(
            rows.norm[start : start + 1000], few.norm[:1000], rtol=0, atol=2e-3
        )


def test_components_of_one_sample_keep_it():
    """Logits there are a million times the half norms: those of both passes err alike, or overflow.

    Only on tensor cores, whose sums are not those of the interpreter.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(20_000, 128, generator=generator, device="cuda")
    x = x.half().float()  # so that a component of one sample lies exactly on it
    means = torch.randn(256, 128, generator=generator, device="cuda").double()
    means[:64] = x[:64].double()
    variances = torch.full((256,), 1.0, dtype=torch.float64, device="cuda")
    variances[:64] = 1e-6
    weights = torch.full_like(variances, 1 / 256)
    _, got = run(x, Components.from_covariances("spherical", weights, means, variances), "fp16")
    torch.testing.assert_close(got.s0[:64], torch.ones_like(got.s0[:64]), rtol=0, atol=1e-2)
    assert bool(got.s1.isfinite().all())
    assert bool(got.s2.isfinite().all())
