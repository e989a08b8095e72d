"""Writes small GGUF files for tests, right or wrong on purpose, and remembers where every field lies.

    built = build([("general.architecture", "string", "llama")], [("w", "f32", (4,), data)])
    built.patch("n_kv", 5)          # the same file with that field overwritten
    write_gguf(path, kv, tensors)   # just a file

It shares nothing with graphrt.models.gguf but the table of types, so the two can't be wrong in the same way.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graphrt.dtypes import dtype

KV = tuple[str, str, Any]  # key, type ("u32", "string", "array:string" ...), value
TensorSpec = tuple[str, str, Sequence[int], bytes]  # name, type name, ne, data

VALUE_TYPES = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
    "f32": (6, "f"), "bool": (7, "B"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d"),
}  # fmt: skip
STRING, ARRAY = 8, 9


@dataclass
class Built:
    """data: the file; fields: label -> (offset, struct code with byte order) of each number in the header."""

    data: bytearray = field(default_factory=bytearray)
    fields: dict[str, tuple[int, str]] = field(default_factory=dict)
    order: str = "<"

    def put(self, label: str, code: str, value: Any) -> None:
        self.fields[label] = (len(self.data), self.order + code)
        self.data += struct.pack(self.order + code, value)

    def put_string(self, label: str, text: str | bytes) -> None:
        raw = text.encode("utf-8") if isinstance(text, str) else text
        self.put(label + ".len", "Q", len(raw))
        self.data += raw

    def patch(self, label: str, value: Any) -> bytes:
        """A copy of the file with one field overwritten."""
        offset, code = self.fields[label]
        copy = bytearray(self.data)
        struct.pack_into(code, copy, offset, value)
        return bytes(copy)


def build(
    kv: Sequence[KV] = (),
    tensors: Sequence[TensorSpec] = (),
    *,
    order: str = "<",
    version: int = 3,
    alignment: int = 32,
) -> Built:
    """A GGUF file. `alignment` sets the padding only: add general.alignment to `kv` where it is not 32."""
    out = Built(order=order)
    out.data += b"GGUF"
    out.put("version", "I", version)
    out.put("n_tensors", "q", len(tensors))
    out.put("n_kv", "q", len(kv))
    for key, kind, value in kv:
        out.put_string(f"{key}.key", key)
        _put_value(out, key, kind, value)
    offset = 0
    for name, type_name, ne, data in tensors:
        out.put_string(f"{name}.name", name)
        out.put(f"{name}.n_dims", "I", len(ne))
        for j, n in enumerate(ne):
            out.put(f"{name}.ne{j}", "q", n)
        out.put(f"{name}.type", "I", dtype(type_name).id)
        out.put(f"{name}.offset", "Q", offset)
        offset += -(-len(data) // alignment) * alignment
    for _, _, _, data in tensors:
        out.data += bytes(-len(out.data) % alignment) + data
    return out


def _put_value(out: Built, key: str, kind: str, value: Any) -> None:
    if kind == "string":
        out.put(f"{key}.type", "I", STRING)
        out.put_string(f"{key}.value", value)
    elif kind.startswith("array:"):
        _put_array(out, key, kind.removeprefix("array:"), value)
    else:
        out.put(f"{key}.type", "I", VALUE_TYPES[kind][0])
        out.put(f"{key}.value", VALUE_TYPES[kind][1], value)


def _put_array(out: Built, key: str, kind: str, values: Any) -> None:
    out.put(f"{key}.type", "I", ARRAY)
    out.put(f"{key}.element_type", "I", STRING if kind == "string" else VALUE_TYPES[kind][0])
    out.put(f"{key}.count", "Q", len(values))
    if kind == "string":
        label = key[:100]  # of an endless name a copy for each element would fill memory
        for i, text in enumerate(values):
            out.put_string(f"{label}[{i}]", text)
    else:
        out.data += np.asarray(values, out.order + VALUE_TYPES[kind][1]).tobytes()


def write_gguf(path: Path, kv: Sequence[KV] = (), tensors: Sequence[TensorSpec] = (), **how: Any) -> Path:
    """Writes a GGUF file (see `build`) and returns its path."""
    path.write_bytes(build(kv, tensors, **how).data)
    return path


def random_blocks(type_name: str, n: int, seed: int = 0, order: str = "<") -> bytes:
    """`n` elements of a type as random, finite data: float32 rounded to the type where that is easy, else scale bytes
    kept small."""
    rng = np.random.default_rng([seed, dtype(type_name).id])
    t = dtype(type_name)
    if t.name == "f32":
        return rng.standard_normal(n).astype(order + "f4").tobytes()
    if t.name == "f16":
        return rng.standard_normal(n).astype(order + "f2").tobytes()
    if t.name == "f64":
        return rng.standard_normal(n).astype(order + "f8").tobytes()
    # No byte above 0x3b: read as the high byte of an f16 or bf16 that is finite, whatever the layout.
    return rng.integers(0, 0x3C, t.row_size(n), dtype=np.uint8).tobytes()


def sample_kv() -> list[KV]:
    """Keys of every value type."""
    return [
        ("general.architecture", "string", "llama"),
        ("general.alignment", "u32", 32),
        ("t.u8", "u8", 200),
        ("t.i8", "i8", -100),
        ("t.u16", "u16", 60000),
        ("t.i16", "i16", -30000),
        ("t.u32", "u32", 4_000_000_000),
        ("t.i32", "i32", -2_000_000_000),
        ("t.f32", "f32", 0.5),
        ("t.f64", "f64", 1e300),
        ("t.u64", "u64", 1 << 63),
        ("t.i64", "i64", -(1 << 62)),
        ("t.bool", "bool", 1),
        ("t.empty", "string", ""),
        ("t.none", "array:i32", []),
        ("t.bools", "array:bool", [1, 0, 1]),
        ("t.halves", "array:u16", [1, 2, 65535]),
        ("t.longs", "array:i64", [-1, 1 << 40]),
        ("t.doubles", "array:f64", [0.25, -1e200]),
        ("tokenizer.ggml.tokens", "array:string", ["<s>", "", "ä", "\u2581hi", b"\xff\xfe", "x" * 40]),
        ("tokenizer.ggml.scores", "array:f32", [0.0, -1.0, -2.0, -3.0, -4.0, -5.0]),
        ("tokenizer.ggml.token_type", "array:i32", [3, 1, 1, 1, 6, 1]),
        ("tokenizer.ggml.merges", "array:string", ["a b", "b c"]),
    ]


def sample_tensors(order: str = "<") -> list[TensorSpec]:
    """Tensors of several types and ranks; one has no elements."""
    shapes: list[tuple[str, str, tuple[int, ...]]] = [
        ("token_embd.weight", "q8_0", (32, 6)),
        ("blk.0.attn_norm.weight", "f32", (5,)),
        ("blk.0.attn_q.weight", "q4_K", (256, 2)),
        ("blk.0.attn_k.weight", "f16", (3, 2, 2, 2)),
        ("blk.0.attn_v.weight", "q4_1", (64, 2)),
        ("blk.0.empty", "f32", (4, 0)),
        ("blk.0.ids", "i32", (7,)),
        ("output.weight", "q6_K", (256,)),
    ]
    return [(name, t, ne, random_blocks(t, int(np.prod(ne)), order=order)) for name, t, ne in shapes]
