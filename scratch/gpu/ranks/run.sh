#!/bin/bash
# 70 to 110 s on one H200: prefill at a 70B's shapes. Needs PYTHONPATH=/tmp/site:/tmp/tree and $OUT.
here=$(cd "$(dirname "$0")" && pwd)
timeout 170 python3 "$here/prefill.py" cuda "$OUT" > "$OUT/ranks.log" 2>&1
code=$?
sed -n '/^==== table/,$p' "$OUT/ranks.log"
[ $code = 0 ] || tail -25 "$OUT/ranks.log"
exit $code
