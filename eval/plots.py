"""Figures from stored operating points only: cost over recall, and its ratio to k-means."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from gmm_ivf.eval.curves import Curve, curve_cost, curves
from gmm_ivf.eval.method_spec import label
from gmm_ivf.eval.results import OperatingPoint
from gmm_ivf.eval.summary import BASELINE, envelopes, ratio_to_baseline, summarize

# Okabe and Ito's colours, distinct under the common forms of colour blindness; each goes with its
# own marker and line style, so that print in grey still tells the curves apart.
_STYLES = (
    ("#0072B2", "s", "-"),
    ("#D55E00", "^", "-"),
    ("#009E73", "D", "--"),
    ("#CC79A7", "v", "-."),
    ("#56B4E9", "P", ":"),
    ("#E69F00", "X", "--"),
    ("#999999", "<", "-."),
    ("#8C564B", ">", ":"),
    ("#17202A", "p", "--"),
    ("#0072B2", "h", ":"),
    ("#D55E00", "*", "-."),
    ("#009E73", "d", ":"),
    ("#CC79A7", "v", (0, (6, 1))),
    ("#56B4E9", "P", (0, (6, 1))),
    ("#E69F00", "X", ":"),
    ("#999999", "<", (0, (6, 1))),
    ("#8C564B", ">", "-"),
    ("#17202A", "p", "-."),
)
_BASELINE_STYLE = ("#000000", "o", "-")
_LOWEST_RECALL = 0.5
_RECALL_STEP = 0.01
_RATIO_TICKS = (0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 3, 4, 5, 7, 10)

Style = tuple[str, str, Any]


def draw(points: Sequence[OperatingPoint]) -> Any:
    """Draw one column per nlist: cost over recall above, ratio to k-means below.

    Parameters
    ----------
    points : sequence of OperatingPoint
        At least one. Several seeds are averaged at equal nprobe; the ratio shows their range.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        If there are no points.
    """
    if not points:
        raise ValueError("points must hold at least one operating point, got none")
    from matplotlib.figure import Figure

    by_key = curves(points)
    nlists = list(dict.fromkeys(nlist for nlist, _, _ in by_key))
    styles = _styles([method for _, method, _ in by_key])
    with_ratio = BASELINE in styles and len(styles) > 1
    figure = Figure(figsize=(1.2 + 5.6 * len(nlists), 7.6 if with_ratio else 5.2), dpi=130)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(
        1 + with_ratio,
        len(nlists),
        squeeze=False,
        sharex=True,
        sharey="row",
        gridspec_kw={"height_ratios": [1.7, 1] if with_ratio else [1]},
    )
    for column, nlist in enumerate(nlists):
        mine = {(m, s): curve for (k, m, s), curve in by_key.items() if k == nlist}
        _draw_cost(axes[0, column], mine, styles)
        if with_ratio:
            _draw_ratio(axes[1, column], mine, styles)
    _write_names(axes, points, nlists)
    axes[0, 0].set_xlim(_left_limit(points), 1.003)
    named, columns = axes[0, 0].get_legend_handles_labels(), min(4, 2 * len(nlists))
    figure.legend(*named, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def draw_page(points: Sequence[OperatingPoint]) -> Any:
    """Draw two panels: ratios to k-means at the K of most methods, and the best over all K.

    Parameters
    ----------
    points : sequence of OperatingPoint
        At least one, all of one data set.

    Returns
    -------
    matplotlib.figure.Figure
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    by_key = curves(points)
    nlist = max(summarize(points), key=lambda block: len(block.rows)).nlist
    mine = {(m, s): curve for (k, m, s), curve in by_key.items() if k == nlist}
    figure = Figure(figsize=(13, 6.4))
    figure.set_layout_engine("constrained")
    left, right = figure.subplots(1, 2)
    _draw_ratio(left, mine, _styles([method for method, _ in mine]))
    left.set_yscale("log")
    left.yaxis.set_major_locator(FixedLocator(_RATIO_TICKS))
    left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for (family, (x, y)), style in zip(envelopes(points).items(), _STYLES, strict=False):
        right.plot(x, y, color=style[0], linestyle=style[2], linewidth=1.8, label=family)
    _log_costs(right)
    for axes, title in ((left, f"K = {nlist:,}"), (right, "least cost over all K")):
        axes.set_title(f"{points[0].dataset}, {title}", fontsize=11, parse_math=False)
        axes.set_xlabel(f"recall@{points[0].key.k}")
        axes.set_xlim(_left_limit(points), 1.0)
    figure.legend(
        *left.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    right.legend(frameon=False)
    left.set_ylabel("cost of k-means / cost (above 1: fewer)")
    right.set_ylabel("distance computations per query")
    return figure


def _write_names(axes: Any, points: Sequence[OperatingPoint], nlists: Sequence[int]) -> None:
    first = points[0]
    for column, nlist in enumerate(nlists):
        axes[0, column].set_title(
            f"{first.dataset}, N = {first.n:,}, D = {first.d}, K = nlist = {nlist:,}",
            fontsize=11,
            parse_math=False,  # a file name may hold a dollar sign
        )
        axes[-1, column].set_xlabel(f"recall@{first.key.k}")
    axes[0, 0].set_ylabel("distance computations per query\n(scanned, copies counted, + coarse)")
    if len(axes) > 1:
        axes[1, 0].set_ylabel("k-means cost / cost\n(above 1: fewer)")


def save(points: Sequence[OperatingPoint], folder: str | Path, name: str = "recall") -> list[Path]:
    """Write the figure as PNG and SVG into `folder`; the same points give the same SVG bytes."""
    return save_figure(draw(points), Path(folder), name)


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG into `folder`, without dates or random names in the SVG."""
    import matplotlib

    paths = [folder / f"{name}.{suffix}" for suffix in ("png", "svg")]
    with matplotlib.rc_context({"svg.hashsalt": "gmm_ivf"}):
        figure.savefig(paths[0], dpi=130)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _styles(methods: Sequence[str]) -> dict[str, Style]:
    unique = list(dict.fromkeys(methods))
    others = [method for method in unique if method != BASELINE]
    styles = {BASELINE: _BASELINE_STYLE} if BASELINE in unique else {}
    return styles | {m: _STYLES[i % len(_STYLES)] for i, m in enumerate(others)}


def _left_limit(points: Sequence[OperatingPoint]) -> float:
    """Below recall 0.5 nobody operates; above it, start where the first curve does."""
    lowest = min(point.recall for point in points)
    return max(_LOWEST_RECALL, float(np.floor(lowest * 20) / 20)) if lowest < 0.95 else 0.9


def _draw_cost(axes: Any, mine: dict[tuple[str, int], Curve], styles: dict[str, Style]) -> None:
    for method, (colour, marker, line) in styles.items():
        x, y = _mean_curve([curve for (m, _), curve in mine.items() if m == method])
        visible = x >= _LOWEST_RECALL
        if visible.any():
            x, y = x[visible], y[visible]
        axes.plot(
            x,
            y,
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=4,
            linewidth=1.4,
            label=label(method),
        )
    _log_costs(axes)


def _log_costs(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="major")


def _draw_ratio(axes: Any, mine: dict[tuple[str, int], Curve], styles: dict[str, Style]) -> None:
    grid = np.arange(_LOWEST_RECALL, 1.0, _RECALL_STEP)
    seeds = sorted({seed for _, seed in mine})
    for method, (colour, _, line) in styles.items():
        if method == BASELINE:
            axes.axhline(1.0, color=colour, linewidth=1.4, label=label(method))
            continue
        table = np.array(
            [
                [_ratio_or_nan(mine, method, seed, target) for target in grid]
                for seed in seeds
                if (method, seed) in mine
            ]
        )
        if not len(table):
            continue
        mean, name = table.mean(axis=0), label(method)
        axes.plot(grid, mean, color=colour, linestyle=line, linewidth=1.6, label=name)
        if len(table) > 1:
            low, high = table.min(axis=0), table.max(axis=0)
            axes.fill_between(grid, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.grid(alpha=0.3)


def _ratio_or_nan(
    mine: dict[tuple[str, int], Curve], method: str, seed: int, target: float
) -> float:
    ratio = ratio_to_baseline(mine[method, seed], mine.get((BASELINE, seed)), target)
    return np.nan if ratio is None else ratio


def _mean_curve(own: list[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Mean recall and cost over seeds of each search that all seeds made, by rising recall.

    Of searches that differ in more than the number of lists those are left out that cost more, in
    the first seed, than others of the same recall.
    """
    if not own:
        return np.empty(0), np.empty(0)
    by_probe = [{_probe(point): point for point in curve} for curve in own]
    shared = set.intersection(*(set(curve) for curve in by_probe))
    worth = [p for p, point in by_probe[0].items() if p in shared and _is_worth(point, own[0])]
    recall = np.array([fmean(curve[p].recall for curve in by_probe) for p in worth])
    cost = np.array([fmean(c[p].distance_computations for c in by_probe) for p in worth])
    order = np.argsort(recall)
    return recall[order], cost[order]


def _is_worth(point: OperatingPoint, curve: Curve) -> bool:
    """Whether no cheaper search of the curve reads the same recall."""
    least = curve_cost(curve, point.recall)
    return least is None or point.distance_computations <= least * (1 + 1e-9)


def _probe(point: OperatingPoint) -> tuple[int, ...]:
    key = point.key
    return key.nprobe, key.ef_search, key.refine_factor, key.max_codes
