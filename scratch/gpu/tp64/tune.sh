#!/bin/bash
# Products of 64 tokens of an 8B of which two GPUs have half each, on ONE Hopper GPU: candidates of warpgroups, chunks,
# programs a multiprocessor and splits of k, beside today's.
# WARM=only tune.sh: compiles in 14 processes (may run beside others, 190 s at most); then WARM=0 tune.sh: checks each
# against float64, then times, SECONDS_LEFT (100) at most. SHAPES="down gate": only names that begin so.
# Needs PYTHONPATH=/tmp/site:/tmp/tree and $OUT; both phases need one TRITON_CACHE_DIR and one tree. DRY=1: builds only.
here=$(cd "$(dirname "$0")" && pwd)
export WARM=${WARM:-0} OUT=${OUT:-/tmp}
log=$OUT/tune-warm-$WARM.log
limit=130; [ "$WARM" = only ] && limit=190
timeout $limit ${PYTHON:-python3} "$here/tune.py" > "$log" 2>&1
code=$?
if [ "$WARM" = only ]; then grep -a -E "^warm|FAILED|compiled" "$log" | tail -25; else sed -n '/^==== table/,$p' "$log"; fi
[ $code = 0 ] || { echo "exit $code"; grep -v "^$" "$log" | tail -40; }
exit $code
