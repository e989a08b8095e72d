"""CI runs a share of the wide cases: shares are apart, together they are all, and what is not wide is in each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support import wide


def _items() -> list[Any]:
    def marked(i: int) -> Any:
        return SimpleNamespace(at=i, get_closest_marker=lambda name: name == "wide" and i % 4 != 0)

    return [marked(i) for i in range(23)]


def test_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    for k in range(3):
        monkeypatch.setenv("GRAPHRT_SHARE", f"{k}/3")
        items = _items()
        out = wide.share(items)
        assert sorted(item.at for item in (*items, *out)) == list(range(23))
        assert {0, 4, 8, 12, 16, 20} <= {item.at for item in items}
        found += [item.at for item in items if item.at % 4]
    assert sorted(found) == [i for i in range(23) if i % 4]


def test_without_a_share_all_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHRT_SHARE", raising=False)
    items = _items()
    assert wide.share(items) == [] and len(items) == 23
