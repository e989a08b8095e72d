"""The undamaged files that mutants of GGUF files are made of: keys and tensors, of every architecture."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import tiny
import tiny_archs
import tiny_vocab
from gguf_files import KV, TensorSpec, build

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


def make_spec(name: str, arch: str, keys: dict[str, Any], shapes: tiny.Shapes, words: dict[str, Any]) -> Spec:
    n = len(words["tokens"])
    tables = ("token_embd.weight", "output.weight", "output.bias")
    shapes = {key: (*ne[:-1], n) if key in tables else ne for key, ne in shapes.items()}
    keys = keys | {"vocab_size": n}
    words = words | ({"token_type_count": 2} if "token_types.weight" in shapes else {})
    kv: list[KV] = [("general.architecture", "string", arch), ("general.name", "string", f"tiny {name}")]
    kv += [(f"{arch}.{key}", *_typed(value)) for key, value in keys.items()]
    kv += [(f"tokenizer.ggml.{key}", *_typed(value)) for key, value in words.items()]
    kv += [("tokenizer.chat_template", "string", tiny.CHAT)]
    return Spec(name, arch, kv, [(key, "f32", ne, tiny.values(key, ne).tobytes()) for key, ne in shapes.items()])


def _typed(value: Any) -> tuple[str, Any]:
    if isinstance(value, list):
        kind = {str: "string", bytes: "string", float: "f32", int: "i32", bool: "bool"}[type(value[0])]
        return f"array:{kind}", value
    return {bool: "bool", int: "u32", float: "f32", str: "string"}[type(value)], value


def _without_vocabulary(spec: Spec) -> Spec:
    kv = [row for row in spec.kv if not row[0].startswith("tokenizer.")]
    return replace(spec, kv=[*kv, ("tokenizer.ggml.model", "string", "no_vocab")])
