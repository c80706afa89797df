"""Rows of `eval.kernels`: one measurement each, kept as JSON lines, not measured twice."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gmm_ivf.eval import jsonl
from gmm_ivf.eval.kernel_cases import Case

SCHEMA = 2
_ROW = "kernel row"
# What a time depends on beside the case.
_SURROUNDINGS = ("commit", "gpu", "cpu", "threads", "packages", "triton_interpreter")


@dataclass(frozen=True)
class Row:
    """One contender at one job on one case.

    Attributes
    ----------
    kind, mode, n, k, d, data
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
        Median milliseconds; of truncated EM the mean of an iteration, median over fits.
    first_seconds : float or None
        First call in this process, compilation included.
    cold : bool
        Whether it was the first measurement of the process, by our kernels.
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
    start_share, load_share : float or None
        Of the start in the time of a fit, and of reading, checking and copying the samples.
    iteration_ms : float or None
        Mean milliseconds of the iterations of a fit.
    log_likelihood : float or None
        Mean over the samples that a fit ended with, nats.
    likelihood_loss : float or None
        How much more exact EM gets from the same start, nats per sample; truncated EM only.
    visited_share : float or None
        Of the components, a mean over iterations of truncated EM.
    exact_iterations : int or None
        Of truncated EM, those with all components.
    iterations : int
    environment : dict
    """

    kind: str
    mode: str
    n: int
    k: int
    d: int
    data: str
    contender: str
    job: str
    device: str
    status: str = "ok"
    reason: str = ""
    hard: bool = False
    ms: float | None = None
    first_seconds: float | None = None
    cold: bool = False
    flop: float = 0.0
    matmul_tflops: float | None = None
    extra_mb: float | None = None
    nats_max: float | None = None
    nats_mean: float | None = None
    repeats: bool | None = None
    start_share: float | None = None
    load_share: float | None = None
    iteration_ms: float | None = None
    log_likelihood: float | None = None
    likelihood_loss: float | None = None
    visited_share: float | None = None
    exact_iterations: int | None = None
    iterations: int = 1
    environment: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def case(self) -> Case:
        """What was measured."""
        return Case(self.kind, self.mode, self.n, self.k, self.d, self.data)

    @property
    def key(self) -> tuple[Case, str, str, str]:
        """What makes two rows the same measurement, in one environment."""
        return self.case, self.contender, self.job, self.device

    @property
    def tflops(self) -> float | None:
        """Necessary flop over time, TFLOP/s."""
        return None if self.ms is None else 1e-9 * self.flop / self.ms

    @property
    def floor_ms(self) -> float | None:
        """Time of the necessary flop at the measured rate of matrix products."""
        return None if self.matmul_tflops is None else 1e-9 * self.flop / self.matmul_tflops

    @property
    def share_of_floor(self) -> float | None:
        """Floor over time: 1 is as fast as matrix products go."""
        if self.ms is None or self.floor_ms is None:
            return None
        return self.floor_ms / self.ms

    def to_json(self) -> str:
        """One line; derived numbers are written out, numbers that are not finite as null."""
        row = asdict(self)
        for name in ("tflops", "floor_ms", "share_of_floor"):
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

    def get(self, key: tuple) -> Row | None:
        """The row of a key that holds."""
        return self._rows.get(key)

    def __len__(self) -> int:
        return len(self._rows)

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
