"""Scans of chosen cells: of float32 vectors by compiled code, of other codes by FAISS."""

import threading
from typing import Any

import numpy as np

from gmm_ivf._cell_copy import CellCopy
from gmm_ivf._cell_options import CellOptions
from gmm_ivf._cell_search import (
    Ranking,
    chosen_by_query,
    make_plan,
    over_threads,
    prepared,
    query_blocks,
    query_order,
    ranking_cost,
    searchable,
)
from gmm_ivf._cell_table import Occupied, Shape
from gmm_ivf._decoding import list_ids, template_bytes
from gmm_ivf._faiss import faiss, worst_distance
from gmm_ivf._layout import ProbeOptions, Results
from gmm_ivf._results import SearchCost
from gmm_ivf._scan import Probes, entries_within, nearest_entries


class Scan:
    """What both kinds of scans share.

    Parameters
    ----------
    ivf : faiss.IndexIVF
    """

    nbytes = 0

    def __init__(self, ivf: Any):
        self._ivf = ivf
        self._entries = 0

    def learn_codec(self) -> None:
        """Take down what the codec is, now that it is trained and nobody searches."""

    def prepare(self, occupied: Occupied, sizes: np.ndarray) -> None:
        """Look at the lists anew: of these cells, and of these sizes."""
        self._entries = int(sizes.sum())

    def nothing(self, n: int, k: int, coarse: int) -> Results:
        """Results of n queries that found nothing after `coarse` comparisons."""
        return Results(
            np.full((n, k), worst_distance(self._ivf.metric_type), np.float32),
            np.full((n, k), -1, np.int64),
            np.zeros(n, np.int64),
            np.full(n, coarse),
            np.zeros(n),
        )

    def plan(self, options: ProbeOptions, cells: CellOptions) -> Any:
        """What a search may look at: as many entries as `nprobe` average lists hold."""
        nlist, nprobe = self._ivf.nlist, options.nprobe
        budget = -(-nprobe * self._entries // nlist)
        if options.max_codes:
            budget = min(budget, options.max_codes)
        product = self._ivf.metric_type == faiss.METRIC_INNER_PRODUCT
        return make_plan(cells, nlist, budget, nprobe, product)


class FlatScan(Scan):
    """Scans the lists of an IndexIVFFlat where they lie."""

    def prepare(self, occupied: Occupied, sizes: np.ndarray) -> None:
        """See `Scan`."""
        super().prepare(occupied, sizes)
        # The object that gives the addresses has to live as long as they are used.
        self._lists = lists = faiss.downcast_InvertedLists(self._ivf.invlists)
        numbers = range(self._ivf.nlist)
        self._codes = np.array([_address(lists.get_codes(i)) for i in numbers], np.int64)
        self._ids = np.array([_address(lists.get_ids(i)) for i in numbers], np.int64)
        self._sizes = sizes.astype(np.int64)
        self._first = np.cumsum(self._sizes) - self._sizes

    def _places(self, options: ProbeOptions) -> Any:
        from gmm_ivf._cell_scan import Places

        keep = np.empty(0, bool)
        if options.selector is not None:
            ids = np.concatenate([list_ids(self._ivf, i) for i in range(self._ivf.nlist)])
            keep = selected(options.selector, ids)
        return Places(self._codes, self._ids, self._sizes, self._first, keep)

    def search(self, rows: np.ndarray, k: int, options: ProbeOptions, ranking: Ranking) -> Results:
        """The best k entries of the cells chosen for each row."""
        from gmm_ivf._cell_scan import search_some

        plan, places = self.plan(options, ranking.options), self._places(options)
        means, cells = ranking.ranker.table, ranking.cells
        found = self.nothing(len(rows), k, 0)
        for where in query_blocks(len(rows), len(means)):
            queries, found.coarse[where] = prepared(
                ranking.ranker, ranking.shape, plan, rows[where]
            )
            counts = np.zeros((len(queries.rows), 4), np.int64)
            best = np.full((len(queries.rows), k), np.finfo(np.float32).max, np.float32)
            labels = found.labels[where]

            def work(numbers: np.ndarray, q=queries, b=best, ids=labels, c=counts) -> None:
                search_some(numbers, q, means, cells, places, plan, b, ids, c)

            over_threads(work, query_order(queries))
            found.distances[where] = -best if plan.is_product else best
            found.scanned[where] = counts[:, 0]
            found.ranking[where] = ranking_cost(counts, queries)
        return found

    def within(
        self, rows: np.ndarray, radius: float, options: ProbeOptions, ranking: Ranking
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, SearchCost]:
        """The entries within a radius, of the cells chosen for each row."""
        from gmm_ivf._cell_scan import within_some

        plan, places = self.plan(options, ranking.options), self._places(options)
        means, cells = ranking.ranker.table, ranking.cells
        limit = np.float32(-radius if plan.is_product else radius)
        sizes, costs = np.zeros(len(rows), np.int64), self.nothing(len(rows), 0, 0)
        parts = []
        for where in query_blocks(len(rows), len(means)):
            queries, costs.coarse[where] = prepared(
                ranking.ranker, ranking.shape, plan, rows[where]
            )
            counts = np.zeros((len(queries.rows), 4), np.int64)
            number = sizes[where]

            def work(numbers: np.ndarray, q=queries, n=number, c=counts) -> Any:
                return within_some(numbers, q, means, cells, places, plan, limit, n, c)

            # Without the order by list: results come query after query.
            parts += over_threads(work, searchable(queries))
            costs.scanned[where] = counts[:, 0]
            costs.ranking[where] = ranking_cost(counts, queries)
        distances = np.concatenate([part[0] for part in parts] + [np.empty(0, np.float32)])
        labels = np.concatenate([part[1] for part in parts] + [np.empty(0, np.int64)])
        lims = np.concatenate([[0], np.cumsum(sizes)])
        cost = SearchCost(costs.scanned, costs.coarse, costs.ranking)
        return lims, -distances if plan.is_product else distances, labels, cost


class ListScan(Scan):
    """Lets FAISS scan a copy of the codes in which every cell is a list."""

    def __init__(self, ivf: Any):
        super().__init__(ivf)
        self._copy: CellCopy | None = None
        self._template = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Memory of the copy."""
        return self._copy.nbytes if self._copy else 0

    def learn_codec(self) -> None:
        """See `Scan`: the index has no lists while its codec is read, so a search cannot do so."""
        self._template = template_bytes(self._ivf)

    def prepare(self, occupied: Occupied, sizes: np.ndarray) -> None:
        """See `Scan`."""
        super().prepare(occupied, sizes)
        self._occupied, self._copy = occupied, None

    def _probes(self, rows: np.ndarray, plan: Any, ranking: Ranking) -> tuple[Probes, np.ndarray]:
        """Cells to scan as lists of the copy, and the cost of ranking."""
        means = ranking.ranker.table
        queries, coarse = prepared(ranking.ranker, ranking.shape, plan, rows)
        counts = np.zeros((len(rows), 4), np.int64)
        chosen = chosen_by_query(queries, means, ranking.cells, plan, counts)
        width = max(1, max(map(len, chosen), default=1))
        lists = np.full((len(rows), width), -1, np.int64)
        own = np.zeros((len(rows), width), np.int64)
        for q, some in enumerate(chosen):
            lists[q, : len(some)] = some
            own[q, : len(some)] = ranking.cells.own[some]
        distances = np.take_along_axis(known_distances(queries, len(means)), own, axis=1)
        if plan.is_product:
            lengths = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))
            distances = -distances * lengths[:, None]
        assert self._copy is not None
        keys = np.where(lists >= 0, self._copy.keys[lists], -1)
        probes = Probes(keys, np.ascontiguousarray(distances, np.float32), coarse)
        return probes, ranking_cost(counts, queries)

    def _ready(self, shape: Shape) -> CellCopy:
        with self._lock:
            if self._copy is None:
                width = shape.per_component
                self._copy = CellCopy(self._ivf, self._occupied, width, self._template)
        return self._copy

    def _options(self, options: ProbeOptions, width: int) -> ProbeOptions:
        """Options for FAISS of a search of so many cells."""
        parameters = faiss.SearchParametersIVF()
        parameters.nprobe, parameters.max_codes = width, options.max_codes
        if options.selector is not None:
            parameters.sel = options.selector
        return ProbeOptions(width, options.max_codes, parameters)

    def _of_search(self, options: ProbeOptions, k: int, width: int) -> ProbeOptions:
        """`_options` of `search`, where k and the number of cells may be limited."""
        return self._options(options, width)

    def search(self, rows: np.ndarray, k: int, options: ProbeOptions, ranking: Ranking) -> Results:
        """See `FlatScan.search`."""
        copy, plan = self._ready(ranking.shape), self.plan(options, ranking.options)
        found = self.nothing(len(rows), k, 0)
        for where in query_blocks(len(rows), len(ranking.ranker.table)):
            probes, found.ranking[where] = self._probes(rows[where], plan, ranking)
            narrow = self._of_search(options, k, probes.lists.shape[1])
            part = nearest_entries(copy.ivf, rows[where], k, probes, narrow)
            found.distances[where], found.labels[where] = part
            found.scanned[where] = probes.scanned(copy.sizes, narrow.max_codes)
            found.coarse[where] = probes.coarse
        return found

    def within(
        self, rows: np.ndarray, radius: float, options: ProbeOptions, ranking: Ranking
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, SearchCost]:
        """See `FlatScan.within`."""
        copy, plan = self._ready(ranking.shape), self.plan(options, ranking.options)
        costs = self.nothing(len(rows), 0, 0)
        sizes, parts = [np.zeros(1, np.int64)], []
        for where in query_blocks(len(rows), len(ranking.ranker.table)):
            probes, costs.ranking[where] = self._probes(rows[where], plan, ranking)
            width = self._options(options, probes.lists.shape[1])
            lims, *part = entries_within(copy.ivf, rows[where], radius, probes, width)
            sizes.append(np.diff(lims))
            parts.append(part)
            costs.scanned[where] = probes.scanned(copy.sizes, options.max_codes)
            costs.coarse[where] = probes.coarse
        distances, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
        cost = SearchCost(costs.scanned, costs.coarse, costs.ranking)
        return np.cumsum(np.concatenate(sizes)), distances, labels, cost


def _address(pointer: Any) -> int:
    """Number of a pointer; that of an empty list is None."""
    return 0 if pointer is None else int(pointer)


def known_distances(queries: Any, nlist: int) -> np.ndarray:
    """Distances to all means, zero for those that are not known: (n, nlist) float32."""
    if not queries.lists.shape[1]:
        return queries.distances
    known = np.zeros((len(queries.rows), nlist), np.float32)
    for q, (lists, distances) in enumerate(zip(queries.lists, queries.distances, strict=True)):
        known[q, lists[lists >= 0]] = distances[lists >= 0]
    return known


def selected(selector: Any, ids: np.ndarray) -> np.ndarray:
    """Which of the ids a faiss.IDSelector takes, a bool array."""
    # FAISS asks a selector for one id at a time in Python; a search of points that are all at
    # distance 0 asks for all at once.
    names: Any = faiss.Int64Vector()
    faiss.copy_array_to_vector(ids, names)
    translated = faiss.IDSelectorTranslated(names, selector)
    points = faiss.IndexFlatL2(1)
    points.add(np.zeros((len(ids), 1), np.float32))
    parameters = faiss.SearchParameters()
    parameters.sel = translated
    places = points.range_search(np.zeros((1, 1), np.float32), 1.0, params=parameters)[2]
    keep = np.zeros(len(ids), bool)
    keep[places] = True
    return keep
