"""A copy of a FAISS index in which every cell is a list, for codes that FAISS has to scan."""

from typing import Any

import numpy as np

from gmm_ivf._cell_table import Occupied
from gmm_ivf._faiss import ID_BYTES, disown_quantizer, faiss, raw
from gmm_ivf._scan import spread_over_threads

_LIST_HEADER_BYTES = 48


class CellCopy:
    """Entries of an index by cell, codes unchanged.

    Codes stand for residuals from the means of lists, so the mean of every cell of a component has
    to be that of the component. FAISS's quantizer of sums of two codebooks says so without a table
    of all cells: the first, for the cells of a component, holds zeros, the second the means.

    Parameters
    ----------
    ivf : faiss.IndexIVF
        With lists in the order of `occupied`.
    occupied : Occupied
    per_component : int
    template : ndarray of uint8
        Its codec, as `template_bytes` gives it.

    Attributes
    ----------
    ivf : faiss.IndexIVF
        The copy.
    keys : ndarray of shape (C,), int64
        List of each cell.
    sizes : ndarray of shape (lists,), int64
        Entries of each list.
    """

    def __init__(self, ivf: Any, occupied: Occupied, per_component: int, template: np.ndarray):
        own, local = np.divmod(occupied.cells, per_component)
        bits = max(1, int(per_component - 1).bit_length())
        self._quantizer = _repeating_quantizer(ivf, bits)
        lists = int(self._quantizer.ntotal)
        self.keys = (own << bits) | local
        self.sizes = np.zeros(lists, np.int64)
        self.sizes[self.keys] = occupied.sizes
        self.ivf = _over_cells(template, self._quantizer, lists)
        self._fill(ivf, own, occupied)
        self.ivf.ntotal = int(occupied.sizes.sum())
        spread_over_threads(self.ivf)

    def _fill(self, ivf: Any, own: np.ndarray, occupied: Occupied) -> None:
        source, width = ivf.invlists, ivf.code_size
        for number in np.unique(own).tolist():
            codes, ids = source.get_codes(number), source.get_ids(number)
            size = source.list_size(number)
            all_codes = faiss.rev_swig_ptr(codes, size * width)
            all_ids = faiss.rev_swig_ptr(ids, size)
            for c in np.flatnonzero(own == number).tolist():
                begin, count = int(occupied.begins[c]), int(occupied.sizes[c])
                part = all_codes[begin * width : (begin + count) * width]
                names = all_ids[begin : begin + count]
                self.ivf.invlists.add_entries(int(self.keys[c]), count, raw(names), raw(part))
            source.release_codes(number, codes)
            source.release_ids(number, ids)

    @property
    def nbytes(self) -> int:
        """Memory of codes, ids, lists and means."""
        entries = int(self.sizes.sum()) * (self.ivf.code_size + ID_BYTES)
        table = 4 * self._quantizer.rq.codebooks.size()
        return entries + len(self.sizes) * (_LIST_HEADER_BYTES + 8) + table + self.keys.nbytes


def _repeating_quantizer(ivf: Any, bits: int) -> Any:
    """A quantizer whose list ``(i << bits) | c`` has mean i of the index, for any c."""
    nlist, d = ivf.nlist, ivf.d
    upper = max(1, int(nlist - 1).bit_length())
    means = np.zeros(((1 << bits) + (1 << upper), d), np.float32)
    means[1 << bits :][:nlist] = ivf.quantizer.reconstruct_n(0, nlist)
    widths = faiss.UInt64Vector()
    faiss.copy_array_to_vector(np.array([bits, upper], np.uint64), widths)
    quantizer = faiss.ResidualCoarseQuantizer(d, widths, ivf.metric_type)
    faiss.copy_array_to_vector(means.ravel(), quantizer.rq.codebooks)
    quantizer.rq.is_trained = quantizer.is_trained = True
    quantizer.ntotal = 1 << (bits + upper)
    return quantizer


def _over_cells(template: np.ndarray, quantizer: Any, lists: int) -> Any:
    """An empty index with the codec of a template, over other lists."""
    copy: Any = faiss.deserialize_index(template)
    copy.referenced_objects = [quantizer]
    disown_quantizer(copy)
    copy.quantizer = quantizer
    quantizer.this.own(True)
    copy.nlist = lists
    if isinstance(copy, faiss.IndexIVFPQ):
        # Its table is one row per list; without it FAISS makes that of a list when it gets there.
        copy.use_precomputed_table = -1
        copy.precomputed_table.resize(0)
    empty = faiss.ArrayInvertedLists(lists, copy.code_size)
    copy.replace_invlists(empty, True)
    empty.this.disown()
    return copy
