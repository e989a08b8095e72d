"""Several texts after one prompt: it is read once, and what it left in the cache is copied for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphrt.models.engine import SessionOptions, check_options
from graphrt.models.generation import Piece, Pieces
from graphrt.models.sampling import Sampler
from graphrt.models.session import Session

if TYPE_CHECKING:
    from graphrt.models.model import Model

#: The most texts of one prompt.
MAX_SAMPLES = 256


def samples(
    model: Model,
    tokens: Sequence[int],
    n: int,
    options: SessionOptions,
    texts: Sequence[tuple[Sampler, Pieces]],
) -> Iterator[tuple[int, Piece]]:
    """(number of a text, its next piece), a token of each text in turn until all have ended. tokens: the prompt; n: how
    many a text may have, -1: any number; texts: what chooses each one's tokens, and makes pieces of them."""
    n_ctx, _ = check_options(options, model.decoder.hp)
    if n >= 0:
        options = replace(options, n_ctx=min(n_ctx, len(tokens) + max(n, 1)))
    session = Session(model.decoder, model.backends, options)
    first = session.eval(tokens)
    engine = model.engine(len(texts), replace(options, n_batch=len(texts)))
    engine.cache.take_over(session.cache)
    engine.lengths[:] = session.n_past
    del session
    histories = [list(tokens) for _ in texts]
    rows = dict.fromkeys(range(len(texts) if n else 0), first)
    while rows:
        going: dict[int, list[int]] = {}
        for i, logits in rows.items():
            sampler, pieces = texts[i]
            token = model.next_token(sampler, logits, histories[i])
            histories[i].append(token)
            piece = pieces.add(token, sampler.logprobs, full=bool(engine.lengths[i] >= engine.n_ctx))
            yield i, piece
            if not piece.finish:
                going[i] = [token]
        rows = dict(zip(going, engine.read(going))) if going else {}
