"""Pieces: what generate() gives of each token, and what ends a text: its own end, a stop, the number asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from graphrt.errors import SessionError
from graphrt.models.permitted import Permitted, allowed_ids, spellings
from graphrt.models.sampling import Matcher, Sampler
from graphrt.models.sampling_dry import Breakers, breakers_of
from graphrt.models.sampling_logprobs import Logprobs
from graphrt.models.sampling_params import SamplerParams
from graphrt.models.tokenizer import Tokenizer
from graphrt.printing import brief


class Piece(NamedTuple):
    """One generated token. text: what became complete with it and can't be part of a stop text any more, often "".
    finish: "" while the text goes on, at the last token why it ends: "eog" (an end-of-generation token), "stop",
    "length" (as many tokens as asked for) or "context" (it is full). logprobs: of this token and of the likeliest
    beside it, None unless asked for; word: the stop text that ended it, "" for a token."""

    token: int
    text: str
    finish: str = ""
    logprobs: Logprobs | None = None
    word: str = ""


class Stops:
    """What ends a text: texts, and ids of tokens. A text that names a control token stands for its id too.

    Raises SessionError for an empty text, an id that is none, or another type.
    """

    def __init__(self, tokenizer: Tokenizer, texts: str | Iterable[str] = (), ids: Iterable[int] = ()) -> None:
        self.texts = _texts(texts)
        self.ids = set(_ids(ids, tokenizer.n_vocab))
        for text in self.texts:
            found = tokenizer.encode(text, add_bos=False, parse_special=True, most=1, goes_on=True)
            if len(found) == 1 and tokenizer.is_control(found[0]):
                self.ids.add(found[0])


def _texts(texts: object) -> list[str]:
    given = _listed(texts)
    for text in given:
        if not isinstance(text, str) or not text:
            raise SessionError(f"a stop must be a text of at least one character, got {brief(text)}")
    return given


def _listed(values: object) -> list[Any]:
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]


def _ids(ids: object, n_vocab: int) -> list[int]:
    given = _listed(ids)
    for token in given:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < n_vocab:
            raise SessionError(f"a stop id must be a token id, 0 to {n_vocab - 1}, got {brief(token)}")
    return given


@dataclass(frozen=True)
class TextRules:
    """generate()'s keywords that say what a text may be and where it ends. least: tokens before which nothing but their
    number ends it; tells_stop: the stop text that ends it is told; special: control tokens are told; allowed: ids of
    the tokens that it may have, None for all; bad_words: texts that it must not have, as the tokens that they are
    behind other text; after: log-probabilities are those of what tokens are drawn from; named: they are told of these
    tokens in place of the likeliest. Raises SessionError for those that can't be, or not together."""

    n: int
    stop: str | Iterable[str] = ()
    stop_ids: Iterable[int] = ()
    ignore_eos: bool = False
    grammar: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    logprobs: int | None = None
    regex: str | None = None
    least: int = 0
    tells_stop: bool = False
    special: bool = False
    allowed: Iterable[int] | None = None
    bad_words: Iterable[str] = ()
    after: bool = False
    named: Iterable[int] = ()

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < -1:
            raise SessionError(
                f"the number of tokens (n) must be a whole number, at least -1, which is no limit, got {brief(self.n)}"
            )
        given = sum(rule is not None for rule in (self.grammar, self.json_schema, self.regex))
        if given + bool(self.ignore_eos) > 1 and given:
            raise SessionError(
                "a text that follows a grammar, a JSON schema or a regex ends with it: give one of grammar, "
                "json_schema, regex and ignore_eos, got several"
            )
        if self.least and not self.is_free:
            raise SessionError(
                "a text that follows a grammar, a JSON schema or a regex ends where that does, got at least "
                f"{self.least} tokens; leave one of them out"
            )
        object.__setattr__(self, "stop", _texts(self.stop))
        object.__setattr__(self, "stop_ids", _listed(self.stop_ids))

    @property
    def is_free(self) -> bool:
        """No grammar, no schema and no regular expression."""
        return self.grammar is None and self.json_schema is None and self.regex is None

    def pieces(self, tokenizer: Tokenizer) -> Pieces:
        """What makes pieces of a new text."""
        stops = Stops(tokenizer, self.stop, self.stop_ids)
        return Pieces(
            tokenizer, stops, self.n, ignore_eos=self.ignore_eos, least=self.least, tells_stop=self.tells_stop,
            special=self.special,
        )  # fmt: skip

    def sampler(self, tokenizer: Tokenizer, n_vocab: int, params: SamplerParams, matcher: Matcher | None) -> Sampler:
        """What chooses a new text's tokens. n_vocab: how many logits there are; matcher: what a grammar lets through.
        Raises SessionError for a bias of an unknown token, and as allowed_ids() and spellings() do."""
        unknown = next((token for token in params.biases if token >= n_vocab), None)
        if unknown is not None:
            raise SessionError(f"logit_bias must name token ids, 0 to {n_vocab - 1}, got {unknown}")
        dry = params.dry_multiplier and not params.mirostat
        breakers = breakers_of(tokenizer, params.dry_sequence_breaker) if dry else Breakers({})
        never = tokenizer.eog_ids if self.ignore_eos else ()
        late = Stops(tokenizer, self.stop, self.stop_ids).ids | tokenizer.eog_ids if self.least else ()
        if self.allowed is not None or self.bad_words:
            only = None if self.allowed is None else allowed_ids(self.allowed, n_vocab)
            matcher = Permitted(n_vocab, only, spellings(self.bad_words, tokenizer), matcher)
        return Sampler(
            params, never=never, matcher=matcher, breakers=breakers, best=self.logprobs, late=late, least=self.least,
            after=self.after, named=self.named,
        )  # fmt: skip


class StopFilter:
    """Text that goes through until a stop text is complete. What may be the beginning of one is held back."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._matchers = [_Matcher(text) for text in texts]
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """The text that can be shown now, and the stop text that is complete, "" for none; nothing of it was shown.

        Of several stop texts the one that is complete first counts, of those the longest.
        """
        if not self._matchers:
            return text, ""
        for i, char in enumerate(text):
            complete = max((m.size for m in self._matchers if m.step(char) == m.size), default=0)
            if complete:
                before = self._held + text[: i + 1]
                self._held = ""
                return before[: len(before) - complete], before[len(before) - complete :]
        self._held += text
        shown = len(self._held) - max(m.state for m in self._matchers)
        out, self._held = self._held[:shown], self._held[shown:]
        return out, ""

    def flush(self) -> str:
        """What was held back, as no more text comes."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """How much of a text's beginning the characters so far end in, by Knuth, Morris and Pratt. state: that number."""

    def __init__(self, text: str) -> None:
        self.size = len(text)
        self.state = 0
        self._text = text
        self._shorter = [0, 0]  # by the number of matched characters: the next smaller one that also fits
        for char in text[1:]:
            self._shorter.append(self._next(self._shorter[-1], char))

    def step(self, char: str) -> int:
        """The state after one more character."""
        self.state = self._next(self.state, char)
        return self.state

    def _next(self, state: int, char: str) -> int:
        while state and (state == self.size or self._text[state] != char):
            state = self._shorter[state]
        return state + (self._text[state] == char)


class Pieces:
    """The pieces of one text, from its tokens. n: how many may come, -1: any number; ignore_eos: no token is an end;
    least: of so many tokens none is one, and no stop text; tells_stop: the stop text that ends it is told; special:
    control tokens are told, but for what ends it."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Stops, n: int, *, ignore_eos: bool = False, least: int = 0,
        tells_stop: bool = False, special: bool = False,
    ) -> None:  # fmt: skip
        self.made = 0
        self._n, self._least, self._tells_stop = n, least, tells_stop
        self._ends = stops.ids | (set() if ignore_eos else tokenizer.eog_ids)
        self._eog = tokenizer.eog_ids
        self._stream = tokenizer.stream(special)
        self._filter = StopFilter(stops.texts)

    def add(self, token: int, logprobs: Logprobs | None = None, *, full: bool = False) -> Piece:
        """The next token's piece. full: the context has no room for another one."""
        self.made += 1
        finish = "length" if self.made == self._n else "context" if full else ""
        if token in self._ends:
            finish, text = "eog" if token in self._eog else "stop", ""
        else:
            text = self._stream.push(token)
        whole = text + self._stream.flush() if finish else text
        shown, word = self._filter.push(whole) if self.made > self._least else (whole, "")
        if word:
            finish, shown = "stop", shown + word if self._tells_stop else shown
        elif finish:
            shown += self._filter.flush()
        return Piece(token, shown, finish, logprobs, word)
