cd $ROOT
[ -d /tmp/site ] || python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
for t in .gpu/tree-*.tar.xz; do n=$(basename $t .tar.xz); n=${n#tree-}; mkdir -p /tmp/$n; tar xJf $t -C /tmp/$n; done
mkdir -p /tmp/llama; tar xJf .gpu/llama.tar.xz -C /tmp/llama; xz -dc .gpu/libggml-cuda.so.xz > /tmp/llama/libggml-cuda.so
export PYTHONUNBUFFERED=1
use() { export PYTHONPATH=/tmp/site:/tmp/$1; }
