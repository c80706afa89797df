"""The best over all K, rough readings, and the lines that say so."""

import json

import pytest

from gmm_ivf.eval.curves import strands
from gmm_ivf.eval.metrics import gap_at_recall
from gmm_ivf.eval.summary import (
    FAISS,
    OURS,
    OURS_ONCE,
    Spread,
    bests,
    envelopes,
    summarize,
    write_summary,
)
from gmm_ivf.eval.tables import to_text

RECALLS = (0.78, 0.82, 0.88, 0.92, 0.94, 0.97)


def curve(point, scale, speed=8000.0, **changes):
    """Six points whose costs are a power of two times `scale`, at `speed` over that power."""
    return [
        point(recall, scale * 2**i, nprobe=i + 1, queries_per_second=speed / 2**i, **changes)
        for i, recall in enumerate(RECALLS)
    ]


def mean(spread: Spread | None) -> float:
    assert spread is not None
    return spread.mean


def ends(spread: Spread | None) -> tuple[float, float]:
    assert spread is not None
    return spread.low, spread.high


@pytest.fixture
def points(point):
    several = {"entries_per_vector": 1.8}
    return [
        *curve(point, 100),
        *curve(point, 50, nlist=40, method="kmeans:coarse=hnsw32"),
        *curve(point, 80, method="gmm"),
        *curve(point, 40, nlist=40, method="gmm"),
        *curve(point, 20, nlist=40, method="kmeans-soft:rule=soar", **several),
    ]


def test_best_of_faiss_is_over_all_K_and_coarse_quantizers(points):
    first, second = summarize(points)
    assert [row.method for row in first.rows] == ["kmeans", "gmm"]
    assert list(map(mean, first.rows[1].to_best)) == pytest.approx([50 / 80] * 2)
    assert list(map(mean, second.rows[1].to_best)) == pytest.approx([50 / 40] * 2)
    # Without a flat k-means of the same K the graph is what there is to compare with.
    assert mean(second.rows[1].ratios[1]) == pytest.approx(50 / 40)
    assert second.title.endswith("seed 0, x against kmeans:coarse=hnsw32")
    assert "against" not in first.title


def test_best_of_each_family(points):
    at_90 = {b.family: b for b in bests(points) if (b.target, b.by) == (0.90, "cost")}
    assert set(at_90) == {FAISS, OURS_ONCE, OURS}
    assert at_90[FAISS].row.method == "kmeans:coarse=hnsw32"
    assert (at_90[OURS_ONCE].row.method, at_90[OURS_ONCE].row.nlist) == ("gmm", 40)
    assert mean(at_90[OURS_ONCE].ratio) == pytest.approx(1.25)
    assert mean(at_90[OURS].ratio) == pytest.approx(2.5)
    assert mean(at_90[FAISS].ratio) == 1.0


def test_best_by_speed_is_chosen_by_speed(point):
    fast = curve(point, 1000, method="gmm", speed=16000.0)
    slow = curve(point, 10, nlist=40, method="gmm")
    (best,) = [b for b in bests(fast + slow) if b.by == "time"]
    assert (best.row.nlist, best.value) == (10, pytest.approx(16000 / 2**2.5))


def test_seeds_are_paired_where_both_have_them(point):
    points = []
    for seed, scale in ((0, 1.0), (1, 3.0)):
        points += curve(point, 100 * scale, seed=seed)
        points += curve(point, 50, seed=seed, method="gmm")
    points += curve(point, 90, nlist=40, method="kmeans:coarse=hnsw32")
    row = summarize(points)[0].rows[1]
    # The best of FAISS was measured with seed 0 alone.
    assert ends(row.to_best[0]) == pytest.approx((90 / 50, 90 / 50))
    assert ends(row.ratios[1]) == pytest.approx((2, 6))


def test_a_codec_is_no_plain_faiss(point):
    points = curve(point, 100) + curve(point, 10, method="kmeans:codec=PQ32,refine=True")
    row = summarize(points)[0].rows[1]
    assert mean(row.to_best[0]) == pytest.approx(10)


def test_readings_across_wide_gaps_are_marked(point):
    assert gap_at_recall([0.7, 0.9, 0.95], [1, 2, 3], 0.8) == pytest.approx(0.2)
    assert gap_at_recall([0.7, 0.9, 0.95], [1, 2, 3], 0.9) == 0
    assert gap_at_recall([0.7, 0.9], [1, 2], 0.95) is None
    wide = [point(0.5, 100, nprobe=1), point(0.99, 400, nprobe=2)]
    text = to_text(wide)
    assert f"~{100 * 4 ** (0.4 / 0.49):.0f}" in text
    assert "~: read off between two points more than 0.05" in " ".join(text.split())
    assert "~1" not in to_text(curve(point, 100))


def test_costs_are_read_along_one_breadth_at_a_time(point):
    points = [
        point(0.85, 100, nprobe=4, ef_search=32),
        point(0.95, 300, nprobe=8, ef_search=32),
        # More breadth for little: the front of all points would have a step here.
        point(0.86, 200, nprobe=4, ef_search=64),
        point(0.96, 500, nprobe=8, ef_search=64),
    ]
    cost = summarize(points)[0].rows[0].costs[1]
    assert mean(cost) == pytest.approx(100 * 3**0.5)
    points.append(point(0.92, 120, nprobe=4, ef_search=128))
    points.append(point(0.88, 110, nprobe=2, ef_search=128))
    cost = summarize(points)[0].rows[0].costs[1]
    assert mean(cost) == pytest.approx(110 * (120 / 110) ** 0.5)


def test_more_re_ranking_than_was_tried_is_the_last_that_was(point):
    points = [
        point(0.80, 100, nprobe=1, refine_factor=2),
        point(0.88, 110, nprobe=1, refine_factor=4),
        point(0.82, 200, nprobe=2, refine_factor=2),
        point(0.92, 210, nprobe=2, refine_factor=4),
        point(0.96, 220, nprobe=2, refine_factor=8),
    ]
    assert sorted(map(len, strands(points))) == [2, 2, 2]
    cost = summarize(points)[0].rows[0].costs[1]
    assert mean(cost) == pytest.approx(110 * 2 ** (2 / 8))


def test_text_holds_the_best_only_where_there_is_a_choice(point, points):
    text = to_text(points)
    assert "x best 0.90" in text
    assert "ours, up to 1.1 entries a vector" in text
    assert "best over all K" not in to_text(curve(point, 100) + curve(point, 50, method="gmm"))


def test_summary_lines_hold_what_the_table_holds(tmp_path, points):
    write_summary(points, tmp_path / "summary.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "summary.jsonl").read_text().splitlines()]
    methods = [line for line in lines if line["kind"] == "method"]
    assert [line["nlist"] for line in methods] == [10, 10, 40, 40, 40]
    at = methods[1]["at"]["0.90"]
    assert at["ratio_to_kmeans"] == pytest.approx([1.25] * 3)
    assert at["ratio_to_best_faiss"] == pytest.approx([0.625] * 3)
    assert at["is_rough"] is False
    best = [line for line in lines if line["kind"] == "best" and line["family"] == OURS]
    assert [line["recall"] for line in best] == [0.90, 0.95, 0.90]
    assert best[0]["bytes_per_vector"] == 24.0


def test_envelope_is_the_least_cost_of_a_family(points):
    found = envelopes(points)
    recalls, costs = found[FAISS]
    assert recalls[0] == 0.78
    assert costs[0] == pytest.approx(50)
    assert found[OURS][1][0] == pytest.approx(20)
