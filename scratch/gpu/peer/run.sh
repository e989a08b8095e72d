#!/bin/bash
# llama-server (CUDA, a release's own build) and graphrt serve, the same files, the same client, one machine: run.sh MODEL ..
# All servers start first, then each has its loads while the others are idle.
# Needs: /tmp/llama (llama-server and its libraries), PYTHONPATH of graphrt, $OUT.
set -u
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONUNBUFFERED=1 GRAPHRT_CACHE=/tmp/cache CUDA_CACHE_MAXSIZE=4294967296 LD_LIBRARY_PATH=/tmp/llama:${LD_LIBRARY_PATH:-}
log=$OUT/peer.log; : > $log; : > $OUT/table.txt
say() { echo "== $(date +%T) $*" | tee -a $log; }
G="python3 -m graphrt"
load() { # name url users lengths requests [more]
  local name=$1 url=$2 users=$3 lengths=$4 requests=$5; shift 5
  timeout 60 $G bench serve $url --users $users --lengths $lengths --requests $requests --json "$@" > /tmp/o.json 2>>$log
  cat /tmp/o.json >> $OUT/loads.jsonl; echo >> $OUT/loads.jsonl
  python3 $here/row.py "$name" < /tmp/o.json | tee -a $OUT/table.txt
}
ready() { for i in $(seq 1 ${2:-200}); do curl -sf $1/health > /dev/null 2>&1 && return 0; sleep 0.5; done; say "not ready: $1"; return 1; }
for model in "$@"; do (python3 $here/make_gguf.py $model /tmp/$model.gguf >> $log 2>&1) & done; wait
say files; ls -la /tmp/*.gguf >> $log
port=8090; pids=""
for model in "$@"; do
  /tmp/llama/llama-server -m /tmp/$model.gguf -ngl 99 -np 64 -c $((64 * 512)) -fa on -b 2048 -ub 512 --host 127.0.0.1 --port $((port + 1)) > $OUT/llama-$model.log 2>&1 &
  pids="$pids $!"
  $G serve /tmp/$model.gguf -np 256 -c 2048 -b 2048 --port $((port + 2)) > $OUT/graphrt-$model.log 2>&1 &
  pids="$pids $!"
  port=$((port + 10))
done
port=8090
for model in "$@"; do
  L=http://127.0.0.1:$((port + 1)); R=http://127.0.0.1:$((port + 2))
  ready $L 100; load "$model llama warm" $L 64 128:16 64 --warm-up 8; say $model llama-server
  ready $R 360; load "$model graphrt warm" $R 64 128:16 64 --warm-up 8; say $model graphrt
  port=$((port + 10))
done
port=8090
for model in "$@"; do
  L=http://127.0.0.1:$((port + 1)); R=http://127.0.0.1:$((port + 2))
  for turn in 1 2; do
    load "$model llama 64 128/256" $L 64 128:256 128 --warm-up 8
    load "$model graphrt 64 128/256" $R 64 128:256 192 --warm-up 64
  done
  load "$model llama 8 128/256" $L 8 128:256 16 --warm-up 2
  load "$model graphrt 8 128/256" $R 8 128:256 24 --warm-up 8
  load "$model llama 1 128/128" $L 1 128:128 3 --warm-up 1
  load "$model graphrt 1 128/128" $R 1 128:128 4 --warm-up 1
  port=$((port + 10))
done
kill -TERM $pids; sleep 3; kill -9 $pids 2>/dev/null
say end
model=$1
/tmp/llama/llama-bench -m /tmp/$model.gguf -ngl 99 -fa 1 -p 512 -n 128 -r 3 2>&1 | tail -6 | tee -a $OUT/table.txt
$G bench /tmp/$model.gguf -p 512 -n 128 2>&1 | tail -8 | tee -a $OUT/table.txt
cat $OUT/*.log > $OUT/all.txt; rm -f $OUT/*.log
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; cat $OUT/table.txt
