"""Soft assignment by a trained quantizer: vectors in, (row, list) pairs out."""

import warnings
from typing import Any

import numpy as np
import torch

from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._faiss import faiss
from gmm_ivf._near_posteriors import near_posteriors
from gmm_ivf._rule_pairs import pairs_by_rule, pairs_on_gpu
from gmm_ivf._vectors import block, sample_rows, unit_rows
from gmm_ivf.assignment import select_lists, solve_threshold
from gmm_ivf.quantizer import GMMQuantizer
from gmm_ivf.rules import Rule

# Near components whose posteriors are looked at where a graph finds them.
_NEAR = 32
# Rows on which a threshold is solved: the replication reached is off by about 0.3 %.
_SAMPLE_ROWS = 1 << 15


class Assigner:
    """Nearest mean first, further lists by posterior or by a rule of geometry.

    Parameters
    ----------
    quantizer : GMMQuantizer
        Trained. The assigner holds for this state of it only.
    max_lists : int
    rule : Rule or None
        None goes by posterior.

    Attributes
    ----------
    ranker : CoarseRanker
        Ranks lists for queries and for the primary list of stored vectors alike.
    generation : int
        State of the quantizer that this was made from.
    """

    def __init__(self, quantizer: GMMQuantizer, max_lists: int, rule: Rule | None = None):
        self.ranker = CoarseRanker(quantizer, quantizer.mixture)
        self.generation = quantizer.generation
        self._mixture = quantizer.mixture
        self._device = _device_of(quantizer.mixture)
        self._is_product = quantizer.metric_type == faiss.METRIC_INNER_PRODUCT
        self._max_lists = max_lists
        self._rule = rule

    def candidates(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Log-posteriors, nearest mean, and the components of the posteriors.

        Parameters
        ----------
        rows : ndarray of shape (n, d), float32

        Returns
        -------
        log_resp : ndarray of shape (n, m), float64
        primary : ndarray of shape (n,), int64
        ids : ndarray of shape (n, m), int64
        """
        primary = self.ranker.nearest(rows)
        if self._max_lists == 1:
            return np.empty((len(rows), 0)), primary, np.empty((len(rows), 0), np.int64)
        # Under inner products the mixture models directions. A zero row has none: its posteriors
        # are those of the origin.
        modelled = unit_rows(rows) if self._is_product else rows
        if self.ranker.finds_by_graph:
            near = self.ranker.search(rows, max(_NEAR, self._max_lists))[1]
            ids, log_resp = near_posteriors(self._mixture, modelled, near)
        else:
            ids, log_resp = self._mixture.top_components(modelled, self._max_lists)
        return log_resp, primary, ids

    def pairs(self, rows: np.ndarray, log_tau: float) -> tuple[np.ndarray, np.ndarray]:
        """Flat (rows, lists) pairs in order of rows, the primary of a row first.

        The threshold is for posteriors; see `select_lists`.
        """
        if self._rule is not None and self._max_lists > 1:
            return self._pairs_by(self._rule, rows)
        return select_lists(*self.candidates(rows), log_tau, self._max_lists)

    def _pairs_by(self, rule: Rule, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs by a rule, on the GPU where the mixture is on one."""
        table, points = self.ranker.table, self.ranker.points(rows)
        if self._device.type == "cuda":
            return pairs_on_gpu(rule, points, table, self._max_lists, self._device)
        _, lists = self.ranker.search(rows, min(rule.candidates, len(table)))
        primary = self.ranker.nearest(rows)
        return pairs_by_rule(rule, points, table, primary, lists, self._max_lists)

    def solve(self, x: Any, replication: float) -> float:
        """Logarithm of the tau at which a sample of x takes `replication` lists per vector.

        Warns
        -----
        UserWarning
            When the value nearest to it is off by over 2 %.
        """
        picks = sample_rows(x.shape[0], _SAMPLE_ROWS, np.random.default_rng(0))
        candidates = self.candidates(block(x, "x", picks))
        log_tau = solve_threshold(*candidates, replication, self._max_lists)
        reached = len(select_lists(*candidates, log_tau, self._max_lists)[0]) / len(picks)
        if abs(reached - replication) > max(0.02 * replication, 1 / len(picks)):
            warnings.warn(
                f"replication={replication} was asked for and {reached:.2f} is what the sample "
                f"gives: max_lists={self._max_lists} or equal posteriors allow no closer value.",
                UserWarning,
                stacklevel=3,
            )
        return log_tau


def _device_of(mixture: Any) -> torch.device:
    """Where a mixture was fitted, if that GPU is there; the CPU otherwise."""
    device = torch.device(getattr(mixture, "device_", "cpu"))
    return device if torch.cuda.is_available() else torch.device("cpu")
