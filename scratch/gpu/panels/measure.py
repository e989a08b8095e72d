"""A step of one token over caches whose keys lie in panels: append and attention in one launch (panel_append), in three,
and over keys in rows in three. First whether each is right (float64, both caches bit by bit), then us a layer.

TINY=1: a dry run on a CPU, in Triton's interpreter."""

from __future__ import annotations

import os
import statistics
import sys
import time

import numpy as np
import torch

from graphrt import ops
from graphrt.backends.triton import TritonBackend
from graphrt.execute import prepare
from graphrt.graph import Graph
from graphrt.ops.key_panels import set_key_panels
from graphrt.tensor import new_input

TINY = bool(os.environ.get("TINY"))
DEVICE = "cpu" if TINY else "cuda"
#: head size, query heads, KV heads, keys, layers
SHAPES = [(128, 32, 8, 4096, 16), (128, 32, 8, 16384, 8), (128, 32, 8, 65536, 4), (128, 32, 32, 4096, 8), (64, 32, 8, 4096, 32)]
if TINY:
    SHAPES = [(64, 4, 2, 200, 2)]
WAYS = {"panels, one launch": ("panels", "1"), "panels, three launches": ("panels", "0"), "rows, three launches": ("rows", "0")}
RUNS, ROUNDS = (2, 1) if TINY else (30, 7)


class Made:
    def __init__(self, shape, layout, fuse, pool):
        d, heads, kv, n, layers = shape
        os.environ["GRAPHRT_FUSE"] = fuse
        self.shape, self.layout, values, self.nodes = shape, layout, {}, []
        at = new_input("i64", 1, name="cell")
        values[at] = np.array([n - 3]).reshape(at.shape)
        mask = new_input("f16", n, 1, name="mask")
        values[mask] = np.zeros(mask.shape, np.float16)
        values[mask][..., n - 2 :] = -np.inf
        self.cell, self.seen = n - 3, n - 2
        rng = np.random.default_rng(7)
        for i in range(layers):
            def leaf(name, kind, *ne, given=None):
                t = new_input(kind, *ne, name=f"{name}{i}")
                values[t] = rng.standard_normal(t.shape, np.float32) if given is None else given.reshape(t.shape)
                return t

            q, k, v = leaf("q", "f32", d, 1, heads), leaf("k", "f32", d, kv, 1), leaf("v", "f32", d, kv, 1)
            size = d * kv * n
            x = 8
            if layout == "panels":
                rows = pool[:size].reshape(kv, n, d // x, x).transpose(0, 2, 1, 3)
                k_set = set_key_panels(k, at, leaf("kc", "f16", x, n, d // x * kv, given=np.ascontiguousarray(rows)))
            else:
                k_set = ops.set_rows(ops.permute(k, 0, 2, 1, 3), at, leaf("kc", "f16", d, n, kv, given=pool[:size]))
            v_set = ops.set_rows(ops.permute(v, 0, 2, 1, 3), at, leaf("vc", "f16", d, n, kv, given=pool[size : 2 * size]))
            out = ops.flash_attn_ext(q, k_set, v_set, mask, d**-0.5, k_layout=layout, name=f"out{i}")
            self.nodes.append((out, k_set, v_set, q, k, v))
        self.values = values
        self.exe = prepare(Graph(*(out for out, *_ in self.nodes), *(x for _, ks, vs, *_ in self.nodes[:1] for x in (ks, vs))), TritonBackend(exact=False))
        for t, given in values.items():
            self.exe.write(t, given)
        self.groups = [g.kernel for s in self.exe.splits for g in s.groups if g.kernel]

    def caches(self):
        """Layer 0's K as rows [kv, n, d], and V."""
        d, _, kv, n, _ = self.shape
        _, ks, vs, *_ = self.nodes[0]
        k = np.asarray(self.exe.read(ks))
        k = k.reshape(kv, d // 8, n, 8).transpose(0, 2, 1, 3).reshape(kv, n, d) if self.layout == "panels" else k.reshape(kv, n, d)
        return k, np.asarray(self.exe.read(vs)).reshape(kv, n, d)

    def error(self, pool):
        """Of layer 0 against float64, as a relative norm; raises where a cache is not what it must be."""
        d, heads, kv, n, _ = self.shape
        out, _, _, q, k, v = self.nodes[0]
        want = [pool[: d * kv * n].reshape(kv, n, d).copy(), pool[d * kv * n : 2 * d * kv * n].reshape(kv, n, d).copy()]
        for cache, new in zip(want, (k, v)):
            cache[:, self.cell] = self.values[new].reshape(kv, d).astype(np.float16)
        for name, found, right in zip("kv", self.caches(), want):
            assert np.array_equal(found.view(np.uint16), right.view(np.uint16)), f"{self.layout}: {name} cache is wrong"
        K, V = (torch.from_numpy(x).to(DEVICE)[:, : self.seen].double() for x in want)
        Q = torch.from_numpy(self.values[q].reshape(kv, heads // kv, d)).to(DEVICE).double()
        W = torch.softmax(Q @ K.transpose(1, 2) * d**-0.5, -1)
        right = (W @ V).reshape(heads, d).cpu().numpy()
        found = np.asarray(self.exe.read(out), np.float64).reshape(heads, d)
        error = float(np.linalg.norm(found - right) / np.linalg.norm(right))
        assert error < 2e-3, (self.layout, error)
        return error

    def run(self, times):
        for _ in range(times):
            self.exe.run()

    def seconds(self):
        if TINY:
            start = time.perf_counter()
            self.run(1)
            return time.perf_counter() - start
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        a.record()
        self.run(RUNS)
        b.record()
        torch.cuda.synchronize()
        return a.elapsed_time(b) / 1e3 / RUNS


def main():
    rng, lines = np.random.default_rng(3), []
    most = max(2 * d * kv * n for d, _, kv, n, _ in SHAPES)
    pool = np.resize(rng.standard_normal(2**22 + 17, np.float32).astype(np.float16), most)
    name = "CPU" if TINY else torch.cuda.get_device_name()
    for shape in SHAPES:
        made = {}
        for way, (layout, fuse) in WAYS.items():
            m = made[way] = Made(shape, layout, fuse, pool)
            assert (m.groups == ["panel_append"] * shape[4]) == (way == "panels, one launch"), (way, m.groups)
            m.run(3)
            print(shape, way, f"right: error {m.error(pool):.1e}", flush=True)
        times = {way: [] for way in made}
        for _ in range(ROUNDS):  # in turn
            for way, m in made.items():
                m.run(2)
                times[way].append(m.seconds() * 1e6 / shape[4])
        d, heads, kv, n, layers = shape
        us = {way: statistics.median(t) for way, t in times.items()}
        saved = us["panels, three launches"] - us["panels, one launch"]
        row = " | ".join(f"{us[way]:8.2f} ({min(times[way]):.2f}-{max(times[way]):.2f})" for way in WAYS)
        lines.append(f"D{d} H{heads}/{kv} 1x{n}, {layers} layers | {row} | saved {saved:6.2f} us a layer")
        del made
        if not TINY:
            torch.cuda.empty_cache()
    import triton

    print(f"==== table: {name}, torch {torch.__version__}, Triton {triton.__version__}; us a layer, median of {ROUNDS} (least-most)")
    print("shape | " + " | ".join(WAYS) + " |")
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
