"""Clocks of `eval.kernels`: medians, first calls, memory, and the matmul rate."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

# Timed seconds of a median by the wall clock, and bounds of the number of calls.
_BENCH_SECONDS = 0.1
_FEWEST_CALLS, _MOST_CALLS = 3, 50
# Fewer calls may do where they take so long.
_LONG_SECONDS = 2.0
# Calls that take longer gain nothing from events.
_SLOW_SECONDS = 0.25
_MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
_MATMUL_TYPES = {
    "fp16": torch.float16,
    "fp16x3": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


class Budget:
    """Seconds that may be spent, counted from the start.

    Parameters
    ----------
    seconds : float
    clock : callable, optional
        Seconds since some moment.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Seconds left; negative when overdrawn."""
        return self._end - self._clock()

    def part(self, parts: int) -> "Budget":
        """An equal share of what is left, for the first of so many parts."""
        return Budget(self.left() / parts, self._clock)


def synchronize(device: torch.device) -> None:
    """Wait for all work on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock seconds of one call, its work on the GPU included."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - begin


def median_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Median milliseconds of a call that has run before.

    On a GPU by `triton.testing.do_bench`: a tenth of a second of calls or five of them, queued so
    that it does not wait for the host, each after its L2 cache was cleared. Otherwise by the wall
    clock.
    """
    once = seconds_of(call, device)
    if device.type != "cuda" or once > _SLOW_SECONDS:
        return wall_ms(call, device, once)
    # Where there is no GPU, triton may be missing.
    from triton.testing import do_bench

    median: Any = do_bench(call, rep=max(100, int(5e3 * once)), return_mode="median")
    return median


def wall_ms(call: Callable[[], Any], device: torch.device, once: float | None = None) -> float:
    """Median milliseconds of a call by the wall clock; `once` are the seconds of a call so far."""
    times = [seconds_of(call, device) if once is None else once]
    while len(times) < _MOST_CALLS and sum(times) < _LONG_SECONDS:
        if len(times) >= _FEWEST_CALLS and sum(times) >= _BENCH_SECONDS:
            break
        times.append(seconds_of(call, device))
    return statistics.median(times) * 1e3


def allocated(device: torch.device) -> int:
    """Bytes that tensors hold on a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(call: Callable[[], Any], device: torch.device) -> int | None:
    """Most bytes that tensors held on a GPU during a call; None on a CPU."""
    if device.type != "cuda":
        call()
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Precision of torch's float32 products: "highest" is IEEE float32, "high" is TF32."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


@cache
def matmul_tflops(mode: str, device: torch.device) -> float:
    """Rate of a large square product in the number format of a mode, TFLOP/s.

    fp16x3 counts one of its three products. A CPU has float32 and float64 only.
    """
    dtype = _MATMUL_TYPES[mode]
    if device.type != "cuda" and dtype != torch.float64:
        dtype = torch.float32
    size = _MATMUL_SIZE.get(device.type, 1024)
    generator = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, size, size, generator=generator, device=device).to(dtype)
    out = torch.empty_like(a)
    with float32_products("high" if mode == "tf32" else "highest"):
        torch.mm(a, b, out=out)
        return 2e-9 * size**3 / median_ms(lambda: torch.mm(a, b, out=out), device)
