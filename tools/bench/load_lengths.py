"""Lengths of requests for `graphrt bench serve`: how many tokens each prompt has, and how many are asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from graphrt.errors import SessionError

#: The longest prompt, and the longest text.
MAX_TOKENS = 1 << 20
#: Logarithms' mean and deviation of ShareGPT's prompts and answers, as published benchmarks use it (mean lengths of
#: about 220 and 190 tokens, long tails), and the longest of each.
_SHAREGPT = ((4.6, 1.3, 1024), (4.8, 1.0, 1024))


class Lengths(NamedTuple):
    """prompt: tokens of it; made: tokens asked for."""

    prompt: int
    made: int


def lengths_of(text: str, n: int, seed: int = 0) -> list[Lengths]:
    """n lengths, the same for the same seed. text: "128:256", all alike; "sharegpt", log-normal ones; or a file with
    two numbers a line, or a JSON list of pairs, over and over. Raises SessionError."""
    if re.fullmatch(r"\d{1,7}:\d{1,7}", text):
        prompt, made = map(int, text.split(":"))
        found = [Lengths(prompt, made)]
    elif text == "sharegpt":
        rng = np.random.default_rng(seed)
        drawn = [np.clip(np.rint(rng.lognormal(mean, width, n)), 4, most) for mean, width, most in _SHAREGPT]
        found = [Lengths(int(a), int(b)) for a, b in zip(*drawn)]
    else:
        found = _of_file(text)
    bad = next((each for each in found if not all(1 <= x <= MAX_TOKENS for x in each)), None)
    if bad is not None or not found:
        raise SessionError(
            f"a prompt and a text must have 1 to {MAX_TOKENS} tokens, got {'none' if bad is None else tuple(bad)} in "
            f"{text[:40]!r}"
        )
    return [found[i % len(found)] for i in range(n)]


def _of_file(text: str) -> list[Lengths]:
    try:
        content = Path(text).read_text(encoding="utf-8")
        if content.lstrip().startswith("["):
            return [Lengths(int(a), int(b)) for a, b in json.loads(content)]
        numbers = (line.replace(",", " ").split() for line in content.splitlines() if line.strip())
        return [Lengths(int(a), int(b)) for a, b in numbers]
    except (OSError, ValueError, TypeError) as error:
        raise SessionError(
            f"lengths must be PROMPT:TOKENS as 128:256, sharegpt, or a file with two whole numbers a line, got "
            f"{text[:40]!r}: {error}"
        ) from error
