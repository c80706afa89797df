#!/usr/bin/env bash
# The main job on a fresh machine: sets up .venv, then runs `python -m eval.recall` with the arguments
# given. Files among them, and the folder results/, are relative to where it is called.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bash "$root/scripts/setup.sh" cpu
exec "$root/.venv/bin/python" -m gmm_ivf.eval.recall "$@"
