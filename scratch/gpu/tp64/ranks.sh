#!/bin/bash
# The table of issue 24 that is not met, on TWO GPUs of one host: 8B batch of 64 and gpt-oss-120b tg128, on one GPU (both
# models beside each other, a GPU each) and on two; variants of two: as it is, --overlap 2, --sum-bits 16; prompts of an
# 8B with and without bands; and what each kernel of rank 0 takes, by torch's profiler. About 5 minutes with kernels to
# compile, of which gpt-oss-120b's two loads are 100 s; ONLY=8b leaves it out (2 minutes).
# Each part has its own time limit, and within it each phase: a hang costs that phase, and the rest of its part.
# Needs PYTHONPATH=/tmp/site:/tmp/tree and $OUT. DRY=1: tiny shapes on CPUs, over gloo.
here=$(cd "$(dirname "$0")" && pwd)
export OUT=${OUT:-/tmp/tp64} NCCL_NVLS_ENABLE=0 TORCH_NCCL_ASYNC_ERROR_HANDLING=1 GLOO_SOCKET_IFNAME=lo
mkdir -p "$OUT"
part() {  # part NAME LIMIT ARGS...
  local name=$1 limit=$2; shift 2
  timeout -k 5 "$limit" ${PYTHON:-python3} "$here/ranks.py" "$@" > "$OUT/$name.log" 2>&1 || echo "part $name: exit $?" >> "$OUT/$name.log"
}
part 8b-1 110 8b 1 0 & a=$!
[ "${ONLY:-}" = 8b ] || { part gpt-1 150 gpt 1 1 & b=$!; }
wait $a; [ -z "${b:-}" ] || wait $b
part 8b-2 150 8b 2
[ "${ONLY:-}" = 8b ] || part gpt-2 200 gpt 2
grep -hE "^part |^  kernel" "$OUT"/{8b-1,gpt-1,8b-2,gpt-2}.log 2>/dev/null
echo "==== table"
grep -hE "^\[" "$OUT"/{8b-1,gpt-1,8b-2,gpt-2}.log 2>/dev/null | grep -E "t/s|bits|NMSE|step of|GAVE UP"
${PYTHON:-python3} - "$OUT" <<'P'
import pathlib, re, sys
found = {}
for path in pathlib.Path(sys.argv[1]).glob("*.log"):
    for name, size, test, how, rate in re.findall(r"RATE (\S+) (\d) (\S+) (\S+) ([\d.]+)", path.read_text()):
        found[name, int(size), test, how] = float(rate)
for (name, size, test, how), rate in sorted(found.items()):
    one = found.get((name, 1, test, "plain"))
    print(f"{name} {test}: {size} GPU, {how}: {rate:.0f} t/s" + (f", ratio {rate / one:.3f}" if size > 1 and one else ""))
P
