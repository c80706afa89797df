"""Results of `eval.kernels` as text for people."""

import textwrap
from collections.abc import Sequence

from gmm_ivf.eval.kernel_cases import TARGETS, VARIANCE, Case
from gmm_ivf.eval.kernel_results import Row

_WIDTH = 118
# The machine that the numbers to reach are for.
_TARGET_GPU = "H200"
_ITERATION = ("iteration", "ms", "graph ms", "TFLOP/s", "of floor", "memory MiB")
_ITERATION += ("nats max", "nats mean", "first s")
_FIT = ("fit", "seconds", "start", "TFLOP/s", "of floor", "memory MiB", "log-lik.", "first s")
_EXPLANATION = (
    "iteration: preparation, E-step and M-step; ms: median, launched from Python (events on a GPU, "
    "cold L2 cache); graph ms: the same from a CUDA graph, - where it cannot be captured or takes "
    "over 50 ms. Those of other packages are the difference of longer and shorter fits.",
    "TFLOP/s: what no EM iteration goes without (4 N K D flop, diag 8 N K D, full 2 N K D^2; "
    "k-means, marked hard, 2 N K D) over the better time; of floor: the same over the rate of a "
    "matrix product in the mode of the case, measured in this run.",
    "memory: peak on the GPU beyond the samples in their storage type; nats: absolute error of "
    "log-densities against float64 on the same parameters and the unrounded samples; first: the "
    "first call in this process, where kernels compile that no case before has needed.",
    f"Samples: components of variance {VARIANCE}, means of standard deviation 1; iterations start "
    "from the parameters that they were drawn with.",
)
_FIT_EXPLANATION = (
    "fit: from float32 in host memory to parameters, start included, without early stop; median "
    "after the first; log-lik.: mean over the samples that it ended with, nats."
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
            lines += [f"  {_name(row)}: {row.reason}" for row in mine if row.reason]
    return [*lines, *_verdicts(case, rows), ""]


def _head(case: Case, rows: Sequence[Row]) -> str:
    text = f"{case.kind} {case.mode}, N={case.n:,} K={case.k:,} D={case.d}"
    rates = [row.matmul_tflops for row in rows if row.matmul_tflops]
    if rates:
        floor = case.flop / rates[0] * 1e-9
        text += f": floor {_number(floor)} ms an iteration at {_number(rates[0])} TFLOP/s"
    return text


def _name(row: Row) -> str:
    return f"{row.contender} (hard)" if row.hard else row.contender


def _iteration(row: Row) -> tuple[str, ...]:
    if row.status != "ok":
        return (_name(row), row.status, *["-"] * (len(_ITERATION) - 2))
    return (
        _name(row),
        _number(row.ms),
        _number(row.graph_ms),
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
        _percent(row.start_share),
        _number(row.tflops),
        _percent(row.share_of_floor),
        _number(row.extra_mb),
        "-" if row.log_likelihood is None else f"{row.log_likelihood:.4f}",
        _number(row.first_seconds),
    )


def _verdicts(case: Case, rows: Sequence[Row]) -> list[str]:
    """How the kernels stand to the numbers to reach, on the machine that they are for."""
    target = TARGETS.get(case)
    if target is None or _TARGET_GPU not in str(rows[0].environment.get("gpu")):
        return []
    verdicts = []
    for row in rows:
        if row.contender != "triton" or row.best_ms is None:
            continue
        if row.job == "iteration":
            verdicts.append(_verdict("ms", row.best_ms, target.reach, target.aim))
            if target.extra_mb and row.extra_mb is not None:
                verdicts.append(_verdict("MiB", row.extra_mb, target.extra_mb))
        elif target.fit_seconds:
            verdicts.append(_verdict("s a fit", row.best_ms / 1e3, target.fit_seconds))
    lines = [f"  triton: {'; '.join(verdicts)}"] if verdicts else []
    if any(row.repeats is False and row.contender == "triton" for row in rows):
        lines.append("  triton: a second iteration gave other bits")
    return lines


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
