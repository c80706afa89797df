"""Recall with ties and duplicates, and cost at a recall, against brute force."""

import h5py
import numpy as np
import pytest

from gmm_ivf.eval.metrics import (
    cost_at_recall,
    exact_scores,
    kth_scores,
    pareto_front,
    recall_per_query,
)


def line(*positions):
    """One-dimensional base vectors at the given positions and one query at 0."""
    return np.array(positions, dtype=np.float64)[:, None], np.zeros((1, 1))


def recall(base, query, truth, result, k, metric="l2", ties="strict"):
    ids = np.array([result])
    kth = kth_scores(base, query, np.array([truth]), k, metric)
    return recall_per_query(ids, exact_scores(base, query, ids, metric), kth, metric, ties)[0]


def test_IX_R1_returning_the_nearest_point_ten_times_scores_one_tenth():
    base, query = line(*range(20))
    truth = [5, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert recall(base, query, truth, [5] * 10, 10) == pytest.approx(0.1)


def test_IX_R1_duplicates_that_are_apart_count_once_too():
    base, query = line(*range(20))
    assert recall(base, query, [0, 1, 2, 3], [0, 3, 0, 3], 4) == pytest.approx(0.5)


@pytest.mark.parametrize("last", [9, 10, 11])
def test_IX_R2_any_id_tied_at_the_last_place_is_accepted(last):
    base, query = line(*range(1, 10), 10, 10, 10, 11)
    truth = [*range(9), 9]
    assert recall(base, query, truth, [*range(9), last], 10) == 1.0


def test_IX_R2_recall_never_exceeds_one_when_more_ids_tie_than_fit():
    base, query = line(1, *[2] * 11)
    assert recall(base, query, [*range(10)], [*range(1, 11)], 10) == 1.0


@pytest.mark.parametrize(("excess", "expected"), [(0.9e-6, 1.0), (1.2e-6, 0.5)])
def test_IX_R2_tolerance_is_one_millionth(excess, expected):
    base, query = line(1, 100, 100 * (1 + excess))
    assert recall(base, query, [0, 1], [0, 2], 2) == expected


def test_ann_benchmarks_epsilon_is_absolute_and_only_on_request():
    base, query = line(1, 2, 2.0009, 2.0011)
    assert recall(base, query, [0, 1], [0, 2], 2) == 0.5
    assert recall(base, query, [0, 1], [0, 2], 2, ties="ann-benchmarks") == 1.0
    assert recall(base, query, [0, 1], [0, 3], 2, ties="ann-benchmarks") == 0.5


def test_empty_places_never_count():
    base, query = line(1, 2, 3)
    assert recall(base, query, [0, 1, 2], [0, -1, -1], 3) == pytest.approx(1 / 3)


def test_truth_out_of_order_at_the_margin_uses_the_worst_of_the_first_k():
    base, query = line(1, 2, 2 - 1e-4)
    assert recall(base, query, [0, 1, 2], [0, 1, 2], 3) == 1.0


@pytest.mark.parametrize("metric", ["ip", "cosine"])
def test_similarity_counts_larger_as_nearer(metric):
    rng = np.random.default_rng(0)
    base, query = rng.normal(size=(200, 6)), rng.normal(size=(30, 6))
    base /= np.linalg.norm(base, axis=1, keepdims=True)
    order = np.argsort(-(query @ base.T), axis=1)
    kth = kth_scores(base, query, order, 5, metric)
    for ids, expected in ((order[:, :5], 1.0), (order[:, -5:], 0.0), (order[:, 3:8], 0.4)):
        scores = exact_scores(base, query, ids, metric)
        np.testing.assert_allclose(recall_per_query(ids, scores, kth, metric), expected)


def test_similarity_below_zero_keeps_its_tolerance_on_the_right_side():
    base, query = np.array([[-1.0], [-1.0 - 0.9e-6], [-1.1]]), np.ones((1, 1))
    assert recall(base, query, [0], [1], 1, metric="ip") == 1.0
    assert recall(base, query, [0], [2], 1, metric="ip") == 0.0


@pytest.mark.parametrize("metric", ["l2", "ip"])
def test_recall_equals_set_overlap_when_nothing_ties(metric):
    rng = np.random.default_rng(1)
    base, query = rng.normal(size=(300, 7)), rng.normal(size=(50, 7))
    if metric == "l2":
        order = np.argsort(((query[:, None] - base) ** 2).sum(axis=2), axis=1)
    else:
        order = np.argsort(-(query @ base.T), axis=1)
    result = np.array([rng.permutation(row[:20])[:10] for row in order])
    expected = [len(set(a) & set(b)) / 10 for a, b in zip(result, order[:, :10], strict=True)]
    scores = exact_scores(base, query, result, metric)
    got = recall_per_query(result, scores, kth_scores(base, query, order, 10, metric), metric)
    np.testing.assert_allclose(got, expected)


def test_scores_are_float64_and_read_from_memmap_and_hdf5_alike(tmp_path):
    rng = np.random.default_rng(2)
    base = rng.normal(size=(100, 5)).astype(np.float32)
    query = (rng.normal(size=(9, 5)) + 1e4).astype(np.float32)
    ids = rng.integers(-1, 100, size=(9, 4))
    expected = np.sqrt(((base[ids].astype(float) - query[:, None].astype(float)) ** 2).sum(axis=2))
    expected[ids < 0] = np.inf
    np.save(tmp_path / "base.npy", base)
    with h5py.File(tmp_path / "base.hdf5", "w") as file:
        stored = file.create_dataset("train", data=base)
        for source in (base, np.load(tmp_path / "base.npy", mmap_mode="r"), stored):
            np.testing.assert_array_equal(exact_scores(source, query, ids, "l2"), expected)


@pytest.mark.parametrize("bad", [-2, 3])
def test_ids_outside_the_base_are_refused(bad):
    base, query = line(1, 2, 3)
    with pytest.raises(ValueError, match=r"ids must lie in -1\.\.2"):
        exact_scores(base, query, np.array([[bad]]), "l2")


def test_cost_is_interpolated_as_log_cost_over_recall():
    assert cost_at_recall([0.8, 0.9], [100, 400], 0.85) == pytest.approx(200)
    assert cost_at_recall([0.8, 0.9, 1.0], [100, 400, 500], 0.9) == pytest.approx(400)


@pytest.mark.parametrize(
    ("recalls", "costs", "target"),
    [([0.5, 0.7], [1, 2], 0.8), ([0.85, 0.9], [1, 2], 0.8), ([], [], 0.8)],
    ids=["ends below", "starts above", "empty"],
)
def test_a_recall_that_the_curve_does_not_cross_has_no_cost(recalls, costs, target):
    assert cost_at_recall(recalls, costs, target) is None


def test_single_point_has_a_cost_at_its_own_recall_only():
    assert cost_at_recall([0.9], [123], 0.9) == pytest.approx(123)
    assert cost_at_recall([0.9], [123], 0.95) is None


def test_a_dip_in_the_curve_does_not_count():
    recalls, costs = [0.7, 0.9, 0.85, 1.0], [10, 20, 30, 40]
    assert cost_at_recall(recalls, costs, 0.85) == pytest.approx(10 * 2**0.75)
    assert cost_at_recall(recalls, costs, 0.95) == pytest.approx(20 * 2**0.5)


def test_equal_recall_costs_what_the_cheapest_point_costs():
    assert cost_at_recall([0.8, 0.9, 0.9], [10, 20, 80], 0.9) == pytest.approx(20)


def test_pareto_front_equals_brute_force():
    rng = np.random.default_rng(3)
    recalls, costs = rng.integers(0, 8, 60) / 8, rng.integers(1, 9, 60)
    front = pareto_front(recalls.tolist(), costs.tolist())
    kept = {(recalls[i], costs[i]) for i in front}
    pairs = set(zip(recalls.tolist(), costs.tolist(), strict=True))
    expected = {
        (r, c)
        for r, c in pairs
        if not any((r2 >= r and c2 <= c) and (r2, c2) != (r, c) for r2, c2 in pairs)
    }
    assert kept == expected
    assert [costs[i] for i in front] == sorted(costs[i] for i in front)
