"""Rows of `eval.kernels`: one measurement each, kept as JSON lines, not measured twice."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gmm_ivf.eval import jsonl
from gmm_ivf.eval.kernel_cases import Case

SCHEMA = 1
_ROW = "kernel row"
# What a time depends on beside the case.
_SURROUNDINGS = ("commit", "gpu", "cpu", "threads", "packages", "triton_interpreter")


@dataclass(frozen=True)
class Row:
    """One contender at one job on one case.

    Attributes
    ----------
    kind, mode, n, k, d
        The case. The mode is that of our kernels; a rival's precision is in its name.
    contender : str
    job : {"iteration", "fit"}
        A fit goes from float32 in host memory to the parameters, start included.
    device : {"cuda", "cpu"}
    status : {"ok", "failed", "unsupported"}
    reason : str
        Why it is not "ok"; otherwise what has to be known about the number.
    hard : bool
        k-means.
    ms : float or None
        Median milliseconds, launched from Python.
    graph_ms : float or None
        The same replayed from a CUDA graph.
    first_seconds : float or None
        First call in this process, compilation included.
    flop : float
        What the job cannot do without; half for k-means.
    matmul_tflops : float or None
        Measured rate of a matrix product in the mode of the case.
    extra_mb : float or None
        Peak GPU memory beyond the samples in their storage type, MiB.
    nats_max, nats_mean : float or None
        Largest and mean absolute error of log-densities against float64 on the same parameters.
    repeats : bool or None
        Whether a second iteration gave the same bits.
    start_share : float or None
        Of the start in the time of a fit.
    log_likelihood : float or None
        Mean over the samples that a fit ended with, nats.
    iterations : int
    environment : dict
    """

    kind: str
    mode: str
    n: int
    k: int
    d: int
    contender: str
    job: str
    device: str
    status: str = "ok"
    reason: str = ""
    hard: bool = False
    ms: float | None = None
    graph_ms: float | None = None
    first_seconds: float | None = None
    flop: float = 0.0
    matmul_tflops: float | None = None
    extra_mb: float | None = None
    nats_max: float | None = None
    nats_mean: float | None = None
    repeats: bool | None = None
    start_share: float | None = None
    log_likelihood: float | None = None
    iterations: int = 1
    environment: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def case(self) -> Case:
        """What was measured."""
        return Case(self.kind, self.mode, self.n, self.k, self.d)

    @property
    def key(self) -> tuple[Case, str, str, str]:
        """What makes two rows the same measurement, in one environment."""
        return self.case, self.contender, self.job, self.device

    @property
    def best_ms(self) -> float | None:
        """The faster of eager and graph."""
        times = [ms for ms in (self.ms, self.graph_ms) if ms is not None]
        return min(times) if times else None

    @property
    def tflops(self) -> float | None:
        """Necessary flop over time, TFLOP/s."""
        return None if self.best_ms is None else 1e-9 * self.flop / self.best_ms

    @property
    def floor_ms(self) -> float | None:
        """Time of the necessary flop at the measured rate of matrix products."""
        return None if self.matmul_tflops is None else 1e-9 * self.flop / self.matmul_tflops

    @property
    def share_of_floor(self) -> float | None:
        """Floor over time: 1 is as fast as matrix products go."""
        if self.best_ms is None or self.floor_ms is None:
            return None
        return self.floor_ms / self.best_ms

    def to_json(self) -> str:
        """One line; derived numbers are written out, numbers that are not finite as null."""
        row = asdict(self)
        for name in ("best_ms", "tflops", "floor_ms", "share_of_floor"):
            row[name] = getattr(self, name)
        for name, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                row[name] = None
        return json.dumps(row, sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Row":
        """Read back what `to_json` wrote.

        Raises
        ------
        ValueError
            If the line is no JSON object, is of another schema or lacks a field.
        """
        row = jsonl.parse(line, SCHEMA, _ROW)
        return cls(**jsonl.pick(row, (f.name for f in fields(cls)), _ROW, line))


def read_rows(path: Path) -> list[Row]:
    """All complete rows of a file, oldest first.

    Raises
    ------
    ValueError
        If a complete line is not a row; the message names file and line.
    """
    return jsonl.read(path, Row.from_json)


class Store:
    """A file of rows, and those of them that hold for an environment.

    Parameters
    ----------
    path : Path
        Created when missing. A last line that was cut off is removed.
    environment : dict
        Rows of another commit, machine or set of versions stay in the file and count for nothing.
        So do all rows where the commit is unknown or the checkout has changes: the code may differ.
    """

    def __init__(self, path: Path, environment: dict[str, Any]):
        self.path = path
        self.environment = environment
        self._rows: dict[tuple, Row] = {}
        if path.exists():
            found = read_rows(path)
            jsonl.cut_torn_line(path)
            self._rows = {r.key: r for r in _comparable(found, environment) if r.status == "ok"}

    def __contains__(self, key: tuple) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> list[Row]:
        """The rows that hold, oldest first."""
        return list(self._rows.values())

    def append(self, row: Row) -> None:
        """Write a row and wait until it is on the disk."""
        jsonl.append(self.path, row.to_json())
        self._rows[row.key] = row


def _comparable(rows: Iterable[Row], environment: dict[str, Any]) -> list[Row]:
    commit = environment.get("commit")
    if commit is None or commit.endswith("-dirty"):
        return []

    def surroundings(other: dict[str, Any]) -> list[Any]:
        return [other.get(name) for name in _SURROUNDINGS]

    here = surroundings(environment)
    return [row for row in rows if surroundings(row.environment) == here]
