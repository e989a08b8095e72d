"""The load "summary" of `graphrt bench serve`: an article in the prompt, a summary of it in the answer, which repeats
parts of the article as summaries do. What guessing from the prompt (`--lookup`) gains is measured by it.

A model that can summarize gets the article as it is. Random weights say nothing of it; but where each token has one
that follows it (`--synthetic NAME+chain`), what will be said is known beforehand, and the article is spelled in those
tokens: a run of words that the summary has too, two or more, stands in the prompt as the tokens that the model will say
for it. So guesses are right and wrong where they are in the real text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphrt.errors import SessionError
from graphrt.tools.bench.load import Ask
from graphrt.tools.bench.load_client import Server

#: Its name among lengths.
SUMMARY = "summary"
#: Tokens of a chain that are asked for at once, in how many places at most, and by how many tokens each request begins
#: behind the one before.
LONGEST, STARTS, STRIDE = 900, 8, 3

ARTICLE = """
The harbour of Port Ellis was built in 1874, when the railway from the copper mines reached the coast. For eighty years
almost everything that the mines produced left through it, and the town of Port Ellis grew from a few fishing huts to a
place of forty thousand people. After the mines closed in 1956 the harbour silted up. The breakwater, which had been
built of local sandstone, was damaged in the storm of 1961, and the town council decided that repairs would cost more
than the harbour could ever earn. For decades only small fishing boats used the inner basin.
In 2009 a group of engineers from the regional university proposed to turn the breakwater into a power station. Waves
that enter chambers in the wall would press air through turbines, and the turbines would drive generators. Each chamber
is eight metres wide, and when the water in it rises and falls, air is pushed out and sucked in again through a turbine
that turns in the same direction either way. The engineers calculated that thirty chambers would supply electricity for
about three thousand homes. The town council agreed to pay for a trial with two chambers, which was built in the summer
of 2012 and ran for three winters.
The trial was not a complete success. The turbines produced a fifth less than had been expected, because the waves at
Port Ellis come from two directions and partly cancel each other in front of the wall. Salt damaged the bearings of the
first turbine within a year. But the wall itself, which had been rebuilt with concrete blocks, withstood the storms of
2013 and 2014 without damage, and behind it the inner basin was calm for the first time since 1961. Fishermen who had
moved to other harbours came back, and a ferry company asked whether it could use the old railway quay.
In 2016 the town council decided to rebuild the whole breakwater, with chambers for eighteen turbines instead of thirty.
The regional government pays for half of the work, the ferry company for a tenth. The turbines are made of a bronze that
does not suffer from salt, and the chambers are turned by twelve degrees so that waves from both directions can enter
them. When the work is finished, the power station will supply electricity for about sixteen hundred homes, and the
harbour will be open to ships of up to five thousand tons. "We set out to build a power station and got our harbour
back," said the engineer who had led the trial. Critics point out that wind turbines on the hills behind the town would
have produced three times as much electricity for the same price. The council answers that wind turbines do not protect
a harbour from the sea.
"""
#: In the article's own words for the most part, as language models sum up news. Guessed by --lookup 15 a step says 4.5
#: of its 301 words (67 steps; of 363 guessed words 234 are right), by --lookup 8 3.9 (77; of 286 224). Lookup as
#: published (Saxena 2023) makes summaries of news 2.4 times as fast. A summary in words of its own (220, runs of 2 to 4
#: words) had 1.8 words a step.
TEXT = """
Port Ellis is rebuilding its breakwater as a power station. The harbour of Port Ellis was built in 1874, when the
railway from the copper mines reached the coast, and the town grew from a few fishing huts to a place of forty
thousand people. After the mines closed in 1956 the harbour silted up, and the breakwater, which had been built of
local sandstone, was damaged in the storm of 1961. In 2009 a group of engineers from the regional university proposed
to turn the breakwater into a power station: waves that enter chambers in the wall would press air through turbines.
The town council agreed to pay for a trial with two chambers, which ran for three winters. The turbines produced a
fifth less than had been expected, because the waves at Port Ellis come from two directions and partly cancel each
other, and salt damaged the bearings of the first turbine within a year. But the wall withstood the storms of 2013 and
2014 without damage, and behind it the inner basin was calm for the first time since 1961. In 2016 the town council
decided to rebuild the whole breakwater, with chambers for eighteen turbines instead of thirty. The regional
government pays for half of the work, the ferry company for a tenth. The power station will supply electricity for
about sixteen hundred homes, and the harbour will be open to ships of up to five thousand tons. Critics point out that
wind turbines on the hills would have produced three times as much electricity for the same price; the council answers
that they do not protect a harbour from the sea.
"""


def words(text: str) -> list[str]:
    """Words and signs, which stand for tokens."""
    return re.findall(r"\w+|[^\w\s]", text)


def places(article: Sequence[str], text: Sequence[str]) -> list[int]:
    """For each word of the article where it stands in the text, -1 for those that are no part of a run of two or more
    words that the text has too. The longest run counts, and of alike ones the first."""
    found = list[int]()
    while len(found) < len(article):
        left = article[len(found) :]
        n, at = max(((_alike(left, text[i:]), -i) for i in range(len(text))), default=(0, 0))
        found += range(-at, -at + n) if n > 1 else [-1]
    return found


def _alike(a: Sequence[str], b: Sequence[str]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def spelled(said: Sequence[int], n_vocab: int, rng: np.random.Generator) -> list[int]:
    """The article as tokens, behind which a model will say said[1:], for the words of the summary. said[0]: the last of
    the prompt. Words that the summary has not are tokens that aren't said."""
    others = np.setdiff1d(np.arange(n_vocab), said)
    at = places(words(ARTICLE), words(TEXT))
    return [said[1 + i] if i >= 0 else int(rng.choice(others)) for i in at] + [said[0]]


async def bodies(server: Server, ask: Ask, first: int, n: int) -> list[dict[str, Any]]:
    """The requests from number `first` on. Raises SessionError where the server tells no tokens."""
    more = {"temperature": ask.temperature, **(ask.more or {})}
    made = len(words(TEXT))
    chain = await _chain(server, ask)
    found = list[dict[str, Any]]()
    for i in range(first, first + n):
        rng = np.random.default_rng([ask.seed, 2, i])
        prompt: Any = f"Article number {i}:\n{ARTICLE}\nA summary of this article:\n"
        if chain:
            at = STRIDE * i % (len(chain) - made)
            prompt = spelled(chain[at : at + made + 1], ask.n_vocab, rng)
        found.append({"model": ask.model, "prompt": prompt, "max_tokens": made, "seed": ask.seed + i, **more})
    return found


async def _chain(server: Server, ask: Ask) -> list[int]:
    """Tokens that follow each other wherever they stand, each once; [] of a model that looks at what was before. Raises
    SessionError where the server tells no tokens, and where chains are short."""
    rng, longest = np.random.default_rng([ask.seed, 3]), list[int]()
    for _ in range(STARTS):
        start, *others = rng.integers(0, ask.n_vocab, 3).tolist()
        said = [start, *await _said(server, [start], LONGEST)]
        beside = await _said(server, [*others, start], 16)
        if said[1 : 1 + len(beside)] != beside:
            return []
        n = next((i for i, token in enumerate(said) if token in said[:i]), len(said))
        longest = max(longest, said[:n], key=len)
        if len(longest) > LONGEST // 2:
            break
    if len(longest) <= len(words(TEXT)) + 1:
        raise SessionError(
            f"a chain must have over {len(words(TEXT))} tokens that differ, got {len(longest)}; give another --seed or "
            f"serve a longer context (-c)"
        )
    return longest


async def _said(server: Server, prompt: list[int], n: int) -> list[int]:
    """What is said after these tokens. Raises SessionError."""
    asked = {"prompt": prompt, "n_predict": n, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    answer = await server.post("/completion", asked)
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list):
        raise SessionError(f"a server must tell the tokens that it makes (return_tokens), got {answer!r:.200}")
    return tokens
