"""Products of 2 to 16 tokens: gemm_small/int8.py against gemv.py and gemm_small/wgmma.py, in turn in one process.

argv[1]: cuda, or cpu to only build every launch. WARM=only: 16 processes fill Triton's cache and end, nothing is timed
(may run beside other work). WARM=0: times, for SECONDS_LEFT (50) at most. Prints a table last; a product is checked
before it is timed, and a part that fails is told and left out. measure_full.py has more products and configs.
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
from graphrt.backends.triton.packing import Packed

int8_launch.MIN_TOKENS = 2  # whatever the tree says: the model is timed with 4 tokens too
CUDA = sys.argv[1] == "cuda"
DEVICE = "cuda:0" if CUDA else "cpu"
BEGUN, LEFT = time.time(), float(os.environ.get("SECONDS_LEFT", 50))
TABLE: list[str] = []
WARM = os.environ.get("WARM", "0") == "only"
SHARE, SHARES = int(os.environ.get("SHARE", -1)), 16
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


def x_of(n, k, seed):
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    q = Q8Rows.empty(n, k, DEVICE)
    if CUDA:
        quantize_rows(TARGET, Rows(values.view(-1), n, k, k), q)()
    return values, q


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
    "gate/up q4 14336x4096 glu": ("q4_K", (14336, 14336), 4096, "swiglu"),
    "down q6 4096x14336": ("q6_K", (4096,), 14336, ""),
    "down q4 4096x14336": ("q4_K", (4096,), 14336, ""),
    "o q4 4096x4096": ("q4_K", (4096,), 4096, ""),
}
B = BatchConfig
# The first is what int8_launch.py has. Others: 24 warps a multiprocessor, or four warps along k and fewer splits.
CONFIGS = {
    8: {
        "128x2 w8 s3 p2": B(128, 2, 8, 3, per_sm=2),
        "64x2 w8 s3 p3": B(64, 2, 8, 3, per_sm=3),
        "64x4 w8 s3 p2": B(64, 4, 8, 3, per_sm=2),
    },
    16: {
        "64x2 w8 s3 p2": B(64, 2, 8, 3, per_sm=2),
        "64x2 w8 s4 p2": B(64, 2, 8, 4, per_sm=2),
        "32x4 w8 s3 p2": B(32, 4, 8, 3, per_sm=2),
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
        copies = max(2, min(24, int(180e6 // size) + 1)) if CUDA and not WARM else 1
        weights = [[filled(kind, m, k) for m in rows] for _ in range(copies)]
        for n in (4, 8, 16):
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
                if fits(config, kind, n, k):
                    made[name] = launches(
                        lambda ws, outs: int8_launch.product(
                            ws, q, outs, CTX, gate=Gate(gate) if gate else None, config=config
                        )
                    )
            plans.append((shape, n, size, made, weights, q, gate))
    launches = [found[0][0] for plan in plans for found in plan[3].values()]
    if WARM:
        launches = [launch for i, launch in enumerate(launches) if i % SHARES == SHARE]
    compile_all(launches)
    if WARM:
        return
    totals = {}
    for shape, n, size, made, weights, q, gate in plans:
        if not CUDA or left() < 22:
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
            f"{shape} n {n}: {old} {us.get(old, float('nan')):.1f} us ({size / us.get(old, 1) / 1e3:.0f} GB/s); best {best} "
            f"{us[best]:.1f} us ({size / us[best] / 1e3:.0f} GB/s); "
            + ", ".join(f"{a} {b:.1f} ({size / b / 1e3:.0f})" for a, b in us.items() if a != old)
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
    if WARM:
        batch, limit = [(n, limit) for n in (4, 8, 16) for limit in (0, most)][SHARE]
        int8_launch.MAX_TOKENS = limit
        engine = found.engine(batch, SessionOptions(n_ctx=512))
        ids = (np.arange(batch) * 7 + 3).astype(np.int32)
        engine.read({seq: [int(i), 5, 9] for seq, i in enumerate(ids)})
        say(f"{batch} sequences, limit {limit}: {len(list(engine.run_ahead(ids, 3)))} steps")
        return
    for batch in (8, 4, 16) if CUDA else (2,):
        if CUDA and left() < 7:
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


def warm_all():
    """Every share in its own process."""
    started = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:]], env={**os.environ, "SHARE": str(i)})
        for i in range(SHARES)
    ]
    say(f"warm: exit codes {[each.wait() for each in started]}")


def main():
    if WARM and SHARE < 0:
        warm_all()
        return
    if CUDA:
        told(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}; {clocks()}")
    for part in (products, model) if not WARM or SHARE < 6 else (products,):
        try:
            part()
        except Exception:  # noqa: BLE001 (the parts that ran shall still be told)
            told(f"FAILED {part.__name__}: {traceback.format_exc()[-1500:]}")
    print("\n==== table", *TABLE, sep="\n", flush=True)


main()
