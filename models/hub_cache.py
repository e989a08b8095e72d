"""How a download becomes a file of the cache: a folder of its own, a check, and one move to its place."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from graphrt.errors import HubError
from graphrt.models import checksums, hub_partial
from graphrt.models.hub_known import KNOWN


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


def partial_folder(root: Path, name: str) -> contextlib.AbstractContextManager[Path]:
    """A new folder under root/.partial/ that is gone afterwards, also after an error or Ctrl-C. Raises HubError."""
    return hub_partial.partial_folder(root, name, ("hf", *KNOWN))
