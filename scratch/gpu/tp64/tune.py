"""Halved products of an 8B at 64 tokens, gemm_small/wgmma.py: candidate configurations beside today's, on one GPU.

For each shape: every candidate's result against float64 of the dequantized weights, then all candidates in turn, in
captured graphs over copies of the weights that pass the L2 cache, medians of 5. A candidate that fails or is wrong is
told and left out. WARM=only fills Triton's cache in processes. DRY=1, without a GPU: builds every launch, and counts.
"""

import os
import statistics
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import triton

from graphrt.backends.triton import device
from graphrt.backends.triton.kernels.dequantize import dequantize
from graphrt.backends.triton.kernels.products.gemm_small import mma_launch, wgmma_launch
from graphrt.backends.triton.kernels.products.gemm_small.arguments import tiles_of
from graphrt.backends.triton.kernels.products.gemm_small.wgmma_launch import HopperConfig
from graphrt.backends.triton.kernels.products.half import Activations, Gate
from graphrt.backends.triton.packing import Packed, packing_of

DRY = bool(os.environ.get("DRY"))
WARM = os.environ.get("WARM", "0") == "only"
SHARE, SHARES = int(os.environ.get("SHARE", -1)), 14
DEVICE = "cpu" if DRY else "cuda:0"
BEGUN, LEFT = time.time(), float(os.environ.get("SECONDS_LEFT", 100))
TABLE: list[str] = []
TOKENS = 64
if DRY:
    TARGET = device.Target("sm_90", "cpu", 132, 232448, 50 << 20)
else:
    p = torch.cuda.get_device_properties(0)
    arch = "sm_%d%d" % torch.cuda.get_device_capability()
    TARGET = device.Target(arch, DEVICE, p.multi_processor_count, p.shared_memory_per_block_optin, p.L2_cache_size)


@dataclass(frozen=True)
class Shape:
    """whole: a one-GPU shape, timed with today's configuration only, to have the ratio. factors: as for x rounded by a
    launch of its own, attention's and the GLU's; the norms' have none."""

    kind: str
    rows: tuple
    k: int
    gate: str = ""
    factors: bool = False
    whole: bool = False


SHAPES = {
    "gate+up q4 2x7168x4096": Shape("q4_K", (7168, 7168), 4096, "swiglu"),
    "down q4 4096x7168": Shape("q4_K", (4096,), 7168, factors=True),
    "down q6 4096x7168": Shape("q6_K", (4096,), 7168, factors=True),
    "o q4 4096x2048": Shape("q4_K", (4096,), 2048, factors=True),
    "qkv q4 (2048+512+512)x4096": Shape("q4_K", (2048, 512, 512), 4096),
    "qk q4 (2048+512)x4096": Shape("q4_K", (2048, 512), 4096),
    "vocabulary q6 64128x4096": Shape("q6_K", (64128,), 4096),
    "v q6 512x4096": Shape("q6_K", (512,), 4096),
    "whole gate+up q4": Shape("q4_K", (14336, 14336), 4096, "swiglu", whole=True),
    "whole down q4": Shape("q4_K", (4096,), 14336, factors=True, whole=True),
    "whole down q6": Shape("q6_K", (4096,), 14336, factors=True, whole=True),
    "whole o q4": Shape("q4_K", (4096,), 4096, factors=True, whole=True),
    "whole qkv q4": Shape("q4_K", (4096, 1024, 1024), 4096, whole=True),
    "whole vocabulary q6": Shape("q6_K", (128256,), 4096, whole=True),
}
WANTED = os.environ.get("SHAPES", "").split()


def say(text):
    print(f"[{time.time() - BEGUN:5.1f} s] {text}", flush=True)


def told(text):
    TABLE.append(text)
    say(text)


def left():
    return LEFT - (time.time() - BEGUN)


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


def file_bytes(shape):
    return sum(shape.rows) * shape.k * {"q4_K": 144, "q6_K": 210}[shape.kind] // 256


# ---- candidates ----


def today(shape):
    """(config, ranges) as mma_launch.product() chooses."""
    config = wgmma_launch.config_for(TARGET, shape.kind, TOKENS, sum(shape.rows), shape.k)
    return config, mma_launch.splits_of(TARGET, config, tiles_in(shape, config), shape.k)[0]


def tiles_in(shape, config):
    rows = config.rows // 2 if shape.gate else config.rows
    return sum(-(-m // rows) for m in shape.rows[: 1 if shape.gate else None])


def candidates(shape):
    """Today's first, then others: config and ranges of k, each once."""
    found = [today(shape)]
    if shape.whole:
        return found
    high = packing_of(shape.kind).high_bits
    for warpgroups, per_sm, chunk, stages, x_stages in (
        (1, 1, 4, 4, 6), (1, 1, 2, 8, 6), (1, 2, 4, 2, 3), (1, 2, 2, 3, 3), (2, 1, 4, 4, 6), (2, 1, 2, 8, 6),
        (2, 1, 4, 3, 4), (4, 1, 4, 2, 4),
    ):  # fmt: skip
        if shape.k % (chunk * 128) or (high and (warpgroups == 4 or warpgroups * per_sm > 2)):
            continue
        config = wgmma_launch.fitted(
            HopperConfig(warpgroups, chunk, stages, x_stages, per_sm), shape.kind, TOKENS, TARGET.shared_memory
        )
        if config is None or config.chunk != chunk:
            continue
        tiles, steps, places = tiles_in(shape, config), shape.k // config.step, TARGET.sm_count * per_sm
        most = max(1, min(places // tiles, steps // config.least_steps))
        for ranges in {1, 2, 3, most // 2, most} if tiles < 4 * TARGET.sm_count else {1}:
            if 1 <= ranges <= most and (ranges * tiles >= 40 or ranges == most):
                each = -(-steps // ranges)
                if -(-steps // each) == ranges and (config, ranges) not in found:
                    found.append((config, ranges))
    return found


def named(config, ranges):
    return (
        f"{config.warpgroups}wg chunk {config.chunk} s{config.stages} x{config.x_stages}"
        + f" p{config.per_sm}" * (config.per_sm > 1) + f" /{ranges}" * (ranges > 1)
    )


def launch_of(shape, weights, x, outs, config, ranges):
    gate = Gate(shape.gate) if shape.gate else None
    steps = -(-shape.k // config.step)
    tiles = tiles_of(weights, config.rows, gate)
    assert tiles == tiles_in(shape, config)
    split = mma_launch._split(tiles, (ranges, -(-steps // ranges)), config, TOKENS, CTX)
    return wgmma_launch.launch(TARGET, weights, x, outs, config, TOKENS, gate=gate, split=split)


def made(shape, copies):
    """(weights of each copy, x, launches by name: of each copy, outs of each copy by name)."""
    weights = [[filled(shape.kind, m, shape.k) for m in shape.rows] for _ in range(copies)]
    values = torch.randn(TOKENS, shape.k, generator=torch.Generator().manual_seed(3)).half().to(DEVICE)
    place = torch.arange(shape.k, device=DEVICE)
    order = place // 128 * 128 + (
        place // 2 % 4 * 32 + place // 64 % 2 * 16 + place // 16 % 4 * 4 + place % 2 * 2 + place // 8 % 2
    )
    factors = torch.ones(TOKENS, device=DEVICE) if shape.factors else None
    x = Activations(values[:, order].contiguous(), factors, True)
    n_outs = 1 if shape.gate else len(shape.rows)
    outs = [torch.full((TOKENS, m), float("nan"), device=DEVICE) for m in shape.rows[:n_outs]]
    launches = {
        named(config, ranges): [launch_of(shape, ws, x, outs, config, ranges) for ws in weights]
        for config, ranges in candidates(shape)
    }
    return weights, values, launches, outs


def key_of(launch):
    return str((launch.args["form"], launch.options))


def compile_all(launches):
    begun = time.time()
    with ThreadPoolExecutor(2) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for launch in launches:
            launch.compile_ahead()
    say(f"{len(launches)} launches compiled in {time.time() - begun:.1f} s")


# ---- times ----


def reference(shape, weights, values):
    """float64 of what the weights stand for, made a few thousand rows at a time."""
    found = []
    for w in weights:
        whole = torch.empty(w.rows * shape.k, dtype=torch.float32, device=DEVICE)
        dequantize(w, whole)()
        x = values.double()
        parts = [x @ rows.double().T for rows in whole.view(w.rows, shape.k).split(8192)]
        found.append(torch.cat(parts, 1))
    if shape.gate:
        return [torch.nn.functional.silu(found[0]) * found[1]]
    return found


def graph_of(launches):
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


def timed(name, shape):
    copies = max(2, min(24, int(180e6 // file_bytes(shape)) + 1))
    weights, values, launches, outs = made(shape, copies)
    right = reference(shape, weights[0], values)
    graphs = {}
    for label, found in launches.items():
        try:
            for out in outs:
                out.fill_(float("nan"))
            for _ in range(2):  # counters are left as the next launch needs them
                found[0]()
            torch.cuda.synchronize()
            error = max(float(((a.double() - b) ** 2).sum() / (b**2).sum()) for a, b in zip(outs, right))
            if not error < 1e-5:
                told(f"WRONG {name} {label}: NMSE {error:.2e}")
                continue
            graphs[label] = graph_of(found * max(1, 24 // copies))
        except Exception as error:  # noqa: BLE001 (a config that can't run shall not end the run)
            told(f"FAILED {name} {label}: {type(error).__name__} {str(error)[:150]}")
    times = {label: [] for label in graphs}
    for _ in range(5):
        for label, graph in graphs.items():
            times[label].append(once(graph) * 1e3 / (copies * max(1, 24 // copies)))
    us = {label: statistics.median(t) for label, t in times.items()}
    now = next(iter(launches))
    best = sorted(us, key=us.get)
    bound = max(file_bytes(shape) / 4.2e6, 2 * TOKENS * sum(shape.rows) * shape.k / 700e6)
    told(
        f"{name}: today {now} {us.get(now, float('nan')):.1f} us (bound {bound:.1f}); "
        + ", ".join(f"{label} {us[label]:.1f}" for label in best[:5] if not shape.whole)
    )
    say("   all: " + ", ".join(f"{label} {t:.1f}" for label, t in us.items()))


def warm_all():
    started = [
        subprocess.Popen([sys.executable, __file__], env={**os.environ, "SHARE": str(i)}) for i in range(SHARES)
    ]
    print(f"warm: exit codes {[each.wait() for each in started]}", flush=True)


def warm(shapes):
    """This process's share of all kernels that differ."""
    keys = {}
    for shape in shapes.values():
        if sum(shape.rows) > 30000:  # the same kernel, less memory
            shape = Shape(shape.kind, tuple(max(256 * 132 + 256, m // 2) for m in shape.rows), shape.k, shape.gate, shape.factors, shape.whole)
        for found in made(shape, 1)[2].values():
            keys.setdefault(key_of(found[0]) + shape.kind, found[0])
    launches = list(keys.values())[SHARE::SHARES]
    compile_all(launches)


def aot(shapes):
    """Compiles without a GPU, for registers and spills: needs the tree's tests on PYTHONPATH."""
    from support.aot import compiled, figures

    done = set()
    for name, shape in shapes.items():
        rows = tuple(min(m, 256 * 133) if sum(shape.rows) > 30000 else m for m in shape.rows)
        shape = Shape(shape.kind, rows, shape.k, shape.gate, shape.factors, shape.whole)
        for label, found in made(shape, 1)[2].items():
            if key_of(found[0]) + shape.kind not in done:
                done.add(key_of(found[0]) + shape.kind)
                begun = time.time()
                try:
                    told = figures(compiled(found[0], "sm_90"), "sm_90")
                except Exception as error:  # noqa: BLE001 (what can't be compiled is told)
                    told = f"FAILED {type(error).__name__} {str(error)[:200]}"
                say(f"{name} {label}: {told} {time.time() - begun:.0f} s")


def main():
    shapes = {name: s for name, s in SHAPES.items() if not WANTED or any(name.startswith(w) for w in WANTED)}
    if os.environ.get("AOT"):
        aot(shapes)
        return
    if DRY:
        keys = set()
        for name, shape in shapes.items():
            launches = made(shape, 1)[2]
            keys |= {key_of(found[0]) + shape.kind for found in launches.values()}
            tiles = tiles_in(shape, today(shape)[0])
            say(f"{name}: {len(launches)} candidates, today {next(iter(launches))}: {tiles} tiles x {today(shape)[1]}")
            say("   " + ", ".join(launches))
        say(f"{len(keys)} kernels")
        return
    if WARM and SHARE < 0:
        warm_all()
        return
    if WARM:
        warm(shapes)
        return
    told(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    for name, shape in shapes.items():
        if left() < 4:
            told(f"no time left for {name}")
            continue
        try:
            timed(name, shape)
        except Exception:  # noqa: BLE001 (the shapes that ran shall still be told)
            told(f"FAILED {name}: {traceback.format_exc()[-800:]}")
        torch.cuda.empty_cache()
    print("\n==== table", *TABLE, sep="\n", flush=True)


main()
