"""Drafts: what texts may say next, guessed by a second, smaller model of the same vocabulary.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", 2023. Here the large model's
choice is made by its own draws in any case, so that a draft changes no token of a text, whatever its settings: the
paper's rule keeps only the distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from graphrt.errors import CacheFullError, SessionError
from graphrt.models.continuous_batch import ContinuousBatch
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.guesses import Drafts, Guesser
from graphrt.models.tokenizer import Tokenizer

#: Tokens that one vocabulary may have more at its end: models of a family pad theirs differently.
MOST_TOO_MANY = 128


def check_vocabularies(draft: Tokenizer, model: Tokenizer) -> None:
    """Raises SessionError where a token of the one is another of the other: guesses are ids."""
    n = min(draft.n_vocab, model.n_vocab)
    other = next((i for i in range(n) if draft.texts[i] != model.texts[i]), None)
    if other is not None:
        raise SessionError(
            f"a draft model must have the model's vocabulary, token {other} is {draft.texts[other]!r} in the one and "
            f"{model.texts[other]!r} in the other; use a smaller model of the same family"
        )
    if abs(draft.n_vocab - model.n_vocab) > MOST_TOO_MANY:
        raise SessionError(
            f"a draft model must have the model's vocabulary, of {model.n_vocab} tokens, it has {draft.n_vocab}; use a "
            f"smaller model of the same family"
        )


class Drafter:
    """A draft model's engine, whose sequence of a number follows the text of that number. n_vocab: of the model that
    it guesses for."""

    def __init__(self, engine: PagedEngine, n_vocab: int) -> None:
        self.engine, self.n_vocab = engine, n_vocab
        self._followed: dict[int, DraftedText] = {}

    def draft(self, asked: Mapping[DraftedText, int]) -> dict[DraftedText, list[int]]:
        """The likeliest tokens after each of these texts, at most so many, all made together. None where its context
        or its cache is full."""
        engine, found = self.engine, dict[DraftedText, list[int]]()
        by_seq = {text.seq: text for text in asked}
        try:
            with ContinuousBatch(engine) as batch:
                for seq, text in by_seq.items():
                    if len(text.ids) + asked[text] <= engine.n_ctx:
                        left = text.ids[self._known(text) :]
                        text.drafted, text.at = [], len(text.ids)
                        batch.add(seq, left, asked[text])
                while batch.going:
                    for seq, tokens in batch.step().items():
                        by_seq[seq].drafted += tokens
        except CacheFullError:  # others begin anew beside it
            engine.reset()
            self._followed.clear()
            return {}
        for text in asked:
            bad = next((i for i, token in enumerate(text.drafted) if token >= self.n_vocab), len(text.drafted))
            found[text] = text.drafted[:bad] if text.at == len(text.ids) else []
        return found

    def leave(self, text: DraftedText) -> None:
        """A text has ended: its pages are free for others."""
        if self._followed.get(text.seq) is text:
            del self._followed[text.seq]
            self.engine.free(text.seq)

    def _known(self, text: DraftedText) -> int:
        """How many of a text's tokens its sequence has read, after it has forgotten all others: not the last one."""
        engine, seq, n = self.engine, text.seq, 0
        if self._followed.get(seq) is text:
            said = text.ids[text.at :]
            right = next((i for i, pair in enumerate(zip(text.drafted, said)) if pair[0] != pair[1]), len(said))
            n = min(text.at + right, int(engine.lengths[seq]), len(text.ids) - 1)
        self._followed[seq] = text
        return engine.truncate(seq, n)


class DraftedText(Guesser):
    """Guesses of one text, by a drafter. seq: the number of its sequence; ids: its tokens so far; most: tokens of a
    guess. drafted, at: what was guessed last, and behind how many tokens."""

    def __init__(self, drafter: Drafts, seq: int, ids: Iterable[int], most: int) -> None:
        super().__init__(most)
        self.drafter: Drafts = drafter
        self.seq, self.ids = seq, list(ids)
        self.drafted: list[int] = []
        self.at = 0

    def push(self, token: int) -> None:
        super().push(token)
        self.ids.append(token)

    def guess(self, room: int) -> list[int]:
        return self.drafter.draft({self: room}).get(self, [])

    def end(self) -> None:
        self.drafter.leave(self)
