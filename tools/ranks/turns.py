"""Turns: what the first of several ranks says that all do next, again and again until there is nothing more to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from graphrt.errors import RankError
from graphrt.ranks import Ranks


def turns(ranks: Ranks, digest: Callable[[], int], verb: str, things: str, report: str) -> Iterator[Any]:
    """What the first rank tells this one, until it says None. Each turn has a digest of what the first rank holds
    before it. digest: of what this one holds; verb, things: what ranks do alike; report: what a report of the bug has
    to say. Raises RankError where the first rank is gone, and where the two differ."""
    while (turn := ranks.told(None)) is not None:
        if turn.digest != digest():
            raise RankError(
                f"all ranks must {verb} the same {things}, rank {ranks.rank} {verb}s others than the first one; this "
                f"is a bug: report it, with {report}"
            )
        yield turn
