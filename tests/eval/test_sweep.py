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
from gmm_ivf.eval.searchers import Probe
from gmm_ivf.eval.sweep import Bench, nprobe_grid, training_rows


def run(*arguments):
    """Points of a run that leaves nothing out."""
    points, left_out = sweep.run(*arguments)
    assert left_out == []
    return points


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
