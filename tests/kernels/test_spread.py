"""k-means++ by a kernel: rows that are spread, distances that are right."""

import pytest
import torch

from gmm_ivf.kernels.spread import spread

# The exponential of a uniform draw of exactly 0 is infinite, and its row not drawn.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")


@pytest.mark.parametrize(
    ("groups", "size", "d", "count"),
    [(1, 12, 3, 12), (2, 140, 130, 3), (1, 5, 2, 1), (1, 40, 1, 33)],
)
def test_rows_are_distinct_and_distances_those_to_them(device, groups, size, d, count):
    members = torch.randn(groups, size, d, generator=torch.Generator().manual_seed(size))
    rows, closest = spread(members.to(device), count, 7)
    again, _ = spread(members.to(device), count, 7)
    rows, closest, again = rows.cpu(), closest.cpu(), again.cpu()
    assert rows.shape == (groups, count)
    torch.testing.assert_close(rows, again)
    for group in range(groups):
        assert len(rows[group].unique()) == count
        exact = torch.cdist(members[group].double(), members[group, rows[group]].double())
        want = exact.amin(1).square()
        torch.testing.assert_close(closest[group].double(), want, rtol=1e-4, atol=1e-6)


def test_every_far_cluster_is_found(device):
    centers = 1000.0 * torch.eye(8, 9)
    members = centers[:, None] + torch.randn(8, 20, 9, generator=torch.Generator().manual_seed(0))
    rows, _ = spread(members.reshape(1, 160, 9).to(device), 8, 3)
    assert len((rows[0].cpu() // 20).unique()) == 8


def test_draws_are_proportional_to_squared_distances(device):
    # From the row at 0, those at 1 and 3 are to be drawn once and nine times in ten.
    members = torch.tensor([[0.0], [1.0], [3.0]]).expand(48, 3, 1)
    rows, _ = spread(members.to(device), 2, 11)
    rows = rows.cpu()
    of_zero = rows[rows[:, 0] == 0, 1]
    assert 6 < len(of_zero) < 30
    assert 0.75 < float((of_zero == 2).float().mean()) <= 1
    assert set(rows[:, 0].tolist()) == {0, 1, 2}


def test_equal_rows_are_drawn_without_nan(device):
    rows, closest = spread(torch.ones(1, 10, 2, device=device), 3, 0)
    assert rows.min() >= 0
    assert rows.max() < 10
    assert float(closest.abs().max()) == 0
