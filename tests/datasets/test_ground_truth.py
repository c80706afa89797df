"""Exact neighbours against float64 brute force."""

import numpy as np
import pytest

from gmm_ivf.datasets import ground_truth
from gmm_ivf.datasets.ground_truth import distances_to, exact_neighbors

METRICS = ["l2", "ip", "cosine"]


def reported(costs, metric):
    return np.sqrt(costs) if metric == "l2" else -costs if metric == "ip" else costs


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that a tiny case crosses their borders, and no margin to hide behind."""
    monkeypatch.setattr(ground_truth, "_QUERY_ROWS", 7)
    monkeypatch.setattr(ground_truth, "_BASE_ROWS", 11)
    monkeypatch.setattr(ground_truth, "_GATHER_VALUES", 50)
    monkeypatch.setattr(ground_truth, "_MARGIN", 1)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("d", [1, 2, 17, 128])
def test_equals_brute_force(small_blocks, brute_force, metric, d):
    rng = np.random.default_rng(d)
    base, query = rng.standard_normal((100, d)), rng.standard_normal((20, d))
    base, query = base.astype(np.float32), query.astype(np.float32)
    ids, distances = exact_neighbors(base, query, 9, metric)
    wanted, costs = brute_force(base, query, 9, metric)
    if metric != "cosine" or d > 1:  # in one dimension every cosine is 1 or -1 up to rounding
        np.testing.assert_array_equal(ids, wanted)
    assert (ids.dtype, distances.dtype) == (np.int64, np.float32)
    np.testing.assert_allclose(distances, reported(costs, metric), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("metric", METRICS)
def test_duplicates_come_in_order_of_their_ids(small_blocks, metric):
    rng = np.random.default_rng(0)
    base = np.tile(rng.standard_normal((5, 6)).astype(np.float32), (20, 1))
    query = base[:5] * np.float32(1.5)
    ids, distances = exact_neighbors(base, query, 20, metric)
    best = ids[:, 0]
    np.testing.assert_array_equal(ids, best[:, None] + 5 * np.arange(20))
    assert (distances == distances[:, :1]).all()
    assert (best < 5).all()


def test_ties_beyond_the_margin_are_not_left_to_chance():
    # 500 rows at the same distance, far more than the candidates kept.
    base = np.zeros((500, 3), np.float32)
    base[:, 0] = np.where(np.arange(500) % 2, 1, -1)
    ids, distances = exact_neighbors(base, np.zeros((3, 3), np.float32), 40)
    np.testing.assert_array_equal(ids, np.tile(np.arange(40), (3, 1)))
    np.testing.assert_array_equal(distances, 1)


@pytest.mark.parametrize("shift", [0, 1e3, 1e5])
def test_an_offset_does_not_change_the_neighbours(brute_force, shift):
    rng = np.random.default_rng(1)
    base = (rng.standard_normal((800, 32)) + shift).astype(np.float32)
    query = (rng.standard_normal((10, 32)) + shift).astype(np.float32)
    ids, distances = exact_neighbors(base, query, 10)
    wanted, costs = brute_force(base, query, 10)
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_allclose(distances, np.sqrt(costs), rtol=1e-6)


def test_neighbours_that_float32_cannot_tell_apart_are_searched_in_float64(
    monkeypatch, small_blocks, brute_force
):
    # Distances from one far query differ in the ninth digit.
    base = np.linspace(1, 1.0001, 300, dtype=np.float32).reshape(-1, 1)
    query = np.array([[-3000.0]], np.float32)
    searched = []
    one = ground_truth._search_one
    monkeypatch.setattr(ground_truth, "_search_one", lambda *a: (searched.append(1), one(*a))[1])
    ids, _ = exact_neighbors(base, query, 5)
    np.testing.assert_array_equal(ids, brute_force(base, query, 5)[0])
    assert searched


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_squares_that_leave_float32_are_searched_in_float64(brute_force, scale):
    rng = np.random.default_rng(2)
    base = (rng.standard_normal((200, 4)) * scale).astype(np.float32)
    ids, _ = exact_neighbors(base, base[:5], 6)
    np.testing.assert_array_equal(ids, brute_force(base, base[:5], 6)[0])


@pytest.fixture
def fast_only(monkeypatch):
    """Fails when a query is searched again in float64: that would hide errors of the first pass."""

    def refuse(*_):
        raise AssertionError("searched again")

    monkeypatch.setattr(ground_truth, "_search_one", refuse)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("shift", [0, 1e4])
def test_ordinary_queries_need_one_pass(monkeypatch, fast_only, brute_force, metric, shift):
    monkeypatch.setattr(ground_truth, "_BASE_ROWS", 300)
    rng = np.random.default_rng(5)
    # Vectors far from the origin all have the same cosine.
    shift = 0 if metric == "cosine" else shift
    base = (rng.standard_normal((2000, 24)) + shift).astype(np.float32)
    query = (rng.standard_normal((30, 24)) + shift).astype(np.float32)
    ids, _ = exact_neighbors(base, query, 10, metric)
    np.testing.assert_array_equal(ids, brute_force(base, query, 10, metric)[0])


def test_an_outlier_does_not_send_every_query_to_the_slow_path(fast_only):
    rng = np.random.default_rng(3)
    base = rng.standard_normal((2000, 16)).astype(np.float32)
    base[7] *= 1000
    exact_neighbors(base, rng.standard_normal((50, 16)).astype(np.float32), 10)


def test_rows_of_zeros_have_a_cosine_of_zero():
    base = np.array([[0, 0], [1, 0], [-1, 0]], np.float32)
    ids, distances = exact_neighbors(base, np.array([[2, 0]], np.float32), 3, "cosine")
    np.testing.assert_array_equal(ids, [[1, 0, 2]])
    np.testing.assert_array_equal(distances, [[0, 1, 2]])


@pytest.mark.parametrize(
    "form", ["strided", "fortran", "float16", "uint8", "int8", "float64", "read-only"]
)
def test_any_array_of_real_numbers_will_do(brute_force, form):
    base = np.random.default_rng(4).integers(0, 100, (90, 8))
    base = {
        "strided": lambda x: np.repeat(x, 2, axis=1).astype(np.float32)[:, ::2],
        "fortran": lambda x: np.asfortranarray(x, np.float32),
        "read-only": lambda x: np.frombuffer(x.astype("f4").tobytes(), "f4").reshape(90, 8),
    }.get(form, lambda x: x.astype(form))(base)
    ids, _ = exact_neighbors(base, base[:9], 5)
    np.testing.assert_array_equal(ids, brute_force(base, base[:9], 5)[0])


def test_a_memory_mapped_base_gives_the_same(tmp_path, vectors):
    np.save(tmp_path / "x.npy", vectors)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for a, b in zip(
        exact_neighbors(mapped, mapped[:5], 7),
        exact_neighbors(vectors, vectors[:5], 7),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("metric", METRICS)
def test_distances_to_named_rows_agree_with_the_search(metric, vectors):
    ids, distances = exact_neighbors(vectors, vectors[:6] + 1, 4, metric)
    np.testing.assert_array_equal(distances_to(vectors, vectors[:6] + 1, ids, metric), distances)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k must be between 1 and the 60 rows of base, got 0"),
        ({"k": 61}, "k must be between .* got 61"),
        ({"metric": "hamming"}, "metric must be one of"),
        ({"query": np.zeros((2, 4), np.float32)}, "same number of columns"),
        ({"query": np.zeros(5, np.float32)}, "must be 2-D"),
        ({"query": np.full((2, 5), np.nan, np.float32)}, "query must be finite; row 0"),
    ],
)
def test_wrong_arguments_are_named(vectors, change, message):
    arguments = {"base": vectors, "query": vectors[:2], "k": 3} | change
    with pytest.raises(ValueError, match=message):
        exact_neighbors(**arguments)


def test_all_rows_may_be_asked_for(vectors, brute_force):
    ids, _ = exact_neighbors(vectors, vectors[:3], 60)
    np.testing.assert_array_equal(ids, brute_force(vectors, vectors[:3], 60)[0])
