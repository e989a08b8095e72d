"""What is done to a valid file: to its JSON, its arrays, its zip, and to the graph it tells of."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import random
import struct
import zipfile
from typing import Any

import numpy as np

from graphrt import ops
from graphrt.dtypes import TYPES
from graphrt.errors import GraphError
from graphrt.host import host_type
from graphrt.op import build, op_spec, registered_ops
from graphrt.tensor import MAX_DIMS, Tensor, new_input
from graphrt.testing import Inputs

#: Elements of a varied input at most.
MOST_ELEMENTS = 1 << 15
NUMBERS = (
    0, 1, -1, 2, 3, 4, 7, 8, 31, 32, 33, 64, 127, 255, 256, 4096, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**52,
    2**53, 2**62, 2**63 - 1, 2**63, 2**64, 2**64 + 4, 10**30, 0.5, -0.0, 1e-45, 1e-300, 1e30, 1e308,
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, "", "inf", "-inf", "nan", "NONE", "VIEW", "f32", "q4_0", [], {}, [[]], [None], "x" * 100,
    "\x1b[2J", "\ud800", "\0", [0, 0, 0, 0], [1, 1, 1, 1], [-4, 4, 4, 4],
)  # fmt: skip


def some_number(rng: random.Random, old: Any) -> Any:
    """Another number, near the old one or at some border."""
    near = isinstance(old, (int, float)) and not isinstance(old, bool) and rng.random() < 0.5
    return rng.choice((old + 1, old - 1, old * 2, old // 2, -old, old + 4, old * 3)) if near else rng.choice(NUMBERS)


# ---- JSON ----


def broken_json(rng: random.Random, value: Any) -> str:
    """The text of a value after some mutations, sometimes no JSON any more."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        _mutate(rng, value)
    text = json.dumps(value)
    if rng.random() < 0.1:
        return _broken_text(rng, text)
    return text


def _mutate(rng: random.Random, value: Any) -> None:
    """Changes one place in objects and arrays, reached by random steps."""
    at: list[tuple[Any, Any]] = []
    inner = value
    while isinstance(inner, (dict, list)) and inner:
        key = rng.choice(list(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
        if not at and rng.random() < 0.9:  # most of a file are its tensors
            key = next((k for k in ("graph", "tensors") if k in inner), key)
        at.append((inner, key))
        inner = inner[key]
        if rng.random() < 0.08:
            break
    if not at:
        return
    holder, key = at[-1]
    old = holder[key]
    step = rng.random()
    if step < 0.6:
        holder[key] = (
            some_number(rng, old) if isinstance(old, (int, float)) and rng.random() < 0.8 else _other(rng, old)
        )
    elif step < 0.7:
        del holder[key]
    elif step < 0.8 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), json.loads(json.dumps(old)))
    elif step < 0.9 and isinstance(holder, list):
        other = rng.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    elif isinstance(holder, dict):
        holder[rng.choice(("more", "", "op", "ne", "\x1b"))] = copy.deepcopy(rng.choice(ODD))


def _other(rng: random.Random, old: Any) -> Any:
    if isinstance(old, str) and rng.random() < 0.6:
        return rng.choice((*TYPES, *registered_ops(), "NONE", old.upper(), old + "x"))
    return copy.deepcopy(rng.choice(ODD))  # further mutations change lists


def _broken_text(rng: random.Random, text: str) -> str:
    """Texts that JSON parsers stumble over."""
    at = rng.randrange(len(text))
    odd = (
        "NaN", "Infinity", "1e999", "9" * 5000, "[" * 100_000, '{"a":' * 50_000, '"' + "\\u0000" * 50, "\x00", "\ud800",
        "[]," * 100_000, "-", "0x10",
    )  # fmt: skip
    return rng.choice((text[:at], text[:at] + rng.choice(odd) + text[at:], text[:at] + rng.choice(odd), text + text))


# ---- arrays ----


def odd_array(rng: random.Random, a: np.ndarray) -> np.ndarray:
    """Other values, or another type, shape or order."""
    step = rng.random()
    if step < 0.35:
        return a
    if step < 0.7:
        return odd_values(rng, a.shape, a.dtype)
    if step < 0.8:
        return a.astype(
            rng.choice(("f8", "f4", "f2", "i8", "i4", "u1", ">f4", "c8", "?", "U3", "V4", "M8[s]")), casting="unsafe"
        )
    if step < 0.9:
        return rng.choice((a[..., :-1], a.reshape(-1), a[None], np.concatenate([a, a]), a[:0], np.asfortranarray(a)))
    return rng.choice((np.zeros((2000, 2000)), np.zeros(40 * 2**20, np.uint8), np.zeros(()), np.array("text")))


def odd_values(rng: random.Random, shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """Random bits, or sensible numbers with some that are not."""
    bits = np.random.default_rng(rng.getrandbits(32))
    size = int(np.prod(shape)) * kind.itemsize
    if rng.random() < 0.3:
        return bits.integers(0, 256, size, dtype=np.uint8).view(kind).reshape(shape)
    if kind.kind == "f":
        values = bits.normal(0, 1, shape)
        odd: tuple[float, ...] = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e-30, 65504.0)
    else:
        values = bits.integers(0, 9, shape)
        odd = (-1, 0, 1, 7, 8, 127) if kind.itemsize == 1 else (-1, -2, 5, 100, 30000, 2**31 - 1, -(2**31))
    hit = bits.random(shape) < rng.choice((0.0, 0.01, 0.2))
    with np.errstate(all="ignore"):
        return np.where(hit, rng.choice(odd), values).astype(kind)


# ---- zip ----


def broken_zip(rng: random.Random, data: bytes) -> bytes:
    """A zip whose records, headers or packed bytes are wrong, or that unpacks to much more than it is."""
    return rng.choice((_flipped, _flipped, _cut, _forged, _headers, _bomb))(rng, data)


def _flipped(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 2, 8))):
        # half of them in the list of members at the end, where the sizes are
        at = rng.randrange(len(out)) if rng.random() < 0.5 else rng.randrange(max(0, len(out) - 300), len(out))
        out[at] = rng.choice((out[at] ^ (1 << rng.randrange(8)), 0, 0xFF))
    return bytes(out)


def _cut(rng: random.Random, data: bytes) -> bytes:
    a, b = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    return rng.choice(
        (data[:a], data[a:], data[:a] + data[b:], data[:b] + data[a:], data + data, b"", data[:b] + b"\0" * 99)
    )


def _forged(rng: random.Random, data: bytes) -> bytes:
    """A field of a member's record in the list: sizes, way of packing, flags, offset."""
    out = bytearray(data)
    places = [i for i in range(len(out) - 46) if out[i : i + 4] == b"PK\1\2"]
    if places:
        offset, form = rng.choice(((8, "<H"), (10, "<H"), (20, "<L"), (24, "<L"), (28, "<H"), (30, "<H"), (42, "<L")))
        most = 2 ** (8 * struct.calcsize(form)) - 1
        struct.pack_into(
            form, out, rng.choice(places) + offset, rng.choice((0, 1, 8, 9, 12, 14, 93, 4096, most // 2, most)) & most
        )
    return bytes(out)


def _headers(rng: random.Random, data: bytes) -> bytes:
    """A member's .npy header says something else."""
    new = rng.choice((
        "{'descr': '<f8', 'fortran_order': False, 'shape': (549755813888,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (999999999999999999,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [('a', '<f4'), ('b', '<f8')], 'fortran_order': False, 'shape': (1,), }",
        "{'descr': '<U999999999', 'fortran_order': False, 'shape': (), }",
        "{'descr': '<f0', 'fortran_order': False, 'shape': (9,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }" % ("(" * 2000),
        "{'descr': '<f4', 'fortran_order': True, 'shape': (%s), }" % ("0," * 40),
        "{'descr': '<f4', 'fortran_order': -" + "-" * 3000,
    ))  # fmt: skip
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target:
        names = source.namelist()
        chosen = rng.choice(names)
        for name in names:
            body = source.read(name)
            if name == chosen:
                head = new.encode() + b"\n"
                body = b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + body[128:]
            target.writestr(name, body)
    return out.getvalue()


def _bomb(rng: random.Random, data: bytes) -> bytes:
    out = io.BytesIO(data)
    way = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(out, "a", way) as target:
        if rng.random() < 0.1:
            for i in range(rng.choice((200, 3000))):
                target.writestr(f"m{i}.npy", b"")
        else:
            size = rng.choice((2**20, 20 * 2**20, 60 * 2**20))
            head = b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }\n" % size
            body = b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + bytes(size)
            target.writestr(rng.choice(("bomb.npy", "input_9.npy", "actual.npy")), body)
    return out.getvalue()


# ---- graphs ----


def varied(rng: random.Random, inputs: Inputs) -> Inputs | None:
    """The same ops in a graph of other shapes, types, strides and parameters, with other values: valid by the ops' own
    rules, so that it comes through to the backends. None where the ops take no such graph."""
    out = Inputs(inputs.case, inputs.seed)
    made: dict[Tensor, Tensor] = {}
    swap = _renamed_dimensions(rng, inputs)
    try:
        for leaf in inputs.values:
            made[leaf] = _varied_leaf(rng, leaf, swap, out)
        for node in inputs.graph().nodes:
            sources = [_looked_at(rng, made[s]) if s is not None else None for s in node.src]
            made[node] = build(op_spec(node.op), *sources, params=_varied_params(rng, node.params, swap))
    except (GraphError, ArithmeticError, TypeError):  # a float where a whole number belongs
        return None
    out.node = made[inputs.result]
    needed = set(out.graph().leafs)
    out.values = {t: v for t, v in out.values.items() if t in needed}
    return out


def _renamed_dimensions(rng: random.Random, inputs: Inputs) -> dict[int, int]:
    """Old dimension -> new: what was equal in two tensors stays so."""
    known = sorted({n for leaf in inputs.values for n in leaf.ne} - {1})
    chosen = [n for n in known if rng.random() < 0.4]
    return {n: rng.choice((1, 2, 3, n + 1, n - 1, n * 2, 32, 64, 256, rng.randint(1, 300))) or 1 for n in chosen}


def _varied_leaf(rng: random.Random, leaf: Tensor, swap: dict[int, int], out: Inputs) -> Tensor:
    ne = [swap.get(n, n) for n in leaf.ne]
    if rng.random() < 0.1:
        ne[rng.randrange(MAX_DIMS)] = rng.randint(1, 40)
    dt = TYPES[rng.choice(list(TYPES))] if rng.random() < 0.15 else leaf.dtype
    ne[0] = -(-ne[0] // dt.block_size) * dt.block_size
    while ne[0] * ne[1] * ne[2] * ne[3] > MOST_ELEMENTS:
        at = ne.index(max(ne[1:]), 1) if max(ne[1:]) > 1 else 0
        ne[at] = max(ne[at] // 2, 1) if at else MOST_ELEMENTS
    new = new_input(dt.name, *ne, name=leaf.name)
    shape = (*new.shape[:3], dt.row_size(ne[0]) if dt.is_quantized else ne[0])
    same = new.ne == leaf.ne and dt is leaf.dtype
    out.values[new] = odd_values(rng, shape, host_type(dt))
    if same and rng.random() < 0.5:
        out.draw(new)
    return new


def _looked_at(rng: random.Random, t: Tensor) -> Tensor:
    """Sometimes another look at a source: permuted, or a view with gaps, overlaps or an offset."""
    step = rng.random()
    if step < 0.9:
        return t
    if step < 0.93:
        return ops.permute(t, *rng.choice(((0, 1, 3, 2), (0, 2, 1, 3), (1, 0, 2, 3), (0, 3, 2, 1))))
    ne = [rng.randint(1, n) if rng.random() < 0.3 else n for n in t.ne]
    ne[0] = -(-ne[0] // t.dtype.block_size) * t.dtype.block_size
    size = t.dtype.type_size
    nb = [rng.choice((n, n, n, 0, size, n + size)) for n in t.nb[1:]]
    return ops.view(t, ne, nb, offs=rng.choice((0, 0, size, 3 * size, t.nb[1])))


def _varied_params(rng: random.Random, params: Any, swap: dict[int, int]) -> Any:
    if params is None:
        return None
    values = {}
    for field in dataclasses.fields(params):
        old = getattr(params, field.name)
        if isinstance(old, tuple):
            old = tuple(swap.get(n, n) for n in old)
        elif isinstance(old, bool):
            old = old if rng.random() < 0.8 else not old
        elif isinstance(old, (int, float)) and rng.random() < 0.25:
            odd = (0.0, -1.0, 1.0, 1e-30, 1e30, 0.5, float("inf"), float("-inf"), float("nan"), 1e-300, 1e300)
            old = some_number(rng, old) if isinstance(old, int) else rng.choice(odd)
        values[field.name] = old
    return type(params)(**values)
