"""Several texts after one prompt: it is read once, and all of them go on from its pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphrt.backend import Backend
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.choices import Choose
from graphrt.models.engine import SessionOptions, check_options
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.generation import Piece, Pieces
from graphrt.models.sampling import Sampler

#: The most texts of one prompt.
MAX_SAMPLES = 256
#: Tokens of a page: each text copies at most one.
PAGE = 64


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
    engine = PagedEngine(decoder, backends, replace(options, page=PAGE), len(texts))
    first = engine.read({0: tokens})[0]
    for i in range(1, len(texts)):
        engine.fork(0, i)
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
