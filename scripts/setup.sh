#!/usr/bin/env bash
# Makes .venv beside pyproject.toml and installs this checkout into it, editable, with the pinned
# versions of constraints.txt. Usage: scripts/setup.sh EXTRAS   (for example: cpu or cpu,dev)
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-cpu}
stamp=.venv/.installed-$extras
want=$(cat pyproject.toml constraints.txt | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then exit 0; fi

[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)

# On Linux, PyPI's torch brings gigabytes of CUDA libraries. Without an NVIDIA driver the CPU build
# is enough; where that build is not to be had, PyPI's is taken.
if [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
    torch=$(grep '^torch==' constraints.txt)
    "${pip[@]}" --retries 1 --timeout 20 --extra-index-url https://download.pytorch.org/whl/cpu \
        "$torch+cpu" 2>/dev/null || echo "no CPU build of torch found: installing PyPI's" >&2
fi
echo "installing gmm_ivf[$extras] into .venv ..." >&2
"${pip[@]}" --constraint constraints.txt --editable ".[$extras]"
echo "$want" > "$stamp"
