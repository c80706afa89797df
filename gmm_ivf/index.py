"""IndexIVFGMM: soft assignment on top of a stock FAISS IVF index."""

from typing import Any

from gmm_ivf._checks import check_layout, check_no_direct_map, checked_ivf, checked_quantizer
from gmm_ivf._mutating import Mutating
from gmm_ivf._probing import Probing
from gmm_ivf._searching import Searching
from gmm_ivf._unsupported import Unsupported
from gmm_ivf._vectors import check_rows
from gmm_ivf.lists import ListsLayout
from gmm_ivf.rules import Rule


class IndexIVFGMM(Searching, Mutating, Unsupported):
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
        self.quantizer = checked_quantizer(ivf, q, getattr(index, "referenced_objects", []))
        if ivf.ntotal:
            raise ValueError(
                f"index must be empty; it holds {ivf.ntotal} vectors, added one list each."
            )
        self._layout = ListsLayout(
            ivf,
            self.quantizer,
            rule=rule,
            tau=tau,
            replication=replication,
            max_lists=max_lists,
        )
        check_no_direct_map(ivf)
        self.index = index
        self._ivf = ivf
        self._probing = Probing(ivf)
        self.last_search = None

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
        """
        if self._layout.entries:
            raise RuntimeError(f"the index holds {self.ntotal} vectors: call reset() first.")
        x = self._matrix(x)
        if x.shape[0] < 1:
            raise ValueError("x must have at least one row to train on; got 0.")
        if self.quantizer.is_trained:
            check_rows(x, "x")
        else:
            self.quantizer.train(x)
        self._check_quantizer()
        self._layout.train(x)

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
        return self._layout.stats()

    def __repr__(self) -> str:
        return (
            f"IndexIVFGMM({type(self._ivf).__name__}, d={self.d}, nlist={self.nlist}, "
            f"nprobe={self.nprobe}, {self._layout.describe()}, "
            f"ntotal={self.ntotal}, entries={self._layout.entries})"
        )
