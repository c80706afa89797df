"""Results of `eval.kernels` as text for people."""

import textwrap
from collections.abc import Sequence

from gmm_ivf.eval.kernel_cases import DATA, TARGETS, Case, Target
from gmm_ivf.eval.kernel_contenders import TRUNCATION
from gmm_ivf.eval.kernel_results import Row

_WIDTH = 118
# The machine that the numbers to reach are for.
_TARGET_GPU = "H200"
_ITERATION = ("iteration", "ms", "TFLOP/s", "of floor", "memory MiB", "nats max", "nats mean")
_ITERATION += ("first s",)
_FIT = ("fit", "seconds", "load", "start", "ms an it.", "TFLOP/s", "of floor", "memory MiB")
_FIT += ("log-lik.", "first s")
_EXPLANATION = (
    "iteration: preparation, E-step and M-step; ms: median, on the kernels of bursts of four as in "
    "a fit (a CUDA graph, each iteration from the one before); those of other packages are the "
    "difference of longer and shorter fits.",
    "TFLOP/s: what no EM iteration goes without (4 N K D flop, diag 8 N K D, full 2 N K D^2; "
    "k-means, marked hard, 2 N K D) over the time; of floor: the same over the rate of a matrix "
    "product in the mode of the case, measured in this run.",
    "memory: peak on the GPU beyond the samples in their storage type; nats: absolute error of "
    "log-densities against float64 on the same parameters and the unrounded samples; first: the "
    "first call in this process, where kernels compile that no case before has needed.",
    "Samples: components whose means have standard deviation "
    + "; ".join(f"{spread:g} and variance {var:g}, {name}" for name, (spread, var) in DATA.items())
    + ". Iterations start from the parameters that the samples were drawn with.",
)
_FIT_EXPLANATION = (
    "fit: from float32 in host memory to parameters, 30 iterations without early stop; median "
    "after the first; load: share of reading, checking and copying the samples; start: of the "
    "k-means start; ms an it.: of the rest, for each iteration; log-lik.: mean over the samples "
    "that it ended with, nats."
)
_TRUNCATED_EXPLANATION = (
    f"triton-truncated: truncation={TRUNCATION:g}; its iteration is a mean over fits of 30 from "
    "parameters near those of the samples, with all that truncation costs: order, choices of "
    "blocks, iterations with all components. TFLOP/s are those of exact EM."
)


def to_text(rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """A block for each case, notes, and what the columns mean.

    Parameters
    ----------
    rows : sequence of Row
    notes : sequence of str
        Sentences under the table, such as what was left out.
    """
    if not rows:
        return "\n".join(["nothing was measured", *_wrap(notes)]) + "\n"
    blocks = [_where(rows[0]), ""]
    for case in dict.fromkeys(row.case for row in rows):
        blocks += _block(case, [row for row in rows if row.case == case])
    sentences = [*notes, *_EXPLANATION]
    if any(row.job == "fit" for row in rows):
        sentences.append(_FIT_EXPLANATION)
    if any(row.visited_share is not None for row in rows):
        sentences.append(_TRUNCATED_EXPLANATION)
    return "\n".join([*blocks, *_wrap(sentences)]) + "\n"


def _where(row: Row) -> str:
    environment = row.environment
    packages = environment.get("packages", {})
    versions = ", ".join(
        f"{name} {packages[name]}" for name in ("torch", "triton") if packages.get(name)
    )
    place = (
        environment.get("gpu") or f"{environment.get('cpu')}, {environment.get('threads')} threads"
    )
    return f"{place}; {versions}; commit {environment.get('commit') or 'unknown'}"


def _block(case: Case, rows: Sequence[Row]) -> list[str]:
    lines = [_head(case, rows)]
    for job, titles in (("iteration", _ITERATION), ("fit", _FIT)):
        mine = [row for row in rows if row.job == job]
        if mine:
            ok = [_iteration(row) if job == "iteration" else _fit(row) for row in mine]
            lines += _align([titles, *ok])
            lines += [f"  {_name(row)}: {note}" for row in mine if (note := _note(row))]
    return [*lines, *_verdicts(case, rows), ""]


def _head(case: Case, rows: Sequence[Row]) -> str:
    text = f"{case.kind} {case.mode}, N={case.n:,} K={case.k:,} D={case.d}, {case.data}"
    rates = [row.matmul_tflops for row in rows if row.matmul_tflops]
    if rates:
        floor = case.flop / rates[0] * 1e-9
        text += f": floor {_number(floor)} ms an iteration at {_number(rates[0])} TFLOP/s"
    return text


def _name(row: Row) -> str:
    return f"{row.contender} (hard)" if row.hard else row.contender


def _note(row: Row) -> str:
    """What has to be known of a row."""
    parts = [row.reason] if row.reason else []
    if row.cold and row.first_seconds is not None:
        parts.append(f"the first of this process took {_number(row.first_seconds)} s")
    if row.visited_share is not None:
        parts.append(
            f"{_percent(row.visited_share)} of the components visited, "
            f"{row.exact_iterations} of 30 iterations with all"
        )
    if row.likelihood_loss is not None:
        parts.append(f"exact EM ends {row.likelihood_loss:+.1e} nats a sample higher")
    if row.repeats is False:
        parts.append("a second time gave other bits")
    return "; ".join(parts)


def _iteration(row: Row) -> tuple[str, ...]:
    if row.status != "ok":
        return (_name(row), row.status, *["-"] * (len(_ITERATION) - 2))
    return (
        _name(row),
        _number(row.ms),
        _number(row.tflops),
        _percent(row.share_of_floor),
        _number(row.extra_mb),
        _error(row.nats_max),
        _error(row.nats_mean),
        _number(row.first_seconds),
    )


def _fit(row: Row) -> tuple[str, ...]:
    if row.status != "ok":
        return (_name(row), row.status, *["-"] * (len(_FIT) - 2))
    return (
        _name(row),
        _number(None if row.ms is None else row.ms / 1e3),
        _percent(row.load_share),
        _percent(row.start_share),
        _number(row.iteration_ms),
        _number(row.tflops),
        _percent(row.share_of_floor),
        _number(row.extra_mb),
        "-" if row.log_likelihood is None else f"{row.log_likelihood:.6f}",
        _number(row.first_seconds),
    )


def _verdicts(case: Case, rows: Sequence[Row]) -> list[str]:
    """How the kernels stand to the numbers to reach, on the machine that they are for."""
    target = TARGETS.get(case)
    if target is None or _TARGET_GPU not in str(rows[0].environment.get("gpu")):
        return []
    lines = []
    for row in rows:
        found = _verdicts_of(row, target) if row.ms is not None else []
        if found:
            lines.append(f"  {_name(row)} {row.job}: {'; '.join(found)}")
    return lines


def _verdicts_of(row: Row, target: Target) -> list[str]:
    assert row.ms is not None
    if row.contender == "triton-truncated" and row.job == "iteration" and target.truncated:
        return [_verdict("ms", row.ms, *target.truncated)]
    if row.contender != "triton":
        return []
    if row.job == "fit":
        seconds = target.fit_seconds
        return [_verdict("s a fit", row.ms / 1e3, seconds)] if seconds else []
    found = [_verdict("ms", row.ms, target.reach, target.aim)]
    if target.extra_mb and row.extra_mb is not None:
        found.append(_verdict("MiB", row.extra_mb, target.extra_mb))
    return found


def _verdict(unit: str, value: float, reach: float, aim: float | None = None) -> str:
    text = f"to reach {reach:g} {unit}" + (f", aim {aim:g}" if aim else "")
    if aim is not None and value <= aim:
        return f"{text}: aim met"
    return f"{text}: reached" if value <= reach else f"{text}: missed by {value / reach - 1:.0%}"


def _number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _wrap(sentences: Sequence[str]) -> list[str]:
    return [line for s in sentences for line in textwrap.wrap(s, _WIDTH, break_on_hyphens=False)]


def _align(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
