"""Writes GGUF files tensor by tensor, so that no model need fit into memory.

A file is written beside its place under another name and moved there when it is whole: whoever looks finds the old
file, none, or all of the new one. The byte order is the machine's.
"""

from __future__ import annotations

import contextlib
import shutil
import struct
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from graphrt import whole_files
from graphrt.dtypes import DType
from graphrt.errors import GGUFError

ALIGNMENT = 32
#: The format's numbers of value types.
_U16, _U32, _I32, _STRING, _ARRAY = 2, 4, 5, 8, 9
_VERSION = 3
#: Left over on a disk when a file is begun: for its header, and for what others write meanwhile.
_SPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: its name, type, and dimensions in ggml's order."""

    name: str
    dtype: DType
    ne: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        rows = 1
        for n in self.ne[1:]:
            rows *= n
        return self.dtype.row_size(self.ne[0]) * rows


def u16(value: int) -> bytes:
    """A key's type and value, as GGUFFile.raw_values() has them."""
    return struct.pack("=IH", _U16, value)


def u32(value: int) -> bytes:
    return struct.pack("=II", _U32, value)


def i32(value: int) -> bytes:
    return struct.pack("=Ii", _I32, value)


def string(text: str) -> bytes:
    return struct.pack("=I", _STRING) + _text(text)


def strings(texts: Sequence[str]) -> bytes:
    return struct.pack("=IIQ", _ARRAY, _STRING, len(texts)) + b"".join(map(_text, texts))


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("=Q", len(raw)) + raw


def header(keys: Mapping[str, bytes], tensors: Sequence[Planned], alignment: int = ALIGNMENT) -> bytes:
    """All that comes before the tensors' data, padding included. alignment: what `keys` say, or say nothing of. Raises
    GGUFError for a type that ggml lacks."""
    out = bytearray(b"GGUF" + struct.pack("=IQQ", _VERSION, len(tensors), len(keys)))
    for key, value in keys.items():
        out += _text(key) + value
    offset = 0
    for t in tensors:
        if t.dtype.id is None:
            raise GGUFError(
                f"a GGUF file's tensors have types that ggml has, {t.name!r} is {t.dtype}, which is for caches and "
                f"what is copied into them; copy it into f16 or q8_0 first"
            )
        out += _text(t.name) + struct.pack(f"=I{len(t.ne)}QIQ", len(t.ne), *t.ne, t.dtype.id, offset)
        offset += padded(t.nbytes, alignment)
    return bytes(out) + bytes(-len(out) % alignment)


def padded(nbytes: int, alignment: int = ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


def file_size(keys: Mapping[str, bytes], tensors: Sequence[Planned], alignment: int = ALIGNMENT) -> int:
    """Bytes of the file that write() makes of these."""
    return len(header(keys, tensors, alignment)) + sum(padded(t.nbytes, alignment) for t in tensors)


class Writer:
    """Takes the data of the planned tensors, in their order, each in as many pieces as one likes."""

    def __init__(self, out: BinaryIO, keys: Mapping[str, bytes], tensors: Sequence[Planned], alignment: int) -> None:
        self._out = out
        self._alignment = alignment
        out.write(header(keys, tensors, alignment))

    def tensor(self, planned: Planned, pieces: Iterable[npt.NDArray[np.uint8]]) -> None:
        """Writes a tensor's data, whose pieces must have as many bytes as was planned."""
        written = sum(self._out.write(np.ascontiguousarray(piece).data) for piece in pieces)
        assert written == planned.nbytes, f"{planned.name} must have {planned.nbytes} bytes, got {written}"
        self._out.write(bytes(padded(written, self._alignment) - written))


@contextlib.contextmanager
def writing(
    path: Path, keys: Mapping[str, bytes], tensors: Sequence[Planned], alignment: int = ALIGNMENT
) -> Generator[Writer, None, None]:
    """A file being written, which takes its place when the block ends well and is gone when it doesn't.

    Raises GGUFError where it can't be written, or the disk has no room for it.
    """
    needed = file_size(keys, tensors, alignment)
    try:
        if path.is_dir():
            raise GGUFError(f"{path}: the file to write must not be a folder. Give it a name.")
        if shutil.disk_usage(path.parent).free < needed + _SPARE_BYTES:
            raise GGUFError(f"{path}: the file will take {needed} bytes, and the disk has less free. Free some space.")
        with whole_files.writing(path) as out:
            yield Writer(out, keys, tensors, alignment)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise GGUFError(f"{path}: the file can't be written: {reason}. Check the folder and the disk.") from None
