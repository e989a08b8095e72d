cd /tmp/su/lc/tests; mkdir -p out; export LLAMA_SERVER_BIN_PATH=/tmp/su/llama-server PORT=8491
for f in "$@"; do timeout 400 /tmp/su/v/bin/python -m pytest unit/$f -q --tb=short --timeout 60 -p no:cacheprovider -p no:asyncio > out/$f.txt 2>&1; echo "$f $(tail -1 out/$f.txt)"; done
