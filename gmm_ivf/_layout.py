"""What `IndexIVFGMM` asks of a layout, which is the way vectors are stored and scanned."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gmm_ivf._results import SearchCost


@dataclass(frozen=True)
class ProbeOptions:
    """What one search may scan.

    Attributes
    ----------
    nprobe : int
        Lists to probe per query, at most nlist; a layout with other parts takes as many as hold
        the vectors of that many average lists.
    max_codes : int
        Most entries to scan per query, 0 for any number.
    parameters : faiss.SearchParametersIVF
        The same for FAISS, with the selector of the caller.
    """

    nprobe: int
    max_codes: int
    parameters: Any

    def over(self, nprobe: int) -> "ProbeOptions":
        """The same for another number of lists."""
        if nprobe == self.nprobe:
            return self
        parameters = type(self.parameters)()
        parameters.nprobe, parameters.max_codes = nprobe, self.max_codes
        if self.selector is not None:
            parameters.sel = self.selector
        return ProbeOptions(nprobe, self.max_codes, parameters)

    @property
    def selector(self) -> Any:
        """The faiss.IDSelector that limits the results, or None."""
        return self.parameters.sel


@dataclass(frozen=True)
class Results:
    """Results of a search, every id once, and what they cost.

    Attributes
    ----------
    distances : ndarray of shape (n, k), float32
        Best first; the worst float32 in an empty slot.
    labels : ndarray of shape (n, k), int64
        Ids; -1 in an empty slot.
    scanned, coarse : ndarray of shape (n,), int64
        As in `SearchCost`.
    ranking : ndarray of shape (n,), float64
    """

    distances: np.ndarray
    labels: np.ndarray
    scanned: np.ndarray
    coarse: np.ndarray
    ranking: np.ndarray


class Layout(Protocol):
    """Stores vectors under ids, and finds them.

    Arguments were checked by `IndexIVFGMM`: rows are finite, C-contiguous float32 of the
    dimension of `ivf`; ids are those of `new_ids`.

    Attributes
    ----------
    ivf : faiss.IndexIVF
        Holds the codec, and may hold the codes.
    is_trained : bool
    ntotal : int
        Vectors; copies do not count.
    entries : int
        Codes stored.
    max_copies : int
        Most entries that a vector was given since the last `clear`.
    max_lists : int
        Most entries that a vector may be given.
    tau : float or None
        Threshold of posteriors, where there is one.
    """

    ivf: Any
    max_lists: int

    @property
    def tau(self) -> float | None:
        """Threshold of posteriors, where there is one."""
        ...

    @property
    def is_trained(self) -> bool:
        """Whether `train` was called, or there is nothing to train."""
        ...

    @property
    def ntotal(self) -> int:
        """Number of vectors."""
        ...

    @property
    def entries(self) -> int:
        """Number of codes."""
        ...

    @property
    def max_copies(self) -> int:
        """Most entries of one vector."""
        ...

    def describe(self) -> str:
        """Options in one line, for a repr."""
        ...

    def options(self) -> dict[str, Any]:
        """Keywords of `make_layout` that make an equal, empty layout; fit for JSON.

        Raises
        ------
        ValueError
            When an option is no plain value.
        """
        ...

    def train(self, x: Any, *, train_codec: bool = True) -> None:
        """Train codec and assignment on a matrix, perhaps on disk; the quantizer is trained."""
        ...

    def contains(self, ids: np.ndarray) -> np.ndarray:
        """Which of the ids are stored, a bool array of their shape."""
        ...

    def new_ids(self, ids: Any, n: int) -> np.ndarray:
        """Return n ids (int64) that may be stored: those given, or the next ones if None.

        Raises
        ------
        ValueError
            Naming an id that is negative, no int64, repeated or stored already.
        """
        ...

    def add(self, rows: np.ndarray, ids: np.ndarray, lists: np.ndarray | None) -> None:
        """Add one block of rows; `lists` (n, m) int64 are those of the caller, -1 for none."""
        ...

    def undo(self, ids: np.ndarray, next_id: int) -> None:
        """Take out what an interrupted `add` stored of these ids, which may be anything.

        The next id is `next_id` then.
        """
        ...

    @property
    def next_id(self) -> int:
        """The id that a vector without one gets next."""
        ...

    def search(self, rows: np.ndarray, k: int, options: ProbeOptions) -> Results:
        """Find the k nearest vectors among those scanned; no more than k if so few are there."""
        ...

    def range_search(
        self, rows: np.ndarray, radius: float, options: ProbeOptions
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, SearchCost]:
        """Find all vectors within a radius: (lims (n + 1,) int64, distances, labels, cost)."""
        ...

    def search_lists(
        self, rows: np.ndarray, k: int, lists: np.ndarray, distances: Any, options: ProbeOptions
    ) -> Results:
        """As `search`, in lists (n, m) int64 of the caller, -1 for none.

        `distances` (n, m) float32 are those of the rows to the means, or None to compute them.
        """
        raise NotImplementedError("this layout has no lists that a caller could choose.")

    def check_mergeable(self, other: "Layout") -> None:
        """Raise ValueError when the codes of another layout cannot move here."""
        raise NotImplementedError("this layout cannot be merged: add the vectors to one index.")

    def merge(self, other: "Layout") -> None:
        """Take over what another layout stores, which is empty then; it was checked."""
        raise NotImplementedError("this layout cannot be merged: add the vectors to one index.")

    def remove(self, sel: Any) -> int:
        """Remove ids, an array-like or a faiss.IDSelector; return how many vectors went."""
        ...

    def reconstruct(self, ids: np.ndarray) -> np.ndarray:
        """Decode the vectors of m ids, (m, d) float32.

        Raises
        ------
        ValueError
            Naming an id that is not stored.
        """
        ...

    def clear(self) -> None:
        """Remove everything; ids start at 0 again."""
        ...

    def check_unchanged(self) -> None:
        """Raise RuntimeError when somebody else changed what this layout keeps its vectors in."""
        ...

    def stats(self) -> dict[str, Any]:
        """As `IndexIVFGMM.stats`."""
        ...

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Settings fit for JSON, and arrays: all that is needed besides `ivf` and quantizer."""
        ...

    def restore(self, settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Become what `state` described, over the `ivf` that it was taken with.

        Raises
        ------
        ValueError
            When they do not belong together.
        """
        ...


def checked_int(settings: dict[str, Any], name: str, low: int, high: int) -> int:
    """A setting of `Layout.restore` that has to be an integer in [low, high], or ValueError."""
    value = settings[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}]; got {value!r}.")
    return value
