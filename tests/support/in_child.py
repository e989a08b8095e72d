"""What test_processes.py has child processes do; a module of its own, since a spawned child imports it."""

from __future__ import annotations

from multiprocessing.connection import Connection

import numpy as np
import torch

from graphrt import Executable, Graph, new_input, ops, prepare
from graphrt.backends.cpu import threads
from graphrt.models import Model, SamplerParams, load

PROMPT = list(range(1, 41))


def graph(n_tokens: int) -> Graph:
    """A product that is large enough for several threads: native for one token, oneDNN's for many."""
    w, x = new_input("q8_0", 512, 2048, name="w"), new_input("f32", 512, n_tokens, name="x")
    return Graph(ops.mul_mat(w, x, name="y"))


def fill(exe: Executable) -> None:
    codes = np.random.default_rng(1).integers(0, 60, exe.graph.inputs[0].nbytes, dtype=np.uint8)
    exe.write("w", codes)
    exe.write("x", np.ones(exe.graph.inputs[1].shape, np.float32))


def answer(exes: list[Executable]) -> list[float]:
    """Sums of results, of programs that are there and of new ones, and of torch's own threads."""
    made = []
    for n_tokens in (1, 40):
        exe = prepare(graph(n_tokens), exes[0].splits[0].backend)
        fill(exe)
        made.append(exe)
    found = []
    for exe in [*exes, *made]:
        exe.run()
        found.append(float(np.nansum(exe.read("y"))))
    return [*found, float(torch.ones(1 << 20).exp().sum())]


def run_graphs(exes: list[Executable], out: Connection) -> None:
    out.send((answer(exes), threads.count()))


def generate(model: Model | str, out: Connection) -> None:
    loaded = load(model, "cpu") if isinstance(model, str) else model
    out.send([piece.token for piece in loaded.generate(PROMPT, 6, sampling=SamplerParams(temp=0), ignore_eos=True)])
