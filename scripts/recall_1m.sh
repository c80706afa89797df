#!/usr/bin/env bash
# The comparison on a million vectors, for a machine of 16 cores and one CUDA device (training), in
# about eight minutes: scripts/recall_1m.sh DATASET OUT [more options of eval.recall]
# What matters most comes first; every point is on the disk at once, so that a run which is cut
# keeps what it has, and the same command goes on with the rest. PYTHON names the interpreter,
# MINUTES the time, SHRINK a divisor of every K for a trial on part of the vectors:
#   SHRINK=16 MINUTES=3 scripts/recall_1m.sh sift200k.hdf5 /tmp/trial --limit 20000
set -euo pipefail
dataset=${1:?usage: scripts/recall_1m.sh DATASET OUT [options]}
out=${2:?usage: scripts/recall_1m.sh DATASET OUT [options]}
shift 2
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
seconds=$((60 * ${MINUTES:-8}))
shrink=${SHRINK:-1}

# With faiss-gpu k-means takes seconds at any K; on 16 cores large K would take minutes on all rows.
gpu=$("$python" -c 'import faiss; print(int(hasattr(faiss, "StandardGpuResources")))')
few=(--train-limit 500000)
fewer=(--train-limit 300000)
if [ "$gpu" = 1 ]; then few=() fewer=(); fi

measure() { # options of eval.recall; begins nothing new when the time is up
    local left=$((seconds - SECONDS))
    if [ "$left" -lt 10 ]; then echo "no time left for: $*" >&2; return 0; fi
    timeout --signal INT $((left + 60)) "$python" -m gmm_ivf.eval.recall --dataset "$dataset" \
        --out "$out" --queries 2000 --seed 0 --stop-recall 0.97 --budget "$left" "$@" \
        >>"$out/log.txt" || echo "status $? of: $*" >&2
}

mkdir -p "$out"
measure --nlist $((1024 / shrink)) "${few[@]}" "$@" --method kmeans --method gmm --method gmm-cells \
    --method kmeans:codec=PQ32,refine=true --method kmeans:codec=RaBitQ,rotation=RR,refine=true
measure --nlist $((4096 / shrink)) "${few[@]}" "$@" --method kmeans:coarse=hnsw32 --method gmm-cells:coarse=hnsw32
measure --nlist $((16384 / shrink)) "${fewer[@]}" "$@" --method kmeans:coarse=hnsw32 --method gmm-cells:coarse=hnsw32
measure --nlist $((1024 / shrink)) "${few[@]}" "$@" --method kmeans-soft:rule=soar --method gmm-soft:rule=soar \
    --method kmeans-soft:rule=air --method gmm-soft --method kmeans-cells \
    --method kmeans:codec=PQ32x4fs,refine=true --method gmm-cells:visit=list
measure --nlist $((8192 / shrink)) "${fewer[@]}" "$@" --method kmeans:coarse=hnsw32 --method gmm-cells:coarse=hnsw32
measure --nlist $((4096 / shrink)) "${few[@]}" "$@" --method kmeans \
    --method kmeans:codec=RaBitQ,rotation=RR,refine=true,coarse=hnsw32
measure --nlist $((32768 / shrink)) "${fewer[@]}" "$@" --method kmeans:coarse=hnsw32
measure --nlist $((1024 / shrink)) "${few[@]}" "$@" --method kmeans:coarse=hnsw32 --method kmeans-soft:rule=top2 \
    --method kmeans-soft:rule=spann,eps=0.2,max_lists=8 --method gmm-soft:tau=1/K
measure --nlist $((2048 / shrink)) "${few[@]}" "$@" --method kmeans:coarse=hnsw32

# Tables and figures above are each of one step; the page is of all.
rm -f "$out"/{recall.png,recall.svg,report.html,table.txt,summary.jsonl}
"$python" -m gmm_ivf.eval.pays "$out/results.jsonl" --out "$out"
