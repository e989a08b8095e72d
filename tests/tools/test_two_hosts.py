"""A pipeline over two hosts, which are network namespaces: over a slow link a text is that of one rank; when the link
breaks in the middle of it, both hosts' ranks end in time, and each host says why."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import two_hosts
from support.tiny import write_model

from graphrt.tools.cli import main

UNSHARED = ("unshare", "-Urn")


@cache
def why_not() -> str:
    """Why there can be no namespaces here, "" if there can."""
    if not two_hosts.tool("ip"):
        return "two hosts need the tool ip (iproute2), which is not here"
    add = [two_hosts.tool("ip"), "link", "add", "name", "cable1", "type", "veth", "peer", "name", "host1"]
    try:
        done = subprocess.run([*UNSHARED, *add], capture_output=True)
    except OSError as error:
        return f"two hosts need network namespaces, and the tool unshare is not to be had: {error}"
    said = done.stderr.decode().strip()
    return (
        f"two hosts need network namespaces of our own, which are not allowed here: {said}" if done.returncode else ""
    )


def hosts(how: str, folder: Path) -> tuple[Path, list[Any]]:
    if why_not():
        pytest.skip(why_not())
    model = write_model(folder / "m.gguf", "llama", tokenizer="spm")
    command = [*UNSHARED, sys.executable, two_hosts.__file__, how, str(model)]
    done = subprocess.run(command, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    return model, json.loads(done.stdout)


def test_a_slow_link(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    model, (first, second) = hosts("slow", tmp_path)
    assert (first["code"], second["out"]) == (0, ""), first["err"] + second["err"]
    assert second["code"] in (0, None), "torch's agent may miss the other host's, which has ended"
    assert main(["run", str(model), *two_hosts.TEXT, "-n", "6"]) == 0
    assert first["out"] == capfdbinary.readouterr().out.decode(errors="replace")


def test_a_broken_link(tmp_path: Path) -> None:
    _, (first, second) = hosts("broken", tmp_path)
    assert first["out"], "it broke in the middle of a text"
    for host in (first, second):
        assert host["code"] != 0 and host["seconds"] is not None, first["err"] + second["err"]
    silent = f"rank 1 of 2: it has given no sign of life for {two_hosts.LOOKS} s"
    assert first["err"].count("graphrt run: ") == second["err"].count("graphrt run: ") == 1
    assert f"graphrt run: {silent}" in first["err"]
    assert f"the place where they do is gone (no answer for {two_hosts.LOOKS} s" in second["err"]
