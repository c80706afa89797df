"""Index files: an index that is read does what the one that was written did."""

import os
import stat
from pathlib import Path

import faiss
import numpy as np
import pytest

from gmm_ivf import GMMQuantizer, IndexIVFGMM, index_factory, io, read_index, write_index
from gmm_ivf._sections import Sections
from gmm_ivf.rules import Rule, Soar, Top2

OPTIONS = {
    "soft": {},
    "tau": {"tau": 0.05, "max_lists": 3},
    "hard": {"max_lists": 1},
    "rule": {"rule": Soar(lambda_=0.7)},
}


def assert_equal(one, other, queries, k=7):
    """Both find the same, at the same cost."""
    for ours, theirs in zip(other.search(queries, k), one.search(queries, k), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for part in ("scanned", "coarse", "ranking"):
        np.testing.assert_array_equal(
            getattr(other.last_search, part), getattr(one.last_search, part)
        )


def assert_same_entries(one, other, entries_of):
    for ours, theirs in zip(entries_of(other._ivf), entries_of(one._ivf), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture
def full(blobs, soft):
    """``full(name="Flat", metric=..., **options)``: with ids, removals and nprobe of its own."""

    def make(name="Flat", metric=faiss.METRIC_L2, **options):
        x = blobs(600, 8)
        index = soft(x, 12, name, metric, **options)
        index.add(x[:300])
        index.add_with_ids(x[300:500], np.arange(1000, 1400, 2))
        index.remove_ids([3, 4, 299, 1010])
        index.nprobe = 4
        return index

    return make


@pytest.mark.parametrize("name", ["Flat", "PQ", "SQ8", "SQ4", "SQfp16", "RaBitQ"])
@pytest.mark.parametrize("metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT])
def test_every_codec(blobs, full, entries_of, tmp_path, name, metric):
    index, path = full(name, metric), tmp_path / "index.gmm"
    write_index(index, path)
    read = read_index(path)
    assert type(read) is IndexIVFGMM
    assert repr(read) == repr(index)
    assert_equal(index, read, blobs(50, 8, seed=1))
    # What comes after a round trip goes the same way: same ids, same lists, same codes.
    for each in (index, read):
        each.add(blobs(100, 8, seed=2))
        each.remove_ids(np.arange(20))
    assert_same_entries(index, read, entries_of)
    assert_equal(index, read, blobs(50, 8, seed=3))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("mmap", [False, True])
def test_every_option(blobs, full, entries_of, tmp_path, options, mmap):
    index, path = full(**options), str(tmp_path / "index.gmm")
    write_index(index, path)
    read = read_index(path, mmap=mmap)
    assert (read.tau, read.max_lists, read.nprobe) == (index.tau, index.max_lists, index.nprobe)
    assert read.stats()["entries"] == index.stats()["entries"]
    assert_equal(index, read, blobs(50, 8, seed=1))
    assert_same_entries(index, read, entries_of)


@pytest.mark.parametrize("kind", ["spherical", "diag", "tied", "full"])
def test_every_covariance(blobs, codec, trained, entries_of, tmp_path, kind):
    x = blobs(600, 6)
    q = trained(x, 8, covariance_type=kind, precision="fp64", max_points_per_centroid=50)
    index = IndexIVFGMM(codec("Flat", q), q, max_lists=3)
    index.train(x)
    write_index(index, tmp_path / "f")
    read = read_index(tmp_path / "f")
    assert read.quantizer.train_report == q.train_report
    assert read.quantizer.mixture.precision == "fp64"
    for name in ("weights_", "means_", "covariances_", "precisions_cholesky_"):
        np.testing.assert_array_equal(
            getattr(read.quantizer.mixture, name), getattr(q.mixture, name)
        )
    for each in (index, read):
        each.add(x)
    assert_same_entries(index, read, entries_of)
    read.reset()
    read.quantizer.reset()
    read.quantizer.train(x)  # its options came along
    assert read.quantizer.train_report["rows"] == 400


def test_odd_options_of_a_mixture(blobs, tmp_path):
    x = blobs(300, 6)
    options = {
        "tol": np.float32(0.1),
        "max_iter": np.int64(0),
        "random_state": np.random.RandomState(0),
    }
    q = GMMQuantizer(6, 5, means_init=x[:5], **options)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 6, 5), q)
    index.train(x)
    index.add(x)
    write_index(index, tmp_path / "f")
    read = read_index(tmp_path / "f")
    assert_equal(index, read, x[:20])
    assert read.quantizer.mixture.lower_bound_ == q.mixture.lower_bound_
    assert read.quantizer.mixture.random_state is None


def test_centroids_without_a_mixture(blobs, entries_of, tmp_path):
    x, q = blobs(300, 5), GMMQuantizer.from_centroids(blobs(20, 5, seed=1))
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 5, 20), q, rule=Top2())
    index.add(x)
    write_index(index, tmp_path / "f")
    read = read_index(tmp_path / "f")
    assert_equal(index, read, x)
    assert_same_entries(index, read, entries_of)


def test_far_from_the_origin(blobs, soft, tmp_path):
    x = blobs(500, 6) + np.float32(1000)
    index = soft(x, 8)
    index.add(x)
    index.nprobe = 3
    write_index(index, tmp_path / "f")
    assert_equal(index, read_index(tmp_path / "f"), x[:50])


def test_empty_and_emptied(blobs, soft, tmp_path):
    x = blobs(400, 6)
    index = soft(x, 8)
    for expected in (0, 5):
        write_index(index, tmp_path / "f")
        for mmap in (False, True):
            read = read_index(tmp_path / "f", mmap=mmap)
            assert read.ntotal == 0
            assert read.search(x[:3], 4)[1].tolist() == [[-1] * 4] * 3
        read = read_index(tmp_path / "f")
        read.add(x[:2])
        assert sorted(read.search(x[:2], 1)[1].ravel()) == [expected, expected + 1]
        index.add(x[:5])
        index.remove_ids(np.arange(5))


@pytest.mark.parametrize("prefix", ["OPQ4_4", "PCA5", "L2norm"])
def test_transforms(blobs, tmp_path, prefix):
    x = blobs(800, 8)
    stock = faiss.index_factory(8, f"{prefix},IVF10,SQ8")
    q = GMMQuantizer(faiss.extract_index_ivf(stock).d, 10, random_state=0, tol=1e-2)
    q.attach(stock)
    index = IndexIVFGMM(stock, q)
    index.train(x)
    index.add(x)
    index.nprobe = 3
    write_index(index, tmp_path / "f")
    read = read_index(tmp_path / "f")
    assert read.index.ntotal == index.index.ntotal
    assert_equal(index, read, blobs(50, 8, seed=1))


@pytest.mark.parametrize("mmap", [False, True])
def test_originals_and_fast_scan(blobs, trained, tmp_path, mmap):
    x = blobs(800, 8)
    q = trained(x, 10)
    pq = faiss.IndexIVFPQ(q, 8, 10, 4, 4)
    index = IndexIVFGMM(pq, q, fast_scan=True, refine="flat", k_factor=4)
    index.train(x)
    index.add(x)
    index.nprobe = 3
    write_index(index, tmp_path / "f")
    read = read_index(tmp_path / "f", mmap=mmap)
    assert read.k_factor == 4
    assert_equal(index, read, blobs(50, 8, seed=1))


@pytest.mark.parametrize("name", ["Flat", "SQ8", "PQ4x4"])
@pytest.mark.parametrize("mmap", [False, True])
def test_cells(blobs, tmp_path, name, mmap):
    x, path = blobs(1500, 8), tmp_path / "f"
    index = index_factory(8, f"GMM12cells6,{name}", random_state=0, tol=1e-2)
    index.train(x)
    index.add(x[:1000])
    index.remove_ids(np.arange(100, 200))
    index.nprobe = 3
    write_index(index, path)
    read = read_index(path, mmap=mmap)
    assert_equal(index, read, blobs(50, 8, seed=1))
    if not mmap:
        for each in (index, read):
            each.add(x[1000:])
        assert_equal(index, read, blobs(50, 8, seed=2))
    plain = read.to_faiss()
    assert plain.ntotal == read.ntotal


@pytest.mark.parametrize("moment", ["quantizer_of_parts", "_fill", "map_lists"])
def test_a_file_replaced_while_it_is_read(full, tmp_path, monkeypatch, moment):
    index, path = full(), tmp_path / "f"
    write_index(index, path)
    step = getattr(io, moment)

    def replaced_before(*arguments):
        index.remove_ids(index.search(np.zeros((1, 8), "f4"), 1)[1][0])
        write_index(index, path)
        return step(*arguments)

    monkeypatch.setattr(io, moment, replaced_before)
    with pytest.raises(ValueError, match="f was replaced while it was read: read it again"):
        read_index(path, mmap=moment == "map_lists")
    monkeypatch.undo()
    assert read_index(path).ntotal == index.ntotal


def test_mapped_indexes_are_read_only(blobs, full, tmp_path):
    index, path, x = full(), tmp_path / "f", blobs(20, 8, seed=1)
    write_index(index, path)
    path.chmod(stat.S_IRUSR)
    read = read_index(path, mmap=True, verify=False)
    for change in (
        lambda: read.add(x),
        lambda: read.add_with_ids(x, np.arange(20) + 9000),
        lambda: read.remove_ids([5]),
        lambda: read.train(x),
        lambda: read.reset(),
        lambda: read.merge_from(index),
    ):
        with pytest.raises(RuntimeError, match="mapped from a file, and read-only"):
            change()
    assert_equal(index, read, x)
    # Written anew over the file that it is mapped from.
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    write_index(read, path)
    assert_equal(index, read, x)
    assert_equal(index, read_index(path), x)


def test_a_graph_comes_back(blobs, tmp_path):
    # Built by several threads, or in another order, it would be another one.
    x = blobs(3000, 8)
    q = GMMQuantizer(8, 200, coarse="hnsw4", ef_search=8, random_state=0, tol=1e-2)
    index = IndexIVFGMM(faiss.IndexIVFFlat(q, 8, 200), q)
    with pytest.warns(UserWarning, match="39 per list"):
        index.train(x)
    index.add(x)
    index.nprobe = 6
    write_index(index, tmp_path / "f")
    read = read_index(tmp_path / "f")
    assert (read.quantizer.coarse, read.quantizer.ef_search) == ("hnsw4", 8)
    assert_equal(index, read, x[:200])


def test_max_codes_comes_back(blobs, full, tmp_path):
    index = full()
    index.index.max_codes = 30
    write_index(index, tmp_path / "f")
    assert_equal(index, read_index(tmp_path / "f"), blobs(50, 8, seed=1))


def test_writing_leaves_the_index_as_it_was(blobs, full, tmp_path):
    index, queries = full("PQ"), blobs(50, 8, seed=1)
    before, references = index.search(queries, 5), list(index.index.referenced_objects)
    for _ in range(5):
        write_index(index, tmp_path / "f")
    for ours, theirs in zip(index.search(queries, 5), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert index.index.referenced_objects == references
    index.add(queries)
    assert index.index.ntotal == index.stats()["entries"]


def test_what_cannot_be_written(blobs, trained, codec, tmp_path):
    q = trained(blobs(300, 8), 5)

    class Mine(Rule):
        candidates = 2

        def choose(self, near, max_lists):
            return near.lists >= 0

    path = tmp_path / "f"
    with pytest.raises(ValueError, match="index must be an IndexIVFGMM; got IndexIVFFlat"):
        write_index(codec("Flat", q), path)  # pyright: ignore
    with pytest.raises(ValueError, match="index is not trained"):
        write_index(IndexIVFGMM(codec("PQ", q), q), path)
    with pytest.raises(ValueError, match="cannot be saved"):
        write_index(IndexIVFGMM(codec("Flat", q), q, rule=Mine()), path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        write_index(IndexIVFGMM(codec("Flat", q), q, max_lists=1), tmp_path / "none" / "f")
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError, match="no index file"):
        read_index(path)


def test_damage_is_named(full, tmp_path):
    path = Path(tmp_path / "index.gmm")
    write_index(full("PQ"), path)
    whole = path.read_bytes()
    changed = bytearray(whole)
    start = Sections(path).start("lists")
    assert start % 64 == 0
    changed[start + 5] ^= 1
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=r"index\.gmm is damaged: the checksum of 'lists'"):
        read_index(path)
    read_index(path, verify=False)
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"index\.gmm is truncated"):
        read_index(path, mmap=True, verify=False)


def test_damage_anywhere_else_is_an_error(full, tmp_path):
    path = Path(tmp_path / "f")
    write_index(full("PQ"), path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    length = 8 + int.from_bytes(whole[:8], "little")
    for place in rng.integers(length, len(whole), 60):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="checksum"):
            read_index(path)


PROCESS = """
import faiss, numpy as np, resource, signal, sys
from gmm_ivf import GMMQuantizer, IndexIVFGMM, read_index, write_index
faiss.omp_set_num_threads(1)
x = np.random.default_rng(0).normal(size=(900, 8)).astype("f4")
"""


def test_another_process(in_subprocess, blobs, full, tmp_path):
    index, path = full("SQ8"), tmp_path / "f"
    write_index(index, path)
    np.save(tmp_path / "q.npy", blobs(50, 8, seed=1))
    code = f"""
q = np.load({str(tmp_path / "q.npy")!r})
for mmap in (False, True):
    index = read_index({str(path)!r}, mmap=mmap)
    np.save({str(tmp_path)!r} + f"/{{mmap}}.npy", index.search(q, 7)[1])
"""
    in_subprocess(PROCESS + code)
    want = index.search(blobs(50, 8, seed=1), 7)[1]
    for mmap in (False, True):
        np.testing.assert_array_equal(np.load(tmp_path / f"{mmap}.npy"), want)


def test_a_full_disk_leaves_the_older_file(in_subprocess, tmp_path):
    path = str(tmp_path / "f")
    code = f"""
q = GMMQuantizer(8, 6, random_state=0, tol=1e-2)
index = IndexIVFGMM(faiss.IndexIVFFlat(q, 8, 6), q)
index.train(x)
write_index(index, {path!r})
index.add(x)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    write_index(index, {path!r})
except OSError as error:
    print("OSError", index.ntotal == 900, index.search(x, 1)[0].max() == 0)
"""
    assert in_subprocess(PROCESS + code) == "OSError True True\n"
    assert os.listdir(tmp_path) == ["f"]
    assert read_index(path).ntotal == 0
