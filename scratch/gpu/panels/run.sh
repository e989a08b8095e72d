#!/bin/bash
# Keys in panels (issue 22, B6): a step's append and attention in one launch, in three, and over rows in three; f16, mask.
# About 60 s with compilation on one H100/H200; checks caches and results before it times; short table last.
# Needs PYTHONPATH=/tmp/site:/tmp/tree and $OUT. TINY=1: a dry run on a CPU (with TRITON_INTERPRET=1).
here=$(cd "$(dirname "$0")" && pwd); OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"; log=$OUT/panels.log
timeout 240 "${PYTHON:-python3}" "$here/measure.py" > "$log" 2>&1
code=$?
sed -n '/^==== table/,$p' "$log"
[ $code = 0 ] || { echo "exit $code"; tail -n 40 "$log"; }
exit $code
