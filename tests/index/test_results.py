"""De-duplication of result rows."""

import numpy as np
import pytest

from gmm_ivf._results import SearchCost, first_of_each_id

WORST = np.float32(3.4e38)


def naive_row(distances, labels, k):
    best = {}
    for distance, label in zip(distances, labels, strict=True):
        if label >= 0 and label not in best:
            best[label] = distance
    kept = list(best.items())[:k]
    pad = k - len(kept)
    return [i for i, _ in kept] + [-1] * pad, [d for _, d in kept] + [WORST] * pad


@pytest.mark.parametrize("width", [1, 2, 7, 40])
@pytest.mark.parametrize("k", [1, 3, 10, 60])
def test_first_of_each_id_equals_loop(width, k):
    rng = np.random.default_rng(width * 100 + k)
    distances = np.sort(rng.random((50, width)), axis=1).astype("f4")
    labels = rng.integers(0, 12, (50, width))
    filled = rng.integers(0, width + 1, 50)
    empty = np.arange(width) >= filled[:, None]
    labels[empty], distances[empty] = -1, WORST
    got_distances, got_labels = first_of_each_id(distances, labels, k, WORST)
    for row in range(50):
        want_labels, want_distances = naive_row(distances[row], labels[row], k)
        assert got_labels[row].tolist() == want_labels
        assert got_distances[row].tolist() == [float(np.float32(d)) for d in want_distances]


def test_copies_that_are_not_neighbours():
    distances = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    labels = np.array([[5, 8, 5, 9]])
    got = first_of_each_id(distances, labels, 3, WORST)
    assert got[1].tolist() == [[5, 8, 9]]
    assert got[0].tolist() == [[1.0, 2.0, 4.0]]


def test_no_queries():
    distances, labels = first_of_each_id(
        np.empty((0, 4), np.float32), np.empty((0, 4), np.int64), 2, WORST
    )
    assert distances.shape == labels.shape == (0, 2)


def test_cost_is_the_sum_of_its_parts():
    cost = SearchCost(np.array([5, 7]), np.array([3, 3]), np.array([0, 1]))
    assert cost.distance_computations.tolist() == [8, 11]
