#!/bin/bash
# Products of 4, 8 and 16 tokens on one H200: integers on matrix units against gemv and wgmma.
# WARM=only run.sh: compiles in 16 processes (may run beside others); then WARM=0 run.sh: times, 50 s at most.
# Needs PYTHONPATH=/tmp/site:/tmp/tree and $OUT; both phases need the same TRITON_CACHE_DIR and the same tree.
here=$(cd "$(dirname "$0")" && pwd)
export WARM=${WARM:-0}
log=$OUT/batch-warm-$WARM.log
limit=70; [ "$WARM" = only ] && limit=170
timeout $limit python3 "$here/measure.py" cuda > "$log" 2>&1
code=$?
if [ "$WARM" = only ]; then grep -a -E "warm:|FAILED|compiled|steps" "$log"; else sed -n '/^==== table/,$p' "$log"; fi
[ $code = 0 ] || { echo "exit $code"; grep -v "^$" "$log" | tail -60; }
exit $code
