"""The fast form of the CPU backend on the conformance cases of every op that it has a form of."""

from __future__ import annotations

import pytest
from judging import Judged

from graphrt import get_backend
from graphrt.backends.cpu import fast
from graphrt.backends.cpu.lower import _METHODS
from graphrt.testing import Case, all_cases

if reason := fast.available():
    pytest.skip(reason, allow_module_level=True)

CASES = [case for case in all_cases() if case.op in _METHODS and not case.needs_bytes]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fast_form_is_right(case: Case) -> None:
    judged = Judged(case)
    exe = judged.run(get_backend("cpu", exact=False))
    judged.check(exe)
    judged.check_sources_unchanged(exe)
