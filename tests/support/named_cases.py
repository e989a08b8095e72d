"""Conformance cases that a test of the triton backend names by a part of what they are called."""

from __future__ import annotations

import re

from graphrt.backends.triton.backend import TritonBackend
from graphrt.testing import all_cases
from graphrt.tools.conformance.run.step import run_case


def assert_passes(op: str, pattern: str) -> None:
    """The op's first case in whose name the pattern is found passes on the triton backend; there is one."""
    found = [case for case in all_cases(op) if re.search(pattern, str(case))]
    assert found, (op, pattern)
    outcome = run_case(found[0], TritonBackend(), 0)
    assert outcome.status == "pass", (str(found[0]), outcome.message)
