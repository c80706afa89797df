"""Anchors of cells: where vectors are put, against plain numpy in float64."""

from dataclasses import replace

import faiss
import numpy as np
import pytest

from gmm_ivf import CellOptions, GMMQuantizer
from gmm_ivf._cell_anchors import Anchors
from gmm_ivf._cell_state import moment_arrays, shape_arrays, shape_of_arrays
from gmm_ivf._cell_table import Moments
from gmm_ivf._cell_training import Sample, learned_shapes
from gmm_ivf._coarse import CoarseRanker

METRICS = pytest.mark.parametrize(
    "metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT], ids=["l2", "ip"]
)


@pytest.fixture
def learned(blobs):
    kept = []  # The means are a view of the quantizer's.

    def make(n=3000, metric=faiss.METRIC_L2, **options):
        x = blobs(n, 12)
        centroids = x[np.random.default_rng(1).choice(n, 10, replace=False)]
        quantizer = GMMQuantizer.from_centroids(centroids, metric)
        coarse = CoarseRanker(quantizer, quantizer.mixture)
        sample = Sample(coarse, x)
        kept.append(quantizer)
        options = {"links": 6, "sketch": 5, **options}
        return sample, learned_shapes(coarse, sample, CellOptions(**options), (1,))[0]

    return make


def places(shape):
    """The anchors as points, (K, L + 1, d) float64; NaN where there is none."""
    means = shape.links.means.astype("f8")
    own = np.arange(len(means))[:, None]
    ends = np.concatenate([shape.links.neighbours, own], axis=1)
    a = np.where(shape.anchors.fractions == 255, np.nan, shape.anchors.fractions / 254)
    on_edge = means[:, None] + a[:, :, None] * (means[ends] - means[:, None])
    return on_edge + shape.anchors.unit * shape.anchors.sketches @ shape.directions.astype("f8")


@METRICS
def test_vectors_go_to_the_nearest_anchor_of_their_component(learned, metric):
    sample, shape = learned(metric=metric)
    known = shape.anchors.fractions != 255
    column = shape.place(sample.points, sample.own, sample.norms)[0]
    far = ((sample.points[:, None] - places(shape)[sample.own]) ** 2).sum(axis=2)
    anchored = known[sample.own].all(axis=1)
    assert anchored.sum() > 500
    found = far[anchored, column[anchored]]
    np.testing.assert_allclose(found, far[anchored].min(axis=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        shape.anchors.lengths[known],
        ((places(shape) - shape.links.means[:, None]) ** 2).sum(axis=2)[known],
        rtol=1e-3,
        atol=1e-5,
    )


def test_a_link_without_an_anchor_takes_what_is_near_its_edge(learned):
    sample, shape = learned()
    fractions = shape.anchors.fractions.copy()
    fractions[:, 2] = 255
    codes = fractions, shape.anchors.sketches, shape.anchors.unit
    shape = replace(shape, anchors=Anchors.of_codes(shape.links, shape.directions, *codes))
    column = shape.place(sample.points, sample.own, sample.norms)[0]
    means = shape.links.means.astype("f8")
    far = ((sample.points[:, None] - places(shape)[sample.own]) ** 2).sum(axis=2)
    edges = (means[shape.links.neighbours[:, 2]] - means)[sample.own]
    residuals = sample.points - means[sample.own]
    along = np.einsum("nd,nd->n", residuals, edges) / (edges**2).sum(axis=1)
    far[:, 2] = ((residuals - np.clip(along, 0, 1)[:, None] * edges) ** 2).sum(axis=1)
    best = np.nanmin(far, axis=1)
    np.testing.assert_allclose(far[np.arange(len(far)), column], best, rtol=1e-4, atol=1e-5)


def test_anchors_are_means_whose_sketches_few_vectors_shrink(learned):
    sample, shape = learned()
    bare = replace(shape, anchors=None)
    column, rows = bare.place(sample.points, sample.own, sample.norms)
    cells = sample.own * bare.per_component + column
    found = places(bare.anchored(Moments.of(cells, rows, shape.units)))
    means, directions = shape.links.means.astype("f8"), shape.directions.astype("f8")
    for cell in np.unique(cells)[::3]:
        i, c = divmod(cell, bare.per_component)
        members = sample.points[cells == cell].astype("f8")
        edge = means[shape.links.neighbours[i, c]] - means[i] if c < 6 else np.zeros(12)
        off = members.mean(axis=0) - means[i]
        a = np.clip(off @ edge / (edge @ edge), 0, 1) if c < 6 else 0.0
        z = directions @ (off - a * edge) * len(members) / (len(members) + 2)
        assert found[i, c] == pytest.approx(means[i] + a * edge + directions.T @ z, abs=0.05)


@METRICS
def test_vectors_are_nearer_to_the_places_of_their_cells_than_with_edges(learned, metric):
    sample, shape = learned(metric=metric)

    def spread(shape):
        column, rows = shape.place(sample.points, sample.own, sample.norms)
        cells = sample.own * shape.per_component + column
        known = places(shape.anchored(Moments.of(cells, rows, shape.units)))
        return ((sample.points - known[sample.own, column]) ** 2).sum(axis=1).mean()

    assert spread(shape) < 0.97 * spread(replace(shape, anchors=None))


def test_more_rows_than_the_sample_holds_are_read_in_parts(blobs):
    x = blobs(9000, 6)
    quantizer = GMMQuantizer.from_centroids(x[:4])
    sample = Sample(CoarseRanker(quantizer, quantizer.mixture), x)
    assert len(sample.own) == 4096
    (part,) = sample.blocks(4000)
    assert part[0] is sample.points
    parts = list(sample.blocks(9000))
    assert [len(part[1]) for part in parts] == [4096, 4096, 808]
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), x)
    assert sum(len(part[1]) for part in sample.blocks(5000)) == 5000


def test_visited_by_list_there_are_no_anchors(learned):
    assert learned(visit="list")[1].anchors is None


@pytest.mark.parametrize("visit", ["edge", "list"])
def test_anchors_come_back_from_arrays(learned, visit):
    sample, shape = learned(visit=visit)
    none = moment_arrays(Moments.none(shape.units))
    arrays = {**shape_arrays(shape), **none}
    found = shape_of_arrays(shape.links.means, arrays, visit == "list")[0]
    placed = (part.place(sample.points, sample.own, sample.norms)[0] for part in (shape, found))
    np.testing.assert_array_equal(*placed)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("anchor_fractions", lambda a: a[:-10], "anchors have the wrong size"),
        ("anchor_sketches", lambda a: a[:-1], "anchors have the wrong size"),
        ("anchor_unit", lambda a: np.append(a, a), "anchors have the wrong size"),
        ("anchor_unit", lambda a: -a, "anchor_unit must be a positive number"),
        ("anchor_unit", lambda a: a * np.nan, "anchor_unit must be a finite array"),
        ("anchor_sketches", lambda a: a.astype("i4"), "anchor_sketches must be a finite array"),
    ],
)
def test_anchors_that_cannot_be_are_refused(learned, name, change, message):
    shape = learned()[1]
    arrays = {**shape_arrays(shape), **moment_arrays(Moments.none(shape.units))}
    arrays[name] = change(arrays[name])
    with pytest.raises(ValueError, match=message):
        shape_of_arrays(shape.links.means, arrays, False)
