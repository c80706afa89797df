#!/usr/bin/env bash
# The main job on a fresh machine: sets up .venv, then runs `python -m eval.recall` with the arguments given.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh cpu
exec .venv/bin/python -m eval.recall "$@"
