"""Checksums of fetched models, kept in the cache folder, so that a changed file is seen without reading it each time.

The record of root/hf/org/repo/m.gguf is root/.checksums/hf/org/repo/m.gguf.json: the SHA-256 of the file, and its size
and times when that was so. While these are the same the record is believed, else the file is hashed again. A record
that another user than root can have written is not read; where another fills the cache, records are in the user's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from graphrt import private_files

log = logging.getLogger(__name__)

SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 4096  # of a record
_CHUNK = 1 << 20
# Linux stamps files with a clock that ticks every 1 to 10 ms.
_TICK_SECONDS, _MOST_TICKS = 0.01, 3


@dataclass(frozen=True)
class Record:
    """What was so when a file had this SHA-256. ctime: of a change by any means, which no program can set."""

    sha256: str
    nbytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: Path, sha256: str) -> Record:
        info = os.stat(file)
        return cls(sha256, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def matches(file: Path, root: Path, sha256: str | None = None) -> bool | None:
    """Whether the file under root has this SHA-256, else (None) the one that it was fetched with; None where neither is
    known. Raises OSError.
    """
    kept, kept_ns = _read(file, root)
    wanted = sha256 or (kept.sha256 if kept else None)
    if wanted is None:
        return None
    # A change within the clock tick of the last one leaves no trace, so the record must be of a later tick.
    if kept is not None and kept == Record.of(file, wanted) and kept_ns > kept.ctime_ns:
        return True
    if sha256_of(file) != wanted:
        return False
    keep(file, root, wanted)
    return True


def keep(target: Path, root: Path, sha256: str, file: Path | None = None) -> None:
    """Notes that `target` has, or (`file`) will get by renaming that one, this SHA-256. Where it can't be written the
    target is hashed each time."""
    record = Record.of(file or target, sha256)
    text = json.dumps(asdict(record)).encode()
    for path in _paths(target, root):
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            private_files.write(path, text, 0o644)
            for _ in range(_MOST_TICKS):
                if file is not None or os.lstat(path).st_mtime_ns > record.ctime_ns:
                    break
                time.sleep(_TICK_SECONDS)
                private_files.write(path, text, 0o644)
            return


def say_changed(file: Path) -> None:
    """A file's bytes are not those that were fetched."""
    log.warning("%s must be as it was fetched, its bytes have changed since: it is fetched again", file)


def sha256_of(file: Path) -> str:
    """In hexadecimal. Raises OSError."""
    digest = hashlib.sha256()
    with open(file, "rb") as data:
        while chunk := data.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _paths(file: Path, root: Path) -> list[Path]:
    """Where its record may lie: in the model's cache, and for a cache that another user fills in the user's own."""
    # In folders of their own: beside the model, a repository's file could have the record's name.
    place = file.relative_to(root)
    paths = [root / ".checksums" / place.with_name(f"{place.name}.json")]
    with contextlib.suppress(OSError):
        own = hashlib.sha256(os.fsencode(file.absolute())).hexdigest()[:32]
        paths.append(private_files.user_cache() / "checksums" / f"{own}.json")
    return paths


def _read(file: Path, root: Path) -> tuple[Record | None, int]:
    """The record and when (ns) it was written; None for one that is damaged or that another user can have written."""
    for path in _paths(file, root):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            found = Record(**json.loads(private_files.read(path, _MOST_BYTES)))
            if SHA256.fullmatch(found.sha256):
                return found, os.lstat(path).st_mtime_ns
    return None, 0
