#!/bin/bash
# What could be gained by copies of the cache that begin before the launch that writes the new cells has ended: the same
# step with gdc_wait moved behind the first copies (its results may be wrong: only the time is looked at). 100 s, after
# f8join's kernels were compiled; TREE: the unpacked tree.
HERE=$(cd "$(dirname "$0")" && pwd); TREE=${TREE:-/tmp/tree}; PY=${PYTHON:-python3}
rm -rf /tmp/early; cp -r "$TREE" /tmp/early; "$PY" "$HERE/swap.py" /tmp/early
for d in 512 16384; do
  for t in "$TREE" /tmp/early "$TREE" /tmp/early; do
    echo "== $t @ $d"; PYTHONPATH=/tmp/site:$t timeout 100 "$PY" "$HERE/../f8join/model.py" $d f16 f8_e4m3 2>&1 | grep -v "ready after"
  done
done | tee "${OUT:-/tmp}/early.log"
