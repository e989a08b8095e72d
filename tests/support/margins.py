"""How far the cases of test_ops.py and test_fast_form.py stay below their tolerances: seeds, instruction sets, threads.

    python tests/support/margins.py --seeds 50
    python tests/support/margins.py --seeds 4 --sets all --threads 1,2,3,4

Each line is one set of instructions with one number of threads, in a process of its own: how many results it had, how
often the largest error, in the whole and in a row, fits into what judging.py allows, and where that was. Below 1 is a
failure, and the exit status then is 1. Results that must be exact have no margin and are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_OLD_NUMPY = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"
#: What tells torch, oneDNN, MKL and numpy to do without newer instructions; each reads its own when it is loaded.
SETS: dict[str, dict[str, str]] = {
    "native": {},
    "torch default": {"ATEN_CPU_CAPABILITY": "default"},
    "torch avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "torch avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "onednn sse4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "onednn avx": {"ONEDNN_MAX_CPU_ISA": "AVX"},
    "onednn avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "onednn avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "mkl sse4.2": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "mkl avx2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "numpy sse4.2": {"NPY_DISABLE_CPU_FEATURES": _OLD_NUMPY},
    "all old": {
        "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "NPY_DISABLE_CPU_FEATURES": _OLD_NUMPY,
    },
    "all avx2": {
        "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
    },
}  # fmt: skip


def _seeds_of(case: Any, seeds: range, references: Path) -> Iterator[Any]:
    """The case as judged with each seed; what float64 says is kept in `references` for the processes that follow."""
    from support.judging import Judged

    for seed in seeds:
        judged = Judged(case, seed)
        kept = references / f"{seed}" / hashlib.sha1(str(case).encode()).hexdigest()
        if kept.exists():
            judged.__dict__.update(pickle.loads(kept.read_bytes()))
        else:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(pickle.dumps({"expected": judged.expected, "limits": judged.limits}))
        yield judged


def measured(seeds: range, only: str | None, every: int, references: Path) -> Iterator[dict[str, Any]]:
    """For each case, form and seed the margins of the result."""
    from graphrt import get_backend, ops, prepare  # noqa: F401  (ops: registers them)
    from graphrt.backends.cpu.lower import _METHODS
    from graphrt.op import op_spec
    from graphrt.testing import all_cases, dequantize
    from support.judging import Judged

    for case in list(all_cases(only))[::every]:
        first = Judged(case)
        if (
            case.needs_bytes
            or op_spec(first.node.op).writes is not None
            or first.node.dtype.kind == "int"
            or first.is_moved
        ):
            continue
        forms = [True, False] if case.op in _METHODS else [True]
        exes = [prepare(first.inputs.graph(), get_backend("cpu", exact=exact)) for exact in forms]
        for judged in _seeds_of(case, seeds, references):
            for exact, exe in zip(forms, exes):
                for tensor, values in judged.inputs.values.items():
                    exe.write(tensor.name, values)
                exe.run()
                whole, row = judged.margins(dequantize(exe.read(first.node), first.node.dtype))
                where = f"{case} {'exact' if exact else 'fast'} seed {judged.seed}"
                yield {"op": case.op, "where": where, "whole": whole, "row": row}


def _child(seeds: range, only: str | None, every: int, references: Path) -> None:
    """Prints the smallest margins of each op as a line of JSON."""
    least: dict[str, dict[str, Any]] = {}
    for found in measured(seeds, only, every, references):
        op = least.setdefault(found["op"], {"n": 0, "whole": [1e9, ""], "row": [1e9, ""]})
        op["n"] += 1
        for kind in ("whole", "row"):
            op[kind] = min(op[kind], [found[kind], found["where"]])
    print(json.dumps(least))


def _environment(name: str, threads: int) -> dict[str, str]:
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {
        **os.environ,
        **counts,
        **SETS[name],
        "PYTHONPATH": path,
        "PYTHONHASHSEED": "0",
        "OMP_WAIT_POLICY": "passive",
    }


def _report(name: str, threads: int, least: dict[str, dict[str, Any]], by_op: bool) -> bool:
    """Prints the line, with by_op also one for each op; False where a margin is below 1."""
    rows = {"all": {"n": sum(op["n"] for op in least.values())}}
    rows["all"] |= {kind: min(op[kind] for op in least.values()) for kind in ("whole", "row")}
    for title, row in (rows | least if by_op else rows).items():
        (whole, at), (least_row, row_at) = row["whole"], row["row"]
        print(
            f"{name:14} {threads} {title:15} {row['n']:7} {whole:8.2f} {least_row:8.2f}  {at}; row: {row_at}",
            flush=True,
        )
    return all(row[kind][0] >= 1 for row in rows.values() for kind in ("whole", "row"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="seeds from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--sets", default="native", help=f"all, or some of: {', '.join(SETS)}")
    parser.add_argument("--threads", default="1", help="numbers of threads, with commas")
    parser.add_argument("--op", help="the cases of one op alone")
    parser.add_argument("--every", type=int, default=1, help="every so many cases")
    parser.add_argument("--by-op", action="store_true", help="a line for each op too")
    parser.add_argument("--references", type=Path, help="folder of what float64 says, kept for further runs")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _child(range(args.first, args.first + args.seeds), args.op, args.every, args.references)
        return 0
    ok = True
    print(f"{'set':14} threads{'results':>16} {'whole':>8} {'row':>8}  the smallest margins, and where")
    with tempfile.TemporaryDirectory() as folder:
        references = str(args.references or folder)
        for name in SETS if args.sets == "all" else args.sets.split(","):
            for threads in map(int, args.threads.split(",")):
                command = [sys.executable, __file__, *sys.argv[1:], "--child", "--references", references]
                done = subprocess.run(command, env=_environment(name, threads), stdout=subprocess.PIPE, check=True)
                ok &= _report(name, threads, json.loads(done.stdout.splitlines()[-1]), args.by_op)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
