"""Files of named arrays: safetensors with a checksum for every array and for the header.

An array is written from memory or from a stream, so that a file may be larger than memory, and
read into memory or mapped. Nothing in such a file is code.
"""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from gmm_ivf.params import as_number, check_readable, file_to_replace

_HEADER, _DIGEST = "gmm_ivf.index", "gmm_ivf.index.sha256"
_VERSION = 1
_DTYPES = {
    "U8": np.uint8,
    "U16": np.uint16,
    "I32": np.int32,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}
_NAMES = {np.dtype(kind): name for name, kind in _DTYPES.items()}
#: Types that an array in a file may have.
SAVED_TYPES = tuple(_NAMES)
_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Stream:
    """Bytes that are produced while they are written.

    Attributes
    ----------
    nbytes : int
        How many there will be.
    parts : iterable of bytes-like
    """

    nbytes: int
    parts: Iterable[Any]


@dataclass
class _Section:
    """One array in the header: where it is, and what it must hash to."""

    dtype: str
    shape: list[int]
    start: int
    nbytes: int
    parts: Iterable[Any] = field(default=(), repr=False)
    sha256: str = "0" * 64


def _section(value: np.ndarray | Stream, start: int) -> _Section:
    if isinstance(value, Stream):
        return _Section("U8", [value.nbytes], start, value.nbytes, value.parts)
    value = np.ascontiguousarray(value)
    shape = list(value.shape)
    return _Section(_NAMES[value.dtype], shape, start, value.nbytes, (value.reshape(-1),))


def _header(settings: dict, sections: dict[str, _Section]) -> bytes:
    """The first bytes of a file; as long for any checksums."""
    listed = {
        n: {"dtype": s.dtype, "shape": s.shape, "sha256": s.sha256} for n, s in sections.items()
    }
    text = json.dumps(
        {"version": _VERSION, "settings": settings, "arrays": listed}, default=as_number
    )
    header: dict[str, Any] = {
        "__metadata__": {_HEADER: text, _DIGEST: hashlib.sha256(text.encode()).hexdigest()}
    }
    for name, s in sections.items():
        offsets = [s.start, s.start + s.nbytes]
        header[name] = {"dtype": s.dtype, "shape": s.shape, "data_offsets": offsets}
    raw = json.dumps(header).encode()
    raw += b" " * (-(len(raw) + 8) % _ALIGNMENT)
    return len(raw).to_bytes(8, "little") + raw


def write_sections(
    path: str | os.PathLike, settings: dict, arrays: dict[str, np.ndarray | Stream]
) -> None:
    """Write a file, replacing an older one only when the new one is complete and on the disk.

    Parameters
    ----------
    path : path
    settings : dict
        JSON values; numpy scalars are taken as numbers.
    arrays : dict
        Arrays of `SAVED_TYPES`, or streams. They follow each other without gaps, the first at a
        multiple of 64 bytes.

    Raises
    ------
    FileNotFoundError
        When the folder does not exist.
    ValueError
        When the path names a folder, a device or a pipe.
    OSError
        When the disk is full and the like; the older file is untouched then.
    """
    path = file_to_replace(path)
    sections: dict[str, _Section] = {}
    start = 0
    for name, value in arrays.items():
        sections[name] = _section(value, start)
        start += sections[name].nbytes
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(_header(settings, sections))
            for name, section in sections.items():
                _copy_in(file, name, section)
            file.seek(0)
            file.write(_header(settings, sections))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _copy_in(file: BinaryIO, name: str, section: _Section) -> None:
    digest, written = hashlib.sha256(), 0
    for part in section.parts:
        bytes_of = memoryview(part).cast("B")
        file.write(bytes_of)
        digest.update(bytes_of)
        written += len(bytes_of)
    if written != section.nbytes:
        raise RuntimeError(
            f"{name} was announced with {section.nbytes} bytes and has {written}: the index was "
            "changed while it was written. Nothing was replaced."
        )
    section.sha256 = digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, on systems where folders can be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class Sections:
    """A file that `write_sections` wrote, opened for reading.

    Its header is checked at once, an array when it is asked for.

    Parameters
    ----------
    path : path

    Attributes
    ----------
    settings : dict

    Raises
    ------
    FileNotFoundError
        When there is no such file.
    ValueError
        When it is truncated, tampered with, of another kind, or of a newer version.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        check_readable(self.path, "index")
        self._identity = self._seen()
        header, self._sections = self._checked_header()
        self.settings: dict = header["settings"]

    def _checked_header(self) -> tuple[dict, dict[str, _Section]]:
        try:
            # Checks that the header is sound, and that the arrays fill the file to its last byte.
            with safe_open(self.path, framework="numpy") as file:
                metadata = file.metadata() or {}
        except SafetensorError as error:
            raise ValueError(f"{self.path} is truncated, or no index file: {error}") from error
        text = metadata.get(_HEADER)
        if text is None:
            raise ValueError(f"{self.path} is a safetensors file, but not one of write_index.")
        if hashlib.sha256(text.encode()).hexdigest() != metadata.get(_DIGEST):
            raise ValueError(f"{self.path} is damaged: the checksum of its header is wrong.")
        header = json.loads(text)
        if header["version"] > _VERSION:
            raise ValueError(
                f"{self.path} has version {header['version']}, newer than {_VERSION}: update "
                "gmm_ivf to read it."
            )
        return header, self._located(header["arrays"])

    def _located(self, listed: dict[str, dict]) -> dict[str, _Section]:
        """The arrays of the header, which safetensors' own must agree with, and where they are."""
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            outer = json.loads(file.read(length))
        del outer["__metadata__"]
        sections = {}
        for name, entry in listed.items():
            found = outer.pop(name, None)
            if found is None or any(found[key] != entry[key] for key in ("dtype", "shape")):
                raise ValueError(
                    f"{self.path} is damaged: its header contradicts itself on {name}."
                )
            start, stop = found["data_offsets"]
            sections[name] = _Section(
                entry["dtype"],
                entry["shape"],
                8 + length + start,
                stop - start,
                (),
                entry["sha256"],
            )
        if outer:
            raise ValueError(f"{self.path} is damaged: it holds {sorted(outer)} besides an index.")
        return sections

    def _seen(self) -> tuple[int, ...]:
        """What tells the file from another one under its name."""
        found = os.stat(self.path)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def check_in_place(self) -> None:
        """Check that all arrays so far were read from one file.

        It is opened by its name for each of them, and `write_sections` may have put another there.

        Raises
        ------
        ValueError
            When it did.
        """
        if self._seen() != self._identity:
            raise ValueError(f"{self.path} was replaced while it was read: read it again.")

    def __contains__(self, name: str) -> bool:
        return name in self._sections

    def names(self, prefix: str) -> list[str]:
        """Names of arrays that begin with a prefix."""
        return [name for name in self._sections if name.startswith(prefix)]

    def start(self, name: str) -> int:
        """First byte of an array in the file."""
        return self._known(name).start

    def mapped(self, name: str) -> np.ndarray:
        """An array where it lies in the file, read-only, not checked."""
        section = self._known(name)
        dtype = _DTYPES[section.dtype]
        if section.nbytes == 0:
            return np.empty(section.shape, dtype)
        return np.memmap(self.path, dtype, "r", section.start, tuple(section.shape))

    def verify(self, name: str) -> None:
        """Check an array against its checksum, which reads it once.

        Raises
        ------
        ValueError
            Naming the file and the array.
        """
        self._check(name, self.mapped(name))

    def array(self, name: str) -> np.ndarray:
        """An array in memory, checked as by `verify`."""
        copied = np.array(self.mapped(name))
        self._check(name, copied)
        return copied

    def _check(self, name: str, value: np.ndarray) -> None:
        digest = hashlib.sha256()
        flat: Any = value.reshape(-1).view(np.uint8)
        for start in range(0, flat.size, _CHUNK_BYTES):
            digest.update(memoryview(flat[start : start + _CHUNK_BYTES]))
        if digest.hexdigest() != self._known(name).sha256:
            raise ValueError(f"{self.path} is damaged: the checksum of {name!r} is wrong.")

    def _known(self, name: str) -> _Section:
        if name not in self._sections:
            raise ValueError(f"{self.path} lacks the array {name!r}.")
        return self._sections[name]
