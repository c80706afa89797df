"""Files of JSON lines: rows that are durable once written, and read back only when complete."""

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gmm_ivf.eval.commands import UserError

T = TypeVar("T")


def parse(line: str, schema: int, what: str) -> dict[str, Any]:
    """The object of a line.

    Raises
    ------
    ValueError
        If the line is no JSON object or is of another schema; `what` names a row.
    """
    row = json.loads(line)
    if not isinstance(row, dict) or row.get("schema") != schema:
        raise ValueError(f"not a {what} of schema {schema}: {line[:80]!r}")
    return row


def pick(row: dict[str, Any], names: Iterable[str], what: str, line: str) -> dict[str, Any]:
    """The named fields of a row that `parse` made of a line.

    Raises
    ------
    ValueError
        If the row lacks one.
    """
    try:
        return {name: row[name] for name in names}
    except KeyError as error:
        raise ValueError(f"{what} lacks {error.args[0]!r}: {line[:80]!r}") from None


def read(path: Path, parse_line: Callable[[str], T]) -> list[T]:
    """All complete lines of a file, parsed, oldest first; one ending in .gz is unpacked.

    Raises
    ------
    ValueError
        If a complete line cannot be parsed; the message names file and line.
    """
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    found = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            found.append(parse_line(line))
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: {error}; move the file away or choose another --out"
            ) from None
    return found


def cut_torn_line(path: Path) -> None:
    """Remove a last line that was cut off, by a killed process or a full disk."""
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        os.truncate(path, complete)


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Keep other processes that ask likewise from writing to a file, which is made if missing.

    The system lets go of the lock when the process ends, however it ends. Where it has no such
    locks (Windows) nothing is kept from anybody.

    Raises
    ------
    UserError
        When another one is writing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # Windows
        except BlockingIOError:
            raise UserError(
                f"another run is writing to {path}; wait for it or choose another --out"
            ) from None
        yield


def append(path: Path, line: str) -> None:
    """Write a line and wait until it is on the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
