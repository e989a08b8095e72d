export ROOT=$PWD; . .gpu/setup.sh
mkdir -p /tmp/os /tmp/ob /tmp/od /tmp/or /tmp/wb /tmp/wd
T=$OUT/table.txt; : > $T
use schema
(python3 .gpu/peer/make_gguf.py llama-8b /tmp/llama-8b.gguf > /tmp/gguf.log 2>&1
 export CUDA_CACHE_MAXSIZE=4294967296; export LD_LIBRARY_PATH=/tmp/llama:${LD_LIBRARY_PATH:-}
 exec /tmp/llama/llama-server -m /tmp/llama-8b.gguf -ngl 99 -np 64 -c $((64 * 512)) -fa on -b 2048 -ub 512 --host 127.0.0.1 --port 8091 > /tmp/llama.log 2>&1) & LP=$!
(use batch; OUT=/tmp/wb WARM=only nice -n 10 timeout 100 bash .gpu/batch/run.sh > /tmp/wb/out 2>&1) &
(use decode; OUT=/tmp/wd WARM=only JOBS=5 nice -n 10 timeout 100 bash .gpu/decode/run.sh > /tmp/wd/out 2>&1) &
cat > /tmp/after.sh <<'A'
export OUT=$1 PYTHONUNBUFFERED=1
load() { timeout 60 python3 -m graphrt bench serve $2 --users $3 --lengths $4 --requests $5 --json --warm-up $6 > /tmp/o.json 2>>/tmp/peer.err
  python3 $ROOT/.gpu/peer/row.py "$1" < /tmp/o.json | tee -a $OUT/table.txt; }
L=http://127.0.0.1:8091
curl -sf $L/health || echo llama-server not there
load "llama-server warm" $L 64 128:8 64 4
for turn in 1 2; do load "llama-server 64 users 128/256" $L 64 128:256 128 4; load "graphrt 64 users 128/256" $URL 64 128:256 192 64; done
load "llama-server 8 users 128/256" $L 8 128:256 16 2; load "graphrt 8 users 128/256" $URL 8 128:256 24 8
load "llama-server 1 user 128/128" $L 1 128:128 3 1; load "graphrt 1 user 128/128" $URL 1 128:128 4 1
A
export ROOT; use schema; OUT=/tmp/os AFTER="bash /tmp/after.sh $OUT" timeout 300 bash .gpu/schema/run.sh > $OUT/schema.txt 2>&1
kill -9 $LP; pkill -9 llama-server
echo "after schema and peer $SECONDS" >> $T
[ $SECONDS -lt 290 ] && { use batch; OUT=/tmp/ob WARM=0 timeout 65 bash .gpu/batch/run.sh > $OUT/batch.txt 2>&1; }
echo "after batch $SECONDS" >> $T
[ $SECONDS -lt 320 ] && { use decode; OUT=/tmp/od WARM=0 timeout 45 bash .gpu/decode/run.sh > $OUT/decode.txt 2>&1; }
echo "after decode $SECONDS" >> $T
[ $SECONDS -lt 310 ] && { use ranks; OUT=/tmp/or timeout 70 bash .gpu/ranks/run.sh > $OUT/ranks.txt 2>&1; }
tail -5 /tmp/llama.log > $OUT/logs.txt; cat /tmp/peer.err /tmp/ob/* /tmp/or/* /tmp/wb/* /tmp/wd/* /tmp/os/*.err >> $OUT/logs.txt 2>/dev/null
echo "seconds $SECONDS"
tail -c 1200 $OUT/ranks.txt; tail -c 1800 $OUT/decode.txt; tail -c 2500 $OUT/batch.txt;  grep -A40 "== the loads" $OUT/schema.txt | tail -c 3000; cat $T
