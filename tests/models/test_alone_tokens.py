"""Pieces of prompts beside each other in steps that tell nothing of other texts: each text's tokens are what they are
alone, and there are fewer steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.poisoned_engines import poisoned
from support.tiny import write_model

import graphrt
from graphrt.models import Model, load, paged_steps
from graphrt.models.continuous_batch import ContinuousBatch
from graphrt.models.engine import SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.sampling import Uniforms
from graphrt.models.sampling_device import Drawn
from graphrt.models.step_paged import StepSize
from graphrt.ops import RowSettings, SampleParams

#: Texts of two rungs of tokens, 12 and 8, and one of two pieces.
LENGTHS = (9, 10, 8, 12, 7, 19)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("alone") / "m.gguf", "llama"), "cpu", exact=True)


def made(model: Model, seqs: Sequence[int], within: int, monkeypatch: pytest.MonkeyPatch) -> tuple[
    dict[int, list[int]], list[tuple[StepSize, int]]
]:  # fmt: skip
    """The tokens of some texts that come at once, and the sizes of steps that read prompts with how many each read."""
    monkeypatch.setattr(paged_steps, "ALONE_TOKENS", within)
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", True)
    options = SessionOptions(n_ctx=96, n_batch=16, type_k="f32", type_v="f32", page=16, share=False)
    engine = model.engine(6, options)
    assert isinstance(engine, PagedEngine)
    steps, choosing = list[tuple[StepSize, int]](), engine.choosing
    tokens = dict[int, list[int]]()

    class Noted(ContinuousBatch):
        def _run(self, queued: object) -> None:
            reads = queued.reads  # type: ignore[attr-defined]
            if any(read.n > 1 for read in reads):
                steps.append((sizes[-1], len(reads)))
            super()._run(queued)  # type: ignore[arg-type]

    sizes = list[StepSize]()
    monkeypatch.setattr(
        engine, "choosing", lambda size, *of, **how: (sizes.append(size), choosing(size, *of, **how))[1]
    )
    with Noted(poisoned(engine), alone=True) as batch:
        for seq in seqs:
            ids = np.random.default_rng(seq).integers(0, 60, LENGTHS[seq]).tolist()
            batch.add(seq, ids, 6, Drawn(RowSettings.of(SampleParams(temp=1.5)), Uniforms(seq)))
        while batch.going:
            for seq, found in batch.step().items():
                tokens.setdefault(seq, []).extend(found)
    return tokens, steps


def test_texts_are_what_they_are_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    together, steps = made(model, range(6), 16, monkeypatch)
    few = made(model, [3, 5, 1], 16, monkeypatch)[0]
    plain, one_by_one = made(model, range(6), 0, monkeypatch)
    for seq in (0, 2, 5):
        assert made(model, [seq], 16, monkeypatch)[0] == {seq: together[seq]}
    assert few == {seq: together[seq] for seq in (3, 5, 1)} and together == plain
    assert len(one_by_one) == 7 and {n for _, n in one_by_one} == {1}
    # of 16 tokens: two pieces of 8, the others alone
    assert [(size[:3], n) for size, n in steps] == [
        ((12, 1, 1), 1), ((12, 1, 1), 1), ((16, 2, 2), 2), ((12, 1, 1), 1), ((16, 1, 1), 1), ((12, 4, 4), 1),
    ]  # fmt: skip


def test_a_piece_waits_for_others(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """While single tokens go on, so many steps of them, where a step has room for more; never where it has not."""
    monkeypatch.setattr(paged_steps, "ALONE_TOKENS", 16)
    engine = model.engine(6, SessionOptions(n_ctx=96, n_batch=16, type_k="f32", type_v="f32", page=16, share=False))
    assert isinstance(engine, PagedEngine)
    for lengths, waited in (([8], 4), ([8, 7], 0), ([12], 0), ([8, 12], 4)):
        steps = list[list[int]]()

        class Noted(ContinuousBatch):
            def _run(self, queued: object, steps: list[list[int]] = steps) -> None:
                steps.append([read.of.seq for read in queued.reads])  # type: ignore[attr-defined]
                super()._run(queued)  # type: ignore[arg-type]

        with Noted(engine, alone=True) as batch:
            batch.add(0, [3], 20)
            batch.step()
            for seq, n in enumerate(lengths, 1):
                batch.add(seq, list(range(n)), 1)
            while len(batch.going) > 1:
                batch.step()
        assert steps[0] == [0] and steps.index(next(read for read in steps if 1 in read)) == 1 + waited
        engine.reset()
