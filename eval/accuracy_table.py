"""Results of `eval.precision` as text for people."""

import textwrap
from collections.abc import Sequence

from gmm_ivf.eval.accuracy import HALF_MODES, Problem, Result
from gmm_ivf.kernels.dispatch import ACCURACY

_WIDTH = 118
_TITLES = ("mode", "D", "K", "nats", "expected", "worst row", "agreement", "weights", "means")
_TITLES += ("covariances", "verdict")


def to_text(results: Sequence[Result]) -> str:
    """A table for each covariance type, what "auto" chose, and what the columns mean."""
    if not results:
        return "no results yet\n"
    blocks = []
    for kind in dict.fromkeys(result.problem.covariance_type for result in results):
        mine = [result for result in results if result.problem.covariance_type == kind]
        blocks += [_head(kind, mine), *_align([_TITLES, *_rows(mine)]), "", *_auto(mine), ""]
    for sentence in _explain(results):
        blocks += textwrap.wrap(sentence, _WIDTH, break_on_hyphens=False)
    return "\n".join(blocks) + "\n"


def _head(kind: str, results: Sequence[Result]) -> str:
    sets = ", ".join(dict.fromkeys(_name(result.problem) for result in results))
    ran = [result for result in results if result.measured] or results
    where = ", ".join(dict.fromkeys(f"{result.backend} on {result.device}" for result in ran))
    sizes = sorted({result.problem.n for result in results})
    many = " to ".join(f"{n:,}" for n in dict.fromkeys((sizes[0], sizes[-1])))
    return f"{kind}, {where}, {many} samples; the worst of: {sets}"


def _name(problem: Problem) -> str:
    return problem.dataset + (f"{problem.shift:+g}" if problem.shift else "")


def _rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row a mode, D and K, each number the worst over the data sets."""
    groups: dict[tuple[str, int, int], list[Result]] = {}
    for result in results:
        key = (result.mode, result.problem.d, result.problem.k)
        groups.setdefault(key, []).append(result)
    modes = list(dict.fromkeys(result.mode for result in results))
    order = sorted(groups, key=lambda key: (modes.index(key[0]), *key[1:]))
    return [(key[0], *map(str, key[1:]), *_cells(groups[key])) for key in order]


def _cells(group: Sequence[Result]) -> tuple[str, ...]:
    measured = [result.measured for result in group if result.measured]
    if not measured:
        return ("-",) * 7 + (_verdict(group),)

    def worst(name: str) -> str:
        return f"{max(getattr(m, name) for m in measured):.1e}"

    return (
        worst("nats"),
        f"{max(result.expected_nats for result in group):.1e}",
        worst("worst_nats"),
        f"{min(m.agreement for m in measured):.3%}",
        worst("weights"),
        worst("means"),
        worst("covariances"),
        _verdict(group),
    )


def _verdict(group: Sequence[Result]) -> str:
    """ "ok", or what is wrong on which sets."""
    parts = []
    for word in ("missed", "avoided", "refused"):
        bad = [result for result in group if result.verdict == word]
        if bad:
            what = ", ".join(dict.fromkeys(name for result in bad for name in result.misses))
            sets = ", ".join(_name(result.problem) for result in bad)
            parts.append(f"{word}: {sets}" + (f" ({what})" if what else ""))
    return "; ".join(parts) or "ok"


def _auto(results: Sequence[Result]) -> list[str]:
    """What "auto" took, here and of the half modes, with the exceptions by name."""
    lines = []
    for title, attribute in (
        ('precision="auto" took here', "auto"),
        (f"of {' and '.join(HALF_MODES)} it takes", "auto_half"),
    ):
        taken: dict[str, dict[str, None]] = {}
        for result in results:
            place = f"{_name(result.problem)} D={result.problem.d} K={result.problem.k}"
            taken.setdefault(getattr(result, attribute), {})[place] = None
        common = max(taken, key=lambda mode: len(taken[mode]))
        text = f"{title}: {common}" + (" everywhere" if len(taken) == 1 else "")
        for mode, places in taken.items():
            if mode != common:
                text += f"; {mode} on {', '.join(places)}"
        lines += textwrap.wrap(text, _WIDTH, break_on_hyphens=False)
    refusals = dict.fromkeys((result.mode, result.refusal) for result in results if result.refusal)
    return lines + [f"{mode} refused: {reason}" for mode, reason in refusals]


def _explain(results: Sequence[Result]) -> list[str]:
    limits: dict[str, list[str]] = {}
    for mode in dict.fromkeys(result.mode for result in results):
        bounds = ACCURACY[mode]
        text = f"{bounds.nats:g} nats, {bounds.agreement:.2%}, {bounds.parameters:g}"
        limits.setdefault(text, []).append(mode)
    return [
        "nats: mean absolute error of the log-density of a sample; expected: what the choice of a "
        "precision goes by; worst row: largest error of a sample; agreement: samples with the same "
        "likeliest component; weights, means, covariances: relative Frobenius error after one EM "
        "step, components of weight above 1/(10 K), means about the centre.",
        "Limits: " + "; ".join(f"{', '.join(m)}: {text}" for text, m in limits.items()) + ". "
        'avoided: beyond the limits, but "auto" expects it and takes another mode there.',
    ]


def _align(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
