"""Batch: sequences read together give what each gives alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import write_model

import graphrt
from graphrt.errors import SessionError
from graphrt.models import Model, load
from graphrt.models.batch import Batch
from graphrt.models.session import SessionOptions
from graphrt.testing import nmse

OPTIONS = SessionOptions(n_ctx=96, n_batch=12, type_k="f32", type_v="f32")


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("batch")
    return load(write_model(folder / "model.gguf", request.param), "cpu")


def prompts(n_seq: int, n: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 60, (n_seq, n)).astype(np.int32)


def test_each_sequence_is_as_if_alone(model: Model) -> None:
    ids = prompts(3, 21)  # in pieces of four tokens of each
    batch = Batch(model.decoder, model.backends, 3, OPTIONS)
    first = batch.eval(ids[:, :20]).copy()
    second = batch.eval(ids[:, 20:]).copy()
    assert batch.n_past.tolist() == [21, 21, 21]
    for seq, row in enumerate(ids):
        alone = model.session(OPTIONS)
        assert nmse(first[seq], alone.eval(row[:20].tolist())) < 1e-9
        assert nmse(second[seq], alone.eval(row[20:].tolist())) < 1e-9


def test_likeliest_tokens_of_each(model: Model) -> None:
    ids = prompts(2, 30)  # past gemma's window
    batch = Batch(model.decoder, model.backends, 2, OPTIONS)
    tokens = batch.eval(ids).argmax(1).astype(np.int32)
    found = np.stack([tokens, *(t.copy() for t in batch.likeliest(tokens, 9))], 1)
    for seq, row in enumerate(ids):
        alone = model.session(OPTIONS)
        token = int(alone.eval(row.tolist()).argmax())
        assert found[seq].tolist() == [token, *alone.likeliest(token, 9)]
    assert batch.n_past.tolist() == [39, 39]


@pytest.mark.parametrize("n_batch", [2, 12])
def test_steps_that_nobody_takes_are_forgotten(model: Model, n_batch: int) -> None:
    """Of each sequence; and they overwrite nothing that a window still sees, of which a ring has n_batch / n_seq cells
    to spare."""
    options = SessionOptions(n_ctx=96, n_batch=n_batch, type_k="f32", type_v="f32")
    plain, ahead = (Batch(model.decoder, model.backends, 2, options) for _ in range(2))
    ids = prompts(2, 30)
    first = plain.eval(ids).argmax(1).astype(np.int32)
    ahead.eval(ids)
    stream = ahead.likeliest(first, 9)
    second = next(stream).copy()
    stream.close()
    assert second.tolist() == plain.eval(first[:, None]).argmax(1).tolist()
    assert ahead.n_past.tolist() == [31, 31] and holds_only_what_is_past(ahead)
    assert nmse(ahead.eval(second[:, None]), plain.eval(second[:, None])) < 1e-12


def holds_only_what_is_past(batch: Batch) -> bool:
    return all((ring.positions.max(1) == batch.n_past - 1).all() for ring in batch.cache.rings.values())


def test_no_cell_holds_what_was_not_read(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(model.decoder, model.backends, 2, OPTIONS)
    batch.eval(prompts(2, 5))

    def interrupted(exe: graphrt.Executable) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(graphrt.Executable, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.eval(prompts(2, 3))
    assert batch.n_past.tolist() == [5, 5] and holds_only_what_is_past(batch)
    batch.reset()
    assert holds_only_what_is_past(batch), "-1: nothing"


def test_bad_tokens_are_refused(model: Model) -> None:
    batch = Batch(model.decoder, model.backends, 2, OPTIONS)
    for ids, message in (
        (np.zeros((3, 4), np.int32), "one row a sequence"),
        (np.zeros((2, 97), np.int32), "the context holds 96"),
        (np.full((2, 1), -1, np.int32), "a token id must be"),
    ):
        with pytest.raises(SessionError, match=message):
            batch.eval(ids)
    with pytest.raises(SessionError, match="at least one sequence"):
        Batch(model.decoder, model.backends, 0, OPTIONS)
