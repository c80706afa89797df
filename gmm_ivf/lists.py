"""Layout "lists": a vector near a boundary is stored in several lists."""

from math import ceil
from typing import Any

import numpy as np

from gmm_ivf._adaptive import AdaptiveProbing
from gmm_ivf._assigner import Assigner
from gmm_ivf._checks import check_posteriors, checked_adaptive, checked_budget, checked_rule
from gmm_ivf._faiss import faiss, worst_distance
from gmm_ivf._layout import Layout, ProbeOptions, Results
from gmm_ivf._packed import PackedCopy
from gmm_ivf._results import SearchCost, first_of_each_id, first_within_each_row
from gmm_ivf._scan import Probes, entries_within, nearest_entries, spread_over_threads
from gmm_ivf._store import CopyStore
from gmm_ivf._stored import StoredLayout
from gmm_ivf._vectors import block, spans
from gmm_ivf.assignment import pairs_of_table
from gmm_ivf.quantizer import GMMQuantizer
from gmm_ivf.rules import RULES, Rule, option_names

# How many times more copies than the average vector those near a query have, for most queries.
_MORE_COPIES = 1.5


def options_of(rule: Rule | None) -> str | dict[str, Any]:
    """A rule as JSON has it, None for "responsibility".

    Raises
    ------
    ValueError
        For a rule that is not one of `RULES`.
    """
    if rule is None:
        return "responsibility"
    for name, kind in RULES.items():
        if type(rule) is kind:
            return {"name": name, **{key: getattr(rule, key) for key in option_names(name)}}
    raise ValueError(f"{rule!r} cannot be saved or copied: only {', '.join(RULES)} can.")


def rule_of(options: dict[str, Any]) -> Rule:
    """The inverse of `options_of` for a rule of geometry."""
    name = options.get("name")
    if name not in RULES or set(options) - {"name", *option_names(name)}:
        raise ValueError(f"rule must be one of {', '.join(RULES)} with its options; got {options}.")
    return RULES[name](**{key: value for key, value in options.items() if key != "name"})


class ListsLayout(StoredLayout):
    """Copies in the lists of a FAISS index, and every id once in the results.

    Parameters
    ----------
    ivf : faiss.IndexIVF
        Empty.
    quantizer : GMMQuantizer
        That of `ivf`.
    rule, tau, replication, max_lists, fast_scan, adaptive
        As in `IndexIVFGMM`; a rule may be what `options` says of it.

    Attributes
    ----------
    max_lists : int
        Most lists per vector, at most nlist.
    """

    def __init__(
        self,
        ivf: Any,
        quantizer: GMMQuantizer,
        *,
        rule: str | Rule | dict[str, Any] = "responsibility",
        tau: float | None = None,
        replication: float | None = None,
        max_lists: int = 2,
        fast_scan: bool = False,
        adaptive: bool = False,
    ):
        if isinstance(rule, dict):
            rule = rule_of(rule)
        self._rule = checked_rule(rule, tau, replication)
        tau, self._replication, self.max_lists = checked_budget(
            tau, replication, max_lists, ivf.nlist, self._rule
        )
        check_posteriors(quantizer, self._rule, self.max_lists)
        self._is_adaptive = checked_adaptive(adaptive, ivf.metric_type)
        self._adaptive: AdaptiveProbing | None = None
        self.ivf = ivf
        self._quantizer = quantizer
        self._tau = tau
        self._packed = PackedCopy(ivf) if fast_scan else None
        # Without a budget only the nearest mean counts, or the rule: no posterior exceeds 1.
        self._log_tau = None if self._replication else float(np.log(tau)) if tau else 0.0
        self._assigner: Assigner | None = None
        # State of the quantizer that lists and thresholds are for, once there are such.
        self._generation: int | None = None
        self._store = CopyStore(ivf)
        spread_over_threads(ivf)

    @property
    def is_trained(self) -> bool:
        """See `Layout`."""
        has_stops = self._adaptive is not None or not self._is_adaptive
        return bool(self.ivf.is_trained and self._log_tau is not None and has_stops)

    @property
    def max_copies(self) -> int:
        """See `Layout`."""
        return self._store.max_copies

    @property
    def tau(self) -> float | None:
        """See `IndexIVFGMM`."""
        if self._log_tau is None or self._rule is not None:
            return None
        return float(np.exp(self._log_tau))

    def describe(self) -> str:
        """Options in one line."""
        by = f"tau={self.tau}" if self._rule is None else f"rule={self._rule}"
        return f"max_lists={self.max_lists}, {by}" + ", adaptive" * self._is_adaptive

    def options(self) -> dict[str, Any]:
        """See `Layout`."""
        return {
            "rule": options_of(self._rule),
            "tau": self._tau,
            "replication": self._replication,
            "max_lists": self.max_lists,
            "fast_scan": self._packed is not None,
            "adaptive": self._is_adaptive,
        }

    def train(self, x: Any, *, train_codec: bool = True) -> None:
        """See `Layout`; `train_codec=False` solves thresholds only."""
        self._assigner = None
        if train_codec:
            # IVFFlat has no codec to train: a row tells it that its quantizer is there.
            flat = isinstance(self.ivf, faiss.IndexIVFFlat)
            self.ivf.train(block(x, "x", slice(1)) if flat else block(x, "x"))
        assigner = self._ready()
        if self._replication:
            self._log_tau = assigner.solve(x, self._replication)
        if self._is_adaptive:
            self._adaptive = AdaptiveProbing.solved(assigner.ranker, x, self.ivf.nlist)

    def _ready(self) -> Assigner:
        if self._assigner is None:
            self._assigner = Assigner(self._quantizer, self.max_lists, self._rule)
            self._generation = self._assigner.generation
        return self._assigner

    def add(self, rows: np.ndarray, ids: np.ndarray, lists: np.ndarray | None) -> None:
        """See `Layout`."""
        if lists is None:
            pairs = self._ready().pairs(rows, float(self._log_tau or 0.0))
        else:
            pairs = pairs_of_table(lists, self.ivf.nlist)
        self._outdate()
        self._store.append(rows, ids, *pairs)

    def _outdate(self) -> None:
        if self._packed is not None:
            self._packed.drop()

    def undo(self, ids: np.ndarray, next_id: int) -> None:
        """See `Layout`."""
        self._outdate()
        self._store.undo(ids, next_id)

    def _probes(self, rows: np.ndarray, nprobe: int) -> Probes:
        ranker = self._ready().ranker
        if self._adaptive is not None:
            return self._adaptive.probes(ranker, rows, nprobe)
        distances, lists, coarse = ranker.counted_search(rows, nprobe)
        return Probes(lists, distances, coarse)

    def search(self, rows: np.ndarray, k: int, options: ProbeOptions) -> Results:
        """See `Layout`."""
        probes = self._probes(rows, options.nprobe)
        return self._search_probes(rows, k, probes, options.over(probes.lists.shape[1]))

    def search_lists(
        self, rows: np.ndarray, k: int, lists: np.ndarray, distances: Any, options: ProbeOptions
    ) -> Results:
        """See `Layout`."""
        coarse = np.zeros(len(rows), np.int64)
        if distances is None:
            distances = self._ready().ranker.distances(rows, lists)
            coarse = (lists >= 0).sum(axis=1)
        return self._search_probes(rows, k, Probes(lists, distances, coarse), options)

    def _search_probes(
        self, rows: np.ndarray, k: int, probes: Probes, options: ProbeOptions
    ) -> Results:
        scanned = self.ivf if self._packed is None else self._packed.index(options)
        distances = np.empty((len(rows), k), np.float32)
        labels = np.empty((len(rows), k), np.int64)
        left = np.arange(len(rows))
        for fetch in self._fetches(k, probes.lists.shape[1]):
            short = np.zeros(len(left), bool)
            for where in spans(len(left), 2 * fetch):
                part = left[where]
                found = nearest_entries(scanned, rows[part], fetch, probes.part(part), options)
                distances[part], labels[part] = self._unique(*found, k)
                short[where] = (labels[part, -1] < 0) & (found[1][:, -1] >= 0)
            left = left[short]
        count = probes.scanned(self._store.sizes, options.max_codes)
        return Results(distances, labels, count, probes.coarse, np.zeros(len(rows)))

    def _unique(
        self, distances: np.ndarray, labels: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.max_copies == 1 and labels.shape[1] == k:
            return distances, labels
        return first_of_each_id(distances, labels, k, worst_distance(self.ivf.metric_type))

    def _fetches(self, k: int, nprobe: int) -> list[int]:
        """Entries to fetch per query: as many as usually do, then for the rows left as must.

        The last number has k unique ids in it where so many are scanned. A selector takes all
        copies of an id or none, so it changes nothing.
        """
        entries, vectors = self.entries, self.ntotal
        copies = k * (min(self.max_copies, nprobe) - 1)
        enough = max(1, min(k + min(copies, entries - vectors), entries))
        # Vectors near a query are more often near a boundary than others.
        usual = ceil(k * (1 + _MORE_COPIES * (entries / max(1, vectors) - 1)))
        return [usual, enough] if k <= usual < enough else [enough]

    def range_search(
        self, rows: np.ndarray, radius: float, options: ProbeOptions
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, SearchCost]:
        """See `Layout`; FastScan has no such search over given lists, so this scans the codes."""
        probes = self._probes(rows, options.nprobe)
        options = options.over(probes.lists.shape[1])
        found = entries_within(self.ivf, rows, radius, probes, options)
        is_product = self.ivf.metric_type == faiss.METRIC_INNER_PRODUCT
        lims, distances, labels = first_within_each_row(*found, is_product)
        scanned = probes.scanned(self._store.sizes, options.max_codes)
        cost = SearchCost(scanned, probes.coarse, np.zeros(len(rows)))
        return lims, distances, labels, cost

    def remove(self, sel: Any) -> int:
        """See `Layout`."""
        self._outdate()
        return self._store.remove(sel)

    def reconstruct(self, ids: np.ndarray) -> np.ndarray:
        """See `Layout`; of several copies, that which lies nearest to its mean."""
        return self._store.decode(ids, self._ready().ranker)

    def clear(self) -> None:
        """See `Layout`."""
        self._outdate()
        self._store.clear()

    def check_mergeable(self, other: Layout) -> None:
        """See `Layout`."""
        if not isinstance(other, ListsLayout):
            raise ValueError('other must have layout="lists", as this index has.')
        self._store.check_mergeable(other._store)

    def merge(self, other: Layout) -> None:
        """See `Layout`."""
        if isinstance(other, ListsLayout):
            self._outdate()
            other._outdate()
            self._store.merge(other._store)

    def check_unchanged(self) -> None:
        """See `Layout`."""
        self._store.check_unchanged()
        if self._generation not in (None, self._quantizer.generation):
            raise RuntimeError(
                "the quantizer was trained again: reset() this index, train it and add the vectors."
            )

    def stats(self) -> dict[str, Any]:
        """See `Layout`."""
        more = self._assigner.ranker.nbytes if self._assigner else 0
        more += self._packed.nbytes(self._store.sizes) if self._packed else 0
        return self._store.stats(4 * self.ivf.d * self._quantizer.ntotal + more)

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """See `Layout`; `log_tau` is exact, as JSON has no infinity and rounds as it likes."""
        settings, arrays = self._store.state()
        log_tau = None if self._log_tau is None else float(self._log_tau).hex()
        if self._adaptive is not None:
            arrays = {**arrays, "stops": self._adaptive.stops}
        return {**settings, "log_tau": log_tau}, arrays

    def restore(self, settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """See `Layout`."""
        log_tau = settings["log_tau"]
        if log_tau is not None:
            log_tau = float.fromhex(log_tau)
            if not log_tau <= 0:
                raise ValueError(f"log_tau must be at most 0; got {log_tau}.")
        self._outdate()
        self._store.restore(settings, arrays)
        self._log_tau = log_tau
        if self._quantizer.is_trained:
            self._generation = self._quantizer.generation
        if self._is_adaptive and "stops" in arrays:
            self._adaptive = AdaptiveProbing.restored(arrays["stops"], self.ivf.nlist)
