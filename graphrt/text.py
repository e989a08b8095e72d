"""Numbers as people read them."""

from __future__ import annotations


def human_bytes(n: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def count_text(n: int, what: str) -> str:
    """`1 tile`, `2 tiles`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
