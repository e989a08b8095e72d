"""Files that are written beside their place and moved there when they are whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Generator[BinaryIO, None, None]:
    """A file to write. It takes its place when the block ends well; where something is raised, what was there before
    stays, or nothing. A link keeps pointing to it, and a device or a pipe is written at once. Raises OSError, and
    ValueError for a NUL in the path."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with open(target, "wb") as out:
            yield out
        return
    prefix = f".{target.name[:50]}."
    with replacing(target, _mode(target), prefix=prefix, suffix=".part", lasting=True) as out:
        yield out


@contextlib.contextmanager
def replacing(
    path: Path, mode: int, *, prefix: str, suffix: str = "", lasting: bool = False
) -> Generator[BinaryIO, None, None]:
    """A file to write beside `path`, which takes its place with these permissions when the block ends well, also that
    of a link; where something is raised it is deleted. prefix, suffix: of its own name; lasting: on the disk before it
    takes the place. Raises OSError."""
    handle, beside = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            if lasting:
                out.flush()
                os.fsync(out.fileno())
        os.chmod(beside, mode)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _mode(path: Path) -> int:
    """The permissions of the file that is replaced, else those of a new one: a temporary file's are its owner's."""
    with contextlib.suppress(OSError):
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
