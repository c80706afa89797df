"""`diagnose`: why a fit in low precision drifted, from the weights down to single samples."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from gmm_ivf import comparison
from gmm_ivf._given_mixture import check_mixture
from gmm_ivf._terms import WorstRow, worst_rows
from gmm_ivf.comparison import Measured, Pass, Step, heavy_components
from gmm_ivf.estimator import GaussianMixture
from gmm_ivf.kernels.dispatch import ACCURACY, ROUNDING_UNITS

# Change by one float64 step from which the mixture is said to be off: relative for weights and
# variances, in standard deviations for means. A fit that stopped by tol moves less.
_DRIFT = 0.05
_LISTED = 3


@dataclass(frozen=True)
class Comparison:
    """One quantity of the mixture, and what one EM step in either precision makes of it.

    Attributes
    ----------
    name : str
    held, found, reference : ndarray of shape (K, D), (K, 1) or (1, D)
        In the mixture; after a step in its precision (NaN where that failed); after a step in the
        reference precision. One column for spherical, one row for tied.
    scale : ndarray
        What differences are divided by, in words `unit`.
    unit : str
    judged : ndarray of shape (rows,), bool
        Components of enough weight to be judged.
    """

    name: str
    held: np.ndarray
    found: np.ndarray
    reference: np.ndarray
    scale: np.ndarray
    unit: str
    judged: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """What the precision did: ``|found - reference| / scale``, 0 where not judged."""
        return self._difference(self.found)

    @property
    def drift(self) -> np.ndarray:
        """How far the mixture is from where EM leads: ``|held - reference| / scale``."""
        return self._difference(self.held)

    def _difference(self, value: np.ndarray) -> np.ndarray:
        return np.where(self.judged[:, None], np.abs(value - self.reference) / self.scale, 0.0)

    def worst(self, difference: np.ndarray) -> list[tuple[int, int]]:
        """Component and feature of the largest differences, at most one of each component."""
        if len(difference) == 1:
            order = np.argsort(-difference[0], kind="stable")[:_LISTED]
            return [(0, int(j)) for j in order if difference[0, j] > 0]
        feature = difference.argmax(axis=1)
        largest = difference.max(axis=1)
        order = np.argsort(-largest, kind="stable")[:_LISTED]
        return [(int(k), int(feature[k])) for k in order if largest[k] > 0]

    def place(self, k: int, feature: int) -> str:
        """Words for a component and a feature, where there are several."""
        rows, columns = self.reference.shape
        words = [f"component {k}"] if rows > 1 else []
        return ", ".join([*words, f"feature {feature}"] if columns > 1 else words) or "all"

    def __str__(self) -> str:
        lines = []
        for title, difference in (("by precision", self.error), ("to fixed point", self.drift)):
            for k, j in self.worst(difference):
                values = (self.held[k, j], self.found[k, j], self.reference[k, j])
                lines.append(
                    f"  {title:14s} {self.place(k, j):28s} {difference[k, j]:9.2e}   "
                    + "  ".join(f"{value:14.7g}" for value in values)
                )
        head = f"  {'difference':14s} {'where':28s} {'size':>9s}   "
        head += "  ".join(f"{title:>14s}" for title in ("held", "found", "reference"))
        return "\n".join(
            [f"{self.name}", head, *lines] if lines else [f"{self.name}: no difference"]
        )


@dataclass(frozen=True)
class Diagnosis:
    """Report of `diagnose`; its text reads from top to bottom.

    Attributes
    ----------
    precision, reference_precision, backend, device : str
        What was compared, and where it ran.
    n : int
        Samples.
    measured : Measured
        Errors as totals, for comparison with `kernels.dispatch.ACCURACY`.
    weights, means, diagonals, variances : Comparison
        After one EM step from the same parameters: weights; means in standard deviations; diagonals
        of the Cholesky factors L of the covariances; variances of the features.
    nats : ndarray of shape (K,), float64
        Mean absolute error of the log-density of the samples of each component (of the largest
        responsibility); NaN for a component without any.
    worst : tuple of WorstRow
        Samples with the largest errors, worst first.
    findings : tuple of str
        What is out of bounds, in sentences; empty when nothing is.
    """

    precision: str
    reference_precision: str
    backend: str
    device: str
    n: int
    measured: Measured
    weights: Comparison
    means: Comparison
    diagonals: Comparison
    variances: Comparison
    nats: np.ndarray
    worst: tuple[WorstRow, ...]
    findings: tuple[str, ...]

    def __str__(self) -> str:
        m = self.measured
        head = (
            f"{self.precision} ({self.backend} on {self.device}) against "
            f"{self.reference_precision}, {self.n:,} samples, {len(self.nats):,} components"
        )
        order = np.argsort(-np.nan_to_num(self.nats), kind="stable")[:_LISTED]
        responsibilities = [
            "2. E-step on fixed parameters",
            f"  log-density: mean error {m.nats:.2e} nats, largest {m.worst_nats:.2e}, "
            f"of the mean {m.bias:.2e}; same likeliest component {m.agreement:.4%}",
            "  by component: " + ", ".join(f"{k}: {self.nats[k]:.2e}" for k in order),
        ]
        return "\n".join(
            [
                head,
                *(f"- {finding}" for finding in self.findings or ("nothing out of bounds",)),
                "",
                f"1. {self.weights}",
                f"   {self.means}",
                *responsibilities,
                f"3. {self.diagonals}",
                f"4. {self.variances}",
                "  smallest: " + self._smallest(),
                "5. samples with the largest errors",
                WorstRow.header(),
                *(str(row) for row in self.worst),
            ]
        )

    def _smallest(self) -> str:
        """The smallest variances, of each feature where they differ, and whose they are."""
        values = self.variances.reference
        places = [(k, 0) for k in range(len(values))]
        if values.shape[1] > 1:
            places = [(int(k), j) for j, k in enumerate(values.argmin(axis=0))]
        places.sort(key=lambda place: values[place])
        return "; ".join(
            f"{self.variances.place(*place)}: {values[place]:.4g}" for place in places[:_LISTED]
        )


def diagnose(
    gmm: GaussianMixture, X: Any, *, reference_precision: str = "fp64", rows: int = 10
) -> Diagnosis:
    """Compare what a mixture's precision does with what a reference precision does.

    Both evaluate the same parameters on the same samples and take one EM step from them, so that
    what differs is due to the precision alone. Beside it stands how far the step leads from the
    parameters as they are: a fit that drifted is no fixed point of EM in the reference precision.

    Parameters
    ----------
    gmm : GaussianMixture
        Fitted; it stays as it is. Its precision is that of its parameter ``precision`` or, for
        "auto", that of its last fit.
    X : array-like, memmap, h5py.Dataset or Tensor of shape (N, D)
        Samples, at least as many as components, best those of the fit. The comparison takes about
        150 bytes of memory a sample.
    reference_precision : {"fp64", "fp32", "fp16x3", "fp16", "tf32", "bf16"}, default="fp64"
        Runs on the torch backend.
    rows : int, default=10
        So many of the worst samples are listed.

    Returns
    -------
    Diagnosis
        ``print`` it; the numbers are its attributes.

    Raises
    ------
    ValueError
        For a bad argument, and where EM cannot take a step in the reference precision.

    Examples
    --------
    >>> import numpy as np
    >>> from gmm_ivf import GaussianMixture, diagnose
    >>> X = np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32)
    >>> gmm = GaussianMixture(n_components=2, precision="bf16", random_state=0).fit(X)
    >>> diagnose(gmm, X).measured.nats < 0.2
    True
    """
    check_mixture(gmm, "gmm")
    if reference_precision not in ROUNDING_UNITS:
        raise ValueError(
            f"reference_precision must be one of {tuple(ROUNDING_UNITS)}, "
            f"got {reference_precision!r}."
        )
    if not isinstance(rows, Integral) or rows < 1:
        raise ValueError(f"rows must be an integer of at least 1, got {rows!r}.")
    precision = gmm.precision
    if precision == "auto":
        precision = getattr(gmm, "precision_", "auto")
    reference = comparison.evaluate(gmm, X, reference_precision, "torch")
    found = comparison.evaluate(gmm, X, precision, gmm.backend)
    return _report(gmm, X, found, reference, rows)


def _report(gmm: GaussianMixture, X: Any, found: Pass, reference: Pass, rows: int) -> Diagnosis:
    k = len(gmm.weights_)
    measured = comparison.measure(found, reference, gmm.center_, gmm.covariance_type == "tied")
    errors = np.abs(found.log_density - reference.log_density)
    label = reference.ids[:, 0]
    counts = np.bincount(label, minlength=k)
    sums = np.bincount(label, errors, minlength=k)
    nats = np.divide(sums, counts, out=np.full(k, np.nan), where=counts > 0)
    comparisons = _compare(gmm, found.step, comparison.step_of(reference))
    return Diagnosis(
        found.precision,
        reference.precision,
        found.backend,
        found.device,
        len(errors),
        measured,
        *comparisons,
        nats,
        worst_rows(gmm, X, found, reference, rows),
        _findings(found, measured, comparisons, nats),
    )


def _compare(
    gmm: GaussianMixture, found: Step | None, reference: Step
) -> tuple[Comparison, Comparison, Comparison, Comparison]:
    """Weights, means, diagonals of L and variances, before and after the steps."""
    kind = gmm.covariance_type
    held = Step(gmm.weights_, gmm.means_, gmm.covariances_, gmm.precisions_cholesky_)
    k = len(held.weights)
    heavy = heavy_components(held.weights) | heavy_components(reference.weights)
    shared = np.ones(1, dtype=bool) if kind == "tied" else heavy

    def compare(name: str, take: Any, scale: Any, unit: str, judged: np.ndarray) -> Comparison:
        before, wanted = take(held), take(reference)
        after = np.full_like(wanted, np.nan) if found is None else take(found)
        return Comparison(name, before, after, wanted, scale(wanted), unit, judged)

    def itself(value: np.ndarray) -> np.ndarray:
        return value

    return (
        compare(
            "weights",
            lambda step: step.weights[:, None],
            lambda weights: np.maximum(weights, 1 / (10 * k)),
            "itself",
            heavy,
        ),
        compare(
            "means",
            lambda step: step.means,
            lambda _: np.sqrt(_matrix(reference.covariances, kind)),
            "a standard deviation",
            heavy,
        ),
        compare(
            "diagonals of L",
            lambda step: 1 / _matrix(step.precisions_cholesky, kind),
            itself,
            "itself",
            shared,
        ),
        compare(
            "variances", lambda step: _matrix(step.covariances, kind), itself, "itself", shared
        ),
    )


def _matrix(array: np.ndarray, kind: str) -> np.ndarray:
    """Variances, or diagonals of factors, as components x features; one row for tied."""
    if kind == "spherical":
        return array[:, None]
    if kind == "diag":
        return array
    return np.atleast_2d(np.diagonal(array, axis1=-2, axis2=-1))


def _findings(
    found: Pass, measured: Measured, comparisons: tuple[Comparison, ...], nats: np.ndarray
) -> tuple[str, ...]:
    """What is out of bounds, worst cause first."""
    limits = ACCURACY[found.precision]
    lines = []
    if found.failure:
        lines.append(f"the M-step in {found.precision} fails: {found.failure}")
    missed = measured.misses(limits)
    if "nats" in missed or "agreement" in missed:
        worst = int(np.nanargmax(nats))
        lines.append(
            f"the E-step in {found.precision} is off by {measured.nats:.2g} nats on average "
            f"(limit {limits.nats:g}), the likeliest component agrees for {measured.agreement:.3%} "
            f"(limit {limits.agreement:.3%}); component {worst} is off by {nats[worst]:.2g} nats"
        )
    for name in ("weights", "means", "covariances"):
        if name in missed and found.step is not None:
            lines.append(
                f"one step in {found.precision} gives {name} that are off by "
                f"{getattr(measured, name):.2g} (limit {limits.parameters:g})"
            )
    for item in comparisons:
        largest = item.drift.max()
        if largest > _DRIFT:
            k, j = item.worst(item.drift)[0]
            lines.append(
                f"{item.name} are no fixed point of EM: one step moves "
                f"{item.place(k, j)} by {largest:.2g} of {item.unit}; the fit was not done, was "
                "changed since, or drifted"
            )
    return tuple(lines)
