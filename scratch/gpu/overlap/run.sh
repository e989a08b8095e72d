#!/bin/bash
# Two GPUs, 70B and 8B shapes, prompts of 4096: sums over NCCL waited for, and in bands beside the products (GRAPHRT_OVERLAP).
# About 200 s with kernels to compile. Needs PYTHONPATH=/tmp/site:/tmp/tree and $OUT. MODELS, LAYERS: to cut it short.
# DRY=1 plays it on CPUs with tiny shapes.
here=$(cd "$(dirname "$0")" && pwd)
export OUT=${OUT:-/tmp/overlap} NCCL_NVLS_ENABLE=0 TORCH_NCCL_ASYNC_ERROR_HANDLING=1
mkdir -p "$OUT"
timeout ${LIMIT:-400} python3 "$here/overlap.py" > "$OUT/overlap.log" 2>&1
code=$?
sed -n '/^==== table/,$p' "$OUT/overlap.log"
[ $code = 0 ] || { echo "exit $code"; tail -40 "$OUT/overlap.log"; }
exit $code
