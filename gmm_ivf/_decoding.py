"""Where the entries of an id lie in an IVF index, and what their codes stand for."""

from typing import Any

import numpy as np

from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._faiss import faiss, raw
from gmm_ivf._list_data import structure
from gmm_ivf._vectors import spans


def list_ids(ivf: Any, number: int) -> np.ndarray:
    """Ids of the entries of a list, (size,) int64."""
    lists = ivf.invlists
    size = lists.list_size(number)
    if not size:
        return np.empty(0, np.int64)
    pointer = lists.get_ids(number)
    ids = faiss.rev_swig_ptr(pointer, size).copy()
    lists.release_ids(number, pointer)
    return ids


def list_codes(ivf: Any, number: int, offsets: np.ndarray) -> np.ndarray:
    """Codes at some places of a list, (offsets, code_size) uint8."""
    lists = ivf.invlists
    pointer = lists.get_codes(number)
    codes = faiss.rev_swig_ptr(pointer, lists.list_size(number) * ivf.code_size)
    chosen = codes.reshape(-1, ivf.code_size)[offsets]
    lists.release_codes(number, pointer)
    return chosen


def check_in_memory(ivf: Any) -> None:
    """Refuse an index whose lists lie in a file, with ValueError."""
    lists = faiss.downcast_InvertedLists(ivf.invlists)
    if not isinstance(lists, faiss.ArrayInvertedLists):
        raise ValueError(
            f"the lists are {type(lists).__name__}, which lie in a file: read the index into "
            "memory first."
        )


def template_bytes(ivf: Any) -> np.ndarray:
    """A serialised index without its entries and search options: centroids and codec, uint8."""
    nprobe, ivf.nprobe = ivf.nprobe, 1
    try:
        return structure(ivf, ivf)
    finally:
        ivf.nprobe = nprobe


class EntryMap:
    """All entries of an index by id; holds as long as nothing is added or removed.

    Parameters
    ----------
    ivf : faiss.IndexIVF
    """

    def __init__(self, ivf: Any):
        self._ivf = ivf
        parts = [list_ids(ivf, number) for number in range(ivf.nlist)]
        sizes = [len(part) for part in parts]
        ids = np.concatenate(parts)
        order = np.argsort(ids, kind="stable")
        self._ids = ids[order]
        self._lists = np.repeat(np.arange(ivf.nlist), sizes)[order]
        self._offsets = np.concatenate([np.arange(size) for size in sizes])[order]

    def decode(self, ids: np.ndarray, ranker: CoarseRanker) -> np.ndarray:
        """Decode one entry of each id: of several, that which lies nearest to its mean.

        Parameters
        ----------
        ids : ndarray of shape (m,), int64
        ranker : CoarseRanker

        Returns
        -------
        ndarray of shape (m, d), float32

        Raises
        ------
        ValueError
            Naming an id that has no entry.
        NotImplementedError
            For a codec that FAISS cannot decode.
        """
        first = np.searchsorted(self._ids, ids, side="left")
        copies = np.searchsorted(self._ids, ids, side="right") - first
        if (copies == 0).any():
            raise ValueError(f"ids must be stored; {ids[(copies == 0).argmax()]} is not.")
        vectors = np.empty((len(ids), self._ivf.d), np.float32)
        width = max(1, int(copies.max(initial=1)))
        for where in spans(len(ids), self._ivf.d * width):
            vectors[where] = self._best(first[where], copies[where], ranker)
        return vectors

    def _best(self, first: np.ndarray, copies: np.ndarray, ranker: CoarseRanker) -> np.ndarray:
        owner = np.repeat(np.arange(len(first)), copies)
        starts = np.cumsum(copies) - copies
        places = first[owner] + np.arange(len(owner)) - starts[owner]
        decoded = self._decoded(places)
        if len(decoded) == len(first):
            return decoded
        means = ranker.table[self._lists[places]]
        distances = ((ranker.points(decoded) - means) ** 2).sum(axis=1)
        return decoded[np.lexsort((distances, owner))[starts]]

    def _decoded(self, places: np.ndarray) -> np.ndarray:
        lists, offsets = self._lists[places], self._offsets[places]
        codes = np.empty((len(places), self._ivf.code_size), np.uint8)
        order = np.argsort(lists, kind="stable")
        numbers, starts = np.unique(lists[order], return_index=True)
        for number, chosen in zip(numbers, np.split(order, starts[1:]), strict=True):
            codes[chosen] = list_codes(self._ivf, int(number), offsets[chosen])
        vectors = np.empty((len(places), self._ivf.d), np.float32)
        try:
            self._ivf.decode_vectors(len(places), raw(codes), raw(lists), raw(vectors))
        except RuntimeError as error:
            raise NotImplementedError(
                f"FAISS cannot decode the codes of {type(self._ivf).__name__}: keep the vectors "
                "yourself, by id."
            ) from error
        return vectors
