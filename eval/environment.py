"""What a measurement ran on, and the one place where thread pools are set."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gmm_ivf.eval.commands import let_idle_threads_sleep

_PACKAGES = ("gmm-ivf", "numpy", "torch", "scikit-learn", "scipy", "h5py")


def require_faiss() -> Any:
    """Import faiss.

    Raises
    ------
    ImportError
        In one sentence that names the two wheels, if faiss is missing.
    """
    try:
        return import_module("faiss")
    except ImportError as error:
        raise ImportError(
            "faiss is not installed: run `pip install faiss-cpu` (or `faiss-gpu`), never both"
        ) from error


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_threads(threads: int) -> None:
    """Set the thread pools of torch and FAISS to one size.

    numpy's BLAS has a third pool, and nothing large to do here: it gets one thread. Before torch
    and FAISS are loaded, `commands.let_idle_threads_sleep` keeps the pools from spinning.

    For command lines only: the settings hold for the whole process, so a library function must not
    touch them.
    """
    let_idle_threads_sleep()
    import torch
    from threadpoolctl import ThreadpoolController

    if find_spec("faiss"):
        require_faiss().omp_set_num_threads(threads)
    # FAISS brings an OpenBLAS of its own, which shares its OpenMP threads and keeps them.
    ThreadpoolController().select(threading_layer="pthreads").limit(limits=1)
    torch.set_num_threads(threads)


def resolve_device(device: str) -> str:
    """Turn "auto" into "cuda" or "cpu".

    Raises
    ------
    ValueError
        If "cuda" is asked for and torch sees no such device.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here; use cpu or auto")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def stamp(threads: int, device: str) -> dict[str, Any]:
    """Describe the machine and the software, for storing beside a measurement.

    Returns
    -------
    dict
        JSON types only. ``commit`` is what the environment variable GIT_COMMIT says, for copies of
        a checkout; else that of the checkout, ending in "-dirty" when tracked files differ from it,
        or None outside one.
    """
    faiss = require_faiss() if find_spec("faiss") else None
    gpu = None
    if device == "cuda":
        import torch

        gpu = torch.cuda.get_device_name()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES}
        | {"faiss": faiss.__version__ if faiss else None},
        "faiss_options": faiss.get_compile_options().strip() if faiss else None,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": usable_cores(),
        "threads": threads,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "gpu": gpu,
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    if named := os.environ.get("GIT_COMMIT"):
        return named
    root = Path(__file__).resolve().parents[1]
    # Without this check git would search upwards and name the commit of somebody else's project.
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
