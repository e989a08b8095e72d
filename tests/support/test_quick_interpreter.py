"""The tests' interpreter does what Triton's does, to the last bit; and reports what that leaves out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from support import ROOT, TESTS

pytest.importorskip("triton")

import triton

from graphrt.backends.triton import device

if device.unusable() or not device.interpreting() or not triton.__version__.startswith("3.6."):
    pytest.skip("of Triton 3.6's interpreter only", allow_module_level=True)

PROGRAM = TESTS / "support" / "interpreter_program.py"


def _run(quick: str, what: str) -> Any:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    command = [sys.executable, PROGRAM, quick, what]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout)


def test_same_bits() -> None:
    """Types of all kinds, reductions and scans by any function of one or two values, along each axis."""
    slow, quick = _run("slow", "values"), _run("quick", "values")
    assert slow == quick
    assert [len(row) for row in quick] == [16, 16, 8, 8, 1, 1, 16, 16, 16, 16, 16, 16, 16, 16]


def test_all_is_put_back() -> None:
    """After a launch triton.language is as it was: kernels can be compiled in the same process."""
    assert _run("quick", "put_back") == []


def test_overflow_is_reported() -> None:
    """Of numbers at the ends of their types, and not of those that are one less."""
    sums = "sums int32 2147483647 1 int32 2147483647 0 uint8 255 1 uint8 255 0 int16 -32768 -1 int16 -32768 0"
    assert _run("slow", sums) == [""] * 6
    said = _run("quick", sums)
    assert all("overflow detected for operation add" in text for text in said[::2])
    assert said[1::2] == [""] * 3
