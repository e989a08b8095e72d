"""Tokenizers: llama.cpp's vectors, hand-made vocabularies with results worked out by hand, hostile files."""

from __future__ import annotations

import json
import lzma
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import DATA

from graphrt.errors import TokenizerError
from graphrt.models.tokenizer import Tokenizer
from graphrt.models.tokenizer_merge import merge, pair_merger, score_ranks, word_cuts
from graphrt.models.tokenizer_pre import RULES, find_rule, splitter

VOCABS = ("phi-3", "gpt-2")
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
Ids = list[int]


@cache
def stored(name: str) -> dict[str, Any]:
    return json.loads(lzma.decompress((DATA / f"vocab-{name}.json.xz").read_bytes()))


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_metadata(stored(name)["metadata"])


def metadata(model: str, entries: list[tuple[str, float, int]], **extra: Any) -> dict[str, Any]:
    """Metadata of a vocabulary of (text, score, type)."""
    md: dict[str, Any] = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [text for text, _, _ in entries],
        "tokenizer.ggml.scores": np.array([score for _, score, _ in entries], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array([kind for _, _, kind in entries], dtype=np.int32),
    }
    return md | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


SPM = [
    ("<unk>", 0.0, UNKNOWN),  # 0
    ("<s>", 0.0, CONTROL),  # 1
    ("</s>", 0.0, CONTROL),  # 2
    *((f"<0x{b:02X}>", 0.0, BYTE) for b in range(256)),  # 3 + byte
    ("▁", -9.0, NORMAL),  # 259
    ("a", -10.0, NORMAL),  # 260
    ("b", -11.0, NORMAL),  # 261
    ("ab", -1.0, NORMAL),  # 262
    ("aa", -2.0, NORMAL),  # 263
    ("▁a", -3.0, NORMAL),  # 264
    ("▁ab", -4.0, NORMAL),  # 265
    ("[X]", 0.0, USER),  # 266
    ("é", -12.0, NORMAL),  # 267
    ("ba", -1.0, NORMAL),  # 268: as high as "ab"
]


def spm(**extra: Any) -> Tokenizer:
    return Tokenizer.from_metadata(metadata("llama", SPM, **extra))


BPE_TOKENS = ["a", "b", "c", "Ġ", "ab", "bc", "Ġa", "abc", "Ã", "©", "1", "2", "12", "<|end|>", "[U]"]
BPE_TYPES = [NORMAL] * 13 + [CONTROL, USER]


def bpe(merges: list[str], **extra: Any) -> Tokenizer:
    tokens = [(text, 0.0, kind) for text, kind in zip(BPE_TOKENS, BPE_TYPES)]
    extra = {"pre": "gpt-2", "bos_token_id": 13, "eos_token_id": 13} | extra
    return Tokenizer.from_metadata(metadata("gpt2", tokens, merges=merges, **extra))


# --- llama.cpp's vectors


@pytest.mark.parametrize("name", VOCABS)
def test_vectors_of_llama_cpp(name: str) -> None:
    vectors = stored(name)["vectors"]
    assert len(vectors) == 46
    wrong = [text for text, ids in vectors if tokenizer(name).encode(text, add_bos=False) != ids]
    assert not wrong


@pytest.mark.parametrize("name", VOCABS)
def test_vectors_decode_to_their_text(name: str) -> None:
    t = tokenizer(name)
    for text, ids in stored(name)["vectors"]:
        assert t.decode(ids) == text


@pytest.mark.skipif("GRAPHRT_VOCAB_DIR" not in os.environ, reason="set GRAPHRT_VOCAB_DIR to llama.cpp's models folder")
def test_every_vocabulary_of_llama_cpp() -> None:
    gguf = pytest.importorskip("graphrt.models.gguf")
    checked = 0
    for path in sorted(Path(os.environ["GRAPHRT_VOCAB_DIR"]).glob("ggml-vocab-*.gguf")):
        vectors = path.with_name(path.name + ".inp")
        if not vectors.exists():
            continue
        t = Tokenizer.from_metadata(gguf.GGUFFile.open(path).metadata)
        with vectors.open(encoding="utf-8", newline="") as file:
            texts = file.read().split("\n__ggml_vocab_test__\n")
        wanted = path.with_name(path.name + ".out").read_text().split("\n")
        for text, line in zip(texts, wanted):
            assert t.encode(text, add_bos=False) == [int(i) for i in line.split()], (path.name, text)
        checked += 1
    assert checked >= 12


# --- SentencePiece by hand


def test_spm_puts_bos_and_a_space_in_front() -> None:
    assert spm().encode("ab") == [1, 265]
    assert spm().encode("ab", add_bos=False) == [265]
    assert spm(add_bos_token=False).encode("ab") == [265]
    assert spm(add_bos_token=False).encode("ab", add_bos=True) == [1, 265]
    assert spm(add_space_prefix=False).encode("ab") == [1, 262]
    assert spm().encode("") == [1]


def test_spm_adds_eos_when_the_file_says_so() -> None:
    assert spm(add_eos_token=True).encode("ab") == [1, 265, 2]
    assert spm(add_eos_token=True).encode("ab", add_bos=False) == [265]


def test_spm_merges_the_highest_score_first() -> None:
    # ▁aab: "ab" (-1) before "aa" (-2) and "▁a" (-3); then "▁a" and "ab" stay, as "▁aab" is no token
    assert spm().encode("aab", add_bos=False) == [264, 262]


def test_spm_takes_the_leftmost_of_equal_scores() -> None:
    # aba: "ab" and "ba" are equally good, the left one wins; bab likewise
    t = spm(add_space_prefix=False)
    assert t.encode("aba", add_bos=False) == [262, 260]
    assert t.encode("bab", add_bos=False) == [268, 261]


def test_spm_falls_back_to_bytes() -> None:
    t = spm(add_space_prefix=False)
    assert t.encode("aé", add_bos=False) == [260, 267]
    assert t.encode("ü", add_bos=False) == [3 + 0xC3, 3 + 0xBC]
    assert t.decode([3 + 0xC3, 3 + 0xBC]) == "ü"
    assert t.decode([3 + 0xC3]) == "\ufffd"


def test_spm_space_prefix_after_special_tokens() -> None:
    t = spm()
    # the space comes at the start and behind every special token, not behind other text
    assert t.encode("ab[X]ab", add_bos=False) == [265, 266, 265]
    assert t.encode("</s>ab", add_bos=False, parse_special=True) == [2, 265]
    assert t.encode("ab</s>", add_bos=False, parse_special=True) == [265, 2]


def test_spm_without_a_byte_token_says_which() -> None:
    tokens = [token for token in SPM if token[0] != "<0xC3>"]
    with pytest.raises(TokenizerError, match="<0xC3>"):
        Tokenizer.from_metadata(metadata("llama", tokens)).encode("ü")


def test_control_tokens_are_text_unless_asked_for() -> None:
    t = spm(add_space_prefix=False)
    assert t.encode("<s>", add_bos=False, parse_special=True) == [1]
    assert t.encode("<s>", add_bos=False) == [3 + ord(c) for c in "<s>"]


def test_the_longest_special_token_wins() -> None:
    tokens = [*SPM, ("[X][X]", 0.0, USER), ("X][", 0.0, USER)]
    t = Tokenizer.from_metadata(metadata("llama", tokens, add_space_prefix=False))
    assert t.encode("[X][X][X]", add_bos=False) == [269, 266]


def test_pieces() -> None:
    t = spm()
    assert t.piece(265) == b" ab"
    assert t.piece(3 + 0xC3) == b"\xc3"
    assert (t.piece(1), t.piece(1, special=False)) == (b"<s>", b"")
    assert (t.piece(266), t.piece(266, special=False)) == (b"[X]", b"[X]")
    assert t.decode([1, 265]) == "ab"
    assert t.decode([1, 265], special=True) == "<s>ab"
    for bad in (-1, 269):
        with pytest.raises(TokenizerError, match="token id must be 0 to 268"):
            t.piece(bad)


# --- byte-level BPE by hand


def test_bpe_merges_the_lowest_rank_first() -> None:
    assert bpe(["a b", "b c"]).encode("abc") == [4, 2]
    assert bpe(["b c", "a b"]).encode("abc") == [0, 5]
    assert bpe(["a b", "ab c"]).encode("abc") == [7]


def test_bpe_takes_the_leftmost_of_equal_ranks() -> None:
    assert bpe(["a b", "b a"]).encode("bab") == [1, 4]
    assert pair_merger({"a": 0, "aa": 1}, ["a a"])("aaa") == [1, 0]


def test_bpe_words_do_not_merge_with_each_other() -> None:
    assert bpe(["Ġ a", "a b"]).encode("a a") == [0, 6]
    assert bpe(["a b"], pre="smollm").encode("12") == [10, 11]
    assert bpe(["1 2"]).encode("12") == [12]


def test_bpe_ignore_merges_takes_a_whole_word() -> None:
    assert bpe(["a b"]).encode("abc") == [4, 2]
    assert bpe(["a b"], pre="llama-bpe", add_bos_token=False).encode("abc") == [7]


def test_bpe_bos_defaults() -> None:
    assert bpe(["a b"]).encode("ab") == [4]
    assert bpe(["a b"], pre="llama-bpe").encode("ab") == [13, 4]
    assert bpe(["a b"], add_bos_token=True, add_eos_token=True).encode("ab") == [13, 4, 13]


def test_bpe_spells_bytes() -> None:
    t = bpe(["a b"])
    assert t.encode("é") == [8, 9]
    assert t.decode([8, 9]) == "é"
    assert (t.decode([8]), t.piece(8)) == ("\ufffd", b"\xc3")
    # what the vocabulary can't spell is left out, as in llama.cpp
    assert t.encode("a?b") == [0, 1]


def test_bpe_first_of_two_equal_merges_counts_and_malformed_ones_do_not() -> None:
    assert bpe(["a b", "b c", "a b"]).encode("abc") == [4, 2]
    assert bpe(["ab", "", " ", "  ", "a ", " b", "a b c", "a  b"]).encode("abc") == [0, 1, 2]
    assert bpe(["ab", "", " ", "a b"]).encode("ab") == [4]


def test_bpe_merges_through_pieces_that_are_no_tokens() -> None:
    # "ca" is no token: it takes the a from "ab", then becomes a token with what follows, or ends as its characters
    assert bpe(["c a", "a b"]).encode("cab") == [2, 0, 1]
    md = metadata("gpt2", [(t, 0.0, NORMAL) for t in ("a", "b", "c", "ab", "cab")], pre="gpt-2")
    assert Tokenizer.from_metadata(md | {"tokenizer.ggml.merges": ["c a", "a b", "ca b"]}).encode("cab") == [4]


def test_raw_bpe_falls_back_to_bytes() -> None:
    tokens = ["a", "▁", "a▁", "\n\n", "<0xC3>", "<0xBC>", "\n"]
    md = metadata("gemma4", [(text, 0.0, NORMAL) for text in tokens], merges=["a ▁", "\n \n"])
    t = Tokenizer.from_metadata(md)
    # ü as its bytes; é lacks one of its two, which is left out
    assert t.encode("a üa\n\né", add_bos=False) == [2, 4, 5, 0, 3, 4]


def test_text_that_was_not_utf_8_in_the_file_is_never_met() -> None:
    tokens = [(text, 0.0, NORMAL) for text in ("a", "\udcff", "a\udcff", "b", "ab")]
    t = Tokenizer.from_metadata(metadata("gpt2", tokens, pre="gpt-2", merges=["a \udcff", "a b"]))
    assert t.encode("ab") == [4]
    assert t.piece(2) == b"a\xff"


def test_user_defined_tokens_are_found_in_plain_text() -> None:
    t = bpe(["a b"])
    assert t.encode("a[U]b") == [0, 14, 1]
    assert t.encode("a<|end|>b", parse_special=True) == [0, 13, 1]


# --- the pre-tokenizers


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'll  pay $1234 now.\n\n x", ["I", "'ll", " ", " pay", " $", "1234", " now", ".", "\n\n", " x"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("llama-bpe", "HE'LL 12345!\n\n ok", ["HE", "'LL", " ", "123", "45", "!\n\n", " ok"]),
        ("qwen2", "x 123  y", ["x", " ", "1", "2", "3", " ", " y"]),
        ("qwen35", "हिन्दी", ["हिन्दी"]),
        ("qwen2", "हि", ["ह", "ि"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("falcon", "a,b 12345", ["a", ",", "b", " ", "123", "45"]),
        ("default", "x<y 12345", ["x", "<", "y", " ", "123", "45"]),
        ("bloom", "Hi, you", ["Hi", ",", " you"]),
        ("deepseek-llm", "ab 12\n", ["ab", " ", "12", "\n"]),
        ("deepseek-coder", "x 12", ["x", " ", "1", "2"]),
        ("deepseek-v3", "x=1234 漢字kana", ["x", "=", "123", "4", " ", "漢字", "kana"]),
        ("kimi-k2", "漢字abc", ["漢字", "abc"]),
        ("superbpe", "n 1234567", ["n ", "1", "234", "567"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ],
)
def test_words(pre: str, text: str, words: list[str]) -> None:
    assert list(splitter(find_rule(pre))(text)) == words


@given(st.sampled_from(sorted(RULES)), st.text(max_size=40))
def test_words_put_together_are_the_text(pre: str, text: str) -> None:
    words = list(splitter(find_rule(pre))(text))
    assert "".join(words) == text
    assert all(words)


def test_unknown_pre_names_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"'llama-9' is unknown(?s:.*)llama-bpe"):
        bpe(["a b"], pre="llama-9")


def test_missing_pre_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert bpe(["a b"], pre="").pre == "default"
    assert "pre is missing" in caplog.text


# --- merging


def slow_merge(symbols: list[str], ranks: dict[str, int], separator: str = "") -> list[str]:
    """The definition: again and again, the pair of lowest rank, the leftmost of equals."""
    while True:
        pairs = [(ranks.get(a + separator + b), i) for i, (a, b) in enumerate(zip(symbols, symbols[1:]))]
        ranked = [(rank, i) for rank, i in pairs if rank is not None]
        if not ranked:
            return symbols
        _, i = min(ranked)
        symbols = [*symbols[:i], symbols[i] + symbols[i + 1], *symbols[i + 2 :]]


TEXTS = st.lists(st.text("ab▁", min_size=1, max_size=4), min_size=1, max_size=12, unique=True)


@given(TEXTS, st.lists(st.integers(-3, 0), min_size=12, max_size=12), st.text("ab▁", max_size=24))
def test_merge_is_the_definition(texts: list[str], scores: list[int], text: str) -> None:
    ranks = score_ranks(texts, np.array(scores[: len(texts)], dtype=np.float32))
    assert merge(list(text), ranks) == slow_merge(list(text), ranks)


def test_a_pair_that_waits_twice_merges_once() -> None:
    """ "ab" waits; "bc" comes first and makes of it "abc", of the same rank, with which the word ends."""
    assert merge(list("abc"), {"bc": 0, "ab": 1, "abc": 1}) == ["abc"]
    assert merge(list("abcd"), {"bc": 0, "ab": 1, "abc": 1}) == ["abc", "d"]
    assert merge(list("xabc"), {"bc": 0, "ab": 1, "abc": 1, "xabc": 1}) == ["xabc"]


@given(TEXTS, st.lists(st.integers(-3, 0), min_size=12, max_size=12), st.text("ab▁", max_size=24))
def test_cutting_into_words_changes_nothing(texts: list[str], scores: list[int], text: str) -> None:
    ranks = score_ranks(texts, np.array(scores[: len(texts)], dtype=np.float32))
    words = list(word_cuts(texts)(text))
    assert [s for word in words for s in merge(list(word), ranks)] == merge(list(text), ranks)


PAIRS = ["a b", "b a", "a a", "ab a", "a ba", "ab ab", "a c", "c é", "b cé", "ab c"]


@given(
    st.lists(st.sampled_from(PAIRS)),
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "aba", "cé", "abc"]), min_size=1, unique=True),
    st.text("abcé", max_size=24),
)
def test_bpe_merge_is_the_definition(merges: list[str], tokens: list[str], text: str) -> None:
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {pair: merges.index(pair) for pair in merges}
    assert pair_merger(ids, merges)(text) == [ids.get(s, s) for s in slow_merge(list(text), ranks, " ")]


@pytest.mark.parametrize("text", ["a" * 200_000, "abcdefghij" * 20_000, " " * 200_000, "1" * 200_000])
@pytest.mark.parametrize("name", VOCABS)
def test_long_words_are_not_quadratic(name: str, text: str) -> None:
    ids = tokenizer(name).encode(text, add_bos=False)  # about 0.5 s; if quadratic, hours, which the time limit ends
    assert tokenizer(name).decode(ids) == text


# --- round trips and streaming


@pytest.mark.parametrize("name", VOCABS)
@given(text=st.text(max_size=60))
def test_round_trip(name: str, text: str) -> None:
    t = tokenizer(name)
    assert t.decode(t.encode(text)) == text


def test_lone_surrogates_become_replacement_characters() -> None:
    t = tokenizer("gpt-2")
    assert t.decode(t.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("name", VOCABS)
@given(ids=st.lists(st.integers(0, 32000), max_size=30))
def test_stream_gives_the_text_of_any_ids(name: str, ids: Ids) -> None:
    t = tokenizer(name)
    stream = t.stream()
    pushed = [stream.push(i) for i in ids]
    assert "".join(pushed) + stream.flush() == b"".join(t.piece(i, False) for i in ids).decode("utf-8", "replace")
    assert stream.flush() == ""


def test_stream_holds_back_half_a_character() -> None:
    t = spm()
    stream = t.stream()
    assert [stream.push(3 + b) for b in "🙂".encode()] == ["", "", "", "🙂"]
    assert stream.push(3 + 0xF0) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(262) == "ab"
    assert t.stream(special=True).push(1) == "<s>"


# --- what ends a generation


def with_ends(*texts: str, **extra: Any) -> Tokenizer:
    tokens = [*((text, 0.0, NORMAL) for text in texts), ("a", 0.0, NORMAL), ("end", 0.0, CONTROL)]
    extra = {"eos_token_id": len(texts) + 1, "add_bos_token": False} | extra
    return Tokenizer.from_metadata(metadata("llama", tokens, **extra))


def test_eog_has_eos_and_known_texts() -> None:
    t = with_ends("<|im_end|>", "<|eom_id|>", "<fim_pad>")
    assert t.eog_ids == {0, 1, 2, 4}
    assert (t.eos_id, t.eot_id, t.eom_id) == (4, 0, 1)
    assert t.is_control(0) and t.is_control(2) and not t.is_control(3)
    assert t.is_eog(0) and not t.is_eog(3)


def test_eot_of_the_file_comes_first() -> None:
    assert with_ends("<|im_end|>", "<|eot_id|>", eot_token_id=2).eot_id == 2


def test_gpt_oss_end_is_not_the_end() -> None:
    t = with_ends("<|return|>", "<|call|>", "<|end|>", "<|channel|>")
    assert t.eog_ids == {0, 1, 5}
    assert t.piece(2, special=False) == b"<|end|>" and t.piece(3, special=False) == b"<|channel|>"


@pytest.mark.parametrize("ends", [("<|return|>", "<|calls|>"), ("<|flush|>", "<|call|>"), ("<|flush|>", "<|calls|>")])
def test_other_names_of_these_ends_mean_the_same(ends: tuple[str, str]) -> None:
    assert with_ends(*ends, "<|end|>").eog_ids == {0, 1, 4}
    for end in ends:
        assert with_ends(end, "<|end|>").eog_ids == {0, 1, 3}, "one of them alone does not"


def test_gemma4_has_an_ordinary_s() -> None:
    assert with_ends("<|tool_response>", "</s>").eog_ids == {0, 3}


# --- hostile files


def test_no_vocabulary() -> None:
    for md in ({}, {"tokenizer.ggml.model": "no_vocab"}, {"tokenizer.ggml.model": "none"}):
        with pytest.raises(TokenizerError, match="no vocabulary"):
            Tokenizer.from_metadata(md)


@pytest.mark.parametrize("model", ["t5", "rwkv", "plamo2", "gpt3"])
def test_unsupported_models_name_the_supported_ones(model: str) -> None:
    with pytest.raises(TokenizerError, match=r"not supported(?s:.*)llama(?s:.*)gpt2"):
        Tokenizer.from_metadata({"tokenizer.ggml.model": model})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "must list the vocabulary, got 0 tokens"),
        ({"tokens": "abc"}, "must be an array of strings, got the str .abc."),
        ({"tokens": [1, 2]}, "must be an array of strings"),
        ({"tokens": ["a"] * len(SPM)}, "must be distinct, but tokens 0 and 268"),
        ({"scores": np.zeros(3, np.float32)}, "one entry per token .269., got 3"),
        ({"scores": np.full(len(SPM), np.nan, np.float32)}, "got 269 NaN"),
        ({"scores": ["a"] * len(SPM)}, "must be an array of numbers"),
        ({"token_type": np.zeros(3, np.int32)}, "one entry per token"),
        ({"token_type": np.zeros((3, 3), np.int32)}, "must be an array of numbers"),
        ({"bos_token_id": "1"}, "bos_token_id must be an integer, got the str '1'"),
    ],
)
def test_malformed_arrays(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        spm(**change)


def test_missing_tokens_and_merges() -> None:
    with pytest.raises(TokenizerError, match="tokens must list the vocabulary"):
        Tokenizer.from_metadata({"tokenizer.ggml.model": "llama"})
    with pytest.raises(TokenizerError, match="merges must list"):
        bpe([])


def test_ids_out_of_range_give_the_default(caplog: pytest.LogCaptureFixture) -> None:
    t = spm(bos_token_id=10**6, eos_token_id=-1)
    assert (t.bos_id, t.eos_id) == (1, 2)
    assert "not in 0..268" in caplog.text


def test_a_default_outside_the_vocabulary_is_dropped() -> None:
    t = Tokenizer.from_metadata(metadata("llama", [("a", 0.0, NORMAL)], add_space_prefix=False))
    assert (t.bos_id, t.eos_id, t.unk_id) == (None, None, 0)
    assert t.encode("a", add_bos=False) == [0]
    with pytest.raises(TokenizerError, match="no BOS token"):
        t.encode("a")


def test_unknown_token_types_render_as_nothing() -> None:
    t = Tokenizer.from_metadata(metadata("llama", [("a", 0.0, 99), ("b", 0.0, UNUSED), ("<0xZZ>", 0.0, BYTE)]))
    assert [t.piece(i) for i in range(3)] == [b"", b"", b""]


def test_empty_token_texts_get_a_name() -> None:
    t = Tokenizer.from_metadata(metadata("llama", [("a", 0.0, NORMAL), ("", 0.0, NORMAL)]))
    assert t.texts[1] == "[EMPTY_1]"


def test_phi_3_special_tokens_swallow_spaces() -> None:
    t = tokenizer("phi-3")
    end = t.texts.index("<|end|>")
    spaced = t.encode("<|end|> \n a", add_bos=False, parse_special=True)
    assert spaced == t.encode("<|end|>a", add_bos=False, parse_special=True) and spaced[0] == end


@pytest.mark.parametrize(
    ("model", "mask"),
    [({"general.architecture": "jina-bert-v3"}, "<mask>"), ({"general.name": "Modern-BERT base"}, "[MASK]")],
)
def test_a_mask_swallows_the_spaces_before_it(model: dict[str, str], mask: str) -> None:
    """And none of those behind it, nor any elsewhere."""
    md = metadata("llama", [*SPM, (mask, 0.0, CONTROL)], add_space_prefix=False)
    t, plain = Tokenizer.from_metadata(md | model), Tokenizer.from_metadata(md)

    def pieces(tokenizer: Tokenizer, text: str) -> list[bytes]:
        return [tokenizer.piece(i) for i in tokenizer.encode(text, add_bos=False, parse_special=True)]

    name = mask.encode()
    assert pieces(t, f" a \n {mask}  b {mask}") == [b" a", name, b" ", b" ", b"b", name]
    assert pieces(t, f"{mask} a ") == [name, b" a", b" "]
    assert pieces(plain, f"a {mask}b") == [b"a", b" ", name, b"b"]


def test_special_tokens_are_sought_by_their_bytes() -> None:
    """The one of more bytes is found first, though it has fewer characters."""
    t = Tokenizer.from_metadata(metadata("llama", [*SPM, ("abba", 0.0, USER), ("aéé", 0.0, USER)]))
    assert t.texts[269:] == ["abba", "aéé"] and t.encode("abbaéé", add_bos=False)[-1] == 270


def test_of_special_tokens_that_overlap_the_longer_one_is_cut_first() -> None:
    """Whichever begin alike: the longest of all, which the text has not, shares its beginning with the shortest."""
    extra = [(text, 0.0, USER) for text in ("abcdefghi", "dxyzuv", "abcd")]
    t = Tokenizer.from_metadata(metadata("llama", [*SPM, *extra], add_space_prefix=False))
    ids = t.encode("abcdxyzuv", add_bos=False)
    assert ids[-1] == t.texts.index("dxyzuv") and t.texts.index("abcd") not in ids
