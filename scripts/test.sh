#!/usr/bin/env bash
# Everything that CI checks, on a fresh machine: sets up .venv, then lint, types and tests.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh cpu,dev
bin=.venv/bin
$bin/ruff check .
$bin/ruff format --check .
$bin/pyright --pythonpath $bin/python
# Triton's interpreter stands in for the GPU; it must be chosen before triton is imported.
export TRITON_INTERPRET=1
exec $bin/python -m pytest "$@"
