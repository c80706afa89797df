"""The figure of `eval.kernels`, from its rows only: time of an iteration against N, K and D."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gmm_ivf.eval.kernel_cases import Case
from gmm_ivf.eval.kernel_results import Row
from gmm_ivf.eval.plots import save_figure

# Okabe and Ito's colours; marker and line style tell the curves apart in grey.
_STYLES = (
    ("#0072B2", "s", "-"),
    ("#009E73", "D", "-"),
    ("#D55E00", "^", "--"),
    ("#E69F00", "X", "--"),
    ("#CC79A7", "v", "--"),
    ("#56B4E9", "P", "-."),
    ("#000000", "o", ":"),
    ("#999999", "<", ":"),
    ("#882255", ">", ":"),
    ("#44AA99", "*", ":"),
    ("#332288", "p", ":"),
)
_AXES = {"n": "samples N", "k": "components K", "d": "features D"}

Points = list[tuple[int, float]]


def draw(rows: Sequence[Row]) -> Any:
    """One panel for each of N, K and D, the other two as in the case that most cases differ from.

    Parameters
    ----------
    rows : sequence of Row
        Those of fits, of other covariance types, modes and data, and without a time are not drawn.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        If no row has the time of an iteration.
    """
    rows = [row for row in rows if row.job == "iteration" and row.ms is not None]
    if not rows:
        raise ValueError("rows must hold at least one time of an iteration, got none")
    from matplotlib.figure import Figure

    rows = _common(rows)
    base = _base(rows)
    names = list(dict.fromkeys(row.contender for row in rows))
    figure = Figure(figsize=(13.5, 5.4), dpi=130)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, axis in zip(panels, _AXES, strict=True):
        _panel(axes, axis, rows, base, names)
    panels[0].set_ylabel("ms an EM iteration")
    first = rows[0]
    place = first.environment.get("gpu") or first.environment.get("cpu") or first.device
    figure.suptitle(f"{first.kind}, our kernels in {first.mode}, {place}", parse_math=False)
    handles, labels = panels[0].get_legend_handles_labels()
    columns = min(6, len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def save(rows: Sequence[Row], folder: Path, name: str = "kernels") -> list[Path]:
    """Write the figure as PNG and SVG; the same rows give the same SVG bytes."""
    return save_figure(draw(rows), folder, name)


def series(rows: Sequence[Row], axis: str, base: tuple[int, int, int]) -> dict[str, Points]:
    """Times over one of "n", "k", "d" for each contender, the other two as in `base`."""
    fixed = {name: size for name, size in zip(_AXES, base, strict=True) if name != axis}
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.ms is not None and all(getattr(row, a) == v for a, v in fixed.items()):
            found.setdefault(row.contender, {})[getattr(row, axis)] = row.ms
    return {name: sorted(points.items()) for name, points in found.items()}


def _common(rows: Sequence[Row]) -> list[Row]:
    """Rows of the covariance type, mode and data that have the most cases."""

    def of(item: Row | Case) -> tuple[str, str, str]:
        return item.kind, item.mode, item.data

    most, _ = Counter(of(case) for case in {row.case for row in rows}).most_common(1)[0]
    return [row for row in rows if of(row) == most]


def _base(rows: Sequence[Row]) -> tuple[int, int, int]:
    """The sizes that the most cases differ from in one of three at most."""
    sizes = list(dict.fromkeys((row.n, row.k, row.d) for row in rows))

    def near(base: tuple[int, int, int]) -> int:
        return sum(sum(a != b for a, b in zip(base, other, strict=True)) <= 1 for other in sizes)

    return max(sizes, key=near)


def _panel(
    axes: Any, axis: str, rows: Sequence[Row], base: tuple[int, int, int], names: Sequence[str]
) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    curves = series(rows, axis, base)
    hard = {row.contender for row in rows if row.hard}
    for name, (colour, marker, line) in zip(names, _STYLES * 2, strict=False):
        points = curves.get(name, [])
        axes.plot(
            [size for size, _ in points],
            [ms for _, ms in points],
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=5,
            linewidth=1.4,
            label=f"{name} (hard)" if name in hard else name,
        )
    rest = [f"{a.upper()} = {v:,}" for a, v in zip(_AXES, base, strict=True) if a != axis]
    axes.set_title(", ".join(rest), fontsize=10)
    axes.set_xlabel(_AXES[axis])
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = sorted({size for points in curves.values() for size, _ in points})
    axes.set_xticks(sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(alpha=0.3, which="major")
