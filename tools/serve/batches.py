"""Texts of which vectors or scores are wanted, in parts between which steps of other texts are made."""

from __future__ import annotations

#: Tokens of one part.
_AT_ONCE = 512


def batches(texts: list[list[int]]) -> list[list[list[int]]]:
    """Cut where the next text would be a token too many."""
    found: list[list[list[int]]] = [[]]
    for ids in texts:
        if found[-1] and sum(map(len, found[-1])) + len(ids) > _AT_ONCE:
            found.append([])
        found[-1].append(ids)
    return found
