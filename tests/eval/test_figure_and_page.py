"""The figure and the HTML page, from rows alone."""

import re

import matplotlib.image
import pytest

from gmm_ivf.eval.plots import draw, save
from gmm_ivf.eval.report import render


@pytest.fixture
def points(point):
    grid = [(0.45, 100), (0.7, 200), (0.85, 300), (0.92, 500), (0.99, 900)]
    return [
        point(recall, cost * factor, nprobe=i, method=method, seed=seed)
        for method, factor in (("kmeans", 1.0), ("gmm", 0.95), ("gmm-soft:tau=1/K", 0.9))
        for seed in (0, 1)
        for i, (recall, cost) in enumerate(grid, 1)
    ]


def test_files_are_written_and_the_svg_is_reproducible(tmp_path, points):
    png, svg = save(points, tmp_path)
    first = svg.read_bytes()
    save(points, tmp_path)
    assert svg.read_bytes() == first
    height, width = matplotlib.image.imread(png).shape[:2]
    assert 600 < width < 2000
    assert 600 < height < 2000


def test_axes_show_cost_on_a_log_scale_and_the_ratio_below(points):
    cost, ratio = draw(points).axes
    assert cost.get_yscale() == "log"
    assert [line.get_label() for line in cost.lines] == [
        "k-means",
        "GMM, hard",
        "GMM, soft (tau 1/K)",
    ]
    assert max(line.get_ydata().max() for line in cost.lines) == pytest.approx(900)
    drawn = ratio.lines[1].get_ydata()
    assert drawn[30] == pytest.approx(1 / 0.95)


def test_one_column_per_nlist_and_no_ratio_without_kmeans(point):
    gmm = [
        point(r, c, nlist=nlist, method="gmm", nprobe=i)
        for nlist in (10, 20)
        for i, (r, c) in enumerate([(0.6, 100), (0.9, 200)], 1)
    ]
    assert len(draw(gmm).axes) == 2


def test_a_single_point_can_be_drawn(point):
    assert draw([point(0.2, 100)]).axes


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="got none"):
        draw([])


def test_page_refers_to_nothing_outside_itself(tmp_path, points):
    _, svg = save(points, tmp_path)
    page = render(points, svg.read_text(), "python -m eval.recall")
    assert "http" not in page
    assert "<script" not in page
    assert "<link" not in page
    assert "@import" not in page
    targets = re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', page) + re.findall(
        r"url\(([^)]*)\)", page
    )
    assert targets
    assert all(target.startswith("#") for target in targets)


def test_page_holds_figure_table_convention_and_environment(tmp_path, points):
    _, svg = save(points, tmp_path)
    page = render(points, svg.read_text(), "python -m eval.recall --k 10")
    for expected in (
        "<svg",
        "<td>gmm-soft:tau=1/K</td>",
        "every copy counted, + comparisons",
        "<code>python -m eval.recall --k 10</code>",
        "niter = 25",
        "<dt>commit</dt><dd>abc</dd>",
        "numpy 2",
    ):
        assert expected in page


def test_names_are_escaped(tmp_path, point):
    evil = point(0.5, 100, dataset="<script>alert(1)</script>", environment={"commit": "<b>"})
    _, svg = save([evil], tmp_path)
    page = render([evil], svg.read_text(), "x --dataset '<i>'")
    assert "<script" not in page
    assert "<b>" not in page
    assert "<i>" not in page
