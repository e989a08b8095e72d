"""GGUF files from a stranger: what their keys, names and sizes may not do. The fuzzer (tests/fuzz/gguf.py) looks for
more; here is what was once found."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz.gguf_bases import Spec, make_spec, specs
from support import tiny, tiny_vocab
from support.gguf_files import KV
from support.tiny_archs import Tiny, chosen, experts

from graphrt import ops
from graphrt.backend import get_backend
from graphrt.errors import ArchError, GraphError, GraphrtError, SessionError, TokenizerError
from graphrt.models import tokenizer_pre
from graphrt.models.gguf import GGUFFile
from graphrt.models.hparam_sizes import DEFAULT_CTX, MIN_CACHE, check_sizes, default_ctx
from graphrt.models.key_reader import KeyReader
from graphrt.models.model import Model, load
from graphrt.models.tokenizer import Tokenizer
from graphrt.ops import RopeParams
from graphrt.printing import MOST_OF_MESSAGE, brief, brief_name, printable
from graphrt.tensor import new_input
from graphrt.tools import cli

ESCAPE, TURN = "\x1b]0;owned\x07\x9b2J", "\u202eevil\u2066"
LONG = "\x1b" + "A" * 300_000


def changed(name: str, rows: list[KV]) -> Spec:
    """That tiny file with keys replaced or added."""
    spec = next(s for s in specs() if s.name == name).copy()
    keys = {row[0] for row in rows}
    spec.kv = [row for row in spec.kv if row[0] not in keys] + rows
    return spec


def model(spec: Spec) -> Model:

    return Model(GGUFFile.from_bytes(spec.bytes()), [get_backend("cpu")])


# ---- keys: type, finite, range, length


@pytest.mark.parametrize(
    ("name", "key", "kind", "value"),
    [
        ("llama", "attention.head_count", "f32", float("inf")),
        ("llama", "attention.head_count", "array:f32", [float("nan"), 1.0]),
        ("llama", "attention.head_count_kv", "array:i64", [2, 1 << 40]),
        ("llama", "attention.head_count_kv", "array:u32", []),
        ("llama", "feed_forward_length", "array:string", ["96", "96"]),
        ("llama", "block_count", "u32", 10**9),
        ("llama", "block_count", "string", "2"),
        ("llama", "context_length", "i64", -1),
        ("llama", "context_length", "u64", 1 << 62),
        ("llama", "rope.freq_base", "f32", float("nan")),
        ("llama", "rope.freq_base", "f64", 1e300),
        ("llama-yarn", "rope.scaling.factor", "f64", 5e-324),
        ("llama-yarn", "rope.scaling.factor", "f32", 4.54e-5),
        ("llama-yarn", "rope.scaling.factor", "f32", float("inf")),
        ("llama-yarn", "rope.scaling.attn_factor", "f32", float("nan")),
        ("llama-yarn", "rope.scaling.original_context_length", "u64", 1 << 63),
        ("llama-yarn", "rope.scaling.yarn_beta_fast", "f32", 0.0),
        ("llama-yarn", "rope.scaling.yarn_beta_slow", "f32", -1.0),
        ("llama-yarn", "rope.scaling.type", "array:string", ["yarn"]),
        ("deepseek2", "rope.scaling.yarn_log_multiplier", "f32", float("inf")),
        ("deepseek2", "expert_weights_norm", "array:bool", [True]),
        ("gemma2", "attention.sliding_window", "u64", 1 << 63),
        ("gemma2", "attention.sliding_window_pattern", "array:string", ["a", "b", "c"]),
        ("gemma3", "rope.freq_base_swa", "f32", 0.0),
        ("bert", "attention.causal", "string", "true"),
        ("bert", "pooling_type", "f32", 2.0),
    ],
)
def test_a_key_that_is_no_such_value_is_named(name: str, key: str, kind: str, value: Any) -> None:
    arch = next(s.arch for s in specs() if s.name == name)
    with pytest.raises(ArchError, match=key.rsplit(".", 1)[-1]):
        model(changed(name, [(f"{arch}.{key}", kind, value)]))


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("add_bos_token", "array:bool", []),
        ("add_bos_token", "array:f32", [1.0, 2.0]),
        ("add_eos_token", "string", "yes"),
        ("model", "array:string", ["llama"]),
        ("model", "u32", 3),
        ("pre", "array:i32", [1, 2]),
        ("bos_token_id", "array:u32", [1, 2]),
        ("eos_token_id", "bool", 1),
        ("eot_token_id", "f32", float("nan")),
        ("unknown_token_id", "string", "0"),
        ("add_space_prefix", "array:string", ["a"]),
    ],
)
def test_a_key_of_the_tokenizer_that_is_no_such_value_is_named(key: str, kind: str, value: Any) -> None:
    found = model(changed("gemma3", [(f"tokenizer.ggml.{key}", kind, value)]))
    with pytest.raises(TokenizerError, match=f"tokenizer.ggml.{key}"):
        found.tokenizer  # noqa: B018


@pytest.mark.parametrize("key", ["general.name", "tokenizer.ggml.pre"])
def test_a_name_that_special_tokens_go_by_is_a_string(key: str) -> None:
    with pytest.raises(TokenizerError, match=key):
        Tokenizer.from_metadata(GGUFFile.from_bytes(changed("gemma3", [(key, "array:i32", [1, 2])]).bytes()).metadata)


@pytest.mark.parametrize("exact", [True, False])
def test_a_frequency_factor_of_zero_is_an_infinity(exact: bool) -> None:
    """rope_freqs.weight is data, which nobody checks: it gives NaN, as it does in llama.cpp, and no traceback."""
    spec = changed("llama", [])
    at = next(i for i, t in enumerate(spec.tensors) if t[0] == "rope_freqs.weight")
    spec.tensors[at] = (*spec.tensors[at][:3], np.array([0.0, -0.0] + [1.0] * 6, np.float32).tobytes())
    found = Model(GGUFFile.from_bytes(spec.bytes()), [get_backend("cpu", exact=exact)])
    assert np.isnan(found.logits([1, 2])).any()


def test_a_rotation_needs_numbers_that_can_be_taken_logarithms_of() -> None:
    x, positions = new_input("f32", 64, 1, 2, name="x"), new_input("i32", 2, name="positions")
    for wrong in ({"beta_fast": 0.0}, {"beta_slow": -1.0}, {"freq_scale": float("inf")}, {"attn_factor": float("nan")}):
        with pytest.raises(GraphError, match="must be finite|over 0, from"):
            ops.rope(x, positions, RopeParams(64, ext_factor=1.0, n_ctx_orig=64, **wrong))  # type: ignore[arg-type]


def test_a_reader_takes_what_fits() -> None:
    keys = KeyReader({"i": 3, "n": np.int64(4), "f": 0.5, "b": True, "s": "x", "a": [1, 2], "t": ["x"]}, ArchError)
    assert (keys.whole("i"), keys.whole("n"), keys.whole("none", 7), keys.real("i"), keys.real("f")) == (
        3,
        4,
        7,
        3,
        0.5,
    )
    assert keys.flag("b") and keys.text("s") == "x" and keys.strings("t") == ["x"] and keys.strings("none") == []
    numbers = keys.numbers("a")
    assert numbers is not None and numbers.tolist() == [1, 2] and keys.numbers("none") is None
    for wrong in (lambda: keys.whole("b"), lambda: keys.real("b"), lambda: keys.flag("i"), lambda: keys.text("i"),
                  lambda: keys.numbers("t"), lambda: keys.strings("s"), lambda: keys.whole("i", high=2)):  # fmt: skip
        with pytest.raises(ArchError, match="must be"):
            wrong()
    with pytest.raises(ArchError, match="'none' .a bool. is missing"):
        keys.flag("none")


def test_an_unread_array_of_strings_takes_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    """It was made an array of numpy's, every string as wide as the longest: 11 GB for a file of 1 MB."""
    caplog.set_level(logging.WARNING)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model(changed("llama", [("llama.unheard", "array:string", ["a" * 200_000, *["b"] * 60_000])]))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    assert "llama.unheard" in caplog.messages[0] and len(caplog.messages[0]) < 300


# ---- sizes


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"d": 8192, "heads": (1, 1)}, "elements in a head"),
        ({"d": 2, "heads": (4000, 4000)}, "heads in a layer"),
        ({"d": 64, "heads": (300, 300)}, "all heads of a layer, with an embedding of 2"),
        ({"ff": 40_000}, "a feed-forward"),
        ({"layers": 100, "experts": True}, "experts for a token in all layers"),
    ],
)
def test_sizes_that_no_model_has_are_refused(sizes: dict[str, Any], said: str) -> None:
    """A file of 2 MB that is consistent, and made a run of 16 s and gigabytes."""

    sizes = {"n": 2, "heads": (1, 1), "ff": 4, "keys": {}} | sizes
    if sizes.pop("experts", False):
        sizes |= {"experts": experts(2, 4, 64), "keys": chosen(64, 64)}

    with pytest.raises(ArchError, match=said):
        model(make_spec("wide", *Tiny("llama", **sizes).model(), tiny.spm()))


def test_a_default_context_takes_no_more_than_weights_or_64_mb() -> None:

    row = Tiny("llama", n=8, d=512, heads=(8, 8), ff=4, layers=6, keys={"context_length": 10**6})
    found = model(make_spec("wide", *row.model(), tiny.spm()))
    session = found.session()
    assert session.n_ctx < DEFAULT_CTX and session.cache.nbytes <= MIN_CACHE
    hp = found.network.hp
    assert hp.n_ctx_train == 10**6 and session.n_ctx == default_ctx(hp)
    check_sizes(hp)


# ---- what is printed


@pytest.mark.parametrize("text", [ESCAPE, TURN, LONG, "\ud800", "a\nb\r\x00"])
def test_text_of_files_is_escaped_and_cut(text: str) -> None:
    assert brief(text).isprintable() and len(brief(text)) <= 80
    assert brief_name(text).isprintable() and len(brief_name(text)) <= 80
    assert printable(text).isprintable()
    said = str(GraphrtError(f"first {text} x\nsecond"))
    assert all(c.isprintable() or c == "\n" for c in said) and len(said) <= MOST_OF_MESSAGE


def test_texts_that_are_plain_stay() -> None:
    assert printable("caf\u00e9 \u65e5\u672c") == "caf\u00e9 \u65e5\u672c" and brief("a'b") == '"a\'b"'
    assert str(GraphrtError("one\ntwo")) == "one\ntwo" and brief_name("blk.0.x") == "blk.0.x"


HOSTILE: dict[str, list[KV]] = {
    "architecture": [("general.architecture", "string", LONG)],
    "name": [("general.name", "string", ESCAPE + TURN)],
    "activation": [("llama.hidden_activation", "string", LONG)],
    "scaling": [("llama.rope.scaling.type", "string", LONG)],
    "key": [(f"llama.{ESCAPE}{TURN}{'k' * 60_000}", "u32", 1)],
    "value": [("llama.unheard", "string", LONG + TURN)],
    "tokenizer": [("tokenizer.ggml.model", "string", LONG)],
    "pre": [("tokenizer.ggml.pre", "string", LONG + TURN)],
    "tokens": [("tokenizer.ggml.tokens", "array:string", [ESCAPE, ESCAPE])],
    "many keys": [(f"llama.{ESCAPE}{i}", "u32", 1) for i in range(3000)],
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("verb", ["info", "info --json", "tokenize", "run"])
def test_nothing_raw_or_long_is_printed(
    what: str, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "m.gguf").write_bytes(changed("llama", HOSTILE[what]).bytes())
    more = {"tokenize": ["-p", "he"], "run": ["-p", "he", "-n", "2", "--raw"]}.get(verb, [])
    verb, *flags = verb.split()
    cli.main([verb, str(tmp_path / "m.gguf"), *flags, *more])
    out, err = capsys.readouterr()
    for text in (err, *caplog.messages, *([out] if verb != "run" else [])):
        assert all(c.isprintable() or c == "\n" for c in text)
    assert all(len(text) < 2500 for text in (err, *caplog.messages)), "cut where it is made, before errors.py does"


def test_tensors_that_nobody_asked_for_are_told_briefly() -> None:
    spec = changed("llama", [])
    spec.tensors += [(f"{ESCAPE}{i}", "f32", (0,), b"") for i in range(20_000)]
    spec.tensors += [(f"blk.{2 * i}.x.weight", "f32", (0,), b"") for i in range(5000)]
    with pytest.raises(ArchError, match="25000 are not") as caught:
        model(spec)
    assert len(str(caught.value)) < 1500 and "\x1b" not in str(caught.value)


# ---- prompts


@pytest.mark.parametrize("text", ["hello sea " * 200_000, "a" * 2_000_000, " " * 2_000_000, "\n\u65e5" * 500_000])
@pytest.mark.parametrize("name", ["gemma3", "llama", "bert"])
def test_a_prompt_of_megabytes_is_refused_at_once(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is tokenized: by its length, or as soon as the tokens are too many."""
    found = model(changed(name, []))
    words = 0

    def counted(word: str, merge: Any = found.tokenizer._merge) -> Any:
        nonlocal words
        words += len(word)
        return merge(word)

    monkeypatch.setattr(found.tokenizer, "_merge", counted)
    with pytest.raises(SessionError, match="the context holds 256 tokens, got a text of [0-9]+ characters"):
        found.embed([text]) if name == "bert" else list(found.generate(text, 1))
    assert words < 20_000


@pytest.mark.parametrize("name", ["gemma3", "llama", "bert"])
def test_a_long_text_is_cut_into_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those over AT_ONCE characters word by word, others at once."""
    tokenizer = model(changed(name, [])).tokenizer
    text = " ".join(tiny_vocab.TEXTS) + " "
    times = (1 << 17) // len(text) + 1
    whole = tokenizer.encode(text * times, add_bos=False)
    assert len(whole) > (1 << 15)
    at = len(whole) // 2
    some = tokenizer.encode(text * times, add_bos=False, most=at)
    assert at < len(some) < at + 200 and whole[: len(some)] == some
    monkeypatch.setattr(tokenizer_pre, "AT_ONCE", 10**9)
    assert tokenizer.encode(text * times, add_bos=False) == whole


def test_the_default_context_is_the_models_own(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path / "m.gguf", "llama", context_length=100_000)
    assert load(path, "cpu").session().n_ctx == DEFAULT_CTX
