"""Compiles what EM launches on a GPU, without one; run by `test_compile.py` as a process.

Arguments are the compute capability (80 or 90) and KIND:MODE:N:K:D. Every launch of the loop over
such samples is compiled instead, as it would be there, and has to fit the GPU's shared memory.
Triton's interpreter must be off, since it replaces the compiler for the whole process.
"""

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CAPABILITY = int(sys.argv[1])
GPU, SHARED_BYTES = {80: ("NVIDIA A100", 166912), 90: ("NVIDIA H200", 232448)}[CAPABILITY]
MULTIPROCESSORS = 132


class Device:
    """As much of a driver as the compiler asks for."""

    class utils:
        @staticmethod
        def load_binary(*_args):
            return 0, 0, 0, 0, 1024

        @staticmethod
        def get_device_properties(_device):
            return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": MULTIPROCESSORS}

    @staticmethod
    def get_current_target():
        return GPUTarget("cuda", CAPABILITY, 32)

    @staticmethod
    def get_current_device():
        return 0

    @staticmethod
    def get_current_stream(_device):
        return 0


def main(arguments: list[str]) -> None:
    driver.set_active(Device())  # type: ignore[arg-type]
    compiled = {}
    launch = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel: Any = launch(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.setdefault(kernel.hash, self.__name__)
        assert kernel.metadata.shared <= SHARED_BYTES, (self.__name__, kernel.metadata.shared)
        return kernel

    JITFunction.run = run  # type: ignore[method-assign]
    from gmm_ivf.kernels import em, full, loop, passes, truncated
    from gmm_ivf.kernels.components import Components

    modules: tuple[Any, ...] = (em, full, passes, truncated)
    for module in modules:
        module.device_limits = lambda _device: (GPU, SHARED_BYTES, MULTIPROCESSORS)
    for argument in arguments:
        kind, mode, *sizes = argument.split(":")
        n, k, d = map(int, sizes)
        components = Components.equal(kind, torch.zeros(k, d, dtype=torch.float64), 1.0)
        loop.Loop(em.stage(torch.zeros(n, d), mode), components, 1e-6).run(1)
    print(*sorted(set(compiled.values())))


if __name__ == "__main__":
    main(sys.argv[2:])
