"""The sweep: its grid, what it stores, and that it measures nothing twice."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from gmm_ivf.eval import sweep
from gmm_ivf.eval.method_spec import parse_method
from gmm_ivf.eval.results import Store
from gmm_ivf.eval.searchers import REFINE_FACTORS, Probe
from gmm_ivf.eval.sweep import Bench, nprobe_grid, training_rows


def run(*arguments):
    """Points of a run that leaves nothing out."""
    outcome = sweep.run(*arguments)
    assert (outcome.left_out, outcome.failed) == ([], [])
    return outcome.points


@pytest.fixture
def builds(monkeypatch):
    """List that grows by (method, nlist, seed) with every build."""
    made = []
    real = sweep.build

    def counting(spec, context):
        made.append((str(spec), context.nlist, context.seed))
        return real(spec, context)

    monkeypatch.setattr(sweep, "build", counting)
    return made


@pytest.mark.parametrize("nlist", [1, 5, 16, 17, 64, 256, 1000, 16384])
def test_grid_is_dense_then_steps_by_at_most_a_fifth(nlist):
    grid = nprobe_grid(nlist)
    assert grid[: min(16, nlist)] == list(range(1, min(16, nlist) + 1))
    assert grid[-1] == nlist
    assert all(1 < b / a <= 1.2 for a, b in pairwise(grid[15:]))


def test_training_rows_are_drawn_by_the_seed_alone():
    base = np.arange(200, dtype=np.float64).reshape(100, 2)
    assert training_rows(base, 100, 0).shape == (100, 2)
    drawn = training_rows(base, 30, 5)
    assert drawn.dtype == np.float32
    assert len(np.unique(drawn[:, 0])) == 30
    np.testing.assert_array_equal(drawn, training_rows(base, 30, 5))
    assert (drawn != training_rows(base, 30, 6)).any()


def test_sweep_ends_at_the_first_point_of_the_wanted_recall(tiny, plan, tmp_path):
    plan = replace(plan, stop_recall=0.9)
    points = run(plan, Bench.prepare(tiny, 5), Store(tmp_path / "r.jsonl"), {})
    recalls = [point.recall for point in points]
    assert recalls[-1] >= 0.9
    assert all(recall < 0.9 for recall in recalls[:-1])
    assert [point.key.nprobe for point in points] == list(range(1, len(points) + 1))


def test_sweep_ends_at_nlist_with_everything_scanned(tiny, plan, tmp_path):
    plan = replace(plan, stop_recall=2.0)
    points = run(plan, Bench.prepare(tiny, 5), Store(tmp_path / "r.jsonl"), {})
    assert points[-1].recall == 1.0
    assert (points[-1].scanned, points[-1].coarse) == (tiny.n, 12)


def test_recall_equals_brute_force_on_sets(tiny, plan, tmp_path):
    (point,) = run(
        replace(plan, nprobes=(2,)), Bench.prepare(tiny, 5), Store(tmp_path / "r.jsonl"), {}
    )
    context = sweep._context(plan, Bench.prepare(tiny, 5), 12, 0)
    ids, _ = sweep.build(parse_method("kmeans"), context).search(tiny.query, 5, Probe(2))
    pairs = zip(ids, tiny.ground_truth[:, :5], strict=True)
    expected = np.mean([len(set(a) & set(b)) / 5 for a, b in pairs])
    assert point.recall == pytest.approx(expected)


def test_a_finished_run_builds_nothing_again(tiny, plan, tmp_path, builds):
    bench, path = Bench.prepare(tiny, 5), tmp_path / "r.jsonl"
    plan = replace(plan, methods=tuple(map(parse_method, ("kmeans", "gmm"))), seeds=(0, 1))
    first = run(plan, bench, Store(path), {})
    assert len(builds) == 4
    assert run(plan, bench, Store(path), {}) == first
    assert len(builds) == 4


def test_only_what_is_missing_is_built_and_measured(tiny, plan, tmp_path, builds):
    bench, path = Bench.prepare(tiny, 5), tmp_path / "r.jsonl"
    plan = replace(plan, methods=tuple(map(parse_method, ("kmeans", "gmm"))), nprobes=(1, 2, 3))
    first = run(plan, bench, Store(path), {})
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    builds.clear()
    again = run(plan, bench, Store(path), {})
    assert builds == [("gmm", 12, 0)]
    assert again[:-1] == first[:-1]
    assert again[-1].key == first[-1].key
    assert again[-1].recall == first[-1].recall


@pytest.mark.parametrize(
    "change",
    [{"threads": 2}, {"iterations": 6}, {"k": 6}, {"points_per_centroid": 50}, {"seeds": (1,)}],
    ids=lambda change: next(iter(change)),
)
def test_another_measurement_is_not_taken_from_the_store(tiny, plan, tmp_path, builds, change):
    path = tmp_path / "r.jsonl"
    plan = replace(plan, nprobes=(1,))
    run(plan, Bench.prepare(tiny, 5), Store(path), {})
    changed = replace(plan, **change)
    run(changed, Bench.prepare(tiny, changed.k), Store(path), {})
    assert len(builds) == 2
    assert len(Store(path)) == 2


def test_another_data_set_of_the_same_shape_is_measured_anew(
    tiny, clustered, plan, tmp_path, builds
):
    other = clustered(tiny.n, len(tiny.query), tiny.d, seed=1)
    store = Store(tmp_path / "r.jsonl")
    for dataset in (tiny, other):
        run(replace(plan, nprobes=(1,)), Bench.prepare(dataset, 5), store, {})
    assert len(builds) == 2


def test_IX_S2_nprobe_above_nlist_probes_all_lists_once(tiny, plan, tmp_path):
    plan = replace(plan, nprobes=(64, 12, 1, 20))
    points = run(plan, Bench.prepare(tiny, 5), Store(tmp_path / "r.jsonl"), {})
    assert [point.key.nprobe for point in points] == [1, 12]


def test_ground_truth_is_computed_when_missing_or_too_short(tiny):
    expected = Bench.prepare(tiny, 20).kth
    np.testing.assert_allclose(
        Bench.prepare(replace(tiny, ground_truth=None, distances=None), 20).kth, expected
    )
    shorter = replace(tiny, ground_truth=tiny.ground_truth[:, :7], distances=None)
    np.testing.assert_allclose(Bench.prepare(shorter, 20).kth, expected)


@pytest.mark.parametrize("metric", ["ip", "cosine"])
def test_similarity_metrics_reach_full_recall(clustered, plan, tmp_path, metric):
    data = clustered(600, 20, 6, metric)
    methods = tuple(map(parse_method, ("kmeans", "gmm", "gmm-soft:tau=1/K")))
    plan = replace(plan, methods=methods, nprobes=(1, 12))
    points = run(plan, Bench.prepare(data, 5), Store(tmp_path / "r.jsonl"), {})
    for low, full in zip(points[::2], points[1::2], strict=True):
        assert 0.2 < low.recall < full.recall == 1.0


def test_process_wide_settings_are_left_alone(tiny, plan, tmp_path):
    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    stats: Any = faiss.cvar
    stats.indexIVF_stats.nq = 17
    methods = tuple(map(parse_method, ("kmeans", "gmm-soft")))
    run(replace(plan, methods=methods), Bench.prepare(tiny, 5), Store(tmp_path / "r.jsonl"), {})
    assert (torch.get_num_threads(), faiss.omp_get_max_threads()) == before
    assert stats.indexIVF_stats.nq >= 17


def test_a_method_with_its_own_nlist_is_measured_there_alone(tiny, plan, tmp_path, builds):
    methods = ("kmeans", "kmeans:nlist=20", "gmm:nlist=8", "kmeans:nlist=12")
    plan = replace(plan, methods=tuple(map(parse_method, methods)), nlists=(12, 20), nprobes=(1,))
    points = run(plan, Bench.prepare(tiny, 5), Store(tmp_path / "r.jsonl"), {})
    kinds = [(point.key.method, point.key.nlist) for point in points]
    assert kinds == [("kmeans", 12), ("kmeans", 20), ("gmm", 8)]
    assert [(method, nlist) for method, nlist, _ in builds] == kinds


def test_methods_of_one_nlist_and_seed_share_training_rows_and_kmeans(tiny, plan, tmp_path):
    methods = ("kmeans", "gmm", "kmeans-soft:rule=top2", "kmeans:coarse=hnsw4")
    plan = replace(plan, methods=tuple(map(parse_method, methods)), nprobes=(2,), train_limit=480)
    points = run(plan, Bench.prepare(tiny, 5), Store(tmp_path / "r.jsonl"), {})
    assert {point.key.train_rows for point in points} == {480}
    assert len({point.train_seconds for point in points if point.key.method == "kmeans"}) == 1
    assert points[0].settings["max_points_per_centroid"] == 480 // 12


def test_breadth_of_a_graph_is_swept_and_never_below_nprobe(tiny, plan, tmp_path):
    plan = replace(plan, methods=(parse_method("kmeans:nlist=100,coarse=hnsw4"),), nprobes=(1, 50))
    points = run(plan, Bench.prepare(tiny, 5), Store(tmp_path / "r.jsonl"), {})
    probes = [(point.key.nprobe, point.key.ef_search) for point in points]
    assert probes == [(1, 32), (1, 64), (1, 128), (50, 50), (50, 64), (50, 128)]
    coarse = [point.coarse for point in points]
    assert coarse[0] < coarse[1] < coarse[2]


def test_re_ranking_is_swept_as_long_as_it_finds_more(tiny, plan, tmp_path):
    method = parse_method("kmeans:codec=PQ4x4,refine=true")
    plan = replace(plan, methods=(method,), nprobes=(4,))
    points = run(plan, Bench.prepare(tiny, 5), Store(tmp_path / "r.jsonl"), {})
    factors = [point.key.refine_factor for point in points]
    assert factors == list(REFINE_FACTORS[: len(factors)])
    gains = [b.recall - a.recall for a, b in pairwise(points)]
    assert all(gain >= 1e-3 for gain in gains[:-1])
    assert points[0].scan_unit == 0.5
    first, second = points[:2]
    assert second.ranking - first.ranking == pytest.approx(5 * 2, abs=1e-6)
    expected = first.scanned / 2 + first.coarse + first.ranking
    assert first.distance_computations == pytest.approx(expected)


def test_a_codec_that_ends_below_the_wanted_recall_ends_the_sweep(tiny, plan, tmp_path):
    plan = replace(plan, methods=(parse_method("kmeans:codec=PQ2x4"),), nlists=(200,))
    points = run(plan, Bench.prepare(tiny, 5), Store(tmp_path / "r.jsonl"), {})
    assert 16 < points[-1].key.nprobe < 200
    assert points[-1].recall < 0.9


def test_a_spent_budget_begins_nothing_and_names_what_it_left(tiny, plan, tmp_path, builds):
    bench, store = Bench.prepare(tiny, 5), Store(tmp_path / "r.jsonl")
    known = run(replace(plan, nprobes=(1,)), bench, store, {})
    builds.clear()
    methods = tuple(map(parse_method, ("kmeans", "gmm")))
    late = replace(plan, nprobes=(1, 2), methods=methods, budget_seconds=1e-9)
    outcome = sweep.run(late, bench, store, {})
    assert builds == []
    assert outcome.points == known
    assert outcome.left_out == ["kmeans, nlist 12, seed 0", "gmm, nlist 12, seed 0"]


def test_a_method_that_fails_leaves_the_others_alone(tiny, plan, tmp_path):
    methods = tuple(map(parse_method, ("kmeans:codec=PQ3", "kmeans")))
    outcome = sweep.run(
        replace(plan, nprobes=(1,), methods=methods),
        Bench.prepare(tiny, 5),
        Store(tmp_path / "r.jsonl"),
        {},
    )
    assert [point.key.method for point in outcome.points] == ["kmeans"]
    (error,) = outcome.failed
    assert "kmeans:codec=PQ3, nlist 12, seed 0 cannot be built" in str(error)


def test_cells_are_swept_in_parts_of_a_list(tiny, plan, tmp_path):
    plan = replace(plan, methods=(parse_method("kmeans-cells:links=4"),), nprobes=(1, 4))
    points = run(plan, Bench.prepare(tiny, 5), Store(tmp_path / "r.jsonl"), {})
    limits = [point.key.max_codes for point in points]
    assert limits[0] == round(0.06 * tiny.n / 12)
    assert limits == [*sorted(limits[:12]), 0, round(3.5 * tiny.n / 12), 0]
    scanned = [point.scanned for point in points]
    assert scanned == sorted(scanned)
