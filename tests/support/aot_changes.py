"""Which kernels' code does my change alter? Compiles kernels ahead of time from two trees and compares what comes out.

    python tests/support/aot_changes.py [WORD ...] [--base REV] [--arch ARCH ...] [--all] [--show]

The cases are those of aot.py whose name, or whose kernel's name, has one of the words; without words all. `base` is
compiled from a copy of that revision (default: HEAD), with its own cases, the other side from this working tree.
Compared is PTX (on AMD's GPUs the assembler's text) without line numbers and without the kernel's own name, so a kernel
that is reported the same runs the same instructions: it was moved, renamed or shared, and no GPU need be asked.

Where PTX differs, both are assembled: "registers" says that only its names for values or the order of its lines do, and
the GPU's instructions are the same. --show prints the first lines that differ. Exit code 0 if all code is the same, 1
if not. What was compiled is kept in build/aot-code/, so a second run compiles what has changed since.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def plain(text: str, kernel: str) -> str:
    """A kernel's assembly without what says nothing of its instructions: its name, line numbers, comments."""
    text = re.sub(rf"\b{re.escape(kernel)}\b|\b{re.escape(kernel)}(?=_param_)", "kernel", text)
    lines = (re.sub(r"\s*//.*|^\s*;.*", "", line).rstrip() for line in text.splitlines())
    return "\n".join(x for x in lines if x and not x.lstrip().startswith((".loc", ".file")))


def emit(arch: str, words: list[str], out: Path) -> None:
    """Compiles the cases of the tree that is on sys.path; prints a JSON line each, and leaves its text in `out`."""
    import triton  # noqa: PLC0415

    from support import aot  # noqa: PLC0415

    def no_binary(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
        """The assembler takes most of the time, and what it makes follows from the text."""
        del backend, rest
        stages.update({last: lambda text, metadata: b"" for last in ("cubin", "hsaco") if last in stages})

    triton.knobs.runtime.add_stages_inspection_hook = no_binary
    numbers = itertools.count()
    for name, make in aot.launches_of(arch):
        for launch in make():
            if words and not any(word in name or word in launch.name for word in words):
                continue
            asm = aot.compiled(launch, arch).asm
            at = out / f"{next(numbers)}.s"
            at.write_text(plain(asm["ptx"] if "ptx" in asm else asm["amdgcn"], launch.kernel.__name__))
            print(json.dumps({"name": name, "kernel": launch.name, "at": str(at)}), flush=True)


@dataclass(frozen=True)
class Case:
    """A compiled kernel: which of the launches of a case of that name it is, and its text."""

    name: str
    number: int
    kernel: str
    text: str


def cases(tree: Path, arch: str, words: list[str], every: bool, out: Path) -> Iterator[Case]:
    """All kernels of a tree, compiled in a process of its own."""
    out.mkdir()
    tests = tree / "tests"
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "GRAPHRT_AOT")}
    env |= {
        "PYTHONPATH": os.pathsep.join(map(str, (tree, tests, tests / "support"))), "PYTHONSAFEPATH": "1",
        "TRITON_CACHE_DIR": str(ROOT / "build/aot-code"), "TRITON_DISABLE_LINE_INFO": "1",
        **({"GRAPHRT_AOT": "all"} if every else {}),
    }  # fmt: skip
    command = [sys.executable, __file__, *words, "--emit", str(out), "--arch", arch]
    seen: dict[str, int] = {}
    with subprocess.Popen(command, env=env, cwd=tree, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            found = json.loads(line)
            number = seen[found["name"]] = seen.get(found["name"], -1) + 1
            yield Case(found["name"], number, found["kernel"], Path(found["at"]).read_text())
    if child.returncode:
        raise SystemExit(f"{tree}: its kernels could not be compiled for {arch} (exit code {child.returncode})")


def instructions(text: str, folder: Path) -> str:
    """What a GPU runs of PTX: the instructions that Triton's own assembler and disassembler show."""
    from support.aot import tool  # noqa: PLC0415

    version = re.search(r"^\.target (\w+)", text, re.M)
    assert version is not None
    source, binary = folder / "code.ptx", folder / "code.cubin"
    source.write_text(text)
    tool("ptxas", f"--gpu-name={version[1]}", str(source), "-o", str(binary))
    return tool("cuobjdump", "-sass", str(binary))


def difference(old: Case, new: Case, folder: Path) -> tuple[str, list[str]]:
    """ "" where the code is the same, else what differs in a few words; and the lines that do."""
    if old.text == new.text:
        return "", []
    lines = [
        line for line in difflib.unified_diff(old.text.splitlines(), new.text.splitlines(), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]  # fmt: skip
    if ".target sm_" in new.text and instructions(old.text, folder) == instructions(new.text, folder):
        return "registers", lines
    return f"{sum(x[0] == '+' for x in lines)} lines more, {sum(x[0] == '-' for x in lines)} fewer", lines


def compare(base: Path, arch: str, options: argparse.Namespace, folder: Path) -> bool:
    """Prints what differs on an architecture. Whether all code is the same."""
    old = {
        (c.name, c.number): c
        for c in cases(base, arch, options.words, options.all, folder / f"{arch}-old")
    }  # fmt: skip
    same = others = 0
    for new in cases(ROOT, arch, options.words, options.all, folder / f"{arch}-new"):
        before = old.pop((new.name, new.number), None)
        what, lines = ("not in the base", []) if before is None else difference(before, new, folder)
        if what in ("", "registers"):
            same += 1
        else:
            others += 1
        if what:
            print(f"{new.name} [{new.kernel}]: {what}", flush=True)
            for line in lines[:40] if options.show else ():
                print(f"    {line}")
    for gone in old.values():
        print(f"{gone.name} [{gone.kernel}]: in the base alone")
    print(f"{arch}: {same} kernels with the same code, {others} with other code, {len(old)} gone", flush=True)
    return not others and not old


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="parts of names of cases or kernels")
    parser.add_argument("--base", default="HEAD", metavar="REV", help="what to compare with")
    parser.add_argument("--arch", nargs="+", default=["sm_90", "sm_80"], help="sm_80, sm_90, sm_100, gfx942")
    parser.add_argument("--all", action="store_true", help="every form, as GRAPHRT_AOT=all")
    parser.add_argument("--show", action="store_true", help="the first lines that differ")
    parser.add_argument("--emit", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.emit:
        emit(options.arch[0], options.words, options.emit)
        return 0
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = folder / "base"
        base.mkdir()
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", options.base], stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", str(base)], input=archive.stdout, check=True)
        same = [compare(base, arch, options, folder) for arch in options.arch]
        return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
