"""Adapters: texts that have other ones, several or none are made together, each as by a model with its own merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_archs as tiny_archs
from support.adapters import FloatArray, merge, write_adapter
from support.tiny import tokens, write_model

import graphrt
from graphrt.errors import GraphrtError, SessionError
from graphrt.models import Model, load
from graphrt.models.continuous_batch import ContinuousBatch
from graphrt.models.engine import SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.paging.check import check
from graphrt.models.warm_up import warm_up
from graphrt.testing import nmse

OPTIONS = SessionOptions(n_ctx=96, n_batch=12, type_k="f32", type_v="f32", page=16)
RINGS = SessionOptions(n_ctx=96, n_batch=12, type_k="f32", type_v="f32")
#: Scales of the two adapters in each of four texts.
SCALES = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, -2.0))
IDS = [int(i) % 128 for i in (tokens() * 4)[:40]]
#: Rounding of f32 sums of some dozens of terms in another order, through some layers.
CLOSE = 1e-9


@dataclass
class Given:
    """A model's file, those of two adapters, and what they add."""

    model: Path
    files: dict[str, Path]
    added: list[Mapping[str, FloatArray]]

    def adapted(self, scales: Sequence[float] = (), *, exact: bool = True) -> Model:
        model = load(self.model, "cpu", exact=exact)
        model.use_adapters(self.files, scales)
        return model

    def merged(self, scales: Sequence[float], *, exact: bool = True) -> Model:
        return merge(load(self.model, "cpu", exact=exact), list(zip(scales, self.added)))


def given(folder: Path, arch: str) -> Given:
    path = write_model(folder / "model.gguf", arch)
    model, a, b = load(path, "cpu", exact=True), folder / "a.gguf", folder / "b.gguf"
    first = write_adapter(a, model, more=("output.weight",) if "output.weight" in model.weights.loaded else ())
    second = write_adapter(b, model, rank=6, alpha=3.0, seed=1, targets=("attn_k", "ffn_gate", "attn_q"))
    return Given(path, {"a": a, "b": b}, [first, second])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return given(tmp_path_factory.mktemp("adapters"), "llama")


def engine_of(model: Model, n_seq: int, **changed: Any) -> PagedEngine:
    engine = model.engine(n_seq, SessionOptions(**{**vars(OPTIONS), **changed}))
    assert isinstance(engine, PagedEngine)
    return engine


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_session_reads_as_the_merged_model(tmp_path: Path, arch: str) -> None:
    found = given(tmp_path, arch)
    mine, theirs = found.adapted([1.0, -0.5]).session(RINGS), found.merged([1.0, -0.5]).session(RINGS)
    plain = load(found.model, "cpu", exact=True).session(RINGS)
    expected = theirs.eval_rows(IDS)
    assert nmse(mine.eval_rows(IDS), expected) < CLOSE
    assert nmse(plain.eval_rows(IDS), expected) > 1e-3, "the adapters change something"


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_texts_of_a_batch_have_their_own(llama: Given, exact: bool) -> None:
    engine = engine_of(llama.adapted(exact=exact), 4)
    for seq, scales in enumerate(SCALES):
        engine.use_adapters(seq, scales)
    prompts = {0: IDS[:9], 1: IDS, 2: IDS[:5], 3: IDS[:30]}
    with ContinuousBatch(engine) as batch:
        for seq, ids in prompts.items():
            batch.add(seq, ids, 12)
        made: dict[int, list[int]] = {seq: [] for seq in prompts}
        while batch.going:
            for seq, more in batch.step().items():
                made[seq] += more
    for seq, scales in enumerate(SCALES):
        alone = engine_of(llama.merged(scales, exact=exact), 1)
        assert made[seq] == generated(alone, prompts[seq], 12), f"{scales}"


def generated(engine: PagedEngine, ids: Sequence[int], n: int) -> list[int]:
    found: list[int] = []
    with ContinuousBatch(engine) as batch:
        batch.add(0, ids, n)
        while batch.going:
            found += batch.step().get(0, [])
    return found


def test_none_has_the_bits_of_a_model_without(llama: Given) -> None:
    plain, engine = engine_of(load(llama.model, "cpu", exact=False), 2), engine_of(llama.adapted(exact=False), 2)
    for seq in range(2):
        engine.use_adapters(seq, (0.0, 0.0))
    both = {0: IDS[:20], 1: IDS[:3]}
    np.testing.assert_array_equal(engine.read(both), plain.read(both))
    assert not any("lora" in leaf.name for step in engine._prepared.values() for leaf in step.exe.graph.leafs)
    exact, mixed = engine_of(load(llama.model, "cpu", exact=True), 2), engine_of(llama.adapted(), 2)
    mixed.use_adapters(0, (0.0, 0.0))
    np.testing.assert_array_equal(mixed.read(both)[0], exact.read(both)[0], err_msg="beside one that has some")


def test_pages_are_shared_by_texts_of_the_same_adapters_alone(llama: Given) -> None:
    engine = engine_of(llama.adapted(), 4)
    pool, expected = engine.cache.pool, {}
    for seq, scales in enumerate([(1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (1.0, 0.0)]):
        engine.use_adapters(seq, scales)
        expected[seq] = llama.merged(scales).session(RINGS).eval(IDS)
    for seq in range(4):
        assert nmse(engine.read({seq: IDS})[0], expected[seq]) < CLOSE
        check(pool)
    assert pool.of(2).tables["full"][:2] == pool.of(3).tables["full"][:2]
    assert len({pool.of(seq).tables["full"][0] for seq in range(3)}) == 3
    for seq in range(4):
        engine.free(seq)
    engine.use_adapters(0, (0.0, 0.0))
    assert nmse(engine.read({0: IDS})[0], expected[1]) < CLOSE and engine.cache.pool.of(0).nodes
    engine.reset()
    check(pool)
    assert not pool.root.children


def test_what_becomes_of_a_text_keeps_its_adapters(llama: Given, tmp_path: Path) -> None:
    engine = engine_of(llama.adapted(), 3)
    engine.use_adapters(0, SCALES[1])
    engine.read({0: IDS[:20]})
    engine.fork(0, 1)
    check(engine.cache.pool)
    expected = llama.merged(SCALES[1]).session(RINGS).eval(IDS)
    assert nmse(engine.read({1: IDS[20:]})[0], expected) < CLOSE
    away = engine.swap_out(0)
    with pytest.raises(SessionError, match="use_adapters"):
        engine.swap_in(2, away)
    engine.use_adapters(2, SCALES[1])
    engine.swap_in(2, away)
    assert nmse(engine.read({2: IDS[20:]})[0], expected) < CLOSE
    with pytest.raises(SessionError, match="empty"):
        engine.use_adapters(2, SCALES[0])
    engine.save(2, tmp_path / "text")
    with pytest.raises(SessionError, match="other adapters"):
        load(llama.model, "cpu", exact=True).load_session(tmp_path / "text")
    assert llama.adapted(SCALES[1]).load_session(tmp_path / "text").n_past == len(IDS)


def test_steps_with_adapters_are_warmed_up(llama: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", True)
    engine = engine_of(llama.adapted([0.0, 0.0]), 2)
    warm_up(engine)
    sizes = {(size.n_tokens, size.n_seq) for size, *_, adapted in engine._prepared if adapted}
    assert {(1, 1), (2, 2), (14, 2)} <= sizes and not engine.lengths.any()


def test_what_is_no_adapter_of_the_model(llama: Given, tmp_path: Path) -> None:
    model = load(llama.model, "cpu", exact=True)

    def refused(said: str, scales: Sequence[float] = (), **how: Any) -> None:
        write_adapter(tmp_path / "a.gguf", model, **how)
        with pytest.raises(GraphrtError, match=said):
            model.use_adapters({"mine": tmp_path / "a.gguf"}, scales)
        assert model.decoder.adapters is None

    refused("general.type 'model'", keys={"general.type": "model"})
    refused("adapter.type 'dora'", keys={"adapter.type": "dora"})
    refused("architecture, llama", keys={"general.architecture": "gemma3"})
    refused("alpha", alpha=float("nan"))
    refused("a scale each", [1.0, 2.0])
    refused("a scale each", [float("inf")])
    wider = load(write_model(tmp_path / "wide.gguf", "llama", feed_forward_length=96, block_count=2), "cpu", exact=True)
    del wider.weights.loaded["blk.0.ffn_up.weight"]
    write_adapter(tmp_path / "b.gguf", model)
    with pytest.raises(SessionError, match="matrices that the model has"):
        wider.use_adapters({"b": tmp_path / "b.gguf"})
    gemma = load(write_model(tmp_path / "gemma.gguf", "gemma3"), "cpu", exact=True)
    write_adapter(tmp_path / "c.gguf", gemma, keys={"general.architecture": "llama"})
    with pytest.raises(SessionError, match="shapes|matrices"):
        model.use_adapters({"c": tmp_path / "c.gguf"})
    write_adapter(tmp_path / "d.gguf", model, more=("token_embd.weight",))
    model.use_adapters({"d": tmp_path / "d.gguf"})
    with pytest.raises(SessionError, match="multiplied with"):
        model.session(RINGS).eval(IDS)
    with pytest.raises(SessionError, match="loaded once"):
        model.use_adapters(llama.files)
    with pytest.raises(SessionError, match="this one has none"):
        engine_of(load(llama.model, "cpu", exact=True), 1).use_adapters(0, [1.0])
