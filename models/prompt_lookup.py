"""Prompt lookup: what a text may say next, guessed from where its last tokens stood before. Texts that repeat parts of
their prompt (summaries, edited code, answers with quotations) are guessed well, others are seldom guessed at all.

Saxena, "Prompt Lookup Decoding", 2023 (github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Iterable

#: The longest and the shortest run of last tokens that is looked for.
LONGEST, SHORTEST = 4, 2
#: Guesses are left out for so many tokens when none of the latest so many guessed tokens was right; then for twice as
#: many, and so on up to the most.
PATIENCE, PAUSE, LONGEST_PAUSE = 8, 16, 256


class PromptLookup:
    """Guesses of one text. ids: its tokens so far; most: tokens of a guess.

    A guess is twice as long as what was right of the last one, at least 2 tokens, so that little is read in vain.
    """

    def __init__(self, ids: Iterable[int], most: int) -> None:
        self.most = most
        self._ids: list[int] = []
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST + 1)]  # by length: where one ended
        self._size = min(2, most)
        self._wrong, self._pause, self._left_out = 0, PAUSE, 0
        for token in ids:
            self.push(token)

    def push(self, token: int) -> None:
        """The text's next token."""
        ids = self._ids
        for n in range(SHORTEST, LONGEST + 1):  # the runs that end before it: what follows them is known now
            if len(ids) >= n:
                self._ends[n][tuple(ids[-n:])] = len(ids)
        ids.append(token)
        self._left_out = max(0, self._left_out - 1)

    @property
    def pauses(self) -> bool:
        """Nothing is guessed for now."""
        return self._left_out > 0

    def guess(self, room: int) -> list[int]:
        """The tokens that may come next, at most `room`; none where the last tokens are new, or guesses pause."""
        if self.pauses:
            return []
        for n in range(LONGEST, SHORTEST - 1, -1):
            at = self._ends[n].get(tuple(self._ids[-n:])) if len(self._ids) >= n else None
            if at is not None:
                return self._ids[at : at + min(self._size, room)]
        return []

    def told(self, guessed: int, right: int) -> None:
        """So many tokens of a guess were the text's own."""
        self._size = max(2, min(self.most, 2 * right)) if self.most > 1 else 1
        if right:
            self._wrong, self._pause = 0, PAUSE
            return
        self._wrong += guessed
        if self._wrong >= PATIENCE:
            self._left_out, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
            self._wrong = 0
