#!/bin/bash
# Caches of q8_0 and q4_0 (issue 22, B6): a step's append and attention in one launch (block_append), and apart; layers alone, then tg128 of
# an 8B by `graphrt bench`, rotation in the products (with block_append) or in the launch that writes the cache (without).
# PART=layers (about 4 minutes with compilation on one H100/H200), PART=bench (about 6), or both; checks caches bit by bit and results before
# it times (bench checks logits by the CPU reference); short tables last.
# Needs PYTHONPATH=/tmp/site:/tmp/tree and $OUT. TINY=1: a dry run on a CPU (with TRITON_INTERPRET=1), without bench.
here=$(cd "$(dirname "$0")" && pwd); OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"; log=$OUT/blocks-${PART:-all}.log; py=${PYTHON:-python3}
part=${PART:-layers bench}; code=0; : > "$log"
case $part in *layers*) timeout 420 "$py" "$here/measure.py" > "$log" 2>&1; code=$?;; esac
[ $code = 0 ] || { echo "layers: exit $code"; tail -n 40 "$log"; }
if [ -z "$TINY" ] && [ "${part%bench}" != "$part" ]; then
  for type in q8_0 q4_0; do
    for fuse in all all,block_append all; do # the first again last: how much the machine drifts
      echo "==== bench $type, --fuse $fuse" >> "$log"
      timeout 150 "$py" -m graphrt bench --synthetic llama-8b -p 0 -n 128 -d 0,16384 -r 3 -ctk $type -ctv $type --fuse $fuse >> "$log" 2>&1 \
        || { echo "bench $type $fuse: exit $?"; code=1; }
    done
  done
  grep -E "^==== bench|tg128|t/s" "$log"
fi
sed -n '/^==== table/,/^==== bench/{/^==== bench/!p}' "$log"
exit $code
