"""Figures that issue 22 lacks. forms.py ops PART/PARTS warm | ops all | model CACHES; TINY=1 for a dry run on a CPU.

`ops 0/4 warm` measures every fourth shape with few runs, so that its kernels are compiled; `ops all` in order, for the
table. `model`: 8B steps, sessions in turn in one process."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

TINY = bool(os.environ.get("TINY"))
OUT = os.environ.get("OUT", "/tmp/out")


def shapes():
    from dataclasses import replace

    from graphrt.tools.bench import op_shapes as o

    full, longer, causal = o._FULL, o._LONGER, o._CAUSAL
    found = [full, longer, *(s for s in o._PREFILL if s.kv_type == "f8_e4m3"), causal]
    found += [s for s in o._PREFILL if s.score in ("softcap", "identity") or s.softcap]
    d65536 = o._DECODE_128[2]
    found += [d65536, *(o._quantized(d65536, kind, 0, 0) for kind in ("f8_e4m3", "q8_0", "q4_0"))]
    at16k = o._DECODE_128[1]
    found += [at16k, *(o._quantized(at16k, kind, 0, 0) for kind in ("f8_e4m3", "q8_0"))]
    found += [replace(o._decode(128, (32, kv), n), name="", panels=p) for kv, n in ((8, 4096), (8, 65536), (32, 4096), (32, 16384)) for p in (False, True)]
    passes = [s for s in o._PASSES if s.d == 128]
    found += passes
    if os.environ.get("STANDARD", "1") == "1":
        found += [s for s in o._BOTH if (s.d, s.n_q, s.mask) in {(128, 2048, "none"), (64, 2048, "none"), (64, 8192, "none")}]
    unique = list({s.name: replace(s, first=None, goal=None, llama=None) for s in found}.values())
    return unique


def ops(which: str, warm: bool) -> None:
    from graphrt.tools.bench import op_shapes as o
    from graphrt.tools.verbs import bench_op

    chosen = shapes()
    if which != "all":
        part, parts = map(int, which.split("/"))
        chosen = chosen[part::parts]
    if TINY:
        chosen = [s for s in o.tiny(chosen)]
    args = argparse.Namespace(op="FLASH_ATTN_EXT", repetitions=10 if warm else None, no_peers=True, tiny=TINY, backend=None, schedule=None)
    if warm:  # kernels alone: nothing is timed that counts
        from graphrt.tools.bench import timing

        timing.ceilings = lambda cuda: timing.Ceilings(1.0, {"f16": 1.0})
    report = bench_op._measure_all(args, bench_op._backend(args), chosen)
    if warm:
        return
    json.dump(report.as_json(), open(f"{OUT}/forms-ops.json", "w"), indent=1)
    table(report)


def table(report) -> None:
    rows = {r.shape.name: r for r in report.rows}
    print(f"==== ops: {report.machine['device']}, copies {report.best.copy_gb_per_s:.0f} GB/s, f16 {max(report.best.tflop_per_s.values()):.0f} TFLOP/s")
    for r in report.rows:
        if r.seconds is None:
            print(f"{r.shape.name}: {r.status} {r.message}")
            continue
        spread = "-".join(f"{1e6 * t:.1f}" for t in r.spread)
        print(f"{r.shape.name:58s} {1e6 * r.seconds:9.1f} us ({spread}) {r.tflop_per_s:7.1f} TF {r.gb_per_s:6.0f} GB/s err {r.error:.1e} mem {(r.memory or 0) / 1e6:.0f} MB {r.cost}")

    def ratio(a, b):
        if a in rows and b in rows and rows[a].seconds and rows[b].seconds:
            print(f"  {a} / {b}: {rows[a].seconds / rows[b].seconds:.3f} of the time")

    for name in rows:
        for word in (" score softcap", " score identity", " panels", " standard", " f8_e4m3", " q8_0", " q4_0"):
            if name.endswith(word):
                ratio(name, name.removesuffix(word) + (" softcap" if "softcap" in word and name.removesuffix(word) + " softcap" in rows else ""))


def fuse_names(extra: str) -> str:
    from graphrt.backends.triton.fuse import FUSIONS

    return ",".join([*(f.name for f in FUSIONS), extra])


def model(caches: str, warm: bool) -> None:
    import numpy as np

    from graphrt.models.engine import SessionOptions
    from graphrt.models.model import Model
    from graphrt.models.synthetic import synthetic
    from graphrt.tools.bench.model import Prepared, backends_for
    from graphrt.tools.bench.workload import Test

    name = "tiny" if TINY else "llama-8b:q4_k_m"
    depth, n, rounds = (40, 8, 2) if TINY else (16384, 128, 1 if warm else 6)
    backends = backends_for("triton" if not TINY or os.environ.get("TRITON_INTERPRET") else "cpu", False)
    made = Model(synthetic(name), backends, 1)
    test = Test("tg", n, depth)
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 200 if TINY else 120000, test.end).tolist()
    wanted = {
        "f16": ("f16", None), "f16 rotated": ("f16", "rotated_projections"), "f16 rotated 80": ("f16", "rotated_projections"), "f16 append": ("f16", "rope_cache_attention"),
        "f8": ("f8_e4m3", None), "f8 rotated": ("f8_e4m3", "rotated_projections"), "q8_0": ("q8_0", None), "q4_0": ("q4_0", None),
    }
    if caches != "all":
        wanted = {k: v for k, v in wanted.items() if k in caches.split(",")}
    from graphrt.backends.triton.kernels.products import rotated

    plain = rotated.options_for
    prepared, logits = {}, {}
    for what, (kind, fuse) in wanted.items():
        os.environ.pop("GRAPHRT_FUSE", None)
        if fuse:
            os.environ["GRAPHRT_FUSE"] = fuse_names(fuse)
        # 80 registers: six programs a multiprocessor, so that all 768 of a layer's projections run at once.
        rotated.options_for = (lambda t, c: plain(t, c) | {"maxnreg": 80}) if what.endswith("80") else plain
        t = time.perf_counter()
        try:
            p = Prepared(made, test, SessionOptions(n_ctx=test.end + 64, n_batch=64 if TINY else 2048, type_k=kind, type_v=kind), ids)
            p.once()
            p._put_back()
            logits[what] = p.engine.read({0: ids[depth : depth + 1]})[0].astype(np.float64)
            p.once()
            p.once()
            prepared[what] = p
        except Exception as error:  # the others go on
            print(f"{what}: {type(error).__name__}: {str(error)[:600]}")
            continue
        print(f"{what}: ready after {time.perf_counter() - t:.1f} s", flush=True)
    times = {what: [] for what in prepared}
    order = list(prepared)
    for r in range(rounds):
        for what in order if r % 2 == 0 else order[::-1]:
            times[what].append(prepared[what].once() / n)
    if warm:
        return
    print("==== 8B Q4_K_M (random weights), tg128 @ d16384, sessions in turn, medians of", rounds)
    base = statistics.median(times["f16"]) if "f16" in times else None
    for what, found in times.items():
        med = statistics.median(found)
        against = what.split()[0]
        same = logits.get(against)
        error = float(((logits[what] - same) ** 2).sum() / (same**2).sum()) if same is not None else float("nan")
        of = f" {base / med:.4f} of f16's speed" if base else ""
        print(f"{what:12s} {1e6 * med:8.1f} us a token ({1e6 * min(found):.1f} to {1e6 * max(found):.1f}) {1 / med:7.1f} t/s{of}; NMSE of logits to {against} {error:.1e}")
    layers = 32
    for a, b in (("f16", "f16 rotated"), ("f16", "f16 rotated 80"), ("f16", "f16 append"), ("f8", "f8 rotated")):
        if a in times and b in times:
            saved = statistics.median(x - y for x, y in zip(times[a], times[b]))
            print(f"  {b}: {1e6 * saved / layers:+.3f} us a layer saved (median of pairs)")


if __name__ == "__main__":
    verb, rest = sys.argv[1], sys.argv[2:]
    warm = "warm" in rest
    if verb == "ops":
        ops(rest[0], warm)
    else:
        model(rest[0], warm)
