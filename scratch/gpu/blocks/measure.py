"""A step of one token over caches of blocks: append and attention in one launch (block_append), and in three. First whether each is right
(both caches bit by bit with ggml's rounding, the result by float64, and whether both ways' results have the same bits), then us a layer.

Layouts: "cells": a cell has one row of all heads, as models' caches have it; "runs": a head's keys lie side by side.
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
from graphrt.dtypes import dtype
from graphrt.execute import prepare
from graphrt.graph import Graph
from graphrt.tensor import new_input
from graphrt.testing import dequantize, quantize

TINY = bool(os.environ.get("TINY"))
DEVICE = "cpu" if TINY else "cuda"
D, HEADS, KV = (128, 32, 8) if not TINY else (64, 4, 2)
#: keys, layers, sequences
SHAPES = [(4096, 16, 1), (16384, 8, 1), (65536, 4, 1), (4096, 8, 4)] if not TINY else [(130, 1, 2)]
KINDS, LAYOUTS = ("q8_0", "q4_0"), ("cells", "runs")
WAYS = {"one launch": "block_append", "three launches": "0"}
RUNS, ROUNDS = (2, 1) if TINY else (30, 7)
POOL_ROWS = 4096


class Made:
    def __init__(self, shape, kind, layout, fuse, pool):
        n, layers, n_seq = shape
        os.environ["GRAPHRT_FUSE"] = fuse
        self.shape, self.kind, self.layout, values, self.nodes = shape, kind, layout, {}, []
        at = new_input("i64", 1, 1, n_seq, name="cells")
        self.cells = np.array([n - 3 - 5 * i for i in range(n_seq)])
        values[at] = self.cells.reshape(at.shape)
        mask = new_input("f16", n, 1, 1, n_seq, name="mask")
        values[mask] = np.zeros(mask.shape, np.float16)
        for i, cell in enumerate(self.cells):
            values[mask][i, ..., cell + 1 :] = -np.inf
        rng, size = np.random.default_rng(7), dtype(kind).row_size(D)

        def leaf(name, of, *ne, given=None):
            t = new_input(of, *ne, name=name)
            values[t] = rng.standard_normal(t.shape, np.float32) if given is None else given.reshape(*t.shape[:-1], -1)
            return t

        def side(name, first):
            """(cache behind the step, as it is attended, new row)."""
            rows = np.resize(np.roll(pool, first, 0), (n_seq * n * KV, size))
            if layout == "cells":
                new = leaf(f"{name}", "f32", D * KV, 1, n_seq)
                written = ops.set_rows(new, ops.reshape(at, 1, n_seq), leaf(f"{name} cache", kind, D * KV, n, n_seq, given=rows))
                strides = (written.nb[1], size, written.nb[2])
            else:
                new = leaf(f"{name}", "f32", D, KV, 1, n_seq)
                written = ops.set_rows(ops.permute(new, 0, 2, 1, 3), at, leaf(f"{name} cache", kind, D, n, KV, n_seq, given=rows))
                strides = written.nb[1:]
            return written, ops.view(written, (D, n, KV, n_seq), strides), new

        for i in range(layers):
            (ks, k, k_new), (vs, v, v_new) = side(f"k{i}", 3 * i), side(f"v{i}", 3 * i + 1)
            q = leaf(f"q{i}", "f32", D, 1, HEADS, n_seq)
            self.nodes.append((ops.flash_attn_ext(q, k, v, mask, D**-0.5, name=f"out{i}"), ks, vs, q, k_new, v_new))
        self.values = values
        kept = [*(out for out, *_ in self.nodes), *self.nodes[0][1:3]]
        self.exe = prepare(Graph(*kept), TritonBackend(exact=False))
        for t, given in values.items():
            self.exe.write(t, given)
        self.names = [launch.name for s in self.exe.splits for step in s.run.steps for launch in step.launches]

    def by_cell(self, raw):
        """Bytes [n_seq, n, KV, bytes of a row] of a cache."""
        n, _, n_seq = self.shape
        raw = np.asarray(raw).view(np.uint8).reshape(-1)
        if self.layout == "cells":
            return raw.reshape(n_seq, n, KV, -1)
        return raw.reshape(n_seq, KV, n, -1).transpose(0, 2, 1, 3)

    def right(self):
        """The first layer's result; raises where a cache or it is not what it must be."""
        out, *sets = self.nodes[0][:3]
        q, *news = self.nodes[0][3:]
        n, _, n_seq = self.shape
        found = np.asarray(self.exe.read(out)).reshape(n_seq, HEADS, D)
        caches = []
        for name, written, new in zip("kv", sets, news):
            cache = self.by_cell(self.exe.read(written))
            want = self.by_cell(self.values[written["target"]]).copy()
            row = quantize(self.values[new].reshape(n_seq, KV, D), dtype(self.kind)).view(np.uint8)
            for i, cell in enumerate(self.cells):
                want[i, cell] = row[i]
            assert np.array_equal(cache, want), f"{self.kind} {self.layout}: {name} cache is wrong"
            caches.append(want)
        for i, cell in enumerate(self.cells):
            K, V = (torch.from_numpy(dequantize(np.ascontiguousarray(c[i, : cell + 1]), dtype(self.kind))).to(DEVICE).double().permute(1, 0, 2) for c in caches)
            Q = torch.from_numpy(self.values[q].reshape(n_seq, KV, HEADS // KV, D)[i]).to(DEVICE).double()
            W = torch.softmax(Q @ K.transpose(1, 2) * D**-0.5, -1)
            expected = (W @ V).reshape(HEADS, D).cpu().numpy()
            error = float(np.linalg.norm(found[i] - expected) / np.linalg.norm(expected))
            assert error < 3e-3, (self.kind, self.layout, i, error)
        return found

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
    name = "CPU" if TINY else torch.cuda.get_device_name()
    for kind in KINDS:
        pool = quantize(rng.standard_normal((POOL_ROWS + 17, D), np.float32), dtype(kind)).view(np.uint8)
        for layout in LAYOUTS:
            for shape in SHAPES:
                made, results = {}, {}
                for way, fuse in WAYS.items():
                    m = made[way] = Made(shape, kind, layout, fuse, pool)
                    assert ("write_rows" in m.names) == (way == "three launches"), (way, m.names)
                    if not TINY and way == "one launch":
                        assert "flash_attn_decode_blocks" in m.names, m.names
                    m.run(3)
                    results[way] = m.right()
                    print(kind, layout, shape, way, "right", flush=True)
                same = np.array_equal(*results.values())
                times = {way: [] for way in made}
                for _ in range(ROUNDS):  # in turn
                    for way, m in made.items():
                        m.run(2)
                        times[way].append(m.seconds() * 1e6 / shape[1])
                us = {way: statistics.median(t) for way, t in times.items()}
                row = " | ".join(f"{us[way]:8.2f} ({min(times[way]):.2f}-{max(times[way]):.2f})" for way in WAYS)
                saved = us["three launches"] - us["one launch"]
                n, layers, n_seq = shape
                lines.append(f"{kind} {layout} D{D} H{HEADS}/{KV} {n_seq}x{n}, {layers} layers | {row} | saved {saved:6.2f} us a layer | same bits: {'yes' if same else 'no'}")
                print(lines[-1], flush=True)
                del made, m
                if not TINY:
                    torch.cuda.empty_cache()
    import triton

    print(f"==== table: {name}, torch {torch.__version__}, Triton {triton.__version__}; us a layer, median of {ROUNDS} (least-most)")
    print("shape | " + " | ".join(WAYS) + " |")
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
