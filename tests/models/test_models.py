"""Tiny models against llama.cpp's logits, and the fast form against the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import GOLDEN
from support.tiny import MODELS, tokens, write_model

from graphrt.dtypes import CACHE_TYPES, CACHES
from graphrt.errors import ArchError, SessionError
from graphrt.models import load
from graphrt.models.engine import SessionOptions
from graphrt.testing import nmse

F32_CACHE = SessionOptions(type_k="f32", type_v="f32")


def logits_of(path: Path, options: SessionOptions, exact: bool, batch: int = 32) -> np.ndarray:
    """The 40 tokens: the first `batch` at once, the rest one by one."""
    session = load(path, "cpu", exact=exact).session(options)
    ids = tokens()
    return np.concatenate([session.eval_rows(ids[:batch]), *(session.eval([t])[None].copy() for t in ids[batch:])])


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_llama_cpp(tmp_path: Path, name: str, exact: bool) -> None:
    golden = np.load(GOLDEN / f"{name}.npz")
    assert golden["tokens"].tolist() == tokens()
    path = write_model(tmp_path / "m.gguf", name)
    # llama.cpp's GELU goes through a table of half-precision values; llama has none, and meets it to rounding
    limit = 1e-9 if name == "llama" else 1e-6
    assert nmse(logits_of(path, F32_CACHE, exact), golden["logits"]) < limit


@pytest.mark.parametrize("batch", [1, 5, 11, 40])
@pytest.mark.parametrize("name", MODELS)
def test_how_a_prompt_is_cut_does_not_matter(tmp_path: Path, name: str, batch: int) -> None:
    path = write_model(tmp_path / "m.gguf", name)
    whole = logits_of(path, F32_CACHE, exact=True)
    cut = SessionOptions(type_k="f32", type_v="f32", n_batch=batch)
    assert nmse(logits_of(path, cut, exact=False), whole) < 1e-9


@pytest.mark.parametrize("cache", [name for name in CACHE_TYPES if name != "f32"])
def test_caches_cost_no_more_than_their_rounding(tmp_path: Path, cache: str) -> None:
    """bf16 keeps 8 bits of mantissa, f16 11, q8_0 about 7.5, q5_0 4.5, q4_0 3.5; the two forms must agree on each."""
    path = write_model(tmp_path / "m.gguf", "gemma3")
    options = SessionOptions(type_k=cache, type_v=cache)
    exact = logits_of(path, options, exact=True)
    limit = CACHES[cache].logits_nmse
    assert limit is not None and nmse(exact, logits_of(path, F32_CACHE, exact=True)) < 10 * limit
    assert nmse(logits_of(path, options, exact=False), exact) < limit


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_weights_mean_the_same_in_both_forms(tmp_path: Path, kind: str) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", kind)
    exact = logits_of(path, F32_CACHE, exact=True)
    # products round activations to 16 bits, which is off by about 2e-5 of their size
    assert nmse(logits_of(path, F32_CACHE, exact=False), exact) < (1e-9 if kind in ("F16", "BF16") else 1e-8)


def test_windowed_layers_keep_only_their_window(tmp_path: Path) -> None:
    model = load(write_model(tmp_path / "m.gguf", "gemma3"), "cpu")
    session = model.session(SessionOptions(n_ctx=200, n_batch=8))
    sizes = [layer.k.ne[1] for layer in session.cache.layers]
    assert sizes == [20, 20, 20, 20, 20, 200, 20]


def test_one_graph_serves_every_position(tmp_path: Path) -> None:
    session = load(write_model(tmp_path / "m.gguf", "gemma3"), "cpu").session()
    session.eval([1])
    exe = session.executable(1, 1)
    places = {t.name: (id(exe.place(t)[0]), exe.place(t)[1]) for t in exe.graph.inputs}
    for token in tokens():
        session.eval([token])
    assert session.executable(1, 1) is exe
    assert places == {t.name: (id(exe.place(t)[0]), exe.place(t)[1]) for t in exe.graph.inputs}


def test_only_wanted_rows_reach_the_output(tmp_path: Path) -> None:
    session = load(write_model(tmp_path / "m.gguf", "llama"), "cpu").session()
    output = session.executable(32, 1).graph.outputs[0]
    assert output.ne == (128, 1, 1, 1)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "at least one token"),
        ([1] * 300, "the model was trained on no more"),
        ([128], "token id must be 0 to 127"),
        ([-1], "token id"),
    ],
    ids=["empty", "too long", "too large", "negative"],
)
def test_bad_prompts_are_refused(tmp_path: Path, ids: list[int], message: str) -> None:
    session = load(write_model(tmp_path / "m.gguf", "llama"), "cpu").session()
    with pytest.raises(SessionError, match=message):
        session.eval(ids)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention.head_count_kv": 3}, "must divide"),
        ({"rope.scaling.type": "longrope"}, "must be one of none, linear, yarn"),
        ({"block_count": 600}, "at most 160"),
        ({"feed_forward_length": 64}, "must have the shape"),
        ({"block_count": 3}, "the file has none of that name"),
        ({"block_count": 1}, "not: blk.1"),
        ({"expert_count": 8, "expert_used_count": 2}, "ffn_gate_inp"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "finite"),
    ],
    ids=lambda v: "" if isinstance(v, str) else next(iter(v)),
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, changed: dict, message: str) -> None:
    with pytest.raises(ArchError, match=message):
        load(write_model(tmp_path / "m.gguf", "llama", **changed), "cpu")


def test_cache_types_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = load(write_model(tmp_path / "m.gguf", "llama"), "cpu")
    with pytest.raises(SessionError, match="whole blocks of 32"):
        model.session(SessionOptions(type_k="q8_0"))
    with pytest.raises(SessionError, match="must be one of"):
        model.session(SessionOptions(type_v="q3_K"))
