"""Engine: sequences read together give what each gives alone, whatever numbers of tokens they read at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.tiny import write_model

import graphrt
from graphrt.errors import SessionError
from graphrt.models import Model, load
from graphrt.models.engine import Engine, SessionOptions
from graphrt.testing import nmse

OPTIONS = SessionOptions(n_ctx=96, n_batch=12, type_k="f32", type_v="f32")


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("engine")
    return load(write_model(folder / "model.gguf", request.param), "cpu")


def prompts(n_seq: int, n: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 60, (n_seq, n)).astype(np.int32)


def every(ids: np.ndarray) -> dict[int, np.ndarray]:
    return dict(enumerate(ids))


def test_each_sequence_is_as_if_alone(model: Model) -> None:
    ids = prompts(3, 21)  # in pieces of four tokens of each
    engine = model.engine(3, OPTIONS)
    first = engine.read(every(ids[:, :20]))
    second = engine.read(every(ids[:, 20:]))
    assert engine.lengths.tolist() == [21, 21, 21]
    for seq, row in enumerate(ids):
        alone = model.session(OPTIONS)
        assert nmse(first[seq], alone.eval(row[:20].tolist())) < 1e-9
        assert nmse(second[seq], alone.eval(row[20:].tolist())) < 1e-9


def test_sequences_of_different_lengths(model: Model) -> None:
    """Some read many tokens, some few, some none, in any order; past gemma's window too, and up to a full context."""
    random = np.random.default_rng(7)
    ids, engine, alone = prompts(4, 96), model.engine(4, OPTIONS), [model.session(OPTIONS) for _ in range(4)]
    while engine.lengths.min() < 96:
        part = {
            int(seq): ids[seq, engine.lengths[seq] :][: int(random.integers(1, 40))]
            for seq in random.permutation(4)[: int(random.integers(1, 5))]
            if engine.lengths[seq] < 96
        }
        if not part:
            continue
        found = engine.read(part)
        for (seq, tokens), row in zip(part.items(), found):
            assert nmse(row, alone[seq].eval(tokens)) < 1e-9
        assert engine.lengths.tolist() == [s.n_past for s in alone] and holds_only_what_is_past(engine)


def test_likeliest_tokens_of_each(model: Model) -> None:
    ids = prompts(2, 30)  # past gemma's window
    engine = model.engine(2, OPTIONS)
    lengths = (30, 21)
    tokens = engine.read({seq: ids[seq, :n] for seq, n in enumerate(lengths)}).argmax(1).astype(np.int32)
    found = np.stack([tokens, *(t.copy() for t in engine.run_ahead(tokens, 9))], 1)
    for seq, n in enumerate(lengths):
        alone = model.session(OPTIONS)
        token = int(alone.eval(ids[seq, :n].tolist()).argmax())
        assert found[seq].tolist() == [token, *alone.likeliest(token, 9)]
    assert engine.lengths.tolist() == [39, 30]


@pytest.mark.parametrize("n_batch", [2, 12])
def test_steps_that_nobody_takes_are_forgotten(model: Model, n_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each sequence; and they overwrite nothing that a window still sees, of which a ring has n_batch / n_seq cells
    to spare."""
    monkeypatch.setattr(type(model.backends[0]), "asynchronous", True)  # only such a backend's steps are queued
    options = SessionOptions(n_ctx=96, n_batch=n_batch, type_k="f32", type_v="f32")
    plain, ahead = (model.engine(2, options) for _ in range(2))
    ids = prompts(2, 30)
    first = plain.read(every(ids)).argmax(1).astype(np.int32)
    ahead.read(every(ids))
    stream = ahead.run_ahead(first, 9)
    second = next(stream).copy()
    stream.close()
    assert second.tolist() == plain.read(every(first[:, None])).argmax(1).tolist()
    assert ahead.lengths.tolist() == [31, 31] and holds_only_what_is_past(ahead)
    assert nmse(ahead.read(every(second[:, None])), plain.read(every(second[:, None]))) < 1e-12


def holds_only_what_is_past(engine: Engine) -> bool:
    return all((cells.positions.max(1) == engine.lengths - 1).all() for cells in engine.cache.cells.values())


def test_no_cell_holds_what_was_not_read(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = model.engine(2, OPTIONS)
    engine.read(every(prompts(2, 5)))

    def interrupted(exe: graphrt.Executable) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(graphrt.Executable, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.read(every(prompts(2, 3)))
    assert engine.lengths.tolist() == [5, 5] and holds_only_what_is_past(engine)
    engine.reset()
    assert holds_only_what_is_past(engine), "-1: nothing"


def test_bad_tokens_are_refused(model: Model) -> None:
    engine = model.engine(2, OPTIONS)
    for tokens, message in (
        ({}, "at least one sequence"),
        ({2: [1]}, "a sequence must be 0 to 1, got 2"),
        ({-1: [1]}, "a sequence must be 0 to 1, got -1"),
        ({0: [1], 1: []}, "at least one token"),
        ({0: [1], 1: [0] * 97}, "the context holds 96 tokens of each sequence, got 97"),
        ({0: [1], 1: [-1]}, "a token id must be"),
    ):
        with pytest.raises(SessionError, match=message):
            engine.read(tokens)
        assert engine.lengths.tolist() == [0, 0], "nothing is read of what is refused"
    with pytest.raises(SessionError, match="an engine has 1 to 65536 sequences, got 0"):
        model.engine(0, OPTIONS)
