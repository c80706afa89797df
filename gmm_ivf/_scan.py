"""The part of a search that runs in FAISS: rank the lists, scan those that are probed."""

from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from gmm_ivf._faiss import faiss, raw
from gmm_ivf._layout import ProbeOptions

# A range search spreads queries over threads in parallel mode 0 only, and refuses mode 3. A search
# beside it runs in either mode, in 0 on one thread; another range search has to wait.
_MODE_IS_LENT = Lock()


@dataclass(frozen=True)
class Probes:
    """Lists to probe for some rows.

    Attributes
    ----------
    lists : ndarray of shape (n, nprobe), int64
        -1 for none, which FAISS skips.
    distances : ndarray of shape (n, nprobe), float32
        True squared L2 distances or inner products: residual codecs build on them.
    coarse : ndarray of shape (n,), int64
        Comparisons that it took to find them.
    """

    lists: np.ndarray
    distances: np.ndarray
    coarse: np.ndarray

    def part(self, where: slice | np.ndarray) -> "Probes":
        """Those of some of the rows."""
        return Probes(self.lists[where], self.distances[where], self.coarse[where])

    def scanned(self, sizes: np.ndarray, max_codes: int) -> np.ndarray:
        """Entries in the lists probed, (n,) int64."""
        entries = np.where(self.lists >= 0, sizes[self.lists], 0).sum(axis=1)
        return np.minimum(entries, max_codes) if max_codes else entries


def spread_over_threads(ivf: Any) -> None:
    """Let FAISS spread the queries of a preassigned search over its threads.

    In mode 0 it does so in `search` only; mode 3 does in both.
    """
    if ivf.parallel_mode == 0:
        ivf.parallel_mode = 3


def nearest_entries(
    ivf: Any, rows: np.ndarray, fetch: int, probes: Probes, options: ProbeOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Best `fetch` entries of the lists probed: (distances, labels), copies included."""
    n = len(rows)
    distances = np.empty((n, fetch), np.float32)
    labels = np.empty((n, fetch), np.int64)
    # The Python method takes neither parameters nor another width than index.nprobe.
    ivf.search_preassigned_c(
        n,
        raw(rows),
        fetch,
        raw(probes.lists),
        raw(probes.distances),
        raw(distances),
        raw(labels),
        False,
        options.parameters,
    )
    return distances, labels


def entries_within(
    ivf: Any, rows: np.ndarray, radius: float, probes: Probes, options: ProbeOptions
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Entries within a radius: (lims (n + 1,) int64, distances, labels), copies included."""
    found = faiss.RangeSearchResult(len(rows))
    pointers = raw(rows), radius, raw(probes.lists), raw(probes.distances)
    with _MODE_IS_LENT:
        mode = ivf.parallel_mode
        ivf.parallel_mode = 0
        try:
            ivf.range_search_preassigned_c(len(rows), *pointers, found, False, options.parameters)
        finally:
            ivf.parallel_mode = mode
    lims = faiss.rev_swig_ptr(found.lims, len(rows) + 1).astype(np.int64)
    size = int(lims[-1])
    if not size:
        return lims, np.empty(0, np.float32), np.empty(0, np.int64)
    distances = faiss.rev_swig_ptr(found.distances, size).copy()
    return lims, distances, faiss.rev_swig_ptr(found.labels, size).copy()
