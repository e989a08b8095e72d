#!/bin/bash
# 64 users free / with a schema whose texts are as long, in turn, twice; the short schema; one user. About 40 s after the
# server is ready (its warm-up: 100 s where kernels must be compiled). Each load prints a line and its steps' parts.
# BACKEND=cpu MODEL=tiny NP=8 LOADS="dry dry-long dry-schema" for a dry run; SKIP_DET= (empty) runs a --deterministic server too, BENCH=1 bench's tg128
# beside the idle server; LOADS="..." others (loads.py).
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"; LOG=$OUT/schema.log; : > "$LOG"
MODEL=${MODEL:-llama-8b:q4_k_m}; BACKEND=${BACKEND:-auto}; NP=${NP:-64}; SKIP_DET=${SKIP_DET-1}
export PARTS_ASK=$OUT/parts-ask PARTS_TOLD=$OUT/parts-told
BASE="--synthetic $MODEL --port 0 -np $NP -c 2048 -b 2048 --max-total-tokens 160000"
[ "$BACKEND" != auto ] && BASE="$BASE --backend $BACKEND"
start() {  # start NAME FLAGS...: sets URL and PID
  local log=$OUT/schema-$1.err; : > "$log"; shift
  rm -f "$PARTS_ASK" "$PARTS_TOLD"
  python "$HERE/serve_parts.py" serve $BASE "$@" 2>> "$log" & PID=$!
  URL=
  for _ in $(seq 1 480); do
    URL=$(grep -o 'served at http://[^ ]*' "$log" | head -1 | cut -d' ' -f3)
    [ -n "$URL" ] && break
    kill -0 $PID 2>/dev/null || { tail -5 "$log" | tee -a "$LOG"; break; }
    sleep 0.5
  done
  say "ready after $((SECONDS - BEGAN)) s: $URL"
}
say() { echo "$*" | tee -a "$LOG"; }
stop() { kill -TERM $PID; wait $PID; }
BEGAN=$SECONDS
python -c "import llguidance, torch, triton; print(\"llguidance\", llguidance.__version__, \"torch\", torch.__version__, \"triton\", triton.__version__)" 2>&1 | tail -1 | tee -a "$LOG"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | tee -a "$LOG"; nproc | tee -a "$LOG"
start plain $FLAGS
if [ -n "$URL" ]; then
  timeout 100 python "$HERE/loads.py" "$URL" ${LOADS:-free schema-long one-long free+ schema-long+ one-long+ free schema-long schema+} 2>> "$OUT/schema-plain.err" | tee -a "$LOG"
  say "loads ended after $((SECONDS - BEGAN)) s"
  if [ -n "$BENCH" ]; then
    timeout 60 python -m graphrt bench --synthetic $MODEL -p 128 -n 128 -r 3 2>&1 | grep -E "tg|pp|t/s" | tee -a "$LOG"
  fi
  stop
fi
if [ -z "$SKIP_DET" ]; then
  start det --deterministic $FLAGS
  if [ -n "$URL" ]; then
    timeout 60 python "$HERE/loads.py" "$URL" ${DET_LOADS:-free} 2>> "$OUT/schema-det.err" | tee -a "$LOG"
    stop
  fi
fi
say "all after $((SECONDS - BEGAN)) s"
grep -hE "new size|Warning|Traceback|Error" "$OUT"/schema-*.err | head -20
echo "== the loads"; grep -E "errors|FAILED|ready|after|device,|NVIDIA|torch" "$LOG"
