"""Reads the header of one GGUF file: keys, values and tensor infos, every length checked before it is used.

A GGUF file comes from strangers. Each count is held against the bytes that are left before anything is allocated for
it, products are Python ints (which do not wrap), and every failure is a GGUFError. What this module knows nothing of:
files, mappings, split models (gguf.py) and what is inside a block (gguf_blocks.py).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphrt.dtypes import REMOVED_IDS, DType, dtype_by_id
from graphrt.models.gguf_cursor import AGAIN, MAX_STRING, Buffer, Cursor
from graphrt.printing import brief

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_NAME = 64  # ggml's GGML_MAX_NAME, with the ending NUL
_MAX_KEY = 65535  # the GGUF specification's limit
_MAX_ARRAY = 1 << 30
_INT64_MAX = (1 << 63) - 1
_MIN_KV_BYTES = 8 + 1 + 4 + 1  # key length, one byte of key, type, the smallest value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8  # name length, one byte of name, n_dims = 0, type, offset

_STRING, _ARRAY = 8, 9
#: GGUF's scalar value types: id -> (name, struct code).
_SCALARS = {
    0: ("u8", "B"), 1: ("i8", "b"), 2: ("u16", "H"), 3: ("i16", "h"), 4: ("u32", "I"), 5: ("i32", "i"),
    6: ("f32", "f"), 7: ("bool", "B"), 10: ("u64", "Q"), 11: ("i64", "q"), 12: ("f64", "d"),
}  # fmt: skip
_NUMPY_CODES = dict(_SCALARS.values())

#: Files that people take for GGUF, by how they start, and what to do about each.
_LOOKALIKES = (
    (b"version https://git-lfs", "It is a Git LFS pointer: run `git lfs pull`, or download the file itself."),
    (b"<", "It is a web page: download the file itself, not the page that shows it."),
    (b"PK\x03\x04", "It is a zip archive (a wheel or a PyTorch checkpoint): unpack it, or convert it to GGUF."),
    (b"lmgg", "It is GGML's old format: convert the original model to GGUF."),
    (b"fmgg", "It is GGMF, an old format: convert the original model to GGUF."),
    (b"tjgg", "It is GGJT, an old format: convert the original model to GGUF."),
)


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    ne: 1 to 4 dimensions in ggml's order (ne[0] is contiguous); offset: bytes from the start of the file to the data;
    nbytes: size of the data; part: index into GGUFFile.paths.
    """

    name: str
    dtype: DType
    ne: tuple[int, ...]
    offset: int
    nbytes: int
    part: int = 0


@dataclass(frozen=True)
class ArraySpan:
    """An array value that was walked but not decoded: `count` elements of `kind` in bytes [start, end)."""

    kind: str  # "u8" .. "f64", "bool" or "string"
    count: int
    start: int
    end: int


@dataclass(frozen=True)
class Parsed:
    """One file's header. order: "<" or ">" as struct spells it; values: scalars, strings and ArraySpans."""

    version: int
    order: str
    alignment: int
    values: dict[str, Any]
    tensors: dict[str, TensorInfo]


def shown(value: object) -> str:
    """A value as an error names it: its kind, and what it is or how long it is."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype} values"
    if isinstance(value, ArraySpan):
        return f"an array of {value.count} {value.kind} values"
    if isinstance(value, list):
        return f"an array of {len(value)} strings"
    return f"the {type(value).__name__} {brief(value)}"


def parse(buf: Buffer, label: str, part: int = 0) -> Parsed:
    """Parses a whole header and checks that every tensor's data lies inside `buf`.

    label names the file in errors; part is stored in each TensorInfo. Raises GGUFError.
    """
    cur = Cursor(buf, label)
    version = _read_version(cur)
    n_tensors = _read_count(cur, "tensors", _MIN_TENSOR_BYTES)
    n_kv = _read_count(cur, "keys", _MIN_KV_BYTES)
    values = _read_values(cur, n_kv)
    _check_vocabulary(cur, values)
    alignment = _alignment(cur, values)
    tensors = _read_tensors(cur, n_tensors, alignment, part)
    return Parsed(version, cur.order, alignment, values, tensors)


def raw_values(buf: Buffer, label: str) -> dict[str, bytes]:
    """Each key's type and value as they lie in a header that parse() has accepted: what a copy of the file repeats."""
    cur = Cursor(buf, label)
    _read_version(cur)
    _read_count(cur, "tensors", _MIN_TENSOR_BYTES)
    found: dict[str, bytes] = {}
    for i in range(_read_count(cur, "keys", _MIN_KV_BYTES)):
        key = cur.name(f"key {i}", _MAX_KEY)
        start = cur.pos
        _read_value(cur, key)
        found[key] = bytes(buf[start : cur.pos])
    return found


def _read_version(cur: Cursor) -> int:
    if cur.size == 0:
        cur.fail("a GGUF file can't be empty", "Download the file again.")
    magic = bytes(cur.buf[:24])
    if not magic.startswith(_MAGIC):
        step = next((step for start, step in _LOOKALIKES if magic.startswith(start)), "Give the path of a GGUF model.")
        cur.fail(f"a GGUF file must start with {_MAGIC!r}, got {magic[:4]!r}", step)
    cur.pos = len(_MAGIC)
    version: int = cur.scalar("I", "the version")
    if version & 0xFFFF == 0:  # a small number in the other byte order
        cur.order = ">"
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version == 1:
        cur.fail("GGUF version 1 is not read any more", "Convert the original model again, or download a newer file.")
    if version not in _VERSIONS:
        step = "Update graphrt." if 3 < version < 16 else AGAIN
        cur.fail(f"the GGUF version must be 2 or 3, got {version}", step)
    return version


def _read_count(cur: Cursor, what: str, min_bytes: int) -> int:
    n: int = cur.scalar("q", f"the number of {what}")
    most = cur.remaining // min_bytes
    if not 0 <= n <= most:
        cur.fail(f"the number of {what} must be 0 to {most} in a file of {cur.size} bytes, got {n}")
    return n


def _read_values(cur: Cursor, n_kv: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for i in range(n_kv):
        key = cur.name(f"key {i}", _MAX_KEY)
        if key in values:
            cur.fail(f"a key may appear once, got {brief(key)} again")
        values[key] = _read_value(cur, key)
    return values


def _read_value(cur: Cursor, key: str) -> Any:
    kind = cur.scalar("I", f"the type of {brief(key)}")
    if kind == _STRING:
        # Readable text for people and templates. Where exact bytes matter (tokens, merges) the value is an array.
        return cur.string(f"the value of {brief(key)}").decode("utf-8", "replace")
    if kind == _ARRAY:
        return _read_array(cur, key)
    if kind not in _SCALARS:
        cur.fail(f"the type of {brief(key)} must be 0 to 12, got {kind}")
    name, code = _SCALARS[kind]
    value = cur.scalar(code, f"the value of {brief(key)}")
    if name != "bool":
        return value
    if value > 1:
        cur.fail(f"the bool {brief(key)} must be 0 or 1, got {value}")
    return bool(value)


def _read_array(cur: Cursor, key: str) -> ArraySpan:
    kind = cur.scalar("I", f"the element type of {brief(key)}")
    count: int = cur.scalar("Q", f"the length of {brief(key)}")
    if kind == _ARRAY:
        cur.fail(f"an array of arrays can't be read, got one in {brief(key)}", "Convert the model with llama.cpp.")
    if kind != _STRING and kind not in _SCALARS:
        cur.fail(f"the element type of {brief(key)} must be 0 to 12, got {kind}")
    if count > _MAX_ARRAY:
        cur.fail(f"an array may have at most {_MAX_ARRAY} elements, got {count} in {brief(key)}")
    if kind == _STRING:
        return _walk_strings(cur, key, count)
    name, code = _SCALARS[kind]
    nbytes = count * struct.calcsize("<" + code)
    cur.need(nbytes, f"the array {brief(key)} of {count} elements")
    start = cur.pos
    if name == "bool" and count and int(np.frombuffer(cur.buf, np.uint8, count, start).max()) > 1:
        cur.fail(f"the bools in {brief(key)} must be 0 or 1, got larger values")
    cur.pos += nbytes
    return ArraySpan(name, count, start, cur.pos)


def _walk_strings(cur: Cursor, key: str, count: int) -> ArraySpan:
    """Finds the end of a string array without making strings: 262144 tokens take about 40 ms."""
    cur.need(8 * count, f"the array {brief(key)} of {count} strings")
    buf, size, pos = cur.buf, cur.size, cur.pos
    length_at = struct.Struct(cur.order + "Q").unpack_from
    for i in range(count):
        if pos + 8 > size:
            cur.fail(f"string {i} of {brief(key)} starts at offset {pos}, at the end of the file ({size} bytes)")
        length = length_at(buf, pos)[0]
        pos += 8 + length
        if pos > size or length > MAX_STRING:
            cur.fail(f"string {i} of {brief(key)} must end inside the file of {size} bytes, got a length of {length}")
    span = ArraySpan("string", count, cur.pos, pos)
    cur.pos = pos
    return span


def decode_array(buf: Buffer, span: ArraySpan, order: str) -> Any:
    """The array of `span`: a numpy array in the machine's byte order, or a list of str.

    Strings decode with "surrogateescape": a token that is not valid UTF-8 keeps its bytes, and
    `token.encode("utf-8", "surrogateescape")` gives them back.
    """
    if span.kind != "string":
        if span.kind == "bool":
            return np.frombuffer(buf, np.bool_, span.count, span.start).copy()
        stored = np.dtype(order + _NUMPY_CODES[span.kind])
        return np.frombuffer(buf, stored, span.count, span.start).astype(stored.newbyteorder("="))
    blob = bytes(buf[span.start : span.end])
    length_at = struct.Struct(order + "Q").unpack_from
    strings: list[str] = []
    end = 0
    for _ in range(span.count):
        start = end + 8
        end = start + length_at(blob, end)[0]
        strings.append(blob[start:end].decode("utf-8", "surrogateescape"))
    return strings


def _check_vocabulary(cur: Cursor, values: dict[str, Any]) -> None:
    """The arrays that a tokenizer indexes by token id must be of the right type and long enough."""
    arrays = {
        "tokenizer.ggml.tokens": ("string",),
        "tokenizer.ggml.merges": ("string",),
        "tokenizer.ggml.scores": ("f32", "i32"),
        "tokenizer.ggml.token_type": ("i32", "u32"),
    }
    for key, kinds in arrays.items():
        value = values.get(key)
        if value is not None and (not isinstance(value, ArraySpan) or value.kind not in kinds):
            got = f"an array of {value.kind}" if isinstance(value, ArraySpan) else brief(value)
            cur.fail(f"{key} must be an array of {' or '.join(kinds)}, got {got}")
    tokens = values.get("tokenizer.ggml.tokens")
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        if tokens is not None and key in values and values[key].count < tokens.count:
            cur.fail(f"{key} must have an element for each of the {tokens.count} tokens, got {values[key].count}")


def _alignment(cur: Cursor, values: dict[str, Any]) -> int:
    value = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    # bool is an int to Python; True would pass as the power of two 1
    if type(value) is not int or not 0 < value < 1 << 32 or value & (value - 1):
        cur.fail(f"general.alignment must be a power of two below 2**32, got {brief(value)}")
    return value


def _read_tensors(cur: Cursor, n_tensors: int, alignment: int, part: int) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    expected = 0  # tensors follow each other, each padded to the alignment
    for i in range(n_tensors):
        info = _read_tensor(cur, i, part)
        if info.name in infos:
            cur.fail(f"a tensor's name may appear once, got {info.name!r} again")
        if info.offset != expected:
            cur.fail(f"tensor {info.name!r} must start at {expected}, where the one before it ends, got {info.offset}")
        expected += _padded(info.nbytes, alignment)
        infos[info.name] = info
    data_start = _padded(cur.pos, alignment)
    for name, info in infos.items():
        offset = data_start + info.offset
        if offset + info.nbytes > cur.size:
            cur.fail(f"tensor {name!r} must end inside the file of {cur.size} bytes, got end {offset + info.nbytes}")
        infos[name] = TensorInfo(name, info.dtype, info.ne, offset, info.nbytes, part)
    return infos


def _read_tensor(cur: Cursor, i: int, part: int) -> TensorInfo:
    """One tensor's info, its offset still relative to the start of the data."""
    name = cur.name(f"the name of tensor {i}", _MAX_NAME - 1)
    n_dims = cur.scalar("I", f"the number of dimensions of {name!r}")
    if n_dims > _MAX_DIMS:
        cur.fail(f"tensor {name!r} may have at most {_MAX_DIMS} dimensions, got {n_dims}")
    ne = tuple(cur.scalar("q", f"dimension {j} of {name!r}") for j in range(n_dims)) or (1,)
    elements = places = 1
    for n in ne:
        elements *= n
        places *= max(n, 1)  # a zero must not hide that the others overflow a stride
    if min(ne) < 0 or places > _INT64_MAX:
        cur.fail(f"the dimensions of {name!r} must be at least 0 and their product at most 2**63 - 1, got {list(ne)}")
    dtype = _read_dtype(cur, name)
    if ne[0] % dtype.block_size:
        cur.fail(f"a row of {name!r} must hold whole {dtype} blocks of {dtype.block_size} elements, got {ne[0]}")
    offset = cur.scalar("Q", f"the offset of {name!r}")
    return TensorInfo(name, dtype, ne, offset, elements // dtype.block_size * dtype.type_size, part)


def _read_dtype(cur: Cursor, name: str) -> DType:
    type_id = cur.scalar("I", f"the type of {name!r}")
    dtype = dtype_by_id(type_id)
    if dtype is not None:
        return dtype
    if type_id in REMOVED_IDS:
        cur.fail(
            f"the type {REMOVED_IDS[type_id]} of tensor {name!r} was removed from GGUF (id {type_id})",
            "Quantize the original model again, to q4_0 for instance.",
        )
    cur.fail(
        f"the type of tensor {name!r} must be one that ggml has, got id {type_id}",
        "Update graphrt if the file is newer. " + AGAIN,
    )


def _padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
