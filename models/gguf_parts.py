"""Opens the files of a GGUF model: maps them, and finds and checks the parts of a split one."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from pathlib import Path

from graphrt.errors import GGUFError
from graphrt.models.gguf_cursor import AGAIN, Buffer
from graphrt.models.gguf_parse import Parsed, parse, shown
from graphrt.printing import brief

_PART_NAME = re.compile(r"(?P<prefix>.+)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


def open_parts(first: Path) -> tuple[list[tuple[Buffer, Parsed]], list[Path]]:
    """Maps and parses every file of the model whose (first) file is `first`. Raises GGUFError, leaving nothing open."""
    parts: list[tuple[Buffer, Parsed]] = []
    try:
        parts.append(_open_part(first, 0))
        paths = [first, *_other_parts(first, parts[0][1])]
        for i, other in enumerate(paths[1:], start=1):
            parts.append(_open_part(other, i))
        _check_parts(paths, [parsed for _, parsed in parts])
        return parts, paths
    except BaseException:
        for buf, _ in parts:
            unmap(buf)
        raise


def _open_part(path: Path, part: int) -> tuple[Buffer, Parsed]:
    buf = _map(path)
    try:
        return buf, parse(buf, str(path), part)
    except BaseException:
        unmap(buf)
        raise


def _map(path: Path) -> Buffer:
    """The file's bytes, mapped copy-on-write: arrays on it are writable, so torch.from_numpy takes them without a
    warning and without a copy, and yet no write can reach the file."""
    try:
        # Looked at before it is opened: opening a pipe waits for a writer.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise GGUFError(f"{path}: a GGUF model is a file, got a directory. Give the path of the .gguf file in it.")
        if not stat.S_ISREG(mode):
            raise GGUFError(f"{path}: a GGUF model is a regular file, got a pipe or a device. Save it to a file first.")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise GGUFError(f"{path}: a GGUF file can't be empty, got 0 bytes.\nDownload the file again.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise GGUFError(f"{path}: there is no such file. Check the path.") from None
    except PermissionError:
        raise GGUFError(f"{path}: the file may not be read. Change its permissions, or ask its owner.") from None
    except (OSError, ValueError) as err:  # ValueError: a NUL in the path, or a file too large to map
        reason = err.strerror if isinstance(err, OSError) else err
        raise GGUFError(f"{path}: the file can't be opened: {reason}. Check the path and the disk.") from None


def unmap(buf: Buffer) -> None:
    """Closes a mapping, now or as soon as nothing uses it."""
    if isinstance(buf, mmap.mmap):
        with contextlib.suppress(BufferError):  # arrays still look at it; the mapping goes with the last of them
            buf.close()


def split_count(parsed: Parsed, label: str) -> int:
    """How many files the model is split into; 1 when it is not."""
    return _split_int(parsed, label, "split.count", 1)


def _split_int(parsed: Parsed, label: str, key: str, default: int) -> int:
    value = parsed.values.get(key, default)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise GGUFError(f"{label}: the key {key!r} must be an integer from 0, got {shown(value)}.\n{AGAIN}")
    return value


def _other_parts(first: Path, parsed: Parsed) -> list[Path]:
    """Where the parts after the first one are, by the naming rule of split models."""
    count, no = split_count(parsed, str(first)), _split_int(parsed, str(first), "split.no", 0)
    if count <= 1:
        return []
    if count > 65535 or no >= count:
        raise GGUFError(f"{first}: a split model has 1 to 65535 parts, got part {no + 1} of {count}.\n{AGAIN}")
    match = _PART_NAME.fullmatch(first.name)
    if no:
        name = f"{match['prefix']}-00001-of-{count:05d}.gguf" if match else "the one that ends in -00001-of-...gguf"
        raise GGUFError(f"{first}: this is part {no + 1} of {count} of a split model.\nOpen its first file, {name}.")
    if match is None or (int(match["no"]), int(match["count"])) != (1, count):
        raise GGUFError(
            f"{first}: the first of {count} parts must be named PREFIX-00001-of-{count:05d}.gguf, got {first.name!r}.\n"
            f"Give the parts the names that they were published with."
        )
    others = [first.with_name(f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)]
    for path in others:
        if not path.exists():
            raise GGUFError(f"{path}: this part of the model is missing.\nDownload all {count} parts into one folder.")
    return others


def _check_parts(paths: list[Path], parts: list[Parsed]) -> None:
    """Parts must belong together: order, count, byte order, no tensor twice, and as many tensors as promised."""
    first = parts[0]
    step = "Download all parts again, of one and the same version."
    seen: set[str] = set(first.tensors)
    for i, (path, part) in enumerate(zip(paths[1:], parts[1:], strict=True), start=1):
        no, count = _split_int(part, str(path), "split.no", 0), split_count(part, str(path))
        if (no, count) != (i, len(paths)):
            raise GGUFError(f"{path}: must be part {i + 1} of {len(paths)}, but says part {no + 1} of {count}.\n{step}")
        if part.order != first.order:
            raise GGUFError(f"{path}: all parts must have one byte order, got another than {paths[0].name}.\n{step}")
        twice = seen & part.tensors.keys()
        if twice:
            raise GGUFError(f"{path}: a tensor may be in one part only, got {brief(min(twice))} again.\n{step}")
        seen |= part.tensors.keys()
    promised = _split_int(first, str(paths[0]), "split.tensors.count", len(seen))
    if len(paths) > 1 and promised != len(seen):
        raise GGUFError(f"{paths[0]}: the parts must have {promised} tensors together, got {len(seen)}.\n{step}")
