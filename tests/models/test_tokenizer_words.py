"""Each pre-tokenizer and WordPiece against llama.cpp's ids, on small vocabularies in which a cut elsewhere shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import TESTS
from support.tiny_vocab import PRE, TEXTS, wordpiece, words

from graphrt.errors import TokenizerError
from graphrt.models.tokenizer import Tokenizer

GOLDEN: dict[str, list[list[int]]] = json.loads((TESTS / "golden" / "words.json").read_text())


def built(keys: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata({f"tokenizer.ggml.{key}": value for key, value in keys.items()})


@pytest.mark.parametrize("pre", PRE)
def test_words_are_llama_cpps(pre: str) -> None:
    tokenizer = built(words() | {"pre": pre})
    for text, ids in zip(TEXTS, GOLDEN[pre], strict=True):
        assert tokenizer.encode(text) == ids, text


def test_every_pre_tokenizer_shows() -> None:
    """Only rules that are one and the same cut all texts alike: a rule taken for another would be seen."""
    alike: dict[str, set[str]] = {}
    for pre in PRE:
        bos = built(words() | {"pre": pre}).add_bos
        alike.setdefault(json.dumps([ids[bos:] for ids in GOLDEN[pre]]), set()).add(pre)
    groups = [group for group in alike.values() if len(group) > 1]
    assert groups == [{"gpt-2", "mpt", "olmo"}, {"refact", "starcoder", "command-r"}, {"qwen2", "stablelm2"}]


@pytest.mark.parametrize(("name", "keys"), [("bert", {}), ("bert-cased", {"normalizer.lowercase": False})])
def test_wordpiece_is_llama_cpps(name: str, keys: dict[str, Any]) -> None:
    tokenizer = built(wordpiece() | keys)
    for text, ids in zip(TEXTS, GOLDEN[name], strict=True):
        assert tokenizer.encode(text) == ids, text


def test_wordpiece_by_hand() -> None:
    tokenizer = built(wordpiece())
    assert tokenizer.model == "bert" and tokenizer.pre is None
    texts = [tokenizer.texts[i] for i in tokenizer.encode("Hellö  wórldor\x07!")]
    assert texts == ["[CLS]", "▁hello", "▁world", "or", "▁!", "[SEP]"]
    assert tokenizer.encode("hello", add_bos=False) == tokenizer.encode("hello")[1:-1]
    assert tokenizer.encode("helloЖ", add_bos=False) == [1]  # a word that can't be spelt to its end is unknown
    assert tokenizer.encode("[MASK]", parse_special=True) == [2, 4, 3]
    assert tokenizer.encode("[MASK]")[1:3] != [4, 3]
    assert tokenizer.decode(tokenizer.encode("hello world", add_bos=False)) == " hello world"


def test_wordpiece_without_its_special_tokens_is_refused() -> None:
    few = {"model": "bert", "tokens": ["a", "b"], "token_type": [1, 1]}
    with pytest.raises(TokenizerError, match="no UNK token"):
        built(few)
    with pytest.raises(TokenizerError, match="no BOS token"):
        built(few | {"unknown_token_id": 0}).encode("a")
