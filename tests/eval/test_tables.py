"""The table: paired ratios, seeds, and recalls that are not reached."""

from dataclasses import replace

import pytest

from gmm_ivf.eval.curves import curves
from gmm_ivf.eval.summary import summarize
from gmm_ivf.eval.tables import to_text


def curve(point, costs, recalls=(0.75, 0.85, 0.92, 0.96), **changes):
    return [
        point(r, c, nprobe=i, **changes)
        for i, (r, c) in enumerate(zip(recalls, costs, strict=True), 1)
    ]


def means(spreads):
    return [spread and spread.mean for spread in spreads]


def test_ratio_is_baseline_cost_over_own_cost(point):
    points = curve(point, (100, 200, 400, 800)) + curve(point, (50, 100, 200, 400), method="gmm")
    (block,) = summarize(points)
    kmeans, gmm = block.rows
    assert means(kmeans.ratios) == [1.0, 1.0, 1.0, None]
    assert means(gmm.ratios) == [pytest.approx(2.0)] * 3 + [None]
    assert means(gmm.costs)[0] == pytest.approx(50 * 2**0.5)


def test_ratios_are_paired_by_seed_and_nlist(point):
    points = []
    for seed, scale, gain in ((0, 1, 2.0), (1, 10, 1.0)):
        costs = [scale * c for c in (100, 200, 400, 800)]
        points += curve(point, costs, seed=seed)
        points += curve(point, [c / gain for c in costs], seed=seed, method="gmm")
    points += curve(point, (900, 950, 960, 970), nlist=20)
    first, second = summarize(points)
    ratio = first.rows[1].ratios[0]
    assert ratio is not None
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((1.5, 1.0, 2.0))
    assert (first.nlist, first.seeds, second.nlist) == (10, (0, 1), 20)


def test_a_seed_that_misses_the_recall_leaves_no_mean(point):
    points = curve(point, (100, 200, 400, 800))
    points += curve(point, (100, 200), (0.5, 0.82), seed=1)
    row = summarize(points)[0].rows[0]
    assert row.costs[0] is not None
    assert row.costs[1] is None


def test_speed_is_interpolated_at_the_same_recall(point):
    points = [
        point(0.8, 100, nprobe=1, queries_per_second=400.0),
        point(1.0, 200, nprobe=2, queries_per_second=100.0),
    ]
    assert means([summarize(points)[0].rows[0].queries_per_second]) == [pytest.approx(200)]


def test_without_kmeans_costs_stand_without_ratios(point):
    text = to_text(curve(point, (100, 200, 400, 800), method="gmm"))
    assert "1.00x" not in text
    assert "141" in text


def test_text_is_aligned_and_explains_itself(point):
    points = curve(point, (1000, 2000, 4000, 8000))
    points += curve(point, (900, 1900, 3900, 7900), method="gmm-soft:tau=1/K")
    lines = to_text(points).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("method"))
    assert len({len(line) for line in lines[head : head + 3]}) == 1
    assert "K = nlist = 10, N/K = 100, trained on" in lines[head - 1]
    assert "above 1 means fewer" in " ".join(lines)
    assert max(map(len, lines)) <= 132


def test_what_cells_were_learned_from_is_said(point):
    points = curve(point, (1000, 2000, 4000, 8000), method="kmeans-cells")
    assert "cells learned" not in to_text(points)
    points = [replace(each, settings={**each.settings, "rows_of_cells": 1000}) for each in points]
    assert "cells learned from all vectors" in " ".join(to_text(points).split())


def test_no_points_is_said():
    assert to_text([]) == "no points yet\n"


def test_curves_are_ordered_by_nprobe_whatever_the_file_order(point):
    points = curve(point, (1, 2, 3, 4))
    (back,) = curves(points[::-1]).values()
    assert back == points
