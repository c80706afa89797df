"""Layouts by name."""

from typing import Any

from gmm_ivf._layout import Layout
from gmm_ivf.cells import CellLayout
from gmm_ivf.lists import ListsLayout
from gmm_ivf.quantizer import GMMQuantizer

# Options of layout "lists" alone, with their defaults in `IndexIVFGMM`.
_OF_LISTS = {
    "rule": "responsibility",
    "tau": None,
    "replication": None,
    "max_lists": 2,
    "fast_scan": False,
    "adaptive": False,
}


def make_layout(layout: str, ivf: Any, quantizer: GMMQuantizer, **options: Any) -> Layout:
    """Layout of a name over an index, with options of `IndexIVFGMM` or those of `Layout.options`.

    Raises
    ------
    ValueError
        For an unknown name, and for options that are bad or belong to another layout.
    """
    cells = options.pop("cells", None)
    if layout == "cells":
        _check_unused(options)
        return CellLayout(ivf, quantizer, cells)
    if layout != "lists":
        raise ValueError(f'layout must be "lists" or "cells"; got {layout!r}.')
    if cells is not None:
        raise ValueError('cells holds options of layout="cells"; leave it None for "lists".')
    return ListsLayout(ivf, quantizer, **options)


def _check_unused(options: dict[str, Any]) -> None:
    """Refuse options of layout "lists" where each vector is stored once, by its distances."""
    for name, default in _OF_LISTS.items():
        value = options.get(name, default)
        if not isinstance(value, type(default)) or value != default:
            raise ValueError(
                f'{name}={value!r} belongs to layout="lists"; layout="cells" stores each vector '
                "once: leave it out."
            )
