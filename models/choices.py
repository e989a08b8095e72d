"""Choices: the tokens of one text, each chosen when those before it have been read, or drawn ahead on a backend that
queues its work; and the text that they make."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

from graphrt.models.generation import Piece, Pieces
from graphrt.models.sampling import Sampler
from graphrt.models.session import Session
from graphrt.models.step import Logits

#: Sampler.sample(), or what stands for it.
Choose = Callable[[Sampler, Logits, Sequence[int]], int]


def text(
    session: Session, tokens: list[int], n: int, sampler: Sampler, pieces: Pieces, choose: Choose
) -> Generator[Piece, None, None]:
    """The pieces of the text after `tokens`, which are read first; n: at most so many, -1: any number."""
    if n == 0:
        session.eval(tokens)
        return
    with closing(choices(session, tokens, n, sampler, choose)) as chosen:
        for token in chosen:
            piece = pieces.add(token, sampler.logprobs, full=session.n_past >= session.n_ctx)
            yield piece
            if piece.finish:
                return


def choices(
    session: Session, tokens: list[int], n: int, sampler: Sampler, choose: Choose = Sampler.sample
) -> Generator[int, None, None]:
    """The tokens that are chosen after `tokens`, at most n (-1: any number) and while the context has room."""
    given, past = list[int](), 0
    try:
        for token in _chosen(session, tokens, n, sampler, choose):
            given, past = [token], session.n_past
            yield token
    finally:  # the last one that was given is not read yet, unless what came after its reading failed
        if session.n_past == past < session.n_ctx:
            session.unread = given


def _chosen(session: Session, tokens: list[int], n: int, sampler: Sampler, choose: Choose) -> Iterator[int]:
    """The same; each token is read when the next one is asked for."""
    history, params = [*session.tokens, *tokens], sampler.device_params()
    n_before, logits = len(history), session.eval(tokens)
    while True:
        token = choose(sampler, logits, history)
        history.append(token)
        yield token
        rest = n + n_before - len(history) if n > 0 else session.n_ctx
        if sampler.is_greedy and session.runs_ahead:
            for ahead in session.likeliest(token, rest):
                if ahead in sampler.never:  # a backend knows nothing of that: the host chooses, from the same logits
                    break
                history.append(ahead)
                yield ahead
            else:
                return
            logits = session.eval_again(history[-1])
        elif params is not None and session.draws_ahead(params):
            yield from session.drawn(token, rest, params, sampler.uniforms)
            return
        else:
            logits = session.next_logits(token)
