"""Grammars: which tokens may come next in a text of a GBNF grammar, a JSON schema or a regular expression, by
llguidance."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphrt.errors import SessionError
from graphrt.models.closed_schema import closed
from graphrt.models.gbnf import MAX_CHARS, to_lark
from graphrt.models.recent import Recent
from graphrt.models.regex_classes import ascii_classes
from graphrt.models.tokenizer import Tokenizer
from graphrt.printing import brief, cut

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

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
            made = source.grammar_from_regex(ascii_classes(text))
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

    def copy(self) -> GrammarMatcher:
        """Another one at the same place of the text."""
        return GrammarMatcher(self._matcher.deep_copy(), self._n_vocab, self._eog_ids)

    @property
    def n_words(self) -> int:
        """Of 32 tokens each, which bits() gives."""
        return -(-self._n_vocab // 32)

    def mask(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next: [n_vocab]. Raises SessionError where finding them takes too much."""
        return np.unpackbits(self.bits().view(np.uint8), count=self._n_vocab, bitorder="little").view(np.bool_)

    def bits(self) -> npt.NDArray[np.uint32]:
        """The same, a bit a token."""
        found = np.zeros(self.n_words, np.uint32)
        self.write_bits(found, found.ctypes.data)
        return found

    def write_bits(self, words: npt.NDArray[np.uint32], address: int) -> None:
        """Puts the same into `words`, [n_words] side by side, whose first one lies at this address: numpy takes longer
        to tell it than all else here."""
        if self._matcher.is_stopped() and not self._matcher.is_error():  # nothing but a token that ends the text
            words[:] = 0
            for token in self._eog_ids:
                words[token // 32] |= np.uint32(1 << token % 32)
            return
        self._matcher.unsafe_compute_mask_ptr(address, 4 * self.n_words)
        self._check()
        if self._n_vocab % 32:
            words[-1] &= np.uint32((1 << self._n_vocab % 32) - 1)

    def accept(self, token: int) -> None:
        """Goes on behind a token. Raises SessionError for one that may not come."""
        if token not in self._eog_ids:
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise SessionError(
                f"a grammar must let a token through within limits; llguidance says {_said(self._matcher)}; simplify it"
            )


def masks_of(matchers: Mapping[int, Matcher], n_words: int) -> tuple[npt.NDArray[np.uint32], dict[int, SessionError]]:
    """What may come next in several texts, a bit a token: uint32 [texts, n_words], of which what a vocabulary lacks is
    0; and by their keys what their grammars have against that.

    One after the other, by the thread that asks: masks of 64 texts are 1 to 2 ms of work. llguidance's own threads take
    1.4 to 2 times as long, and whoever hands work to another thread waits each time until the event loop's thread lets
    go of the interpreter, 8 ms in all where that has much to do."""
    widths = [each.n_words for each in matchers.values() if isinstance(each, GrammarMatcher)]
    rows = np.zeros((len(matchers), max([n_words, *widths])), np.uint32)
    address, step, failed = rows.ctypes.data, rows.strides[0], dict[int, SessionError]()
    for i, (key, each) in enumerate(matchers.items()):
        try:
            if isinstance(each, GrammarMatcher):
                each.write_bits(rows[i, : each.n_words], address + i * step)
            else:
                given = each.bits()[:n_words]
                rows[i, : len(given)] = given
        except SessionError as error:
            failed[key] = error
    return rows[:, :n_words], failed


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
