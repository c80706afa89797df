"""IndexIVFGMM: soft assignment on top of a stock FAISS IVF index."""

import copy
from typing import Any

import numpy as np

from gmm_ivf._chain import Chain
from gmm_ivf._checks import (
    check_no_direct_map,
    checked_ivf,
    checked_quantizer,
    checked_refine,
    referenced_by,
)
from gmm_ivf._converting import Converting
from gmm_ivf._decoding import check_in_memory
from gmm_ivf._description import prefix_names
from gmm_ivf._faiss import faiss
from gmm_ivf._making import make_layout
from gmm_ivf._mutating import Mutating
from gmm_ivf._originals import Originals
from gmm_ivf._probing import Probing
from gmm_ivf._tuning import Tuning
from gmm_ivf._unsupported import Unsupported
from gmm_ivf._vectors import block, check_rows
from gmm_ivf.quantizer import GMMQuantizer
from gmm_ivf.rules import Rule


class IndexIVFGMM(Tuning, Mutating, Converting, Unsupported):
    """An IVF index whose lists overlap: a vector near a boundary is found from either side.

    Layout "lists" stores such a vector in several lists. The first is that of its nearest mean, as
    in stock FAISS; a rule chooses further ones. Searches return each id once, with its best
    distance. Layout "cells" stores each vector once, with those between the same two means, and
    scans the cells that are most likely to hold neighbours.

    Parameters
    ----------
    index : faiss.IndexIVF, or faiss.IndexPreTransform over one
        Empty, on the CPU, built over q: Flat, PQ, ScalarQuantizer, RaBitQ or additive codec. From
        then on it is changed through this object only. Behind transforms (OPQ, PCA, L2norm) the
        mixture lives in the transformed space, in `q.d` dimensions.
    q : GMMQuantizer, default=None
        Its coarse quantizer; None takes the one that `index` refers to.
    layout : {"lists", "cells"}, default="lists"
        With "cells" the next four options, `fast_scan` and `adaptive` stay at their defaults, and
        `nprobe` means the vectors of so many average lists.
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
    cells : CellOptions, default=None
        Options of layout "cells"; None takes their defaults.
    fast_scan : bool, default=False
        Search a FastScan copy of the codes, which is made at the first search after a change and
        takes as much memory again. For faiss.IndexIVFPQ of 4 bits and faiss.IndexIVFRaBitQ;
        `range_search` goes by the codes themselves. `max_codes` is not available then.
    adaptive : bool, default=False
        Let each query choose how many lists it probes by its distances to the means, so that
        `nprobe` is an average; `train` solves on a sample where to stop. A query probes no more
        than 4 nprobe lists. For METRIC_L2, and not after `to_gpu`.
    refine : {None, "flat"}, default=None
        "flat" keeps the vectors themselves, too (4 d bytes each), and ranks the best
        ``k_factor * k`` ids by their exact distances, which count as `last_search.ranking`.
    k_factor : float, default=1.0

    Attributes
    ----------
    index : faiss.Index
    quantizer : GMMQuantizer
    max_lists : int
    last_search : SearchCost or None
        Distance computations of the last search, per query.

    Raises
    ------
    ValueError
        For an index that cannot hold copies (FastScan would corrupt memory) or is not empty, and
        for bad options.

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
        fast_scan: bool = False,
        adaptive: bool = False,
        refine: str | None = None,
        k_factor: float = 1.0,
    ):
        ivf = checked_ivf(index)
        self._refine, k_factor = checked_refine(refine, k_factor)
        self.quantizer = checked_quantizer(ivf, q, referenced_by(index))
        if ivf.ntotal:
            raise ValueError(
                f"index must be empty; it holds {ivf.ntotal} vectors, added one list each."
            )
        check_no_direct_map(ivf)
        options = {"rule": rule, "tau": tau, "replication": replication, "max_lists": max_lists}
        options |= {"fast_scan": fast_scan, "adaptive": adaptive}
        self._layout = make_layout(layout, ivf, self.quantizer, cells=cells, **options)
        self._layout_name = layout
        self._wrap(index, ivf, k_factor)

    def _wrap(self, index: Any, ivf: Any, k_factor: float) -> None:
        self.index = index
        self._ivf = ivf
        outer = faiss.downcast_index(index)
        self._chain = Chain(outer) if isinstance(outer, faiss.IndexPreTransform) else None
        self._originals = Originals(index.d, ivf.metric_type) if self._refine else None
        self._k_factor = k_factor
        self._probing = Probing(ivf)
        self.last_search = None

    @property
    def k_factor(self) -> float:
        """With `refine`, how many times k ids are ranked by their exact distances; at least 1."""
        return self._k_factor

    @k_factor.setter
    def k_factor(self, value: float) -> None:
        self._k_factor = checked_refine(self._refine, value)[1]

    @property
    def max_lists(self) -> int:
        """Most lists per vector."""
        return self._layout.max_lists

    @property
    def tau(self) -> float | None:
        """Threshold in use, 1.0 for hard assignment, None before `train` has solved it.

        None too where a rule has no threshold.
        It may be 0.0 where only its logarithm can be told from zero (many dimensions).
        """
        return self._layout.tau

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

        Notes
        -----
        A training that fails or is interrupted leaves quantizer and transforms untrained that were
        so before.
        """
        if self._layout.entries:
            raise RuntimeError(f"the index holds {self.ntotal} vectors: call reset() first.")
        x = self._matrix(x)
        if x.shape[0] < 1:
            raise ValueError("x must have at least one row to train on; got 0.")
        steps = [] if self._chain is None else self._chain.untrained()
        had_means = self.quantizer.is_trained
        try:
            self._train(x)
        except BaseException:
            # The next call, with other rows, must not go on from what these rows gave.
            for step in steps:
                step.is_trained = False
            if not had_means:
                self.quantizer.reset()
            raise

    def _train(self, x: Any) -> None:
        if self.quantizer.is_trained or self._chain is not None:
            check_rows(x, "x")
        if self._chain is not None:
            x = self._chain.train(block(x, "x"))
            check_rows(x, "x behind the transforms")
        if not self.quantizer.is_trained:
            self.quantizer.train(x)
        self._check_quantizer()
        self._layout.train(x)
        self.index.is_trained = True

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
        stats = self._layout.stats()
        if self._originals is not None:
            stats["bytes"] += self._originals.nbytes
            stats["bytes_per_vector"] = stats["bytes"] / self.ntotal if self.ntotal else np.nan
        return stats

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """All that this object is besides its wrapped index and its quantizer.

        Returns
        -------
        settings : dict
            Fit for JSON.
        arrays : dict of ndarray
            One-dimensional, but ``"originals"`` (ntotal, d) float32; views where that saves memory.

        Raises
        ------
        ValueError
            When a rule of the user's own is among the options.
        RuntimeError
            When the wrapped index or the quantizer was changed directly.
        """
        if self._layout.is_trained:
            self._layout.check_unchanged()
        inner, arrays = self._layout.state()
        if self._originals is not None:
            arrays = {**arrays, **self._originals.state()}
        settings = {
            "layout": self._layout_name,
            "options": self._layout.options(),
            "refine": self._refine,
            "k_factor": self._k_factor,
            "state": inner,
        }
        return settings, arrays

    @classmethod
    def from_state(
        cls, index: Any, q: GMMQuantizer, settings: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> "IndexIVFGMM":
        """Put together what `state` took apart.

        Parameters
        ----------
        index : faiss.Index
            Of the type that was wrapped, with its vectors; it is wrapped from now on. Its coarse
            quantizer becomes q.
        q : GMMQuantizer
            With the means that the lists were made for.
        settings, arrays
            From `state`.

        Raises
        ------
        ValueError
            When these do not belong together.
        """
        ivf = checked_ivf(index)
        check_no_direct_map(ivf)
        q.adopt(index)
        self = cls.__new__(cls)
        self.quantizer = q
        self._refine, k_factor = checked_refine(settings["refine"], settings["k_factor"])
        self._layout_name = settings["layout"]
        self._layout = make_layout(self._layout_name, ivf, q, **settings["options"])
        self._layout.restore(settings["state"], arrays)
        self._wrap(index, ivf, k_factor)
        if self._originals is not None:
            self._originals.restore(arrays, self._layout.contains)
        return self

    def __reduce__(self):
        check_in_memory(self._ivf)
        # A layout may put its entries in order for its state, so that comes first.
        state = self.state()
        index = faiss.serialize_index(self.index)
        # What FAISS's own form of an index leaves out.
        beside = {
            "prefixes": self._prefixes or prefix_names(self.index),
            "max_codes": self._ivf.max_codes,
        }
        return _restored, (type(self), beside, index, self.quantizer, *state)

    def __copy__(self) -> "IndexIVFGMM":
        """A copy that shares the quantizer, and nothing else."""
        restore, arguments = self.__reduce__()
        return restore(*arguments)

    def __deepcopy__(self, memo: dict) -> "IndexIVFGMM":
        restore, (kind, beside, index, q, *state) = self.__reduce__()
        return restore(kind, beside, index, copy.deepcopy(q, memo), *state)

    def __repr__(self) -> str:
        bound = f", max_codes={self.max_codes}" if self.max_codes else ""
        return (
            f"IndexIVFGMM({type(self._ivf).__name__}, d={self.d}, nlist={self.nlist}, "
            f"nprobe={self.nprobe}{bound}, {self._layout.describe()}, "
            f"ntotal={self.ntotal}, entries={self._layout.entries})"
        )


def _restored(
    kind: type[IndexIVFGMM],
    beside: dict[str, Any],
    index: np.ndarray,
    q: GMMQuantizer,
    settings: dict[str, Any],
    arrays: dict[str, np.ndarray],
) -> IndexIVFGMM:
    """Rebuild what `IndexIVFGMM.__reduce__` saved."""
    restored = kind.from_state(faiss.deserialize_index(index), q, settings, arrays)
    restored._prefixes = beside["prefixes"]
    restored._ivf.max_codes = beside["max_codes"]
    return restored
