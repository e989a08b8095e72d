"""A step of one token is one native call, of every architecture: what ran by a reference function between would end a
program, and each program has to wake the threads. And few steps of Python lie between two such calls.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.effort import instructions
from support.tiny import write_model
from support.tiny_archs import DECODERS

from graphrt import Executable, get_backend
from graphrt.backends.cpu import fast
from graphrt.errors import SessionError
from graphrt.models import Model, SamplerParams, load
from graphrt.models.choices import choices
from graphrt.models.engine import SessionOptions
from graphrt.models.sampling import Sampler
from graphrt.models.step import PreparedStep

if reason := fast.available():
    pytest.skip(reason, allow_module_level=True)

#: Models of 26 and 64 layers, kept for what else they have; their layers are those of others.
LARGE = ("deepseek2-lite", "command-r-plus")
GREEDY = SamplerParams(temp=0.0)


def not_native(exe: Executable) -> list[str]:
    (split,) = exe.splits
    return [f"{step.group.label}: {step.runner}" for step in split.run.steps if not step.runner.startswith("native ")]


@pytest.mark.parametrize("name", ["llama", "gemma3", *(name for name in DECODERS if name not in LARGE)])
def test_a_token_is_one_native_call(name: str, tmp_path: Path) -> None:
    model = load(write_model(tmp_path / "m.gguf", name), get_backend("cpu", exact=False))
    for n_seq in (1, 3):
        engine = model.engine(n_seq, SessionOptions(n_ctx=64, n_batch=3))
        assert not_native(engine.executable(1, n_seq)) == []
        assert not_native(engine.chained().exe) == []


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return load(write_model(tmp_path / "m.gguf", "gemma3"), get_backend("cpu", exact=False))


def test_a_token_takes_few_steps_of_python(model: Model) -> None:
    """In instructions of Python, from one token's id to the next one's, or to its logits."""
    session, engine = model.session(SessionOptions(n_ctx=128)), model.engine(4, SessionOptions(n_ctx=128))

    def chosen(n: int) -> None:
        assert len(list(choices(session, [4], n, Sampler(GREEDY)))) == n

    def looked_at(n: int) -> None:
        for _ in range(n):
            session.next_logits(5)

    def together(n: int) -> None:
        for _ in range(n):
            engine.read({seq: [7] for seq in range(4)})

    def each(work: Callable[[int], None]) -> float:
        work(3)
        session.reset()
        engine.reset()
        few = instructions(lambda: work(5))
        session.reset()
        engine.reset()
        return (instructions(lambda: work(25)) - few) / 20

    assert each(chosen) < 700, "about 500; 3900 by eval() and a sampler"
    assert each(looked_at) < 1000, "about 700; 3650 by eval()"
    assert each(together) < 2000, "about 1400; 4300 with inputs that are written one by one"


def test_a_step_begins_where_the_cells_are(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs written where they lie are those that write_all() writes, after what else moves cells between two steps:
    other lengths of prompts, going back, tokens that are yet to be read."""
    options = SessionOptions(n_ctx=64, type_k="f32", type_v="f32")
    session, ids = model.session(options), [5, 9, 11, 3, 7, 2, 8, 1]

    def fresh(tokens: list[int]) -> np.ndarray:
        with monkeypatch.context() as patch:
            patch.setattr(PreparedStep, "in_place", False)
            return model.session(options).eval(tokens)

    session.eval(ids[:3])
    assert np.allclose(session.next_logits(ids[3]), fresh(ids[:4]), atol=1e-4)
    session.rewind(2)
    assert np.allclose(session.next_logits(4), fresh([*ids[:2], 4]), atol=1e-4)
    session.eval(ids[3:6])
    assert np.allclose(session.next_logits(6), fresh([*ids[:2], 4, *ids[3:6], 6]), atol=1e-4)
    session.unread = [8]
    assert np.allclose(session.next_logits(1), fresh([*ids[:2], 4, *ids[3:6], 6, 8, 1]), atol=1e-4)


def test_logits_that_are_no_numbers_choose_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the backend chooses, a sampler's error; what was read before counts, the token with no answer doesn't."""
    session = model.session()
    stream = session.likeliest(5, 10)
    next(stream)
    run = Executable.run

    def spoiled(exe: Executable) -> None:
        run(exe)
        logits, tokens = exe.host_array("result_output"), exe.host_array("inp_tokens")
        assert logits is not None and tokens is not None
        logits[..., 3], tokens[...] = np.nan, 3

    monkeypatch.setattr(Executable, "run", spoiled)
    with pytest.raises(SessionError, match="1 NaN of"):
        next(stream)
    assert session.n_past == 1
