"""The Triton EM kernels, through the interpreter, against the naive float64 reference."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from gmm_ivf.kernels import em, passes, reference
from gmm_ivf.kernels.components import Components
from gmm_ivf.kernels.loop import Loop
from gmm_ivf.kernels.tuning import JOBS, Config

pytestmark = pytest.mark.skipif(
    not knobs.runtime.interpret and not torch.cuda.is_available(),
    reason="needs a GPU or TRITON_INTERPRET=1",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Error of a log-density in nats and relative error of the sums, by mode. Half precision rounds x
# and the means to 11 (fp16) or 8 (bf16) bits; fp16x3 rounds the responsibilities only.
TOLERANCES = {
    "fp32": (1e-3, 2e-4),
    "fp16x3": (1e-3, 1e-3),
    "tf32": (5e-2, 5e-3),
    "fp16": (5e-2, 5e-3),
    "bf16": (4e-1, 4e-2),
}
# Small tiles, so that small cases have several of each kind.
SMALL: dict[str, Config] = {job: Config(16, 16, 4, 1) for job in JOBS}


def make_components(kind: str, k: int, d: int, generator: torch.Generator) -> Components:
    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    means = torch.randn(k, d, generator=generator, dtype=torch.float64)
    weights = 0.5 + rand(k)
    if kind == "spherical":
        covariances = 0.5 + rand(k)
    elif kind == "diag":
        covariances = 0.5 + rand(k, d)
    elif kind == "full":
        root = torch.randn(k, d, d, generator=generator, dtype=torch.float64) / d**0.5
        covariances = 0.5 * torch.eye(d, dtype=torch.float64) + root @ root.mT / 2
    else:
        root = torch.randn(d, d, generator=generator, dtype=torch.float64) / d**0.5
        covariances = 0.5 * torch.eye(d, dtype=torch.float64) + root @ root.T / 2
    weights = weights / weights.sum()
    return Components.from_covariances(
        kind, weights.to(DEVICE), means.to(DEVICE), covariances.to(DEVICE)
    )


def make_case(kind: str, n: int, k: int, d: int) -> tuple[torch.Tensor, Components]:
    generator = torch.Generator().manual_seed(1000 * n + 10 * k + d)
    components = make_components(kind, k, d, generator)
    pick = torch.randint(k, (n,), generator=generator)
    noise = torch.randn(n, d, generator=generator, dtype=torch.float64)
    x = components.means.cpu()[pick] + 0.7 * noise
    return x.float().to(DEVICE), components


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN, so that an element nobody wrote is found."""
    empty, empty_like = torch.empty, torch.empty_like

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", lambda *a, **kw: spoil(empty(*a, **kw)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **kw: spoil(empty_like(*a, **kw)))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def check(kind: str, mode: str, n: int, k: int, d: int, configs: dict[str, Config] | None) -> None:
    x, components = make_case(kind, n, k, d)
    samples, prepared = em.stage(x, mode), em.prepare(components, mode)
    rows, got = em.e_step(samples, prepared, configs=configs)
    want = reference.statistics(x.double(), components)
    density, _ = reference.e_step(x.double(), components)
    nats, rtol = TOLERANCES[mode]
    nats *= max(1.0, d / 96)
    log_density = em.log_density(samples, rows, prepared)
    assert float((log_density - density).abs().max()) < nats
    assert abs(float(got.log_likelihood - want.log_likelihood)) < nats * n
    assert relative(got.s0, want.s0) < rtol
    # About the means the first moments cancel: their size is that of the absolute ones.
    size = (want.s0[:, None] * components.covariances.mean().sqrt()).expand_as(want.s1).norm()
    assert float((got.s1 - want.s1).norm() / size) < rtol
    assert relative(got.s2, want.s2) < rtol
    for value in (got.log_likelihood, got.s0, got.s1, got.s2):
        assert value.dtype == torch.float64


KINDS = ("spherical", "diag", "tied", "full")


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("mode", list(TOLERANCES))
@pytest.mark.parametrize("n,k,d", [(67, 5, 17), (33, 65, 96)])
def test_modes(kind: str, mode: str, n: int, k: int, d: int) -> None:
    check(kind, mode, n, k, d, SMALL)


@pytest.mark.parametrize("mode", list(TOLERANCES))
def test_modes_of_full_covariances(mode: str) -> None:
    check("full", mode, 67, 5, 96, None)


@pytest.mark.parametrize("kind,d", [("spherical", 17), ("tied", 272), ("full", 17)])
def test_two_calls_are_one_step(kind: str, d: int) -> None:
    x, components = make_case(kind, 40, 5, d)
    samples, prepared = em.stage(x, "fp16"), em.prepare(components, "fp16")
    rows, want = em.e_step(samples, prepared)
    again = em.row_pass(samples, prepared)
    got = em.accumulate(samples, again, prepared)
    torch.testing.assert_close(again.norm[:40], rows.norm[:40], rtol=1e-6, atol=1e-4)
    for name in ("log_likelihood", "s0", "s1", "s2"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize(
    "n,k,d",
    [
        (1, 1, 1),
        (5, 63, 2),
        (256, 5, 3),
        (257, 65, 100),
        (31, 1, 129),
        (255, 63, 129),
        (40, 5, 960),
    ],
)
def test_odd_shapes(kind: str, n: int, k: int, d: int) -> None:
    check(kind, "fp16x3", n, k, d, None)


@pytest.mark.parametrize("n,k,d", [(1, 1, 1), (5, 63, 2), (257, 5, 3), (31, 1, 129)])
def test_odd_shapes_of_full_covariances(n: int, k: int, d: int) -> None:
    check("full", "fp16x3", n, k, d, None)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_several_slabs_and_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(em, "MIN_SLAB", 64)
    check(kind, "fp16", 300, 5, 17, SMALL)
    monkeypatch.setattr(passes, "MIN_CHUNK", 256)
    monkeypatch.setattr(passes, "SCRATCH_BYTES", 0)
    check(kind, "fp16", 300, 5, 272, None)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("error", [0.0, 3.0, -90.0, 90.0, 5000.0, -5000.0])
def test_a_bad_shift_changes_nothing(
    error: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(em, "REDO_ROWS", 32)
    n, mode = 70, "fp16"
    x, components = make_case(kind, n, 65, 17)
    samples, prepared = em.stage(x, mode), em.prepare(components, mode)
    assert prepared.fused
    want = em.row_pass(samples, prepared, configs=SMALL).norm
    shift = want + error
    # Some rows of a tile, all of another, none of the last.
    shift[:5], shift[48:] = want[:5] - 1, want[48:]
    got = em.row_pass(samples, prepared, shift=shift, configs=SMALL).norm
    torch.testing.assert_close(got[:n], want[:n], rtol=0, atol=2e-5 * float(want[:n].abs().max()))


@pytest.mark.parametrize("d", [17, 300])
def test_far_samples_and_dead_components(d: int) -> None:
    """GM: a sample far from every component has responsibilities that sum to 1; weight 0 gets 0."""
    x, components = make_case("spherical", 40, 65, d)
    x[3] = 15.0
    components.weights[:32] = 0
    samples, prepared = em.stage(x, "fp16x3"), em.prepare(components, "fp16x3")
    rows, stats = em.e_step(samples, prepared)
    assert bool(rows.norm[:40].isfinite().all())
    assert float(stats.s0.sum()) == pytest.approx(40, rel=1e-3)
    assert float(stats.s0[:32].abs().max()) == 0.0
    want, _ = reference.e_step(x.double(), components)
    assert float((em.log_density(samples, rows, prepared) - want).abs().max()) < 1e-2


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("kind", ["spherical", "diag"])
def test_components_of_one_sample_stay_finite(kind: str) -> None:
    """Their variance is the ridge: logits of tens of millions, of which few bits are left."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 128, generator=generator).to(DEVICE)
    components = Components.equal(kind, x[:64].double(), 0.5)
    loop = Loop(em.stage(x, "fp16"), components, 1e-6)
    assert bool(loop.run(4).isfinite().all())
    assert float(loop.components().covariances.min()) < 1e-4
    assert float(loop.counts.sum()) == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k,m", [(5, 5), (65, 4), (1, 1)])
def test_top_components(kind: str, k: int, m: int) -> None:
    x, components = make_case(kind, 37, k, 17)
    samples, prepared = em.stage(x, "fp32"), em.prepare(components, "fp32")
    _, ids, log_resp = em.top(samples, prepared, m)
    _, want = reference.e_step(x.double(), components)
    assert ids.dtype == torch.int64
    # Another component is right too where its posterior is the same within rounding.
    torch.testing.assert_close(want.gather(1, ids).float(), log_resp, rtol=1e-5, atol=2e-3)
    torch.testing.assert_close(want.topk(m).values.float(), log_resp, rtol=1e-5, atol=2e-3)
    assert all(len(set(row)) == m for row in ids.tolist())


def test_ties_go_to_the_lower_component() -> None:
    x, components = make_case("spherical", 20, 4, 3)
    twice = Components(
        "spherical",
        *(torch.cat([v, v]) for v in (components.weights / 2, components.means)),
        *(torch.cat([v, v]) for v in (components.covariances, components.precisions_cholesky)),
    )
    _, ids, _ = em.top(em.stage(x, "fp32"), em.prepare(twice, "fp32"), 8)
    assert bool((ids[:, 0::2] + 4 == ids[:, 1::2]).all())


def test_strides_do_not_matter_and_runs_repeat() -> None:
    x, components = make_case("spherical", 70, 65, 17)
    prepared = em.prepare(components, "fp16")
    wide = torch.zeros(140, 40, device=DEVICE)
    wide[::2, 3:37:2] = x
    results = [
        em.e_step(em.stage(view, "fp16"), prepared, configs=SMALL)[1]
        for view in (x, x, wide[::2, 3:37:2], x.T.contiguous().T)
    ]
    for other in results[1:]:
        for name in ("log_likelihood", "s0", "s1", "s2"):
            assert torch.equal(getattr(results[0], name), getattr(other, name)), name


def test_float64_and_half_input() -> None:
    x, components = make_case("spherical", 70, 5, 17)
    prepared = em.prepare(components, "fp16")
    results = [
        em.e_step(em.stage(v, "fp16"), prepared)[1].s1 for v in (x.half(), x.half().double())
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda x, c: em.stage(x, "fp64"), "mode must be one of"),
        (lambda x, c: em.prepare(c, "int8"), "mode must be one of"),
        (lambda x, c: em.stage(x[0], "fp16"), "x must be a floating-point tensor"),
        (lambda x, c: em.stage(x.int(), "fp16"), "x must be a floating-point tensor"),
        (lambda x, c: em.stage(x[:0], "fp16"), "x must be a floating-point tensor"),
        (lambda x, c: em.row_pass(em.stage(x, "fp16"), em.prepare(c, "fp32")), "must share mode"),
        (lambda x, c: em.row_pass(em.stage(x[:, :2], "fp16"), em.prepare(c, "fp16")), "must share"),
        (lambda x, c: em.top(em.stage(x, "fp16"), em.prepare(c, "fp16"), 6), "m must be between"),
    ],
)
def test_bad_input_is_named(make: Callable, message: str) -> None:
    x, components = make_case("spherical", 8, 5, 3)
    with pytest.raises(ValueError, match=message):
        make(x, components)
