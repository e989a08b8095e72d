"""Prompt lookup: what a text may say next, guessed from where its last tokens stood before. Texts that repeat parts of
their prompt (summaries, edited code, answers with quotations) are guessed well, others are seldom guessed at all.

Saxena, "Prompt Lookup Decoding", 2023 (github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Iterable

from graphrt.models.guesses import Guesser

#: The longest and the shortest run of last tokens that is looked for.
LONGEST, SHORTEST = 4, 2


class PromptLookup(Guesser):
    """Guesses of one text. ids: its tokens so far; most: tokens of a guess."""

    def __init__(self, ids: Iterable[int], most: int) -> None:
        super().__init__(most)
        self._ids: list[int] = []
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST + 1)]  # by length: where one ended
        for token in ids:
            self.push(token)

    def push(self, token: int) -> None:
        super().push(token)
        ids = self._ids
        for n in range(SHORTEST, LONGEST + 1):  # the runs that end before it: what follows them is known now
            if len(ids) >= n:
                self._ends[n][tuple(ids[-n:])] = len(ids)
        ids.append(token)

    @property
    def is_ready(self) -> bool:
        return self._found() is not None

    def guess(self, room: int) -> list[int]:
        """None where the last tokens are new, or guesses pause."""
        at = None if self.pauses else self._found()
        return [] if at is None else self._ids[at : at + min(self.size, room)]

    def _found(self) -> int | None:
        """Where what follows the last tokens begins: behind the latest of the longest runs like theirs."""
        for n in range(LONGEST, SHORTEST - 1, -1):
            at = self._ends[n].get(tuple(self._ids[-n:])) if len(self._ids) >= n else None
            if at is not None:
                return at
        return None
