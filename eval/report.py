"""One HTML page that stands alone: figure, table, cost convention, how it was made."""

import html
import re
from collections.abc import Iterable, Sequence

from gmm_ivf.eval.method_spec import DEFAULTS
from gmm_ivf.eval.results import OperatingPoint, commits
from gmm_ivf.eval.summary import Block, has_several_plain, summarize
from gmm_ivf.eval.tables import (
    best_cells,
    best_header,
    best_rows,
    cells,
    explain,
    header,
    ranges,
)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
figure { margin: 1rem 0; } figure svg { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding: .6rem 0; }
th, td { padding: .3rem .6rem; text-align: right; vertical-align: top;
         border-bottom: 1px solid #ddd; }
th { vertical-align: bottom; } td { white-space: nowrap; } small { color: #555; }
figcaption { font-size: .9rem; max-width: 48rem; }
th:first-child, td:first-child { text-align: left; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 9.5rem; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1.5rem; }
code { background: #f2f2f2; padding: .1rem .3rem; overflow-wrap: anywhere; }
"""


def render(points: Sequence[OperatingPoint], svg: str, command: str) -> str:
    """Build the page.

    Parameters
    ----------
    points : sequence of OperatingPoint
        At least one.
    svg : str
        The figure, as matplotlib writes it.
    command : str
        What makes the same page again.

    Returns
    -------
    str
        HTML that loads nothing from anywhere; every name in it is escaped.
    """
    first = points[0]
    title = _text(f"{first.dataset}: recall@{first.key.k} against distance computations")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
{_findings(points, svg)}
<h2>How it was made</h2>
{_how(points, command)}
<h2>Environment</h2>
{_environment(points)}
</body>
</html>
"""


def _findings(points: Sequence[OperatingPoint], svg: str) -> str:
    first = points[0]
    with_best = has_several_plain(points)
    tables = "\n".join(_table(block, with_best) for block in summarize(points))
    tables += _best_table(points)
    notes = "\n".join(f"<p>{_text(sentence)}</p>" for sentence in explain(points))
    return f"""<p>{first.n:,} vectors of {first.d} dimensions, {first.queries:,} queries, metric
{_text(first.metric)}. Every method uses the same vectors, K, seed and training rows of centres,
in one run; an inverted-file index of uncompressed vectors, whose lists are found by comparing the
query with all K centres, where the method's options do not say otherwise.</p>
<figure>{_inline(svg)}
<figcaption>Above: lower is better. Below: how many times fewer distance computations than k-means
at the same recall; above 1 is better. Several seeds: mean, and range as a band.</figcaption>
</figure>
<h2>Table</h2>
<div class="scroll">
{tables}
</div>
{notes}"""


def _text(value: object) -> str:
    return html.escape(str(value))


def _inline(svg: str) -> str:
    """The bare <svg> element, without the prolog and the metadata that name outside addresses."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # In HTML the parser knows both namespaces; the attributes would only look like links.
    return re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)


def _table(block: Block, with_best: bool) -> str:
    rows = [zip(cells(row, with_best), ranges(row, with_best), strict=True) for row in block.rows]
    return _rows(block.title, header(with_best), rows)


def _best_table(points: Sequence[OperatingPoint]) -> str:
    rows = [[(text, "") for text in best_cells(best)] for best in best_rows(points)]
    return "\n" + _rows("Best over all K", best_header(), rows) if rows else ""


def _rows(title: str, names: Sequence[str], rows: Iterable[Iterable[tuple[str, str]]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    body = "\n".join(
        "<tr>" + "".join(_cell(text, below) for text, below in row) + "</tr>" for row in rows
    )
    return (
        f"<table>\n<caption>{_text(title)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    )


def _cell(text: str, below: str) -> str:
    return f"<td>{_text(text)}" + (f"<br><small>{_text(below)}</small>" if below else "") + "</td>"


def _definitions(items: Sequence[tuple[str, object]]) -> str:
    rows = "\n".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in items)
    return f"<dl>\n{rows}\n</dl>"


def _how(points: Sequence[OperatingPoint], command: str) -> str:
    soft = ", ".join(f"{key}={value}" for key, value in DEFAULTS["gmm-soft"].items())
    settings = [
        (
            f"{point.key.method}, nlist {point.key.nlist}, seed {point.key.seed}",
            ", ".join(f"{key} = {_short(value)}" for key, value in sorted(point.settings.items())),
        )
        for point in {(p.key.method, p.key.nlist, p.key.seed): p for p in points}.values()
    ]
    ties = points[0].key.ties
    return (
        f"<p>Made by <code>{_text(command)}</code>. nprobe rises from 1; a cost at a recall is "
        "interpolated, log cost over recall. A result counts when it lies no further than the "
        f"k-th true neighbour (ties: {_text(ties)}, recomputed in float64), each vector once. "
        f"<code>gmm-soft</code> without options means {_text(soft)}. "
        "Every point is a line of results.jsonl.</p>\n<details><summary>Settings of every build"
        f"</summary>{_definitions(settings)}</details>"
    )


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _environment(points: Sequence[OperatingPoint]) -> str:
    stamp = points[-1].environment
    packages = ", ".join(f"{k} {v}" for k, v in stamp.get("packages", {}).items() if v)
    items: list[tuple[str, object]] = [("commit", ", ".join(commits(points)))]
    items += [(name, stamp[name]) for name in ("date", "cpu", "cores", "threads") if name in stamp]
    items += [("gpu", stamp["gpu"])] if stamp.get("gpu") else []
    items += [("python", stamp.get("python", "")), ("packages", packages)]
    items += [("faiss options", stamp.get("faiss_options", "")), ("system", stamp.get("system"))]
    return _definitions(items)
