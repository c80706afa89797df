"""Times the EM kernels for block sizes on this GPU: ``python benchmarks/tune_em.py --help``.

Programs are compiled by several processes first (Triton keeps them on disk) and then timed one at a
time. Each result is a JSON line; ``--save`` also writes the winners where the kernels read them.
"""

import argparse
import datetime
import json
import multiprocessing
import sys
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gmm_ivf.eval.environment import stamp, usable_cores  # noqa: E402 - after the path
from gmm_ivf.eval.kernel_cases import Case, draw  # noqa: E402
from gmm_ivf.kernels import em, tuning  # noqa: E402
from gmm_ivf.kernels.components import Components  # noqa: E402
from gmm_ivf.kernels.operands import is_fused, padded_features  # noqa: E402

PRODUCTS = {  # products per sample, component and feature of each job
    "spherical": {"row": 1, "shifted": 1, "moment": 2, "logit": 1, "sum": 2},
    "tied": {"row": 1, "shifted": 1, "moment": 2, "logit": 1, "sum": 2},
    "diag": {"row": 2, "shifted": 2, "moment": 4, "logit": 2, "sum": 4},
}


def make_case(kind: str, n: int, k: int, d: int) -> tuple[torch.Tensor, Components]:
    """The samples of `eval.kernels` and the mixture they come from, on the GPU."""
    return draw(Case(kind, "fp16", n, k, d), torch.device("cuda"))


def launcher(job, samples, prepared, rows, config):
    """A call of one job with a configuration; "sum" includes the logits with theirs."""
    configs = {"row" if job == "shifted" else job: config}
    if job == "moment":
        return lambda: em.moments(samples, rows, prepared, configs)
    if job == "sum":
        return lambda: em.e_step(samples, prepared, configs=configs)
    shift = rows.norm if job == "shifted" else None
    return lambda: em.row_pass(samples, prepared, shift=shift, configs=configs)


def compile_one(task) -> str:
    """Compile and run one program on a small case, in a worker process; the error, if any."""
    job, kind, mode, k, d, config = task
    try:
        x, components = make_case(kind, 1 << 15, k, d)
        samples, prepared = em.stage(x, mode), em.prepare(components, mode)
        rows = em.Rows(samples.empty_rows().zero_())
        launcher(job, samples, prepared, rows, config)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:90]}"
    return ""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", default=["spherical:fp16:1000000:1024:128"])
    parser.add_argument("--jobs", nargs="+", help="default: those of the case")
    parser.add_argument(
        "--config", nargs="+", help="N,K,WARPS,STAGES[,WAVES[,REGISTERS]]; default: the candidates"
    )
    parser.add_argument("--budget", type=float, default=400.0, help="seconds in all")
    parser.add_argument("--out", type=Path, default=Path("tune_em.jsonl"))
    parser.add_argument("--save", action="store_true", help="write kernels/tuned/<gpu>.json")
    return parser.parse_args(argv)


def tasks_of(args: argparse.Namespace) -> list[tuple[tuple, int]]:
    """Every (job, kind, mode, k, d, configuration) to time, with the number of samples."""
    shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    found = []
    for case in args.case:
        kind, mode, *sizes = case.split(":")
        n, k, d = map(int, sizes)
        fused = is_fused(kind, mode, d)
        for job in args.jobs or (["shifted", "moment"] if fused else ["logit", "sum"]):
            name = "row" if job == "shifted" else job
            problem = tuning.Problem(
                name, kind, mode, k, padded_features(d, is_fused(kind, mode, d))
            )
            configs = tuning.candidates(problem, shared)
            if args.config:
                configs = [tuning.Config(*map(int, c.split(","))) for c in args.config]
            found += [((job, kind, mode, k, d, c), n) for c in configs]
    return found


def measure(tasks, errors, deadline: float):
    """Time the programs that compiled, case by case; yields rows."""
    state = (None, None, None, None)
    for (task, n), error in zip(tasks, errors, strict=True):
        job, kind, mode, k, d, config = task
        row = {"job": job, "kind": kind, "mode": mode, "n": n, "k": k, "d": d}
        row["config"] = list(astuple(config))
        if error or time.perf_counter() > deadline:
            yield {**row, "error": error or "out of time"}
            continue
        if state[0] != (kind, mode, n, k, d):
            state = (None, None, None, None)
            x, components = make_case(kind, n, k, d)
            samples, prepared = em.stage(x, mode), em.prepare(components, mode)
            del x
            state = ((kind, mode, n, k, d), samples, prepared, em.row_pass(samples, prepared))
        _, samples, prepared, rows = state
        call = launcher(job, samples, prepared, rows, config)
        ms: Any = triton.testing.do_bench_cudagraph(call, return_mode="median")
        flop = 2.0 * n * k * d * PRODUCTS[kind][job]
        yield {**row, "ms": round(ms, 4), "tflops": round(flop / ms / 1e9, 1)}


def save(rows: list[dict]) -> None:
    """Write the fastest configuration of each problem; the shifted row pass decides for rows."""
    best: dict[tuning.Problem, tuple[tuning.Config, float]] = {}
    for row in rows:
        if "ms" not in row or row["job"] == "row":
            continue
        job = "row" if row["job"] == "shifted" else row["job"]
        block_d = padded_features(row["d"], is_fused(row["kind"], row["mode"], row["d"]))
        problem = tuning.Problem(job, row["kind"], row["mode"], row["k"], block_d)
        if problem not in best or row["ms"] < best[problem][1]:
            best[problem] = (tuning.Config(*row["config"]), row["ms"])
    gpu = torch.cuda.get_device_name()
    about = {
        "gpu": gpu,
        "date": datetime.date.today().isoformat(),
        "triton": triton.__version__,
        "torch": torch.__version__,
    }
    (ROOT / "kernels" / "tuned").mkdir(exist_ok=True)
    tuning.save_winners(ROOT / "kernels" / "tuned" / tuning.file_name(gpu), best, about)


def report(rows: list[dict]) -> None:
    """Print the ten best configurations of each job and case."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        case = tuple(row[key] for key in ("job", "kind", "mode", "n", "k", "d"))
        groups.setdefault(case, []).append(row)
    for case in sorted(groups):
        print(*case)
        for row in sorted(groups[case], key=lambda r: r.get("ms", 1e9))[:10]:
            print("   ", row["config"], row.get("ms"), row.get("tflops"), row.get("error", ""))


def main(argv: list[str] | None = None) -> None:
    """Compile, time, print the best ten of each job last."""
    args = parse(argv)
    begin = time.perf_counter()
    tasks = tasks_of(args)
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        errors = pool.map(compile_one, [task for task, _ in tasks], chunksize=1)
    print(f"compiled {len(tasks)} programs in {time.perf_counter() - begin:.0f} s", flush=True)
    rows, about = [], {"triton": triton.__version__, **stamp(usable_cores(), "cuda")}
    with args.out.open("a") as out:
        for row in measure(tasks, errors, begin + args.budget):
            rows.append(row | about)
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
    if args.save:
        save(rows)
    report(rows)


if __name__ == "__main__":
    main()
