"""Loading by name and from users' own files."""

import subprocess
import sys

import numpy as np
import pytest

from gmm_ivf.datasets import rows as rows_module
from gmm_ivf.datasets.bins import write_bin
from gmm_ivf.datasets.ground_truth import exact_neighbors
from gmm_ivf.datasets.npy import write_npy
from gmm_ivf.datasets.registry import entries, load
from gmm_ivf.datasets.vecs import write_vecs


def test_the_registry_knows_three_data_sets():
    known = entries()
    assert list(known) == ["sift-mini", "sift1m", "gist1m"]
    assert known["sift1m"].url == "http://ann-benchmarks.com/sift-128-euclidean.hdf5"
    assert known["gist1m"].url == "http://ann-benchmarks.com/gist-960-euclidean.hdf5"
    for name in ("sift1m", "gist1m"):
        entry = known[name]
        values = 4 * (entry.n + entry.queries) * entry.d + 8 * entry.queries * entry.k
        # What HDF5 itself takes of these files.
        assert entry.bytes - values == 8288


def test_an_unknown_name_lists_names_and_suffixes(tmp_path):
    with pytest.raises(ValueError, match=r"no file 'sift'.* sift-mini, sift1m, gist1m, .*\.fvecs"):
        load("sift")
    path = tmp_path / "x.csv"
    path.write_text("1,2")
    with pytest.raises(ValueError, match=r"must end in one of .*\.hdf5.*got '\.csv'"):
        load(path)


@pytest.mark.parametrize(
    ("suffix", "write"), [(".fvecs", write_vecs), (".fbin", write_bin), (".npy", write_npy)]
)
def test_own_vectors_get_queries_held_out(tmp_path, vectors, suffix, write):
    path = tmp_path / f"mine{suffix}"
    write(path, vectors)
    before = path.read_bytes()
    data = load(path)
    assert (data.base.shape, data.query.shape, data.ground_truth) == ((54, 5), (6, 5), None)
    assert data.source == f"{path}; 6 random rows held out as queries (seed 0)"
    together = np.concatenate([data.base, data.query])
    np.testing.assert_array_equal(np.unique(together, axis=0), np.unique(vectors, axis=0))
    again = load(str(path))
    np.testing.assert_array_equal(again.base, data.base)
    np.testing.assert_array_equal(again.query, data.query)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("n", "held"), [(2, 1), (9, 1), (100, 10), (20_000, 1000)])
def test_a_tenth_is_held_out_and_at_most_a_thousand(tmp_path, n, held):
    path = tmp_path / "x.npy"
    write_npy(path, np.arange(n, dtype=np.float32).reshape(n, 1))
    data = load(path)
    assert (len(data.base), len(data.query)) == (n - held, held)
    assert len(np.unique(np.concatenate([data.base, data.query]))) == n


def test_one_row_is_too_few_to_hold_one_out(tmp_path):
    write_npy(tmp_path / "x.npy", np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"at least 2 rows .* got 1"):
        load(tmp_path / "x.npy")


@pytest.mark.parametrize("prefix", ["", "sift_"])
@pytest.mark.parametrize(("vectors_in", "ids_in"), [(".fvecs", ".ivecs"), (".fbin", ".ibin")])
def test_files_that_belong_together_are_found(tmp_path, vectors, prefix, vectors_in, ids_in):
    write = write_vecs if vectors_in == ".fvecs" else write_bin
    ids, _ = exact_neighbors(vectors[10:], vectors[:10], 4)
    path = tmp_path / f"{prefix}base{vectors_in}"
    write(path, vectors[10:])
    write(tmp_path / f"{prefix}query{vectors_in}", vectors[:10])
    assert load(path).ground_truth is None
    write(tmp_path / f"{prefix}groundtruth{ids_in}", ids)
    data = load(path)
    np.testing.assert_array_equal(data.query, vectors[:10])
    np.testing.assert_array_equal(data.ground_truth, ids)
    np.testing.assert_array_equal(data.with_ground_truth(4).ground_truth, ids)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 37, 59])
def test_ix_n1_a_value_that_is_not_finite_names_the_row(
    monkeypatch, tmp_path, make_hdf5, vectors, bad, row
):
    monkeypatch.setattr(rows_module, "_BLOCK_VALUES", 35)
    broken = vectors.copy()
    broken[row, 3] = bad
    write_vecs(tmp_path / "x.fvecs", broken)
    with pytest.raises(ValueError, match=rf"must be finite; row {row} holds NaN"):
        load(tmp_path / "x.fvecs")
    with pytest.raises(ValueError, match=rf"base vectors of .* finite; row {row} holds"):
        load(make_hdf5("a.hdf5", train=broken, test=vectors))
    with pytest.raises(ValueError, match=rf"query vectors of .* finite; row {row} holds"):
        load(make_hdf5("b.hdf5", train=vectors, test=broken))


def test_a_value_too_large_for_float32_is_refused_and_a_large_one_is_not(make_hdf5):
    rows = np.full((20, 3), 3e38)
    assert load(make_hdf5("a.hdf5", train=rows, test=rows)).base.max() < np.inf
    rows[11, 0] = 1e39
    with pytest.raises(ValueError, match="row 11"):
        load(make_hdf5("b.hdf5", train=rows, test=rows))


@pytest.mark.parametrize("limit", [1, 20, 50])
def test_a_limit_takes_the_first_rows_and_searches_again(make_hdf5, vectors, limit):
    ids, distances = exact_neighbors(vectors[10:], vectors[:10], 5)
    path = make_hdf5(train=vectors[10:], test=vectors[:10], neighbors=ids, distances=distances)
    data = load(path, limit=limit)
    np.testing.assert_array_equal(data.base, vectors[10 : 10 + limit])
    wanted, _ = exact_neighbors(vectors[10 : 10 + limit], vectors[:10], min(5, limit))
    np.testing.assert_array_equal(data.ground_truth, wanted)
    assert ("; first" in data.source) == (limit < 50)
    whole = load(path).subset(limit)
    np.testing.assert_array_equal(whole.ground_truth, data.ground_truth)
    np.testing.assert_array_equal(whole.distances, data.distances)


@pytest.mark.parametrize("limit", [0, -1, 51])
def test_a_limit_that_cannot_be_is_refused(make_hdf5, vectors, limit):
    path = make_hdf5(train=vectors[10:], test=vectors[:10])
    with pytest.raises(ValueError, match=rf"between 1 and the 50 base vectors .* got {limit}"):
        load(path, limit=limit)
    with pytest.raises(ValueError, match=f"got {limit}"):
        load(path).subset(limit)


def test_loading_needs_no_torch():
    code = (
        "import sys; from gmm_ivf.datasets.registry import load; load('sift-mini'); "
        "print(sorted({'torch', 'faiss'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_metric_of_a_file_that_does_not_say(tmp_path, vectors):
    path = tmp_path / "mine.npy"
    write_npy(path, vectors)
    assert load(path).metric == "l2"
    assert load(path, metric="ip").metric == "ip"
    unit = load(path, metric="cosine").base
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-6)
    with pytest.raises(ValueError, match=r"metric must be one of .*, got 'dot'"):
        load(path, metric="dot")


def test_metric_that_contradicts_the_data_is_refused():
    assert load("sift-mini", metric="l2").metric == "l2"
    with pytest.raises(ValueError, match="metric 'ip' contradicts sift-mini, which says 'l2'"):
        load("sift-mini", metric="ip")


def test_first_queries_keep_their_ground_truth():
    whole = load("sift-mini")
    assert whole.ground_truth is not None
    part = whole.first_queries(10)
    assert (len(part.query), part.n) == (10, whole.n)
    np.testing.assert_array_equal(part.ground_truth, whole.ground_truth[:10])
    with pytest.raises(ValueError, match="count must be at least 1"):
        whole.first_queries(0)
