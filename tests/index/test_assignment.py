"""Choosing lists: select_lists, solve_threshold and the checks of list numbers."""

import numpy as np
import pytest
import torch

from gmm_ivf.assignment import check_lists, pairs_of_table, select_lists, solve_threshold


def naive_lists(log_resp, primary, ids, log_tau, max_lists):
    pairs = []
    for row, first in enumerate(primary):
        chosen = [first]
        for value, component in zip(log_resp[row], ids[row], strict=True):
            if len(chosen) < max_lists and value > log_tau and component not in (first, -1):
                chosen.append(component)
        pairs += [(row, c) for c in chosen]
    return pairs


def random_posteriors(n, k, m, seed, scale=3.0, agreement=0.7):
    rng = np.random.default_rng(seed)
    scores = scale * rng.normal(size=(n, k))
    log_resp = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    ids = np.argsort(-log_resp, axis=1)[:, :m]
    # The nearest mean is often, not always, the likeliest component.
    primary = np.where(rng.random(n) < agreement, ids[:, 0], rng.integers(0, k, n))
    return np.take_along_axis(log_resp, ids, axis=1), primary, ids


@pytest.mark.parametrize("max_lists", [1, 2, 3, 8])
@pytest.mark.parametrize("log_tau", [0.0, -1.0, -4.0, -np.inf])
def test_select_lists_equals_loop(max_lists, log_tau):
    log_resp, primary, ids = random_posteriors(200, 12, 8, seed=max_lists)
    rows, lists = select_lists(log_resp, primary, ids, log_tau, max_lists)
    assert list(zip(rows, lists, strict=True)) == naive_lists(
        log_resp, primary, ids, log_tau, max_lists
    )


def test_select_lists_passes_over_missing_components():
    ids = np.array([[3, -1]])
    rows, lists = select_lists(np.array([[-0.1, 0.0]]), np.array([0]), ids, -9.0, 4)
    assert rows.tolist() == [0, 0]
    assert lists.tolist() == [0, 3]


@pytest.mark.parametrize("scale", [3.0, 30000.0], ids=["moderate", "underflowing"])
@pytest.mark.parametrize("replication", [1.0, 1.1, 1.5, 1.9, 2.0])
def test_threshold_reaches_replication(replication, scale):
    # Where the posterior of another list rounds to 1, many are equal: see the test of those.
    sample = random_posteriors(1000, 20, 2, seed=1, scale=scale, agreement=1.0)
    log_tau = solve_threshold(*sample, replication, 2)
    rows, _ = select_lists(*sample, log_tau, 2)
    assert len(rows) == round(1000 * replication)
    if scale > 1000 and 1 < replication < 2:
        assert log_tau < -700  # as a posterior it is zero in float64


def test_threshold_respects_cap():
    sample = random_posteriors(500, 20, 4, seed=2)
    log_tau = solve_threshold(*sample, 2.5, 4)
    rows, _ = select_lists(*sample, log_tau, 4)
    assert len(rows) == 1250
    assert np.bincount(rows).max() <= 4


@pytest.mark.parametrize(("replication", "entries"), [(1.2, 10), (1.6, 20), (2.0, 20)])
def test_threshold_takes_equal_posteriors_together(replication, entries):
    log_resp = np.full((10, 2), np.log(0.5))
    sample = log_resp, np.zeros(10, np.int64), np.tile([0, 1], (10, 1))
    rows, _ = select_lists(*sample, solve_threshold(*sample, replication, 2), 2)
    assert len(rows) == entries


def test_threshold_without_candidates_means_hard():
    empty = np.empty((5, 0)), np.zeros(5, np.int64), np.empty((5, 0), np.int64)
    assert solve_threshold(*empty, 1.5, 2) == 0.0


@pytest.mark.parametrize("bad", [12, 7, -2])
def test_lists_out_of_range_are_named(bad):
    with pytest.raises(ValueError, match=rf"\[0, 7\); got {bad}"):
        check_lists(np.array([0, bad, 6]), 7)
    with pytest.raises(ValueError, match=rf"got {bad}"):
        pairs_of_table(np.array([[0, 1], [2, bad]]), 7)


def test_table_skips_minus_one_and_refuses_repeats():
    rows, lists = pairs_of_table(np.array([[3, -1], [-1, -1], [0, 2]]), 4)
    assert rows.tolist() == [0, 2, 2]
    assert lists.tolist() == [3, 0, 2]
    with pytest.raises(ValueError, match="row 1 names list 2 twice"):
        pairs_of_table(np.array([[0, 1], [2, 2]]), 4)


@pytest.mark.parametrize("replication", [1.0, 1.3, 1.7, 3.0])
def test_tensors_give_what_arrays_give(replication):
    sample = random_posteriors(300, 12, 4, seed=5)
    sample[2][::7, 1] = -1
    log_resp, primary, ids = map(torch.from_numpy, sample)
    tensors = log_resp, primary, ids
    log_tau = solve_threshold(*sample, replication, 3)
    assert solve_threshold(*tensors, replication, 3) == log_tau
    for ours, theirs in zip(
        select_lists(*tensors, log_tau, 3), select_lists(*sample, log_tau, 3), strict=True
    ):
        np.testing.assert_array_equal(ours.numpy(), theirs)
