"""GGUF model files: open, look at the keys and tensors, take the data.

    with GGUFFile.open("model.gguf") as f:
        f.get("general.architecture", str)
        f.tensors["token_embd.weight"].ne
        f.data("token_embd.weight")          # uint8 view of the file, nothing is read until it is touched

The file is mapped, not read. Every failure is a GGUFError. The file must not be cut shorter while it is open: the
operating system then ends the process with SIGBUS, which no Python code can catch.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from graphrt.dtypes import TYPES
from graphrt.errors import GGUFError
from graphrt.models import gguf_blocks
from graphrt.models.gguf_cursor import AGAIN, Buffer
from graphrt.models.gguf_parse import ArraySpan, Parsed, TensorInfo, decode_array, parse, raw_values, shown
from graphrt.models.gguf_parts import open_parts, split_count, unmap
from graphrt.printing import brief

__all__ = ["GGUFFile", "Metadata", "TensorInfo"]

T = TypeVar("T")

_REQUIRED: Any = object()
_HOST_ORDER = "<" if sys.byteorder == "little" else ">"
_NO_DEQUANTIZE = ("q8_1", "q8_K", "q1_0", "q2_0", "i8", "i16", "i32", "i64", "f64")
_KIND_NAMES: dict[type, str] = {
    int: "an integer",
    float: "a number",
    bool: "a bool",
    str: "a string",
    list: "an array of strings",
    np.ndarray: "an array of numbers",
}


class Metadata(Mapping[str, Any]):
    """The keys of a file, in file order.

    Values are int, float, bool or str; arrays of numbers or bools are numpy arrays; arrays of strings are list[str].
    Arrays are decoded on first access. Strings in arrays keep bytes that are not UTF-8 as surrogate escapes:
    `s.encode("utf-8", "surrogateescape")` gives the exact bytes. Single strings have U+FFFD in their place.
    """

    def __init__(self, values: dict[str, Any], buf: Buffer, order: str) -> None:
        self._values = values
        self._buf: Buffer | None = buf
        self._order = order

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, ArraySpan):
            if self._buf is None:
                raise GGUFError(f"the array {key!r} can't be read: the file is closed. Read it before close().")
            value = self._values[key] = decode_array(self._buf, value, self._order)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def array_length(self, key: str) -> int | None:
        """Elements of the array at `key`, without decoding it; None when there is no such key or it is no array."""
        value = self._values.get(key)
        if isinstance(value, ArraySpan):
            return value.count
        return len(value) if isinstance(value, (list, np.ndarray)) else None

    def override(self, key: str, value: bool | int | float | str) -> None:
        """Has the key say this from now on, in memory; raw_values() stays the file's."""
        self._values[key] = value

    def _release(self) -> None:
        self._buf = None


class GGUFFile:
    """An open model: one file, or all the parts of a split one. Make it with `open` or `from_bytes`.

    version: 2 or 3; byte_order: "little" or "big"; alignment: of the tensors' data, in bytes; paths: every part;
    metadata: the first part's keys; tensors: name -> TensorInfo in file order.
    """

    def __init__(self, parts: list[tuple[Buffer, Parsed]], paths: list[Path]) -> None:
        buf, first = parts[0]
        self._buffers: list[Buffer] = [part[0] for part in parts]
        self._swap = first.order != _HOST_ORDER
        self.version = first.version
        self.byte_order = "little" if first.order == "<" else "big"
        self.alignment = first.alignment
        self.paths = paths
        self.metadata = Metadata(first.values, buf, first.order)
        self.tensors: dict[str, TensorInfo] = {}
        for _, parsed in parts:
            self.tensors.update(parsed.tensors)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Opens a model; of a split one, give the first part (PREFIX-00001-of-00003.gguf). Raises GGUFError."""
        return cls(*open_parts(Path(path)))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray, label: str = "<bytes>") -> GGUFFile:
        """The same for a file that is already in memory; it can't be a split one. Raises GGUFError."""
        buf = bytearray(data)
        parsed = parse(buf, label)
        if split_count(parsed, label) > 1:
            raise GGUFError(f"{label}: a split model can't be read from memory. Write its parts to files.")
        return cls([(buf, parsed)], [])

    def close(self) -> None:
        """Lets the file go. Arrays that data() gave out stay valid: they keep the mapping until they die."""
        buffers, self._buffers = self._buffers, []
        self.metadata._release()
        for buf in buffers:
            unmap(buf)

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @overload
    def get(self, key: str, kind: type[T]) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: None) -> T | None: ...
    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    @overload
    def get(self, key: str, kind: tuple[type, ...], default: Any = ...) -> Any: ...
    def get(self, key: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        """The value at `key`, of a checked kind: int, float (an int will do), bool, str, list (of str), np.ndarray (of
        numbers or bools), or a tuple of these. Without a default a missing key is a GGUFError too."""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if key not in self.metadata:
            if default is not _REQUIRED:
                return default
            raise GGUFError(f"{self._label}: the key {key!r} ({_wanted(kinds)}) is missing. Use a complete GGUF file.")
        value = self.metadata[key]
        if type(value) in kinds:
            return value
        if float in kinds and type(value) is int:
            return float(value)
        raise GGUFError(
            f"{self._label}: the key {key!r} must be {_wanted(kinds)}, got {shown(value)}.\n"
            f"Convert the model again, or download another file of it."
        )

    def raw_values(self) -> dict[str, bytes]:
        """Each key's type and value as the first part has them, for another file to be made of (gguf_write.py).

        Raises GGUFError for a closed file and for one of the other byte order.
        """
        if not self._buffers:
            raise GGUFError("the keys can't be read: the file is closed. Take them before close().")
        if self._swap:
            raise GGUFError(
                f"{self._label}: a file is made of one in the machine's byte order, this is {self.byte_order}-endian. "
                f"Use the model's {sys.byteorder}-endian file."
            )
        return raw_values(self._buffers[0], self._label)

    def data(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes, 1-D, in the machine's byte order: a view of the mapped file, or a copy where the file
        has the other order. Writing to the view changes memory only, never the file. Raises GGUFError."""
        return self.span(name, 0, self._info(name).nbytes)

    def span(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes from start to stop of what data() gives. Raises GGUFError."""
        info = self._info(name)
        if not self._buffers:
            raise GGUFError(f"tensor {name!r} can't be read: the file is closed. Take the data before close().")
        if start >= stop:
            return np.empty(0, np.uint8)  # frombuffer refuses an offset at the very end
        if not self._swap:
            return np.frombuffer(self._buffers[info.part], np.uint8, stop - start, info.offset + start)
        if not gguf_blocks.can_swap(info.dtype):
            raise GGUFError(
                f"{self._label}: tensor {name!r} of type {info.dtype} can't be read from a {self.byte_order}-endian "
                f"file.\nUse the model's {sys.byteorder}-endian file."
            )
        block = info.dtype.type_size
        first, last = start // block * block, -(-stop // block) * block  # bytes are swapped within blocks
        view = np.frombuffer(self._buffers[info.part], np.uint8, last - first, info.offset + first)
        return gguf_blocks.swapped(view, info.dtype)[start - first : stop - first]

    def dequantize(self, name: str, part: NDArray[np.uint8] | None = None) -> NDArray[np.float32]:
        """The tensor in float32, of shape `ne` reversed (torch's order), or a part of it: rows of as many bytes each,
        uint8 [n, bytes]. Raises GGUFError for the types that the gguf package can't turn into floats."""
        import gguf  # 0.1 s, and only this method needs it

        info = self._info(name)
        if info.dtype.name in _NO_DEQUANTIZE:
            known = ", ".join(t for t in TYPES if t not in _NO_DEQUANTIZE)
            raise GGUFError(
                f"{self._label}: tensor {name!r} of type {info.dtype} can't be dequantized.\n"
                f"The types that can: {known}."
            )
        shape = info.ne[::-1]
        if info.nbytes == 0:
            return np.empty(shape, np.float32)
        if part is None:
            rows = self.data(name).reshape(*shape[:-1], info.dtype.row_size(info.ne[0]))
        else:
            rows = part
            shape = len(part), part.shape[1] // info.dtype.type_size * info.dtype.block_size
        with np.errstate(all="ignore"):  # damaged scales give NaN or Inf: check_tensors() tells
            values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(info.dtype.id))
        return np.asarray(values, np.float32).reshape(shape)

    def check_tensors(self) -> None:
        """Reads every tensor and raises GGUFError at the first NaN or infinity in floats or block scales.

        What llama.cpp does for --check-tensors. Reads the whole file."""
        for name, info in self.tensors.items():
            found = gguf_blocks.first_bad_block(self.data(name), info.dtype)
            if found is not None:
                block, what = found
                where = f"block {block}" if info.dtype.is_quantized else f"element {block}"
                raise GGUFError(f"{self._label}: {what} in tensor {name!r} ({info.dtype}) at {where}.\n{AGAIN}")

    @property
    def _label(self) -> str:
        return str(self.paths[0]) if self.paths else "<bytes>"

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            close = difflib.get_close_matches(name, self.tensors, n=1)
            hint = f"Did you mean {brief(close[0])}?" if close else f"It has {len(self.tensors)} tensors: see .tensors."
            raise GGUFError(f"{self._label}: there is no tensor {brief(name)}. {hint}")
        return info


def _wanted(kinds: tuple[type, ...]) -> str:
    return " or ".join(_KIND_NAMES.get(k, k.__name__) for k in kinds)
