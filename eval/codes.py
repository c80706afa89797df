"""What scanning the codes of a FAISS index costs, and what the index holds, in distances and bytes.

The unit of work is one distance between float32 vectors: D multiply-adds. A byte look-up of a code
counts as one multiply-add, so that a product quantizer of m bytes costs m/D.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gmm_ivf.eval.environment import require_faiss

_LIST_HEADER_BYTES = 48  # two std::vector headers, codes and ids, of FAISS's ArrayInvertedLists
_ID_BYTES = 8

#: The convention in words, for tables.
CONVENTION = (
    "codes: in units of one distance (D multiply-adds) a scanned PQ code costs m/D (one byte "
    "look-up a sub-quantizer), RaBitQ b/8 (one look-up a byte of code; FastScan 1/4, one per 4 "
    "bits), SQ 1; tables 2^bits a query, and m 2^bits / D a probed list where codes are "
    "residuals (RaBitQ 1 a list, its FastScan 5); a re-ranked vector 1, a rotation D"
)


@dataclass(frozen=True)
class CodeWork:
    """Work of a search in units of one distance: per scanned entry, probed list and query."""

    per_entry: float
    per_list: float = 0.0
    per_query: float = 0.0


def code_work(ivf: Any) -> CodeWork:
    """Work of scanning the lists of an IVF index, by its codec.

    Parameters
    ----------
    ivf : faiss.IndexIVF
        Downcast.
    """
    faiss = require_faiss()
    d = ivf.d
    if isinstance(ivf, faiss.IndexIVFRaBitQFastScan):
        # 4-bit look-ups, whose tables hold 16 sums for each 4 dimensions of the residual query.
        return CodeWork(1 / 4, 1 + 16 / 4)
    if isinstance(ivf, faiss.IndexIVFRaBitQ):
        return CodeWork(ivf.rabitq.nb_bits / 8, 1)
    if isinstance(ivf, faiss.IndexIVFPQ | faiss.IndexIVFPQFastScan):
        pq = ivf.pq
        residual = bool(ivf.by_residual) and ivf.metric_type == faiss.METRIC_L2
        per_list = 0.0
        if residual:
            # Precomputed tables leave a sum a table entry, otherwise each list has its own table.
            per_list = pq.M * pq.ksub / d if ivf.use_precomputed_table > 0 else float(pq.ksub)
        return CodeWork(pq.M / d, per_list, float(pq.ksub))
    return CodeWork(1.0)


def list_sizes(ivf: Any) -> np.ndarray:
    """Entries of every list of a FAISS IVF index: int64 of shape (nlist,)."""
    sizes = (ivf.invlists.list_size(i) for i in range(ivf.nlist))
    return np.fromiter(sizes, dtype=np.int64, count=ivf.nlist)


def index_bytes(index: Any) -> int:
    """Bytes of a FAISS index: codes, ids, list headers, coarse quantizer, tables and originals.

    Spare capacity that FAISS's growing lists may hold is not in it.

    Parameters
    ----------
    index : faiss.IndexIVF, IndexPreTransform over one, or IndexRefineFlat over either
    """
    faiss = require_faiss()
    # Under another name: the object given may be the one that owns the memory.
    found = faiss.downcast_index(index)
    if isinstance(found, faiss.IndexRefine):
        return index_bytes(found.base_index) + 4 * found.d * found.ntotal
    if isinstance(found, faiss.IndexPreTransform):
        return index_bytes(found.index) + found.chain.size() * 4 * found.d**2
    sizes = coded = list_sizes(found)
    if isinstance(found, faiss.IndexIVFFastScan):
        # Codes lie in blocks, the last one of a list padded.
        coded = -(-sizes // found.bbs) * found.bbs
    entries = int(coded.sum()) * found.code_size + int(sizes.sum()) * _ID_BYTES
    return entries + found.nlist * _LIST_HEADER_BYTES + _coarse_bytes(found) + _table_bytes(found)


def _coarse_bytes(ivf: Any) -> int:
    faiss = require_faiss()
    quantizer = faiss.downcast_index(ivf.quantizer)
    centres = 4 * ivf.d * ivf.nlist
    if not isinstance(quantizer, faiss.IndexHNSW):
        return centres
    hnsw = quantizer.hnsw
    links = 4 * hnsw.neighbors.size() + 8 * hnsw.offsets.size() + 4 * hnsw.levels.size()
    return centres + links


def _table_bytes(ivf: Any) -> int:
    faiss = require_faiss()
    if not isinstance(ivf, faiss.IndexIVFPQ | faiss.IndexIVFPQFastScan):
        return 0
    precomputed = ivf.precomputed_table.size() if ivf.use_precomputed_table > 0 else 0
    return 4 * (ivf.pq.centroids.size() + precomputed)
