"""Layouts by name."""

from typing import Any

from gmm_ivf._layout import Layout
from gmm_ivf.lists import ListsLayout
from gmm_ivf.quantizer import GMMQuantizer


def make_layout(layout: str, ivf: Any, quantizer: GMMQuantizer, **options: Any) -> Layout:
    """Layout of a name over an index, with options of `IndexIVFGMM` or those of `Layout.options`.

    Raises
    ------
    ValueError
        For an unknown name, and for options that are bad or belong to another layout.
    NotImplementedError
        For a layout that is not available yet.
    """
    cells = options.pop("cells", None)
    if layout == "cells":
        raise NotImplementedError('layout="cells" is not available yet; use layout="lists".')
    if layout != "lists":
        raise ValueError(f'layout must be "lists" or "cells"; got {layout!r}.')
    if cells is not None:
        raise ValueError('cells holds options of layout="cells"; leave it None for "lists".')
    return ListsLayout(ivf, quantizer, **options)
