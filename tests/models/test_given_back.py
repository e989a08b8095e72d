"""A model that nobody holds any more gives its memory back."""

from __future__ import annotations

import subprocess
import sys

#: Prints MiB of resident memory: before, with a model whose cache takes 96 MiB, and without it, three times over.
_ROUNDS = """
import gc, warnings
import numpy as np
from graphrt import get_backend
from graphrt.models.engine import SessionOptions
from graphrt.models.model import Model
from graphrt.models.synthetic import synthetic

def held():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmRSS"))

def use():
    model = Model(synthetic("tiny:q4_0"), [get_backend("cpu", exact=False)])
    session = model.session(SessionOptions(n_ctx=32768, type_k="f32", type_v="f32"))
    session.eval([1, 2, 3])
    for leaf in (leaf for layer in session.cache.layers for leaf in layer.leafs):
        leaf.buffer.write(0, np.ones(leaf.nbytes, np.uint8))
    return held()

warnings.simplefilter("ignore")
print(held())
for _ in range(3):
    print(use())
    gc.collect()
    print(held())
"""


def test_what_a_model_took_is_back() -> None:
    """Kernels and libraries' own memory stay, once: what the first model leaves behind, others don't add to."""
    found = subprocess.run([sys.executable, "-c", _ROUNDS], capture_output=True, text=True, timeout=300, check=True)
    rounds = list(map(int, found.stdout.split()))[1:]
    used, after = rounds[::2], rounds[1::2]
    assert all(u - a > 64 for u, a in zip(used, after)) and after[-1] - after[0] < 32, rounds
