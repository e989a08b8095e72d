"""Several texts after one prompt: it is read once, and all of them go on from its pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from graphrt.backend import Backend
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.choices import Choose
from graphrt.models.continuous_batch import ContinuousBatch
from graphrt.models.engine import SessionOptions, check_options
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.generation import Piece, Pieces
from graphrt.models.sampling import Sampler
from graphrt.models.sampling_device import Drawn, drawn
from graphrt.models.step import Logits
from graphrt.ops import SampleParams

#: The most texts of one prompt.
MAX_SAMPLES = 256
#: Tokens of a page unless told: each text copies at most one.
PAGE = 64

Texts = Sequence[tuple[Sampler, Pieces]]


def samples(
    decoder: Decoder,
    backends: Sequence[Backend],
    tokens: Sequence[int],
    n: int,
    options: SessionOptions,
    texts: Texts,
    next_token: Choose,
    cache: Path | None = None,
) -> Iterator[tuple[int, Piece]]:
    """(number of a text, its next piece), a token of each text in turn until all have ended. tokens: the prompt; n: how
    many a text may have, -1: any number; texts: what chooses each one's tokens, and makes pieces of them; next_token:
    asks a sampler for a token; cache: a file of a sequence that may begin as the prompt does, and that holds the prompt
    afterwards. Raises SessionError for a file that can't be used, CacheFullError where options.n_pages are too few.
    """
    n_ctx, _ = check_options(options, decoder.hp)
    page = options.page or PAGE
    n_pages = options.n_pages or _pages(n_ctx, page, len(tokens), n, len(texts))
    engine = PagedEngine(decoder, backends, replace(options, page=page, n_pages=n_pages), len(texts))
    first = _read(engine, tokens, cache)
    for i in range(1, len(texts)):
        engine.fork(0, i)
    histories = [list(tokens) for _ in texts]
    rows = dict.fromkeys(range(len(texts) if n else 0), first)
    ways = _on_device(engine, texts)
    while rows:
        going: dict[int, int] = {}
        for i, logits in rows.items():
            sampler, pieces = texts[i]
            token = next_token(sampler, logits, histories[i])
            histories[i].append(token)
            piece = pieces.add(token, sampler.logprobs, full=bool(engine.lengths[i] >= engine.n_ctx))
            yield i, piece
            if not piece.finish:
                going[i] = token
        if going and ways is not None:
            yield from _continued(engine, going, n - 1 if n > 0 else -1, texts, ways)
            return
        rows = dict(zip(going, engine.read({i: [token] for i, token in going.items()}))) if going else {}


def _pages(n_ctx: int, page: int, n_prompt: int, n: int, count: int) -> int:
    """Pages of the prompt, which all texts share, and of n tokens of each, whose first ones are on a copied page; a
    file may have a whole context."""
    longest = min(n_ctx, n_prompt + n) if n >= 0 else n_ctx
    shared = n_prompt // page
    return max(shared + count * (-(-longest // page) - shared + 1), -(-n_ctx // page))


def _read(engine: PagedEngine, tokens: Sequence[int], cache: Path | None) -> Logits:
    """The logits after the prompt, in sequence 0: f32 [n_vocab]. What the file has of it is not read."""
    kept = start = 0
    if cache is not None and cache.exists():
        engine.load(0, cache)
        have = engine.tokens(0)
        kept = next((i for i, (a, b) in enumerate(zip(have, tokens)) if a != b), min(len(have), len(tokens)))
        start = engine.truncate(0, min(kept, len(tokens) - 1))
    logits: Logits = engine.read({0: tokens[start:]})[0]
    if cache is not None and kept < len(tokens):
        engine.save(0, cache)
    return logits


def _on_device(engine: PagedEngine, texts: Texts) -> list[Drawn] | None:
    """How the device chooses the texts' tokens, None where it doesn't: it can choose all of them and gains by that."""
    found = [drawn(sampler, engine.n_ctx) for sampler, _ in texts]
    ways = [how for how in found if how is not None and how.matcher is None]
    plain = all(how.is_plain for how in ways)
    gains = len(ways) == len(texts) and (engine.home.asynchronous or plain) and engine.runs_ahead
    return ways if gains and (plain or engine.draws_ahead(SampleParams())) else None


def _continued(
    engine: PagedEngine, going: dict[int, int], n: int, texts: Texts, ways: Sequence[Drawn]
) -> Iterator[tuple[int, Piece]]:
    """The pieces of those texts that go on, from each one's latest token on."""
    with ContinuousBatch(engine) as batch:
        for i, token in going.items():
            batch.add(i, [token], n, ways[i])
        while batch.going:
            for i, (token,) in sorted(batch.step().items()):
                piece = texts[i][1].add(token, None, full=bool(engine.lengths[i] >= engine.n_ctx))
                if piece.finish and i in batch.going:
                    batch.end(i)
                yield i, piece
