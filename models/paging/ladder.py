"""Sizes of prepared steps: a step takes the next larger size that there is, so that few serve all."""

from __future__ import annotations


def rung(n: int, most: int = 0) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... (powers of two, and one and a half of these) that is at least
    n: less than half of a step is padding, and up to 4096 tokens there are 24 sizes. `most`, unless it is 0, is one
    too."""
    size = 1
    while size < n:
        size = size * 4 // 3 if size % 3 == 0 else size + size // 2 if size > 1 else 2
    return min(size, most) if most else size


def coarse_rung(n: int, most: int) -> int:
    """The same of 1, 16, 256, ...: for sizes that cost little beside another one."""
    size = 1
    while size < n:
        size *= 16
    return min(size, most)


def block_rung(n: int, most: int, by: int = 2) -> int:
    """The same of 128, 128 * by, 128 * by * by, ...: entries of a table, of which those behind a sequence's end are
    written and not read. In pages of 64 tokens texts of up to 8,192 have steps of one size."""
    size = 128
    while size < n:
        size *= by
    return min(size, most)


def close_rung(n: int) -> int:
    """The next multiple of the power of two that is at most an eighth of n: for sizes whose padding is all work; at
    most an eighth of a step is padding."""
    step = 1 << max(0, n.bit_length() - 4)
    return -(-n // step) * step
