"""Products of 2 to 16 tokens: gemm_small/int8.py against gemv.py and gemm_small/wgmma.py, in turn in one process.

argv[1]: cuda, or cpu to only build (and for sm_90 compile) every launch. Prints a table last; every part is checked
before it is timed, and a part that fails is told and left out.
"""

import os
import statistics
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import triton

from graphrt.backends.triton import device
from graphrt.backends.triton.kernels.products.activations import Q8Rows, Rows, quantize_rows
from graphrt.backends.triton.kernels.products.gemm_small import int8_launch, mma_launch
from graphrt.backends.triton.kernels.products.gemm_small.mma_launch import BatchConfig
from graphrt.backends.triton.kernels.products.gemv import Segment, gemv
from graphrt.backends.triton.kernels.products.half import Activations, Gate
from graphrt.backends.triton.packing import Packed, pack
from graphrt.dtypes import dtype
from graphrt.testing import dequantize, quantize

CUDA = sys.argv[1] == "cuda"
DEVICE = "cuda:0" if CUDA else "cpu"
BEGUN, LEFT = time.time(), float(os.environ.get("SECONDS_LEFT", 150))
TABLE: list[str] = []
if CUDA:
    p = torch.cuda.get_device_properties(0)
    TARGET = next(
        f for f in [device.Target("sm_%d%d" % torch.cuda.get_device_capability(), DEVICE, p.multi_processor_count,
                                  p.shared_memory_per_block_optin, p.L2_cache_size)]
    )
else:
    TARGET = device.Target("sm_90", "cpu", 132, 232448, 50 << 20)


class Ctx:
    """What products want of a Context."""

    def __init__(self):
        self.target, self.shared, self._scratch = TARGET, {}, {}

    def shared_scratch(self, name, nbytes):
        found = self._scratch.get(name)
        if found is None or found.numel() < nbytes:
            found = self._scratch[name] = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
        return found


CTX = Ctx()


def say(text):
    print(f"[{time.time() - BEGUN:5.1f} s] {text}", flush=True)


def told(text):
    TABLE.append(text)
    say(text)


def left():
    return LEFT - (time.time() - BEGUN)


def clocks():
    ask = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=10).stdout.strip()
    except OSError as error:
        return str(error)


def compile_all(launches):
    """All kernels at once; what fails says so when it runs."""
    started = time.time()
    if CUDA:
        with ThreadPoolExecutor(14) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            for launch in launches:
                launch.compile_ahead()
    say(f"{len(launches)} launches compiled in {time.time() - started:.1f} s")


def nmse(a, b):
    a, b = a.double(), b.double()
    return float(((a - b) ** 2).sum() / (b**2).sum())


# ---- results ----


def x_of(n, k, seed):
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    q = Q8Rows.empty(n, k, DEVICE)
    if CUDA:
        quantize_rows(TARGET, Rows(values.view(-1), n, k, k), q)()
    return values, q


def rounded(q):
    """A Q8Rows' values in f64, on the host."""
    parts = q.q.cpu().double().view(q.parts, q.n, q.k)
    numbers = parts[0] * 254 + parts[1] if q.parts == 2 else parts[0]
    return numbers * q.d.cpu().double().repeat_interleave(32, dim=1)


def random_weight(kind, m, k, rng):
    raw = quantize(rng.standard_normal((m, k)).astype(np.float32), dtype(kind), rng)
    w = Packed.empty(kind, m, k, DEVICE)
    pack(torch.from_numpy(np.ascontiguousarray(raw).view(np.uint8).reshape(m, -1)).to(DEVICE), w)
    return w, torch.from_numpy(dequantize(raw, dtype(kind)).reshape(m, k)).double()


CHECKED = ("q4_K", "q6_K", "q8_0", "mxfp4", "q5_K", "q4_0", "q5_0", "nvfp4", "iq4_xs")


def check():
    rng = np.random.default_rng(3)
    cases = []
    for kind in CHECKED:
        for k in (4096, 1024):
            w, values = random_weight(kind, 304, k, rng)
            u, ups = random_weight(kind, 304, k, rng) if kind in CHECKED[:2] else (w, values)
            for n in (2, 4, 8, 16) if kind in CHECKED[:4] and k == 4096 else (3, 13):
                _, q = x_of(n, k, n)
                out = torch.full((n, 304), float("nan"), device=DEVICE)
                cases.append((kind, k, n, q, int8_launch.product([w], q, [out], CTX), out, values, None))
                if n in (3, 8, 13, 16) and kind in CHECKED[:2]:
                    out = torch.full((n, 304), float("nan"), device=DEVICE)
                    made = int8_launch.product([w, u], q, [out], CTX, gate=Gate("swiglu"))
                    cases.append((kind + " glu", k, n, q, made, out, values, ups))
    compile_all([c[4] for c in cases])
    worst = {}
    for kind, k, n, q, launch, out, values, ups in cases:
        if not CUDA:
            continue
        for _ in range(3):  # counters must be zeros again
            launch()
        x = rounded(q)
        expected = x @ values.T
        if ups is not None:
            expected = expected / (1 + torch.exp(-expected)) * (x @ ups.T)
        error = nmse(out.cpu(), expected)
        worst[kind] = max(worst.get(kind, 0), error)
        if not error < 1e-11:
            told(f"WRONG {kind} k {k} n {n}: NMSE {error:.2e}; {launch.args['ROWS']} rows, split {launch.args['SPLIT']}")
    told("worst NMSE against f64: " + ", ".join(f"{kind} {e:.1e}" for kind, e in worst.items()))


# ---- times ----


def filled(kind, m, k):
    """A matrix of random codes and sane scales."""
    w = Packed.empty(kind, m, k, DEVICE)
    w.quants.random_(-(2**31), 2**31 - 1)
    if w.high is not None:
        w.high.random_(-(2**31), 2**31 - 1)
    if w.scales.dtype == torch.uint8:
        w.scales.random_(1, 63)
    elif w.scales.dtype == torch.int8:
        w.scales.random_(-60, 60)
    else:
        w.scales.fill_(0.01)
    if w.supers is not None:
        w.supers.fill_(0.001)
    return w


def nbytes(w):
    return sum(p.numel() * p.element_size() for p in (w.quants, w.high, w.scales, w.supers) if p is not None)


# name: kind, m, k, segments, gate
SHAPES = {
    "o 4096x4096": ("q4_K", (4096,), 4096, ""),
    "qk 5120x4096": ("q4_K", (4096, 1024), 4096, ""),
    "v 1024x4096 q6": ("q6_K", (1024,), 4096, ""),
    "gate/up 14336": ("q4_K", (14336, 14336), 4096, "swiglu"),
    "down 4096x14336": ("q4_K", (4096,), 14336, ""),
    "down q6": ("q6_K", (4096,), 14336, ""),
    "head 128256 q6": ("q6_K", (128256,), 4096, ""),
}
B = BatchConfig
CONFIGS = {
    8: {
        "128x2 w8 s3 p2": B(128, 2, 8, 3, per_sm=2),
        "128x2 w8 s4 p2": B(128, 2, 8, 4, per_sm=2),
        "64x2 w4 s3 p4": B(64, 2, 4, 3, per_sm=4),
        "64x2 w4 s4 p3": B(64, 2, 4, 4, per_sm=3),
        "64x4 w8 s3 p2": B(64, 4, 8, 3, per_sm=2),
        "32x4 w4 s3 p4": B(32, 4, 4, 3, per_sm=4),
        "32x8 w8 s3 p2": B(32, 8, 8, 3, per_sm=2),
        "64x2 w8 s4 p2": B(64, 2, 8, 4, per_sm=2),
    },
    16: {
        "64x2 w8 s3 p2": B(64, 2, 8, 3, per_sm=2),
        "64x2 w8 s4 p2": B(64, 2, 8, 4, per_sm=2),
        "128x2 w8 s4 p1": B(128, 2, 8, 4, per_sm=1),
        "32x4 w8 s3 p2": B(32, 4, 8, 3, per_sm=2),
        "64x4 w16 s3 p1": B(64, 4, 16, 3, per_sm=1),
    },
}


def fits(config, kind, n, k):
    room = (TARGET.shared_memory - (config.per_sm - 1) * 1024) // config.per_sm
    return config.stages * int8_launch.stage_bytes(kind, config.rows, n, k, config.wk) <= room


def graph_of(launches):
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def once(graph):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def products():
    plans = []
    for shape, (kind, rows, k, gate) in SHAPES.items():
        if not CUDA:
            rows = tuple(min(m, 512) for m in rows)
        size = sum(nbytes(Packed.empty(kind, 32, k, "cpu")) * m // 32 for m in rows)
        copies = max(2, min(24, int(180e6 // size) + 1)) if CUDA else 2
        weights = [[filled(kind, m, k) for m in rows] for _ in range(copies)]
        for n in (2, 4, 8, 12, 16) if shape.startswith(("gate", "down 4096")) else (2, 4, 8, 16):
            values, q = x_of(n, k, n)
            made = {}

            def launches(make):
                found = []
                for ws in weights:
                    outs = [torch.full((n, w.rows), float("nan"), device=DEVICE) for w in ws[: 1 if gate else None]]
                    found.append((make(ws, outs), outs))
                return found

            if n <= 8:
                made["gemv"] = launches(
                    lambda ws, outs: gemv(
                        TARGET, [Segment(w, outs[0 if gate else i].view(-1), w.rows) for i, w in enumerate(ws)], q, glu=gate
                    )
                )
            else:
                place = torch.arange(k, device=DEVICE)
                order = place // 128 * 128 + (place // 2 % 4 * 32 + place // 64 % 2 * 16 + place // 16 % 4 * 4
                                              + place % 2 * 2 + place // 8 % 2)
                half = Activations(values[:, order].half().contiguous(), None, True)
                made["wgmma"] = launches(
                    lambda ws, outs: mma_launch.product(ws, half, outs, CTX, gate=Gate(gate) if gate else None)
                )
            for name, config in CONFIGS[8 if n <= 8 else 16].items():
                if fits(config, kind, n, k) and (n in (8, 16) or name.startswith(("128x2 w8 s3", "64x2 w8 s3", "64x2 w4 s3"))):
                    made[name] = launches(
                        lambda ws, outs: int8_launch.product(
                            ws, q, outs, CTX, gate=Gate(gate) if gate else None, config=config
                        )
                    )
            plans.append((shape, n, size, made, weights, q, gate))
    compile_all([found[0][0] for plan in plans for found in plan[3].values()])
    totals = {}
    for shape, n, size, made, weights, q, gate in plans:
        if not CUDA or left() < 60:
            continue
        # What is right: gemv, eight tokens at a time.
        reference = []
        for i in range(0, n, 8):
            part = Q8Rows(q.q[i : i + 8].contiguous(), q.d[i : i + 8].contiguous(), q.s[i : i + 8].contiguous(), 1)
            outs = [torch.empty(part.n, w.rows, device=DEVICE) for w in weights[0][: 1 if gate else None]]
            gemv(TARGET, [Segment(w, outs[0 if gate else j].view(-1), w.rows) for j, w in enumerate(weights[0])], part, glu=gate)()
            reference.append(outs[0])
        reference = torch.cat(reference)
        graphs = {}
        for name, found in made.items():
            try:
                graphs[name] = graph_of([launch for launch, _ in found])
                error = nmse(found[0][1][0], reference)
                if not error < (1e-10 if name != "wgmma" else 1e-2):
                    told(f"WRONG {shape} n {n} {name}: NMSE {error:.2e}")
            except Exception as error:  # noqa: BLE001 (a config that can't run shall not end the run)
                told(f"FAILED {shape} n {n} {name}: {type(error).__name__} {str(error)[:150]}")
        times = {name: [] for name in graphs}
        for _ in range(5):
            for name, graph in graphs.items():
                times[name].append(once(graph) * 1e3 / len(weights))
        us = {name: statistics.median(t) for name, t in times.items()}
        old = "gemv" if n <= 8 else "wgmma"
        best = min((name for name in us if name != old), key=us.get, default=old)
        totals.setdefault(n, []).append((shape, us.get(old, float("nan")), us[best]))
        told(
            f"{shape} n {n}: {old} {us.get(old, float('nan')):.1f} us ({size / us.get(old, 1) / 1e6:.2f} TB/s); best {best} "
            f"{us[best]:.1f} ({size / us[best] / 1e6:.2f}); " + ", ".join(f"{a} {b:.1f}" for a, b in us.items() if a != old)
        )
    for n, found in sorted(totals.items()):
        say(f"n {n}: " + "; ".join(f"{shape} {a:.1f} -> {b:.1f}" for shape, a, b in found))


# ---- a model ----


def model():
    from graphrt.models.engine import SessionOptions
    from graphrt.models.model import load
    from graphrt.models.synthetic import synthetic

    layers = 8
    name = "llama-8b:q4_k_m" if CUDA else "smollm2-135m"
    found = load(synthetic(name, layers), "triton" if CUDA else "cpu")
    say(f"{name} of {layers} layers loaded")
    most = int8_launch.MAX_TOKENS
    for batch in (2, 4, 8, 16, 1, 32) if CUDA else (2,):
        if CUDA and left() < 12:
            say("no time left for more batches")
            break
        engines, answers, times = {}, {}, {}
        for label, limit in (("old", 0), ("new", most)):
            int8_launch.MAX_TOKENS = limit
            engine = engines[label] = found.engine(batch, SessionOptions(n_ctx=512))
            ids = (np.arange(batch) * 7 + 3).astype(np.int32)
            engine.read({seq: [int(i), 5, 9] for seq, i in enumerate(ids)})
            answers[label] = [np.array(x) for x in engine.run_ahead(ids, 12)]
        int8_launch.MAX_TOKENS = most
        for _ in range(3):
            for label, engine in engines.items():
                begun = time.perf_counter()
                count = sum(1 for _ in engine.run_ahead(ids, 40))
                times.setdefault(label, []).append((time.perf_counter() - begun) / count * 1e3)
        same = np.mean([np.mean(a == b) for a, b in zip(answers["old"], answers["new"])])
        told(f"{layers} layers and head, {batch} sequences: ms a step old {min(times['old']):.3f}, new {min(times['new']):.3f}; "
             f"{same:.0%} of 12 tokens the same (random weights)")


def main():
    if CUDA:
        told(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}; {clocks()}")
    for part in (check, products, model):
        try:
            part()
        except Exception:  # noqa: BLE001 (the parts that ran shall still be told)
            told(f"FAILED {part.__name__}: {traceback.format_exc()[-1500:]}")
    print("\n==== table", *TABLE, sep="\n", flush=True)


main()
