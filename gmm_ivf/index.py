"""IndexIVFGMM: soft assignment on top of a stock FAISS IVF index."""

from typing import Any

import numpy as np

from gmm_ivf._assigner import Assigner
from gmm_ivf._checks import (
    check_layout,
    check_no_direct_map,
    check_posteriors,
    checked_budget,
    checked_ivf,
    checked_quantizer,
    checked_rule,
)
from gmm_ivf._faiss import address, faiss, worst_distance
from gmm_ivf._ids import as_int64
from gmm_ivf._probing import Probing
from gmm_ivf._results import SearchCost, first_of_each_id
from gmm_ivf._store import CopyStore
from gmm_ivf._unsupported import Unsupported
from gmm_ivf._vectors import as_matrix, block, check_count, check_rows, spans
from gmm_ivf.assignment import pairs_of_table
from gmm_ivf.rules import Rule


class IndexIVFGMM(Unsupported):
    """An IVF index that stores vectors near a boundary in several lists.

    The first list of a vector is that of its nearest mean, as in stock FAISS; a rule chooses
    further ones. Searches return each id once, with its best distance.

    Parameters
    ----------
    index : faiss.IndexIVF
        Empty, on the CPU, built over q: Flat, PQ, ScalarQuantizer, RaBitQ or additive codec. From
        then on it is changed through this object only.
    q : GMMQuantizer, default=None
        Its coarse quantizer; None takes the one that `index` refers to.
    layout : {"lists"}, default="lists"
        Copies of a vector in several lists.
    rule : str or Rule, default="responsibility"
        By "responsibility" a further component takes a copy when its posterior is above `tau`.
        "air", "soar", "spann", "top2" and "ratio" go by the nearest means instead: see
        `gmm_ivf.rules`, whose classes take options, as in ``rule=Air(lambda_=0.3)``. Under inner
        products they compare L2-normalised rows.
    tau : float in (0, 1), default=None
        Threshold, of rule "responsibility" only; 1 / nlist is customary.
    replication : float, default=None
        Mean number of lists per vector, for which `train` solves the threshold on a sample.
        Excludes `tau`; with neither it is 1.5. Of rule "responsibility" only.
    max_lists : int, default=2
        Most lists per vector. 1 is hard assignment, and equals stock FAISS.
    cells : None
        Options of a layout that is not available yet.

    Attributes
    ----------
    index : faiss.IndexIVF
    quantizer : GMMQuantizer
    max_lists : int
    last_search : SearchCost or None
        Distance computations of the last search, per query.

    Raises
    ------
    ValueError
        For an index that cannot hold copies (FastScan would corrupt memory) or is not empty, and
        for bad options.
    NotImplementedError
        For a layout that is not available yet.

    Notes
    -----
    Distances to means are computed on centred vectors where the data lie far from the origin, so
    that assignment and probing do not change when all vectors are shifted. The distances that
    FAISS computes inside the lists are its own.
    """

    def __init__(
        self,
        index: Any,
        q: Any = None,
        *,
        layout: str = "lists",
        rule: str | Rule = "responsibility",
        tau: float | None = None,
        replication: float | None = None,
        max_lists: int = 2,
        cells: Any = None,
    ):
        ivf = checked_ivf(index)
        check_layout(layout, cells)
        self._rule = checked_rule(rule, tau, replication)
        tau, self._replication, self.max_lists = checked_budget(
            tau, replication, max_lists, ivf.nlist, self._rule
        )
        self.quantizer = checked_quantizer(ivf, q, getattr(index, "referenced_objects", []))
        if ivf.ntotal:
            raise ValueError(
                f"index must be empty; it holds {ivf.ntotal} vectors, added one list each."
            )
        check_posteriors(self.quantizer, self._rule, self.max_lists)
        check_no_direct_map(ivf)
        self.index = index
        self._ivf = ivf
        # Without a budget only the nearest mean counts, or the rule: no posterior exceeds 1.
        self._log_tau = None if self._replication else float(np.log(tau)) if tau else 0.0
        self._assigner: Assigner | None = None
        self._probing = Probing(ivf)
        self._store = CopyStore(ivf)
        self.last_search: SearchCost | None = None

    @property
    def d(self) -> int:
        """Dimensions of the vectors."""
        return self._ivf.d

    @property
    def nlist(self) -> int:
        """Number of lists."""
        return self._ivf.nlist

    @property
    def metric_type(self) -> int:
        """Metric, as in faiss."""
        return self._ivf.metric_type

    @property
    def ntotal(self) -> int:
        """Number of vectors; copies do not count."""
        return len(self._store)

    @property
    def max_copies(self) -> int:
        """Most lists that any vector was put in since the last reset."""
        return self._store.max_copies

    @property
    def nprobe(self) -> int:
        """Lists that a search probes: that of the wrapped index (1 unless it was set)."""
        return self._ivf.nprobe

    @nprobe.setter
    def nprobe(self, value: int) -> None:
        self._ivf.nprobe = check_count(value, "nprobe")

    @property
    def is_trained(self) -> bool:
        """Whether quantizer and codec are trained and the threshold is known."""
        return bool(
            self.quantizer.is_trained and self._ivf.is_trained and self._log_tau is not None
        )

    @property
    def tau(self) -> float | None:
        """Threshold in use, 1.0 for hard assignment, None before `train` has solved it.

        None too where a rule has no threshold.
        It may be 0.0 where only its logarithm can be told from zero (many dimensions).
        """
        if self._log_tau is None or self._rule is not None:
            return None
        return float(np.exp(self._log_tau))

    def train(self, x: Any) -> None:
        """Train the quantizer if it is not yet, then the codec; solve the threshold.

        Parameters
        ----------
        x : array-like of shape (n, d)
            A representative sample, read in blocks; but a codec (not Flat) sees it as one float32
            array.

        Raises
        ------
        ValueError
            As `GMMQuantizer.train`.
        RuntimeError
            When the index holds vectors: reset it first.
        """
        if self._ivf.ntotal:
            raise RuntimeError(f"the index holds {self.ntotal} vectors: call reset() first.")
        x = as_matrix(x, self.d, "x")
        if x.shape[0] < 1:
            raise ValueError("x must have at least one row to train on; got 0.")
        if self.quantizer.is_trained:
            check_rows(x, "x")
        else:
            self.quantizer.train(x)
        self._assigner = None
        self._check_quantizer()
        # IVFFlat has no codec to train: a row tells it that its quantizer is there.
        flat = isinstance(self._ivf, faiss.IndexIVFFlat)
        self._ivf.train(block(x, "x", slice(1)) if flat else block(x, "x"))
        self._assigner = Assigner(self.quantizer, self.max_lists, self._rule)
        if self._replication:
            self._log_tau = self._assigner.solve(x, self._replication)

    def add(self, x: Any) -> None:
        """Add vectors under the next free ids.

        Parameters
        ----------
        x : array-like of shape (n, d)
            numpy array or memmap of any real dtype, torch tensor, or HDF5 dataset. Ids go on from
            the largest id ever stored; one that was removed is not given again.

        Raises
        ------
        ValueError
            Naming a row that holds NaN or infinity; nothing is added then.
        RuntimeError
            Before training, or when the wrapped index was changed directly.
        """
        self._add(x, None, None)

    def add_with_ids(self, x: Any, ids: Any) -> None:
        """Add vectors under given ids.

        Parameters
        ----------
        x : array-like of shape (n, d)
        ids : array-like of shape (n,), integers
            Non-negative, unique, and not in the index yet.

        Raises
        ------
        ValueError
            Naming the id, or a row that is not finite; nothing is added then.
        """
        self._add(x, ids, None)

    def add_preassigned(self, x: Any, lists: Any, ids: Any = None) -> None:
        """Add vectors to lists that the caller chose.

        Parameters
        ----------
        x : array-like of shape (n, d)
        lists : array-like of shape (n, m), integers
            Lists of each vector, -1 for none; a row of -1 is not stored, nor counted.
        ids : array-like of shape (n,), integers, default=None

        Raises
        ------
        ValueError
            When a list is outside [-1, nlist) or comes twice in a row; nothing is added then.
        """
        lists = np.asarray(lists)
        if lists.ndim != 2 or lists.shape[0] != len(x):
            raise ValueError(f"lists must have shape ({len(x)}, m); got {lists.shape}.")
        lists = as_int64(lists, "lists")
        pairs_of_table(lists, self.nlist)
        self._add(x, ids, lists)

    def _add(self, x: Any, ids: Any, lists: np.ndarray | None) -> None:
        assigner, log_tau = self._ready()
        x = as_matrix(x, self.d, "x")
        ids = self._store.new_ids(ids, x.shape[0])
        check_rows(x, "x")
        # All checks are done. Should a block fail nevertheless, those before it stay, and count.
        for where in spans(*x.shape):
            rows = block(x, "x", where)
            if lists is None:
                pairs = assigner.pairs(rows, log_tau)
            else:
                pairs = pairs_of_table(lists[where], self.nlist)
            self._store.append(rows, ids[where], *pairs)

    def search(self, x: Any, k: int, params: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Find the k nearest stored vectors among those in the probed lists.

        Parameters
        ----------
        x : array-like of shape (q, d)
            Queries. One that holds NaN or infinity finds nothing, as in FAISS.
        k : int
        params : faiss.SearchParametersIVF, default=None
            `nprobe` (1 unless set there), `sel` and `max_codes` are heeded.

        Returns
        -------
        D : ndarray of shape (q, k), float32
            Squared L2 distances or inner products, best first; the worst float32 where fewer than
            k ids were scanned.
        I : ndarray of shape (q, k), int64
            Ids, unique in a row; -1 where fewer than k ids were scanned.

        Raises
        ------
        ValueError
            For a bad shape or k.
        NotImplementedError
            For other search parameters.
        """
        assigner, _ = self._ready()
        x, k = as_matrix(x, self.d, "x"), check_count(k, "k")
        options = self._probing.options(params)
        fetch = self._fetch(k, options.nprobe)
        n = x.shape[0]
        distances = np.empty((n, k), np.float32)
        labels = np.empty((n, k), np.int64)
        scanned = np.empty(n, np.int64)
        for where in spans(n, max(self.d, 2 * fetch, options.nprobe)):
            found = self._probing.search(
                block(x, "x", where), fetch, options, assigner.ranker, self._store.sizes
            )
            scanned[where] = found.scanned
            distances[where], labels[where] = first_of_each_id(
                found.distances, found.labels, k, worst_distance(self.metric_type)
            )
        self.last_search = SearchCost(scanned, np.full(n, self.nlist), np.zeros(n, np.int64))
        return distances, labels

    def _fetch(self, k: int, nprobe: int) -> int:
        """Entries to fetch per query so that k unique ids are among them, where so many are."""
        entries = self._store.entries
        copies = k * (min(self.max_copies, nprobe) - 1)
        return max(1, min(k + min(copies, entries - self.ntotal), entries))

    def remove_ids(self, sel: Any) -> int:
        """Remove vectors with all their copies.

        Parameters
        ----------
        sel : array-like of integers, or faiss.IDSelector
            Ids that are not stored are passed over.

        Returns
        -------
        int
            Vectors removed.
        """
        self._store.check_unchanged()
        return self._store.remove(sel)

    def reset(self) -> None:
        """Remove all vectors; what was trained stays, and ids start at 0 again."""
        self._store.clear()
        self.last_search = None

    def stats(self) -> dict[str, Any]:
        """Storage and balance of the lists.

        Returns
        -------
        dict
            ``"ntotal"`` vectors, ``"entries"`` with copies, ``"entries_per_vector"``,
            ``"max_copies"``, ``"list_sizes"`` (nlist,) int64, ``"imbalance"``: expected length of
            the list of a random entry over the mean length (1 when all are equal, as FAISS
            defines it), ``"max_over_mean"`` list length, ``"bytes"`` (codes, ids, lists, means and
            our own id bookkeeping; what allocators reserve is not known) and
            ``"bytes_per_vector"``. Ratios of an empty index are nan.
        """
        second_table = self._assigner.ranker.nbytes if self._assigner else 0
        return self._store.stats(4 * self.d * self.quantizer.ntotal + second_table)

    def _ready(self) -> tuple[Assigner, float]:
        """The assigner and the threshold, after a check that nothing underneath has changed."""
        if not self.is_trained or self._log_tau is None:
            raise RuntimeError(
                "the index is not trained: call train(x) first. It keeps a trained quantizer, and "
                "solves the threshold for `replication`."
            )
        self._store.check_unchanged()
        self._check_quantizer()
        if self._assigner is None:
            self._assigner = Assigner(self.quantizer, self.max_lists, self._rule)
        return self._assigner, self._log_tau

    def _check_quantizer(self) -> None:
        self.quantizer.check_intact()
        if address(self._ivf.quantizer) != address(self.quantizer):
            raise RuntimeError("the quantizer of the wrapped index was replaced: build a new one.")
        if self._assigner and self._assigner.generation != self.quantizer.generation:
            raise RuntimeError(
                "the quantizer was trained again: reset() this index, train it and add the vectors."
            )

    def __repr__(self) -> str:
        by = f"tau={self.tau}" if self._rule is None else f"rule={self._rule}"
        return (
            f"IndexIVFGMM({type(self._ivf).__name__}, d={self.d}, nlist={self.nlist}, "
            f"nprobe={self.nprobe}, max_lists={self.max_lists}, {by}, "
            f"ntotal={self.ntotal}, entries={self._store.entries})"
        )
