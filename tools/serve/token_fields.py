"""What answers tell of tokens where vLLM's fields ask for it: ids (return_token_ids), ids as names
(return_tokens_as_token_ids), and log-probabilities of the prompt (prompt_logprobs)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphrt.models.generation import Piece
from graphrt.models.tokenizer import Tokenizer
from graphrt.tools.serve import answers
from graphrt.tools.serve.events import Text
from graphrt.tools.serve.schemas import Generating
from graphrt.tools.serve.spelling import Spelling


class TokenFields:
    """Of one request. by_id: the ids of a text's tokens are told; spelling: how tokens are named."""

    def __init__(self, body: Generating, tokenizer: Tokenizer) -> None:
        self.by_id = bool(body.return_token_ids)
        self.spelling = Spelling(tokenizer, bool(body.return_tokens_as_token_ids))
        self._prompt_best = body.prompt_logprobs

    def of_text(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Of a whole text; null for what nobody asked for, as vLLM has it."""
        return {"token_ids": None} | self.ids(pieces)

    def ids(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Of a piece of a text: what was asked for."""
        return {"token_ids": [piece.token for piece in pieces]} if self.by_id else {}

    def of_prompt(self, text: Text) -> dict[str, Any]:
        """Of a whole answer."""
        best = self._prompt_best
        told = None if best is None else answers.prompt_logprobs(text, best, self.spelling)
        return {"prompt_logprobs": told, "prompt_token_ids": None} | self.first_of(text)

    def first_of(self, text: Text) -> dict[str, Any]:
        """Beside a text's first piece."""
        return {"prompt_token_ids": list(text.prompt)} if self.by_id else {}
