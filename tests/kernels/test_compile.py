"""The kernels compile for a GPU as well as they run in the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("compile_for_gpu.py")
ROOT = SCRIPT.parents[2]
CASES = {
    "spherical:fp16:3000:256:128": {"row_kernel", "redo_kernel", "moment_kernel", "update_kernel"},
    "diag:fp16:3000:256:100": {"row_kernel", "redo_kernel", "moment_kernel", "update_kernel"},
    "tied:fp16x3:3000:256:128": {"row_kernel", "redo_kernel", "moment_kernel", "slope_kernel"},
    "spherical:fp16:3000:256:960": {"logit_kernel", "scale_kernel", "sum_kernel"},
    "full:fp16:3000:24:64": {"distance_kernel", "share_kernel", "scatter_kernel"},
}


@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile(capability):
    """For Hopper, and for a GPU that has no tensor descriptors: there they become pointers."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, str(SCRIPT), capability, *CASES],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert found.returncode == 0, found.stderr
    assert set().union(*CASES.values()) <= set(found.stdout.split())
