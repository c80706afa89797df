"""A plain FAISS index of single assignment, out of one whose ids have copies."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._decoding import list_codes, list_ids
from gmm_ivf._faiss import faiss, raw
from gmm_ivf._list_data import fill_lists, list_blocks, list_sizes, structure
from gmm_ivf._vectors import spans

Exact = Callable[[np.ndarray], np.ndarray]


def single_assigned(index: Any, ivf: Any, ranker: CoarseRanker | None, exact: Exact | None) -> Any:
    """Copy of an index in which each id has one entry: that of its nearest mean.

    Parameters
    ----------
    index : faiss.Index
        Maybe a faiss.IndexPreTransform over the next.
    ivf : faiss.IndexIVF
    ranker : CoarseRanker or None
        None where ids have no copies.
    exact : callable or None
        Vectors of ids, in the space of the lists; None goes by what the codec kept of them.

    Returns
    -------
    faiss.Index
        Of the type of `index`, over a plain quantizer.

    Raises
    ------
    NotImplementedError
        For a codec that FAISS cannot decode, with copies.
    """
    copy = faiss.deserialize_index(structure(index, ivf))
    inner = faiss.downcast_index(faiss.extract_index_ivf(copy))
    if ranker is not None:
        _fill_with_primaries(inner, ivf, ranker, exact)
    else:
        sizes = list_sizes(ivf)
        blocks = [np.empty(0, np.uint8), *list_blocks(ivf, sizes)]
        fill_lists(inner, sizes, np.concatenate(blocks))
    copy.ntotal = inner.ntotal
    return copy


def _fill_with_primaries(inner: Any, ivf: Any, ranker: CoarseRanker, exact: Exact | None) -> None:
    per_list = [list_ids(ivf, number) for number in range(ivf.nlist)]
    sizes = np.array([len(ids) for ids in per_list])
    ids, lists = np.concatenate(per_list), np.repeat(np.arange(ivf.nlist), sizes)
    starts = np.cumsum(sizes) - sizes
    offsets = np.arange(len(ids)) - starts[lists]
    kept = np.zeros(len(ids), bool)
    order = np.argsort(ids, kind="stable")
    heads = np.flatnonzero(np.diff(ids[order], prepend=-1))
    copies = np.diff(heads, append=len(ids))
    kept[order[heads[copies == 1]]] = True
    for count in np.unique(copies[copies > 1]).tolist():
        entries = order[heads[copies == count][:, None] + np.arange(count)]
        for part in spans(len(entries), count * ivf.d):
            some = entries[part]
            if exact is None:
                vectors = _mean_of_copies(ivf, lists[some], offsets[some])
            else:
                vectors = exact(ids[some[:, 0]])
            best = _nearest(ranker, vectors, lists[some])
            kept[np.take_along_axis(some, best[:, None], axis=1)] = True
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        chosen = np.flatnonzero(kept[start : start + size])
        if chosen.size:
            codes = np.ascontiguousarray(list_codes(ivf, number, chosen))
            held = np.ascontiguousarray(per_list[number][chosen])
            inner.invlists.add_entries(number, len(chosen), raw(held), raw(codes))
    inner.ntotal = int(kept.sum())


def _mean_of_copies(ivf: Any, lists: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """What the codec kept of vectors, each with c copies in (n, c) lists: (n, d) float32."""
    flat = np.argsort(lists, axis=None, kind="stable")
    vectors = np.empty((lists.size, ivf.d), np.float32)
    vectors[flat] = _decoded(ivf, lists.ravel()[flat], offsets.ravel()[flat])
    # Each copy lost something else to its code: their mean is nearer to the vector than any.
    return vectors.reshape(*lists.shape, ivf.d).mean(axis=1, dtype=np.float64).astype(np.float32)


def _nearest(ranker: CoarseRanker, vectors: np.ndarray, lists: np.ndarray) -> np.ndarray:
    """Column of the list, of (n, c), whose mean is nearest to each vector: (n,) int64."""
    points = ranker.points(vectors)
    distance = np.empty(lists.shape)
    for column in range(lists.shape[1]):
        apart = points - ranker.table[lists[:, column]]
        distance[:, column] = np.einsum("ij,ij->i", apart, apart)
    # To the last bit it is the mean by which the vector was added.
    distance[lists == ranker.nearest(vectors)[:, None]] = -1
    return distance.argmin(axis=1)


def _decoded(ivf: Any, lists: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Vectors of entries that are in order of lists."""
    numbers, starts = np.unique(lists, return_index=True)
    parts = zip(numbers, np.split(offsets, starts[1:]), strict=True)
    codes = np.concatenate([list_codes(ivf, int(number), part) for number, part in parts])
    vectors = np.empty((len(lists), ivf.d), np.float32)
    lists = np.ascontiguousarray(lists, np.int64)
    try:
        ivf.decode_vectors(len(lists), raw(codes), raw(lists), raw(vectors))
    except RuntimeError as error:
        raise NotImplementedError(
            f"FAISS cannot decode the codes of {type(ivf).__name__}, to tell the first list of a "
            "vector from its copies: export with max_lists=1."
        ) from error
    return vectors
