"""Permitted: what may come next in a text that may have some tokens alone, or must not have some words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from graphrt.errors import SessionError
from graphrt.models.tokenizer import Tokenizer
from graphrt.printing import brief

if TYPE_CHECKING:
    from graphrt.models.sampling import Matcher


class Permitted:
    """A Matcher of all that holds of one text. n_vocab: how many logits there are; only: ids that may come, None for
    all; words: tokens one after the other that may not stand in what is made; matcher: of a grammar, None for none."""

    def __init__(
        self, n_vocab: int, only: Iterable[int] | None, words: Iterable[Sequence[int]], matcher: Matcher | None
    ) -> None:
        self._only = np.full(n_vocab, only is None)
        if only is not None:
            self._only[list(only)] = True
        self._ends: dict[tuple[int, ...], set[int]] = {}  # what a word begins with -> the tokens that it ends with
        for word in words:
            self._ends.setdefault(tuple(word[:-1]), set()).add(word[-1])
        self._most = max(map(len, self._ends), default=0)
        self._matcher, self._last = matcher, list[int]()

    def mask(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come: [n_vocab]."""
        found = self._only.copy()
        if self._matcher is not None:
            given = self._matcher.mask()[: len(found)]
            found[: len(given)] &= given
            found[len(given) :] = False
        for n in range(min(self._most, len(self._last)) + 1):
            found[list(self._ends.get(tuple(self._last[len(self._last) - n :]), ()))] = False
        return found

    def bits(self) -> npt.NDArray[np.uint32]:
        """The same, a bit a token."""
        mask = self.mask()
        return np.packbits(np.pad(mask, (0, -len(mask) % 32)), bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        """Goes on behind a token."""
        self._last = [*self._last, token][-self._most :] if self._most else []
        if self._matcher is not None:
            self._matcher.accept(token)


def allowed_ids(ids: Iterable[int], n_vocab: int) -> list[int]:
    """As they are. Raises SessionError for none, and for one that there is not."""
    given = list(ids)
    bad = next((i for i in given if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < n_vocab), None)
    if bad is not None or not given:
        got = "none" if bad is None else brief(bad)
        raise SessionError(f"allowed ids must be one or more token ids, 0 to {n_vocab - 1}, got {got}")
    return given


def spellings(words: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens that a text has such a word by, behind other text: with a space before it and without. Raises SessionError
    for an empty word."""
    found = []
    for word in words:
        bare = word.lstrip() if isinstance(word, str) else ""
        if not bare:
            raise SessionError(f"a bad word must be a text of at least one character, got {brief(word)}")
        found += [tokenizer.encode(text, False, False, goes_on=True) for text in (bare, f" {bare}")]
    return [ids for ids in found if ids]
