"""Special tokens: texts such as "<|im_end|>" that are found before anything else is cut."""

from __future__ import annotations

from collections.abc import Iterable

from graphrt.models.key_reader import KeyReader
from graphrt.models.tokenizer_vocab import CONTROL, PREFIX, UNKNOWN, Vocab

_C_SPACES = " \t\n\v\f\r"
_HEAD_CHARS = 3  # most texts hold the heads of few special tokens, so most tokens need not be looked for

Table = dict[str, list[tuple[int, int, str]]]


class SpecialTokens:
    """Finds a vocabulary's special tokens in a text, in llama.cpp's order: longest token first, then by id."""

    def __init__(self, vocab: Vocab, keys: KeyReader) -> None:
        ids = vocab.special_ids()
        self._all = _table(vocab, ids)
        self._user_defined = _table(vocab, [i for i in ids if not vocab.kinds[i] & (CONTROL | UNKNOWN)])
        self._strips_right, self._strips_left = _strip_rules(keys, vocab, ids)

    def partition(self, text: str, parse_special: bool) -> list[str | int]:
        """Texts and token ids, in order. parse_special: control and unknown tokens too, not only user-defined ones."""
        table = self._all if parse_special else self._user_defined
        found = [entry for head, entries in table.items() if head in text for entry in entries if entry[2] in text]
        parts: list[str | int] = [text] if text else []
        for _, token, name in sorted(found):
            parts = [piece for part in parts for piece in self._cut(part, token, name)]
        return parts

    def _cut(self, part: str | int, token: int, name: str) -> Iterable[str | int]:
        if isinstance(part, int) or name not in part:
            return (part,)
        pieces: list[str | int] = []
        texts = part.split(name)
        for i, text in enumerate(texts):
            if token in self._strips_right and i > 0:
                text = text.lstrip(_C_SPACES)
            if token in self._strips_left and i < len(texts) - 1:
                text = text.rstrip(_C_SPACES)
            pieces += [text] * bool(text) + [token] * (i < len(texts) - 1)
        return pieces


def _table(vocab: Vocab, ids: Iterable[int]) -> Table:
    """First characters -> [(order of search, id, text)]."""
    table: Table = {}
    for order, token in enumerate(ids):
        text = vocab.texts[token]
        table.setdefault(text[:_HEAD_CHARS], []).append((order, token, text))
    return table


def _strip_rules(keys: KeyReader, vocab: Vocab, ids: Iterable[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Special tokens that swallow the spaces (right, left) of them. GGUF does not say; llama.cpp goes by name."""
    name = keys.text("general.name", "").lower()
    pre = keys.text(PREFIX + "pre", "")
    masked = any(tag in pre for tag in ("jina-v2-de", "jina-v2-es", "jina-v2-code"))
    if masked or keys.text("general.architecture", "") in ("nomic-bert-moe", "jina-bert-v3"):
        return frozenset(), _present(vocab, "<mask>")
    if "phi-3" in name or "phi3" in name:
        return frozenset(ids) - _present(vocab, "<unk>", "<s>", "<|endoftext|>"), frozenset()
    if "modern-bert" in name:
        return frozenset(), _present(vocab, "[MASK]")
    return frozenset(), frozenset()


def _present(vocab: Vocab, *texts: str) -> frozenset[int]:
    return frozenset(vocab.ids[text] for text in texts if text in vocab.ids)
