"""The entries of inverted lists as one array in a file, and back: copied, or mapped.

List after list, each has its codes, then its ids. A list may have room for a few entries more than
it holds, so that ids lie at multiples of 8 bytes, where FAISS reads them in a mapped file.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gmm_ivf._faiss import ID_BYTES, faiss, raw


def capacities(sizes: np.ndarray, code_size: int) -> np.ndarray:
    """Entries that each list has room for in the file, (nlist,) int64."""
    step = ID_BYTES // math.gcd(ID_BYTES, code_size)
    return -(-sizes // step) * step


def nbytes(sizes: np.ndarray, code_size: int) -> int:
    """Length of the array that holds lists of these sizes."""
    return int(capacities(sizes, code_size).sum()) * (code_size + ID_BYTES)


def list_sizes(ivf: Any) -> np.ndarray:
    """Entries of each list, (nlist,) int64."""
    lists = ivf.invlists
    return np.array([lists.list_size(i) for i in range(lists.nlist)], np.int64)


def list_blocks(ivf: Any, sizes: np.ndarray) -> Iterator[np.ndarray]:
    """Parts of the array, one per list."""
    lists, code_size = ivf.invlists, ivf.code_size
    for number in np.flatnonzero(sizes).tolist():
        size, room = int(sizes[number]), int(capacities(sizes[number], code_size))
        block = np.zeros(room * (code_size + ID_BYTES), np.uint8)
        codes, ids = lists.get_codes(number), lists.get_ids(number)
        block[: size * code_size] = faiss.rev_swig_ptr(codes, size * code_size)
        block[room * code_size :].view(np.int64)[:size] = faiss.rev_swig_ptr(ids, size)
        lists.release_codes(number, codes)
        lists.release_ids(number, ids)
        yield block


def fill_lists(ivf: Any, sizes: np.ndarray, data: np.ndarray) -> None:
    """Copy entries into the empty lists of an index; `data` is the array, maybe mapped."""
    lists, code_size, start = ivf.invlists, ivf.code_size, 0
    rooms = capacities(sizes, code_size)
    for number in np.flatnonzero(sizes).tolist():
        size, room = int(sizes[number]), int(rooms[number])
        middle, end = start + room * code_size, start + room * (code_size + ID_BYTES)
        codes = np.ascontiguousarray(data[start : start + size * code_size])
        ids = np.ascontiguousarray(data[middle:end].view(np.int64)[:size])
        lists.add_entries(number, size, raw(ids), raw(codes))
        start = end
    ivf.ntotal = int(sizes.sum())


def map_lists(ivf: Any, sizes: np.ndarray, path: Path, start: int) -> None:
    """Let an index read its lists from a file, where the array begins at byte `start`."""
    code_size = ivf.code_size
    lists = faiss.OnDiskInvertedLists()
    lists.nlist, lists.code_size = len(sizes), code_size
    lists.read_only, lists.filename = True, str(path)
    lists.totsize = path.stat().st_size
    rooms = capacities(sizes, code_size)
    offsets = start + (np.cumsum(rooms) - rooms) * (code_size + ID_BYTES)
    lists.lists.clear()
    entry = faiss.OnDiskOneList()
    for size, room, offset in zip(sizes.tolist(), rooms.tolist(), offsets.tolist(), strict=True):
        entry.size, entry.capacity, entry.offset = size, room, offset
        lists.lists.push_back(entry)
    lists.do_mmap()
    ivf.replace_invlists(lists, True)
    lists.this.disown()
    ivf.ntotal = int(sizes.sum())


def structure(index: Any, ivf: Any) -> np.ndarray:
    """FAISS's own form of an index whose lists were empty, uint8.

    Parameters
    ----------
    index : faiss.Index
        Maybe a wrapper of the next.
    ivf : faiss.IndexIVF
        For the time that this takes its lists are others: no search may run beside it.
    """
    lists, owned, total, outer_total = ivf.invlists, ivf.own_invlists, ivf.ntotal, index.ntotal
    empty = faiss.ArrayInvertedLists(ivf.nlist, ivf.code_size)
    ivf.own_invlists = False
    try:
        ivf.replace_invlists(empty, False)
        ivf.ntotal = index.ntotal = 0
        return faiss.serialize_index(index)
    finally:
        ivf.replace_invlists(lists, False)
        ivf.own_invlists, ivf.ntotal = owned, total
        index.ntotal = outer_total
