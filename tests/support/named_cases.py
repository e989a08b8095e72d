"""Conformance cases that a test of the triton backend names by a part of what they are called."""

from __future__ import annotations

import re

from graphrt.backends.triton.backend import TritonBackend
from graphrt.testing import Case, all_cases
from graphrt.tools.conformance.run.step import run_case


def named_case(op: str, pattern: str) -> Case:
    """The op's first case in whose name the pattern is found; there is one."""
    found = [case for case in all_cases(op) if re.search(pattern, str(case))]
    assert found, (op, pattern)
    return found[0]


def assert_passes(op: str, pattern: str) -> None:
    """That case passes on the triton backend."""
    case = named_case(op, pattern)
    outcome = run_case(case, TritonBackend(), 0)
    assert outcome.status == "pass", (str(case), outcome.message)
