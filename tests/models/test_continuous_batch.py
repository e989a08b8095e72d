"""ContinuousBatch: sequences that come and go while others generate give what each gives alone, queued ahead or not;
what sequences share is told truly."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.poisoned_engines import poisoned
from support.tiny import write_model

import graphrt
import graphrt.models.warm_up as warm_up_module
from graphrt.errors import CacheFullError, SessionError
from graphrt.execute import Executable
from graphrt.models import Model, load
from graphrt.models.continuous_batch import ContinuousBatch
from graphrt.models.engine import MAX_AHEAD, SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.paged_steps import MAX_STEPS
from graphrt.models.paging.check import check
from graphrt.models.paging.prefixes import Prefix, PrefixRule
from graphrt.models.prompt_lookup import PromptLookup
from graphrt.models.recent import Recent
from graphrt.models.sampling import Sampler, Uniforms
from graphrt.models.sampling_device import Drawn, drawn
from graphrt.models.sampling_params import SamplerParams
from graphrt.models.step_chosen import Chooser
from graphrt.models.step_paged import PagedStep, StepSize
from graphrt.models.warm_up import sizes_of, warm_up
from graphrt.ops import RowSettings, SampleParams
from graphrt.program import Program

OPTIONS = SessionOptions(n_ctx=96, n_batch=12, type_k="f32", type_v="f32", page=16)
RINGS = replace(OPTIONS, page=0)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("batch") / "m.gguf", request.param), "cpu", exact=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("batch") / "m.gguf", "llama"), "cpu", exact=True)


@pytest.fixture(params=[False, True], ids=["one at a time", "queued ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the backend says that it queues its work."""
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", request.param)
    return bool(request.param)


def paged(model: Model, n_seq: int, **changed: Any) -> PagedEngine:
    """An engine whose pages hold NaN, as those of a device may."""
    engine = model.engine(n_seq, replace(OPTIONS, **changed))
    assert isinstance(engine, PagedEngine)
    return poisoned(engine)


def alone(model: Model, ids: list[int], n: int) -> list[int]:
    """The likeliest tokens after ids, by a session, one step at a time."""
    session, found = model.session(RINGS), list[int]()
    logits = session.eval(ids)
    while len(found) < n:
        found.append(int(logits.argmax()))
        logits = session.eval([found[-1]]) if len(found) < n else logits
    return found


def texts_of(n: int, seed: int = 5, longest: int = 60) -> list[list[int]]:
    r = np.random.default_rng(seed)
    return [r.integers(0, 60, int(r.integers(1, longest))).tolist() for _ in range(n)]


def run(batch: ContinuousBatch, found: dict[int, list[int]]) -> None:
    for seq, tokens in batch.step().items():
        found.setdefault(seq, []).extend(tokens)


def test_sequences_come_and_go(model: Model, ahead: bool) -> None:
    """A long prompt is read in chunks beside sequences that generate; one ends early, and another takes its place."""
    texts, engine, found = texts_of(5, 3), paged(model, 4), dict[int, list[int]]()
    with ContinuousBatch(engine) as batch:
        batch.add(2, texts[0], 20)
        batch.add(0, texts[1], 6)
        for _ in range(4):
            run(batch, found)
        batch.add(1, texts[2], 9)
        run(batch, found)
        batch.add(3, texts[3], 30)
        while len(found.get(3, ())) < 4:
            run(batch, found)
        batch.end(3)
        assert engine.cache.pool.of(3).reserved == engine.lengths[3], "nor is anything queued for it"
        cut = found.pop(3)
        engine.free(3)
        batch.add(3, texts[4], 7)
        while batch.going:
            run(batch, found)
    check(engine.cache.pool)
    assert cut == alone(model, texts[3], len(cut))
    for seq, text, n in ((2, texts[0], 20), (0, texts[1], 6), (1, texts[2], 9), (3, texts[4], 7)):
        assert found[seq] == alone(model, text, n)
        assert engine.tokens(seq) == [*text, *found[seq][:-1]] and engine.lengths[seq] == len(text) + n - 1
        assert engine.cache.pool.of(seq).reserved == engine.lengths[seq], "nothing queued stays"


def test_a_step_reads_chunks_and_single_tokens(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = paged(llama, 3), list[dict[int, int]]()
    write = PagedStep.write

    def note(step: PagedStep, new: dict[int, int], *how: Any, **named: Any) -> None:
        seen.append(dict(new))
        write(step, new, *how, **named)

    monkeypatch.setattr(PagedStep, "write", note)
    with ContinuousBatch(engine) as batch:
        batch.add(1, [5, 6], 6)
        batch.step()
        batch.add(0, list(range(20)), 3)
        batch.add(2, [9], 2)
        while batch.going:
            batch.step()
    assert seen == [{1: 2}, {1: 1, 0: 12, 2: 1}, {1: 1, 0: 8, 2: 1}, {1: 1, 0: 1}, {1: 1, 0: 1}, {1: 1}]


def test_steps_are_queued_ahead_and_few(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(llama.backends[0]), "asynchronous", True)
    engine = paged(llama, 3)
    texts = texts_of(3, 4, 30)
    with ContinuousBatch(engine) as batch:
        for seq, text in enumerate(texts):
            batch.add(seq, text)
        batch.step()
        assert len(batch._queued) == MAX_AHEAD - 1, "the host has looked at one of them"
        while batch.going:
            batch.step()
    assert engine.lengths.tolist() == [96, 96, 96], "until the context is full"
    assert len(engine._prepared) <= 12 < MAX_STEPS, "rungs of tokens, sequences and pages"


def test_tables_are_as_wide_as_texts_need(llama: Model) -> None:
    engine = paged(llama, 2, n_ctx=8192, n_batch=512)
    engine.read({0: [1] * 20})
    engine.read({1: [2] * 2100})
    widths = {size.n_blocks for size, _ in engine._prepared}
    assert widths == {128, 512} and engine.largest_size(2, 2).n_blocks == 512, "few sizes of steps that read prompts"
    engine.read({1: [3]})
    assert {size.n_blocks for size, _ in engine._prepared if size.n_tokens == 1} == {256}


DRAWN = SamplerParams(temp=1.5, top_k=40, top_p=0.9, min_p=0.0, seed=1)
DRY = {"dry_multiplier": 4.0, "dry_base": 1.5, "dry_allowed_length": 1}


@pytest.mark.parametrize(
    "params",
    [
        DRAWN,
        DRAWN.changed({**DRY, "frequency_penalty": 0.5, "logit_bias": {7: 3.0, 9: -2.0}}),
        SamplerParams(temp=0.0).changed({**DRY, "dry_penalty_last_n": 20}),
    ],
    ids=["drawn", "DRY and more", "likeliest but for DRY"],
)
def test_tokens_are_those_of_samplers(llama: Model, ahead: bool, params: SamplerParams) -> None:
    """Each sequence's by numbers of its own, as a sampler draws them."""
    wanted, texts = [], texts_of(3, 8, 40)
    for i, text in enumerate(texts):
        sampler, session, tokens = Sampler(replace(params, seed=i)), llama.session(RINGS), list[int]()
        logits = session.eval(text)
        for _ in range(24):
            tokens.append(sampler.sample(logits, [*text, *tokens]))
            logits = session.eval(tokens[-1:])
        wanted.append(tokens)
    engine, found = paged(llama, 3), dict[int, list[int]]()
    with ContinuousBatch(engine) as batch:
        for i in (1, 0, 2):
            how = drawn(Sampler(replace(params, seed=i)), 96)
            assert how is not None
            batch.add(i, texts[i], 24, how)
            run(batch, found)
        while batch.going:
            run(batch, found)
    for i, tokens in enumerate(wanted):
        assert found[i] == tokens
    assert len({tuple(tokens) for tokens in found.values()}) == 3


class Guesses(PromptLookup):
    """Guesses what is right at first, and then something else, of any length."""

    def __init__(self, text: list[int], right: list[int]) -> None:
        super().__init__(text, 8)
        self.right, self.n, self.seen, self.good = right, len(text), list[int](), list[int]()
        self.draws = np.random.default_rng(len(text))

    @property
    def size(self) -> int:
        return 8

    @property
    def is_ready(self) -> bool:
        return True

    def guess(self, room: int) -> list[int]:
        at, n, good = len(self._ids) - self.n, int(self.draws.integers(0, 7)), int(self.draws.integers(0, 7))
        guess = [*self.right[at : at + good], *self.draws.integers(0, 60, 7).tolist()][: min(n, room)]
        pairs = zip(guess, self.right[at:])
        self.good.append(sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return guess

    def told(self, guessed: int, right: int) -> None:
        assert right == self.good[-1], "all that is right stays"
        self.seen.append(right)


def test_guesses_change_nothing(model: Model, ahead: bool) -> None:
    """Right ones, wrong ones and none, of greedy and drawn texts beside others that nobody guesses."""
    params = SamplerParams(temp=1.5, top_k=40, seed=3, xtc_probability=0.5, xtc_threshold=0.05)
    texts, engine, found = texts_of(4, 12, 40), paged(model, 4), dict[int, list[int]]()
    wanted = {seq: alone(model, text, 14) for seq, text in enumerate(texts)}
    sampler, session = Sampler(params), model.session(RINGS)
    logits, wanted[3] = session.eval(texts[3]), []
    for _ in range(14):
        wanted[3].append(sampler.sample(logits, [*texts[3], *wanted[3]]))
        logits = session.eval(wanted[3][-1:])
    how = drawn(Sampler(params), 96)
    assert how is not None
    lookups = {seq: Guesses(texts[seq], wanted[seq]) for seq in (0, 2, 3)}
    with ContinuousBatch(engine) as batch:
        for seq in (0, 1, 3):
            batch.add(seq, texts[seq], 14, how if seq == 3 else Drawn(), lookups.get(seq))
        for _ in range(4):
            run(batch, found)
        batch.add(2, texts[2], 14, Drawn(), lookups[2])
        while batch.going:
            run(batch, found)
    check(engine.cache.pool)
    assert found == wanted
    seen = [right for lookup in lookups.values() for right in lookup.seen]
    assert max(seen) > 3 and 0 in seen
    for seq in lookups:
        assert engine.tokens(seq) == [*texts[seq], *wanted[seq][:-1]]
        assert engine.cache.pool.of(seq).reserved == engine.lengths[seq], "nothing of a wrong guess stays"


def test_room_is_asked_for_by_steps(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, and not once a sequence, which would be n * n looks at sequences."""
    engine, asked = paged(llama, 12), list[int]()
    monkeypatch.setattr(engine.cache.pool, "check_room", lambda new, **_: asked.append(len(new)))
    with ContinuousBatch(engine) as batch:
        for seq in range(12):
            batch.add(seq, [5 + seq], 6)
        batch.step()
        asked.clear()
        batch.step()
    assert asked == [12], "as its tokens get their places"


class LetsAll:
    """A grammar that lets all tokens through."""

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab, self.text = n_vocab, list[int]()

    def mask(self) -> np.ndarray:
        return np.ones(self.n_vocab, bool)

    def bits(self) -> np.ndarray:
        return np.full(-(-self.n_vocab // 32), 0xFFFFFFFF, np.uint32)

    def accept(self, token: int) -> None:
        self.text.append(token)


def test_a_step_is_queued_before_its_masks_are_known(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where grammars keep steps waiting the next one is read behind the choice of the one before, and before its own
    masks are known. The texts are those without grammars."""
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", True)
    engine, seen, found = paged(llama, 2), list[str](), dict[int, list[int]]()
    for owner, name in (PagedStep, "write"), (Chooser, "choose"), (ContinuousBatch, "_run"):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *of, plain=plain, name=name: (seen.append(name), plain(*of))[1])
    texts = texts_of(2, 5, 6)
    grammars = [LetsAll(llama.network.hp.n_vocab) for _ in texts]
    with ContinuousBatch(engine) as batch:
        for seq, (text, grammar) in enumerate(zip(texts, grammars)):
            batch.add(seq, text, 5, Drawn(matcher=grammar))
        while batch.going:
            run(batch, found)
    assert seen == ["write", "_run", *["write", "choose", "_run"] * 4, "choose"]
    assert found == {seq: alone(llama, text, 5) for seq, text in enumerate(texts)}
    assert [grammar.text for grammar in grammars] == [found[seq][:-1] for seq in range(2)], "none for the last token"


def test_a_choice_waits_for_nothing_but_its_mask(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step's tokens are known, before they are given, the next ones are chosen and a step that reads them is
    queued: the device never waits for what the caller does with tokens. Each token is the likeliest of those that its
    own text's grammar lets through behind the one before, also where a text beside it has none."""
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", True)
    engine, texts, found = paged(llama, 3), texts_of(3, 5, 6), dict[int, list[int]]()
    grammars = [Differs(llama.network.hp.n_vocab, 3 + seq) for seq in range(2)]
    masked = RowSettings(masked=True)
    seen = list[str]()
    for owner, name in (Chooser, "choose"), (ContinuousBatch, "_run"), (ContinuousBatch, "_taken"):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *of, plain=plain, name=name: (seen.append(name), plain(*of))[1])
    with ContinuousBatch(engine) as batch:
        for seq, text in enumerate(texts):
            batch.add(seq, text, 6, Drawn(masked, matcher=grammars[seq]) if seq < 2 else Drawn())
        run(batch, found)
        for _ in range(3):
            seen.clear()
            run(batch, found)
            assert seen == ["_taken", "choose", "_run"]
            assert batch._queued[0].answer is not None and batch._queued[1].answer is None
        while batch.going:
            run(batch, found)
    assert found[2] == alone(llama, texts[2], 6)
    for seq, grammar in enumerate(grammars):
        session, fresh = llama.session(RINGS), Differs(grammar.n_vocab, grammar.step)
        logits = session.eval(texts[seq])
        for token in found[seq]:
            assert token == int(np.where(fresh.mask(), logits, -np.inf).argmax())
            fresh.accept(token)
            logits = session.eval([token])
        assert grammar.text == found[seq][:-1], "of the last one nobody wants a mask"


class Differs(LetsAll):
    """A grammar that lets every step-th token through, from one on that follows from the token before."""

    def __init__(self, n_vocab: int, step: int) -> None:
        super().__init__(n_vocab)
        self.step = step

    def mask(self) -> np.ndarray:
        return np.arange(self.n_vocab) % self.step == (self.text[-1] + 1 if self.text else 0) % self.step

    def bits(self) -> np.ndarray:
        padded = np.zeros(-(-self.n_vocab // 32) * 32, bool)
        padded[: self.n_vocab] = self.mask()
        return np.packbits(padded, bitorder="little").view(np.uint32)


def test_an_engine_is_warmed_up(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all sizes have run, and nothing of it is seen afterwards; a backend that doesn't queue does nothing."""
    engine = paged(llama, 5)
    warm_up(engine)
    assert not any(len(key) == 3 and key[1] for key in engine._prepared), "no ways to choose"
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", True)
    engine, compiled = paged(llama, 5), list[int]()
    monkeypatch.setattr(Program, "compile_ahead", lambda program: compiled.append(1))
    warm_up(engine)
    assert (12, 5) in {key[0][:2] for key in engine._prepared}, "prompts beside all others"
    assert len(compiled) >= 2 * 5 + 4 and not engine.lengths.any() and engine.batch is None
    check(engine.cache.pool)
    before, found = len(engine._prepared), dict[int, list[int]]()
    texts = texts_of(5, 4, 12)
    with ContinuousBatch(engine) as batch:
        for seq, text in enumerate(texts):
            batch.add(seq, text[:1], 6)
        while batch.going:
            run(batch, found)
    assert len(engine._prepared) == before, "all sizes were there"
    assert found == {seq: alone(llama, text[:1], 6) for seq, text in enumerate(texts)}


def test_prompts_meet_no_new_sizes(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that come at any time, however many are there, are read by steps that a warm-up has made: 18 texts, of 18
    that may be there, whose tokens are drawn. Most of these steps have run twice by then."""
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", True)
    engine, runs = paged(llama, 18, n_batch=6), Counter[int]()
    plain = Executable.run
    monkeypatch.setattr(Executable, "run", lambda exe: (runs.update([id(exe)]), plain(exe))[1])
    warm_up(engine, seconds=1e9)
    monkeypatch.setattr(Executable, "run", plain)
    warm = {key: runs[id(step.exe)] for key, step in engine._prepared.items()}
    assert not engine.lengths.any() and engine.batch is None
    check(engine.cache.pool)
    r, how = np.random.default_rng(1), RowSettings.of(SampleParams())
    with ContinuousBatch(engine) as batch:
        for i, text in enumerate(texts_of(30, 8, 30)):
            if i >= 18:
                while len(batch.going) == 18:
                    batch.step()
            seq = next(seq for seq in range(18) if seq not in batch.going)
            engine.free(seq)
            batch.add(seq, text, int(r.integers(1, 12)), Drawn(how, Uniforms(i)))
            for _ in range(int(r.integers(0, 3))):
                batch.step()
        while batch.going:
            batch.step()
    asked = {key for key in engine._prepared if key not in warm}
    assert {key[0].n_seq for key in asked} <= {16}, "a few texts' beside prompts but the largest, which are left"
    used = {key for key in engine._prepared if key[1] and key[0].n_seq != 16}
    assert all(warm[key] >= 2 for key in used), "captured by then"


class Anything(Guesses):
    """Guesses 1 or 2 tokens, whatever they are."""

    def guess(self, room: int) -> list[int]:
        return self.draws.integers(0, 60, int(self.draws.integers(1, 3))).tolist()[:room]

    def told(self, guessed: int, right: int) -> None:
        pass


def test_guesses_meet_no_new_sizes(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses of one, of a few and of all texts, greedy and drawn, are read and chosen by steps that a warm-up has
    made."""
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", True)
    engine, runs, plain = paged(llama, 3, n_batch=12), Counter[int](), Executable.run
    monkeypatch.setattr(Executable, "run", lambda exe: (runs.update([id(exe)]), plain(exe))[1])
    warm_up(engine, most_guessed=2, seconds=0)
    warm = Counter(runs)
    for n in (1, 2, 3):
        for settings in (RowSettings(), RowSettings.of(SampleParams())):
            with ContinuousBatch(engine) as batch:
                for seq in range(n):
                    how = Drawn(settings, Uniforms(seq) if settings.temp > 0 else None)
                    batch.add(seq, [seq], 12, how, Anything([seq] * (1 + seq), []))
                while batch.going:
                    batch.step()
            assert batch.n_guessed > 6 * n
            for seq in range(n):
                engine.free(seq)
    made = {id(made.exe) for kept in (engine._prepared, engine._choosers) for made in kept.values()}
    assert all(warm[exe] >= 2 for exe in runs if exe in made and runs[exe] > warm[exe]), "captured by then"
    assert set(runs) == set(warm)


def test_a_warm_up_ends_in_time(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no time left is compiled, and run by nobody; so are kernels for what texts share."""
    for name in ("asynchronous", "reads_shared_once"):
        monkeypatch.setattr(graphrt.get_backend("cpu").__class__, name, True)
    ran = list[StepSize]()
    monkeypatch.setattr(warm_up_module, "_run_size", lambda engine, size, settings: ran.append(size))
    engine, seconds = paged(llama, 5), iter(range(100))
    warm_up(engine, seconds=3.0, clock=lambda: float(next(seconds)))
    beside = sizes_of(engine).beside
    assert ran == beside[:2] and ran[0].n_tokens == 17, "the largest first"
    shared = {key[0] for key in engine._prepared if key[0].n_groups}
    assert {size.n_tokens for size in shared if size.n_tokens <= 5} == {2, 3, 4, 5} and beside[0].n_tokens == 17
    assert {size._replace(n_groups=0) for size in shared} >= set(beside)


def test_steps_that_weigh_too_much_go() -> None:
    recent = Recent[int, int](9, 10, lambda value: value)
    for key, weight in enumerate((4, 4, 2, 3, 30)):
        recent.made(key, lambda weight=weight: weight)
        kept = [[0], [0, 1], [0, 1, 2], [1, 2, 3], [4]]
        assert list(recent) == kept[key], "the oldest goes, and one that is too heavy by itself stays"


def test_steps_are_queued_where_nothing_is_guessed(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that may be guessed and has nothing to guess has a step under way as its tokens are given; so has one
    whose next tokens are guessed, and that step reads the guess."""
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", True)
    text = texts_of(1, 7, 20)[0]
    said = alone(llama, text, 24)
    for most in (0, 2):
        lookup, seen = PromptLookup(said, 2), list[list[int]]()
        if not most:
            monkeypatch.setattr(lookup, "_found", lambda: None)
        with ContinuousBatch(paged(llama, 1)) as batch:
            batch.add(0, text, 24, guesser=lookup)
            found = batch.step()[0]
            while batch.going:
                seen.append([read.guessed for queued in batch._queued for read in queued.reads])
                found += batch.step()[0]
        assert found == said and max(n for each in seen for n in each) == most
        assert all(seen[:-3]), "a step is under way as tokens are given"
        assert most or {len(each) for each in seen[:-3]} == {2}, "and one behind it"


def test_what_is_guessed() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 2, 3], 6)
    assert lookup.guess(9) == [7, 8], "what followed the latest 2, 3"
    assert lookup.guess(1) == [7] and lookup.guess(0) == []
    lookup.told(2, 1)
    assert lookup.guess(9) == [7, 8, 2], "three times as many as were right"
    lookup.push(4)
    assert lookup.guess(9) == [5, 9, 2], "the longer run, 2 3 4, stood elsewhere"
    lookup.push(6)
    assert lookup.guess(9) == []
    for _ in range(4):
        lookup.told(2, 0)
    assert lookup.pauses
    for token in range(20, 36):
        lookup.push(token)
    assert not lookup.pauses
    for _ in range(4):
        lookup.told(2, 0)
    for token in range(40, 56):
        lookup.push(token)
    assert lookup.pauses, "twice as long"


def test_a_full_cache_is_said_and_goes_on(llama: Model, ahead: bool) -> None:
    """What was given stays right; when one has ended, the others go on from where they were."""
    engine, found = paged(llama, 3, n_pages=5, share=False), dict[int, list[int]]()
    texts = [[1] * 14, [2] * 20, [3] * 9]
    with ContinuousBatch(engine) as batch:
        for seq, text in enumerate(texts):
            batch.add(seq, text, 40)
        with pytest.raises(CacheFullError, match="5 pages of 16 tokens"):
            while batch.going:
                run(batch, found)
        assert batch.going == [0, 1, 2] and not batch._queued, "all tokens that were made are given first"
        check(engine.cache.pool)
        batch.end(1)
        assert engine.tokens(1) == [*texts[1], *found[1][:-1]]
        away = engine.swap_out(1)
        while len(found[0]) < 20:
            run(batch, found)
        batch.end(2)
        engine.free(2)
        engine.swap_in(2, away)
        batch.add(2, [found[1][-1]], 3)
        found[2] = []
        while len(found[2]) < 3:
            run(batch, found)
    assert found[0] == alone(llama, texts[0], len(found[0]))
    assert found[1] + found[2] == alone(llama, texts[1], len(found[1]) + 3)
    with ContinuousBatch(paged(llama, 2, n_pages=2)) as batch, pytest.raises(CacheFullError):
        batch.add(0, list(range(40)))


def test_what_fails_ends_all_and_keeps_what_was_given(
    llama: Model, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, (a, b) = paged(llama, 2), texts_of(2, 6)
    batch = ContinuousBatch(engine)
    batch.add(0, a, 20)
    batch.add(1, b, 20)
    while not {0, 1} <= set(batch.step()):
        pass
    lengths = engine.lengths.copy()

    def interrupted(exe: graphrt.Executable) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(graphrt.Executable, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(MAX_AHEAD + 1):
                lengths = engine.lengths.copy()
                batch.step()
    check(engine.cache.pool)
    assert not batch.going and engine.batch is None and engine.lengths.tolist() == lengths.tolist()
    assert all(engine.cache.pool.of(seq).reserved == lengths[seq] for seq in (0, 1))
    again = dict[int, list[int]]()
    with ContinuousBatch(engine) as batch:
        batch.add(0, [7], 5)
        while batch.going:
            run(batch, again)
    assert again[0] == alone(llama, engine.tokens(0)[: lengths[0] + 1], 5)


def test_what_can_not_be(llama: Model) -> None:
    engine = paged(llama, 2)
    with ContinuousBatch(engine) as batch:
        batch.add(0, [1, 2], 5)
        with pytest.raises(SessionError, match="one batch at a time"):
            ContinuousBatch(engine)
        for work in (
            lambda: batch.add(0, [3]), lambda: engine.free(0), lambda: engine.fork(0, 1), lambda: engine.read({0: [1]}),
            lambda: engine.swap_out(0),
        ):  # fmt: skip
            with pytest.raises(SessionError, match="sequence 0 generates in a batch; end it there first"):
                work()
        for n in (0, -2):
            with pytest.raises(SessionError, match=f"at least 1 token, or -1, until its context is full, got {n}"):
                batch.add(1, [3], n)
        with pytest.raises(SessionError, match=r"must be going on, \[0\] are, got 1"):
            batch.end(1)
        with pytest.raises(SessionError, match="the context holds 96 tokens of each sequence, got 97"):
            batch.add(1, [0] * 97)
        other = engine.read({1: [4, 5]})
        assert np.array_equal(other, paged(llama, 2).read({1: [4, 5]})), "another sequence is read meanwhile"
        engine.reset()
        assert batch.step() == {} and not batch.going
    engine.read({0: [1]})


# ---- prefixes ----


@pytest.fixture
def shared(llama: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[dict[int, int], list[Prefix]]]]:
    """What steps were told of prefixes, on a backend that makes use of them where that saves anything. The promise that
    the op is given is held against the inputs that it reads."""
    seen: list[tuple[dict[int, int], list[Prefix]]] = []
    write = PagedStep.write

    def note(step: PagedStep, new: dict[int, int], *how: Any, **named: Any) -> None:
        write(step, new, *how, **named)
        inputs, found = step.inputs, list[Prefix]()
        if inputs.prefixes is not None:
            groups = step.own(inputs.prefixes).reshape(-1, 3)
            found = [Prefix(*map(int, row)) for row in groups if row[1]]
            assert found and found == sorted(found) and all(a.first + a.n_seq <= b.first for a, b in pairwise(found))
            table = step.own(inputs.tables["full"]).reshape(-1, inputs.tables["full"].ne[0])
            before = step.own(inputs.lengths) - np.diff(step.own(inputs.q_starts))
            for first, n, pages in found:
                assert (table[first : first + n, :pages] == table[first, :pages]).all() and (
                    table[first, :pages] >= 0
                ).all()
                assert (before[first : first + n] >= pages * 16).all()
        seen.append((dict(new), found))

    monkeypatch.setattr(type(llama.backends[0]), "reads_shared_once", True)
    monkeypatch.setattr(PrefixRule, "of", classmethod(lambda cls, hp, page: cls(page, 0, 0)))
    monkeypatch.setattr(PagedStep, "write", note)
    yield seen


def test_a_system_prompt_is_told_of(llama: Model, shared: list[tuple[dict[int, int], list[Prefix]]]) -> None:
    """Sequences in any order that begin with the same pages are read side by side, and each gives its own logits."""
    engine, text = paged(llama, 6), texts_of(1, 2)[0][:37]
    others = texts_of(6, 9, 30)
    full = (*text, *text)[:48]
    engine.read({4: [*full[:33], 1]})
    engine.read({0: [*full, 2], 1: [59, *others[1]], 2: [*full, 3], 5: [*full[:33], 5]})
    engine.read({0: [4]})
    shared.clear()
    part = {0: [7], 1: [8], 4: [9], 2: [10, 11], 5: [12]}
    found = engine.read(part)
    ((new, groups),) = shared
    assert set(new) == set(part) and sum(g.n_seq for g in groups) == 4 and groups[0].n_pages == 2
    for seq, row in zip(part, found):
        wanted = llama.session(RINGS).eval(engine.tokens(seq))
        assert np.abs(row - wanted).max() < 1e-4
    forked = paged(llama, 4)
    forked.read({3: full})
    forked.fork(3, 1)
    shared.clear()
    forked.read({1: [1], 3: [2]})
    assert shared[0][1] == [Prefix(0, 2, 3)]
    forked.read({1: [1] * 3, 3: [2]})
    assert shared[1][1] == [Prefix(0, 2, 3)], "pages behind the fork are each one's own"


def test_batches_tell_too_and_rules_refuse(
    llama: Model, shared: list[tuple[dict[int, int], list[Prefix]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, text = paged(llama, 4), texts_of(1, 2)[0][:33]
    engine.read({0: text})
    for seq in (1, 2, 3):
        engine.fork(0, seq)
    found = dict[int, list[int]]()
    shared.clear()
    with ContinuousBatch(engine) as batch:
        for seq in (2, 0, 3, 1):
            batch.add(seq, [seq], 4)
        while batch.going:
            run(batch, found)
    assert len(shared) == 4 and all(groups == [Prefix(0, 4, 2)] for _, groups in shared)
    for seq, tokens in found.items():
        assert tokens == alone(llama, [*text, seq], 4)
    plan = engine.plan(dict.fromkeys(range(4), 1))
    assert plan.size.n_groups == 1 and "4 sequences share 2 pages" in plan.prefixes.reason
    engine.cache.prefix_rule = replace(engine.cache.prefix_rule, launches=10**9)
    plan = engine.plan(dict.fromkeys(range(4), 1))
    assert plan.size.n_groups == 0 and "read by each" in plan.prefixes.reason
    monkeypatch.setattr(type(llama.backends[0]), "reads_shared_once", False)
    assert engine.arranged([2, 0]) == [2, 0] and "for each of them" in engine.plan({0: 1}).prefixes.reason


def test_who_takes_a_place_has_nothing_of_the_one_before(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence ends while a step that reads it waits for its choice; the next one of its number penalizes what it has
    said itself alone, and one beside it goes on."""
    monkeypatch.setattr(graphrt.get_backend("cpu").__class__, "asynchronous", True)
    params = SamplerParams(temp=0.0, frequency_penalty=2.0, repeat_last_n=64)
    engine, found, prompt = paged(llama, 2), dict[int, list[int]](), list(range(20, 50))
    with ContinuousBatch(engine) as batch:
        first = drawn(Sampler(params.changed(DRY)), engine.n_ctx)
        assert first is not None and first.waits
        batch.add(0, [9, 8, 7], 20, first)
        batch.add(1, [39, 42], 6, Drawn())
        run(batch, found)
        assert batch._queued and batch._queued[-1].answer is None, "read, and not chosen yet"
        batch.end(0)
        engine.free(0)
        found.pop(0)
        how = drawn(Sampler(params), engine.n_ctx)
        assert how is not None
        batch.add(0, prompt, 6, how)
        while batch.going:
            run(batch, found)
    assert found[1] == alone(llama, [39, 42], 6)
    past = engine.tables.past.buffer
    assert past is not None
    said = [*prompt, *found[0]]
    assert past.read(0, 4 * len(said)).view(np.int32).tolist() == said
