"""Page pools of random sizes under random operations, each held against a plain model (support/page_plays.py)."""

from __future__ import annotations

from support.page_plays import play

NAME = "pools"


def warm() -> None:
    """Imports what each input needs."""
    play(0, 1)


def make(seed: int) -> bytes:
    """The seed, and how many operations."""
    return f"{seed} {(30, 300, 1500)[seed % 3]}".encode()


def attempt(data: bytes) -> str:
    """Plays it. The words say whether the pool was ever full."""
    seed, n = map(int, data.split())
    return "was full" if play(seed, n)["full"] else "had room"
