"""Random ids, which are drawn from bytes that the system gives in one go."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from graphrt.tools.serve import ids
from graphrt.tools.serve.ids import new_id


def test_ids_are_apart() -> None:
    """Those of several threads too, and across the ends of what is asked for at once."""
    with ThreadPoolExecutor(4) as threads:
        some = threads.map(lambda n: [new_id("call_", 8 + n % 5) for _ in range(500)], range(8))
        made = [id for each in some for id in each]
    assert len(set(made)) == len(made) == 4000
    assert all(re.fullmatch("call_[0-9a-f]{16,24}", id) for id in made)
    assert len({id[5 + i] for id in made for i in range(16)}) == 16


def test_the_system_is_seldom_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()
    monkeypatch.setattr(ids.os, "urandom", lambda n, plain=os.urandom: (asked.append(n), plain(n))[1])
    for _ in range(1024):
        assert len(new_id("req_", 8)) == 4 + 16
    assert len(asked) <= 3
