"""How answers name tokens: as the texts that they are, or by their ids (vLLM's return_tokens_as_token_ids)."""

from __future__ import annotations

from typing import NamedTuple

from graphrt.models.tokenizer import Tokenizer


class Spelling(NamedTuple):
    """Of a vocabulary. by_id: tokens are named by their ids."""

    tokenizer: Tokenizer
    by_id: bool = False

    def name(self, token: int) -> str:
        """What a token is called."""
        return f"token_id:{token}" if self.by_id else self.text(token)

    def text(self, token: int, *, special: bool = True) -> str:
        """Its own text. special: control tokens have one too."""
        return self.bytes(token, special=special).decode("utf-8", "replace")

    def bytes(self, token: int, *, special: bool = True) -> bytes:
        """Models may have more logits than tokens."""
        return self.tokenizer.piece(token, special) if token < self.tokenizer.n_vocab else b""
