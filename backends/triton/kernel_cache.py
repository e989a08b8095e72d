"""Where Triton keeps compiled kernels. It loads what it finds there and asks nobody whose it is, so we ask before."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

from graphrt import private_files
from graphrt.env import cache_folder
from graphrt.errors import BackendError


@functools.cache
def keep_private() -> None:
    """Has Triton use a folder that no other user can write: its own, or where GRAPHRT_CACHE is set one
    in that, and a temporary one where that can be another's.

    Raises BackendError where there is no folder that can be written.
    """
    from triton import knobs

    asked = knobs.cache.dir if "TRITON_CACHE_DIR" in os.environ else cache_folder("triton") or knobs.cache.dir
    # Triton makes its folder with the user's umask, which may let the user's own group write.
    folder = private_files.cache_folder(asked, "triton", own_group=True)
    if folder is None:
        try:
            folder = private_files.private_folder(Path(tempfile.mkdtemp(prefix="graphrt-triton-")))
        except OSError as error:
            raise BackendError(
                f"Triton needs a folder for compiled kernels that only you can write, and there is none: "
                f"{private_files.reason(error)}. Set TRITON_CACHE_DIR to one."
            ) from error
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    knobs.cache.dir = str(folder)
