#!/bin/bash
# Issue 22: parts of 8-bit and 4-bit caches joined in the decode launch (tree: main with branch f8join). WARM=only compiles
# (checked against float64), WARM=0 times: 40 s alone, then 8B steps at 16384 and 512 (about 100 s).
HERE=$(cd "$(dirname "$0")" && pwd); LOG=${OUT:-/tmp}/f8join.log; PY=${PYTHON:-python3}; WARM=${WARM:-1}
export MB=128
N=1x16384
F8=(64,4,4,2,0,0,64 64,4,4,2,168,0,32 64,4,3,3,168,0,32 128,8,3,1,0,0,64 128,8,4,1,0,0,64 256,8,2,1,0,0,64 256,16,2,1,128,0,8 128,4,3,2,168,0,64 64,4,4,2 128,4,2,2 64,4,4,2,168)
Q8=(64,4,3,2,168,1,64 64,4,3,2,0,1,64 128,8,3,1,0,1,64 128,8,2,1,168,1,32)
Q4=(64,4,3,2,168,1,64 64,4,3,2,0,1,64 128,8,3,1,168,1,64 128,8,4,1,168,1,32)
SPECS=(f16/cache/$N f8_e4m3/cache/$N q8_0/cache/$N q4_0/cache/$N)
for c in "${F8[@]}"; do SPECS+=("f8_e4m3/cache/$N/$c"); done
for c in "${Q8[@]}"; do SPECS+=("q8_0/cache/$N/$c"); done
for c in "${Q4[@]}"; do SPECS+=("q4_0/cache/$N/$c"); done
MODEL=(f16 f8_e4m3 f8_e4m3/64,4,4,2,168,0,32 f8_e4m3/128,8,3,1,0,0,64 f8_e4m3/128,8,4,1,0,0,64 f8_e4m3/256,8,2,1,0,0,64 f8_e4m3/64,4,3,3,168,0,32 f8_e4m3/64,4,4,2 q8_0 q8_0/64,4,3,2,168,1,64 q4_0 q4_0/64,4,3,2,168,1,64)
{
  date -u
  if [[ $WARM != 0 ]]; then
    printf '%s\n' "${SPECS[@]}" | xargs -P "${JOBS:-14}" -I{} timeout 150 "$PY" "$HERE/forms.py" --warm {} 2>&1 |
      grep -v "^  \|^$" | cut -c1-300
    date -u
  fi
  if [[ $WARM == only ]]; then timeout 150 "$PY" "$HERE/model.py" 512 warm f16 f8_e4m3 q8_0 q4_0; fi
  if [[ $WARM != only ]]; then
    timeout 120 "$PY" "$HERE/forms.py" "${SPECS[@]}"
    timeout 150 "$PY" "$HERE/model.py" 16384 "${MODEL[@]}"
    timeout 100 "$PY" "$HERE/model.py" 512 "${MODEL[@]}"
    date -u
  fi
} > "$LOG" 2>&1
if [[ $WARM == only ]]; then tail -n 25 "$LOG"; else grep -v "ready after" "$LOG" | sed -n '/^prepared/,$p'; fi
grep -c "FAILED\|Error" "$LOG"
