"""What layout "cells" learned, as arrays for a file and back."""

import numpy as np

from gmm_ivf._cell_anchors import Anchors
from gmm_ivf._cell_table import Moments, Shape
from gmm_ivf._links import Links


def shape_arrays(shape: Shape) -> dict[str, np.ndarray]:
    """Arrays of one dimension."""
    anchors = {}
    if shape.anchors:
        anchors = {
            "anchor_fractions": shape.anchors.fractions.ravel(),
            "anchor_sketches": shape.anchors.sketches.view(np.uint8).ravel(),
            "anchor_unit": np.array([shape.anchors.unit]),
        }
    return {
        **anchors,
        "neighbours": shape.links.neighbours.ravel(),
        "merged": shape.merged.astype(np.uint8).ravel(),
        "edges_of_bins": shape.edges_of_bins.ravel(),
        "directions": shape.directions.ravel(),
        "units": shape.units,
    }


def moment_arrays(moments: Moments) -> dict[str, np.ndarray]:
    """Arrays of one dimension."""
    return {
        "cells": moments.cells,
        "counts": moments.counts,
        "moments": moments.scaled.ravel(),
    }


def shape_of_arrays(
    means: np.ndarray, arrays: dict[str, np.ndarray], by_list: bool
) -> tuple[Shape, Moments]:
    """The inverse of both, over a table of means; `by_list` is that of `Shape`.

    Raises
    ------
    ValueError
        When an array is of another type or size, or holds numbers that cannot be.
    """
    nlist, d = means.shape
    neighbours = _matrix(arrays, "neighbours", nlist, np.int32)
    merged = _matrix(arrays, "merged", nlist, np.uint8)
    edges = _matrix(arrays, "edges_of_bins", nlist, np.float32)
    directions = _array(arrays, "directions", np.float32)
    if merged.shape != neighbours.shape or directions.size % d:
        raise ValueError("the links, or the directions of sketches, have the wrong size.")
    if neighbours.size and not 0 <= neighbours.min() <= neighbours.max() < nlist:
        raise ValueError(f"neighbours must be lists in [0, {nlist}).")
    links = Links.of_neighbours(means, neighbours)
    units = _array(arrays, "units", np.float32)
    width = 3 + directions.size // d
    if len(units) != width or (units <= 0).any():
        raise ValueError(f"units must be {width} positive numbers.")
    directions = directions.reshape(-1, d)
    anchors = None if by_list else _anchors(links, directions, arrays)
    shape = Shape(links, merged.astype(bool), edges, directions, units, by_list, anchors)
    cells, counts = _array(arrays, "cells", np.int64), _array(arrays, "counts", np.int64)
    values = _array(arrays, "moments", np.float16)
    if len(counts) != len(cells) or values.size != len(cells) * width:
        raise ValueError("counts and moments must belong to the cells, one row each.")
    top = nlist * shape.per_component
    ascending = (cells[1:] > cells[:-1]).all() and (counts > 0).all()
    if not ascending or (len(cells) and not 0 <= cells[0] <= cells[-1] < top):
        raise ValueError(f"cells must be ascending numbers in [0, {top}), none of them empty.")
    return shape, Moments(cells, counts, values.reshape(-1, width), units)


def _anchors(links: Links, directions: np.ndarray, arrays: dict[str, np.ndarray]) -> Anchors:
    nlist, columns = len(links.means), links.count + 1
    fractions = _matrix(arrays, "anchor_fractions", nlist, np.uint8)
    sketches = _array(arrays, "anchor_sketches", np.uint8).view(np.int8)
    unit = _array(arrays, "anchor_unit", np.float64)
    size = nlist * columns * len(directions)
    if fractions.shape[1] != columns or sketches.size != size or unit.shape != (1,):
        raise ValueError("the anchors have the wrong size.")
    if not 0 < unit[0] < np.finfo(np.float32).max:
        raise ValueError(f"anchor_unit must be a positive number; got {unit[0]}.")
    sketches = sketches.reshape(nlist, columns, -1)
    return Anchors.of_codes(links, directions, fractions, sketches, float(unit[0]))


def _array(arrays: dict[str, np.ndarray], name: str, dtype: type) -> np.ndarray:
    array = np.array(arrays[name])
    if array.dtype != dtype or array.ndim != 1 or not np.isfinite(array).all():
        raise ValueError(f"{name} must be a finite array of {np.dtype(dtype)} and one dimension.")
    return array


def _matrix(arrays: dict[str, np.ndarray], name: str, rows: int, dtype: type) -> np.ndarray:
    array = _array(arrays, name, dtype)
    if array.size % rows:
        raise ValueError(f"{name} must have {rows} rows; it has {array.size} numbers.")
    return array.reshape(rows, -1)
