"""A needle in a haystack: does a model still find one sentence among thousands, at any depth of its context.

The haystack is made here from a few words and a seed, the same on every machine: sentences that say nothing, and in one
of them, the needle, somebody's pass code. Other people's codes stand elsewhere, so that any code is not the right one.
The context ends in the question; what is scored is the answer, token by token with those before it given: found, if
each is the one that the model thinks most likely, and its negative log likelihood, which tells more of small losses.

A model that is made to look things up (models/synthetic_recall.py) has facts instead of sentences, and one context in
which all of them are asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from graphrt.errors import SessionError
from graphrt.models.model import nll
from graphrt.models.session import Session
from graphrt.models.synthetic_recall import NEEDLES, recall
from graphrt.models.tokenizer import Tokenizer

_NAMES = ("Ada", "Boris", "Clara", "David", "Elena", "Felix", "Grace", "Hugo", "Irene", "Jonas", "Karla", "Linus")
_WHAT = ("garden", "river", "window", "market", "station", "letter", "mountain", "bridge", "teacher", "kitchen")
_HOW = ("quiet", "old", "narrow", "bright", "cold", "wooden", "distant", "empty", "green", "small")
_DID = ("stood behind", "looked over", "led to", "belonged to", "was near", "was older than", "lay below")
#: Sentences that are other people's codes, at most.
_DECOYS = 4


@dataclass(frozen=True)
class Trial:
    """One needle. ids: the context with the question and the answer; n_answer: tokens of the answer, the last ones;
    depth: where the needle stands, 0 at the beginning of the haystack, 1 at its end."""

    ids: list[int]
    n_answer: int
    depth: float


@dataclass(frozen=True)
class Outcome:
    """found: every token of the answer was the likeliest; loss: mean negative log likelihood of its tokens."""

    depth: float
    found: bool
    loss: float


def _sentence(rng: random.Random) -> str:
    first, second = rng.sample(_WHAT, 2)
    return f" The {rng.choice(_HOW)} {first} {rng.choice(_DID)} the {rng.choice(_HOW)} {second}."


def _code(rng: random.Random) -> str:
    return " ".join(str(rng.randrange(10)) for _ in range(5))


def make_trial(tokenizer: Tokenizer, n_ctx: int, depth: float, seed: int) -> Trial:
    """The needle at a depth of 0 to 1 among as many sentences as n_ctx tokens hold. Raises SessionError where n_ctx
    is too small for the question and a few sentences."""
    rng = random.Random(seed)
    name, *others = rng.sample(_NAMES, 1 + _DECOYS)
    code = _code(rng)
    question = f" Question: what is the pass code of {name}? Answer: the pass code of {name} is"
    asked, answered = _plain(tokenizer, question), _plain(tokenizer, f"{question} {code}")
    same = next((i for i, (a, b) in enumerate(zip(asked, answered)) if a != b), len(asked))
    begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    needle = _plain(tokenizer, f" The pass code of {name} is {code}.")
    room = n_ctx - len(begin) - len(answered) - len(needle)
    decoys = [_plain(tokenizer, f" The pass code of {other} is {_code(rng)}.") for other in others]
    sentences: list[list[int]] = []
    while True:
        sentence = _plain(tokenizer, _sentence(rng))
        if sum(map(len, sentences)) + len(sentence) > room:
            break
        sentences.append(sentence)
    if len(sentences) < 2 * _DECOYS:
        raise SessionError(
            f"a needle needs a haystack of at least {2 * _DECOYS} sentences, {n_ctx} tokens hold {len(sentences)}; "
            f"use a larger -c"
        )
    for decoy in decoys:  # each instead of sentences, where it does not make the whole longer
        at = rng.randrange(len(sentences))
        freed = len(sentences[at])
        while freed < len(decoy) and at + 1 < len(sentences):
            freed += len(sentences.pop(at + 1))
        if freed >= len(decoy):
            sentences[at] = decoy
    sentences.insert(round(depth * len(sentences)), needle)
    ids = [*begin, *(token for sentence in sentences for token in sentence), *answered]
    return Trial(ids, len(answered) - same, depth)


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_bos=False, goes_on=True)


def search(session: Session, tokenizer: Tokenizer, n_trials: int) -> Iterator[Outcome]:
    """The outcomes of needles at n_trials depths, evenly from the haystack's beginning to its end."""
    for i in range(n_trials):
        trial = make_trial(tokenizer, session.n_ctx, i / max(n_trials - 1, 1), i)
        session.reset()
        first = len(trial.ids) - trial.n_answer
        rows = session.eval_rows(trial.ids[:-1], first - 1)
        answer = trial.ids[first:]
        yield Outcome(trial.depth, bool((rows.argmax(-1) == answer).all()), float(nll(rows, answer).mean()))


def look_up(session: Session, name: str, n_trials: int) -> Iterator[Outcome]:
    """The outcomes of n_trials facts of the synthetic model `name`, evenly over the context. Each is asked for twice:
    among all questions, which are read as a prompt, and by itself, as a token that was generated. Found: both times;
    the loss is the mean of both. Raises SessionError for more questions than it has, and for a context too small."""
    file = recall(name)
    if n_trials > NEEDLES:
        raise SessionError(f"{name} has {NEEDLES} facts to ask for, got --needle {n_trials}; ask for fewer")
    given = file.lookup(session.n_ctx)
    session.reset()
    together = session.eval_rows(given.ids, given.first)
    session.rewind(given.first)
    alone = np.stack([session.eval([question]) for question in given.ids[given.first :]])
    losses = [nll(rows, given.answers) for rows in (together, alone)]
    found = [rows.argmax(-1) == given.answers for rows in (together, alone)]
    for i in np.round(np.linspace(0, NEEDLES - 1, n_trials)).astype(int):
        yield Outcome(given.depths[i], all(bool(f[i]) for f in found), float(np.mean([loss[i] for loss in losses])))


def summary(outcomes: Sequence[Outcome]) -> tuple[int, float]:
    """(needles found, mean loss)."""
    return sum(o.found for o in outcomes), sum(o.loss for o in outcomes) / len(outcomes)
