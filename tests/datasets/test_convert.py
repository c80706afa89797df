"""Converting, verifying and the command line."""

import numpy as np
import pytest

from gmm_ivf.datasets.__main__ import main
from gmm_ivf.datasets.bins import write_bin
from gmm_ivf.datasets.convert import convert
from gmm_ivf.datasets.ground_truth import exact_neighbors
from gmm_ivf.datasets.hdf5 import read_hdf5
from gmm_ivf.datasets.npy import write_npy
from gmm_ivf.datasets.registry import load
from gmm_ivf.datasets.vecs import write_vecs
from gmm_ivf.datasets.verify import verify


@pytest.fixture
def whole(make_hdf5, vectors):
    """An HDF5 file with everything in it."""
    ids, distances = exact_neighbors(vectors[10:], vectors[:10], 5)
    return make_hdf5(train=vectors[10:], test=vectors[:10], neighbors=ids, distances=distances)


@pytest.mark.parametrize("suffix", [".fvecs", ".fbin", ".npy", ".h5"])
def test_there_and_back_again(whole, tmp_path, suffix):
    there = convert(whole, tmp_path / f"out{suffix}")
    (back,) = convert(there[0], tmp_path / "back.hdf5")
    first, last = load(whole), load(back)
    for field in ("base", "query", "ground_truth", "distances", "metric"):
        np.testing.assert_array_equal(getattr(last, field), getattr(first, field))
    assert not list(tmp_path.glob("part-*"))


def test_names_of_the_parts(whole, tmp_path):
    names = [path.name for path in convert(whole, tmp_path / "sift_base.fvecs")]
    assert names == ["sift_base.fvecs", "sift_query.fvecs", "sift_groundtruth.ivecs"]
    names = [path.name for path in convert(whole, tmp_path / "sift.fbin")]
    assert names == ["sift_base.fbin", "sift_query.fbin", "sift_groundtruth.ibin"]


def test_vectors_alone_stay_alone_and_whole(vectors, tmp_path):
    write_vecs(tmp_path / "mine.fvecs", vectors)
    (path,) = convert(tmp_path / "mine.fvecs", tmp_path / "mine.npy")
    np.testing.assert_array_equal(np.load(path), vectors)


def test_small_types_stay_small_in_hdf5(tmp_path):
    rows = np.random.default_rng(0).integers(0, 255, (30, 4), dtype=np.uint8)
    write_bin(tmp_path / "x.u8bin", rows)
    (path,) = convert(tmp_path / "x.u8bin", tmp_path / "x.hdf5")
    assert read_hdf5(path).base.dtype == np.uint8
    assert load(path).base.dtype == np.float32


def test_queries_and_neighbours_from_files_of_their_own(vectors, tmp_path):
    write_bin(tmp_path / "v.fbin", vectors[10:])
    write_npy(tmp_path / "q.npy", vectors[:10])
    ids, distances = exact_neighbors(vectors[10:], vectors[:10], 5, "cosine")
    write_bin(tmp_path / "g.ibin", ids)
    (path,) = convert(
        tmp_path / "v.fbin",
        tmp_path / "x.hdf5",
        query=tmp_path / "q.npy",
        ground_truth=tmp_path / "g.ibin",
        metric="cosine",
    )
    data = verify(str(path))
    assert data.metric == "cosine"
    np.testing.assert_array_equal(data.ground_truth, ids)
    assert data.distances is not None
    np.testing.assert_allclose(data.distances, distances, atol=1e-6)


def test_another_metric_drops_the_ground_truth(whole, tmp_path):
    (path,) = convert(whole, tmp_path / "x.hdf5", metric="ip")
    data = load(path)
    assert (data.metric, data.ground_truth, data.distances) == ("ip", None, None)
    with pytest.raises(ValueError, match=r"\.fvecs files cannot say that the metric is ip"):
        convert(path, tmp_path / "x.fvecs")


def test_nothing_is_overwritten_and_nothing_half_written(whole, tmp_path):
    taken = tmp_path / "x_query.fvecs"
    taken.write_text("mine")
    with pytest.raises(ValueError, match=r"x_query\.fvecs exists; delete it"):
        convert(whole, tmp_path / "x.fvecs")
    assert taken.read_text() == "mine"
    assert not (tmp_path / "x_base.fvecs").exists()
    with pytest.raises(ValueError, match="must fit uint8"):
        convert(whole, tmp_path / "y.bvecs")
    assert not list(tmp_path.glob("*y_*"))


def test_neighbours_need_queries(vectors, tmp_path):
    write_npy(tmp_path / "x.npy", vectors)
    with pytest.raises(ValueError, match="ground_truth needs queries"):
        convert(tmp_path / "x.npy", tmp_path / "x.hdf5", ground_truth=tmp_path / "g.ivecs")


def test_verify_finds_a_wrong_neighbour(make_hdf5, vectors):
    ids, _ = exact_neighbors(vectors[10:], vectors[:10], 5)
    ids[6, 4] = next(i for i in range(50) if i not in ids[6])
    path = make_hdf5(train=vectors[10:], test=vectors[:10], neighbors=ids)
    with pytest.raises(ValueError, match=r"query 6 must have distance .* at rank 4"):
        verify(str(path))


def test_verify_finds_squared_distances(make_hdf5, vectors):
    ids, distances = exact_neighbors(vectors[10:], vectors[:10], 5)
    path = make_hdf5(train=vectors[10:], test=vectors[:10], neighbors=ids, distances=distances**2)
    with pytest.raises(ValueError, match=r"noted distances of data: .*not squared"):
        verify(str(path))


def test_verify_accepts_another_order_of_ties(make_hdf5):
    base = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0)
    ids = np.array([[3, 2, 1, 0]])
    verify(str(make_hdf5(train=base, test=base[:1], neighbors=ids)))


def test_list_shows_where_files_are(tmp_path, capsys):
    assert main(["list", "--data-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1].endswith("sift-mini.hdf5")
    assert "not here; http://ann-benchmarks.com/sift-128-euclidean.hdf5" in lines[2]


def test_commands_work_from_end_to_end(whole, tmp_path, capsys):
    assert main(["convert", str(whole), str(tmp_path / "x.fvecs")]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert main(["verify", first]) == 0
    assert (
        "50 x 5, 10 queries, l2, ground truth of 5, 10 queries searched" in capsys.readouterr().out
    )
    assert main(["download", "sift-mini"]) == 0
    assert capsys.readouterr().out.strip().endswith("sift-mini.hdf5")


def test_convert_takes_a_known_name(tmp_path, capsys):
    assert main(["convert", "sift-mini", str(tmp_path / "o.npy")]) == 0
    base, *_ = capsys.readouterr().out.splitlines()
    np.testing.assert_array_equal(load(base).base, load("sift-mini").base)
    assert main(["convert", "sift1m", str(tmp_path / "p.npy"), "--data-dir", str(tmp_path)]) == 1
    assert "sift1m needs the file" in capsys.readouterr().err
    assert main(["convert", "sift-maxi", str(tmp_path / "p.npy")]) == 1
    error = capsys.readouterr().err
    assert "no file 'sift-maxi', nor a data set of that name: known are sift-mini" in error


def test_errors_are_one_sentence_and_a_status(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "none.fvecs")]) == 1
    assert main(["convert", str(tmp_path / "none.fvecs"), "x.npy"]) == 1
    assert main(["verify", "sift1m", "--data-dir", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.startswith("error: ") for line in printed.err.splitlines()] == [True] * 3
