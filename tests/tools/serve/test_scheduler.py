"""Scheduler: every text is what it would be alone, whatever is made beside it, in whatever order, with few pages; and
nothing of it stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.tiny import write_model

import graphrt
from graphrt.errors import GraphrtError, SessionError
from graphrt.models import Model, load
from graphrt.models.draft import DraftedText
from graphrt.models.engine import SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.generation import TextRules
from graphrt.models.guesses import Pace
from graphrt.models.paging.check import check
from graphrt.models.sampling_params import SamplerParams
from graphrt.tools.serve.events import Cancelled, Event, Text
from graphrt.tools.serve.fair_queue import FairQueue
from graphrt.tools.serve.scheduler import Scheduler

OPTIONS = SessionOptions(n_ctx=128, n_batch=24, type_k="f32", type_v="f32", page=16)
GREEDY = SamplerParams(temp=0)
DRAWN = SamplerParams(temp=1.5, seed=7)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("serve") / "m.gguf"
    return load(write_model(path, request.param, tokenizer="spm"), "cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("serve") / "m.gguf", "llama", tokenizer="spm"), "cpu")


def scheduler_of(model: Model, n_seq: int = 4, **changed: Any) -> Scheduler:
    return Scheduler(PagedEngine(model.decoder, model.backends, replace(OPTIONS, **changed), n_seq))


def text_of(model: Model, prompt: Sequence[int], n: int, params: SamplerParams = GREEDY, **more: Any) -> Text:
    rules = {"ignore_eos": more.pop("ignore_eos", False)} | more.pop("rules", {})
    return Text(list(prompt), n, *model.new_text(params, TextRules(n, **rules)), **more)


def alone(model: Model, text: Text, params: SamplerParams, **rules: Any) -> list[int]:
    options = replace(OPTIONS, page=0)
    pieces = model.generate(text.prompt, text.most, sampling=params, session=model.session(options), **rules)
    return [piece.token for piece in pieces]


def prompts(n: int, seed: int = 3, longest: int = 70) -> list[list[int]]:
    r = np.random.default_rng(seed)
    return [r.integers(3, 250, int(r.integers(1, longest))).tolist() for _ in range(n)]


def run(scheduler: Scheduler) -> list[Event]:
    found: list[Event] = []
    for _ in range(3000):
        if scheduler.is_idle:
            break
        found += scheduler.step()
    assert scheduler.is_idle, "texts end"
    found += scheduler.step()
    return found


def check_nothing_left(scheduler: Scheduler) -> None:
    pool = scheduler.engine.cache.pool
    check(pool)
    assert not any(any(pages.users) for pages in pool.kinds.values())
    assert not scheduler.engine.lengths.any()


def made(text: Text) -> list[int]:
    return text.tokens[len(text.prompt) :]


KINDS: list[tuple[SamplerParams, dict[str, Any]]] = [
    (GREEDY, {}),
    (DRAWN, {}),
    (replace(DRAWN, repeat_penalty=1.3, presence_penalty=0.4, logit_bias=((40, 3.0),)), {"logprobs": 2}),
    (GREEDY, {"ignore_eos": True}),
    (replace(DRAWN, mirostat=2), {}),
]


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS], ids=["greedy", "mixed"])
def test_texts_are_those_that_each_is_alone(llama: Model, kinds: list[tuple[SamplerParams, dict[str, Any]]]) -> None:
    scheduler = scheduler_of(llama, 3)
    texts, wanted = [], []
    for i, prompt in enumerate(prompts(7)):
        params, rules = kinds[i % len(kinds)]
        texts.append(text_of(llama, prompt, 5 + i, params, rules=rules))
        wanted.append(alone(llama, texts[-1], params, **rules))
    for text in texts[:5]:
        scheduler.add(text)
    for _ in range(4):
        scheduler.step()
    for text in texts[5:]:
        scheduler.add(text)
    run(scheduler)
    assert [made(text) for text in texts] == wanted
    check_nothing_left(scheduler)


class Oracle:
    """Guesses what texts go on with, which it was told, every third time with a last token that is wrong. n_left: texts
    that have ended."""

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self._texts, self._n, self.n_left = texts, 0, 0

    def draft(self, asked: dict[DraftedText, int]) -> dict[DraftedText, list[int]]:
        found = {}
        for text, room in asked.items():
            n, self._n = len(text.ids), self._n + 1
            (whole,) = (whole for whole in self._texts if whole[:n] == text.ids)
            guess = whole[n : n + room]
            found[text] = guess[:-1] + [guess[-1] ^ 1] if guess and self._n % 3 == 0 else guess
        return found

    def leave(self, text: DraftedText) -> None:
        self.n_left += 1


def test_guesses_change_no_text_that_the_host_chooses(model: Model) -> None:
    """Whatever their settings, with few pages, a text that asks for no guesses beside them; and each guess is
    counted."""
    kinds = [*KINDS, (DRAWN, {"grammar": "root ::= [a-z ]{3,20}"}), (replace(GREEDY, frequency_penalty=2.0), {})]
    texts, wanted = [], []
    for i, prompt in enumerate(prompts(9)):
        params, rules = kinds[i % len(kinds)]
        more = {"most_guessed": 0} if i == 2 else {}
        texts.append(text_of(model, prompt, 5 + 2 * i, params, rules=rules, **more))
        wanted.append(alone(model, texts[-1], params, **rules))
    oracle = Oracle([[*text.prompt, *tokens] for text, tokens in zip(texts, wanted)])
    engine = PagedEngine(model.decoder, model.backends, replace(OPTIONS, n_pages=12), 4)
    scheduler = Scheduler(engine, 3, oracle)
    for text in texts:
        scheduler.add(text)
    events = run(scheduler)
    assert [made(text) for text in texts] == wanted
    told = [event.piece for event in events if event.text is texts[2] and event.piece is not None]
    assert [piece.token for piece in told] == wanted[2] and all(piece.logprobs is not None for piece in told)
    counts = scheduler.counts
    assert 0 < counts.guesses < counts.right_tokens < counts.guessed_tokens and oracle.n_left >= 8
    assert counts.steps < sum(map(len, wanted)) / 4 + len(texts) * 4
    assert counts.preemptions
    check_nothing_left(scheduler)


def test_guesses_of_the_host_stop_where_they_do_not_pay(llama: Model) -> None:
    class Never(Pace):
        def guesses(self, n_texts: int) -> bool:
            return False

    engine, text = PagedEngine(llama.decoder, llama.backends, OPTIONS, 4), text_of(llama, [5, 6, 7], 20, DRAWN)
    wanted = alone(llama, text, DRAWN)
    scheduler = Scheduler(engine, 3, Oracle([[*text.prompt, *wanted]]), Never())
    scheduler.add(text)
    run(scheduler)
    assert made(text) == wanted and scheduler.counts.guesses == 0 and len(wanted) > 3


#: What the device chooses each in its own way, beside each other.
DEVICE: list[tuple[SamplerParams, dict[str, Any]]] = [
    (GREEDY, {}),
    (replace(DRAWN, repeat_penalty=1.3, presence_penalty=0.4, repeat_last_n=12, logit_bias=((40, 3.0),)), {}),
    (replace(GREEDY, frequency_penalty=2.0, repeat_last_n=-1), {"ignore_eos": True}),
    (replace(DRAWN, xtc_probability=0.5, xtc_threshold=0.02, typical_p=0.9, seed=11), {}),
    (replace(DRAWN, top_k=1000, top_p=0.5, min_p=0.0, seed=12), {"grammar": "root ::= [a-z ]{3,20}"}),
    (GREEDY, {"grammar": 'root ::= ("ab" | [c-f]){2,6}'}),
]


@pytest.mark.parametrize(
    "kinds", [DEVICE[:4], DEVICE, DEVICE[4:]], ids=["queued ahead", "with grammars", "with grammars alone"]
)
def test_the_device_chooses_each_texts_tokens_as_its_sampler(
    llama: Model, monkeypatch: pytest.MonkeyPatch, kinds: list[tuple[SamplerParams, dict[str, Any]]]
) -> None:
    """Texts come, go and begin again, and no step gives its logits to the host."""
    texts, wanted = [], []
    for i, prompt in enumerate(prompts(9, seed=17)):
        params, rules = kinds[i % len(kinds)]
        texts.append(text_of(llama, prompt, 6 + i, params, rules=rules))
        wanted.append(alone(llama, texts[-1], params, **rules))
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", True)
    scheduler = scheduler_of(llama, 3, n_pages=11)
    monkeypatch.setattr(scheduler, "_step_by_host", None)
    for text in texts[:5]:
        scheduler.add(text)
    for _ in range(4):
        scheduler.step()
    for text in texts[5:]:
        scheduler.add(text)
    events = run(scheduler)
    assert not [e.error for e in events if e.error]
    assert [made(text) for text in texts] == wanted
    check_nothing_left(scheduler)


@pytest.mark.parametrize("queued", [False, True], ids=["one at a time", "queued ahead"])
def test_texts_change_between_device_and_host(llama: Model, monkeypatch: pytest.MonkeyPatch, queued: bool) -> None:
    """A text that the host chooses for comes and goes among greedy ones."""
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", queued)
    scheduler = scheduler_of(llama)
    first, second = (text_of(llama, prompt, 30) for prompt in prompts(2))
    between = text_of(llama, [5, 6, 7], 6, replace(DRAWN, top_k=0))
    wanted = [alone(llama, first, GREEDY), alone(llama, second, GREEDY), alone(llama, between, between.sampler.params)]
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(5):
        scheduler.step()
    scheduler.add(between)
    run(scheduler)
    assert [made(first), made(second), made(between)] == wanted


def test_few_pages_change_nothing(model: Model) -> None:
    scheduler = scheduler_of(model, 4, n_pages=6)
    texts = [text_of(model, prompt, 40, ignore_eos=True) for prompt in prompts(4, longest=40)]
    wanted = [alone(model, text, GREEDY, ignore_eos=True) for text in texts]
    for text in texts:
        scheduler.add(text)
    run(scheduler)
    assert scheduler.counts.preemptions > 0
    assert [made(text) for text in texts] == wanted
    check_nothing_left(scheduler)


def test_a_text_ends_where_all_pages_are_full(llama: Model) -> None:
    scheduler = scheduler_of(llama, 2, n_pages=3)
    text = text_of(llama, prompts(1)[0][:20], -1, ignore_eos=True)
    scheduler.add(text)
    events = run(scheduler)
    assert events[-1].piece is not None and events[-1].piece.finish == "context"
    assert len(text.tokens) == 3 * 16 + 1


def test_choices_read_their_prompt_once(llama: Model) -> None:
    scheduler = scheduler_of(llama)
    prompt = prompts(1, seed=8)[0] * 3
    first = text_of(llama, prompt[:100], 3)
    others = [text_of(llama, prompt[:100], 3, leader=first) for _ in range(2)]
    for text in (first, *others):
        scheduler.add(text)
    run(scheduler)
    assert [text.n_cached for text in (first, *others)] == [0, 96, 96]
    assert made(first) == made(others[0]) == made(others[1])


def test_a_leader_that_is_cancelled_leaves_the_others(llama: Model) -> None:
    scheduler = scheduler_of(llama)
    first = text_of(llama, [5, 6, 7], 3)
    other = text_of(llama, [5, 6, 7], 3, leader=first)
    scheduler.add(first)
    scheduler.add(other)
    scheduler.cancel(first)
    run(scheduler)
    assert len(made(other)) == 3 and not made(first)


def test_random_cancels_leave_nothing(model: Model) -> None:
    r = np.random.default_rng(1)
    scheduler = scheduler_of(model, 4, n_pages=12)
    waiting = [text_of(model, p, int(r.integers(1, 16)), KINDS[i % 4][0], key=str(i % 3))
               for i, p in enumerate(prompts(24, seed=11, longest=50))]  # fmt: skip
    there, events = list[Text](), list[Event]()
    while waiting or not scheduler.is_idle:
        if waiting and r.random() < 0.5:
            there.append(waiting.pop())
            scheduler.add(there[-1])
        if there and r.random() < 0.2:
            scheduler.cancel(there[int(r.integers(len(there)))])
        events += scheduler.step()
    ends = [e for e in events if e.piece is None or e.piece.finish]
    assert {id(e.text) for e in ends} == {id(text) for text in there} and len(ends) == len(there) == 24
    assert {type(e.error) for e in ends if e.error} == {Cancelled}
    check_nothing_left(scheduler)


class Refuses:
    """A grammar that lets nothing through after a while."""

    def __init__(self, n_vocab: int) -> None:
        self.left, self.n_vocab = 2, n_vocab

    def mask(self) -> np.ndarray:
        return np.full(self.n_vocab, self.left > 0)

    def bits(self) -> np.ndarray:
        return np.packbits(np.resize(self.mask(), -(-self.n_vocab // 32) * 32), bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        self.left -= 1


@pytest.mark.parametrize("queued", [False, True], ids=["by the host", "by the device"])
def test_a_text_that_fails_is_alone_in_that(llama: Model, monkeypatch: pytest.MonkeyPatch, queued: bool) -> None:
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", queued)
    scheduler = scheduler_of(llama)
    bad, good = (text_of(llama, prompt, 8) for prompt in prompts(2))
    bad.sampler.matcher = Refuses(llama.network.hp.n_vocab)
    wanted = alone(llama, good, GREEDY)
    scheduler.add(bad)
    scheduler.add(good)
    errors = [e for e in run(scheduler) if e.error]
    assert [e.text for e in errors] == [bad] and isinstance(errors[0].error, SessionError)
    assert len(made(bad)) == 2 and made(good) == wanted
    check_nothing_left(scheduler)


def test_a_step_that_fails_ends_its_texts_and_no_others(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(llama, 2)
    texts = [text_of(llama, prompt, 8, DRAWN) for prompt in prompts(3)]
    wanted = alone(llama, texts[2], DRAWN)
    for text in texts:
        scheduler.add(text)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.engine, "step", lambda part, size: (_ for _ in ()).throw(RuntimeError("no memory")))
        events = scheduler.step()
    assert {e.text for e in events} == set(texts[:2]) and all(isinstance(e.error, GraphrtError) for e in events)
    run(scheduler)
    assert made(texts[2]) == wanted
    check_nothing_left(scheduler)


def test_keys_take_turns(llama: Model) -> None:
    scheduler = scheduler_of(llama, 1)
    many = [text_of(llama, [5, 6, i], 1, key="many") for i in range(10, 15)]
    one = text_of(llama, [9, 9], 1, key="one")
    for text in (*many, one):
        scheduler.add(text)
    order = [event.text for event in run(scheduler)]
    assert order == [many[0], one, *many[1:]]


def test_a_queue_gives_each_key_its_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for key, item in ("a", "a1"), ("a", "a2"), ("b", "b1"), ("a", "a3"), ("b", "b2"), ("c", "c1"):
        queue.put(key, item)
    queue.put_first("c", "c0")
    assert queue.remove("b", "b2") and not queue.remove("b", "b2") and len(queue) == 6
    assert queue.take(lambda item: item == "a2") == "a2"
    assert [queue.take() for _ in range(6)] == ["c0", "b1", "a1", "c1", "a3", None] and len(queue) == 0


def test_where_a_turn_s_time_goes(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step reads, and how long the device had it, by a clock handed in; each step is told once. On a backend
    that queues nothing the host waits all the while, on one that does only where it asks; where the host chooses, for
    the engine's whole step."""
    home = graphrt.get_backend("cpu").__class__
    monkeypatch.setattr(home, "stopwatch", lambda self: lambda: lambda: 5.0)
    for queues in (False, True):
        monkeypatch.setattr(home, "asynchronous", queues)
        scheduler = scheduler_of(llama)
        first, second = text_of(llama, [4] * 30, 3), text_of(llama, [5, 6], 3)
        scheduler.add(first)
        scheduler.add(second)
        scheduler.step()
        assert first.came <= first.read <= first.began and second.read
        seen = [*scheduler.times]
        while not scheduler.is_idle:
            scheduler.step()
            seen += scheduler.times
        read = [each.n_tokens for each in seen]
        assert read[:2] == [24, 8] and sum(read) == 30 + 2 + 2 + 2, "the last tokens are read by no step"
        assert all(each.device == 5.0 for each in seen) and all((each.waited >= 5.0) != queues for each in seen)
    scheduler.add(text_of(llama, [4] * 30, 2, rules={"logprobs": 1}))
    run(scheduler)
    scheduler.add(text_of(llama, [4] * 9, 2, rules={"logprobs": 1}))
    scheduler.step()
    (host,) = scheduler.times
    assert host.n_tokens == 9 and 0 < host.device == host.waited < 5.0


def test_what_texts_begin_with_is_read_once(llama: Model) -> None:
    """Four texts that come at once, of the same 70 tokens and others behind: the first one reads them for all. One that
    shares too little, and those of other beginnings, don't wait."""
    scheduler = scheduler_of(llama, 6)
    same = prompts(1, 11, 71)[0]
    same = (same * 70)[:70]
    texts = [text_of(llama, [*same, *own], 5) for own in ([5, 6, 7], [8] * 20, [9, 5], [6])]
    others = [text_of(llama, [*same[:20], *[30 + i for i in range(60)]], 5), text_of(llama, [40] * 30, 5)]
    for text in (texts[0], *others, *texts[1:]):
        scheduler.add(text)
    scheduler.step()
    assert [text.state == "waiting" for text in [*texts, *others]] == [False, True, True, True, False, False]
    scheduler.step()
    assert not any(text.state == "waiting" for text in texts) and texts[0].state == "generating", "it goes on"
    run(scheduler)
    assert [text.n_cached for text in texts] == [0, 64, 64, 64]
    assert [made(text) for text in [*texts, *others]] == [alone(llama, t, GREEDY) for t in [*texts, *others]]
    check_nothing_left(scheduler)


def test_nobody_waits_for_a_text_that_left(llama: Model) -> None:
    scheduler = scheduler_of(llama, 3)
    texts = [text_of(llama, [7] * 90, 4) for _ in range(2)]
    for text in texts:
        scheduler.add(text)
    scheduler.step()
    assert texts[1].state == "waiting"
    scheduler.cancel(texts[0])
    run(scheduler)
    assert made(texts[1]) == alone(llama, texts[1], GREEDY)
    check_nothing_left(scheduler)
