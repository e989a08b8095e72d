"""Drafts of a second model: texts are what they are without, whatever it guesses; and when guesses pay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.poisoned_engines import poisoned
from support.tiny import write_model

import graphrt
from graphrt.errors import SessionError
from graphrt.models import Model, load
from graphrt.models.continuous_batch import ContinuousBatch
from graphrt.models.draft import DraftedText, Drafter, check_vocabularies
from graphrt.models.engine import SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.guesses import LOOKED_AT, SETTLED, UNSETTLED, Pace
from graphrt.models.paging.check import check
from graphrt.models.sampling import Sampler
from graphrt.models.sampling_device import Drawn, drawn
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools import cli
from graphrt.tools.sampling.flags import sampler_params
from graphrt.tools.serve.events import Text
from graphrt.tools.serve.scheduler import Scheduler
from graphrt.tools.serve.schemas import CompletionRequest
from graphrt.tools.verbs import serve

OPTIONS = SessionOptions(n_ctx=96, n_batch=12, type_k="f32", type_v="f32", page=16)
PARAMS = SamplerParams(temp=1.5, top_k=40, seed=3, xtc_probability=0.5, xtc_threshold=0.05)
VOCAB = 128


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """One that is guessed for, and one that guesses badly."""
    folder = tmp_path_factory.mktemp("draft")
    return {name: load(write_model(folder / f"{name}.gguf", name), "cpu", exact=True) for name in ("llama", "gemma3")}


def engine_of(model: Model, n_seq: int, **changed: Any) -> PagedEngine:
    """Its pages hold NaN, as those of a device may."""
    return poisoned(PagedEngine(model.decoder, model.backends, replace(OPTIONS, **changed), n_seq))


def texts_of(n: int, seed: int, longest: int = 40) -> list[list[int]]:
    r = np.random.default_rng(seed)
    return [r.integers(0, 60, int(r.integers(2, longest))).tolist() for _ in range(n)]


def alone(model: Model, ids: list[int], n: int, params: SamplerParams) -> list[int]:
    """Tokens after ids, by a session, one step at a time."""
    session, sampler, found = model.session(replace(OPTIONS, page=0)), Sampler(params), list[int]()
    logits = session.eval(ids)
    for _ in range(n):
        found.append(sampler.sample(logits, [*ids, *found]))
        logits = session.eval(found[-1:]) if len(found) < n else logits
    return found


@pytest.mark.parametrize("queued", [False, True], ids=["one at a time", "queued ahead"])
@pytest.mark.parametrize(("kind", "pages"), [("llama", 0), ("gemma3", 0), ("llama", 9)], ids=["good", "bad", "full"])
def test_drafts_change_nothing(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, queued: bool, kind: str, pages: int
) -> None:
    """Greedy and drawn texts come and go, some of which nobody guesses; a sequence is taken over by another text."""
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", queued)
    model, texts = models["llama"], texts_of(5, 12)
    params = [PARAMS if i == 3 else SamplerParams(temp=0) for i in range(5)]
    wanted = [alone(model, text, 14, each) for text, each in zip(texts, params)]
    engine = engine_of(model, 4)
    drafter = Drafter(engine_of(models[kind], 4, n_pages=pages), VOCAB)
    guessers = {i: DraftedText(drafter, i % 4, texts[i], 6) for i in (0, 2, 3, 4)}
    found: dict[int, list[int]] = {i: [] for i in range(5)}
    with ContinuousBatch(engine) as batch:

        def add(i: int) -> None:
            how = drawn(Sampler(params[i]), 96) if i == 3 else Drawn()
            assert how is not None
            batch.add(i % 4, texts[i], 14, how, guessers.get(i))

        for i in (0, 1, 3):
            add(i)
        for step in range(200):
            if step == 3:
                add(2)
            if step > 3 and 0 not in batch.going and len(found[0]) == 14 and not found[4]:
                if queued:
                    guessers[0].end()
                    assert not drafter.engine.lengths[0], "its pages are free"
                engine.free(0)
                add(4)
            if not batch.going:
                break
            for seq, tokens in batch.step().items():
                found[4 if seq == 0 and len(found[0]) == 14 else seq] += tokens
    assert list(found.values()) == wanted
    check(engine.cache.pool)
    check(drafter.engine.cache.pool)
    if kind == "gemma3":
        assert batch.n_right < batch.n_guessed / 2
    elif not pages:
        assert batch.n_right > 0.7 * batch.n_guessed > 14, "but for those of drawn texts"
    for i in (2, 3, 4) if not pages else ():
        known, at = drafter.engine.tokens(i % 4), guessers[i].at
        assert known[:at] == guessers[i].ids[:at] and at > len(texts[i]), "it follows the text, without wrong guesses"


def test_a_good_draft_saves_steps(models: dict[str, Model]) -> None:
    model, (text,) = models["llama"], texts_of(1, 3)
    drafter = Drafter(engine_of(model, 1), VOCAB)
    guesser, steps, found = DraftedText(drafter, 0, text, 8), 0, list[int]()
    with ContinuousBatch(engine_of(model, 1)) as batch:
        batch.add(0, text, 30, Drawn(), guesser)
        while batch.going:
            found += batch.step()[0]
            steps += 1
    assert found == alone(model, text, 30, SamplerParams(temp=0))
    assert batch.n_right == batch.n_guessed and steps <= len(text) // 12 + 7, "1, 3, 5, 9, 9 and the rest"


def test_tokens_that_the_model_has_not_are_not_guessed(models: dict[str, Model]) -> None:
    text = texts_of(1, 3)[0]
    guess = DraftedText(Drafter(engine_of(models["llama"], 1), VOCAB), 0, text, 8).guess(8)
    assert len(guess) == 8
    least = max(guess)
    cut = DraftedText(Drafter(engine_of(models["llama"], 1), least), 0, text, 8).guess(8)
    assert cut == guess[: guess.index(least)]
    assert DraftedText(Drafter(engine_of(models["llama"], 1), VOCAB), 0, [5] * 90, 8).guess(8) == [], "no context left"


def test_vocabularies(tmp_path: Path) -> None:
    spm, bpe = (
        load(write_model(tmp_path / f"{t}.gguf", "llama", tokenizer=t), "cpu").tokenizer for t in ("spm", "bpe")
    )
    check_vocabularies(spm, spm)
    with pytest.raises(SessionError, match="must have the model's vocabulary, token"):
        check_vocabularies(bpe, spm)
    shorter = load(write_model(tmp_path / "short.gguf", "llama", tokenizer="spm"), "cpu").tokenizer
    shorter.n_vocab -= 129
    with pytest.raises(SessionError, match="of 329 tokens, it has 200"):
        check_vocabularies(shorter, spm)


class Clock:
    """Each step takes as long as it says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def paced(
    pace: Pace, clock: Clock, guessed: float, plain: float, n: int, tokens: int = 2, texts: int = 3
) -> list[bool]:
    """Which of n steps guess, where such a step takes `guessed` seconds and gives so many tokens; others give one."""
    found = []
    for _ in range(n):
        found.append(pace.guesses(texts))
        clock.now += guessed if found[-1] else plain
        pace.told(texts, tokens if found[-1] else 1, guessed=found[-1], counts=True)
    return found


def test_guesses_that_cost_more_than_they_give_stop() -> None:
    look = LOOKED_AT + UNSETTLED
    for slow, keeps in (1.5, True), (2.5, False):
        clock = Clock()
        pace = Pace(clock)
        pace.told(3, 1, guessed=False, counts=True)
        assert paced(pace, clock, slow, 1.0, 2 * look) == [True] * look + [False] * look
        assert paced(pace, clock, slow, 1.0, SETTLED) == [keeps] * SETTLED
        assert paced(pace, clock, slow, 1.0, 1) == [True], "it is looked at again"
    assert pace.guesses(40), "another load is looked at by itself"
    clock = Clock()
    pace = Pace(clock)
    pace.told(3, 1, guessed=False, counts=True)
    for _ in range(2 * look):  # other work now and then says nothing
        paced(pace, clock, 1.5, 1.0, 1)
        pace.told(3, 5, guessed=True, counts=False)
        clock.now += 100
        pace.told(3, 5, guessed=True, counts=True)
    assert paced(pace, clock, 1.5, 1.0, SETTLED) == [True] * SETTLED


def test_guesses_pay_by_the_time_of_all_steps() -> None:
    """Of four steps one reads a long guess, gives 5 tokens and takes as long as 8 others: 8 tokens in 11 seconds."""
    for plain, keeps in (1.2, False), (1.5, True):
        clock, found = Clock(), list[bool]()
        pace = Pace(clock)
        pace.told(1, 1, guessed=False, counts=True)
        for i in range(2 * (LOOKED_AT + UNSETTLED) + 1):
            found.append(pace.guesses(1))
            long = found[-1] and i % 4 == 0
            clock.now += (8.0 if long else 1.0) if found[-1] else plain
            pace.told(1, 5 if long else 1, guessed=found[-1], counts=True)
        assert found[-1] == keeps
    clock = Clock()
    pace = Pace(clock)
    pace.told(3, 1, guessed=False, counts=True)
    paced(pace, clock, 1.0, 1.0, 2 * UNSETTLED)
    clock.now += 100  # once, other work
    paced(pace, clock, 1.0, 1.0, 2 * LOOKED_AT)
    assert pace.guesses(3), "2 tokens a second, but for once"


@pytest.mark.parametrize(("slow", "keeps"), [(1.5, True), (2.5, False)])
def test_texts_that_are_not_guessed_say_nothing_against_guesses(slow: float, keeps: bool) -> None:
    """However many steps had nothing to guess, those with guesses are looked at when they come."""
    clock = Clock()
    pace = Pace(clock)
    for _ in range(3 * SETTLED):
        assert pace.guesses(1)
        clock.now += 1.0
        pace.told(1, 1, guessed=False, counts=True)
    assert paced(pace, clock, slow, 1.0, LOOKED_AT + UNSETTLED, texts=1) == [True] * (LOOKED_AT + UNSETTLED)
    assert paced(pace, clock, slow, 1.0, SETTLED, texts=1) == [keeps] * SETTLED, "plain ones were looked at before"
    assert pace.guesses(1), "both are looked at again"


def test_a_server_with_a_draft_model(tmp_path: Path) -> None:
    """As its command line makes it: texts are the same, and fewer steps are made, unless a request says no guesses."""
    path = str(write_model(tmp_path / "m.gguf", "llama", tokenizer="spm"))
    argv = ["serve", path, "--temp", "0", "-np", "2", "-c", "128", "--backend", "cpu", "--exact", "-b", "16"]
    steps, made, schedulers = list[int](), list[list[int]](), list[Scheduler]()
    for more, body in (
        ([], {}), (["-md", path], {}), (["-md", path], {"speculative.n_max": 0}), (["--lookup", "4"], {}),
    ):  # fmt: skip
        args = cli.verb_parser("serve", serve).parse_args([*argv[1:], *more])
        state = serve.made_state(serve.load_model(args, True), args, sampler_params(args))
        assert state.maker is not None and state.worker.scheduler is not None
        scheduler = state.worker.scheduler
        scheduler.pace = None
        request = CompletionRequest.model_validate({"prompt": ["hello the sea"] * 2, "max_tokens": 40, **body})
        texts: list[Text] = state.maker.completion(request, "")
        for text in texts:
            scheduler.add(text)
        while not scheduler.is_idle:
            scheduler.step()
        steps.append(scheduler.counts.steps)
        made += [text.tokens for text in texts]
        schedulers.append(scheduler)
        assert scheduler.drafter is None or not scheduler.drafter.engine.lengths.any(), "nothing is left of texts"
    assert all(tokens == made[0] for tokens in made)
    assert steps[0] == steps[2] > 3 * steps[1]
    assert schedulers[1].counts.right_tokens == schedulers[1].counts.guessed_tokens > 40
    assert not schedulers[2].counts.guessed_tokens
