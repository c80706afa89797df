"""Times whole EM iterations on this GPU: ``python benchmarks/em_iteration.py --help``.

An iteration is prepare, row pass shifted by the last one, accumulation and M-step. "graph" replays
a captured CUDA graph of it. Errors are against float64 on the unrounded data. One JSON line a case.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from unittest import mock

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tune_em

from gmm_ivf.kernels import components as parameters
from gmm_ivf.kernels import em

# Per sample, component and feature; 2 D for full.
FLOOR_FLOP = {"spherical": 4, "tied": 4, "diag": 8}
MATMUL_TFLOPS = 787.0
REG_COVAR = 1e-6


def iteration(samples, components, mode, shift):
    """One EM iteration without a wait for the host."""
    prepared = em.prepare(components, mode)
    rows, stats = em.e_step(samples, prepared, shift=shift)
    # The check for a covariance that is not positive definite waits for the host.
    with mock.patch.object(parameters, "_refuse"):
        return rows, stats, parameters.m_step(stats, components, REG_COVAR)


def captured(samples, components, mode, shift):
    """Replays one iteration from a CUDA graph; None where it cannot be captured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        iteration(samples, components, mode, shift)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            iteration(samples, components, mode, shift)
    except RuntimeError:
        return None
    return graph.replay


def errors(x, components, samples, prepared, rows, n_check: int = 8192) -> dict:
    """Largest and mean error in nats of the log-densities of the first rows, and argmax share."""
    part = x[:n_check].double()
    c = components
    u = c.precisions_cholesky
    log_joint = torch.empty(len(part), len(c.weights), dtype=torch.float64, device=x.device)
    for start in range(0, len(part), 64):
        tile = part[start : start + 64]
        if c.covariance_type == "full":
            diff = (tile[:, None] - c.means).transpose(0, 1)
            d2 = (diff @ u).square_().sum(-1).T
        elif c.covariance_type == "tied":
            d2 = (
                torch.cdist(tile @ u, c.means @ u, compute_mode="donot_use_mm_for_euclid_dist") ** 2
            )
        else:
            scale = u[:, None] if u.ndim == 1 else u
            d2 = ((tile[:, None] - c.means) * scale).square_().sum(-1)
        log_joint[start : start + 64] = c.log_constants() - d2 / 2
    want = torch.logsumexp(log_joint, 1)
    got = em.log_density(samples, rows, prepared)[:n_check].double()
    error = got - want
    return {"nats_max": float(error.abs().max()), "nats_mean": float(error.mean())}


def run(case: str) -> dict:
    """Everything measured about one case "kind:mode:n:k:d"."""
    kind, mode, *sizes = case.split(":")
    n, k, d = map(int, sizes)
    x, components = tune_em.make_case(kind, n, k, d)
    begin = time.perf_counter()
    samples, prepared = em.stage(x, mode), em.prepare(components, mode)
    rows, stats = em.e_step(samples, prepared)
    torch.cuda.synchronize()
    cold = time.perf_counter() - begin
    row = {"kind": kind, "mode": mode, "n": n, "k": k, "d": d, "cold_s": round(cold, 2)}
    row.update(errors(x, components, samples, prepared, rows))
    del x
    shift = rows.norm
    again = em.e_step(samples, prepared, shift=shift)[1]
    twice = em.e_step(samples, prepared, shift=shift)[1]
    row["repeats"] = bool(torch.equal(again.s1, twice.s1) and torch.equal(again.s2, twice.s2))
    row["s0_total_error"] = float(stats.s0.sum() / n - 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    row["e_step_ms"] = tune_em.kernel_ms(lambda: em.e_step(samples, prepared, shift=shift), 0.3)
    row["eager_ms"] = tune_em.kernel_ms(lambda: iteration(samples, components, mode, shift), 0.3)
    # The norms count too: a fit holds those of the last iteration while it makes the next.
    extra = (
        torch.cuda.max_memory_allocated()
        - held
        + 4 * len(shift)
        + samples.values[:, :, -16:].numel() * samples.values.element_size()
    )
    row["extra_mb"] = round(extra / 2**20, 1)
    replay = captured(samples, components, mode, shift)
    row["graph_ms"] = tune_em.kernel_ms(replay, 0.3) if replay else None
    best = row["graph_ms"] or row["eager_ms"]
    floor = FLOOR_FLOP.get(kind, 2 * d) * n * k * d / MATMUL_TFLOPS / 1e9
    row["floor_ms"], row["share_of_floor"] = round(floor, 3), round(floor / best, 3)
    return row


def main(argv: list[str] | None = None) -> None:
    """Run the cases, print a table last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", default=["spherical:fp16:1000000:1024:128"])
    parser.add_argument("--out", type=Path, default=Path("em_iteration.jsonl"))
    parser.add_argument("--budget", type=float, default=300.0, help="seconds in all")
    args = parser.parse_args(argv)
    begin = time.perf_counter()
    found = []
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    about["triton"] = triton.__version__
    with args.out.open("a") as out:
        for case in args.case:
            if time.perf_counter() - begin > args.budget:
                print("out of time before", case)
                break
            try:
                row = run(case)
            except Exception as error:
                print(case, type(error).__name__, str(error)[:300], flush=True)
                continue
            out.write(json.dumps({**row, **about}) + "\n")
            found.append(row)
            torch.cuda.empty_cache()
    for row in found:
        print({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()})


if __name__ == "__main__":
    main()
