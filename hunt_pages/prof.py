"""Temporary: where the time of bench shapes and of a model's ragged decode step goes, by torch's profiler."""
import json, sys, tempfile, time
from collections import defaultdict, deque

import numpy as np
import torch


def kernels(work, n):
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(n):
            work()
        torch.cuda.synchronize()
    path = tempfile.mktemp(suffix=".json")
    prof.export_chrome_trace(path)
    events = json.loads(open(path, encoding="utf-8", errors="replace").read(), strict=False)["traceEvents"]
    found = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(((float(e["ts"]), float(e["dur"]), str(e["name"]), e["args"].get("grid"), e["args"].get("registers per thread")) for e in found))


def table(found, n, title):
    by, until = defaultdict(lambda: [0, 0.0, 0.0]), 0.0
    for ts, dur, name, *_ in found:
        row = by[name[:70]]
        row[0] += 1
        row[1] += dur
        row[2] += max(ts + dur - max(ts, until), 0.0)
        until = max(until, ts + dur)
    span = (found[-1][0] + found[-1][1] - found[0][0]) / n
    print(f"{title}: span {span:.1f} us a run, own {sum(r[2] for r in by.values()) / n:.1f}, kernels {len(found) / n:.0f}")
    for name, (count, total, own) in sorted(by.items(), key=lambda x: -x[1][2])[:28]:
        print(f"   {own / n:10.1f} us  x{count / n:6.1f}  each {total / count:8.2f}  {name}")
    sys.stdout.flush()


def shapes(names, nodes=None):
    import graphrt
    from graphrt.backend import get_backend
    from graphrt.graph import Graph
    from graphrt.tools.bench import varlen
    from graphrt.tools.bench.op_inputs import Noise
    from graphrt.tools.bench.timing import CudaClock
    from graphrt.tools.bench.varlen_shapes import SHAPES
    backend, clock, noise = get_backend("triton"), CudaClock(), Noise()
    for name in names:
        shape = next(s for s in SHAPES if s.name == name)
        for n_nodes in nodes or (1,):
            t0 = time.time()
            program = varlen.build(shape, n_nodes, noise)
            exe = graphrt.prepare(Graph(*program.nodes), backend)
            for leaf, values in program.values.items():
                exe.write(leaf, values.reshape(leaf.shape) if not leaf.dtype.is_quantized else values)
            for _ in range(3):
                exe.run()
            wrong = varlen.wrong(program, exe)
            us = 1e6 * clock.times(exe.run, 40, exe.synchronize).median / n_nodes
            print(f"## {name} nodes {n_nodes}: {us:.1f} us a node {wrong} [{time.time() - t0:.1f} s]")
            found = kernels(lambda: (exe.run(), exe.synchronize()), 1)
            base = found[0][0]
            for ts, dur, kernel, grid, regs in found[:7]:
                print(f"     at {ts - base:8.1f} for {dur:8.2f}  {kernel[:48]} {grid} r{regs}")
            sys.stdout.flush()
            del exe, program


def model(name, what):
    from graphrt.backend import get_backend
    from graphrt.models.model import Model
    from graphrt.models.session import SessionOptions
    from graphrt.models.synthetic import synthetic
    from graphrt.tools.bench.model import SPARE, Prepared, measure
    from graphrt.tools.bench.workload import Batch, Test
    t0 = time.time()
    m = Model(synthetic(name), [get_backend("triton", exact=False)])
    test = Test("tg", 64, 0, Batch.of(what))
    print("lengths", sum(test.batch.lengths), max(test.batch.lengths or [0]))
    ids = np.random.default_rng(0).integers(1, 1000, test.end + 64).tolist()
    p = Prepared(m, test, SessionOptions(n_ctx=test.end + SPARE, n_batch=2048), ids)
    t1 = time.time()
    row = measure(p, 2, None)
    print(f"## {name} {test}: {row['tokens_per_s']:.1f} t/s +- {row['deviation']:.1f} (prepared {t1 - t0:.0f} s, all {time.time() - t0:.0f})")
    p._put_back()
    first = p.tokens[np.arange(test.batch.n), [min(s, test.end - 1) for s in test.starts]]
    n = 24
    found = kernels(lambda: deque(p.engine.run_ahead(first, n), maxlen=0), 1)
    table(found, n, "step")
    # one layer of a late step, in order
    attends = [i for i, e in enumerate(found) if "decode" in e[2]]
    if len(attends) > 70:
        a, b = attends[-40], attends[-39]
        for ts, dur, kernel, grid, regs in found[a : b + 1]:
            print(f"     at {ts - found[a][0]:8.1f} for {dur:8.2f}  {kernel[:60]} {grid} r{regs}")
    import inspect
    print(f"all {time.time() - t0:.0f} s", flush=True)


if sys.argv[1] == "shapes":
    shapes(sys.argv[3:], [int(n) for n in sys.argv[2].split(",")])
else:
    model(sys.argv[2], sys.argv[3])
