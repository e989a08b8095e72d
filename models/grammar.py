"""Grammars: which tokens may come next in a text of a GBNF grammar, a JSON schema or a regular expression, by
llguidance."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphrt.errors import SessionError
from graphrt.models.closed_schema import closed
from graphrt.models.gbnf import MAX_CHARS, to_lark
from graphrt.models.recent import Recent
from graphrt.models.tokenizer import Tokenizer
from graphrt.printing import brief, cut

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from graphrt.models.sampling import Matcher

#: The oldest version of llguidance that is known to do; 1.6 takes but one token that ends a text.
LEAST = 1, 9
#: Levels of a JSON schema, and references in it: llguidance goes down both on the machine's stack.
MAX_DEPTH, MAX_REFS = 64, 500
#: Grammars that are kept compiled: a server's requests ask for the same few again and again.
KEPT_GRAMMARS = 32
#: The least common multiple of all that numbers must be multiples of: of so many states is a lexer that finds out.
MAX_MULTIPLE = 100_000
#: What llguidance may spend, in its own units: on a grammar 1,000,000 steps (20 ms), on a token as many (70 ms) and
#: 1,000,000 Earley items (50 ms, 170 MB), and 50,000 states of its lexer (100 MB).
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 1_000_000,
    "step_max_items": 1_000_000,
    "max_items_in_row": 3_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
#: Between the signs of JSON, as llama.cpp has it: nothing, a space, or a new line and up to 20 spaces. With any number
#: of them small models write spaces without end.
_SPACE = r"( |\n[ \t]{0,20})"

#: One of several schemas (oneOf) is any of them: mostly they differ in a constant, and no text fits two.
_JSON = {"whitespace_pattern": _SPACE, "coerce_one_of": True}


class GrammarVocab:
    """A vocabulary as llguidance reads it; made once a model. Raises SessionError where llguidance is missing, or the
    vocabulary has no token that ends a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        llguidance = the_llguidance()
        if not tokenizer.eog_ids:
            raise SessionError("a grammar needs a token that ends the text, this vocabulary has none; use stop texts")
        self.n_vocab = tokenizer.n_vocab
        self.eog_ids = sorted(tokenizer.eog_ids)
        wrapper = llguidance.TokenizerWrapper(_Tokens(tokenizer))
        self.tokens: LLTokenizer = llguidance.LLTokenizer(wrapper, eos_token=self.eog_ids)
        self._first: Recent[tuple[str, str], LLMatcher] = Recent(KEPT_GRAMMARS)

    def matcher(
        self, grammar: str | None, json_schema: str | Mapping[str, Any] | bool | None, regex: str | None = None
    ) -> GrammarMatcher:
        """One for a new text. A grammar that was asked for lately is not compiled again. By one thread at a time.
        Raises SessionError for a grammar that can't be read or is too large."""
        if grammar is not None:
            kind, text = "grammar", _text("grammar", grammar)
        elif regex is not None:
            kind, text = "regex", _text("regex", regex)
        else:
            kind, text = "json_schema", _schema(json_schema)
        first = self._first.made((kind, text), lambda: self._compiled(kind, text))
        return GrammarMatcher(first.deep_copy(), self.n_vocab, self.eog_ids)

    def _compiled(self, kind: str, text: str) -> LLMatcher:
        llguidance = the_llguidance()
        source = llguidance.LLMatcher
        if kind == "grammar":
            made = source.grammar_from_lark(to_lark(text))
        elif kind == "regex":
            if len(text) > MAX_CHARS:
                raise SessionError(f"a regex may have {MAX_CHARS} characters, got {len(text)}; make it smaller")
            made = source.grammar_from_regex(text)
        else:
            narrow = json.dumps(closed(json.loads(text)))
            made = source.grammar_from_json_schema(narrow, overrides=_JSON)
        found: LLMatcher = source(self.tokens, made, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
        if found.is_error():
            raise SessionError(f"a grammar must be one that can be followed; llguidance says {_said(found)}")
        return found


class GrammarMatcher:
    """Follows a text token by token."""

    def __init__(self, matcher: LLMatcher, n_vocab: int, eog_ids: list[int]) -> None:
        self._matcher, self._n_vocab, self._eog_ids = matcher, n_vocab, eog_ids
        self._bits = np.zeros(-(-n_vocab // 32), np.uint32)
        self._found = False  # _bits are those behind the latest token

    def copy(self) -> GrammarMatcher:
        """Another one at the same place of the text."""
        return GrammarMatcher(self._matcher.deep_copy(), self._n_vocab, self._eog_ids)

    def mask(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next: [n_vocab]. Raises SessionError where finding them takes too much."""
        return np.unpackbits(self.bits().view(np.uint8), count=self._n_vocab, bitorder="little").view(np.bool_)

    def bits(self) -> npt.NDArray[np.uint32]:
        """The same, a bit a token, valid until it is asked for again."""
        if self._ends:
            self._bits[:] = 0
            for token in self._eog_ids:
                self._bits[token // 32] |= np.uint32(1 << token % 32)
            return self._bits
        if not self._found:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._found = True
        self._check()
        if self._n_vocab % 32:
            self._bits[-1] &= np.uint32((1 << self._n_vocab % 32) - 1)
        return self._bits

    @property
    def _ends(self) -> bool:
        """Nothing may come but a token that ends the text."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token: int) -> None:
        """Goes on behind a token. Raises SessionError for one that may not come."""
        self._found = False
        if token not in self._eog_ids:
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise SessionError(
                f"a grammar must let a token through within limits; llguidance says {_said(self._matcher)}; simplify it"
            )


def find_all(matchers: Iterable[object]) -> None:
    """Finds what may come next in several texts at once, by several threads: bits() of each has it then. What is no
    GrammarMatcher is left alone."""
    found = [each for each in matchers if isinstance(each, GrammarMatcher) and not (each._found or each._ends)]
    if len(found) > 1:
        rows = np.zeros((len(found), len(found[0]._bits)), np.uint32)
        asked = [(each._matcher, i) for i, each in enumerate(found)]
        _executor().unsafe_compute_mask_ptr(asked, rows.ctypes.data, rows.strides[0], len(rows))
        for each, row in zip(found, rows):
            each._bits, each._found = row, True


def follow_all(given: Iterable[tuple[Matcher, int]]) -> None:
    """Each text goes on behind its next token, and what may come then is found, by several threads. What a text's
    grammar has against that, bits() says. What is no GrammarMatcher only goes on."""
    given = list(given)
    ours = [(each, token) for each, token in given if isinstance(each, GrammarMatcher)]
    asked = [(one._matcher, token) for one, token in ours if token not in one._eog_ids]
    for one, _ in ours:
        one._found = False
    if asked:
        _executor().consume_token_par(asked)
    for each, token in given:
        if not isinstance(each, GrammarMatcher):
            each.accept(token)
    find_all(one for one, _ in ours)


def follow_later(given: Iterable[tuple[Matcher, int]]) -> Callable[[], None]:
    """Begins with follow_all() in a thread of its own, so that the caller goes on; what this gives waits for its end.
    Nothing else may be done with the matchers until then. One text alone goes on at once, and bits() finds the rest."""
    given = list(given)
    if len(given) > 1:
        done = _background().submit(follow_all, given)
        return lambda: done.result()
    for each, token in given:
        with suppress(SessionError):  # bits() says it again
            each.accept(token)
    return lambda: None


@cache
def _background() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "graphrt-masks")


@cache
def _executor() -> LLExecutor:
    """Threads of llguidance, four fifths of the processors that there are, made when they are first needed."""
    return the_llguidance().LLExecutor()


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        n = tokenizer.n_vocab
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eog_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.piece(i) for i in range(n)]
        self.special_token_ids = [i for i in range(n) if tokenizer.is_control(i)]
        special = set(self.special_token_ids)
        self._ids = {piece: i for i, piece in enumerate(self.tokens) if i not in special}
        self._size = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that stands behind other text, of the very same bytes: llguidance lets only these
        through where a grammar leaves but one text."""
        ids = self._tokenizer.encode(text, add_bos=False, goes_on=True)
        wanted = text.encode("utf-8", "replace")
        return ids if b"".join(self.tokens[i] for i in ids) == wanted else self._longest(wanted)

    def _longest(self, text: bytes) -> list[int]:
        """The longest token that fits, and so on; a byte that none has is left out."""
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._size), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), start)
            ids += [self._ids[text[start:end]]] if end > start else []
            start = max(end, start + 1)
        return ids


def the_llguidance() -> Any:
    """The package. Raises SessionError where it is missing, or older than what is called here."""
    try:
        import llguidance
        from llguidance import __version__
    except ImportError:
        raise SessionError(
            "grammars and JSON schemas need the package llguidance, which is not installed; "
            "pip install 'graphrt[grammar]'"
        ) from None
    numbers = tuple(map(int, re.findall(r"\d+", __version__)[:2]))
    if numbers < LEAST:
        raise SessionError(
            f"grammars and JSON schemas need llguidance {LEAST[0]}.{LEAST[1]} or newer, {cut(__version__, 20)} is "
            f"installed; pip install --upgrade 'graphrt[grammar]'"
        )
    return llguidance


def _said(matcher: LLMatcher) -> str:
    return cut(" ".join(matcher.get_error().split()), 300)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise SessionError(f"{name} must be a text, got {brief(value)}")
    return value


def _schema(schema: object) -> str:
    """A JSON schema as JSON. Raises SessionError for what is none, or is too large or nested too deeply."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        if len(text) > MAX_CHARS:
            raise SessionError(f"a JSON schema may have {MAX_CHARS} characters, got {len(text)}; make it smaller")
        found = json.loads(text)
    except (TypeError, ValueError) as error:
        raise SessionError(f"a JSON schema must be JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(found, dict):
        raise SessionError(f"a JSON schema must be an object, got {cut(text)}; {{}} allows any JSON")
    _check_schema(found)
    return text


def _check_schema(schema: dict[str, Any]) -> None:
    """Raises SessionError for what llguidance has no limit of its own for."""
    level: list[Any] = [schema]
    n_refs, multiple = 0, 1
    for _ in range(MAX_DEPTH):
        for part in level:
            if isinstance(part, dict):
                n_refs += "$ref" in part
                multiple = math.lcm(multiple, _numerator(part.get("multipleOf")))
        below = [v for part in level for v in (part.values() if isinstance(part, dict) else part)]
        level = [v for v in below if isinstance(v, (dict, list))]
    if level:
        raise _too_deep()
    if n_refs > MAX_REFS:
        raise SessionError(f"a JSON schema may have {MAX_REFS} $ref, got {n_refs}; write what they stand for in place")
    if multiple > MAX_MULTIPLE:
        raise SessionError(
            f"the least common multiple of all multipleOf of a JSON schema may be {MAX_MULTIPLE}, it is more; take "
            f"smaller ones"
        )


def _numerator(number: object) -> int:
    """That of a number as a fraction, 1 for what is no number over 0."""
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < 1e300:
        return 1
    return Fraction(str(number)).numerator


def _too_deep() -> SessionError:
    return SessionError(f"a JSON schema may be {MAX_DEPTH} levels deep, this one goes deeper; make it flatter")
