"""--deterministic: a text's tokens and log-probabilities are the same bits, alone and in any company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import tiny_archs  # noqa: F401  (more models)
from support.tiny import write_model
from support.verbs import Verb

from graphrt.backend import get_backend
from graphrt.models import Model, load
from graphrt.models.continuous_batch import ContinuousBatch
from graphrt.models.engine import SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.generation import TextRules
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.serve.events import Event, Text
from graphrt.tools.serve.scheduler import Scheduler

OPTIONS = SessionOptions(n_ctx=160, n_batch=24, page=16, share=False)
#: Prompts shorter and longer than a step has room for, one of one token, two alike at the beginning.
LENGTHS = (1, 5, 23, 24, 25, 60, 60, 90, 3, 2, 4, 6)
KINDS = (
    SamplerParams(temp=0), SamplerParams(temp=1.3, seed=7), SamplerParams(temp=1.1, seed=8, repeat_penalty=1.3),
    SamplerParams(temp=1.0, seed=9, mirostat=2),
)  # fmt: skip
#: A model, its matrices' type. Steps of more than 8 tokens have other kernels than those of fewer, so
#: that there are more texts.
MODELS = [
    ("llama", "F32"), ("llama", "Q8_0"), ("llama", "F16"), ("gemma3", "F32"), ("qwen3moe-wide", "Q4_K"),
    ("deepseek2-wide", "Q6_K"), ("qwen3moe", "F32"),
]  # fmt: skip

#: Tokens, and the logarithms of their probabilities; first those of the prompt where they are told, as token -1.
Made = list[tuple[int, float, tuple[tuple[int, float], ...]]]


def model_of(folder: Path, name: str, kind: str) -> Model:
    return load(
        write_model(folder / "m.gguf", name, kind, tokenizer="spm"), get_backend("cpu", exact=False, rows_alone=True)
    )


def texts_of(model: Model) -> list[Text]:
    r = np.random.default_rng(5)
    ids = r.integers(3, 120, 200).tolist()
    found = []
    for i, n in enumerate(LENGTHS):
        prompt = ids[:n] if i in (5, 7) else r.integers(3, 120, n).tolist()
        rules = TextRules(12 + i, ignore_eos=True, logprobs=3)
        scored = 2 if i in (5, 7) else None
        found.append(Text(prompt, 12 + i, *model.new_text(KINDS[i % len(KINDS)], rules), scored=scored))
    return found


def run(scheduler: Scheduler, texts: Sequence[Text], waits: Sequence[int]) -> dict[Text, Made]:
    """What becomes of texts that come after so many steps."""
    events, step = list[Event](), 0
    left = sorted(zip(waits, range(len(texts))))
    while left or not scheduler.is_idle:
        while left and left[0][0] <= step:
            scheduler.add(texts[left.pop(0)[1]])
        events += scheduler.step()
        step += 1
        assert step < 2000
    found: dict[Text, Made] = {text: [(-1, score.token, score.best) for score in text.scores] for text in texts}
    assert [len(text.scores) for text in texts] == [0 if t.scored is None else len(t.prompt) - 1 for t in texts]
    for text, piece, error in events:
        assert piece is not None and error is None and piece.logprobs is not None, error
        found[text].append((piece.token, piece.logprobs.token, tuple(piece.logprobs.best)))
    return found


def made(
    model: Model, wanted: Sequence[int], waits: Sequence[int], n_seq: int, *, pinned: bool = True, pages: int = 0
) -> list[Made]:
    """What those texts are, of which some come, after so many steps each."""
    engine = PagedEngine(model.decoder, model.backends, replace(OPTIONS, n_pages=pages), n_seq)
    scheduler = Scheduler(engine, deterministic=pinned)
    texts = texts_of(model)
    found = run(scheduler, [texts[i] for i in wanted], waits)
    if pages:
        assert scheduler.counts.preemptions > 0
    return [found[texts[i]] for i in wanted]


@pytest.mark.parametrize(("name", "kind"), MODELS, ids=[f"{name} {kind}" for name, kind in MODELS])
@pytest.mark.parametrize("n_seq", [3, 12])
def test_no_text_depends_on_others(tmp_path: Path, name: str, kind: str, n_seq: int) -> None:
    model, all_of_them = model_of(tmp_path, name, kind), range(len(LENGTHS))
    alone = [made(model, [i], [0], n_seq)[0] for i in all_of_them]
    assert [sum(token >= 0 for token, *_ in text) for text in alone] == [12 + i for i in all_of_them]
    late = [0, 9, 2, 14, 3, 1, 20, 6, 0, 4, 8, 7]
    mixes = [([0] * 12, 0), (late, 0), ([7, 6, 5, 4, 3, 2, 1, 0, 30, 30, 31, 32], 14 if n_seq == 3 else 21)]
    for waits, pages in mixes:
        assert made(model, list(all_of_them), waits, n_seq, pages=pages) == alone, (waits, pages)
    order = [7, 2, 5, 0]
    assert made(model, order, [0, 0, 2, 4], n_seq) == [alone[i] for i in order]


def test_without_it_they_do(tmp_path: Path) -> None:
    """What the test above would see."""
    model = model_of(tmp_path, "llama", "F32")
    alone = [made(model, [i], [0], 12, pinned=False)[0] for i in range(len(LENGTHS))]
    assert made(model, list(range(len(LENGTHS))), [0] * len(LENGTHS), 12, pinned=False) != alone


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_batch_reads_prompts_alone(tmp_path: Path, late: int) -> None:
    """Texts that come while others are made, whose latest tokens the step of a prompt does not leave; one of them has
    made a part of what it reads."""
    model = model_of(tmp_path, "llama", "F32")
    engine = PagedEngine(model.decoder, model.backends, replace(OPTIONS, n_batch=8), 12)
    ids = np.random.default_rng(8).integers(3, 120, 150).tolist()
    prompts = [ids[:3], ids[3:20], ids[20:28], *(ids[i : i + 11] for i in range(28, 127, 11))]
    assert len(prompts) == 12

    def made(waits: dict[int, int]) -> dict[int, list[int]]:
        found, left, step = {i: list[int]() for i in waits}, dict(waits), 0
        with ContinuousBatch(engine, alone=True) as batch:
            while left or batch.going:
                for i in [i for i, wait in left.items() if wait <= step]:
                    batch.add(i, prompts[i], 16 - i, n_made=5 if i == 3 else 0)
                    del left[i]
                for i, tokens in batch.step().items():
                    found[i] += tokens
                step += 1
        for i in waits:
            engine.free(i)
        return found

    alone = {i: made({i: 0})[i] for i in range(12)}
    assert [len(alone[i]) for i in range(12)] == [16 - i for i in range(12)]
    assert made({i: i * late for i in range(12)}) == alone
    assert made({3: 0, 1: late, 0: 2 * late}) == {i: alone[i] for i in (3, 1, 0)}


def test_prompts_take_turns(tmp_path: Path) -> None:
    """Texts that generate wait for n_batch tokens of prompts at most, and prompts for a step of theirs, or for four
    where a step has room for another one."""
    model = model_of(tmp_path, "llama", "F32")
    engine = PagedEngine(model.decoder, model.backends, replace(OPTIONS, n_batch=8), 6)
    read = list[int]()
    with ContinuousBatch(engine, alone=True) as batch:
        batch.add(0, [5, 6], 20)
        batch.step()
        for seq in range(1, 6):
            batch.add(seq, [7 + seq] * 4, 1)
        for _ in range(8):
            batch.step()
            read.append(batch.times[-1].n_tokens)
    assert read == [8, 1, 8, 1, 1, 1, 1, 4]


def test_on_a_gpu_too(tmp_path: Path) -> None:
    """In Triton's interpreter: while all texts have the likeliest token a device chooses, else the host. A prompt of
    two steps, one of a single token, and one that comes late."""
    pytest.importorskip("triton")
    backend = get_backend("triton", exact=False, rows_alone=True)
    model = load(write_model(tmp_path / "m.gguf", "llama", "Q8_0", tokenizer="spm"), backend)
    engine = PagedEngine(model.decoder, model.backends, replace(OPTIONS, n_batch=4), 3)
    params = SamplerParams(temp=0), SamplerParams(temp=0), SamplerParams(temp=1.3, seed=7)
    prompts = [9], [5, 6, 7, 8, 9, 10], [11, 12]

    def said(waits: dict[int, int]) -> list[list[tuple[int, object]]]:
        scheduler, left, step = Scheduler(engine, deterministic=True), dict(waits), 0
        rules = {i: TextRules(2, ignore_eos=True, logprobs=2 if i == 2 else None) for i in waits}
        texts = {i: Text(prompts[i], 2, *model.new_text(params[i], rules[i])) for i in waits}
        made = {text: list[tuple[int, object]]() for text in texts.values()}
        while left or not scheduler.is_idle:
            for i in [i for i, wait in left.items() if wait <= step]:
                scheduler.add(texts[i])
                del left[i]
            for text, piece, error in scheduler.step():
                assert piece is not None and error is None, error
                made[text].append((piece.token, piece.logprobs))
            step += 1
        scheduler.close()
        return [made[texts[i]] for i in sorted(texts)]

    alone = [said({i: 0})[0] for i in range(3)]
    assert [len(text) for text in alone] == [2] * 3
    assert said({1: 0, 0: 1}) == alone[:2]
    assert said({2: 1, 1: 0, 0: 0}) == alone


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", tokenizer="spm")
    for argv, said in (
        (("--lookup", 4), "reads no guesses"), (("-md", path), "reads no guesses"),
        (("--prompt-cache", tmp_path / "p"), "reads every prompt anew"),
    ):  # fmt: skip
        found = Verb(capsys)("serve", path, "--port", 0, "--deterministic", *argv)
        assert found.code == 2 and said in found.err
