"""Times decode attention by caches, layouts and configurations of the decode kernel, beside f16 in the same process.

    forms.py SPEC...          spec: KIND/LAYOUT[/n_q x n_kv][/CONFIG]
    forms.py --warm SPEC      compiles and checks one spec on few keys, times nothing

KIND: a type of K and V. LAYOUT: "runs", a head's keys side by side; "cache", a key's heads side by side, as models have
them. CONFIG: keys a block, warps, blocks in flight, programs a multiprocessor[, registers[, 1 for codes[, join]]]; none: the
table's. Parts of more than 96 KB are joined too where join is given.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import graphrt
from graphrt import ops
from graphrt.backend import get_backend
from graphrt.backends.triton.kernels.flash_attn import decode_configs, decode_launch
from graphrt.dtypes import dtype
from graphrt.graph import Graph
from graphrt.tensor import new_input
from graphrt.tools.bench.op_inputs import Noise
from graphrt.tools.bench.timing import CudaClock, HostClock

TABLE = decode_configs.find_decode_config
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HEADS, KV_HEADS, D = 32, 8, 128
NOISE = Noise()
#: Bytes that a spec's nodes read at least, so that none finds its rows in the L2 cache.
MEMORY = int(os.environ.get("MB", "256")) << 20


def numbers(kind: str, raw: torch.Tensor) -> torch.Tensor:
    """float64 [rows, D] of rows as stored, uint8 [rows, bytes]."""
    if kind in ("f16", "f8_e4m3"):
        return raw.view(torch.float16 if kind == "f16" else torch.float8_e4m3fn).double()
    blocks = raw.reshape(len(raw), D // 32, -1)
    d = blocks[..., :2].contiguous().view(torch.float16).double()
    codes = blocks[..., 2:].contiguous()
    if kind == "q8_0":
        values = codes.view(torch.int8).double()
    else:
        values = torch.cat((codes & 15, codes >> 4), -1).double() - 8
    return (values * d).reshape(len(raw), D)


@dataclass
class Form:
    """A spec, its graph of several nodes, and what was measured: us a node."""

    text: str
    kind: str
    layout: str
    n_q: int
    n_kv: int
    config: decode_configs.Config | None

    @classmethod
    def of(cls, text: str) -> Form:
        kind, layout, *rest = text.split("/")
        n_q, n_kv, config = 1, 65536, None
        for part in rest:
            if "x" in part:
                n_q, n_kv = (int(n) for n in part.split("x"))
            else:
                known = [int(n) for n in part.split(",")]
                config = decode_configs.Config(*known[:5], *(bool(n) for n in known[5:6]), *known[6:])  # type: ignore[arg-type]
        return cls(text, kind, layout, n_q, n_kv, config)

    def prepare(self, n_nodes: int = 0) -> None:
        rows = self.n_kv * KV_HEADS
        row = dtype(self.kind).row_size(D)
        n_nodes = n_nodes or min(max(4, -(-MEMORY // (2 * rows * row))), 64)
        self.values: dict[Any, Any] = {}
        self.nodes, self.us = [], list[float]()
        ne = (D, self.n_kv, KV_HEADS) if self.layout == "runs" else (D, KV_HEADS, self.n_kv)
        for i in range(n_nodes):
            q = new_input("f32", D, self.n_q, HEADS, name=f"q{i}")
            self.values[q] = NOISE.take("f32", q.n_elements, i).reshape(q.shape)
            cache = []
            for j, name in enumerate("kv"):
                leaf = new_input(self.kind, *ne, name=f"{name}{i}")
                self.values[leaf] = NOISE.take(self.kind, leaf.n_elements, 2 * i + j)
                cache.append(leaf if self.layout == "runs" else ops.permute(leaf, 0, 2, 1, 3))
            self.nodes.append(ops.flash_attn_ext(q, *cache, None, D**-0.5, name=f"out{i}"))
        found = []

        def chosen(*args: Any, **kwargs: Any) -> decode_configs.Config:
            found.append(self.config or TABLE(*args, **kwargs))
            return found[-1]

        decode_configs.find_decode_config = chosen
        decode_launch.JOIN_BYTES = 1 << 20 if self.config is not None and self.config.join else 96 << 10
        self.exe = graphrt.prepare(Graph(*self.nodes), get_backend("triton"))
        for leaf, values in self.values.items():
            self.exe.write(leaf, values)
        for _ in range(3):
            self.exe.run()
        self.exe.synchronize()
        self.found = found[-1] if found else None

    def head(self, leaf: Any, group: int) -> torch.Tensor:
        raw = np.ascontiguousarray(self.values[leaf]).view(np.uint8)
        shape = (KV_HEADS, self.n_kv, -1) if self.layout == "runs" else (self.n_kv, KV_HEADS, -1)
        of_all = torch.from_numpy(raw.reshape(shape)).to(DEVICE)
        mine = of_all[group] if self.layout == "runs" else of_all[:, group]
        return numbers(self.kind, mine.contiguous())

    def check(self) -> str:
        """The last node's result beside float64: relative error, and how much it is too large or small as a whole."""
        i = len(self.nodes) - 1
        leaves = {t.name: t for t in self.values}
        given = np.asarray(self.exe.read(self.nodes[i])[0], np.float64)  # [n_q, heads, D]
        q = torch.from_numpy(self.values[leaves[f"q{i}"]].reshape(HEADS, self.n_q, D)).to(DEVICE).double()
        wanted = np.zeros_like(given)
        n = HEADS // KV_HEADS
        for group in range(KV_HEADS):
            k, v = (self.head(leaves[f"{name}{i}"], group) for name in "kv")
            weights = torch.softmax(q[group * n : group * n + n] @ k.T * D**-0.5, -1)
            wanted[:, group * n : group * n + n] = (weights @ v).permute(1, 0, 2).cpu().numpy()
        error = np.sqrt(((given - wanted) ** 2).mean() / (wanted**2).mean())
        slope = (given * wanted).sum() / (wanted**2).sum() - 1
        self.error = f"{error:.1e} {slope:+.1e}"
        assert np.isfinite(given).all() and error < 3e-3 and abs(slope) < 1e-3, f"{self.text}: wrong, {self.error}"
        return self.error

    def time(self) -> None:
        clock = CudaClock() if CUDA else HostClock()
        times = clock.times(self.exe.run, 20 if CUDA else 1, self.exe.synchronize)
        self.us.append(1e6 * times.median / len(self.nodes))


def copy_rate() -> float:
    a = torch.ones(2**31 if CUDA else 2**20, dtype=torch.uint8, device=DEVICE)
    b = torch.zeros_like(a)
    clock = CudaClock() if CUDA else HostClock()
    b.copy_(a)
    return 2 * a.numel() / clock.times(lambda: b.copy_(a), 20, lambda: None).median / 1e12


def main() -> None:
    if sys.argv[1] == "--warm":
        form = Form.of(sys.argv[2])
        form.n_kv = min(form.n_kv, 4096)
        form.prepare(1)
        print(form.text, form.check(), flush=True)
        return
    forms, started = [], time.time()
    for text in sys.argv[1:]:
        form = Form.of(text)
        try:
            form.prepare()
            form.check()
            forms.append(form)
        except Exception as error:  # one that fails must not take the others along
            print(f"FAILED {text}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"prepared in {time.time() - started:.0f} s; {torch.cuda.get_device_name() if CUDA else 'CPU'}; "
          f"torch {torch.__version__}; copies {copy_rate():.2f} TB/s")  # fmt: skip
    for _ in range(5 if CUDA else 1):
        for form in forms:
            form.time()
    base = {(f.n_q, f.n_kv): statistics.median(f.us) for f in forms if f.kind == "f16"}
    print("| spec | us | of f16 | lowest to highest | error, bias | config |\n|---|---|---|---|---|---|")
    for f in forms:
        us, of = statistics.median(f.us), base.get((f.n_q, f.n_kv))
        part = f"{us / of:.3f}" if of else ""
        c = f.found
        config = f"{c.block_n},{c.warps},{c.stages},{c.per_sm},{c.registers},{int(c.codes)},{c.join}" if c else ""
        print(f"| {f.text} | {us:.2f} | {part} | {min(f.us):.2f} to {max(f.us):.2f} | {f.error} | {config} |")
    print(f"all in {time.time() - started:.0f} s; copies {copy_rate():.2f} TB/s")


if __name__ == "__main__":
    main()
