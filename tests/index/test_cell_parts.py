"""The parts of layout "cells" against plain numpy in float64."""

from dataclasses import replace

import faiss
import numpy as np
import pytest

from gmm_ivf import CellOptions, GMMQuantizer, index_factory
from gmm_ivf._cell_ranking import choose_cells, prefix
from gmm_ivf._cell_table import Moments, Occupied, ranked_cells
from gmm_ivf._cell_training import Sample, Trial, learn, learned_shapes
from gmm_ivf._coarse import CoarseRanker
from gmm_ivf._ids import IdSet


@pytest.fixture
def ranker(blobs):
    def make(x, nlist, metric=faiss.METRIC_L2):
        centroids = x[np.random.default_rng(1).choice(len(x), nlist, replace=False)]
        q = GMMQuantizer.from_centroids(centroids, metric)
        return CoarseRanker(q, q.mixture)

    return make


@pytest.mark.parametrize("spread", ["even", "outlier", "ties", "equal"])
def test_prefix_takes_the_best_items_up_to_the_target(spread):
    rng = np.random.default_rng(0)
    scores = rng.normal(size=700).astype("f4")
    if spread == "outlier":
        scores[5] = 1e30
    elif spread == "ties":
        scores = np.round(scores, 1)
    elif spread == "equal":
        scores[:] = 2.5
    sizes = rng.integers(1, 9, 700).astype("i4")
    order = np.argsort(scores, kind="stable")
    for target in (1, 50, 1000, int(sizes.sum()), 10**6):
        chosen = np.empty(701, np.int32)
        count, total = prefix(scores, sizes, target, chosen)
        wanted = int(np.searchsorted(np.cumsum(sizes[order]), target)) + 1
        wanted = min(wanted, 700)
        assert count == wanted
        assert set(chosen[:count]) == set(order[:count])
        assert total == sizes[order[:count]].sum()
        assert total < target or chosen[count - 1] == order[count - 1]
    assert prefix(scores[:0], sizes[:0], 5, np.empty(1, np.int32)) == (0, 0)


def test_without_anchors_vectors_go_to_the_edge_that_takes_most_off_their_residual(blobs, ranker):
    x = blobs(1500, 12)
    coarse = ranker(x, 10)
    sample = Sample(coarse, x)
    shape = replace(learned_shapes(coarse, sample, CellOptions(links=6), (1,))[0], anchors=None)
    column, moments = shape.place(sample.points, sample.own, sample.norms)
    means = coarse.table.astype("f8")
    for r in range(0, 1500, 7):
        i = sample.own[r]
        residual = x[r] - means[i]
        near = np.argsort(((means - means[i]) ** 2).sum(axis=1), kind="stable")[1:7]
        edges = means[near] - means[i]
        along = np.clip(edges @ residual / (edges**2).sum(axis=1), 0, 1)
        left = ((residual - along[:, None] * edges) ** 2).sum(axis=1)
        if left.min() < residual @ residual:
            assert left[column[r]] == pytest.approx(left.min(), rel=1e-4)
        else:
            assert column[r] == 6
        assert moments[r, 0] == pytest.approx(residual @ residual, rel=1e-4)


def test_bins_part_the_vectors_of_a_component_evenly(blobs, ranker):
    x = blobs(1500, 12)
    coarse = ranker(x, 10)
    sample = Sample(coarse, x)
    shape = learned_shapes(coarse, sample, CellOptions(links=6), (3,))[0]
    local = shape.place(sample.points, sample.own, sample.norms)[0]
    for i in range(10):
        counts = np.bincount(local[sample.own == i] % 3, minlength=3)
        assert counts.max() - counts.min() <= 1 + 0.05 * counts.sum()


def test_visited_by_list_cells_are_pairs_of_least_soar_loss(blobs, ranker):
    x = blobs(1500, 12)
    coarse = ranker(x, 10)
    sample = Sample(coarse, x)
    shape = learned_shapes(coarse, sample, CellOptions(links=9, visit="list"), (1,))[0]
    local, _ = shape.place(sample.points, sample.own, sample.norms)
    residuals = x[:, None].astype("f8") - coarse.table
    first = residuals[np.arange(1500), sample.own]
    along = np.einsum("nd,nkd->nk", first, residuals) ** 2
    loss = (residuals**2).sum(axis=2) + along / np.maximum((first**2).sum(axis=1), 1e-30)[:, None]
    loss[np.arange(1500), sample.own] = np.inf
    found = shape.links.neighbours[sample.own, local]
    assert (found == loss.argmin(axis=1)).mean() > 0.99


@pytest.mark.parametrize("metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT], ids=["l2", "ip"])
def test_with_a_full_sketch_a_cell_ranks_by_its_mean(blobs, ranker, metric):
    is_product = metric == faiss.METRIC_INNER_PRODUCT
    x, queries = blobs(1500, 12), blobs(5, 12, seed=4)
    coarse = ranker(x, 10, metric)
    sample = Sample(coarse, x)
    shape = learned_shapes(coarse, sample, CellOptions(links=6, sketch=12), (1,))[0]
    local, moments = shape.place(sample.points, sample.own, sample.norms)
    cells = sample.own * shape.per_component + local
    occupied = Occupied.of_sorted(np.sort(cells), shape.per_component)
    weight = 0.0 if is_product else 0.3
    ranked = ranked_cells(
        shape, Moments.of(cells, moments, shape.units), occupied, weight, is_product
    )
    points = coarse.points(queries).astype("f8")
    for point in points:
        far = ((coarse.table - point) ** 2).sum(axis=1)
        distances = (-(coarse.table @ point) if is_product else far).astype("f4")
        projection = (shape.directions @ point).astype("f4")
        found = ranked.near * distances[ranked.own] + ranked.far * distances[ranked.link]
        found = found + ranked.fine + ranked.unit * (ranked.sketch @ projection)
        for c in range(0, len(found), 5):
            members = sample.points[cells == occupied.cells[c]].astype("f8")
            mean = members.mean(axis=0)
            if is_product:
                norm = sample.norms[cells == occupied.cells[c]].mean()
                wanted = -norm * (point @ mean)
            else:
                spread = ((members - mean) ** 2).sum(axis=1).mean()
                wanted = ((point - mean) ** 2).sum() + weight * spread
            assert found[c] == pytest.approx(wanted, abs=0.02 * float(np.abs(found).max()))


def test_cells_chosen_are_those_of_two_plain_sorts(blobs, ranker):
    x, queries = blobs(3000, 12), blobs(20, 12, seed=4)
    coarse = ranker(x, 16)
    shape, weight = learn(
        coarse, x, CellOptions(links=8, residual_bins=2, residual_weight=0.25), 40
    )
    sample = Sample(coarse, x)
    local, moments = shape.place(sample.points, sample.own, sample.norms)
    cells = sample.own * shape.per_component + local
    occupied = Occupied.of_sorted(np.sort(cells), shape.per_component)
    table = ranked_cells(shape, Moments.of(cells, moments, shape.units), occupied, weight, False)
    lists = np.array([1, 4, 5, 9, 11], np.int32)
    n = len(table.own) + 1
    work = (np.empty(n, "f4"), np.empty(n, "f4"), *(np.empty(n, "i4") for _ in range(3)))
    for query in queries:
        distances = ((coarse.table - query) ** 2).sum(axis=1)
        projection = shape.directions @ query
        chosen, last, rest, ranked, refined = choose_cells(
            distances, lists, projection, table, False, 500, 150, work
        )
        mine = np.flatnonzero(np.isin(table.own, lists))
        base = table.near * distances[table.own] + table.far * distances[table.link]
        rough, fine = base + table.rough, base + table.fine
        fine = fine + table.unit * (table.sketch @ projection)
        first = mine[np.argsort(rough[mine], kind="stable")]
        short = first[: np.searchsorted(np.cumsum(table.size[first]), 500) + 1]
        second = short[np.argsort(fine[short], kind="stable")]
        wanted = second[: np.searchsorted(np.cumsum(table.size[second]), 150) + 1]
        assert (ranked, refined) == (len(mine), len(short))
        np.testing.assert_array_equal(chosen, np.sort(wanted))
        over = table.size[wanted].sum() - 150
        assert (last, rest) == ((wanted[-1], table.size[wanted[-1]] - over) if over else (-1, 0))


def test_moments_of_parts_are_moments_of_all():
    rng = np.random.default_rng(0)
    cells, rows = rng.integers(0, 30, 400), rng.normal(size=(400, 5)).astype("f4")
    units = np.array([1, 2, 0.5, 1, 100], np.float32)
    parts = [Moments.of(cells[a : a + 90], rows[a : a + 90], units) for a in range(0, 400, 90)]
    joined = Moments.none(units).joined(parts[:2]).joined(parts[2:])
    numbers = np.unique(cells)
    np.testing.assert_array_equal(joined.cells, numbers)
    np.testing.assert_array_equal(joined.counts, np.bincount(cells)[numbers])
    wanted = [rows[cells == c].mean(axis=0) for c in numbers]
    np.testing.assert_allclose(joined.means, wanted, rtol=2e-3, atol=1e-3)


def test_small_links_are_merged(blobs, ranker):
    x = blobs(1500, 12)
    coarse = ranker(x, 10)
    sample = Sample(coarse, x)
    shape = learned_shapes(coarse, sample, CellOptions(links=9, min_size=20), (1,))[0]
    local = shape.place(sample.points, sample.own, sample.norms)[0]
    sizes = np.bincount(sample.own * 10 + local, minlength=100).reshape(10, 10)
    assert shape.merged.any()
    assert (sizes[:, :9][shape.merged] == 0).all()
    assert (sizes[:, :9][~shape.merged] >= 20).all()


@pytest.mark.parametrize(
    ("of_one_bin", "of_four", "bins", "weight"),
    [
        ([5, 4, 3, 4, 5], ([9, 9, 9, 9, 2], 15), 4, 0.5),
        ([5, 4, 3, 4, 5], ([9, 9, 9, 9, 2], 40), 1, 0.25),
        ([5, 4, 3, 4, 5], ([9, 9, 9, 9, 2.7], 3), 4, 0.5),
        ([5, 4, 3, 4, 5], ([9, 9, 9, 9, 2.8], 3), 1, 0.25),
        ([np.inf] * 5, ([np.inf] * 5, 3), 1, 0.25),
    ],
)
def test_what_costs_least_is_learned(blobs, ranker, monkeypatch, of_one_bin, of_four, bins, weight):
    """Four bins where they save more than 5 % and the share of memory that they add."""
    x = blobs(1500, 12)
    costs = {1: (of_one_bin, 2), 4: of_four}
    monkeypatch.setattr(Trial, "costs", lambda self, shape, weights: costs[shape.bins])
    shape, found = learn(ranker(x, 10), x, CellOptions(), 4 * x.shape[1])
    assert (shape.bins, found) == (bins, weight)


def test_a_trial_measures_searches(blobs, ranker):
    x = blobs(3000, 12)
    coarse = ranker(x, 10)
    sample = Sample(coarse, x)
    trial = Trial(coarse, sample, CellOptions())
    shape = learned_shapes(coarse, sample, CellOptions(), (1,))[0]
    (few, many), kept = trial.costs(shape, (0.25, 20.0))
    assert 10 < few < many
    assert few < 2600
    assert 0 < kept < 200


def test_cells_fit_their_lists_after_a_removal_that_failed(blobs, monkeypatch):
    x = blobs(1500, 8)
    index = index_factory(8, "GMM6cells,Flat", random_state=0, tol=0.1)
    index.train(x)
    index.add(x)
    index.nprobe = 6
    index.search(x[:1], 1)
    with monkeypatch.context() as patched:
        patched.setattr(IdSet, "discard", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            index.remove_ids(np.arange(1000))
    index.add_with_ids(x[:200], np.arange(200) + 9000)
    labels = index.search(x[:5], 700)[1]
    kept = np.concatenate([np.arange(1000, 1500), np.arange(9000, 9200)])
    np.testing.assert_array_equal(np.sort(labels, axis=1), np.tile(kept, (5, 1)))


def test_long_vectors_are_learned_from_without_overflow():
    x = (np.random.default_rng(0).normal(size=(300, 8)) * 5e17).astype("f4")
    index = index_factory(8, "GMM6cells,Flat", random_state=0, tol=0.1)
    index.train(x)
    index.add(x)
    assert (index.search(x[:3], 1)[1][:, 0] == np.arange(3)).all()
