"""Cuts a GGUF file into parts and joins them again, as llama.cpp's gguf-split does.

The first part has all keys. Every part has split.no, split.count and split.tensors.count, and the name
PREFIX-00001-of-00003.gguf, by which GGUFFile.open() finds the others when it is given the first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from graphrt.errors import GGUFError
from graphrt.models import gguf_write
from graphrt.models.gguf import GGUFFile, TensorInfo
from graphrt.models.gguf_write import Planned, writing

MAX_PARTS = 65535  # split.count is an u16
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


def planned_parts(file: GGUFFile, max_bytes: int = 0, max_tensors: int = 0) -> list[list[TensorInfo]]:
    """The tensors of each part, in the file's order. A part has at most max_tensors tensors and, unless it has a single
    one, is a file of at most max_bytes; 0: no limit. Raises GGUFError for too many parts."""
    parts: list[list[TensorInfo]] = [[]]
    keys = _keys(file, 0, MAX_PARTS)
    room = max_bytes - gguf_write.file_size(keys, [], file.alignment)
    for info in file.tensors.values():
        planned = _planned(info)
        # What the tensor takes in the header is counted with the padding of the header's end.
        taken = gguf_write.padded(planned.nbytes, file.alignment) + len(gguf_write.header({}, [planned], 1))
        full = (max_bytes and taken > room) or (max_tensors and len(parts[-1]) >= max_tensors)
        if full and parts[-1]:
            parts.append([])
            room = max_bytes - gguf_write.file_size(_keys(file, 1, MAX_PARTS), [], file.alignment)
        parts[-1].append(info)
        room -= taken
    if len(parts) > MAX_PARTS:
        raise GGUFError(f"a model may be split into at most {MAX_PARTS} parts, these limits give {len(parts)}.")
    return parts


def part_path(prefix: Path, i: int, count: int) -> Path:
    """The file of part i, counted from 0. Raises GGUFError for a prefix without a name."""
    if not prefix.name:
        raise GGUFError(f"a prefix must have a name that the parts' names begin with, got {str(prefix)!r}. Give one.")
    return prefix.with_name(f"{prefix.name}-{i + 1:05d}-of-{count:05d}.gguf")


def split(
    file: GGUFFile,
    prefix: str | os.PathLike[str],
    parts: Sequence[Sequence[TensorInfo]],
    done: Callable[[str], None] = lambda name: None,
) -> list[Path]:
    """Writes the parts and returns their files. done: called with each tensor's name.

    Raises GGUFError, also where one of the files is there already; then none of them is left.
    """
    paths = [part_path(Path(prefix), i, len(parts)) for i in range(len(parts))]
    there = next((path for path in paths if path.exists()), None)
    if there is not None:
        raise GGUFError(f"{there}: a part must not be there yet. Remove it, or give another prefix.")
    written: list[Path] = []
    try:
        for i, (path, infos) in enumerate(zip(paths, parts)):
            _write(file, path, _keys(file, i, len(parts)), infos, done)
            written.append(path)
    except BaseException:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        raise
    return paths


def merge(file: GGUFFile, path: str | os.PathLike[str], done: Callable[[str], None] = lambda name: None) -> Path:
    """Writes all tensors of a model, split or not, as one file. Raises GGUFError, also where the file is there."""
    target = Path(path)
    if target.exists():
        raise GGUFError(f"{target}: the file to write must not be there yet. Remove it, or give another name.")
    keys = {key: value for key, value in file.raw_values().items() if key not in SPLIT_KEYS}
    _write(file, target, keys, list(file.tensors.values()), done)
    return target


def _keys(file: GGUFFile, i: int, count: int) -> dict[str, bytes]:
    """The keys of part i: all in the first one, in others what tells where they belong."""
    raw = file.raw_values()
    kept = {
        key: value for key, value in raw.items() if key not in SPLIT_KEYS and (i == 0 or key == "general.alignment")
    }
    return kept | {
        "split.no": gguf_write.u16(i),
        "split.count": gguf_write.u16(count),
        "split.tensors.count": gguf_write.i32(len(file.tensors)),
    }


def _planned(info: TensorInfo) -> Planned:
    return Planned(info.name, info.dtype, info.ne)


def _write(
    file: GGUFFile, path: Path, keys: dict[str, bytes], infos: Sequence[TensorInfo], done: Callable[[str], None]
) -> None:
    with writing(path, keys, [_planned(info) for info in infos], file.alignment) as out:
        for info in infos:
            out.tensor(_planned(info), [file.data(info.name)])
            done(info.name)
