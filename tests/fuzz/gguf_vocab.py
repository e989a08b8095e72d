"""Vocabularies that a stranger may put into a GGUF file."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fuzz.gguf_bases import Spec
from fuzz.gguf_values import REAL, WHOLE, hostile_text, of_kind

Rng = random.Random
PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"


KINDS = {"tokens": "array:string", "merges": "array:string", "scores": "array:f32", "token_type": "array:i32"}


def _array(spec: Spec, key: str) -> list[Any] | None:
    """A copy of that array, in its place; None where there is none of that type."""
    for i, (name, kind, value) in enumerate(spec.kv):
        if name == PREFIX + key and kind == KINDS[key] and len(value):
            spec.kv[i] = (name, kind, list(value))
            return spec.kv[i][2]  # type: ignore[no-any-return]
    return None


def odd_token(rng: Rng, spec: Spec) -> None:
    """Tokens that are empty, endless, alike, or no UTF-8."""
    tokens = _array(spec, "tokens")
    if tokens is None:
        return
    for _ in range(rng.choice((1, 1, 2, 20))):
        made = rng.choice(
            ("", " ", tokens[rng.randrange(len(tokens))], hostile_text(rng), "<0xZZ>", "<0x41>", "\u2581")
        )
        tokens[rng.randrange(len(tokens))] = made[:100_000] if isinstance(made, str) else made


def odd_merges(rng: Rng, spec: Spec) -> None:
    """Merges that are no pairs, of pieces that are no tokens, in circles, or very long."""
    merges = _array(spec, "merges")
    if merges is None:
        return
    odd = ("", " ", "a", "a b c", "a ", " b", "h e", "he h", "x" * 3000 + " " + "y" * 3000, "\x00 \x00", b"\xff \xfe")
    for _ in range(rng.choice((1, 3, 30))):
        merges[rng.randrange(len(merges))] = rng.choice((*odd, hostile_text(rng)))
    if rng.random() < 0.2:
        merges += [f"{'a' * i} a" for i in range(1, rng.choice((10, 800)))]


def odd_numbers(rng: Rng, spec: Spec) -> None:
    """Scores that are no numbers, kinds that there are not."""
    for key, kind, pool in (("scores", "f32", REAL), ("token_type", "i32", WHOLE)):
        numbers = _array(spec, key)
        for _ in range(rng.choice((1, 10, 1000)) if numbers is not None else 0):
            numbers[rng.randrange(len(numbers))] = of_kind(kind, rng.choice(pool))  # type: ignore[index]


def more_or_fewer(rng: Rng, spec: Spec) -> None:
    """An array shorter or longer than the others."""
    key = rng.choice(("tokens", "scores", "token_type", "merges"))
    found = _array(spec, key)
    if found is None:
        return
    if rng.random() < 0.5:
        del found[rng.randrange(len(found)) :]
    elif key == "tokens":
        found += [f"t{i}" for i in range(rng.choice((1, 100, 20_000)))]
    else:
        found += found[:50]


def all_special(rng: Rng, spec: Spec) -> None:
    """Every token is searched for before all else."""
    kinds = _array(spec, "token_type")
    if kinds is not None:
        kinds[:] = [rng.choice((3, 4, 2))] * len(kinds)


def template(rng: Rng, spec: Spec) -> None:
    text = hostile_text(rng)
    spec.kv = [row for row in spec.kv if row[0] != TEMPLATE]
    spec.kv.append((TEMPLATE, "string", text))


VOCABULARY: tuple[Callable[[Rng, Spec], None], ...] = (
    odd_token, odd_merges, odd_numbers, more_or_fewer, all_special, template,
)  # fmt: skip
