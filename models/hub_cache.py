"""How a download becomes a file of the cache: a folder of its own, a check, and one move to its place."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from graphrt import private_files
from graphrt.errors import HubError
from graphrt.models import checksums
from graphrt.models.hub_known import KNOWN

PARTIAL = ".partial"

_STALE_SECONDS = 24 * 3600  # a .partial folder untouched for a day belongs to no running pull


def check_sha256(name: str, actual: str, wanted: str) -> None:
    """Raises HubError when a download is not what was published. The caller's partial folder goes with it."""
    if actual != wanted:
        raise HubError(
            f"{name}: the download is damaged: its SHA-256 must be {wanted[:16]}..., got {actual[:16]}....\n"
            f"It was deleted. Try again; if it happens again, the published file has changed."
        )


def install(file: Path, target: Path, root: Path, sha256: str) -> None:
    """Moves a complete file to its place in one step: a reader finds all of it, or nothing. Its checksum is kept."""
    target.parent.mkdir(parents=True, exist_ok=True)
    checksums.keep(target, root, sha256, file)  # first, so that no file is without when we are killed between
    os.replace(file, target)
    checksums.keep(target, root, sha256)


@contextlib.contextmanager
def partial_folder(root: Path, name: str) -> Iterator[Path]:
    """A new folder under root/.partial/ that is gone afterwards, also after an error or Ctrl-C."""
    parent = root / PARTIAL
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        private_files.check_folder(parent)  # through a link or into another's folder we write and delete nothing
    except private_files.Untrusted as err:
        raise HubError(
            f"downloads need a folder of your own, {err}. Remove it, or set GRAPHRT_CACHE to another folder."
        ) from err
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Deletes what killed pulls have left: folders of our own names. Never what a running one may still use."""
    own_name = re.compile(rf"({'|'.join(map(re.escape, ('hf', *KNOWN)))})-[A-Za-z0-9_]+")
    for old in parent.iterdir():
        with contextlib.suppress(OSError):  # another pull may be sweeping as well
            info = old.lstat()  # a link is nothing of ours; rmtree follows none within either
            is_ours = own_name.fullmatch(old.name) and stat.S_ISDIR(info.st_mode) and private_files.is_own(info)
            if is_ours and time.time() - info.st_mtime > _STALE_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
