"""Several texts after one prompt: it is read once, and what it left in the cache is copied for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphrt.backend import Backend
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.choices import Choose
from graphrt.models.engine import Engine, SessionOptions, check_options
from graphrt.models.generation import Piece, Pieces
from graphrt.models.sampling import Sampler
from graphrt.models.session import Session

#: The most texts of one prompt.
MAX_SAMPLES = 256


def samples(
    decoder: Decoder,
    backends: Sequence[Backend],
    tokens: Sequence[int],
    n: int,
    options: SessionOptions,
    texts: Sequence[tuple[Sampler, Pieces]],
    next_token: Choose,
) -> Iterator[tuple[int, Piece]]:
    """(number of a text, its next piece), a token of each text in turn until all have ended. tokens: the prompt; n: how
    many a text may have, -1: any number; texts: what chooses each one's tokens, and makes pieces of
    them; next_token: asks a sampler for a token."""
    n_ctx, _ = check_options(options, decoder.hp)
    if n >= 0:
        options = replace(options, n_ctx=min(n_ctx, len(tokens) + max(n, 1)))
    session = Session(decoder, backends, options)
    first = session.eval(tokens)
    engine = Engine(decoder, backends, replace(options, n_batch=len(texts)), len(texts))
    engine.cache.take_over(session.cache)
    engine.lengths[:] = session.n_past
    del session
    histories = [list(tokens) for _ in texts]
    rows = dict.fromkeys(range(len(texts) if n else 0), first)
    while rows:
        going: dict[int, list[int]] = {}
        for i, logits in rows.items():
            sampler, pieces = texts[i]
            token = next_token(sampler, logits, histories[i])
            histories[i].append(token)
            piece = pieces.add(token, sampler.logprobs, full=bool(engine.lengths[i] >= engine.n_ctx))
            yield i, piece
            if not piece.finish:
                going[i] = [token]
        rows = dict(zip(going, engine.read(going))) if going else {}
