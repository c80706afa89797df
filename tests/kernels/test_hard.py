"""Hard assignment by the EM kernels, against distances in float64."""

import pytest
import torch

from gmm_ivf.kernels.hard import HardPass


@pytest.mark.parametrize("mode", ["fp16", "fp16x3", "fp32"])
@pytest.mark.parametrize(("n", "d", "k"), [(300, 5, 7), (257, 33, 65), (100, 1, 1), (300, 270, 4)])
def test_it_assigns_to_the_nearest_mean(device, mode, n, d, k):
    generator = torch.Generator().manual_seed(n)
    centers = torch.randn(k, d, generator=generator, dtype=torch.float64)
    label = torch.randint(k, (n,), generator=generator)
    sample = (centers[label] + 0.1 * torch.randn(n, d, generator=generator)).float()
    moved = centers + 0.02 * torch.randn(k, d, generator=generator)
    squares = torch.cdist(sample.double(), moved).square()
    nearest = squares.min(1)
    assign = HardPass(sample.to(device), mode, steps=1)
    got, counts, distance = (
        t.cpu() for t in assign(moved.to(device), float(nearest.values.mean()))
    )
    # A sample between two means may lie on either side of their border, or be shared.
    clear = squares.sort(1).values[:, : min(2, k)]
    sure = (clear[:, -1] > 1.05 * clear[:, 0]) | (k == 1)
    unsure = int((~sure).sum())
    want = torch.bincount(nearest.indices, minlength=k).double()
    assert (counts - want).abs().sum() <= 2 * unsure + 0.03 * n
    assert counts.sum() == pytest.approx(n, rel=3e-2)
    if unsure == 0:
        total = torch.zeros(k, d, dtype=torch.float64)
        exact = total.index_add_(0, nearest.indices, sample.double()) / want.clamp_min(1)[:, None]
        torch.testing.assert_close(got[want > 0], exact[want > 0], rtol=0, atol=1e-2)
    scale = float(nearest.values.mean())
    torch.testing.assert_close(distance.double(), nearest.values, rtol=0.02, atol=0.02 * scale)


def test_samples_on_their_means_have_no_distance(device):
    sample = torch.eye(4, 6, device=device)
    centers, counts, distance = HardPass(sample, "fp16")(sample.double(), 0.0)
    torch.testing.assert_close(counts.cpu(), torch.ones(4, dtype=torch.float64), rtol=1e-2, atol=0)
    torch.testing.assert_close(centers.cpu(), sample.double().cpu(), rtol=1e-2, atol=1e-6)
    assert float(distance.max()) < 1e-4


def test_a_call_goes_on_where_the_last_one_ended(device):
    """Unless the centres are others or their distances have changed much."""
    d, generator = 5, torch.Generator().manual_seed(0)
    sample = torch.randn(120, d, generator=generator).to(device)
    start = sample[:6].double()
    scale = 2.0 * d
    once = HardPass(sample, "fp16", steps=4)(start, scale)
    assign = HardPass(sample, "fp16", steps=2)
    middle, *_ = assign(start, scale)
    for one, other in zip(once, assign(middle, 1.2 * scale), strict=True):
        assert torch.equal(one, other)
    for centers, inertia in ((middle.flip(0), scale), (middle, 40 * scale)):
        fresh = HardPass(sample, "fp16", steps=2)(centers, inertia)
        for one, other in zip(fresh, assign(centers, inertia), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
