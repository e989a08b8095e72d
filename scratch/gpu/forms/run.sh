#!/bin/bash
# Issue 22's missing figures: about 60 s to compile kernels (processes side by side, nothing of it counts), then 45 s of
# 8B steps and 60 s of ops, one at a time. Needs PYTHONPATH=/tmp/site:/tmp/tree and $OUT.
# WARM=0 leaves the first part out where kernels are compiled.
here=$(cd "$(dirname "$0")" && pwd); OUT=${OUT:-/tmp/out}; export OUT; mkdir -p "$OUT"; log=$OUT/forms.log; : > "$log"
began=$SECONDS
say() { echo "-- $((SECONDS - began)) s: $*" >> "$log"; }
if [ "${WARM:-1}" = 1 ]; then
  pids=
  for i in 0 1 2 3 4 5 6 7; do timeout 110 python3 "$here/forms.py" ops $i/8 warm > "$OUT/forms-warm-$i.log" 2>&1 & pids="$pids $!"; done
  for c in "f16,f16 rotated,f16 rotated 80,f16 append" "f8,f8 rotated" "q8_0"; do
    timeout 110 python3 "$here/forms.py" model "$c" warm > "$OUT/forms-warm-model-${c%%,*}.log" 2>&1 & pids="$pids $!"
  done
  wait $pids
  say "kernels compiled"
fi
timeout 90 python3 "$here/forms.py" model "f16,f16 rotated,f16 rotated 80,f16 append,f8,f8 rotated,q8_0" > "$OUT/forms-model.txt" 2>&1; say "model $?"
timeout 120 python3 "$here/forms.py" ops all > "$OUT/forms-ops.txt" 2> "$OUT/forms-ops.err"; say "ops $?"
[ -s "$OUT/forms-ops.txt" ] || cp "$OUT/forms-ops.err" "$OUT/forms-ops.txt"
cat "$OUT"/forms-{model,ops}.txt >> "$log"
cat "$log"
