"""Give an existing FAISS index another coarse quantizer."""

from typing import Any

import numpy as np

from gmm_ivf._faiss import address, disown_quantizer, faiss, owns_quantizer


def attach(q: Any, index: Any) -> None:
    """See `GMMQuantizer.attach`."""
    q.check_intact()
    ivf = _ivf_inside(index)
    if index.ntotal:
        raise ValueError(
            f"index must be empty; it holds {index.ntotal} vectors in lists of other centroids."
        )
    for name in ("d", "nlist", "metric_type"):
        mine, other = getattr(q, name), getattr(ivf, name)
        if mine != other:
            raise ValueError(f"index has {name}={other}, this quantizer has {mine}.")
    _replace(q, index, ivf)
    ivf.is_trained = q.is_trained and isinstance(ivf, faiss.IndexIVFFlat)


def adopt(q: Any, index: Any) -> None:
    """See `GMMQuantizer.adopt`."""
    ivf = _ivf_inside(index)
    other = faiss.downcast_index(ivf.quantizer)
    if address(other) == address(q):
        return
    same = isinstance(other, faiss.IndexFlat) and other.metric_type == q.metric_type
    same = same and (other.ntotal, other.d) == (q.ntotal, q.d)
    if not (same and np.array_equal(_centroids(other), _centroids(q))):
        raise ValueError(
            f"index has other centroids than this quantizer: {type(other).__name__} of "
            f"{other.ntotal} in {other.d} dimensions."
        )
    _replace(q, index, ivf)


def _ivf_inside(index: Any) -> Any:
    ivf = faiss.downcast_index(index) if isinstance(index, faiss.Index) else index
    if isinstance(ivf, faiss.IndexPreTransform):
        ivf = faiss.downcast_index(ivf.index)
    if not isinstance(ivf, faiss.IndexIVF):
        raise ValueError(
            "index must be a faiss.IndexIVF, or a faiss.IndexPreTransform over one; got "
            f"{type(ivf).__name__}."
        )
    return ivf


def _centroids(flat: Any) -> np.ndarray:
    return faiss.rev_swig_ptr(flat.get_xb(), flat.ntotal * flat.d)


def _replace(q: Any, index: Any, ivf: Any) -> None:
    old = ivf.quantizer
    if old is not None and address(old) == address(q):
        return
    references = getattr(index, "referenced_objects", [])
    kept = [o for o in references if old is None or address(o) != address(old)]
    index.referenced_objects = [*kept, q]
    if owns_quantizer(ivf) and old is not None:
        # Not old.this.own(True), which would be the usual way: each such call costs SWIG a
        # reference to its type table, and a few of them the process its life.
        type(old).__swig_destroy__(old)
    disown_quantizer(ivf)
    ivf.quantizer = q
    # SWIG gives the ownership away on assignment; the reference above is what we want.
    q.this.own(True)
