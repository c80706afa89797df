"""A plain FAISS index of single assignment, out of one whose ids have copies."""

from typing import Any

import numpy as np

from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._decoding import list_codes, list_ids
from gmm_ivf._faiss import faiss, raw
from gmm_ivf._list_data import fill_lists, list_blocks, list_sizes, structure
from gmm_ivf._vectors import spans


def single_assigned(index: Any, ivf: Any, ranker: CoarseRanker | None) -> Any:
    """Copy of an index in which each id has one entry: that of its nearest mean.

    Parameters
    ----------
    index : faiss.Index
        Maybe a faiss.IndexPreTransform over the next.
    ivf : faiss.IndexIVF
    ranker : CoarseRanker or None
        None where ids have no copies.

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
        _fill_with_primaries(inner, ivf, ranker)
    else:
        sizes = list_sizes(ivf)
        blocks = [np.empty(0, np.uint8), *list_blocks(ivf, sizes)]
        fill_lists(inner, sizes, np.concatenate(blocks))
    copy.ntotal = inner.ntotal
    return copy


def _fill_with_primaries(inner: Any, ivf: Any, ranker: CoarseRanker) -> None:
    per_list = [list_ids(ivf, number) for number in range(ivf.nlist)]
    sizes = np.array([len(ids) for ids in per_list])
    ids, lists = np.concatenate(per_list), np.repeat(np.arange(ivf.nlist), sizes)
    offsets = np.concatenate([np.arange(size) for size in sizes])
    _, where, counts = np.unique(ids, return_inverse=True, return_counts=True)
    away, distance = np.zeros(len(ids), bool), np.zeros(len(ids))
    copied = np.flatnonzero(counts[where] > 1)
    for part in spans(len(copied), ivf.d):
        entries = copied[part]
        vectors = _decoded(ivf, lists[entries], offsets[entries])
        # Of a codec that loses nothing the nearest mean is the one that the vector was added by.
        away[entries] = ranker.nearest(vectors) != lists[entries]
        apart = ranker.points(vectors) - ranker.table[lists[entries]]
        distance[entries] = np.einsum("ij,ij->i", apart, apart)
    order = np.lexsort((lists, distance, away, ids))
    first = np.ones(len(order), bool)
    first[1:] = ids[order][1:] != ids[order][:-1]
    kept = np.zeros(len(order), bool)
    kept[order[first]] = True
    for number, (start, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes, strict=True)):
        chosen = np.flatnonzero(kept[start : start + size])
        if chosen.size:
            codes = np.ascontiguousarray(list_codes(ivf, number, chosen))
            held = np.ascontiguousarray(per_list[number][chosen])
            inner.invlists.add_entries(number, len(chosen), raw(held), raw(codes))
    inner.ntotal = int(kept.sum())


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
