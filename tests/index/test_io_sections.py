"""Files of arrays: what is read is what was written, or an error that says what is wrong."""

import json
import os

import numpy as np
import pytest
from safetensors import safe_open

from gmm_ivf._sections import SAVED_TYPES, Sections, Stream, write_sections

SETTINGS = {"name": "ünï", "number": 3, "list": [1, None, 2.5, float("-inf")]}


def some_arrays():
    rng = np.random.default_rng(0)
    return {
        "last.first": rng.integers(0, 256, 1001).astype(np.uint8),
        "matrix": rng.normal(size=(7, 5)),
        "empty": np.empty((0, 4), np.float32),
        "strided": np.arange(40, dtype=np.int64).reshape(8, 5)[::2, 1:],
    }


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "file.gmm"
    write_sections(path, SETTINGS, some_arrays())
    return path


def test_round_trip(written):
    file = Sections(str(written))
    assert file.settings == SETTINGS
    for name, value in some_arrays().items():
        assert name in file
        for read in (file.array(name), file.mapped(name)):
            assert (read.dtype, read.shape) == (value.dtype, value.shape)
            np.testing.assert_array_equal(read, value)
    assert file.array("matrix").flags.writeable
    assert not file.mapped("matrix").flags.writeable
    assert file.names("last.") == ["last.first"]
    assert os.listdir(written.parent) == ["file.gmm"]


@pytest.mark.parametrize("dtype", SAVED_TYPES, ids=str)
def test_every_type(tmp_path, dtype):
    value = np.arange(6).astype(dtype)
    write_sections(tmp_path / "f", {}, {"x": value})
    read = Sections(tmp_path / "f").array("x")
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, value)


def test_other_programs_read_it(written):
    with safe_open(written, framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("matrix"), some_arrays()["matrix"])


def test_streams_are_aligned_arrays(tmp_path):
    parts = (np.full(n, n, np.int64) for n in (3, 0, 5))
    write_sections(tmp_path / "f", {}, {"lists": Stream(64, parts), "x": np.ones(2)})
    file = Sections(tmp_path / "f")
    assert file.start("lists") % 64 == 0
    assert file.array("lists").view(np.int64).tolist() == [3] * 3 + [5] * 5


def test_numpy_scalars_and_links(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    for value in (np.float32(0.5), np.int64(7)):
        write_sections(tmp_path / "link", {"value": value}, {})
        assert Sections(tmp_path / "folder" / "file").settings == {"value": value}
    assert (tmp_path / "link").is_symlink()


def test_a_stream_of_another_length_replaces_nothing(written):
    before = written.read_bytes()
    with pytest.raises(RuntimeError, match="announced with 9 bytes and has 8"):
        write_sections(written, {}, {"x": Stream(9, [b"12345678"])})
    assert written.read_bytes() == before
    assert os.listdir(written.parent) == ["file.gmm"]


def test_every_truncation_is_seen(written):
    whole = written.read_bytes()
    for size in {*range(0, len(whole), 97), 7, 8, 9, len(whole) - 1}:
        written.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"file\.gmm is truncated, or no index file"):
            Sections(written)
    written.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match=r"file\.gmm"):
        Sections(written)


def test_every_changed_byte_is_seen(written):
    whole = bytearray(written.read_bytes())
    rng = np.random.default_rng(1)
    length = int.from_bytes(whole[:8], "little")
    places = {*range(8), *rng.integers(8, len(whole), 300).tolist(), len(whole) - 1}
    for place in places:
        # Spaces after the header are not part of anything.
        if bytes(whole[place : 8 + length]).isspace() and place < 8 + length:
            continue
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(0, 7))
        written.write_bytes(changed)
        with pytest.raises(ValueError, match=r"file\.gmm"):
            file = Sections(written)
            for name in some_arrays():
                file.array(name)


def test_damage_in_an_array_is_named(written):
    whole = bytearray(written.read_bytes())
    whole[Sections(written).start("matrix") + 3] ^= 1
    written.write_bytes(whole)
    file = Sections(written)
    file.array("strided")
    with pytest.raises(ValueError, match="the checksum of 'matrix' is wrong"):
        file.array("matrix")
    with pytest.raises(ValueError, match="lacks the array 'other'"):
        file.array("other")


def rewritten(path, change):
    """Rewrite the outer header of a file after `change` was applied to it."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + whole[8 + length :])


def test_headers_that_contradict_themselves(written):
    rewritten(written, lambda header: header["matrix"].update(shape=[5, 7]))
    with pytest.raises(ValueError, match="contradicts itself on matrix"):
        Sections(written)


def test_arrays_that_nobody_announced(written):
    rewritten(written, lambda header: header.update(other=header.pop("empty")))
    with pytest.raises(ValueError, match="contradicts itself on empty"):
        Sections(written)
    rewritten(written, lambda header: header.update(empty=header["other"]))
    with pytest.raises(ValueError, match=r"damaged|truncated"):
        Sections(written)


def test_newer_files_and_other_files(tmp_path, monkeypatch):
    path = tmp_path / "f"
    monkeypatch.setattr("gmm_ivf._sections._VERSION", 7)
    write_sections(path, {}, {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has version 7, newer than 1: update"):
        Sections(path)
    rewritten(path, lambda header: header.update(__metadata__={}))
    with pytest.raises(ValueError, match="safetensors file, but not one of write_index"):
        Sections(path)
    with pytest.raises(FileNotFoundError, match="no index file at"):
        Sections(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no folder"):
        write_sections(tmp_path / "none" / "f", {}, {})


def test_a_folder_or_pipe_is_no_file_to_replace(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(ValueError, match="path must name a file"):
            write_sections(path, {}, {})
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_not_called_missing(written):
    written.chmod(0)
    with pytest.raises(PermissionError):
        Sections(written)
