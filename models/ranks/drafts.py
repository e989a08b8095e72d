"""A draft model's guesses over ranks: the first rank has the whole of it, and tells the others what it guesses.

A draft is small: cut over ranks it would wait for the link twice a layer and guessed token, where its guesses are told
once. And what is told is the same on all ranks, whatever machines they have.
"""

from __future__ import annotations

from collections.abc import Mapping

from graphrt.errors import SessionError
from graphrt.models.draft import DraftedText, Drafter
from graphrt.ranks import Ranks


class FirstRanksDrafts:
    """What the first rank's drafter guesses, on every rank. drafter: None on the others."""

    def __init__(self, ranks: Ranks, drafter: Drafter | None) -> None:
        self.ranks, self.drafter = ranks, drafter

    def draft(self, asked: Mapping[DraftedText, int]) -> dict[DraftedText, list[int]]:
        """As Drafter has it. Raises SessionError on all ranks where the first one's fails, RankError where it is
        gone."""
        made: list[list[int]] | None = None
        try:
            if self.drafter is not None:
                guesses = self.drafter.draft(asked)
                made = [guesses.get(text, []) for text in asked]
        finally:  # whatever has failed: the others wait for this
            made = self.ranks.told(made)
        if made is None:
            raise SessionError("a text's next tokens are guessed by the first rank, which has failed; see what it said")
        return dict(zip(asked, made))

    def leave(self, text: DraftedText) -> None:
        if self.drafter is not None:
            self.drafter.leave(text)
