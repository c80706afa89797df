"""Download one file: resumable, checked, and never seen under its name before it is whole."""

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from tqdm import tqdm

_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 60


def data_folder(data_dir: str | os.PathLike | None = None) -> Path:
    """Folder of downloaded data: the argument, else $GMM_IVF_DATA, else ~/.cache/gmm_ivf."""
    chosen = data_dir or os.environ.get("GMM_IVF_DATA") or "~/.cache/gmm_ivf"
    return Path(chosen).expanduser()


def fetch(
    url: str,
    target: Path,
    *,
    size: int | None = None,
    sha256: str | None = None,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Download ``url`` to ``target`` by way of ``target`` + ".part", which a later call resumes.

    Parameters
    ----------
    url : str
    target : Path
        Not touched unless the part passed. It is also what is returned.
    size, sha256 : int and str, optional
        Bytes the file must have, and its hexadecimal hash.
    check : callable, optional
        Called with the path of the finished part; raises ValueError if it is something else.

    Raises
    ------
    ConnectionError
        If the server cannot be reached or stops halfway; what came is kept for the next call.
    ValueError
        If size, hash or check disagree; what came is deleted.
    """
    part = target.with_name(target.name + ".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    if size is None or _bytes_of(part) != size:
        try:
            _transfer(url, part, size)
        except (OSError, HTTPException) as error:
            raise ConnectionError(_by_hand(url, target, part, error)) from error
    try:
        check_file(part, size=size, sha256=sha256)
        if check is not None:
            check(part)
    except ValueError as error:
        part.unlink()
        raise ValueError(f"{url} is not the expected file: {error}") from error
    os.replace(part, target)
    return target


def check_file(path: Path, *, size: int | None = None, sha256: str | None = None) -> None:
    """Raise ValueError unless the file has this size and hash."""
    got = path.stat().st_size
    if size is not None and got != size:
        raise ValueError(f"{path} must have {size} bytes, got {got}; delete it and download again")
    if sha256 is None:
        return
    digest = hashlib.sha256()
    with (
        path.open("rb") as file,
        tqdm(total=got, unit="B", unit_scale=True, desc="checking the hash", delay=2) as bar,
    ):
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            bar.update(len(chunk))
    if digest.hexdigest() != sha256:
        raise ValueError(
            f"{path} must have SHA-256 {sha256}, got {digest.hexdigest()}; "
            "delete it and download again"
        )


def _transfer(url: str, part: Path, size: int | None) -> None:
    have = _bytes_of(part)
    if size is not None and have > size:
        have = 0
    try:
        response = _open(url, have)
    except urllib.error.HTTPError as error:
        error.close()
        # 416: nothing lies behind what we have, so it is not the beginning of that file.
        if error.code != 416 or have == 0:
            raise
        response, have = _open(url, 0), 0
    with response:
        # A server that ignores Range answers 200 and sends everything from the start.
        if response.status != 206 or not _starts_at(response, have):
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else size
        if size is not None and total != size:
            part.unlink(missing_ok=True)
            raise ConnectionError(f"the server offers {total} bytes where {size} were expected")
        _copy(response, part, have, total)
    got = _bytes_of(part)
    if total is not None and got != total:
        raise ConnectionError(f"the transfer stopped after {got} of {total} bytes")


def _bytes_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _open(url: str, have: int) -> HTTPResponse:
    # Some hosts refuse urllib's own name.
    headers = {"User-Agent": "gmm-ivf"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)


def _starts_at(response: HTTPResponse, have: int) -> bool:
    return response.headers.get("Content-Range", "").startswith(f"bytes {have}-")


def _copy(response: HTTPResponse, part: Path, have: int, total: int | None) -> None:
    with (
        part.open("r+b" if have else "wb") as out,
        tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=part.stem, delay=2) as bar,
    ):
        out.seek(have)
        while chunk := response.read(_CHUNK):
            out.write(chunk)
            bar.update(len(chunk))


def _by_hand(url: str, target: Path, part: Path, error: Exception) -> str:
    kept = _bytes_of(part)
    again = f"; {kept} bytes are kept in {part} and the next try goes on from there" if kept else ""
    return (
        f"could not download {url} ({error}){again}. Without a network, fetch that file on another "
        f"machine and put it at {target}"
    )
