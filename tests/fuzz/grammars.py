"""GBNF grammars and JSON schemas at random: deep, ambiguous, repeated, cut and mixed up.

An input is "g" and a grammar or "j" and a schema. It must be refused with a SessionError of a few hundred characters,
or give a matcher that lets tokens through, up to a SessionError.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import numpy as np
from support.tiny import bpe

from graphrt.errors import SessionError
from graphrt.models.grammar import GrammarVocab
from graphrt.models.tokenizer import Tokenizer

NAME = "grammars"
TOKENS = 12  # that are taken of each text
LONGEST = 700  # characters of a message
CHARS = 'root:=a|"[]()*+?{},0-9\\^ \n.#<xuU'


def warm() -> None:
    """Imports what each input needs."""
    attempt(b'groot ::= "a"')


def make(seed: int) -> bytes:
    """A grammar or a schema of up to some KB, one in four with some characters changed."""
    r = random.Random(f"grammar {seed}")
    text = "g" + _grammar(r) if r.random() < 0.6 else "j" + json.dumps(_schema(r, 4))
    if r.random() < 0.25:
        chars = list(text)
        for _ in range(r.randint(1, 4)):
            chars[r.randrange(1, len(chars))] = r.choice(CHARS)
        text = "".join(chars)
    return text.encode()


def attempt(data: bytes) -> str:
    """Follows a random text. The words say what ended it."""
    kind, text = data[:1], data[1:].decode("utf-8", "replace")
    r = np.random.default_rng(len(data))
    taken = 0
    try:
        matcher = _vocab().matcher(text, None) if kind == b"g" else _vocab().matcher(None, text)
        while taken < TOKENS:
            allowed = np.flatnonzero(matcher.mask())
            assert len(allowed), "a mask lets nothing through"
            token = int(r.choice(allowed))
            if token in _vocab().eog_ids:
                return "ended"
            matcher.accept(token)
            taken += 1
    except SessionError as error:
        assert len(str(error)) <= LONGEST, f"unfit to print: {error}"
        return f"refused behind {taken} tokens" if taken else "refused"
    return "went on"


@cache
def _vocab() -> GrammarVocab:
    return GrammarVocab(Tokenizer.from_metadata({f"tokenizer.ggml.{key}": value for key, value in bpe().items()}))


def _grammar(r: random.Random) -> str:
    n = r.choice((1, 2, 3, 8, 200))
    names = ["root", *(f"r{i}" for i in range(n - 1))]
    depth = 1 if n > 8 else 4
    return "\n".join(f"{name} ::= {_body(r, names, depth)}" for name in names)


def _body(r: random.Random, names: list[str], depth: int) -> str:
    items = [_item(r, names, depth) for _ in range(r.randint(0, 4))]
    return " | ".join([" ".join(items), *(_item(r, names, depth) for _ in range(r.choice((0, 0, 1, 2, 20))))])


def _item(r: random.Random, names: list[str], depth: int) -> str:
    kinds = ['"a"', '"hello"', "[a-z]", "[^a]", ".", '""', r"[\x00-\U0010FFFF]", r.choice(names), r.choice(names)]
    item = f"({_body(r, names, depth - 1)})" if depth and r.random() < 0.4 else r.choice(kinds)
    return item + r.choice(("", "", "*", "+", "?", "{3}", "{0,40}", r.choice(("{9}", "{2000}")), "{0,}", "**"))


def _schema(r: random.Random, depth: int) -> dict[str, Any]:
    def below() -> dict[str, Any]:
        return _schema(r, depth - 1) if depth else {}

    number = r.choice((0, 1, 7, -3, 0.1, 1e18, 97, 1000))
    made: list[dict[str, Any]] = [
        {"type": r.choice(("string", "integer", "number", "null", "array", "object", "boolean"))},
        {"type": "integer", "multipleOf": number}, {}, {"type": "number", "minimum": number, "maximum": number + 5},
        {"type": "string", "pattern": r.choice(("^(a|b)*a(a|b){9}$", "(a*)*", "\\w{0,500}", "[", "(?=a)"))},
        {"type": "string", "maxLength": abs(number)}, {"enum": [number, "a", None]}, {"const": [1]},
        {"type": "array", "items": below(), "minItems": abs(number)}, {"$ref": "#"}, {"$ref": "#/$defs/a"},
        {"properties": {k: below() for k in "ab"}, "required": ["a"], "additionalProperties": r.random() < 0.5},
        {"anyOf": [below(), below()]}, {"allOf": [below(), below()]}, {"oneOf": [below()]},
    ]  # fmt: skip
    found = r.choice(made) | (r.choice(made) if r.random() < 0.3 else {})
    return found | ({"$defs": {"a": below()}} if depth == 4 else {})
