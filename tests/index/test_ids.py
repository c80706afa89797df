"""The interval set of ids, and the check of ids given by a caller."""

import numpy as np
import pytest

from gmm_ivf._ids import IdSet, check_ids, unique_ids


@pytest.mark.parametrize("seed", range(4))
def test_id_set_equals_python_set(seed):
    rng = np.random.default_rng(seed)
    ids, truth = IdSet(), set()
    universe = np.arange(400)
    for _ in range(60):
        fresh = np.array(sorted(set(rng.integers(0, 400, rng.integers(0, 30))) - truth), np.int64)
        rng.shuffle(fresh)
        ids.add(fresh)
        truth |= set(fresh.tolist())
        held = np.array(sorted(truth), np.int64)
        gone = rng.permutation(held)[: rng.integers(0, 20)]
        ids.discard(gone)
        truth -= set(gone.tolist())
        assert len(ids) == len(truth)
        assert universe[ids.contains(universe)].tolist() == sorted(truth)


def test_consecutive_ids_take_no_memory():
    ids = IdSet()
    for start in range(0, 1_000_000, 50_000):
        ids.add(np.arange(start, start + 50_000))
    assert len(ids) == 1_000_000
    assert ids.nbytes == 16
    ids.discard(np.array([500_000]))
    assert ids.nbytes == 32
    assert ids.contains(np.array([499_999, 500_000, 500_001])).tolist() == [True, False, True]


def test_largest_ids():
    top = np.iinfo(np.int64).max
    ids = IdSet()
    ids.add(check_ids(np.array([top - 1, top - 2]), 2))
    assert ids.contains(np.array([top - 3, top - 2, top - 1, top])).tolist() == [
        False,
        True,
        True,
        False,
    ]
    ids.discard(np.array([top - 1]))
    assert len(ids) == 1
    with pytest.raises(ValueError, match=r"below 2\*\*63 - 1; got 9223372036854775807"):
        check_ids(np.array([top]), 1)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.array([1, -5, 2]), "negative.*-5"),
        (np.array([1.0, 2.0, 3.0]), "integers; got dtype float64"),
        (np.array([True, False, True]), "integers; got dtype bool"),
        (np.array(["a", "b", "c"]), "integers"),
        (np.array([1, 2], np.int64), r"shape \(3,\).*got \(2,\)"),
        (np.array([[1, 2, 3]]), r"shape \(3,\).*got \(1, 3\)"),
        (np.array([1, 2**63, 3], np.uint64), "int64; got 9223372036854775808"),
        (np.array([7, 9, 7]), "unique within one call; 7"),
    ],
)
def test_bad_ids_are_named(ids, message):
    with pytest.raises(ValueError, match=message):
        check_ids(ids, 3)


@pytest.mark.parametrize("dtype", ["i4", "u1", "u8", ">i8"])
def test_integer_dtypes_become_int64(dtype):
    checked = check_ids(np.array([5, 1, 3], dtype), 3)
    assert checked.dtype == np.int64
    assert checked.tolist() == [5, 1, 3]


def test_unique_ids_of_anything():
    assert unique_ids([3, 1, 3], "sel").tolist() == [1, 3]
    assert unique_ids([], "sel").tolist() == []
    assert unique_ids(np.int32(4), "sel").tolist() == [4]
