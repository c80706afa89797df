"""Accuracy of the precision modes: one mixture and one data set against float64."""

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gmm_ivf import GaussianMixture
from gmm_ivf.comparison import Measured, Pass, evaluate, measure
from gmm_ivf.datasets.synthetic import GENERATORS
from gmm_ivf.kernels.components import Components
from gmm_ivf.kernels.dispatch import ACCURACY, choose_precision, expected_errors, resolve_device

SCHEMA = 1
# The choice that "auto" has on a GPU, cheapest first.
HALF_MODES = ("fp16", "fp16x3")


@dataclass(frozen=True)
class Problem:
    """A mixture and samples drawn from it.

    Attributes
    ----------
    dataset : str
        One of `datasets.synthetic.GENERATORS`, drawn with `k` components.
    shift : float
        Added to every coordinate.
    n, d, k, seed : int
    covariance_type : str
    """

    dataset: str
    shift: float
    n: int
    d: int
    k: int
    covariance_type: str = "spherical"
    seed: int = 0

    def build(self, device: str) -> tuple[np.ndarray, GaussianMixture]:
        """Samples, float32 (n, d), and a mixture with the parameters they were drawn with."""
        sample = GENERATORS[self.dataset](self.n, self.d, self.k, shift=self.shift, seed=self.seed)
        precision = 1 / sample.variance
        precisions = {
            "spherical": np.full(self.k, precision),
            "diag": np.full((self.k, self.d), precision),
            "tied": precision * np.eye(self.d),
            "full": np.broadcast_to(precision * np.eye(self.d), (self.k, self.d, self.d)),
        }
        mixture = GaussianMixture(
            self.k,
            covariance_type=self.covariance_type,
            weights_init=np.full(self.k, 1 / self.k),
            means_init=sample.means,
            precisions_init=precisions[self.covariance_type],
            max_iter=0,
            device=device,
            backend="torch",
            precision="fp64",
        )
        return sample.x, mixture.fit(sample.x)


@dataclass(frozen=True)
class Result:
    """What one mode does to one problem.

    Attributes
    ----------
    problem : Problem
    mode, backend, device : str
        What ran.
    measured : Measured or None
        None when the mode was refused.
    expected_nats : float
        What `kernels.dispatch.expected_errors` predicts for ``measured.nats``.
    trusted : bool
        Whether "auto" would take the mode if it had the choice: the prediction is within limits.
    auto : str
        Mode that ``precision="auto"`` took on this backend; "none" where it was refused.
    auto_half : str
        What it takes of fp16 and fp16x3.
    seconds : float
        Of two E-steps and an M-step, transfers included.
    refusal : str
        Why the mode did not run.
    environment : dict
    """

    problem: Problem
    mode: str
    backend: str
    device: str
    measured: Measured | None
    expected_nats: float
    trusted: bool
    auto: str
    auto_half: str
    seconds: float
    refusal: str = ""
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def misses(self) -> tuple[str, ...]:
        """Names of the measures that are beyond the limits of the mode."""
        return self.measured.misses(ACCURACY[self.mode]) if self.measured else ()

    @property
    def verdict(self) -> str:
        """ "ok", "missed", "avoided" (missed, but "auto" would not take it here) or "refused"."""
        if self.measured is None:
            return "refused"
        if not self.misses:
            return "ok"
        return "missed" if self.trusted else "avoided"

    @property
    def strain(self) -> float:
        """Largest measure in units of its limit; 0 for a mode that was refused."""
        if self.measured is None:
            return 0.0
        m, limits = self.measured, ACCURACY[self.mode]
        parameters = np.nan_to_num([m.weights, m.means, m.covariances], nan=np.inf).max()
        disagreement = (1 - m.agreement) / (1 - limits.agreement)
        return max(m.nats / limits.nats, disagreement, float(parameters) / limits.parameters)

    def to_json(self) -> str:
        """One line without a line break; the limits and the verdict are written out."""
        row = asdict(self)
        row.update(row.pop("problem"))
        measured = row.pop("measured") or {}
        for name in Measured.__dataclass_fields__:
            value = measured.get(name)
            row[name] = value if value is not None and math.isfinite(value) else None
        if not math.isfinite(self.expected_nats):
            row["expected_nats"] = None
        row.update(limits=asdict(ACCURACY[self.mode]), misses=self.misses, verdict=self.verdict)
        return json.dumps(row | {"schema": SCHEMA}, sort_keys=True, allow_nan=False)


def run_problem(
    problem: Problem, modes: Sequence[str], backend: str, device: str, environment: dict[str, Any]
) -> Iterator[Result]:
    """Measure every mode on one problem.

    Parameters
    ----------
    problem : Problem
    modes : sequence of str
    backend : {"auto", "torch", "triton"}
        That of the modes; the float64 side runs on torch.
    device : {"cpu", "cuda"}
    environment : dict
        Stored with each result.

    Yields
    ------
    Result
        In the order of the modes.
    """
    x, mixture = problem.build(device)
    reference = evaluate(mixture, x, "fp64", "torch")
    components = components_of(mixture)
    auto = _automatic(mixture, x, backend)
    half = choose_precision(HALF_MODES, components)
    for mode in modes:
        expected = expected_errors(mode, components)
        trusted = choose_precision((mode, ""), components) == mode
        started = time.perf_counter()
        ran, measured, refusal = _try(mixture, x, mode, backend, reference)
        yield Result(
            problem,
            mode,
            *(ran or (backend, device)),
            measured,
            float((expected * components.weights).sum()),
            trusted,
            auto,
            half,
            time.perf_counter() - started,
            refusal,
            environment,
        )


def _try(
    mixture: GaussianMixture, x: np.ndarray, mode: str, backend: str, reference: Pass
) -> tuple[tuple[str, str] | None, Measured | None, str]:
    """Backend and device that ran, errors, and why a mode was refused."""
    try:
        found = evaluate(mixture, x, mode, backend)
    except ValueError as error:
        return None, None, str(error)
    tied = mixture.covariance_type == "tied"
    errors = measure(found, reference, mixture.center_, tied)
    return (found.backend, found.device), errors, ""


def _automatic(mixture: GaussianMixture, x: np.ndarray, backend: str) -> str:
    """The mode that "auto" takes."""
    try:
        return evaluate(mixture, x, "auto", backend).precision
    except ValueError:
        return "none"


def components_of(mixture: GaussianMixture) -> Components:
    """Parameters of a fitted mixture as the choice of a precision sees them."""
    return mixture._components(mixture._frame(), resolve_device("cpu", None))
