"""The samples that two precisions differ most on, with the terms of their log-densities."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gmm_ivf.comparison import Pass
from gmm_ivf.estimator import GaussianMixture
from gmm_ivf.kernels.components import Components
from gmm_ivf.kernels.torch_backend import compute_dtype, exact_float32, round_operand


@dataclass(frozen=True)
class Terms:
    """What a log-density is made of, in one precision.

    Attributes
    ----------
    cross, square : float
        ``x . P mean`` and ``x . P x`` of the centred sample, P the precision of the component:
        what cancels in the squared distance. The operands are rounded as by the torch backend.
    logit : float
        ``log(weight N(x))`` of the component in nats; NaN where it is not among the four likeliest.
    log_normaliser : float
        Log-density of the sample in nats: log-sum-exp of the logits.
    responsibility : float
        Of the component.
    """

    cross: float
    square: float
    logit: float
    log_normaliser: float
    responsibility: float


@dataclass(frozen=True)
class WorstRow:
    """One sample on which the precisions differ.

    Attributes
    ----------
    index : int
        Row of X.
    component, found_component : int
        Likeliest in the reference precision, and in the other.
    error : float
        The larger of the errors of the log-density (nats) and of any responsibility.
    found, reference : Terms
        Of `component`, in either precision.
    precisions : tuple of str
        Names of the two.
    """

    index: int
    component: int
    found_component: int
    error: float
    found: Terms
    reference: Terms
    precisions: tuple[str, str]

    @staticmethod
    def header() -> str:
        """Titles of the columns of the text of a row."""
        titles = ("x.P.mean", "x.P.x", "logit", "log-normaliser", "responsibility")
        start = f"  {'sample':>10s} {'component':>12s} {'error':>9s} {'in':>7s}"
        return start + "".join(f" {title:>15s}" for title in titles)

    def __str__(self) -> str:
        name = str(self.component)
        if self.found_component != self.component:
            name += f" -> {self.found_component}"
        start = f"  {self.index:10d} {name:>12s} {self.error:9.2e}"
        lines = []
        for precision, terms in zip(self.precisions, (self.found, self.reference), strict=True):
            values = (terms.cross, terms.square, terms.logit, terms.log_normaliser)
            text = "".join(f" {value:15.8g}" for value in values)
            lines.append(f"{start} {precision:>7s}{text} {terms.responsibility:15.6g}")
            start = " " * len(start)
        return "\n".join(lines)


def worst_rows(
    gmm: GaussianMixture, X: Any, found: Pass, reference: Pass, count: int
) -> tuple[WorstRow, ...]:
    """The `count` samples with the largest errors, worst first."""
    errors = np.maximum(
        np.abs(found.log_density - reference.log_density),
        np.maximum(
            _responsibility_errors(found, reference), _responsibility_errors(reference, found)
        ),
    )
    indices = np.argsort(-errors, kind="stable")[:count]
    labels = reference.ids[indices, 0]
    sides = []
    for side in (found, reference):
        log_resp = _log_resp_of(side, labels[:, None], indices)[:, 0]
        log_density = side.log_density[indices]
        values = (log_resp + log_density, log_density, np.exp(np.nan_to_num(log_resp, nan=-np.inf)))
        cross, square = _products(gmm, X, indices, labels, side.precision)
        sides.append([Terms(*map(float, row)) for row in zip(cross, square, *values, strict=True)])
    return tuple(
        WorstRow(
            int(index),
            int(labels[i]),
            int(found.ids[index, 0]),
            float(errors[index]),
            sides[0][i],
            sides[1][i],
            (found.precision, reference.precision),
        )
        for i, index in enumerate(indices)
    )


def _log_resp_of(side: Pass, ids: np.ndarray, rows: Any = slice(None)) -> np.ndarray:
    """Log-responsibilities of components `ids` (n, j) in the rows; NaN where not kept."""
    same = side.ids[rows][:, None, :] == ids[:, :, None]
    found = np.where(same, side.log_resp[rows][:, None, :], -np.inf).max(axis=2)
    return np.where(same.any(axis=2), found, np.nan)


def _responsibility_errors(one: Pass, other: Pass) -> np.ndarray:
    """Largest difference of the responsibilities of the components that `one` kept, (N,)."""
    theirs = np.exp(np.nan_to_num(_log_resp_of(other, one.ids), nan=-np.inf))
    return np.abs(np.exp(one.log_resp) - theirs).max(axis=1)


def _products(
    gmm: GaussianMixture, X: Any, indices: np.ndarray, labels: np.ndarray, precision: str
) -> tuple[np.ndarray, np.ndarray]:
    """``x . P mean`` and ``x . P x`` of samples and components, each (n,)."""
    frame, cpu = gmm._frame(), torch.device("cpu")
    rows = gmm._check_rows(X, reset=False)
    order = np.argsort(indices)
    x = torch.empty(len(indices), rows.d, dtype=torch.float64)
    x[torch.from_numpy(order)] = rows.take(indices[order], frame, torch.float64, cpu)
    components = gmm._components(frame, cpu)
    with exact_float32():
        x, means, weight = _operands(x, components, torch.from_numpy(labels), precision)
        cross, square = (weight * x * means).sum(1), (weight * x * x).sum(1)
    return cross.double().numpy(), square.double().numpy()


def _operands(
    x: Tensor, c: Components, labels: Tensor, precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Samples, means and weights of features whose products the precision sums."""
    dtype = compute_dtype(precision)
    x, means, factor = x.to(dtype), c.means[labels].to(dtype), c.precisions_cholesky.to(dtype)
    weight = torch.ones_like(means[:, :1])
    if c.covariance_type == "spherical":
        weight = factor[labels, None].square()
    elif c.covariance_type == "diag":
        weight = factor[labels].square()
    elif c.covariance_type == "tied":
        x, means = x @ factor, means @ factor
    else:
        # Nothing is rounded: the differences x - mean are multiplied.
        x = torch.einsum("nd,nde->ne", x, factor[labels])
        means = torch.einsum("nd,nde->ne", means, factor[labels])
        return x, means, weight
    return round_operand(x, precision), round_operand(means, precision), weight
