"""What a quantizer asks of the rows that it is trained on, and says of them."""

import warnings
from typing import Any

import numpy as np

from gmm_ivf._vectors import block, check_rows

# FAISS asks for as many training vectors per centroid.
_MIN_POINTS_PER_CENTROID = 39


def check_untrained(is_trained: bool) -> None:
    """Refuse to train a quantizer twice, with RuntimeError."""
    if is_trained:
        raise RuntimeError(
            "this GMMQuantizer is trained, and an index may hold vectors in its lists: call "
            "reset() first, and fill such indexes anew."
        )


def check_training_rows(x: Any, nlist: int, unit: bool) -> None:
    """Refuse rows that cannot be trained on, and warn of too few.

    Called by the method that the user called.
    """
    n = x.shape[0]
    if n < nlist:
        raise ValueError(
            f"x must have at least nlist={nlist} rows to train on; got n={n}. Lower nlist "
            "or give more rows."
        )
    check_rows(x, "x", unit=unit)
    if n < _MIN_POINTS_PER_CENTROID * nlist:
        warnings.warn(
            f"training {nlist} lists on {n} rows; at least "
            f"{_MIN_POINTS_PER_CENTROID * nlist} (39 per list) are advised.",
            UserWarning,
            stacklevel=3,
        )


def warn_of_empty_lists(x: Any, nlist: int, empty: int) -> None:
    """Say how many lists hold no training row, and why.

    Called by the method that the user called.
    """
    # Halves of a list always have rows unless its points coincide, so the usual reason is that
    # there are too few distinct points; only then it is worth counting them.
    distinct = len(np.unique(block(x, "x"), axis=0))
    reason = f"x has {distinct} distinct rows for nlist={nlist}; " * (distinct < nlist)
    warnings.warn(
        f"{reason}{empty} of {nlist} lists hold no training row.", UserWarning, stacklevel=3
    )
