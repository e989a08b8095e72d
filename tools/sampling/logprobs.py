"""Log-probabilities as JSON, with the names that OpenAI's API has for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphrt.models.generation import Piece
    from graphrt.models.tokenizer import Tokenizer


def as_json(pieces: Iterable[Piece], tokenizer: Tokenizer) -> dict[str, Any]:
    """{"logprobs": what is told of each piece's token}; nothing where nothing is. Natural logarithms."""
    told = [
        _token(tokenizer, piece.token, piece.logprobs.token)
        | {"top_logprobs": [_token(tokenizer, *best) for best in piece.logprobs.best]}
        for piece in pieces
        if piece.logprobs is not None
    ]
    return {"logprobs": told} if told else {}


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    """bytes: a token may be a part of a character, which its text can't show."""
    spelled = tokenizer.piece(token) if token < tokenizer.n_vocab else b""
    return {"id": token, "token": spelled.decode("utf-8", "replace"), "bytes": list(spelled), "logprob": logprob}
