#!/bin/bash
# Decode attention at 1 x 16384 keys: configurations beside f16's row on one GPU, f8_e4m3 first (issue 22). WARM=only
# compiles (about 30 to 60 s of CPU, in processes beside each other, checked against float64); WARM=0 times (35 s).
HERE=$(cd "$(dirname "$0")" && pwd); LOG=${OUT:-/tmp}/decode.log; PY=${PYTHON:-python3}; WARM=${WARM:-1}
export MB=128
N=1x16384
SPECS=(
  f16/cache/$N
  f8_e4m3/cache/$N f8_e4m3/cache/$N/64,4,3,2,168 f8_e4m3/cache/$N/128,4,2,2 f8_e4m3/cache/$N/32,4,4,3,168
  f8_e4m3/cache/$N/64,4,2,4,128 f8_e4m3/cache/$N/64,4,4,2
  q8_0/cache/$N q8_0/cache/$N/64,4,3,2,0,1 q8_0/cache/$N/32,2,4,4,0,1 q8_0/cache/$N/64,4,2,3,168,1 q8_0/cache/$N/32,2,4,6,168,1
  q4_0/cache/$N q4_0/cache/$N/64,4,3,2,0,1 q4_0/cache/$N/128,4,2,2,0,1 q4_0/cache/$N/64,4,2,3,168,1 q4_0/cache/$N/32,2,4,6,168,1
)
{
  date -u
  if [[ $WARM != 0 ]]; then
    printf '%s\n' "${SPECS[@]}" | xargs -P "${JOBS:-14}" -I{} timeout 150 "$PY" "$HERE/forms.py" --warm {} 2>&1 |
      grep -v "^  \|^$" | cut -c1-300
    date -u
  fi
  if [[ $WARM != only ]]; then
    timeout 120 "$PY" "$HERE/forms.py" "${SPECS[@]}"
    date -u
  fi
} > "$LOG" 2>&1
if [[ $WARM == only ]]; then tail -n 25 "$LOG"; else sed -n '/^prepared/,$p' "$LOG"; fi
grep -c "FAILED\|Error" "$LOG"
