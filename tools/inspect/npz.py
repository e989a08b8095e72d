"""Arrays of an .npz file that may come from a stranger: every size is checked before memory is taken for it.

with open_npz("values.npz", "values") as file:
    file.names                      # of its arrays
    file.array("Qcur-0")            # numbers
    file.text("about", 4096)        # a single text of at most so many bytes

An .npz file is a zip of .npy files, and both say how large their content is. Neither is believed: what is said must fit
the file's own size and each other, and no more bytes are unpacked than were said. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import numpy.typing as npt

from graphrt.errors import GraphError

Array = npt.NDArray[np.generic]

#: Arrays in a file: a model's step has a few thousand nodes.
MAX_ARRAYS = 1 << 15
#: All arrays together take at most MIN_TOTAL bytes and RATIO for each of the file's: values of nodes shrink to a third
#: where they shrink at all, masks to almost nothing.
MIN_TOTAL, RATIO = 32 * 2**20, 16
#: The zip's list of its members is read at once.
MAX_DIRECTORY = 4 * 2**20
#: An .npy file's header: numpy writes 118 bytes, and 64 more for each further line of a long shape.
MAX_HEADER = 4096
PIECE = 1 << 20
#: Letters of numpy's types that are numbers, and their sizes in bytes; text is four bytes a character.
_SIZES = {"f": (2, 4, 8), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "b": (1,)}
_HEADER = re.compile(
    r"\{\s*'descr':\s*'([<>|=]?)([a-zA-Z])(\d{1,9})',\s*'fortran_order':\s*(True|False),"
    r"\s*'shape':\s*\(((?:\d{1,18},\s*)*(?:\d{1,18})?)\),?\s*\}\s*"
)
_ZIP_ERRORS = (
    zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError,
    OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError,
)  # fmt: skip


def open_npz(path: str | Path, what: str) -> Npz:
    """The file's list of arrays; use it as a context. what: the content in an error, "values". Raises GraphError."""
    return Npz(Path(path), what)


class _Bounded(io.FileIO):
    """A file of which zipfile can't read more at once than it needs to."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_DIRECTORY:
            raise ValueError(f"its list of arrays takes {size} bytes, at most {MAX_DIRECTORY} are read")
        found = super().read(size)
        return b"" if found is None else found


class Npz:
    """An open .npz file. names: of its arrays, in order; most: bytes that a file of its size may take in memory."""

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path, what
        with self._answering():
            if not path.is_file():  # a pipe would be waited for, a device may have no end
                raise OSError("it is no regular file" if path.exists() else "there is no such file")
            self._file = _Bounded(path)
            try:
                self._zip = zipfile.ZipFile(self._file)
                self._members = self._checked(self._zip.infolist(), path.stat().st_size)
            except BaseException:
                self._file.close()
                raise
        self.names = list(self._members)

    def __enter__(self) -> Npz:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._zip.close()
        self._file.close()

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """What zipfile and numpy raise for a damaged file as one GraphError."""
        try:
            yield
        except _ZIP_ERRORS as error:
            told = str(error)[:300] or type(error).__name__
            raise GraphError(
                f"{self._what} must be an .npz file of plain arrays, whole, {str(self._path)[:200]!r} is not: {told}; "
                f"check the path or write the file anew"
            ) from error

    def _checked(self, members: list[zipfile.ZipInfo], file_bytes: int) -> dict[str, zipfile.ZipInfo]:
        if len(members) > MAX_ARRAYS:
            raise ValueError(f"it has {len(members)} arrays, at most {MAX_ARRAYS} are read")
        total, self.most = sum(m.file_size for m in members), MIN_TOTAL + RATIO * file_bytes
        if total > self.most:
            raise ValueError(f"its arrays take {total} bytes, for a file of {file_bytes} at most {self.most} are taken")
        found: dict[str, zipfile.ZipInfo] = {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name == member.filename or name in found:
                raise ValueError(f"a member is an array of its own, NAME.npy, {member.filename[:80]!r} is not")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others take memory to unpack
                raise ValueError(
                    f"{member.filename[:80]!r} is packed in way {member.compress_type}, only deflate is read"
                )
            found[name] = member
        return found

    def array(self, name: str) -> Array:
        """An array of numbers. Raises GraphError."""
        with self._answering():
            return self._read(name, text=False)

    def text(self, name: str, most: int) -> str:
        """An array of one text. most: bytes that it may take, four a character. Raises GraphError."""
        with self._answering():
            return str(self._read(name, text=True, most=most))

    def _read(self, name: str, *, text: bool, most: int | None = None) -> Array:
        member = self._members.get(name)
        if member is None:
            raise ValueError(f"there is no array {name[:80]!r}")
        if most is not None and member.file_size > most:
            raise ValueError(f"{name[:80]!r} takes {member.file_size} bytes, at most {most} are read")
        with self._zip.open(member) as packed:
            return _array(name[:80], packed, member.file_size, text)


def _array(name: str, packed: IO[bytes], size: int, text: bool) -> Array:
    """An .npy file of so many bytes."""
    magic = packed.read(8)
    if magic[:6] != b"\x93NUMPY" or magic[6:7] not in (b"\1", b"\2", b"\3"):
        raise ValueError(f"{name!r} is no .npy file of version 1 to 3")
    width = 2 if magic[6] == 1 else 4
    length = int.from_bytes(packed.read(width), "little")
    header = _HEADER.fullmatch(packed.read(length).decode("latin-1")) if length <= MAX_HEADER else None
    if header is None:
        raise ValueError(f"{name!r} must have a plain header of at most {MAX_HEADER} bytes, it has another")
    order, kind, digits, fortran, shape_text = header.groups()
    shape = tuple(int(n) for n in re.findall(r"\d+", shape_text))
    item = int(digits) * (4 if kind == "U" else 1)
    if (kind != "U" or shape != ()) if text else int(digits) not in _SIZES.get(kind, ()):
        raise ValueError(
            f"{name!r} must be {'a text' if text else 'numbers'}, it has type {kind}{digits} and shape {shape}"
        )
    if len(shape) > 32 or 8 + width + length + item * math.prod(shape) != size:
        raise ValueError(f"{name!r} of type {kind}{digits} and shape {list(shape)[:8]} does not fill its {size} bytes")
    data = np.empty(item * math.prod(shape), np.uint8)
    for start in range(0, data.size, PIECE):
        part = packed.read(min(PIECE, data.size - start))
        if len(part) != min(PIECE, data.size - start):
            raise EOFError(f"{name!r} ends early")
        data[start : start + len(part)] = np.frombuffer(part, np.uint8)
    if packed.read(1):  # reading to the end has the checksum compared too
        raise ValueError(f"{name!r} holds more than it says")
    values = data.view(f"{order}{kind}{digits}") if data.size else np.empty(0, f"{order}{kind}{digits}")
    return values.reshape(shape, order="F" if fortran == "True" else "C")
