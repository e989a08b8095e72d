"""What finds out what kernels do with memory: on kernels that don't do what they declare, and on PTX by hand.

The backend's own kernels are held against their declarations where they are compiled (test_triton_aot.py).
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import (
    tiny,
    tiny_archs,  # noqa: F401  (whose models are among tiny.py's others)
)

pytest.importorskip("triton")

from support import ROOT, TESTS
from support.ptx_accesses import early_in_ptx
from triton.runtime.errors import InterpreterError

from graphrt import get_backend
from graphrt.backends.triton import device
from graphrt.backends.triton.accesses import Access, Declaration
from graphrt.backends.triton.launch import Launch
from graphrt.models.engine import SessionOptions
from graphrt.models.model import load

if device.interpreting():
    from support.watched_memory import watched

KERNELS = ROOT / "backends" / "triton" / "kernels"

#: What planted_kernels.py must find, by what was planted: of each difference its first words.
PLANTED = {
    "right": [],
    "a pointer is missing": ["p_out is not declared", "p_out: write"],
    "late, it says": ["p_w: early cached read", "p_w: early read"],
    "never, it says": ["p_w: early cached read", "p_w: early read"],
    "past the L1 cache, it says": ["p_w: early cached read"],
    "it reads, it says": ["p_out: write"],
    "it writes, it says": ["p_x: read"],
    "one branch waits": ["p_out: early write", "p_x: early cached read", "p_x: early read"],
    "both branches wait": [],
    "a loop waits": ["p_out: early write", "p_x: early cached read", "p_x: early read"],
    "a loop waits first": [],
    "lets go first": ["it lets the next launch go"],
    "lets go first and says so": [],
    "never waits": ["it waits: False", "p_out: early write", "p_x: early cached read", "p_x: early read"],
    "reads by hand": ["p_x: early cached read", "p_x: early read"],
    "counts early": ["p_out: early read", "p_out: early write"],
}


def test_what_is_planted_is_found() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TESTS)])
    command = [sys.executable, str(TESTS / "support" / "planted_kernels.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found.keys() == PLANTED.keys()
    for name, expected in PLANTED.items():
        assert len(found[name]) == len(expected), (name, found[name])
        assert all(text.startswith(start) for text, start in zip(found[name], expected)), (name, found[name])


PTX = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1
)
{
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b64 	%rd2, [kernel_param_2];
	ld.param.b32 	%r1, [kernel_param_1];
	add.s64 	%rd3, %rd1, 4;
	// begin inline asm
	mov.u32 %r9, 0x0; @%p1 ld.global.cg.b32 { %r9 }, [ %rd3 + 0 ];
	// end inline asm
	setp.eq.s32 	%p2, %r1, 1;
	@%p2 bra 	$L__BB0_2;
$L__BB0_1:
	FIRST
	griddepcontrol.wait; // dummy %r68
	ld.global.b32 	%r2, [%rd2];
	bra.uni 	$L__BB0_3;
$L__BB0_2:
	SECOND
$L__BB0_3:
	st.global.v4.b32 	[ %rd2 + 16 ], { %r2, %r2, %r2, %r2 };
	ret;
}
"""


def early(first: str = "", second: str = "") -> tuple[set[str], set[str], set[str]]:
    text = PTX.replace("FIRST", first).replace("SECOND", second)
    found = early_in_ptx(text, ["p_a", "n", "p_b"])
    return set(found.reads), set(found.writes), set(found.cached)


def test_ptx_before_the_wait() -> None:
    wait = "griddepcontrol.wait;"
    assert early(second=wait) == ({"p_a"}, set(), set())
    assert early(second="ret;") == ({"p_a"}, set(), set())
    assert early() == ({"p_a"}, {"p_b"}, set())  # one way round the wait
    assert early("ld.global.nc.b32 %r4, [%rd2+8];", wait) == ({"p_a", "p_b"}, set(), {"p_b"})
    assert early("cp.async.cg.shared.global [%r4], [%rd2], 16;", wait) == ({"p_a", "p_b"}, set(), set())
    assert early("atom.global.add.u32 %r4, [%rd2], 1;", wait) == ({"p_a", "p_b"}, {"p_b"}, set())
    assert early("red.global.add.u32 [%rd3], 1;", wait) == ({"p_a"}, {"p_a"}, set())
    assert early("selp.b64 %rd4, %rd2, %rd3, %p2; ld.global.b32 %r4, [%rd4];", wait)[0] == {"p_a", "p_b"}
    with pytest.raises(ValueError, match="comes from no parameter"):
        early("ld.global.b32 %r4, [%rd8];", wait)


def declared_kernels() -> list[tuple[str, Any, Declaration]]:
    """All kernels of the backend that declare something."""
    found: dict[int, tuple[str, Any, Declaration]] = {}
    for path in KERNELS.rglob("*.py"):
        name = ".".join(path.relative_to(KERNELS).with_suffix("").parts)
        if path.stem == "__init__":
            continue
        for value in vars(importlib.import_module(f"graphrt.backends.triton.kernels.{name}")).values():
            declared = getattr(value, "declared_accesses", None)
            if isinstance(declared, Declaration):
                found[id(value)] = (f"{name}.{value.__name__}", value, declared)
    return list(found.values())


def test_what_is_declared_are_the_kernels_parameters() -> None:
    """All pointers, which are called p_ or desc, or packed where they are Planes, and nothing else. (That all kernels
    declare, and Hopper's attention all its pointers, is seen where they are compiled.)"""
    kernels = declared_kernels()
    assert len(kernels) > 50
    for name, kernel, declared in kernels:
        parameters = set(kernel.arg_names)
        constants = {*declared.early.values()} - {""}
        assert declared.names <= parameters and constants <= parameters, name
        pointers = {p for p in parameters if p.startswith(("p_", "packed")) or p.endswith("_desc")}
        assert pointers <= declared.names, name


def stepped(path: Path, name: str) -> int:
    """A prompt and a token through a tiny model, each launch watched; how many accesses were seen."""
    tiny.write_model(path, name)
    session = load(path, [get_backend("triton", exact=False)]).session(SessionOptions(n_ctx=16, n_batch=8))
    with watched() as watch:
        session.eval([1, 2, 3, 4, 5])
        session.eval([6])
    return watch.seen


on_interpreter = pytest.mark.skipif(not device.interpreting(), reason="the interpreter's addresses are looked at")


@on_interpreter
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_steps_touch_the_bytes_that_they_declare(tmp_path: Path, name: str) -> None:
    """In the interpreter, where each address is seen; `pytest -p watched_memory` sees all other tests' launches too."""
    assert stepped(tmp_path / "m.gguf", name) > 1000


@on_interpreter
@pytest.mark.parametrize(
    ("kind", "change"),
    [("read", lambda a: replace(a, memory=a.memory.view(-1)[:-1])), ("written", lambda a: replace(a, writes=False))],
)
def test_bytes_that_are_not_declared_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, change: Callable[[Access], Access]
) -> None:
    declared = Launch.accesses

    def less(self: Launch) -> list[Access]:
        found = declared(self)
        return [change(a) if getattr(a, {"read": "reads", "written": "writes"}[kind]) else a for a in found]

    monkeypatch.setattr(Launch, "accesses", less)
    with pytest.raises(InterpreterError, match=f"elements {kind} of memory that it doesn't declare"):
        stepped(tmp_path / "m.gguf", "llama")
