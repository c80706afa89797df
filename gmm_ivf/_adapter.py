"""State of an `IndexIVFGMM` that searching and changing it share."""

import inspect
from functools import cache
from typing import Any

import numpy as np

from gmm_ivf._chain import Chain
from gmm_ivf._faiss import address
from gmm_ivf._layout import Layout
from gmm_ivf._originals import Originals
from gmm_ivf._probing import Probing
from gmm_ivf._results import SearchCost
from gmm_ivf._vectors import as_matrix, check_count, check_rows
from gmm_ivf.quantizer import GMMQuantizer


@cache
def _declared(kind: type) -> frozenset[str]:
    """Names that a class and its bases declare without a value."""
    return frozenset(name for c in kind.__mro__ for name in inspect.get_annotations(c))


class Adapter:
    """What is wrapped, and what FAISS's attributes say of it."""

    index: Any
    quantizer: GMMQuantizer
    last_search: SearchCost | None
    _ivf: Any
    _layout: Layout
    _probing: Probing
    _chain: Chain | None
    _originals: Originals | None
    _k_factor: float

    def __setattr__(self, name: str, value: Any) -> None:
        """As FAISS's classes refuse names that they do not have: a slip would have no effect."""
        kind = type(self)
        if not (name.startswith("_") or hasattr(kind, name) or name in _declared(kind)):
            raise AttributeError(
                f"{kind.__name__} has no attribute {name!r} to set; a subclass declares its own on "
                "the class."
            )
        super().__setattr__(name, value)

    @property
    def d(self) -> int:
        """Dimensions of the vectors."""
        return self.index.d

    @property
    def nlist(self) -> int:
        """Number of lists."""
        return self._ivf.nlist

    @property
    def metric_type(self) -> int:
        """Metric, as in faiss."""
        return self._ivf.metric_type

    @property
    def ntotal(self) -> int:
        """Number of vectors; copies do not count."""
        return self._layout.ntotal

    @property
    def max_copies(self) -> int:
        """Most lists that any vector was put in since the last reset."""
        return self._layout.max_copies

    @property
    def nprobe(self) -> int:
        """Lists that a search probes: that of the wrapped index (1 unless it was set).

        Setting it lifts `max_codes`, such as that of `tune`, which would hide what it does.
        """
        return self._ivf.nprobe

    @nprobe.setter
    def nprobe(self, value: int) -> None:
        self._ivf.nprobe = check_count(value, "nprobe")
        self._ivf.max_codes = 0

    @property
    def max_codes(self) -> int:
        """Entries that a search scans at most: that of the wrapped index; 0 is no bound."""
        return self._ivf.max_codes

    @max_codes.setter
    def max_codes(self, value: int) -> None:
        self._ivf.max_codes = check_count(value, "max_codes", fewest=0)

    @property
    def is_trained(self) -> bool:
        """Whether quantizer, codec and assignment are trained."""
        ready = self.quantizer.is_trained and self._layout.is_trained
        return bool(ready and (self._chain is None or self._chain.is_trained))

    def _ready(self) -> Layout:
        """The layout, after a check that nothing underneath has changed."""
        if not self.is_trained:
            raise RuntimeError(
                "the index is not trained: call train(x) first. It keeps a trained quantizer, and "
                "solves the threshold for `replication`."
            )
        self._layout.check_unchanged()
        self._check_quantizer()
        return self._layout

    def _check_quantizer(self) -> None:
        self.quantizer.check_intact()
        if address(self._ivf.quantizer) != address(self.quantizer):
            raise RuntimeError("the quantizer of the wrapped index was replaced: build a new one.")

    def _matrix(self, x: Any) -> Any:
        return as_matrix(x, self.d, "x")

    def _inner(self, rows: np.ndarray) -> np.ndarray:
        """Rows in the space of the lists."""
        return rows if self._chain is None else self._chain.apply(rows)

    def _inner_checked(self, rows: np.ndarray, first: int = 0) -> np.ndarray:
        """The same of finite rows, after a check that the transforms left them so."""
        if self._chain is None:
            return rows
        inner = self._chain.apply(rows)
        check_rows(inner, "x behind the transforms", first=first)
        return inner

    def _forget_removed(self) -> None:
        """Let what lies beside the layout follow it after a change."""
        if self._originals is not None:
            self._originals.keep(self._layout.contains)
        self.index.ntotal = self._ivf.ntotal
