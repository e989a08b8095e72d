"""What tests of the command line's verbs share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from graphrt.tools import cli


@dataclass(frozen=True)
class Result:
    """A verb's exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """stdout, which must be strict JSON."""
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


class Verb:
    """Calls the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *argv: object) -> Result:
        try:
            code = cli.main([str(a) for a in argv])
        except SystemExit as left:
            code = int(left.code or 0)
        return Result(code, *self.capsys.readouterr())
