"""Options of layout "cells"."""

import numbers
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CellOptions:
    """How vectors are put into cells, and how cells are ranked; see docs/cells.md.

    Parameters
    ----------
    links : int, default=None
        Means that each mean is linked to, its nearest; at most nlist - 1. None takes 128, or 32
        above 4096 lists. More links are smaller cells: better ranked, and dearer to rank.
    min_size : int, default=1
        Links with fewer training vectors are merged into one cell of their component.
    lists_ranked : int, default=24
        Nearest lists whose cells are ranked, or 12 times nprobe where that is more.
    residual_weight : float, default=None
        Part of the mean squared residual of a cell that is added to its score. None lets `train`
        choose it by searches for a sample.
    residual_bins : int, default=None
        Bins of equal share that part the vectors of a component by the length of their residual.
        None lets `train` choose 1 or 4.
    sketch : int, default=None
        Directions in which the mean of a cell is known beside its place on the edge, 0 for none.
        None takes a quarter of the dimensions, at most 32.
    shortlist : float, default=3.0
        The cells that get a second score, by their sketches, hold this many times the vectors that
        are scanned.
    visit : {"edge", "list"}, default="edge"
        "edge" ranks a cell by its place. "list" makes cells of the nearest mean of a vector and
        that which SOAR would add, and ranks them by the nearer to the query: soft assignment to
        two lists whose copies cost nothing.

    Raises
    ------
    ValueError
        For an option out of range.
    """

    links: int | None = None
    min_size: int = 1
    lists_ranked: int = 24
    residual_weight: float | None = None
    residual_bins: int | None = None
    sketch: int | None = None
    shortlist: float = 3.0
    visit: str = "edge"

    def __post_init__(self):
        for name, low in (("min_size", 1), ("lists_ranked", 1)):
            _check(name, getattr(self, name), numbers.Integral, low)
        for name, low in (("links", 1), ("residual_bins", 1), ("sketch", 0)):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), numbers.Integral, low)
        if self.residual_weight is not None:
            _check("residual_weight", self.residual_weight, numbers.Real, 0)
        _check("shortlist", self.shortlist, numbers.Real, 1)
        if self.visit not in ("edge", "list"):
            raise ValueError(f'visit must be "edge" or "list"; got {self.visit!r}.')

    @classmethod
    def checked(cls, cells: Any) -> "CellOptions":
        """Options of what `IndexIVFGMM` was given: None, an object of this class, or its fields.

        Raises
        ------
        ValueError
            For anything else.
        """
        if cells is None:
            return cls()
        if isinstance(cells, cls):
            return cells
        known = set(cls.__dataclass_fields__)
        if isinstance(cells, dict) and set(cells) <= known:
            return cls(**cells)
        raise ValueError(f"cells must be a gmm_ivf.CellOptions; got {cells!r}.")


def _check(name: str, value: Any, kind: type, low: int) -> None:
    good = isinstance(value, kind) and not isinstance(value, bool)
    if not good or not low <= float(value) < float("inf"):
        what = "an integer" if kind is numbers.Integral else "a finite number"
        raise ValueError(f"{name} must be {what} of at least {low}; got {value!r}.")
