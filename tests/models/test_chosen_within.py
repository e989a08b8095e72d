"""Steps that choose the next tokens in their own graph, as those of one token do: the same tokens and the same bits of
all logits as by a graph of its own, and no more copies to the device than a step's inputs; what a chooser's inputs hold
already isn't copied again. Here larger steps choose themselves too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.poisoned_engines import poisoned
from support.tiny import write_model

import graphrt
from graphrt.execute import Executable
from graphrt.models import Model, load, paged_steps
from graphrt.models.continuous_batch import ContinuousBatch
from graphrt.models.engine import SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.prompt_lookup import PromptLookup
from graphrt.models.sampling import Sampler, Uniforms
from graphrt.models.sampling_device import LIKELIEST, Drawn, drawn
from graphrt.models.sampling_params import SamplerParams
from graphrt.models.step import AnyStep, Filled, Logits
from graphrt.models.step_chosen import Chooser
from graphrt.models.warm_up import warm_up

OPTIONS = SessionOptions(n_ctx=96, n_batch=12, type_k="f32", type_v="f32", page=16)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("chosen") / "m.gguf", "llama"), "cpu", exact=True)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that queues its work, and whose memory the host can't address, as a GPU's: inputs are copied."""
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", True)
    monkeypatch.setattr(Filled, "in_place", False)


def engine_of(model: Model, monkeypatch: pytest.MonkeyPatch, within: int, n_seq: int = 3) -> PagedEngine:
    """One whose steps of so many tokens choose themselves."""
    monkeypatch.setattr(paged_steps, "CHOSEN_WITHIN", within)
    engine = model.engine(n_seq, OPTIONS)
    assert isinstance(engine, PagedEngine)
    return poisoned(engine)


def ways(engine: PagedEngine) -> set[Any]:
    """The kinds of prepared steps that find their tokens on the board, those that choose by their candidates."""
    return {key[-1] for key in engine._prepared if isinstance(key, tuple)}


def likeliest(model: Model, ids: list[int], n: int) -> list[int]:
    """The tokens after ids, by a session."""
    session, found = model.session(replace(OPTIONS, page=0)), list[int]()
    while len(found) < n:
        found.append(int(session.eval(found[-1:] or ids).argmax()))
    return found


class LetsAll:
    """A grammar that lets all tokens through."""

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab

    def mask(self) -> np.ndarray:
        return np.ones(self.n_vocab, bool)

    def bits(self) -> np.ndarray:
        return np.full(-(-self.n_vocab // 32), 0xFFFFFFFF, np.uint32)

    def accept(self, token: int) -> None:
        """Nothing follows from it."""


Add = Callable[[ContinuousBatch, int], None]


def greedy(batch: ContinuousBatch, seq: int) -> None:
    batch.add(seq, [5 + seq, 7, 9 * seq], 8)


def drawn_by(**changed: Any) -> Drawn:
    how = drawn(Sampler(SamplerParams(temp=0.0).changed(changed)), 96)
    assert how is not None
    return how


def mixed(batch: ContinuousBatch, seq: int) -> None:
    """A text's tokens are drawn, another one's are the likeliest of some, and one's of all."""
    how = drawn_by(**[{}, {"temp": 1.5, "top_k": 40, "seed": 4}, {"logit_bias": {7: -math.inf}}][seq])
    batch.add(seq, [5 + seq, 7, 9 * seq], [8, 10, 12][seq], how)


def edited(batch: ContinuousBatch, seq: int) -> None:
    """Likeliest tokens after edits, with a memory of what was said."""
    batch.add(seq, [5 + seq, 7, 9 * seq], 8, drawn_by(logit_bias={7: -math.inf, 9: 2.5}, frequency_penalty=0.7))


def guessed(batch: ContinuousBatch, seq: int) -> None:
    ids = [3, 4, 5, 3, 4] if seq else [6, 7]
    batch.add(seq, ids, 8, guesser=PromptLookup(ids, 4) if seq < 2 else None)


def masked(batch: ContinuousBatch, seq: int) -> None:
    """A text that waits for a grammar's masks, beside others."""
    grammar = LetsAll(batch.engine.decoder.hp.n_vocab) if seq == 1 else None
    batch.add(seq, [5 + seq, 7, 9 * seq], 8 if seq else 5, Drawn(matcher=grammar))


#: How texts are added, up to how many tokens a step chooses itself, and the ways of steps that there are then.
ADDED: list[tuple[Add, int, set[Any]]] = [
    (greedy, 15, {0}), (mixed, 1, {"board", LIKELIEST, 64}), (mixed, 15, {LIKELIEST, 64}),
    (edited, 15, {LIKELIEST}), (guessed, 15, {0}), (masked, 15, {"board", 0}),
]  # fmt: skip


@pytest.mark.parametrize(("add", "within", "forms"), ADDED)
def test_tokens_are_the_same(
    llama: Model, ahead: None, monkeypatch: pytest.MonkeyPatch, add: Add, within: int, forms: set[Any]
) -> None:
    """Texts that come one after the other, and one that takes an ended one's number while steps are queued."""
    found = list[list[Any]]()
    for most, used in ((0, {"board"}), (within, forms)):
        engine, told = engine_of(llama, monkeypatch, most), list[Any]()
        with ContinuousBatch(engine) as batch:
            for seq in (1, 0, 2):  # a row of nobody is a copy of the first one
                add(batch, seq)
                told.append(batch.step())
            batch.end(2)
            engine.free(2)
            add(batch, 2)
            while batch.going:
                told.append(batch.step())
        tokens = {seq: [t for step in told for t in step.get(seq, ())] for seq in range(3)}
        found.append([tokens, [engine.tokens(seq) for seq in range(3)]])
        assert ways(engine) == used, "each where it is meant to be"
    assert found[0] == found[1]
    if add is greedy:
        for seq in range(2):
            assert found[0][0][seq] == likeliest(llama, [5 + seq, 7, 9 * seq], 8)


def test_logits_are_the_same_bits(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a backend that keeps them."""
    seen = list[list[Logits]]()
    for within in (0, 8):
        rows, engine = list[Logits](), engine_of(llama, monkeypatch, within, 2)

        def note(step: AnyStep[Any], tokens: Any, rows: list[Logits] = rows) -> None:
            rows.append(step.logits().copy())

        with monkeypatch.context() as patched, ContinuousBatch(engine) as batch:
            patched.setattr(AnyStep, "check_chosen", note)
            for seq in range(2):
                batch.add(seq, [3 + seq], 8)
            while batch.going:
                batch.step()
        seen.append(rows)
        assert ways(engine) == {0 if within else "board"}
    assert len(seen[0]) == 8
    for a, b in zip(*seen, strict=True):
        assert np.array_equal(a.view(np.uint32), b.view(np.uint32))


def test_a_step_is_begun_once(llama: Model, ahead: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy of inputs, one graph; by two graphs the choice's inputs are copied in the first step alone, and again
    where texts change."""
    write, run, log = Executable.write_all, Executable.run, list[str]()

    def copied(exe: Executable, values: Any) -> None:
        log.append("targets" if [leaf.name for leaf in values] == ["inp_targets"] else "inputs")
        write(exe, values)

    monkeypatch.setattr(Executable, "write_all", copied)
    monkeypatch.setattr(Executable, "run", lambda exe: (log.append("run"), run(exe))[1])
    steps = dict[int, list[str]]()
    for within in (0, 4):
        with ContinuousBatch(engine_of(llama, monkeypatch, within)) as batch:
            batch.add(0, [3], 30)
            for _ in range(4):
                batch.step()
            log.clear()
            batch.step()
            steps[within] = list(log)
            batch.end(0)
            batch.add(1, [4], 30)
            log.clear()
            batch.step()
            assert log[:4] == ["inputs", "run", "inputs" if within else "targets", "run"], "another text's place"
            assert log.count("targets") == (not within)
    assert steps == {0: ["inputs", "run", "run"], 4: ["inputs", "run"]}


def test_a_chooser_copies_what_changes(llama: Model, ahead: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that tokens are drawn by change from step to step, and so do lengths behind a penalty."""
    engine, copies = engine_of(llama, monkeypatch, 0), list[int]()
    fill = Chooser.filled
    monkeypatch.setattr(Chooser, "filled", lambda chooser, leafs: (copies.append(1), fill(chooser, leafs))[1])
    settings = drawn(Sampler(SamplerParams(temp=1.0, top_k=20)), 96)
    assert settings is not None
    with ContinuousBatch(engine) as batch:
        batch.add(0, [3], 10, replace(settings, uniforms=Uniforms(1)))
        while batch.going:
            batch.step()
    assert len(copies) == 10


def test_warm_up_has_the_form(llama: Model, ahead: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's steps of one text, which alone choose themselves, are captured in the form that they will have."""
    engine = engine_of(llama, monkeypatch, paged_steps.CHOSEN_WITHIN)
    warm_up(engine)
    before = set(engine._prepared)
    masked = Drawn(matcher=LetsAll(llama.network.hp.n_vocab))
    for how in Drawn(), drawn_by(logit_bias={7: -math.inf}), drawn_by(temp=1.5, top_k=40), masked:
        with ContinuousBatch(engine) as batch:
            batch.add(0, [3], 12, how)
            while batch.going:
                batch.step()
        engine.free(0)
    assert set(engine._prepared) == before and {0, LIKELIEST, 64, "board"} == ways(engine)
    assert {key[0].n_tokens for key in before if isinstance(key, tuple) and "chosen" in key} == {1}


def test_the_choice_is_in_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither logits nor a copy of them stay where a backend queues its work."""
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", True)
    model = load(write_model(tmp_path / "m.gguf", "llama"), "cpu", exact=True)
    for within, names in ((0, ["scores"]), (1, ["next_token"])):
        engine = engine_of(model, monkeypatch, within, 1)
        size = engine.largest_size(1, 1)
        step = engine.choosing(size, itself=engine.chooses_itself(size))
        assert [t.name for t in step.reads.exe.graph.outputs] == names
        assert (step.chooser is None) == bool(within)
