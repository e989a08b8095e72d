"""Prompts of texts that belong between a prefix and a suffix, as models of code have learned to fill them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphrt.models.tokenizer import Tokenizer
from graphrt.tools.serve.errors import ApiError

#: What llama-server calls a project, and a file, whose name it doesn't know.
_PROJECT, _FILE = "myproject\n", "filename\n"
_NEEDED = {"pre": "the prefix", "suf": "the suffix", "mid": "the middle"}


class Chunk(NamedTuple):
    """A text from elsewhere that a model may look at."""

    filename: str
    text: str


class Infill:
    """Makes prompts. most: tokens that are of use, of a text with more the rest is not looked at. What texts are made
    of are texts: nothing in them becomes a control token. Raises ApiError where the vocabulary has not the tokens."""

    def __init__(self, tokenizer: Tokenizer, most: int, param: str) -> None:
        missing = [said for role, said in _NEEDED.items() if role not in tokenizer.fim]
        if missing:
            raise ApiError(
                "a model that fills in the middle has tokens for the prefix, the suffix and the middle, this one has "
                f"none for {' and '.join(missing)}; ask one that was trained for it, or send a prompt alone",
                param=param,
            )
        self._tokenizer, self._most = tokenizer, most

    def prompt(self, prefix: str | Sequence[int], suffix: str, chunks: Sequence[Chunk] = ()) -> list[int]:
        """chunks: come first, as files of a project where the vocabulary has tokens for that."""
        tokenizer, fim = self._tokenizer, self._tokenizer.fim
        found = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        if "rep" in fim and "sep" in fim:
            if chunks:
                found += [fim["rep"], *self._ids(_PROJECT)]
            for chunk in chunks:
                found += [fim["sep"], *self._ids(f"{chunk.filename}\n{chunk.text}")]
            if chunks:
                found += [fim["sep"], *self._ids(_FILE)]
        else:
            for chunk in chunks:
                found += self._ids(chunk.text)
        before = self._ids(prefix) if isinstance(prefix, str) else prefix
        return [*found, fim["pre"], *before, fim["suf"], *self._ids(suffix), fim["mid"]]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, False, False, self._most) if text else []
