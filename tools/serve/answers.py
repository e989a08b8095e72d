"""Answers in OpenAI's form, made of events: usage, log-probabilities, why a text ended."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from graphrt.models.generation import Piece
from graphrt.models.sampling_logprobs import Logprobs
from graphrt.tools.serve.events import Text
from graphrt.tools.serve.ids import new_id
from graphrt.tools.serve.spelling import Spelling

#: Piece.finish -> finish_reason.
FINISH = {"eog": "stop", "stop": "stop", "length": "length", "context": "length"}
#: Piece.finish of a text that would have gone on.
CUT = ("length", "context")


def head(kind: str, prefix: str, model: str, fingerprint: str) -> dict[str, Any]:
    """What every answer, and every piece of one, begins with."""
    return {
        "id": new_id(f"{prefix}-"),
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }


def usage(texts: Sequence[Text], reasoning: int = 0) -> dict[str, Any]:
    """Tokens of prompts, each counted once, and of texts; of these those that are reasoning."""
    firsts = [text for text in texts if text.leader is None]
    read, made = sum(len(text.prompt) for text in firsts), sum(text.n_made for text in texts)
    return {
        "prompt_tokens": read,
        "completion_tokens": made,
        "total_tokens": read + made,
        "prompt_tokens_details": {"cached_tokens": sum(max(0, text.n_cached) for text in firsts)},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def usage_so_far(texts: Sequence[Text], made: Sequence[int]) -> dict[str, int]:
    """While texts are made: so many tokens of each are told."""
    read = sum(len(text.prompt) for text in texts if text.leader is None)
    return {"prompt_tokens": read, "completion_tokens": sum(made), "total_tokens": read + sum(made)}


def timings(texts: Sequence[Text]) -> dict[str, Any]:
    """How long it took to read prompts and to make texts, by llama-server's names: of several from the first one's
    beginning to the last one's end. Nothing of what the cache had already is counted as read, and no text's first token
    in the rates: the prompt's last step has made it."""
    cached = sum(max(0, text.n_cached) for text in texts if text.leader is None)
    read = sum(len(text.prompt) for text in texts if text.leader is None) - cached
    made = sum(text.n_made for text in texts)
    began = min(text.began for text in texts)
    reading = began - min(text.read for text in texts)
    making = max(text.last for text in texts) - began
    return {
        "cache_n": cached, "prompt_n": read, **_rates("prompt", read, reading),
        "predicted_n": made, **_rates("predicted", max(0, made - len(texts)), making),
    }  # fmt: skip


def _rates(name: str, n: int, seconds: float) -> dict[str, float]:
    """0 for what took no time."""
    return {
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / n if n else 0.0,
        f"{name}_per_second": n / seconds if seconds > 0 else 0.0,
    }


def native_logprobs(piece: Piece, spelling: Spelling, *, after: bool = False) -> dict[str, Any]:
    """A token's in llama-server's form, which has ids too. after: those of what it was drawn from, as probabilities."""
    assert piece.logprobs is not None

    def told(token: int, logprob: float) -> dict[str, Any]:
        found = {"id": token, **_token(spelling, token, logprob)}
        return found | {"prob": math.exp(found.pop("logprob"))} if after else found

    best = [told(token, logprob) for token, logprob in piece.logprobs.best]
    return told(piece.token, piece.logprobs.token) | {"top_probs" if after else "top_logprobs": best}


def chat_logprobs(pieces: Sequence[Piece], spelling: Spelling) -> dict[str, Any] | None:
    """Those of a chat's tokens, None where none were asked for. The token that ends a text is left out."""
    told = [
        _token(spelling, piece.token, piece.logprobs.token)
        | {"top_logprobs": [_token(spelling, *best) for best in piece.logprobs.best]}
        for piece in pieces
        if piece.logprobs is not None and piece.finish != "eog"
    ]
    return {"content": told, "refusal": None} if told else None


def completion_logprobs(
    pieces: Sequence[Piece], spelling: Spelling, offset: int = 0, prompt: Text | None = None, best: int = 0
) -> dict[str, Any] | None:
    """The same in the older form of completions. offset: characters before the first one, -1 for a space that it has
    and the text has not; prompt: a text whose prompt's come first, with so many of the likeliest each. Nobody chose the
    first of its tokens."""
    told = [(piece.token, piece.logprobs) for piece in pieces if piece.logprobs and piece.finish != "eog"]
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    read: list[tuple[int, Logprobs | None]] = []
    if prompt is not None:
        read = [*zip(prompt.prompt, [None, *(each._replace(best=each.best[:best]) for each in prompt.scores)])]
    for i, (token, logprobs) in enumerate([*read, *told]):
        name = spelling.name(token)
        found["tokens"].append(name)
        found["text_offset"].append(max(0, offset))
        offset += len(spelling.text(token, special=i >= len(read)))
        if logprobs is None:
            found["token_logprobs"].append(None)
            found["top_logprobs"].append(None)
            continue
        found["token_logprobs"].append(_finite(logprobs.token))
        # of tokens with one spelling the likeliest, and the text's own token in any case, as OpenAI has it; that comes
        # first, as vLLM has it
        likely = {spelling.name(token): _finite(logprob) for token, logprob in reversed(logprobs.best)}
        own = {name: _finite(logprobs.token)}
        found["top_logprobs"].append(own | dict(reversed(likely.items())) | own)
    return found if found["tokens"] else None


def prompt_logprobs(text: Text, best: int, spelling: Spelling) -> list[dict[str, Any] | None]:
    """Those of a prompt's tokens in vLLM's form, by ids: the token that is there, and so many of the likeliest. A rank
    is told where it is known."""
    found: list[dict[str, Any] | None] = [None]
    for token, logprobs in zip(text.prompt[1:], text.scores):
        ranks = {each: i + 1 for i, (each, _) in enumerate(logprobs.best)}
        named = {token: logprobs.token, **dict(logprobs.best[:best])}
        found.append(
            {
                str(each): {"logprob": _finite(value), "rank": ranks.get(each), "decoded_token": spelling.text(each)}
                for each, value in named.items()
            }
        )
    return found


def ended_by(piece: Piece) -> dict[str, str | int | None]:
    """What ended a text: a stop text or a token, None for its number of tokens. vLLM's name doesn't tell of the model's
    own end, SGLang's does."""
    found = piece.word or (piece.token if piece.finish in ("stop", "eog") else None)
    return {"stop_reason": None if piece.finish == "eog" else found, "matched_stop": found}


def mean_logprob(pieces: Sequence[Piece]) -> float:
    """Of a text's tokens, how likely they were: what texts are compared by."""
    return sum(_finite(piece.logprobs.token) for piece in pieces if piece.logprobs is not None) / len(pieces)


def length(prompt: Sequence[int], spelling: Spelling) -> int:
    """The characters of a prompt's tokens; control tokens have none."""
    return sum(len(spelling.text(token, special=False)) for token in prompt)


def _token(spelling: Spelling, token: int, logprob: float) -> dict[str, Any]:
    return {"token": spelling.name(token), "bytes": list(spelling.bytes(token)), "logprob": _finite(logprob)}


def _finite(logprob: float) -> float:
    """JSON knows no -inf; OpenAI says -9999 for what is never chosen."""
    return max(logprob, -9999.0)
