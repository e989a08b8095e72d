"""Guesses of texts whose tokens the host chooses, on a backend that waits for each step: one step reads a text's latest
token with what may follow it, and the host chooses behind each of these as far as they are what it chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from graphrt.backends.cpu import threads
from graphrt.models.engine import Ids
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.guesses import MOST_ROWS, Guesser, Pace, guesses, that_fit
from graphrt.models.step import Logits

if TYPE_CHECKING:
    from graphrt.tools.serve.events import Text


def guesses_of(
    engine: PagedEngine, texts: Mapping[int, Text], part: Mapping[int, Ids], pace: Pace | None
) -> dict[int, list[int]]:
    """What the texts of a step of single tokens may go on with, by sequence: as much as they can still have, and has
    pages. pace: whether guesses pay."""
    if any(len(ids) > 1 for ids in part.values()) or not (pace is None or pace.guesses(len(part))):
        return {}
    asked, room = dict[Guesser, int](), min(engine.n_batch, MOST_ROWS - len(part))
    for seq in part:
        text = texts[seq]
        if text.guesser is None or text.guesser.pauses:
            continue
        left = engine.n_ctx - int(engine.lengths[seq]) - 1
        n = min(room, text.guesser.size, left, left if text.most < 0 else text.most - text.n_made - 1)
        if n > 0:
            asked[text.guesser] = n
            room -= n
    made = guesses(asked) if asked else {}
    by_seq = {seq: made[guesser] for seq in part if (guesser := texts[seq].guesser) in made}
    return that_fit(engine.cache.pool, part, by_seq)


def read(engine: PagedEngine, part: Mapping[int, Ids], guessed: Mapping[int, list[int]]) -> dict[int, Logits]:
    """One step of single tokens with what is guessed behind them: the logits behind each, by sequence. None of these
    tokens counts as read yet (took()). Raises CacheFullError; then nothing has changed."""
    whole = {seq: np.array([*ids, *guessed.get(seq, ())], np.int32) for seq, ids in part.items()}
    with engine.alone(), threads.using(engine.n_threads_batch):
        prepared = engine.feed(whole, every=True)
        prepared.exe.run()
    ends = np.cumsum([len(ids) for ids in whole.values()])
    logits = prepared.logits()[: ends[-1]]
    return {seq: logits[end - len(ids) : end] for (seq, ids), end in zip(whole.items(), ends)}


def took(engine: PagedEngine, seq: int, token: int) -> None:
    """The next token of a sequence that a step has read is its own."""
    with engine.alone():
        engine.cache.pool.commit(seq, [token])
        engine.lengths[seq] += 1
