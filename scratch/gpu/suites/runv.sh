cd /tmp/su/h; export SU_MODEL=/root/.cache/graphrt/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf
mkdir -p out
for f in "$@"; do n=$(echo $f | tr / _ ); timeout 500 /tmp/su/v/bin/python -m pytest tests/$f -q --tb=short --timeout 60 -p no:cacheprovider > out/$n.txt 2>&1; echo "$f $(tail -1 out/$n.txt)"; done
