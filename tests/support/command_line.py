"""The command line as tests run it.

Most of it calls main([...]) in this process; what needs a real process (signals, pipes, encodings) starts one.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from graphrt.models import load
from graphrt.models.tokenizer import Tokenizer
from support import ROOT

TEXT = "hello the sea, he sees the sea in the rain. "


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        """stdout, which must be strict JSON on one line."""
        assert self.out.count("\n") == 1
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


Cli = Callable[..., Result]


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "graphrt", *argv]


#: Output as a shell's user has it: buffered, in the locale's encoding.
PLAIN = {"PYTHONUNBUFFERED": "", "PYTHONIOENCODING": ""}


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **PLAIN, **extra}


@cache
def tokenizer(path: Path) -> Tokenizer:
    return load(path, "cpu").tokenizer


def text_of(path: Path, tokens: Sequence[int]) -> str:
    return b"".join([tokenizer(path).piece(t, special=False) for t in tokens]).decode("utf-8", "replace")


GREEDY = ("run", "spm.gguf", "-p", "hello the sea", "--raw", "--temp", "0")
