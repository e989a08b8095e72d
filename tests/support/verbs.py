"""What tests of the command line's verbs share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Result:
    """A verb's exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """stdout, which must be strict JSON."""
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
