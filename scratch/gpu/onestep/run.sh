#!/bin/bash
# One user served, in both forms (issue 23: -6.9 % against bench's tg128, asked -6), 64 users with and without
# --deterministic (one prompt a step, and several: --alone-tokens 256) in turn, lookup on the summarizing load for 1 and 8 users. One GPU of 78 GB does; about 6 minutes with
# kernels compiled. Before timing each form's tokens are compared with the plain form's.
#   WARM=only ./run.sh       starts each server once, so that all kernels are compiled and kept; measures nothing
#   PARTS="one many lookup"  what is measured (default: all three)
#   dry run on a CPU:  BACKEND=cpu WHAT="--synthetic tiny:q4_k_m" CHAIN="--synthetic tiny:q4_k_m+chain" NP=4 CTX=1024 MANY=4 SOME=2
#                      ONE_LENGTHS=16:24 MANY_LENGTHS=24:16 TURNS=1 ./run.sh    (WHAT= alone serves the demo model)
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"; LOG=$OUT/onestep.log; JSON=$OUT/onestep.jsonl; : > "$LOG"; : > "$JSON"
PY=${PY:-python}
WHAT=${WHAT---synthetic llama-8b:q4_k_m}; CHAIN=${CHAIN:---synthetic llama-8b:q4_k_m+chain}
BACKEND=${BACKEND:-auto}; NP=${NP:-64}; CTX=${CTX:-2048}; MANY=${MANY:-64}; SOME=${SOME:-8}; TURNS=${TURNS:-3}
ONE_LENGTHS=${ONE_LENGTHS:-16:512}; MANY_LENGTHS=${MANY_LENGTHS:-128:192}; PARTS=${PARTS:-one many lookup}
DRAWN='{"top_k": 40, "top_p": 0.95, "min_p": 0.05}'
BASE="--port 0 -c $CTX -b 2048"; [ "$BACKEND" != auto ] && BASE="$BASE --backend $BACKEND"
BEGAN=$SECONDS
declare -A URL PID
say() { echo "$*" | tee -a "$LOG"; }
launch() {  # launch NAME CHOOSE JOIN FLAGS...: begins a server, which answers once `ready NAME` has returned
  local name=$1 choose=$2 join=$3; shift 3
  : > "$OUT/onestep-$name.err"
  GRAPHRT_CHOOSE_WITHIN=$choose GRAPHRT_JOIN_WITHIN=$join GRAPHRT_ALONE_TOKENS=${ALONE:-0} $PY -m graphrt serve "$@" $BASE 2>> "$OUT/onestep-$name.err" &
  PID[$name]=$!
}
ready() {
  local name=$1
  for _ in $(seq 1 600); do
    URL[$name]=$(grep -o 'served at http://[^ ]*' "$OUT/onestep-$name.err" | head -1 | cut -d' ' -f3)
    [ -n "${URL[$name]}" ] && { say "$name: ready after $((SECONDS - BEGAN)) s"; return 0; }
    kill -0 "${PID[$name]}" 2>/dev/null || break
    sleep 0.5
  done
  say "$name: FAILED"; tail -5 "$OUT/onestep-$name.err" | tee -a "$LOG"; return 1
}
stop() { for name in "$@"; do kill -TERM "${PID[$name]}" 2>/dev/null; wait "${PID[$name]}" 2>/dev/null; done; }
load() {  # load LABEL NAME FLAGS...: one line of JSON
  local label=$1 name=$2; shift 2
  [ -z "${URL[$name]}" ] && return
  timeout 150 $PY -m graphrt bench serve "${URL[$name]}" "$@" --json 2>> "$OUT/onestep-load.err" | $PY "$HERE/row.py" "$label" "$name" "${URL[$name]}" "$JSON" | tee -a "$LOG"
}
start_all() { for name in "$@"; do ready "$name"; done; }
plain() { launch plain 0 0 $WHAT -np "$NP" --max-total-tokens $((NP * CTX / 2)); }
forms() { launch choose 1 0 $WHAT -np "$NP" --max-total-tokens $((4 * CTX)); launch both 1 1 $WHAT -np "$NP" --max-total-tokens $((4 * CTX)); launch join 0 1 $WHAT -np "$NP" --max-total-tokens $((4 * CTX)); }
same() { launch same 0 0 $WHAT -np "$NP" --max-total-tokens $((NP * CTX / 2)) --deterministic; }
pieces() { ALONE=256 launch pieces 0 0 $WHAT -np "$NP" --max-total-tokens $((NP * CTX / 2)) --deterministic; }
lookups() { launch guess 0 0 $CHAIN -np "$SOME" --lookup 8; launch guess16 0 0 $CHAIN -np "$SOME" --lookup 16; launch none 0 0 $CHAIN -np "$SOME"; }
$PY -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)' 2>&1 | tail -1 | tee -a "$LOG"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | tee -a "$LOG"; nproc | tee -a "$LOG"
if [ "$WARM" = only ]; then
  plain; start_all plain; stop plain                     # one after the other: later ones find the kernels of earlier ones
  forms; start_all choose both join; stop choose both join
  same; start_all same; stop same
  pieces; start_all pieces; stop pieces
  lookups; start_all guess guess16 none; load warm guess --users 2 --lengths summary --requests 2 --warm-up 0; stop guess guess16 none
  say "kernels are compiled after $((SECONDS - BEGAN)) s"; exit 0
fi
case " $PARTS " in *" one "*)
  plain; forms; start_all plain choose both join
  for name in choose both join; do
    [ -n "${URL[$name]}" ] && $PY "$HERE/check.py" "${URL[plain]}" "${URL[$name]}" "$name" 2>&1 | tee -a "$LOG"
  done
  for _ in $(seq 1 "$TURNS"); do
    for name in plain choose join both; do load one $name --users 1 --lengths "$ONE_LENGTHS" --requests 2 --warm-up 1; done
  done
  stop choose both join
  if [ -n "$WHAT" ]; then
    [ "$BACKEND" = auto ] && timeout 120 $PY -m graphrt bench $WHAT -p 128 -n 128,512 -r 3 2>&1 | grep -E "tg|pp|t/s" | tee -a "$LOG"
  fi
  case " $PARTS " in *" many "*) ;; *) stop plain ;; esac
esac
case " $PARTS " in *" many "*)
  [ -n "${URL[plain]}" ] || { plain; start_all plain; }
  same; pieces; start_all same pieces
  for name in same pieces; do
    [ -n "${URL[$name]}" ] && $PY "$HERE/check.py" "${URL[$name]}" "${URL[$name]}" "$name, alone and in company" "$MANY" 2>&1 | tee -a "$LOG"
  done
  for _ in $(seq 1 "$TURNS"); do
    for name in plain same pieces; do load many $name --users "$MANY" --lengths "$MANY_LENGTHS" --requests $((2 * MANY)) --temp 0.8 --body "$DRAWN"; done
  done
  stop plain same pieces
esac
case " $PARTS " in *" lookup "*)
  lookups; start_all guess guess16 none
  $PY "$HERE/check.py" "${URL[none]}" "${URL[guess]}" "lookup" 2>&1 | tee -a "$LOG"
  for _ in $(seq 1 "$TURNS"); do
    for users in 1 "$SOME"; do
      for name in none guess guess16; do load "summary, $users" $name --users "$users" --lengths summary --requests $((4 * users)); done
    done
  done
  stop guess guess16 none
esac
grep -hE "CaptureWarning|Traceback|Error" "$OUT"/onestep-*.err | sort | uniq -c | head -10 | tee -a "$LOG"
say "all after $((SECONDS - BEGAN)) s"
echo "== medians"; $PY "$HERE/row.py" --table "$JSON" | tee -a "$LOG"; grep -E "tg|same|differ|FAILED" "$LOG"
