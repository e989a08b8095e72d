"""Answers in OpenAI's form, made of events: usage, log-probabilities, why a text ended."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from graphrt.models.generation import Piece
from graphrt.models.tokenizer import Tokenizer
from graphrt.tools.serve.scheduler import Text

#: Piece.finish -> finish_reason.
FINISH = {"eog": "stop", "stop": "stop", "length": "length", "context": "length"}
#: Piece.finish of a text that would have gone on.
CUT = ("length", "context")


def head(kind: str, prefix: str, model: str, fingerprint: str) -> dict[str, Any]:
    """What every answer, and every piece of one, begins with."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
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
    beginning to the last one's end. Nothing of what the cache had already is counted as read."""
    cached = sum(max(0, text.n_cached) for text in texts if text.leader is None)
    read = sum(len(text.prompt) for text in texts if text.leader is None) - cached
    made = sum(text.n_made for text in texts)
    began = min(text.began for text in texts)
    reading = began - min(text.read for text in texts)
    making = max(text.last for text in texts) - began
    return {
        "cache_n": cached, "prompt_n": read, **_rates("prompt", read, reading),
        "predicted_n": made, **_rates("predicted", made, making),
    }  # fmt: skip


def _rates(name: str, n: int, seconds: float) -> dict[str, float]:
    """0 for what took no time."""
    return {
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / n if n else 0.0,
        f"{name}_per_second": n / seconds if seconds > 0 else 0.0,
    }


def native_logprobs(piece: Piece, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token's in llama-server's form, which has ids too."""
    assert piece.logprobs is not None
    best = [{"id": token, **_token(tokenizer, token, logprob)} for token, logprob in piece.logprobs.best]
    return {"id": piece.token, **_token(tokenizer, piece.token, piece.logprobs.token), "top_logprobs": best}


def chat_logprobs(pieces: Sequence[Piece], tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Those of a chat's tokens, None where none were asked for. The token that ends a text is left out."""
    told = [
        _token(tokenizer, piece.token, piece.logprobs.token)
        | {"top_logprobs": [_token(tokenizer, *best) for best in piece.logprobs.best]}
        for piece in pieces
        if piece.logprobs is not None and piece.finish != "eog"
    ]
    return {"content": told, "refusal": None} if told else None


def completion_logprobs(
    pieces: Sequence[Piece], tokenizer: Tokenizer, offset: int = 0, prompt: Text | None = None
) -> dict[str, Any] | None:
    """The same in the older form of completions. offset: characters before the first one, -1 for a space that it has
    and the text has not; prompt: a text whose prompt's come first. Nobody chose the first of its tokens."""
    told = [(piece.token, piece.logprobs) for piece in pieces if piece.logprobs and piece.finish != "eog"]
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    read = [*zip(prompt.prompt, [None, *prompt.scores])] if prompt is not None else []
    for i, (token, logprobs) in enumerate([*read, *told]):
        text = _text(tokenizer, token)
        found["tokens"].append(text)
        found["text_offset"].append(max(0, offset))
        offset += len(text) if i >= len(read) else length([token], tokenizer)
        if logprobs is None:
            found["token_logprobs"].append(None)
            found["top_logprobs"].append(None)
            continue
        found["token_logprobs"].append(_finite(logprobs.token))
        # of tokens with one spelling the likeliest, and the text's own token in any case, as OpenAI has it
        best = {_text(tokenizer, token): _finite(logprob) for token, logprob in reversed(logprobs.best)}
        found["top_logprobs"].append({**dict(reversed(best.items())), text: _finite(logprobs.token)})
    return found if found["tokens"] else None


def mean_logprob(pieces: Sequence[Piece]) -> float:
    """Of a text's tokens, how likely they were: what texts are compared by."""
    return sum(_finite(piece.logprobs.token) for piece in pieces if piece.logprobs is not None) / len(pieces)


def length(prompt: Sequence[int], tokenizer: Tokenizer) -> int:
    """The characters of a prompt's tokens; control tokens have none."""
    return sum(len(_text(tokenizer, token, special=False)) for token in prompt)


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelled = _bytes(tokenizer, token)
    return {"token": spelled.decode("utf-8", "replace"), "bytes": list(spelled), "logprob": _finite(logprob)}


def _text(tokenizer: Tokenizer, token: int, *, special: bool = True) -> str:
    return _bytes(tokenizer, token, special=special).decode("utf-8", "replace")


def _bytes(tokenizer: Tokenizer, token: int, *, special: bool = True) -> bytes:
    """Models may have more logits than tokens."""
    return tokenizer.piece(token, special) if token < tokenizer.n_vocab else b""


def _finite(logprob: float) -> float:
    """JSON knows no -inf; OpenAI says -9999 for what is never chosen."""
    return max(logprob, -9999.0)
