"""Temporary: products of 64 tokens by configs of gemm_small/wgmma.py."""
import sys, json, os
import numpy as np, torch
import graphrt
from graphrt.backend import get_backend
from graphrt.graph import Graph
from graphrt.tensor import new_tensor, new_input
from graphrt.dtypes import dtype
from graphrt.ops import mul_mat
from graphrt.models.synthetic_blocks import pool, cut
from graphrt.backends.triton.kernels.products.gemm_small import wgmma_launch as w
SHAPES = {"q4_K": [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096)], "q6_K": [(4096, 14336), (1024, 4096)]}
ORIG = w.config_for
def run(kind, var, only_compile, ref={}):
    w.config_for = ORIG if var is None else (lambda target, kind, tokens, m, k: w.fitted(w.HopperConfig(*var), kind, tokens, target.shared_memory))
    dt = dtype(kind); be = get_backend("triton", exact=False); rng = np.random.default_rng(1)
    blocks = pool(dt, 4096 ** -0.5, rng); said = []
    for m, k in SHAPES[kind]:
        nb = dt.row_size(m * k); copies = 1 if only_compile else max(2, int(140e6 // nb)); ws = []
        for i in range(copies):
            t = new_tensor(dt, k, m, name=f"w{i}"); data = cut(blocks, nb, rng); t.buffer = be.wrap_host(data) or be.hold(t, data); ws.append(t)
        xs = [new_input("f32", k, 64, name=f"x{i}") for i in range(copies)]
        outs = [mul_mat(t, x) for t, x in zip(ws, xs)]
        exe = graphrt.prepare(Graph(*outs), be)
        xv = np.random.default_rng(2).standard_normal((64, k)).astype(np.float32)
        for x in xs: exe.write(x, xv.reshape(x.shape))
        for _ in range(4): exe.run()
        exe.synchronize()
        if only_compile: continue
        got = np.asarray(exe.read(outs[-1])).reshape(64, -1).astype(np.float64)
        base = ref.setdefault((kind, m, k), got); err = float(np.square(got - base).sum() / np.square(base).sum())
        ts = []
        for _ in range(7):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); [exe.run() for _ in range(3)]; b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3 / 3 / copies)
        said.append(f"{m}x{k} {sorted(ts)[3]:6.2f} us{'' if err < 1e-6 else f' !! {err:.1e}'}")
        del ws, exe
    if not only_compile: print(f"{kind} {str(var):18s} " + "  ".join(said), flush=True)
todo = json.loads(sys.argv[2])
for kind, var in todo:
    try: run(kind, var, sys.argv[1] == "compile")
    except Exception as e: print(kind, var, type(e).__name__, str(e)[:150], flush=True)
