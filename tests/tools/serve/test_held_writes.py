"""What an event stream holds goes out in one write, whose seconds are told."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("starlette")

from graphrt.tools.serve.http import Held


def test_a_write_is_told() -> None:
    written, told = list[bytes](), list[float]()

    def write(body: bytes) -> bool:
        written.append(body)
        return True

    async def hold() -> None:
        held = Held(write, told.append)
        assert held.add("a") and held.add("b") and not told
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(hold())
    assert written == [b"data: a\n\ndata: b\n\n"] and len(told) == 1 and told[0] >= 0
