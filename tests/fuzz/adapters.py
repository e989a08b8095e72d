"""Adapters from a stranger: LoRA files with keys, names, shapes and bytes that are damaged or made up. One must be
refused with a GraphrtError of a few hundred characters, or give logits that are numbers."""

from __future__ import annotations

import random
import tempfile
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from support.tiny import write_model

from graphrt.backend import get_backend
from graphrt.errors import GraphrtError
from graphrt.models.engine import SessionOptions
from graphrt.models.gguf import GGUFFile
from graphrt.models.model import Model

NAME = "adapters"
LONGEST = 700  # characters of a message
STEMS = ("attn_q", "attn_k", "ffn_up", "ffn_down", "attn_output")


def warm() -> None:
    """Makes the model, and the kernels of its steps."""
    assert attempt(make(-1)) == "logits"


def make(seed: int) -> bytes:
    """An adapter of a tiny llama; -1: a good one. Some have bytes that were changed, or are cut short."""
    r = random.Random(f"adapter {seed}")
    good, rng = seed < 0, np.random.default_rng(max(seed, 0))
    odd = 0.0 if good else r.choice((0.0, 0.1, 0.4))

    def pick(usual: str, *others: str) -> str:
        return r.choice(others) if r.random() < odd else usual

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        writer = gguf.GGUFWriter(path, pick("llama", "gemma3", ""))
        writer.add_string("general.type", pick("adapter", "model", ""))
        if r.random() >= odd:
            writer.add_string("adapter.type", pick("lora", "dora", "\U0001f600"))
        alpha = r.choice((0.0, -1.0, 1e30, float("nan"), float("inf"))) if r.random() < odd else 8.0
        writer.add_float32("adapter.lora.alpha", alpha)
        for stem in sorted({pick(r.choice(STEMS), "attn_norm", "no_such", "attn_rot_embd") for _ in range(3)}):
            rank, wrong = r.randint(1, 5), r.random() < odd
            name, ne = f"blk.{pick('1', '2', '-1', '')}.{stem}.weight", _sizes(stem)
            a, b = ((rank, ne[0] + wrong), (ne[1], rank + (r.random() < odd)))
            for side, shape in (("a", a), ("b", b)):
                if r.random() >= odd / 2:
                    data = rng.normal(0.0, r.choice((1.0, 1e30)) if r.random() < odd else 0.1, shape)
                    with np.errstate(over="ignore"):
                        writer.add_tensor(f"{name}.lora_{side}", data.astype(r.choice((np.float32, np.float16))))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        data = bytearray(path.read_bytes())
    if not good and r.random() < 0.2:
        for _ in range(r.randint(1, 4)):
            data[r.randrange(len(data))] = r.randrange(256)
    return bytes(data[: r.randrange(len(data))] if not good and r.random() < 0.05 else data)


def _sizes(stem: str) -> tuple[int, int]:
    return {"attn_k": (64, 32), "ffn_up": (64, 96), "ffn_down": (96, 64)}.get(stem, (64, 64))


def attempt(data: bytes) -> str:
    """The logits of a model with it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        path.write_bytes(data)
        model = Model(_file(), [get_backend("cpu", exact=True)])
        try:
            model.use_adapters({"a": path})
            logits = model.session(SessionOptions(16, 8)).eval([1, 2, 3])
        except GraphrtError as error:
            assert 20 < len(str(error)) < LONGEST, str(error)
            return type(error).__name__
    assert logits.shape == (128,)
    return "logits"


@cache
def _file() -> GGUFFile:
    folder = tempfile.mkdtemp()
    return GGUFFile.open(write_model(Path(folder) / "m.gguf", "llama"))
