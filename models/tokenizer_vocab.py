"""A GGUF file's vocabulary: token texts, scores, kinds and special ids, read and checked.

Knows nothing of how text is cut into tokens. The rules (defaults per tokenizer model, the texts that mark
end-of-generation tokens, which ids are dropped) are those of llama.cpp's vocabulary loader, ggml 0.25.3.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphrt.errors import TokenizerError
from graphrt.models.key_reader import KeyReader
from graphrt.printing import brief

log = logging.getLogger(__name__)

UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 2, 4, 8, 16, 32
SPECIAL = UNKNOWN | CONTROL | USER_DEFINED
# tokenizer.ggml.token_type -> the bits above; 0 and anything unknown have none, so such a token renders as nothing
_KIND_BITS = np.array([0, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE], dtype=np.uint8)

PREFIX = "tokenizer.ggml."
# tokenizer.ggml.model -> default (bos, eos, unk); an id of None means that the model has none of its own
_DEFAULT_IDS: dict[str, tuple[int | None, int | None, int | None]] = {
    "llama": (1, 2, 0),
    "gpt2": (11, 11, None),
    "gemma4": (None, None, None),
    "bert": (101, None, 100),
}
SUPPORTED_MODELS = {
    "llama": "SentencePiece BPE",
    "gpt2": "byte-level BPE",
    "gemma4": "BPE on raw UTF-8",
    "bert": "WordPiece",
}
_BERT_SEPARATOR = 102

_EOT = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"),
    *("[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
)
_EOM = ("<|eom_id|>",)
_EOG = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
# fill-in-the-middle roles: (keys, texts). pad, rep and sep also end a generation
_FIM: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pre": (
        ("fim_pre_token_id", "prefix_token_id"),
        (
            *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
            *("<|code_prefix|>", "<|prefix|>"),
        ),
    ),
    "suf": (
        ("fim_suf_token_id", "suffix_token_id"),
        (
            *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
            *("<|code_suffix|>", "<|suffix|>"),
        ),
    ),
    "mid": (
        ("fim_mid_token_id", "middle_token_id"),
        (
            *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
            *("<|code_middle|>", "<|middle|>"),
        ),
    ),
    "pad": (("fim_pad_token_id",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    "rep": (("fim_rep_token_id",), ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    "sep": (("fim_sep_token_id",), ("<|file_sep|>",)),
}
# gpt-oss: these are part of what the model says, so they are always rendered
_ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


@dataclass
class Vocab:
    """Token texts and what is known of each; everything is indexed by token id, of which there are `len(texts)`."""

    model: str
    texts: list[str]
    ids: dict[str, int]
    scores: np.ndarray
    kinds: bytearray
    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    sep: int | None = None
    eot: int | None = None
    eom: int | None = None
    eog: set[int] = field(default_factory=set)
    fim: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_metadata(cls, md: Mapping[str, Any]) -> Vocab:
        """Reads and checks `tokenizer.ggml.*`. Raises TokenizerError when the vocabulary can't be used."""
        keys = KeyReader(md, TokenizerError)
        model = read_model(keys)
        texts = _read_texts(keys)
        ids = dict(zip(texts, range(len(texts))))
        if len(ids) != len(texts):
            _refuse_duplicates(texts, ids)
        vocab = cls(model, texts, ids, _read_scores(keys, len(texts)), _read_kinds(keys, len(texts)))
        vocab._read_special_ids(keys)
        return vocab

    def special_ids(self) -> list[int]:
        """Ids that text is searched for before anything else, longest text (in bytes) first, then by id."""
        found = np.flatnonzero(np.frombuffer(self.kinds, dtype=np.uint8) & SPECIAL).tolist()
        return sorted(found, key=lambda i: -len(self.texts[i].encode("utf-8", "replace")))

    def _read_special_ids(self, md: KeyReader) -> None:
        bos, eos, unk = _DEFAULT_IDS[self.model]
        if md.text(PREFIX + "pre", "") in ("chatglm-bpe", "glm4", "glm5"):
            bos = None
        wordpiece = self.model == "bert"  # whose [CLS] comes first and [SEP] last
        self.bos = self._special_id(md, ("cls_token_id", "bos_token_id") if wordpiece else ("bos_token_id",), bos)
        self.sep = self._special_id(md, ("seperator_token_id",), _BERT_SEPARATOR) if wordpiece else None  # spelt so
        self.eos = self._special_id(md, ("eos_token_id",), eos)
        self.unk = self._special_id(md, ("unknown_token_id",), unk)
        self.eot = self._named(self._special_id(md, ("eot_token_id",), None), _EOT)
        self.eom = self._named(self._special_id(md, ("eom_token_id",), None), _EOM)
        fim = {role: self._named(self._special_id(md, keys, None), texts) for role, (keys, texts) in _FIM.items()}
        self.fim = {role: token for role, token in fim.items() if token is not None}
        ends = [fim["pad"], fim["rep"], fim["sep"], self.eos, self.eot, self.eom]
        self.eog = {i for i in ends if i is not None} | {i for i in map(self._mark_control, _EOG) if i is not None}
        for text in _ALWAYS_SHOWN:
            if text in self.ids:
                self.kinds[self.ids[text]] = USER_DEFINED
        self._keep_going_after({"<|return|>", "<|call|>"}, "<|end|>", USER_DEFINED)
        self._keep_going_after({"<|return|>", "<|calls|>"}, "<|end|>", USER_DEFINED)
        self._keep_going_after({"<|flush|>", "<|call|>"}, "<|end|>", USER_DEFINED)
        self._keep_going_after({"<|flush|>", "<|calls|>"}, "<|end|>", USER_DEFINED)
        self._keep_going_after({"<|tool_response>"}, "</s>", NORMAL)

    def _special_id(self, md: KeyReader, keys: Iterable[str], default: int | None) -> int | None:
        if default is not None and default >= len(self.texts):
            default = None
        for key in keys:
            if PREFIX + key not in md.md:
                continue
            value = md.whole(PREFIX + key, low=-(2**63), high=2**64 - 1)
            if 0 <= value < len(self.texts):
                default = value
            else:
                log.warning("%s%s is %d, not in 0..%d; using %s", PREFIX, key, value, len(self.texts) - 1, default)
        return default

    def _named(self, known: int | None, texts: Iterable[str]) -> int | None:
        """The id given by the file, else that of the first of `texts` in the vocabulary, which becomes control.

        llama.cpp takes the first in the order of its hash map; a fixed order makes the answer the same everywhere.
        """
        if known is not None:
            return known
        return next((i for i in map(self._mark_control, texts) if i is not None), None)

    def _mark_control(self, text: str) -> int | None:
        token = self.ids.get(text)
        if token is not None:
            self.kinds[token] |= CONTROL
        return token

    def _keep_going_after(self, present: set[str], text: str, kind: int) -> None:
        """`text` does not end a generation in vocabularies whose end tokens include all of `present`."""
        token = self.ids.get(text)
        if token in self.eog and all(self.ids.get(p) in self.eog for p in present):
            self.eog.discard(token)
            self.kinds[token] = kind


def read_model(md: KeyReader) -> str:
    """`tokenizer.ggml.model`, if it is one that graphrt can use; TokenizerError otherwise."""
    model = md.text(PREFIX + "model", "")
    if model in ("", "no_vocab", "none"):
        raise TokenizerError(
            f"this file has no vocabulary ({PREFIX}model is {repr(model) if model else 'absent'}), so text "
            "can't be tokenized.\nGive token ids instead of text, for example [1, 2, 3]."
        )
    if model not in SUPPORTED_MODELS:
        known = ", ".join(f"{name} ({what})" for name, what in SUPPORTED_MODELS.items())
        raise TokenizerError(f"{PREFIX}model {brief(model)} is not supported.\nSupported: {known}.")
    return model


def _read_texts(md: KeyReader) -> list[str]:
    texts = md.strings(PREFIX + "tokens")
    if not texts:
        raise TokenizerError(f"{PREFIX}tokens must list the vocabulary, got 0 tokens; convert the model again.")
    if "" in texts:
        texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    return texts


def _refuse_duplicates(texts: Sequence[str], ids: Mapping[str, int]) -> None:
    """Two ids for one text make encoding ambiguous. Two that were not UTF-8 may both be U+FFFD: let pass."""
    for i, text in enumerate(texts):
        if ids[text] != i and "\ufffd" not in text:
            pair = f"{i} and {ids[text]} are both {brief(text)}"
            raise TokenizerError(f"{PREFIX}tokens must be distinct, but tokens {pair}; convert the model again.")


def _numbers(md: KeyReader, key: str, n: int) -> np.ndarray | None:
    values = md.numbers(PREFIX + key)
    if values is not None and len(values) < n:
        raise TokenizerError(f"{PREFIX}{key} must have one entry per token ({n}), got {len(values)}.")
    return None if values is None else values[:n]


def _read_scores(md: KeyReader, n: int) -> np.ndarray:
    numbers = _numbers(md, "scores", n)
    scores = np.zeros(n, dtype=np.float32) if numbers is None else numbers.astype(np.float32)
    if np.isnan(scores).any():
        raise TokenizerError(f"{PREFIX}scores must be numbers, got {int(np.isnan(scores).sum())} NaN.")
    return scores


def _read_kinds(md: KeyReader, n: int) -> bytearray:
    types = _numbers(md, "token_type", n)
    if types is None:
        return bytearray([NORMAL]) * n
    in_range = (types >= 0) & (types < len(_KIND_BITS))
    return bytearray(_KIND_BITS[np.where(in_range, types, 0).astype(np.intp)].tobytes())
