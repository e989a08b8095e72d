#!/bin/bash
# About 4 minutes on two GPUs of one host (nvidia-h100-x2): a server over ranks with adapters, guesses and kept prompts.
# Needs PYTHONPATH=/tmp/site:/tmp/tree, a tree with tests/, and $OUT. On CPUs: run.sh cpu.
here=$(cd "$(dirname "$0")" && pwd)
timeout 560 python3 "$here/serve.py" "${1:-triton}" "$OUT" > "$OUT/serveranks.log" 2>&1
code=$?
sed -n '/^==== table/,$p' "$OUT/serveranks.log"
[ $code = 0 ] || tail -40 "$OUT/serveranks.log"
exit $code
