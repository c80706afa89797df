"""The ann-benchmarks HDF5 layout."""

import numpy as np
import pytest

from gmm_ivf.datasets.hdf5 import read_hdf5, write_hdf5
from gmm_ivf.datasets.raw import RawVectors
from gmm_ivf.datasets.registry import load


def columns(vectors, k=3):
    ids = np.arange(10 * k).reshape(10, k).astype(np.int32)
    return {
        "train": vectors[10:],
        "test": vectors[:10],
        "neighbors": ids,
        "distances": ids.astype(np.float32),
    }


def test_all_four_datasets_are_read(make_hdf5, vectors):
    given = columns(vectors)
    data = load(make_hdf5(**given, attributes={"distance": "euclidean"}))
    np.testing.assert_array_equal(data.base, given["train"])
    np.testing.assert_array_equal(data.query, given["test"])
    np.testing.assert_array_equal(data.ground_truth, given["neighbors"])
    np.testing.assert_array_equal(data.distances, given["distances"])
    assert data.ground_truth is not None and data.ground_truth.dtype == np.int64
    assert (data.name, data.metric, data.n, data.d) == ("data", "l2", 50, 5)


@pytest.mark.parametrize("dtype", ["u1", "i1", "f2", "f8", ">f4", "i4"])
def test_other_types_are_cast_to_float32(make_hdf5, dtype):
    rows = np.random.default_rng(0).integers(0, 100, (20, 4)).astype(dtype)
    data = load(make_hdf5(train=rows, test=rows[:3]))
    assert data.base.dtype == data.query.dtype == np.float32
    assert data.base.dtype.isnative
    np.testing.assert_array_equal(data.base, rows.astype(np.float32))


def test_plain_float32_is_mapped_and_compressed_is_read(make_hdf5, vectors):
    mapped = read_hdf5(make_hdf5("a.hdf5", train=vectors))
    read = read_hdf5(make_hdf5("b.hdf5", train=vectors, options={"compression": "gzip"}))
    assert isinstance(mapped.base, np.memmap)
    assert not isinstance(read.base, np.memmap)
    np.testing.assert_array_equal(mapped.base, read.base)


@pytest.mark.parametrize(
    ("attribute", "metric"),
    [("euclidean", "l2"), ("angular", "cosine"), ("ip", "ip"), (np.bytes_("angular"), "cosine")],
)
def test_the_distance_attribute_gives_the_metric(make_hdf5, vectors, attribute, metric):
    path = make_hdf5(**columns(vectors), attributes={"distance": attribute})
    data = load(path)
    assert data.metric == metric
    lengths = np.linalg.norm(data.base, axis=1)
    assert np.allclose(lengths, 1, atol=1e-6) == (metric == "cosine")
    assert (data.distances is None) == (metric == "ip")


def test_an_unknown_distance_is_refused(make_hdf5, vectors):
    path = make_hdf5(**columns(vectors), attributes={"distance": "hamming"})
    with pytest.raises(ValueError, match=r"'distance' of .* must be one of .*got 'hamming'"):
        load(path)


def test_neighbours_may_be_missing(make_hdf5, vectors):
    data = load(make_hdf5(train=vectors, test=vectors[:4]))
    assert data.ground_truth is None
    assert data.distances is None


@pytest.mark.parametrize("name", ["train", "embeddings"])
def test_a_file_of_vectors_alone_gets_queries_held_out(make_hdf5, vectors, name):
    path = make_hdf5(**{name: vectors})
    before = path.read_bytes()
    data = load(path)
    assert path.read_bytes() == before
    assert (data.base.shape, data.query.shape) == ((54, 5), (6, 5))
    assert "6 random rows held out as queries (seed 0)" in data.source


def test_a_file_without_train_lists_what_was_found(make_hdf5, vectors):
    path = make_hdf5(a=vectors, b=vectors[:3])
    with pytest.raises(ValueError, match=r"'train' and the queries as 'test'.*a \(60, 5\), b \(3"):
        load(path)
    with pytest.raises(ValueError, match="found nothing"):
        load(make_hdf5("none.hdf5"))


def test_neighbours_without_queries_are_refused(make_hdf5, vectors):
    path = make_hdf5(train=vectors, neighbors=np.zeros((3, 2), np.int32))
    with pytest.raises(ValueError, match=r"has 'neighbors' but not the queries .*'test'"):
        load(path)


@pytest.mark.parametrize("size", [0, 100, -200])
def test_a_file_that_is_no_hdf5_or_cut_off_is_named(make_hdf5, vectors, size):
    path = make_hdf5(train=np.tile(vectors, (100, 1)), test=vectors)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"data\.hdf5 is not a readable HDF5 file"):
        load(path)


def test_text_is_no_vector(make_hdf5):
    path = make_hdf5(train=np.array([[b"a", b"b"]]), test=np.zeros((1, 2)))
    with pytest.raises(ValueError, match=r"/train of .* must hold real numbers"):
        load(path)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 50]] * 10, r"0 to 49; query 0 has 50 at rank 1"),
        ([[0, 1]] * 9 + [[-1, 0]], r"query 9 has -1 at rank 0"),
        ([[0, 1]] * 9, r"must have shape \(10, k\)"),
        ([[0, 1]] * 9 + [[7, 7]], r"query 9 has one twice"),
        (np.arange(10), r"must have shape"),
        ([[0.0, 1.0]] * 10, r"must be integers"),
    ],
    ids=["above", "below", "too few", "twice", "1-D", "float"],
)
def test_wrong_ground_truth_is_refused(make_hdf5, vectors, ids, message):
    path = make_hdf5(train=vectors[10:], test=vectors[:10], neighbors=np.array(ids))
    with pytest.raises(ValueError, match=message):
        load(path)


def test_distances_must_have_the_shape_of_the_neighbours(make_hdf5, vectors):
    given = columns(vectors) | {"distances": np.zeros((10, 2), np.float32)}
    with pytest.raises(ValueError, match=r"distances of data must be float32 .*\(10, 3\)"):
        load(make_hdf5(**given))


def test_queries_of_another_dimension_are_refused(make_hdf5, vectors):
    with pytest.raises(ValueError, match=r"query of data must have the base's 5 dimensions, got 4"):
        load(make_hdf5(train=vectors, test=vectors[:, :4]))


def test_what_is_written_is_read_again(tmp_path, vectors):
    given = columns(vectors)
    raw = RawVectors(
        given["train"], given["test"], given["neighbors"], given["distances"], "cosine"
    )
    write_hdf5(tmp_path / "x.hdf5", raw, "somewhere")
    got = read_hdf5(tmp_path / "x.hdf5")
    for a, b in zip(got, raw, strict=True):
        np.testing.assert_array_equal(a, b)
