"""What the processes of tests/backends/cpu/test_overlapped_sums.py run: the same products and sums over ranks whole and
in bands of tokens, with what each rank did, in order."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from graphrt import Graph, get_backend, new_input, new_tensor, ops, prepare
from graphrt.backend import Usage
from graphrt.backends.cpu import overlap
from graphrt.models import load
from graphrt.ranks import RankSum, join, leave
from support.ranked import F32
from support.tiny import tokens

#: By name: a type of weights, columns, rows, tokens. Rows of tokens that are no multiple of a band's are among them.
PRODUCTS = {
    "f32": ("f32", 96, 160, 130), "f16": ("f16", 256, 64, 201), "q8_0": ("q8_0", 128, 65, 128),
    "q4_K and a bias": ("q4_k", 512, 96, 260),
}  # fmt: skip
BANDS = (0, 3)


def few(bytes_: int = 1 << 10, n_tokens: int = 20) -> None:
    """From now on small sums are cut."""
    overlap.BANDS = replace(overlap.BANDS, bytes=bytes_, tokens=n_tokens)


def values(kind: str, nbytes: int, seed: int) -> np.ndarray:
    """Of finite weights as bytes, each rank's own."""
    rng = np.random.default_rng(seed)
    if kind in ("f32", "f16"):
        return rng.standard_normal(nbytes // {"f32": 4, "f16": 2}[kind]).astype(kind.replace("f", "float"))
    return rng.integers(0, 60, nbytes, dtype=np.uint8)


def summed(name: str, rank: int, size: int) -> np.ndarray:
    """A product, summed over ranks, and what is done with it next, with a residual."""
    kind, k, m, n = PRODUCTS[name]
    backend = get_backend("cpu", exact=False)
    w, x, residual = new_input(kind, k, m, name="w"), new_input("f32", k, n, name="x"), new_input("f32", m, n, name="r")
    product = ops.mul_mat(w, x, name="y")
    if "bias" in name:
        bias = new_tensor("f32", m, name="bias")
        bias.buffer = backend.alloc(bias.nbytes, Usage.WEIGHTS)
        bias.buffer.write(0, values("f32", bias.nbytes, rank).view(np.uint8))
        product = ops.add(product, bias, name="y + bias")
    out = ops.add(ops.all_reduce(product, ranks=size, rank=rank, name="sum"), residual, name="out")
    exe = prepare(Graph(out), backend)
    exe.write("w", values(kind, w.nbytes, rank + 1).reshape(m, -1))
    exe.write("x", values("f32", x.nbytes, rank + 7).reshape(n, k))
    exe.write("r", values("f32", residual.nbytes, 5).reshape(n, m))
    exe.run()
    first = np.array(exe.read("out"))
    exe.run()
    assert np.array_equal(first, exe.read("out")), "the same again"
    return first


def watched(log: list[str]) -> None:
    """What a rank multiplies, begins and waits for goes into the log."""

    def logged(holder: Any, name: str, said: str) -> None:
        real = getattr(holder, name)

        def call(*given: Any, **named: Any) -> Any:
            log.append(said)
            return real(*given, **named)

        setattr(holder, name, call)

    logged(dist, "all_to_all_single", "parts")
    logged(dist, "all_gather", "sum")
    made = overlap._made

    def seen(*given: Any) -> Any:
        band = made(*given)

        def multiply() -> None:
            log.append("multiply")
            band.multiply()

        return band._replace(multiply=multiply)

    overlap._made = seen
    there = RankSum.there

    def waited(self: RankSum) -> torch.Tensor:
        log.append("wait")
        return there(self)

    RankSum.there = waited  # type: ignore[method-assign]


def rank(number: int, size: int, folder: str, model: str) -> None:
    """One rank: results by name and number of bands, and what it did, into `folder`/`number`.npz."""
    torch.set_num_threads(1)
    ranks, found, log = join(number, size, folder), dict[str, np.ndarray](), list[str]()
    few()
    watched(log)
    for bands in BANDS:
        os.environ["GRAPHRT_OVERLAP"] = str(bands)
        for name in PRODUCTS:
            log.clear()
            found[f"{name} {bands}"] = summed(name, number, size)
            found[f"{name} {bands} did"] = np.array(log)
        session = load(model, "cpu", exact=False, ranks=replace(ranks)).session(F32)
        log.clear()
        found[f"model {bands}"] = session.eval_rows((tokens() * 4)[:70])
        found[f"model {bands} did"] = np.array(log)
        log.clear()
        found[f"step {bands}"] = session.eval([3])
        found[f"step {bands} did"] = np.array(log)
    np.savez(Path(folder, f"{number}.npz"), **found)
    ranks.told(None)
    leave()
