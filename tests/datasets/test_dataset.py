"""The checks of Dataset itself, and the artificial mixtures."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from gmm_ivf.datasets import synthetic
from gmm_ivf.datasets.dataset import Dataset
from gmm_ivf.datasets.rows import unit_rows


def test_fields_cannot_be_changed(vectors):
    data = Dataset("x", vectors, vectors)
    with pytest.raises(FrozenInstanceError):
        data.metric = "ip"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "hamming"}, r"metric must be one of .*got 'hamming'"),
        ({"base": np.zeros(5, np.float32)}, r"base of x must be 2-D .*got shape \(5,\)"),
        ({"base": np.zeros((0, 5), np.float32)}, "at least one row"),
        ({"query": np.zeros((0, 5), np.float32)}, "query of x must be 2-D with at least one row"),
        ({"base": np.zeros((3, 5))}, "base of x must be float32, got float64"),
        ({"query": np.zeros((3, 4), np.float32)}, "the base's 5 dimensions, got 4"),
        ({"ground_truth": np.zeros((60, 1), np.int32)}, "must be int64, got int32"),
        ({"ground_truth": np.zeros((60, 0), np.int64)}, r"\(60, k\) with k between 1 and 60"),
        ({"distances": np.zeros((60, 1), np.float32)}, "came without ground_truth"),
    ],
)
def test_what_contradicts_itself_is_refused(vectors, change, message):
    with pytest.raises(ValueError, match=message):
        Dataset(**{"name": "x", "base": vectors, "query": vectors} | change)


def test_unit_rows_leave_zeros_alone():
    got = unit_rows(np.array([[3, 4], [0, 0], [1e-30, 0]], np.float32))
    np.testing.assert_allclose(got, [[0.6, 0.8], [0, 0], [1, 0]], rtol=1e-6)


@pytest.mark.parametrize(("kind", "variance"), [("overlapping", 1.0), ("clustered", 0.5)])
def test_mixtures_have_the_variance_they_name(kind, variance):
    sample = synthetic.GENERATORS[kind](20_000, 4, 5, seed=1)
    spread = (sample.x - sample.means[sample.labels]).var(axis=0)
    np.testing.assert_allclose(spread, variance, rtol=0.05)
    assert sample.variance == variance


def test_tight_vectors_have_length_one_and_lie_near_their_direction():
    sample = synthetic.tight(2000, 64, seed=1)
    np.testing.assert_allclose(np.linalg.norm(sample.x, axis=1), 1, atol=1e-6)
    assert len(sample.means) == 1000
    off = sample.x - sample.means[sample.labels]
    np.testing.assert_allclose(off.std(), 0.02, rtol=0.1)


@pytest.mark.parametrize("kind", synthetic.GENERATORS)
def test_a_shift_moves_vectors_and_means_and_nothing_else(kind):
    here = synthetic.GENERATORS[kind](300, 8, shift=0, seed=3)
    there = synthetic.GENERATORS[kind](300, 8, shift=1000.0, seed=3)
    np.testing.assert_array_equal(there.labels, here.labels)
    np.testing.assert_allclose(there.x - 1000.0, here.x, atol=1e-4)
    np.testing.assert_allclose(there.means - 1000.0, here.means, atol=1e-10)
    other = synthetic.GENERATORS[kind](300, 8, seed=4)
    assert not np.array_equal(other.x, here.x)


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_an_artificial_data_set_has_exact_ground_truth(brute_force, metric):
    data = synthetic.dataset("overlapping", 500, 10, 6, metric=metric, k=4)
    np.testing.assert_array_equal(
        data.ground_truth, brute_force(data.base, data.query, 4, metric)[0]
    )


def test_an_unknown_mixture_is_refused():
    with pytest.raises(ValueError, match="one of overlapping, clustered, tight, got 'loose'"):
        synthetic.dataset("loose")
