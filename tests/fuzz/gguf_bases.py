"""The undamaged files that mutants of GGUF files are made of: keys and tensors, of every architecture."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from support import tiny, tiny_archs, tiny_vocab
from support.gguf_files import KV, TensorSpec, build
from support.tiny_archs import Tiny

#: Those of many layers, left out for speed, and one that is over 2 MB.
SLOW = ("deepseek2-lite", "command-r-plus", "gpt-oss")
SMALLER = {
    "gpt-oss": replace(
        tiny_archs.DECODERS["gpt-oss"],
        layers=2,
        experts=tiny_archs.experts(64, 32, 4, bias=True),
        keys=tiny_archs.WINDOW | tiny_archs.yarn(4.0) | tiny_archs.chosen(4, 2, feed_forward_length=32),
    )
}


@dataclass
class Spec:
    """A file before it is written: its keys and tensors, the padding and the byte order."""

    name: str
    arch: str
    kv: list[KV]
    tensors: list[TensorSpec]
    alignment: int = 32
    order: str = "<"

    def copy(self) -> Spec:
        return replace(self, kv=list(self.kv), tensors=list(self.tensors))

    def bytes(self) -> bytes:
        return bytes(build(self.kv, self.tensors, alignment=self.alignment, order=self.order).data)


@functools.cache
def specs() -> tuple[Spec, ...]:
    """One of each tiny model."""
    decoders = {name: row.model() for name, row in tiny_archs.DECODERS.items() if name not in SLOW}
    decoders |= {name: row.model() for name, row in SMALLER.items()}
    models = {name: make() for name, make in tiny.MODELS.items()} | decoders
    found = [
        make_spec(name, *model, tiny.spm() if i % 2 else tiny.bpe()) for i, (name, model) in enumerate(models.items())
    ]
    found += [make_spec(name, *row.model(), tiny_vocab.wordpiece()) for name, row in tiny_archs.ENCODERS.items()]
    found += [replace(_without_vocabulary(found[0]), name="llama-no-vocab")]
    return tuple(found)


def make_spec(
    name: str,
    arch: str,
    keys: dict[str, Any],
    shapes: tiny.Shapes,
    words: dict[str, Any],
    tensor_values: Callable[[str, tuple[int, ...]], np.ndarray] = tiny.values,
) -> Spec:
    """That model with that vocabulary, its tables as long as that."""
    n = len(words["tokens"])
    tables = ("token_embd.weight", "output.weight", "output.bias")
    shapes = {key: (*ne[:-1], n) if key in tables else ne for key, ne in shapes.items()}
    keys = keys | {"vocab_size": n}
    words = words | ({"token_type_count": 2} if "token_types.weight" in shapes else {})
    kv: list[KV] = [("general.architecture", "string", arch), ("general.name", "string", f"tiny {name}")]
    kv += [(f"{arch}.{key}", *_typed(value)) for key, value in keys.items()]
    kv += [(f"tokenizer.ggml.{key}", *_typed(value)) for key, value in words.items()]
    kv += [("tokenizer.chat_template", "string", tiny.CHAT)]
    return Spec(name, arch, kv, [(key, "f32", ne, tensor_values(key, ne).tobytes()) for key, ne in shapes.items()])


def of_sizes(rng: random.Random) -> Spec | None:
    """A file whose tensors fit its keys, of sizes that no model has; None where it is over 2 MB or can't be written."""
    n, heads = rng.choice((1, 2, 4, 8, 32, 200)), rng.choice((1, 2, 4, 30, 300, 2000))
    kv = rng.choice((1, heads))
    row = Tiny(
        rng.choice(("llama", "qwen2", "gemma", "mpt", "refact")),
        n=n,
        heads=(heads, kv),
        d=rng.choice((2, 4, 6, 16, 64, 128, 256, 1000, 5000)),
        ff=rng.choice((1, 2, 4, 100, 3000, 60_000)),
        layers=rng.choice((1, 1, 2, 2, 10, 100, 300, 600)),
        keys={"context_length": rng.choice((1, 64, 4096, 10**6, 2**31 - 1))},
    )
    if rng.random() < 0.3:
        count = rng.choice((2, 8, 64, 500, 1024))
        used = rng.choice((1, 2, min(count, 64), count))
        mixture = tiny_archs.experts(n, row.ff, count)
        row = replace(row, arch="llama", experts=mixture, keys=tiny_archs.chosen(count, used))
    arch, keys, shapes = row.model()
    if sum(4 * math.prod(ne) + 100 for ne in shapes.values()) > 1_900_000:
        return None
    return make_spec("sizes", arch, keys, shapes, tiny.spm(), tensor_values=_noise)


def _noise(name: str, ne: tuple[int, ...]) -> np.ndarray:
    """Numbers around 0.1, quickly made."""
    return np.resize(np.arange(1, 8, dtype=np.float32) / 40, math.prod(ne))


def _typed(value: Any) -> tuple[str, Any]:
    if isinstance(value, list):
        kind = {str: "string", bytes: "string", float: "f32", int: "i32", bool: "bool"}[type(value[0])]
        return f"array:{kind}", value
    return {bool: "bool", int: "u32", float: "f32", str: "string"}[type(value)], value


def _without_vocabulary(spec: Spec) -> Spec:
    kv = [row for row in spec.kv if not row[0].startswith("tokenizer.")]
    return replace(spec, kv=[*kv, ("tokenizer.ggml.model", "string", "no_vocab")])
