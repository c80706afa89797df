"""faiss, imported in one place, and the few questions that every user of it asks."""

from typing import Any

import numpy as np

try:
    import faiss
except ImportError as error:
    raise ImportError(
        'gmm_ivf needs faiss for indexes: pip install "gmm-ivf[cpu]", or "gmm-ivf[gpu]" on CUDA.'
    ) from error

__all__ = [
    "ID_BYTES",
    "address",
    "check_metric",
    "disown_quantizer",
    "faiss",
    "metric_name",
    "owns_quantizer",
    "raw",
    "worst_distance",
]

# Of the id of an entry, in lists of any index.
ID_BYTES = 8
# Of the base class: IndexIVFSpectralHash has an `own_fields` besides, for something else.
_OWNS_QUANTIZER: Any = faiss.Level1Quantizer.own_fields  # pyright: ignore
_METRICS = {faiss.METRIC_L2: "METRIC_L2", faiss.METRIC_INNER_PRODUCT: "METRIC_INNER_PRODUCT"}


def check_metric(metric: int) -> int:
    """Return the metric, or raise ValueError when mixtures cannot serve it."""
    if metric not in _METRICS:
        raise ValueError(
            "metric must be faiss.METRIC_L2 or faiss.METRIC_INNER_PRODUCT (normalise the vectors "
            f"yourself for cosine); got {metric!r}."
        )
    return metric


def metric_name(metric: int) -> str:
    """Name of a metric as faiss spells it."""
    return _METRICS[metric]


def worst_distance(metric: int) -> np.float32:
    """Distance that FAISS gives to an empty result slot."""
    largest = np.finfo(np.float32).max
    return -largest if metric == faiss.METRIC_INNER_PRODUCT else largest


def address(swig_object: Any) -> int:
    """Address of the C++ object behind a proxy: two proxies of one object agree in nothing else."""
    return int(swig_object.this)


def owns_quantizer(ivf: Any) -> bool:
    """Whether an IVF index deletes its quantizer when it is deleted itself."""
    return bool(_OWNS_QUANTIZER.fget(ivf))


def disown_quantizer(ivf: Any) -> None:
    """Leave the quantizer of an IVF index to Python."""
    _OWNS_QUANTIZER.fset(ivf, False)


def raw(array: np.ndarray) -> Any:
    """Pointer to a C-contiguous array, for FAISS calls that take no numpy."""
    return faiss.swig_ptr(array)
