"""Downloads from a server on this machine that misbehaves in the ways real ones do."""

import hashlib
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast

import numpy as np
import pytest

from gmm_ivf.datasets import fetch as fetch_module
from gmm_ivf.datasets import registry
from gmm_ivf.datasets.fetch import data_folder, fetch

CONTENT = np.random.default_rng(0).bytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves `server.content`, up to `server.stop_after` bytes of it, with Range if told to."""

    def do_GET(self):
        server = cast(Server, self.server)
        wanted = self.headers.get("Range")
        server.ranges.append(wanted)
        first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        first = first if server.ranged else 0
        total = len(server.content)
        if server.status:
            self.send_error(server.status)
            return
        if first >= total:
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{total - 1}/{total}")
        self.send_header("Content-Length", str(total - first))
        self.end_headers()
        self.wfile.write(server.content[first : first + server.stop_after])

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    content = CONTENT
    ranged = True
    stop_after = 10**9
    status = 0

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges = []
        self.url = f"http://127.0.0.1:{self.server_port}/x.bin"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "cache" / "x.bin"


def part_of(target):
    return target.with_name("x.bin.part")


def test_a_file_arrives_whole(server, target):
    assert fetch(server.url, target, size=len(CONTENT), sha256=SHA256) == target
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None]
    assert not part_of(target).exists()


def test_an_interrupted_transfer_goes_on_where_it_stopped(server, target):
    server.stop_after = 100_000
    with pytest.raises(
        ConnectionError, match=r"stopped after 100000 of 300000 bytes.*100000 bytes are"
    ):
        fetch(server.url, target, size=len(CONTENT), sha256=SHA256)
    assert not target.exists()
    assert part_of(target).read_bytes() == CONTENT[:100_000]
    server.stop_after = 10**9
    fetch(server.url, target, size=len(CONTENT), sha256=SHA256)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-"]


def test_a_server_without_range_starts_over(server, target):
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT[:5000])
    server.ranged = False
    fetch(server.url, target, size=len(CONTENT), sha256=SHA256)
    assert target.read_bytes() == CONTENT
    assert server.ranges == ["bytes=5000-"]


def test_a_whole_part_is_not_asked_for_again(server, target):
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT)
    fetch(server.url, target, size=len(CONTENT), sha256=SHA256)
    assert target.read_bytes() == CONTENT
    assert server.ranges == []


def test_a_part_that_is_too_long_is_thrown_away(server, target):
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT + b"more")
    fetch(server.url, target, size=len(CONTENT), sha256=SHA256)
    assert target.read_bytes() == CONTENT


def test_a_part_behind_the_end_of_a_file_of_unknown_size_starts_over(server, target):
    target.parent.mkdir()
    part_of(target).write_bytes(CONTENT + b"more")
    fetch(server.url, target)
    assert target.read_bytes() == CONTENT
    assert server.ranges == [f"bytes={len(CONTENT) + 4}-", None]


def test_a_file_of_another_size_is_refused_before_it_is_read(server, target):
    with pytest.raises(ConnectionError, match="offers 300000 bytes where 300001 were expected"):
        fetch(server.url, target, size=len(CONTENT) + 1)
    assert list(target.parent.iterdir()) == []


def test_a_wrong_hash_leaves_nothing(server, target):
    with pytest.raises(ValueError, match=rf"not the expected file.*{'0' * 64}, got {SHA256}"):
        fetch(server.url, target, size=len(CONTENT), sha256="0" * 64)
    assert list(target.parent.iterdir()) == []


def test_a_stale_part_of_another_file_is_found_by_the_hash(server, target):
    target.parent.mkdir()
    part_of(target).write_bytes(bytes(5000))
    with pytest.raises(ValueError, match="SHA-256"):
        fetch(server.url, target, size=len(CONTENT), sha256=SHA256)
    fetch(server.url, target, size=len(CONTENT), sha256=SHA256)
    assert target.read_bytes() == CONTENT


def test_a_failed_check_leaves_nothing(server, target):
    def refuse(path):
        assert path == part_of(target)
        raise ValueError("no HDF5")

    with pytest.raises(ValueError, match="not the expected file: no HDF5"):
        fetch(server.url, target, check=refuse)
    assert list(target.parent.iterdir()) == []


def test_ctrl_c_keeps_what_came(server, target, monkeypatch):
    monkeypatch.setattr(fetch_module, "_CHUNK", 50_000)
    bar = fetch_module.tqdm

    class Impatient(bar):
        def update(self, n=1):
            raise KeyboardInterrupt

    monkeypatch.setattr(fetch_module, "tqdm", Impatient)
    with pytest.raises(KeyboardInterrupt):
        fetch(server.url, target, size=len(CONTENT))
    assert not target.exists()
    assert part_of(target).read_bytes() == CONTENT[:50_000]
    monkeypatch.setattr(fetch_module, "tqdm", bar)
    fetch(server.url, target, size=len(CONTENT), sha256=SHA256)
    assert target.read_bytes() == CONTENT


def test_no_network_says_which_file_to_put_where(server, target):
    server.shutdown()
    server.server_close()
    with pytest.raises(ConnectionError) as caught:
        fetch(server.url, target)
    assert f"could not download {server.url}" in str(caught.value)
    assert f"put it at {target}" in str(caught.value)
    assert "are kept" not in str(caught.value)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_refusal_by_the_server_is_passed_on(server, target, status):
    server.status = status
    with pytest.raises(ConnectionError, match=f"HTTP Error {status}"):
        fetch(server.url, target)


def test_the_folder_is_the_argument_or_the_variable_or_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GMM_IVF_DATA", raising=False)
    assert data_folder() == tmp_path / ".cache" / "gmm_ivf"
    monkeypatch.setenv("GMM_IVF_DATA", str(tmp_path / "env"))
    assert data_folder() == tmp_path / "env"
    assert data_folder(tmp_path / "given") == tmp_path / "given"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def known(server, monkeypatch, make_hdf5):
    """A registry with one data set, which the local server has."""
    rows = np.arange(200, dtype=np.float32).reshape(50, 4)
    path = make_hdf5(
        train=rows,
        test=rows[:3],
        neighbors=np.zeros((3, 1), np.int32),
        distances=np.zeros((3, 1), np.float32),
    )
    server.content = path.read_bytes()
    size = len(server.content)
    entry = registry.Entry("tiny", "test", "tiny.hdf5", "l2", 50, 4, 3, 1, size, server.url)
    monkeypatch.setattr(registry, "entries", lambda: {"tiny": entry})
    return entry


def test_a_known_data_set_is_downloaded_once(server, known, tmp_path):
    for _ in range(2):
        data = registry.load("tiny", data_dir=tmp_path / "data")
        assert (data.n, data.d, data.name, data.source) == (50, 4, "tiny", "test")
    assert len(server.ranges) == 1


def test_a_download_of_another_structure_gets_no_name(known, monkeypatch, tmp_path):
    for other in ({"n": 49}, {"d": 5}, {"queries": 4}, {"k": 2}, {"metric": "cosine"}):
        entry = replace(known, **other)
        monkeypatch.setattr(registry, "entries", lambda entry=entry: {"tiny": entry})
        with pytest.raises(ValueError, match=r"not the expected file: .* must have train, test"):
            registry.load("tiny", data_dir=tmp_path / "data")
        assert list((tmp_path / "data").iterdir()) == []


def test_without_download_the_missing_file_is_named(known, tmp_path):
    with pytest.raises(ValueError, match=rf"needs the file .*tiny\.hdf5.*put {known.url} there"):
        registry.load("tiny", data_dir=tmp_path / "data", download=False)
    assert not (tmp_path / "data").exists()
