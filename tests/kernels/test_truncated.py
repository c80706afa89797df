"""Truncated EM kernels, through the interpreter, against the exact ones and float64 loops."""

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from gmm_ivf.kernels import em, reference, truncated
from gmm_ivf.kernels.components import Components, Statistics, m_step
from gmm_ivf.kernels.launch import Rows, about_means
from gmm_ivf.kernels.neighbourhood import order_components
from gmm_ivf.kernels.tuning import Config

pytestmark = pytest.mark.skipif(
    not knobs.runtime.interpret and not torch.cuda.is_available(),
    reason="needs a GPU or TRITON_INTERPRET=1",
)
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
KINDS = ("spherical", "diag", "tied")
MODES = ("fp16", "bf16", "fp16x3", "tf32")
# Small tiles and blocks, so that small cases have several of each.
SMALL = Config(16, 16, 4, 1)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN, or a number that is no index, so that what nobody wrote is found."""
    empty = torch.empty

    def spoil(*args: object, **options: object) -> torch.Tensor:
        tensor = empty(*args, **options)  # type: ignore[call-overload]
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", spoil)


def make(kind: str, n: int, k: int, d: int) -> tuple[torch.Tensor, Components]:
    """Samples around components; in few dimensions they overlap."""
    generator = torch.Generator().manual_seed(1000 * n + 10 * k + d)
    means = torch.randn(k, d, generator=generator, dtype=torch.float64)
    weights = 0.5 + torch.rand(k, generator=generator, dtype=torch.float64)
    shape = {"spherical": (k,), "diag": (k, d), "tied": (d, d)}[kind]
    covariances = 0.5 + torch.rand(*shape, generator=generator, dtype=torch.float64)
    if kind == "tied":
        covariances = covariances @ covariances.T / d + 0.5 * torch.eye(d, dtype=torch.float64)
    components = Components.from_covariances(
        kind, (weights / weights.sum()).to(DEVICE), means.to(DEVICE), covariances.to(DEVICE)
    )
    pick = torch.randint(k, (n,), generator=generator)
    x = means[pick] + 0.7 * torch.randn(n, d, generator=generator, dtype=torch.float64)
    return x.float().to(DEVICE), components


def all_blocks(samples, prepared, shape: Config) -> truncated.Lists:
    tiles, blocks = -(-samples.n // shape.block_n), truncated.block_count(prepared, shape)
    return truncated.choose_lists(torch.ones(tiles, blocks, device=DEVICE), 0.0, shape.block_n)


def statistics(samples, kept, prepared, lists, shape: Config) -> Statistics:
    sums = truncated.listed_sums(samples, kept, prepared, lists, shape)
    return about_means(samples, kept, prepared, sums)


def close(got: torch.Tensor, want: torch.Tensor, rtol: float) -> None:
    size = float(want.abs().max()) + 1e-12
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES[1:])
def test_with_all_blocks_it_is_exact_em(kind: str, mode: str) -> None:
    compare_with_exact(kind, mode, 20, 33, 17, SMALL)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 1), (33, 130, 3), (17, 5, 100)])
def test_odd_shapes(kind: str, n: int, k: int, d: int) -> None:
    compare_with_exact(kind, "fp16", n, k, d, SMALL)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "k", "d"), [(3001, 300, 128), (1000, 129, 250), (999, 77, 33)])
def test_with_all_blocks_it_is_exact_em_on_a_gpu(
    kind: str, mode: str, n: int, k: int, d: int
) -> None:
    compare_with_exact(kind, mode, n, k, min(d, 128 if kind == "diag" else d), None)


def compare_with_exact(kind: str, mode: str, n: int, k: int, d: int, shape: Config | None) -> None:
    """Every output of a step over all blocks against that of the exact kernels."""
    x, components = make(kind, n, k, d)
    samples, prepared = em.stage(x, mode), em.prepare(components, mode)
    shape = shape or truncated.shape_for(samples, prepared)
    rows, want = em.e_step(samples, prepared)
    exact, best = truncated.find(samples, prepared, shape)
    again, mass = truncated.weigh(samples, prepared, exact, shape)
    lists = all_blocks(samples, prepared, shape)
    kept = truncated.listed_rows(samples, prepared, lists, shape)
    got = statistics(samples, kept, prepared, lists, shape)
    for norm in (exact.norm, again.norm, kept.norm):
        torch.testing.assert_close(norm[:n], rows.norm[:n], rtol=1e-6, atol=1e-4)
        assert bool((norm[n:] == rows.norm[n:]).all())
    assert float(mass.sum()) == pytest.approx(n, rel=1e-4)
    _, log_resp = reference.e_step(x.double(), components)
    near = log_resp.gather(1, best[:, None].long())[:, 0]
    assert float((log_resp.amax(1) - near).max()) < (0.5 if mode == "bf16" else 0.1)
    rtol = {"bf16": 2e-2, "fp16x3": 1e-5}.get(mode, 2e-3)
    for name in ("log_likelihood", "s0", "s1", "s2"):
        close(getattr(got, name), getattr(want, name), rtol)
        assert getattr(got, name).dtype == torch.float64


# The sums overflow by design before the tile is done again.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("error", [0.3, -90.0, 5000.0, -5000.0])
def test_a_bad_guess_changes_no_normaliser_and_no_list(error: float) -> None:
    x, components = make("spherical", 40, 65, 17)
    samples, prepared = em.stage(x, "fp16"), em.prepare(components, "fp16")
    exact, _ = truncated.find(samples, prepared, SMALL)
    _, want = truncated.weigh(samples, prepared, exact, SMALL)
    got, mass = truncated.weigh(samples, prepared, Rows(exact.norm + error), SMALL)
    torch.testing.assert_close(got.norm[:40], exact.norm[:40], rtol=1e-6, atol=1e-3)
    share = mass / mass.sum(1, keepdim=True)
    torch.testing.assert_close(share, want / want.sum(1, keepdim=True), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_listed_components_alone_count(kind: str) -> None:
    """Statistics and discarded mass of real lists equal those of a loop in float64."""
    n, k, d, mode = 70, 120, 3, "fp16x3"
    x, components = make(kind, n, k, d)
    samples, prepared = em.stage(x, mode), em.prepare(components, mode)
    exact, _ = truncated.find(samples, prepared, SMALL)
    _, mass = truncated.weigh(samples, prepared, exact, SMALL)
    lists = truncated.choose_lists(mass, 0.2, 16)
    assert 0.1 < float(lists.visited()) < 0.9
    kept = truncated.listed_rows(samples, prepared, lists, SMALL)
    got = statistics(samples, kept, prepared, lists, SMALL)
    density, log_resp = reference.e_step(x.double(), components)
    left_out = torch.ones(n, k, dtype=torch.bool, device=DEVICE)
    for tile, count in enumerate(lists.tile_counts.tolist()):
        for block in lists.tile_blocks[tile, :count].tolist():
            left_out[16 * tile : 16 * tile + 16, 16 * block : 16 * block + 16] = False
    resp = log_resp.exp().masked_fill(left_out, 0)
    gone = 1 - resp.sum(1)
    lost = truncated.discarded(exact, kept, n)
    assert float(lost[0]) == pytest.approx(float(gone.mean()), abs=2e-5)
    assert float(lost[1]) == pytest.approx(float(-(1 - gone).log().mean()), abs=2e-5)
    assert 0.01 < float(lost[0]) <= float(lost[1])
    resp = resp / resp.sum(1, keepdim=True)
    diff = x.double()[:, None] - components.means[None]
    close(got.s0, resp.sum(0), 2e-3)
    close(got.s1, (resp[:, :, None] * diff).sum(0), 3e-3)
    per_feature = (resp[:, :, None] * diff.square()).sum(0)
    if kind == "tied":
        close(got.s2, torch.einsum("nk,nkd,nke->de", resp, diff, diff), 2e-3)
    else:
        close(got.s2, per_feature.sum(1) if kind == "spherical" else per_feature, 3e-3)
    bound = density + (1 - gone).log()
    assert float(got.log_likelihood) == pytest.approx(float(bound.sum()), abs=1e-2)


def test_the_mass_of_a_block_is_the_sum_of_its_responsibilities() -> None:
    x, components = make("spherical", 40, 65, 3)
    samples, prepared = em.stage(x, "fp16x3"), em.prepare(components, "fp16x3")
    exact, _ = truncated.find(samples, prepared, SMALL)
    _, mass = truncated.weigh(samples, prepared, exact, SMALL)
    _, log_resp = reference.e_step(x.double(), components)
    resp = torch.nn.functional.pad(log_resp.exp(), (0, 80 - 65, 0, 48 - 40))
    want = resp.view(3, 16, 5, 16).sum((1, 3)).float()
    torch.testing.assert_close(mass, want, rtol=1e-3, atol=1e-4)


def test_some_tiles_are_measured_exactly_and_the_others_left() -> None:
    x, components = make("spherical", 90, 65, 3)
    samples, prepared = em.stage(x, "fp16"), em.prepare(components, "fp16")
    exact, _ = truncated.find(samples, prepared, SMALL)
    _, mass = truncated.weigh(samples, prepared, exact, SMALL)
    lists = truncated.choose_lists(mass, 0.3, 16)
    kept = truncated.listed_rows(samples, prepared, lists, SMALL)
    parts = []
    for start in range(3):
        rows = truncated.remeasured(samples, prepared, kept, SMALL, start, 3)
        tile = torch.arange(90, device=DEVICE) // 16
        measured = tile % 3 == start
        torch.testing.assert_close(rows.norm[:90][measured], exact.norm[:90][measured])
        assert torch.equal(rows.norm[:90][~measured], kept.norm[:90][~measured])
        parts.append(truncated.discarded(rows, kept, 90))
    # Over all starts the measurements, scaled by the step, average to what is discarded: no bias.
    torch.testing.assert_close(
        3 * torch.stack(parts).mean(0), truncated.discarded(exact, kept, 90), rtol=1e-5, atol=1e-7
    )


def test_lists_hold_the_fewest_blocks_and_agree_from_both_sides() -> None:
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(9, 12, generator=generator).pow(8)
    mass[3] = 0
    mass[4] = float("nan")
    lists = truncated.choose_lists(mass, 0.05, 16)
    meets = set()
    for tile, count in enumerate(lists.tile_counts.tolist()):
        blocks = lists.tile_blocks[tile, :count].tolist()
        meets |= {(tile, block) for block in blocks}
        assert count >= 1
        if tile in (3, 4):
            continue
        kept, whole = mass[tile, blocks].sum(), mass[tile].sum()
        assert whole < 16
        assert whole - kept <= 0.05 * whole * (1 + 1e-5)
        assert whole - kept + mass[tile, blocks[-1]] > 0.05 * whole * (1 - 1e-5)
    other = {
        (tile, block)
        for block, count in enumerate(lists.block_counts.tolist())
        for tile in lists.block_tiles[block, :count].tolist()
    }
    assert other == meets
    assert float(lists.visited()) == pytest.approx(len(meets) / mass.numel())
    for block, count in enumerate(lists.block_counts.tolist()):
        tiles = lists.block_tiles[block, :count].tolist()
        assert tiles == sorted(tiles)


@pytest.mark.parametrize("error", [0.0, 2.0, 40.0])
def test_a_low_guess_never_leaves_out_more(error: float) -> None:
    """That of some samples alone is low, as where their components were not listed."""
    x, components = make("spherical", 90, 65, 3)
    samples, prepared = em.stage(x, "fp16x3"), em.prepare(components, "fp16x3")
    exact, _ = truncated.find(samples, prepared, SMALL)
    guess = exact.norm.clone()
    guess[:90:7] -= error
    _, mass = truncated.weigh(samples, prepared, Rows(guess), SMALL)
    kept = truncated.listed_rows(samples, prepared, truncated.choose_lists(mass, 1e-2, 16), SMALL)
    assert -1e-5 < float(truncated.discarded(exact, kept, 90)[0]) <= 1e-2 * 96 / 90


def test_masses_are_sorted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    mass = torch.rand(9, 12, generator=torch.Generator().manual_seed(0))
    want = truncated.choose_lists(mass, 0.05, 16)
    monkeypatch.setattr(truncated, "_SORT_ELEMENTS", 30)
    got = truncated.choose_lists(mass, 0.05, 16)
    assert torch.equal(got.tile_blocks, want.tile_blocks)
    assert torch.equal(got.tile_counts, want.tile_counts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "d"), [(1, 1), (7, 2), (64, 5), (130, 3)])
def test_near_components_get_near_numbers(kind: str, k: int, d: int) -> None:
    _, components = make(kind, 2, k, d)
    order = order_components(components)
    assert sorted(order.tolist()) == list(range(k))
    if k >= 64 and kind == "spherical":
        means = components.means[order]
        step = (means[1:] - means[:-1]).square().sum(1).mean()
        assert float(step) < 0.5 * float(2 * means.var(0).sum())


def test_blocks_are_whole_clusters() -> None:
    """Eight far groups of sixteen components end up in blocks of sixteen."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3)
    centres = torch.nn.functional.pad(corners, (0, 3)) * torch.tensor([90.0, 60, 30, 1, 1, 1])
    group = torch.randperm(128, generator=generator) % 8
    means = centres[group] + torch.randn(128, 6, generator=generator, dtype=torch.float64)
    ones = torch.ones(128, dtype=torch.float64)
    order = order_components(Components("spherical", ones / 128, means, ones, ones))
    blocks = group[order].view(8, 16)
    assert bool((blocks == blocks[:, :1]).all())


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_gives_the_same_next_components(kind: str) -> None:
    x, components = make(kind, 90, 40, 3)
    samples, prepared = em.stage(x, "fp16x3"), em.prepare(components, "fp16x3")
    _, stats = em.e_step(samples, prepared)
    want = m_step(stats, components, 0.1)
    order = order_components(components)
    rows = torch.randperm(90, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    moved = truncated.sort_samples(samples, rows)
    ordered = em.prepare(truncated.reorder(components, order), "fp16x3")
    exact, _ = truncated.find(moved, ordered, SMALL)
    sums = truncated.listed_sums(moved, exact, ordered, all_blocks(moved, ordered, SMALL), SMALL)
    new, total = truncated.advance(moved, exact, ordered, sums, 0.1)
    got = truncated.reorder(new.components, order.argsort())
    assert float(total) == pytest.approx(float(stats.log_likelihood), abs=1e-2)
    for name in ("weights", "means", "covariances", "precisions_cholesky"):
        close(getattr(got, name), getattr(want, name), 1e-4)


def test_runs_repeat_bit_by_bit() -> None:
    x, components = make("diag", 40, 65, 5)
    results = []
    for _ in range(2):
        samples, prepared = em.stage(x, "fp16"), em.prepare(components, "fp16")
        exact, _ = truncated.find(samples, prepared, SMALL)
        _, mass = truncated.weigh(samples, prepared, exact, SMALL)
        lists = truncated.choose_lists(mass, 1e-3, 16)
        kept = truncated.listed_rows(samples, prepared, lists, SMALL)
        results.append(statistics(samples, kept, prepared, lists, SMALL))
    for name in ("log_likelihood", "s0", "s1", "s2"):
        assert torch.equal(*(getattr(stats, name) for stats in results)), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["fp16", "fp16x3", "tf32"])
def test_a_shape_is_found_for_every_size(kind: str, mode: str) -> None:
    for d in (3, 100, 128, 256):
        if kind == "diag" and d > 128:
            continue
        x, components = make(kind, 4, 3, d)
        shape = truncated.shape_for(em.stage(x, mode), em.prepare(components, mode))
        assert shape.block_n >= 16
