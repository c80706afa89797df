"""Readers and writers of fvecs, bvecs, ivecs, fbin, u8bin, i8bin, ibin and npy."""

import numpy as np
import pytest

from gmm_ivf.datasets.bins import read_bin, read_bin_ids, write_bin
from gmm_ivf.datasets.npy import read_npy, write_npy
from gmm_ivf.datasets.vecs import read_vecs, write_vecs

VECS = {".fvecs": "f4", ".bvecs": "u1", ".ivecs": "i4"}
BINS = {".fbin": "f4", ".u8bin": "u1", ".i8bin": "i1", ".ibin": "i4"}


def some_rows(dtype, n=7, d=5):
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return np.random.default_rng(0).standard_normal((n, d)).astype(kind)
    info = np.iinfo(kind)
    rng = np.random.default_rng(0)
    return rng.integers(info.min, info.max, (n, d), dtype=kind, endpoint=True)


@pytest.mark.parametrize("suffix", VECS)
def test_vecs_hold_a_dimension_before_each_row(tmp_path, suffix):
    rows = some_rows(VECS[suffix])
    by_hand = b"".join(np.int32(5).tobytes() + row.tobytes() for row in rows)
    path = tmp_path / f"x{suffix}"
    write_vecs(path, rows)
    assert path.read_bytes() == by_hand
    np.testing.assert_array_equal(read_vecs(path), rows)


@pytest.mark.parametrize("suffix", BINS)
def test_bins_hold_two_numbers_then_the_rows(tmp_path, suffix):
    rows = some_rows(BINS[suffix])
    path = tmp_path / f"x{suffix}"
    write_bin(path, rows)
    assert path.read_bytes() == np.array([7, 5], "<u4").tobytes() + rows.tobytes()
    got = read_bin(path)
    np.testing.assert_array_equal(got, rows)
    assert got.dtype == rows.dtype


@pytest.mark.parametrize("d", [1, 2, 3, 17, 96, 100, 128, 960])
def test_any_dimension_survives(tmp_path, d):
    rows = some_rows("f4", 3, d)
    write_vecs(tmp_path / "x.fvecs", rows)
    write_bin(tmp_path / "x.fbin", rows)
    np.testing.assert_array_equal(read_vecs(tmp_path / "x.fvecs"), rows)
    np.testing.assert_array_equal(read_bin(tmp_path / "x.fbin"), rows)


@pytest.mark.parametrize("suffix", [".fvecs", ".fbin", ".npy"])
def test_rows_are_mapped_and_writing_to_them_leaves_the_file(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    read, write = {
        ".fvecs": (read_vecs, write_vecs),
        ".fbin": (read_bin, write_bin),
        ".npy": (read_npy, write_npy),
    }[suffix]
    write(path, some_rows("f4"))
    before = path.read_bytes()
    rows = read(path)
    owner = rows
    while owner is not None and not isinstance(owner, np.memmap):
        owner = owner.base
    assert isinstance(owner, np.memmap)
    rows[0, 0] = 99
    assert rows[0, 0] == 99
    assert path.read_bytes() == before


@pytest.mark.parametrize("suffix", VECS)
@pytest.mark.parametrize("cut", [1, 4, 6])
def test_a_cut_vecs_file_names_file_row_and_bytes(tmp_path, suffix, cut):
    path = tmp_path / f"x{suffix}"
    write_vecs(path, some_rows(VECS[suffix]))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=rf"x\{suffix}: row 6 must have .* bytes .*cut off"):
        read_vecs(path)


@pytest.mark.parametrize(("row", "found"), [(1, 4), (3, 0), (6, -5)])
def test_every_vecs_header_is_read(tmp_path, row, found):
    path = tmp_path / "x.fvecs"
    write_vecs(path, some_rows("f4"))
    data = bytearray(path.read_bytes())
    data[row * 24 : row * 24 + 4] = np.int32(found).tobytes()
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"header of row {row} must be 5, .*got {found};"):
        read_vecs(path)


def test_rows_of_another_dimension_in_one_vecs_file_are_refused(tmp_path):
    path = tmp_path / "x.fvecs"
    write_vecs(path, some_rows("f4", 4, 5))
    write_vecs(tmp_path / "y.fvecs", some_rows("f4", 6, 3))
    path.write_bytes(path.read_bytes() + (tmp_path / "y.fvecs").read_bytes())
    with pytest.raises(ValueError, match=r"row 4 must be 5, as in row 0, got 3"):
        read_vecs(path)


@pytest.mark.parametrize("found", [0, -1, 2**30])
def test_a_senseless_first_vecs_header_is_refused(tmp_path, found):
    path = tmp_path / "x.fvecs"
    path.write_bytes(np.int32(found).tobytes() + bytes(40))
    with pytest.raises(ValueError, match=rf"row 0 must be a dimension from 1 to .*got {found}"):
        read_vecs(path)


def test_a_big_endian_vecs_file_is_recognised(tmp_path):
    path = tmp_path / "x.fvecs"
    path.write_bytes(np.array(128, ">i4").tobytes() + np.zeros(128, ">f4").tobytes())
    with pytest.raises(ValueError, match=r"it reads 128 in big-endian order"):
        read_vecs(path)


@pytest.mark.parametrize("size", [0, 3])
def test_empty_files_are_refused(tmp_path, size):
    for name, read in {"x.fvecs": read_vecs, "x.fbin": read_bin, "x.npy": read_npy}.items():
        path = tmp_path / name
        path.write_bytes(bytes(size))
        with pytest.raises(ValueError, match=name):
            read(path)


@pytest.mark.parametrize("change", [-1, -20, 1])
def test_the_size_of_a_bin_file_must_fit_its_header(tmp_path, change):
    path = tmp_path / "x.fbin"
    write_bin(path, some_rows("f4"))
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(ValueError, match=rf"n = 7, d = 5, which makes 148 .*got {148 + change};"):
        read_bin(path)


def test_a_big_endian_bin_header_is_refused(tmp_path):
    path = tmp_path / "x.fbin"
    path.write_bytes(np.array([7, 5], ">u4").tobytes() + bytes(140))
    with pytest.raises(ValueError, match="got 148"):
        read_bin(path)


def test_a_bin_file_without_rows_is_refused(tmp_path):
    path = tmp_path / "x.fbin"
    path.write_bytes(np.array([0, 5], "<u4").tobytes())
    with pytest.raises(ValueError, match="n = 0"):
        read_bin(path)


def test_the_dimension_of_a_wrong_bin_header_can_be_given(tmp_path):
    path = tmp_path / "x.fbin"
    rows = some_rows("f4")
    path.write_bytes(np.array([7, 96], "<u4").tobytes() + rows.tobytes())
    with pytest.raises(ValueError, match="then give d"):
        read_bin(path)
    np.testing.assert_array_equal(read_bin(path, d=5), rows)
    for d in (4, 0, -5):
        with pytest.raises(ValueError, match=rf"d must divide the 140 bytes .*got {d}"):
            read_bin(path, d=d)


def test_big_ann_ground_truth_may_carry_distances(tmp_path):
    ids = some_rows("i4", 4, 3)
    plain, both = tmp_path / "a.ibin", tmp_path / "b.ibin"
    write_bin(plain, ids)
    both.write_bytes(plain.read_bytes() + np.ones((4, 3), "<f4").tobytes())
    np.testing.assert_array_equal(read_bin_ids(plain), ids)
    np.testing.assert_array_equal(read_bin_ids(both), ids)
    both.write_bytes(both.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"makes 56 bytes of ids or 104 with distances, got 100"):
        read_bin_ids(both)


def test_writing_refuses_values_that_do_not_fit(tmp_path):
    rows = np.array([[1.0, 256.0]], np.float32)
    with pytest.raises(ValueError, match="must fit uint8"):
        write_vecs(tmp_path / "x.bvecs", rows)
    with pytest.raises(ValueError, match="must fit int8"):
        write_bin(tmp_path / "x.i8bin", rows)


def test_strided_and_fortran_rows_are_written_in_order(tmp_path):
    rows = some_rows("f4", 9, 8)
    for given in (rows[::2, ::3], np.asfortranarray(rows)):
        write_vecs(tmp_path / "x.fvecs", given)
        write_bin(tmp_path / "x.fbin", given)
        np.testing.assert_array_equal(read_vecs(tmp_path / "x.fvecs"), given)
        np.testing.assert_array_equal(read_bin(tmp_path / "x.fbin"), given)


def test_npy_keeps_type_and_order(tmp_path):
    rows = np.asfortranarray(some_rows("f2"))
    write_npy(tmp_path / "x.npy", rows)
    got = read_npy(tmp_path / "x.npy")
    np.testing.assert_array_equal(got, rows)
    assert got.dtype == np.float16


@pytest.mark.parametrize(
    "content",
    [np.zeros(5), np.zeros((2, 2, 2)), np.zeros((2, 2), complex), np.zeros((2, 2), bool)],
    ids=["1-D", "3-D", "complex", "bool"],
)
def test_npy_must_be_two_dimensional_and_real(tmp_path, content):
    np.save(tmp_path / "x.npy", content)
    with pytest.raises(ValueError, match="2-D array of real numbers"):
        read_npy(tmp_path / "x.npy")


def test_npy_with_python_objects_is_never_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([[{}]]), allow_pickle=True)
    with pytest.raises(ValueError, match="plain numbers"):
        read_npy(tmp_path / "x.npy")


def test_npy_that_is_cut_off_or_an_archive_is_refused(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, some_rows("f4"))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="not a whole npy file"):
        read_npy(path)
    with path.open("wb") as out:
        np.savez(out, a=some_rows("f4"))
    with pytest.raises(ValueError, match="archive of several"):
        read_npy(path)
