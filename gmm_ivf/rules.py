"""Rules that choose further lists of a vector from the geometry of its nearest means.

Notation: x a vector, c_1 its nearest mean, ``r_j = c_j - x``, ``d_j = |r_j|``. Inner products cost
no dot product: ``<r_1, r_j> = (d_1^2 + d_j^2 - |c_1 - c_j|^2) / 2``. Every rule keeps list 1. The
rule "responsibility" needs a mixture, and is in `gmm_ivf.assignment`.

Formulas take numpy arrays, or torch tensors on any device.
"""

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, ClassVar

from gmm_ivf._arrays import (
    Array,
    filled,
    first_true,
    float64,
    namespace,
    order,
    take,
    true_places,
)


class Near:
    """The nearest means of some rows, and how far those are from the rows and from each other.

    Parameters
    ----------
    rows : ndarray or Tensor of shape (n, d), float32
    table : ndarray or Tensor of shape (K, d), float32
        Means.
    primary : ndarray or Tensor of shape (n,), int64
        Nearest mean of each row.
    lists : ndarray or Tensor of shape (n, m), int64
        Nearest means of each row in any order, -1 for none, at most once each; m is at least 1.

    Attributes
    ----------
    lists : ndarray or Tensor of shape (n, m), int64
        The primary, then the others by distance; of equal distances the lower number is first. -1
        for none, at the end.
    squared : ndarray or Tensor of shape (n, m), float64
        Squared distances; any value where there is none.
    """

    def __init__(self, rows: Array, table: Array, primary: Array, lists: Array):
        xp = namespace(rows)
        # Of equal distances, to rounding, the search of several may find another first than the
        # search of one. So one place more is made here, and the last one given up.
        others = xp.where(lists == primary[:, None], -1, lists)
        lists = xp.concatenate([primary[:, None], others], 1)
        squared = squared_distances(table, lists, rows)
        place = xp.where(lists < 0, math.inf, squared)
        place[:, 0] = -math.inf
        columns = order(place, lists)[:, :-1]
        self.lists = take(lists, columns)
        self.squared = take(squared, columns)
        self._table = table

    def between(self, rows: Array, one: Array, other: Array) -> Array:
        """Squared distances of means of a row, in two of its columns each: (pairs,) float64."""
        means = self._table[self.lists[rows, other]]
        return squared_distances(self._table, self.lists[rows, one][:, None], means)[:, 0]

    def products(self, rows: Array, columns: Array) -> Array:
        """Inner products ``<r_i, r_j>`` of some rows, i in a column of each: (rows, m) float64."""
        lists, squared, columns = self.lists[rows], self.squared[rows], columns[:, None]
        means = self._table[take(lists, columns)[:, 0]]
        apart = squared_distances(self._table, lists, means)
        return (take(squared, columns) + squared - apart) / 2


def squared_distances(table: Array, lists: Array, points: Array) -> Array:
    """Squared distances of each point to the means of its row; -1 reads mean 0."""
    # Differences, in float64: FAISS's own squared distances are rounded by the norm of the
    # vectors, which leaves nothing of those that are near zero.
    xp = namespace(table)
    difference = table[xp.clip(lists, 0, None)] - float64(points[:, None])
    flat = difference.reshape(-1, difference.shape[-1])
    return xp.einsum("pd,pd->p", flat, flat).reshape(lists.shape)


def _number(low: float, strictly: bool = False) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        good = isinstance(value, numbers.Real) and not isinstance(value, bool)
        good = good and low <= float(value) < math.inf and not (strictly and value == low)
        wanted = f"above {low:g}" if strictly else f"of at least {low:g}"
        return "" if good else f"a finite number {wanted}"

    return check


def _or_none(check: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "" if value is None else check(value)


def _flag(value: Any) -> str:
    return "" if isinstance(value, bool) else "True or False"


def _several(value: Any) -> str:
    good = isinstance(value, numbers.Integral) and int(value) >= 2
    return "" if good else "an integer of at least 2"


class Rule(ABC):
    """A rule by geometry: a frozen dataclass whose fields are its options.

    Attributes
    ----------
    candidates : int
        How many of the nearest means it looks at, the first included.

    Raises
    ------
    ValueError
        For an option out of range.
    """

    candidates: int
    #: What is wrong with the value of an option, if anything; a rule may say otherwise.
    _checks: ClassVar[dict[str, Callable[[Any], str]]] = {
        "lambda_": _number(0),
        "strict": _flag,
        "eps": _number(0),
        "rng_factor": _number(0, strictly=True),
        "candidates": _several,
    }

    def __post_init__(self):
        for name, value in vars(self).items():
            wanted = self._checks[name](value)
            if wanted:
                raise ValueError(f"{name} must be {wanted}; got {value!r}.")

    @abstractmethod
    def choose(self, near: Near, max_lists: int) -> Array:
        """Mask of the lists of `near` to put a row in, (n, m) bool; at most `max_lists` of a row.

        `max_lists` is at least 2.
        """


def _primary_only(near: Near) -> Array:
    mask = filled(near.lists, False)
    mask[:, 0] = True
    return mask


def _least_loss(
    near: Near, mask: Array, rows: Array, loss: Array, bound: Any
) -> tuple[Array, Array]:
    """Of each of some rows, the list of least loss that a mask lacks, where below the bound.

    Returns
    -------
    won : ndarray or Tensor, int64
        Places in `rows`.
    columns : ndarray or Tensor of the same shape, int64
    """
    xp = namespace(loss)
    loss = xp.where(mask[rows] | (near.lists[rows] < 0), math.inf, loss)
    (won,) = true_places(xp.amin(loss, 1) < bound)
    return won, loss.argmin(1)[won]


@dataclass(frozen=True)
class Air(Rule):
    """The list of least ``d_j^2 + lambda <r_1, r_j>``: it likes means beyond x, seen from c_1.

    From RAIRS (arXiv 2601.07183), with the default of its authors' program. At most two lists.

    Parameters
    ----------
    lambda_ : float, default=0.5
        At least 0.
    strict : bool, default=False
        Always take a second list. Otherwise list 1 competes with its own loss,
        ``(1 + lambda) d_1^2``, and x is in one list where that is the least.
    candidates : int, default=10
        Nearest means looked at.
    """

    lambda_: float = 0.5
    strict: bool = False
    candidates: int = 10

    def choose(self, near: Near, max_lists: int) -> Array:
        """See `Rule`."""
        first, mask = near.squared[:, 0], _primary_only(near)
        rows, primary = true_places(mask)
        loss = near.squared + self.lambda_ * near.products(rows, primary)
        bound = math.inf if self.strict else first + self.lambda_ * first
        rows, columns = _least_loss(near, mask, rows, loss, bound)
        mask[rows, columns] = True
        return mask


@dataclass(frozen=True)
class Soar(Rule):
    """The list of least ``d_j^2 + lambda <r_1, r_j>^2 / d_1^2``: it likes orthogonal residuals.

    From SOAR (arXiv 2404.00774), which derives it for inner products and two lists. Further lists,
    where `max_lists` allows them, are taken one by one, with a term for each list that x is in:
    the least ``d_j^2 + lambda sum_i <r_i, r_j>^2 / d_i^2``. A vector that equals its mean has no
    direction to be orthogonal to, and stays in one list.

    Parameters
    ----------
    lambda_ : float, default=1.0
        At least 0. On SIFT 0.55 does better with three lists (``docs/lists.md``).
    strict : bool, default=False
        As in the paper, always take another list. Otherwise list 1 competes with its own loss,
        ``(1 + lambda) d_1^2``, and x is in no more lists once that is the least.
    candidates : int, default=10
        Nearest means looked at.
    """

    lambda_: float = 1.0
    strict: bool = False
    candidates: int = 10

    def choose(self, near: Near, max_lists: int) -> Array:
        """See `Rule`."""
        mask = _primary_only(near)
        (rows,) = true_places(near.squared[:, 0] > 0)
        loss, last = near.squared[rows], rows * 0
        first = loss[:, 0]
        bound = first + (math.inf if self.strict else self.lambda_ * first)
        for _ in range(max_lists - 1):
            loss = loss + self.lambda_ * _along(near, rows, last)
            won, last = _least_loss(near, mask, rows, loss, bound)
            rows, loss, bound = rows[won], loss[won], bound[won]
            mask[rows, last] = True
        return mask


def _along(near: Near, rows: Array, columns: Array) -> Array:
    """``<r_i, r_j>^2 / d_i^2`` of some rows, i in a column of each; 0 where d_i is 0."""
    products = near.products(rows, columns)
    squared = take(near.squared[rows], columns[:, None])
    xp = namespace(products)
    has_direction = squared > 0
    # In this order the ratio is exactly 1 for a duplicate of c_1, which then gains nothing.
    ratio = xp.where(has_direction, products / xp.where(has_direction, squared, 1.0), 0.0)
    return ratio * products


@dataclass(frozen=True)
class Spann(Rule):
    """Nearest first, every list j with ``rng_factor |c_j - c_i| >= d_j`` for all lists i taken.

    The closure of SPANN (arXiv 2111.08566) by the rule of relative neighbourhood graphs, as in the
    program of its authors, where 8 lists are customary.

    Parameters
    ----------
    rng_factor : float, default=1.0
        Above 0; factor of plain distances, not of squared ones.
    eps : float, default=None
        Take lists of ``d_j <= (1 + eps) d_1`` only, as the paper does before the other test; at
        least 0. None takes any, as the program.
    candidates : int, default=64
        Nearest means looked at.
    """

    rng_factor: float = 1.0
    eps: float | None = None
    candidates: int = 64
    _checks = Rule._checks | {"eps": _or_none(Rule._checks["eps"])}

    def choose(self, near: Near, max_lists: int) -> Array:
        """See `Rule`."""
        taken = _primary_only(near)
        left = ~taken & (near.lists >= 0)
        if self.eps is not None:
            left &= _within(near, self.eps)
        last = first_true(taken)
        # A list that one of those taken rules out stays out: each round compares what is left with
        # the list taken last.
        for _ in range(max_lists - 1):
            rows, columns = true_places(left)
            apart = near.between(rows, columns, last[rows]) ** 0.5
            left[rows, columns] = self.rng_factor * apart >= near.squared[rows, columns] ** 0.5
            (more,) = true_places(left.any(1))
            last[more] = first_true(left[more])
            taken[more, last[more]] = True
            left[more, last[more]] = False
        return taken


@dataclass(frozen=True)
class Top2(Rule):
    """The second nearest list, always: the naive rule to which others compare."""

    candidates: int = field(default=2, init=False, repr=False)

    def choose(self, near: Near, max_lists: int) -> Array:
        """See `Rule`."""
        return near.lists >= 0


@dataclass(frozen=True)
class Ratio(Rule):
    """Nearest first, every list with ``d_j <= (1 + eps) d_1``.

    The closure of SPANN (arXiv 2111.08566) without its second test.

    Parameters
    ----------
    eps : float, default=0.05
        At least 0.
    candidates : int, default=10
        Nearest means looked at.
    """

    eps: float = 0.05
    candidates: int = 10

    def choose(self, near: Near, max_lists: int) -> Array:
        """See `Rule`."""
        mask = _within(near, self.eps)
        mask[:, max_lists:] = False
        return mask | _primary_only(near)


def _within(near: Near, eps: float) -> Array:
    distances = near.squared**0.5
    return (near.lists >= 0) & (distances <= (1 + eps) * distances[:, :1])


#: Rules by the names that `IndexIVFGMM` takes.
RULES: dict[str, Callable[..., Rule]] = {
    "air": Air,
    "soar": Soar,
    "spann": Spann,
    "top2": Top2,
    "ratio": Ratio,
}


def option_names(name: str) -> tuple[str, ...]:
    """Names of the options of a rule."""
    return tuple(signature(RULES[name]).parameters)
