"""How many lists a query probes, where that follows from its distances to the means."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._scan import Probes
from gmm_ivf._vectors import block, sample_rows

# A query probes at most so many times nprobe lists.
_MOST = 4
# Distances to means on which the stops are solved.
_SAMPLED = 1 << 21


@dataclass(frozen=True)
class AdaptiveProbing:
    """Fewer lists for a query near its mean, more for one between many: nprobe is the average.

    By rising distance list r = 0, 1, ... of a query is probed while ``r (d_r^2 / d_0^2 - 1)`` is at
    most a stop, which depends on nprobe alone. Both factors grow with r. The ratio by itself is
    the test of SPANN (arXiv 2111.08566), which goes on too long in the middle of many means; the
    rank by itself is what every inverted file stops by.

    Attributes
    ----------
    stops : ndarray of shape (nlist,), float64
        Of nprobe = 1, 2, ...: rising, 0 first.
    """

    stops: np.ndarray

    @classmethod
    def solved(cls, ranker: CoarseRanker, x: Any, nlist: int) -> "AdaptiveProbing":
        """Stops at which a sample of x probes nprobe lists a row, if there were no cap.

        Parameters
        ----------
        ranker : CoarseRanker
        x : array-like of shape (n, d)
        nlist : int
        """
        limit = max(1, _SAMPLED // nlist)
        rows = block(x, "x", sample_rows(x.shape[0], limit, np.random.default_rng(0)))
        reach = np.sort(_reach(ranker.counted_search(rows, nlist)[0]), axis=None)
        return cls(reach[len(rows) * np.arange(1, nlist + 1) - 1])

    @classmethod
    def restored(cls, stops: np.ndarray, nlist: int) -> "AdaptiveProbing":
        """Stops of a file.

        Raises
        ------
        ValueError
            When they are not those of `nlist` lists.
        """
        if stops.shape != (nlist,) or stops.dtype != np.float64:
            raise ValueError(f"stops must be {nlist} numbers of float64; got {stops.shape}.")
        # Written so that NaN fails.
        if not (stops[0] >= 0 and (stops[1:] >= stops[:-1]).all()):
            raise ValueError("stops must rise from 0.")
        return cls(stops)

    def probes(self, ranker: CoarseRanker, rows: np.ndarray, nprobe: int) -> Probes:
        """Lists to probe, -1 past the last of a row; all lists where nprobe says so.

        Parameters
        ----------
        ranker : CoarseRanker
        rows : ndarray of shape (n, d), float32
        nprobe : int
        """
        nlist = len(self.stops)
        distances, lists, coarse = ranker.counted_search(rows, min(_MOST * nprobe, nlist))
        if nprobe == nlist:
            return Probes(lists, distances, coarse)
        goes_on = _reach(distances) <= self.stops[nprobe - 1]
        width = max(1, int(goes_on.sum(axis=1).max(initial=1)))
        lists = np.where(goes_on, lists, -1)[:, :width]
        arrays = np.ascontiguousarray(lists), np.ascontiguousarray(distances[:, :width])
        return Probes(*arrays, coarse)


def _reach(distances: np.ndarray) -> np.ndarray:
    """``r (d_r^2 / d_0^2 - 1)`` of squared distances by rows, (n, m) float64."""
    squared = distances.astype(np.float64)
    first = squared[:, :1]
    # A query that equals its mean goes on to means that equal it, too.
    alone = np.where(squared > 0, np.inf, 0.0)
    excess = np.where(first > 0, squared / np.where(first > 0, first, 1.0) - 1, alone)
    return np.arange(squared.shape[1]) * np.maximum(excess, 0.0)
