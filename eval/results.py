"""Operating points: one typed row each, kept as JSON lines, never measured twice."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from gmm_ivf.eval import jsonl

SCHEMA = 1
_ROW = "result row"
# Fields that came later, with what they are in the rows that lack them.
_ADDED = {"ef_search": 0, "refine_factor": 0, "max_codes": 0, "scan_unit": 1.0}


@dataclass(frozen=True)
class Key:
    """What makes two operating points the same measurement.

    `method` is spelled without its number of lists, which is `nlist`. `ef_search` and
    what follows is 0 in rows written before it was there: see `searchers.Probe`.
    """

    fingerprint: str
    method: str
    nlist: int
    k: int
    nprobe: int
    seed: int
    device: str
    threads: int
    train_rows: int
    iterations: int
    ties: str
    ef_search: int = 0
    refine_factor: int = 0
    max_codes: int = 0


@dataclass(frozen=True)
class OperatingPoint:
    """One index searched with one nprobe, and all that is needed to redraw it.

    Means are over the queries. Costs are distance computations per query; `scanned` counts every
    copy in the probed lists, each of which costs `scan_unit` (1 but for codes), `coarse` the
    comparisons with list centres, `ranking` any further work in units of one distance. Times are
    wall-clock seconds.
    """

    key: Key
    dataset: str
    n: int
    d: int
    queries: int
    metric: str
    recall: float
    scanned: float
    coarse: float
    ranking: float
    queries_per_second: float
    passes: int
    entries_per_vector: float
    bytes_per_vector: float
    imbalance: float
    train_seconds: float
    add_seconds: float
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    scan_unit: float = 1.0
    schema: int = SCHEMA

    @property
    def distance_computations(self) -> float:
        """Scanned, coarse and ranking work together, per query."""
        return self.scanned * self.scan_unit + self.coarse + self.ranking

    def to_json(self) -> str:
        """One line without a line break; the total cost is written out for other readers."""
        row = asdict(self)
        row.update(row.pop("key"))
        row["distance_computations"] = self.distance_computations
        return json.dumps(row, sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "OperatingPoint":
        """Read back what `to_json` wrote.

        Raises
        ------
        ValueError
            If the line is no JSON object, is of another schema or lacks a field.
        """
        row = _ADDED | jsonl.parse(line, SCHEMA, _ROW)
        key = Key(**jsonl.pick(row, (f.name for f in fields(Key)), _ROW, line))
        rest = (f.name for f in fields(cls) if f.name != "key")
        return cls(key=key, **jsonl.pick(row, rest, _ROW, line))


def read_points(path: str | Path) -> list[OperatingPoint]:
    """Read all complete rows of a JSON-lines file; the last row of a key wins.

    Raises
    ------
    ValueError
        If a complete line is not a result row; the message names file and line.
    """
    found = jsonl.read(Path(path), OperatingPoint.from_json)
    return list({point.key: point for point in found}.values())


class Store:
    """A JSON-lines file of operating points, appended to one durable row at a time.

    Parameters
    ----------
    path : str or Path
        Created with its folder when missing. A last line that was cut off (a killed process, a
        full disk) is removed.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._points: dict[Key, OperatingPoint] = {}
        if self.path.exists():
            self._points = {point.key: point for point in read_points(self.path)}
            jsonl.cut_torn_line(self.path)

    def __len__(self) -> int:
        return len(self._points)

    def get(self, key: Key) -> OperatingPoint | None:
        """The stored point with this key, if any."""
        return self._points.get(key)

    def points(self) -> list[OperatingPoint]:
        """All stored points, oldest first."""
        return list(self._points.values())

    def append(self, point: OperatingPoint) -> None:
        """Write a point and wait until it is on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        jsonl.append(self.path, point.to_json())
        self._points[point.key] = point


def fingerprint(base: Any, queries: np.ndarray, metric: str, samples: int = 1024) -> str:
    """Short name of a data set's content: shapes, metric, and rows spread evenly over it.

    Parameters
    ----------
    base : array-like of shape (n, d)
    queries : ndarray of shape (q, d)
    metric : str
    samples : int
        Rows of each array that are read; the same rows for the same shape.

    Returns
    -------
    str
        16 hexadecimal digits.
    """
    digest = hashlib.sha256(f"{base.shape} {queries.shape} {metric}".encode())
    for array in (base, queries):
        rows = np.unique(np.linspace(0, len(array) - 1, min(samples, len(array))).astype(np.int64))
        digest.update(np.ascontiguousarray(array[rows], dtype="<f4").tobytes())
    return digest.hexdigest()[:16]


def commits(points: Iterable[OperatingPoint]) -> list[str]:
    """The commits that the points were measured at, sorted; "unknown" outside a checkout."""
    return sorted({str(point.environment.get("commit") or "unknown") for point in points})
