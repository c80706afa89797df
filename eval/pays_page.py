"""The text of the page "When soft assignment pays": every number in it comes from the points."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

from gmm_ivf.eval.method_spec import RESPONSIBILITY, parse_method
from gmm_ivf.eval.results import OperatingPoint, commits
from gmm_ivf.eval.summary import (
    BASELINE,
    BEST_TARGETS,
    FAISS,
    TARGETS,
    Best,
    Block,
    Row,
    Spread,
    bests,
    has_several_plain,
    summarize,
)
from gmm_ivf.eval.tables import best_cells, best_header, explain, is_busy

# A gain below this at the first recall is not worth the bytes and the training of a soft layout.
_PAYS = 1.05
_AT = [TARGETS.index(target) for target in BEST_TARGETS]
_HEAD = """\
# When soft assignment pays

An inverted file stores a vector in the list of its nearest centre. Soft assignment stores those
near a boundary in further lists too (`layout="lists"`), or stores each once between two centres
(`layout="cells"`). Either costs something: bytes, a ranking, a longer training. This page says
what they gave on real vectors, at the same number of lists K, and against the best that FAISS
reaches with any K. It is written by

```sh
{command}
```

from the operating points in those files, its figures too; nothing in it is typed by hand but the
words.

Cost is distance computations per query: vectors scanned, every copy counted, plus comparisons
with list centres, plus other work in units of one distance. `x` is the cost of k-means IVF at the
same K over this cost, at the same recall@{k}: above 1 means less work. `x best` is the same
against the best of FAISS's IVF over all K on this page, flat or HNSW coarse quantizer."""
_KEY = "Ratios to k-means IVF at the same K, at recall .90 / .95; the best row of each kind:"
_TAIL = """\
## On your own vectors

The answer depends on the data, K, and how much memory a copy costs, so measure:

```sh
python -m eval.recall --dataset my_vectors.npy --method kmeans \\
  --method kmeans:coarse=hnsw32,nlist=8192 --method gmm --method gmm-soft \\
  --method kmeans-soft:rule=soar
```

Compare with a larger K under an HNSW coarse quantizer first: it costs training time only. What
soft assignment adds on top, at the same bytes, is the `x best` column of your own table."""


def figure_name(page: str, points: Sequence[OperatingPoint]) -> str:
    """File name of a data set's figure."""
    return f"{page}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', points[0].dataset)}.png"


def page(name: str, sets: Sequence[Sequence[OperatingPoint]], command: str) -> str:
    """The page in Markdown.

    Parameters
    ----------
    name : str
        Of the page, which its figures share.
    sets : sequence of sequences of OperatingPoint
        Those of each data set; at least one point each.
    command : str
        What makes the page again.
    """
    k = sets[0][0].key.k
    parts = [_HEAD.format(command=command, k=k), "## In short", _KEY, *_short(sets)]
    for points in sets:
        parts += _section(name, points)
    everything = [point for points in sets for point in points]
    parts += ["## How to read the tables", *map(_wrapped, explain(everything))]
    return "\n\n".join([*parts, _TAIL]) + "\n"


def main_block(points: Sequence[OperatingPoint]) -> Block:
    """The K at which most methods were measured."""
    return max(summarize(points), key=lambda block: len(block.rows))


def _short(sets: Sequence[Sequence[OperatingPoint]]) -> list[str]:
    bullets = []
    for points in sets:
        block, first = main_block(points), points[0]
        where = f"{first.dataset}, {first.n:,} x {first.d}, K = {block.nlist:,}"
        facts = [
            _verdict("Copies", _best_of(block, _is_soft)),
            _verdict("Cells", _best_of(block, _is_cells)),
            _larger_k(points, block),
            _sentence("FAISS's codes, ranked again", _best_of(block, _is_coded)),
            _overall(points),
        ]
        bullets.append(f"- **{where}.** {' '.join(fact for fact in facts if fact)}")
    return ["\n".join(bullets)]


def _verdict(what: str, row: Row | None) -> str:
    """Whether something pays at the same K, by its best row and the worst seed of that."""
    ratio = row.ratios[_AT[0]] if row else None
    if row is None or ratio is None:
        return ""
    gain = ratio.low
    pays = "pay" if gain >= _PAYS else "hardly pay" if gain > 1 else "do not pay"
    return _sentence(f"{what} {pays} at the same K", row)


def _larger_k(points: Sequence[OperatingPoint], block: Block) -> str:
    """What FAISS gains over the baseline of a block by another K and coarse quantizer."""
    base = next((row for row in block.rows if row.method == BASELINE), None)
    found = [best for best in bests(points) if (best.family, best.by) == (FAISS, "cost")]
    if base is None or not found or not has_several_plain(points):
        return ""
    gains = [f"{1 / ratio.mean:.2f}x" if ratio else "-" for ratio in base.to_best]
    row = found[0].row
    return (
        f"FAISS's IVF with another K instead: {' / '.join(gains)} (`{row.method}`, K = "
        f"{row.nlist:,}, {_storage(row)})."
    )


def _overall(points: Sequence[OperatingPoint]) -> str:
    """Best of ours over all K against best of FAISS over all K."""
    if not has_several_plain(points):
        return ""
    ours = [best for best in bests(points) if best.by == "cost" and best.family.startswith("ours")]
    texts = []
    for target in BEST_TARGETS:
        known = [best for best in ours if best.target == target and best.ratio]
        if known:
            top = max(known, key=lambda best: best.ratio.mean if best.ratio else 0.0)
            texts.append(f"{_times(top.ratio)} at {target:.2f}")
    if not texts:
        return ""
    return f"Our best over all K against FAISS's best over all K: {', '.join(texts)}."


def _section(name: str, points: Sequence[OperatingPoint]) -> list[str]:
    first, block = points[0], main_block(points)
    title = f"## {first.dataset}: {first.n:,} vectors of {first.d} dimensions"
    figure = (
        f"![cost over recall on {first.dataset}]({figure_name(name, points)})\n\n"
        f"Left: cost of k-means over cost of each method at K = {block.nlist:,}; above 1 is less "
        "work, a band is the range of several seeds. Right: the least cost over all K by kind of "
        "index."
    )
    timed = not is_busy(points)
    tables = [
        part for each in summarize(points) for part in (f"**{each.title}**", _table(each, timed))
    ]
    # Seconds of a machine that others worked on would be taken for a promise.
    found = [best for best in bests(points) if best.by == "cost" or timed]
    best = [_best_table(found)] if has_several_plain(points) else []
    return [title, figure, *_findings(block), *tables, *best, _how(points)]


def _findings(block: Block) -> list[str]:
    """What the rows at one K say, a sentence for each question."""
    hard = _best_of(block, lambda row: row.method == "gmm")
    posterior = _best_of(block, lambda row: _is_soft(row) and _rule(row) == RESPONSIBILITY)
    geometry = _best_of(block, lambda row: _is_soft(row) and _rule(row) != RESPONSIBILITY)
    lines = [
        _sentence("The means of the mixture instead of those of k-means, every vector once", hard),
        _sentence("Copies where the posterior says so", posterior),
        _sentence("Copies where the second centre lies best", geometry),
        _sentence("Cells", _best_of(block, _is_cells)),
        _sentence("The rival: FAISS's codes, ranked again", _best_of(block, _is_coded)),
        _means_compared(block),
    ]
    text = "\n".join(f"- {line}" for line in lines if line)
    return [f"At K = {block.nlist:,}, recall .90 / .95:", text] if text else []


def _sentence(what: str, row: Row | None) -> str:
    return f"{what}: {_pair(row)} (`{row.method}`, {_storage(row)})." if row else ""


def _means_compared(block: Block) -> str:
    """The same rule on both kinds of centres."""
    rows = {row.method: row for row in block.rows}
    texts = []
    for method, row in rows.items():
        spec = parse_method(method)
        if spec.name != "kmeans-soft":
            continue
        rule = spec.get("rule", "air")
        twin = rows.get(f"gmm-soft:rule={rule}")
        if twin is not None and method in ("kmeans-soft", f"kmeans-soft:rule={rule}"):
            texts.append(f"{rule} {_pair(twin)} on the mixture's, {_pair(row)} on those of k-means")
    return f"The same rule on either centres: {'; '.join(texts)}." if texts else ""


def _best_of(block: Block, wanted: Callable[[Row], bool]) -> Row | None:
    """The row of largest ratio to k-means at the first of BEST_TARGETS."""
    rows = [row for row in block.rows if wanted(row) and row.ratios[_AT[0]]]
    return max(rows, key=lambda row: _mean(row.ratios[_AT[0]]), default=None)


def _mean(spread: Spread | None) -> float:
    return spread.mean if spread else 0.0


def _is_coded(row: Row) -> bool:
    spec = parse_method(row.method)
    return spec.name == BASELINE and bool(spec.get("refine"))


def _is_soft(row: Row) -> bool:
    return _is_ours(row, "-soft")


def _is_cells(row: Row) -> bool:
    return _is_ours(row, "-cells")


def _is_ours(row: Row, kind: str) -> bool:
    """Whether a row is of one of our layouts, over uncompressed vectors."""
    spec = parse_method(row.method)
    return spec.name.endswith(kind) and spec.get("codec", "Flat") == "Flat"


def _rule(row: Row) -> str:
    spec = parse_method(row.method)
    return spec.get("rule", "air" if spec.name == "kmeans-soft" else RESPONSIBILITY)


def _pair(row: Row) -> str:
    return " / ".join(_times(row.ratios[i]) for i in _AT)


def _storage(row: Row) -> str:
    return f"{row.entries_per_vector:.2f} entries and {row.bytes_per_vector:,.0f} bytes a vector"


def _times(ratio: Spread | None) -> str:
    """A ratio, with its range where seeds differ."""
    if ratio is None:
        return "-"
    spread = "" if ratio.low == ratio.high else f" ({ratio.low:.2f}-{ratio.high:.2f})"
    return f"{ratio.mean:.2f}x{spread}"


def _markdown(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _table(block: Block, timed: bool) -> str:
    names = ["method", "entries", "bytes"]
    names += [f"cost at {target:.2f}" for target in BEST_TARGETS]
    names += [f"x at {target:.2f}" for target in BEST_TARGETS]
    names += [f"x best {target:.2f}" for target in BEST_TARGETS]
    names += ["QPS at 0.90", "build s"] if timed else []
    return _markdown(names, [_cells(row, timed) for row in block.rows])


def _cells(row: Row, timed: bool) -> list[str]:
    def cost(i: int) -> str:
        spread = row.costs[i]
        return "-" if spread is None else f"{'~' * row.is_rough[i]}{spread.mean:,.0f}"

    speed = row.queries_per_second
    times = [
        "-" if speed is None else f"{speed.mean:,.0f}",
        f"{row.train_seconds + row.add_seconds:,.1f}",
    ]
    return [
        f"`{row.method}`",
        f"{row.entries_per_vector:.2f}",
        f"{row.bytes_per_vector:,.0f}",
        *map(cost, _AT),
        *(_times(row.ratios[i]) for i in _AT),
        *map(_times, row.to_best),
        *(times if timed else []),
    ]


def _best_table(rows: Sequence[Best]) -> str:
    text = _markdown(best_header(), [best_cells(best) for best in rows])
    return f"**The best over all K**, by cost and by speed, `x` against {FAISS}\n\n{text}"


def _how(points: Sequence[OperatingPoint]) -> str:
    stamp = points[-1].environment
    machine = f"{stamp.get('cores')} cores of {stamp.get('cpu')}"
    machine += f", training on {stamp['gpu']}" if stamp.get("gpu") else ""
    threads = "/".join(map(str, sorted({point.key.threads for point in points})))
    return _wrapped(
        f"Measured on {machine}, {threads} threads, {points[0].queries:,} queries, at commit "
        f"{', '.join(commits(points))}."
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 98, break_long_words=False, break_on_hyphens=False)
