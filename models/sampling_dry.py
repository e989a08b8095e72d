"""DRY: don't repeat yourself. Tokens that would continue a repetition become less likely, the longer it is.

The published formula (text-generation-webui, pull request 5637): multiplier * base ** (n - allowed_length) comes off a
token that would follow the last n tokens as it followed them before. Details as in llama.cpp's src/llama-sampler.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from graphrt.models.tokenizer import Tokenizer

#: Where powers of the base stop growing: the natural logarithm of the largest f32.
_LARGEST_LOG = 88.7228391
#: The most that comes off a logit, so that it stays finite.
_MOST = 1e38
#: The most tokens of a sequence breaker beyond its first.
_MAX_TAIL = 20


@dataclass(frozen=True)
class Breakers:
    """Sequences of tokens that no repetition goes across: for each first token, what may follow it, () for nothing."""

    tails: dict[int, tuple[tuple[int, ...], ...]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, texts: Iterable[str]) -> Breakers:
        """Those of texts: each token that holds one of them, or that ends in the beginning of one, with the tokens of
        the rest of it behind."""
        wanted = [text.encode("utf-8") for text in texts]
        pieces = [tokenizer.piece(token) for token in range(tokenizer.n_vocab)]
        single = {piece: token for token, piece in enumerate(pieces) if len(piece) == 1}
        tails: dict[int, set[tuple[int, ...]]] = {}
        for token, piece in enumerate(pieces):
            for text in wanted:
                if text in piece:
                    tails.setdefault(token, set()).add(())
                    continue
                for n in range(1, min(len(text), len(piece) + 1)):
                    if piece.endswith(text[:n]) and (rest := _tokens(tokenizer, text[n:], single)) is not None:
                        tails.setdefault(token, set()).add(tuple(rest[:_MAX_TAIL]))
        return cls({token: tuple(found) for token, found in tails.items()})

    def length_since(self, tokens: Sequence[int]) -> int:
        """How many tokens come behind the last breaker; all of them where there is none."""
        n = len(tokens)
        for i in range(n):
            tails = self.tails.get(tokens[n - 1 - i])
            fits = [
                len(tail) for tail in tails or () if len(tail) <= i and tuple(tokens[n - i : n - i + len(tail)]) == tail
            ]
            if fits:
                return i - max(fits)
        return n

    def is_one(self, token: int) -> bool:
        """Whether the token alone breaks a sequence."""
        return () in self.tails.get(token, ())


#: Of vocabularies the texts that each was searched for last, and what was found: a search takes as long as many tokens.
_FOUND: WeakKeyDictionary[Tokenizer, tuple[tuple[str, ...], Breakers]] = WeakKeyDictionary()


def breakers_of(tokenizer: Tokenizer, texts: Iterable[str]) -> Breakers:
    """Breakers.of(), searched for once."""
    wanted = tuple(texts)
    found = _FOUND.get(tokenizer)
    if found is None or found[0] != wanted:
        found = _FOUND[tokenizer] = (wanted, Breakers.of(tokenizer, wanted))
    return found[1]


def _tokens(tokenizer: Tokenizer, text: bytes, single: Mapping[bytes, int]) -> list[int] | None:
    """The tokens of a text that may begin within a character, whose bytes are then tokens each; None where there are no
    such tokens. single: tokens by their only byte."""
    n = next((i for i, byte in enumerate(text) if not 0x80 <= byte < 0xC0), len(text))
    within = [single.get(text[i : i + 1]) for i in range(n)]
    found = [token for token in within if token is not None]
    return found + tokenizer.encode(text[n:].decode("utf-8"), add_bos=False, goes_on=True) if len(found) == n else None


def dry(
    logits: npt.NDArray[np.float32],
    recent: Sequence[int],
    multiplier: float,
    base: float,
    allowed_length: int,
    breakers: Breakers,
) -> npt.NDArray[np.float32]:
    """Takes off what repetitions cost; returns a copy where anything changes. logits: [n_vocab]; recent: the tokens in
    which repetitions are looked for, oldest first."""
    costs = dry_costs(recent, multiplier, base, allowed_length, breakers)
    if not costs:
        return logits
    out = logits.copy()
    for token, cost in costs.items():
        if 0 <= token < len(out):
            out[token] -= cost
    return out


def dry_costs(
    recent: Sequence[int], multiplier: float, base: float, allowed_length: int, breakers: Breakers
) -> dict[int, np.float32]:
    """What comes off each token that would go on with a repetition."""
    limit = breakers.length_since(recent) if len(recent) > allowed_length else -1
    if multiplier == 0.0 or base < 1.0 or limit < allowed_length:
        return {}
    longest: dict[int, int] = {}
    backwards = list(reversed(recent))
    for back, length in enumerate(_repeats(backwards)):
        if back and min(length, limit) >= allowed_length:
            follower = backwards[back - 1]
            longest[follower] = max(longest.get(follower, 0), min(length, limit))
    found = dict[int, np.float32]()
    for token, length in longest.items():
        if not breakers.is_one(token):
            power = math.exp(min((length - allowed_length) * math.log(base), _LARGEST_LOG))
            found[token] = np.float32(min(multiplier * power, _MOST))
    return found


def _repeats(tokens: Sequence[int]) -> list[int]:
    """For each place, how many tokens from there on are those of the beginning: the Z function, in linear time."""
    n = len(tokens)
    found = [n] + [0] * (n - 1)
    left = right = 0  # the stretch that ends last among those known to repeat the beginning
    for i in range(1, n):
        length = min(right - i, found[i - left]) if i < right else 0
        while i + length < n and tokens[length] == tokens[i + length]:
            length += 1
        if i + length > right:
            left, right = i, i + length
        found[i] = length
    return found
