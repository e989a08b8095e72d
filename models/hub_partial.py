"""Folders of downloads that are not complete: each pull has its own, and what killed pulls left is deleted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from graphrt import private_files
from graphrt.errors import HubError

PARTIAL = ".partial"
_LOCK = ".lock"  # in a .partial folder: locked as long as the pull lives
_STALE_SECONDS = 24 * 3600  # a .partial folder without a lock that is untouched for a day belongs to no running pull


@contextlib.contextmanager
def partial_folder(root: Path, name: str, names: Collection[str]) -> Iterator[Path]:
    """A new folder under root/.partial/, gone afterwards. names: of all that pulls may be of. Raises HubError."""
    parent = root / PARTIAL
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        private_files.check_folder(parent)  # through a link or into another's folder we write and delete nothing
    except private_files.Untrusted as err:
        raise HubError(
            f"downloads need a folder of your own, {err}. Remove it, or set GRAPHRT_CACHE to another folder."
        ) from err
    _sweep(parent, names)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    lock = _locked(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path) -> int:
    """A file in the folder that this process holds a lock on; the system lets it go when the process ends, however it
    does."""
    file = os.open(folder / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: the folder's age must tell
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(folder / f"{_LOCK}.new", folder / _LOCK)  # under this name nobody finds it unlocked
    return file


def _is_over(folder: Path, touched: float) -> bool:
    """Whether the pull that made a .partial folder has ended. touched: when the folder was changed."""
    try:
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return time.time() - touched > _STALE_SECONDS
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(file)


def _sweep(parent: Path, names: Collection[str]) -> None:
    """Deletes what killed pulls have left: folders of our own names. Never what a running one may still use."""
    own_name = re.compile(rf"({'|'.join(map(re.escape, names))})-[A-Za-z0-9_]+")
    for old in parent.iterdir():
        with contextlib.suppress(OSError):  # another pull may be sweeping as well
            info = old.lstat()  # a link is nothing of ours; rmtree follows none within either
            is_ours = own_name.fullmatch(old.name) and stat.S_ISDIR(info.st_mode) and private_files.is_own(info)
            if is_ours and _is_over(old, info.st_mtime):
                shutil.rmtree(old, ignore_errors=True)
