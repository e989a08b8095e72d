"""Fuzzers: inputs from a stranger, made from seeds, each tried in a child process with limits.

A fuzzer is a module of this folder with

    NAME: str                          what findings and statistics are called by
    def make(seed: int) -> bytes       the input, the same for the same seed
    def attempt(data: bytes) -> str    tries it and gives a short word for the statistics; raises only what is a finding

and, if it has something to load or compile that all inputs share, `def warm() -> None`, called once before any fork.
A GraphrtError that attempt() lets through is no finding: its class is the word. Modules are found by listing the
folder; those that start with an underscore are for tests of the frame.

    python -m fuzz.run [NAME ...] [--seconds S] [--count N] [--seed K] [--jobs J]     (with tests/ on PYTHONPATH)
    python -m fuzz.run NAME --replay build/fuzz/NAME-SEED.bin
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol, cast

#: Modules that are no fuzzers: the frame's, and parts of fuzzers.
FRAME = ("child", "limits", "run")


class Fuzzer(Protocol):
    """What a module of this folder has."""

    NAME: str

    def make(self, seed: int) -> bytes: ...

    def attempt(self, data: bytes) -> str: ...


def names() -> list[str]:
    """The modules of this folder that are fuzzers."""
    found = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    return [name for name in found if name not in FRAME and "_" not in name]


def load(name: str) -> Fuzzer:
    return cast(Fuzzer, importlib.import_module(f"fuzz.{name}"))
