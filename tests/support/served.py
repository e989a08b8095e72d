"""Servers in processes of their own, on loopback."""

from __future__ import annotations

import re
import subprocess
import threading
from dataclasses import dataclass, field

import pytest

from support.command_line import command, environment


@dataclass
class Served:
    """A running server. log: its lines so far."""

    url: str
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)


def started(*argv: str, port: int = 0) -> Served:
    """A server that answers. port: 0 for any."""
    process = subprocess.Popen(
        command("serve", *argv, "--port", str(port), "--backend", "cpu", "-t", "1"),
        env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        log.append(line)
        found = re.search(r"served at (http://[0-9.:]+)", line)
        if found:
            break
    else:
        pytest.fail(f"the server ended: {''.join(log)}")
    threading.Thread(target=lambda: log.extend(process.stderr), daemon=True).start()  # type: ignore[arg-type]
    return Served(found[1], process, log)
