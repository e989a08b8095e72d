"""What generate() gives of a text: where it ends, what is held back, log-probabilities, grammars, several texts; the
same whether tokens are drawn ahead on a device or chosen by the host."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import IM_START, tokens, write_model

from graphrt.errors import CacheFullError, SessionError
from graphrt.models import Model, Piece, SamplerParams, load
from graphrt.models.choices import choices
from graphrt.models.engine import SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.generation import StopFilter, TextRules
from graphrt.models.sampling import Sampler
from graphrt.models.sampling_device import drawn
from graphrt.models.sampling_logprobs import logprobs_of

F32 = SessionOptions(type_k="f32", type_v="f32")
TEXT = st.text("ab", max_size=12)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Random weights, an SPM vocabulary of 329 tokens; gemma3 has a window of 8."""
    folder: Path = tmp_path_factory.mktemp("generation")
    return load(write_model(folder / "model.gguf", request.param, tokenizer="spm"), "cpu")


@pytest.fixture
def queued(model: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model on a backend that says that its steps can be queued."""
    monkeypatch.setattr(type(model.backends[0]), "asynchronous", True)
    return model


def ids(pieces: list[Piece]) -> list[int]:
    return [piece.token for piece in pieces]


def to_its_end(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces to the one that ends the text."""
    for piece in pieces:
        yield piece
        if piece.finish:
            return


def joined(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


# ---- stop texts ----


@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.lists(TEXT, max_size=8))
def test_text_goes_through_until_a_stop_is_complete(stops: list[str], chunks: list[str]) -> None:
    """Whatever the pieces: up to the stop that is complete first, the longest of those; and no character later than it
    must be: what is held back is the beginning of a stop."""
    text, filtered, shown, stopped = "".join(chunks), StopFilter(stops), "", ""
    for i, chunk in enumerate(chunks):
        out, stopped = filtered.push(chunk)
        shown += out
        if stopped:
            break
        held = "".join(chunks[: i + 1])[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    ends = {text.index(stop) + len(stop): stop for stop in sorted(stops, key=len) if stop in text}
    if ends:
        first = min(ends)
        assert stopped == ends[first] and shown == text[: first - len(ends[first])]
    else:
        assert not stopped and shown + filtered.flush() == text


def test_a_stop_that_falls_back_on_a_part_of_itself() -> None:
    filtered = StopFilter(["aab"])
    assert [filtered.push(char) for char in "aaaab"] == [
        ("", ""),
        ("", ""),
        ("a", ""),
        ("a", ""),
        ("", "aab"),
    ]


def test_a_stop_text_ends_the_text_and_is_not_given(model: Model) -> None:
    """One that spans several tokens: what came with its first ones is held back and given up with the last."""
    free = list(model.generate("hello", 40, temp=0, ignore_eos=True, session=model.session(F32)))
    text = joined(free)
    stop = text[10:16]
    at = text.index(stop)
    pieces = list(
        model.generate("hello", 40, temp=0, ignore_eos=True, stop=["never comes", stop], session=model.session(F32))
    )
    assert joined(pieces) == text[:at] and [p.finish for p in pieces] == [""] * (len(pieces) - 1) + ["stop"]
    assert len(pieces) < 40 and ids(pieces) == ids(free)[: len(pieces)] and pieces[-1].word == stop
    assert list(model.generate("hello", 40, temp=0, ignore_eos=True, stop=stop, session=model.session(F32))) == pieces
    held = list(model.generate("hello", 40, temp=0, ignore_eos=True, stop=text[-1] + "...", session=model.session(F32)))
    assert joined(held) == text and held[-1].finish == "length", "what was held back comes at the end"


def test_a_stop_text_is_given_where_it_is_asked_for(model: Model) -> None:
    said = model.tokenizer.encode("hello world, hello", False)
    told = TextRules(40, "wor", tells_stop=True).pieces(model.tokenizer)
    pieces = list(to_its_end(map(told.add, said)))
    assert joined(pieces).endswith("hello wor") and (pieces[-1].finish, pieces[-1].word) == ("stop", "wor")


def test_nothing_ends_a_text_of_fewer_tokens_than_it_must_have(model: Model) -> None:
    """Neither its own end, nor a stop of either kind: the tokens that would are not drawn; behind the least number they
    are as before."""
    tokenizer, n_vocab = model.tokenizer, model.tokenizer.n_vocab
    end, stop, word = min(tokenizer.eog_ids), 300, tokenizer.encode("x", False)[-1]
    rules = TextRules(40, "x", [stop], least=3)
    logits = np.zeros(n_vocab, np.float32)
    logits[[stop, end, word]] = 3, 2, 1
    sampler = rules.sampler(tokenizer, n_vocab, SamplerParams(temp=0), None)
    assert not sampler.is_greedy and drawn(sampler, 64) is None, "a device knows of no least number"
    assert [sampler.sample(logits) for _ in range(5)] == [word] * 3 + [stop] * 2
    sampler.reset()
    assert sampler.sample(logits) == word, "a new text begins"
    pieces = rules.pieces(tokenizer)
    assert [pieces.add(word).finish for _ in range(4)] == ["", "", "", "stop"]
    with pytest.raises(SessionError, match=r"ends where that does, got at least 5 tokens; leave one of them out"):
        TextRules(20, least=5, regex="a+")


def test_control_tokens_are_given_where_they_are_asked_for(model: Model) -> None:
    """All but the one that ends the text."""
    begin, end = model.tokenizer.bos_id, min(model.tokenizer.eog_ids)
    assert begin is not None
    for special, shown in ((True, model.tokenizer.piece(begin).decode()), (False, "")):
        pieces = TextRules(3, special=special).pieces(model.tokenizer)
        assert joined([pieces.add(begin), pieces.add(end)]) == shown


def test_a_stop_id_ends_the_text(model: Model) -> None:
    free = list(model.generate("hello", 20, temp=0, ignore_eos=True))
    at = next(i for i in range(3, 20) if free[i].token not in ids(free[:i]))
    pieces = list(model.generate("hello", 20, temp=0, ignore_eos=True, stop_ids=[free[at].token, 3]))
    assert ids(pieces) == ids(free[: at + 1]) and pieces[-1].finish == "stop" and pieces[-1].text == ""


def test_a_stop_text_that_is_a_control_token(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is never shown, so that it can only be seen as the token."""
    (end,) = model.tokenizer.encode(IM_START, add_bos=False, parse_special=True)
    made = iter([100, end, 101])
    monkeypatch.setattr(Model, "next_token", lambda *args: next(made))
    assert [p.finish for p in model.generate("hello", 3, stop=IM_START)] == ["", "stop"]


def test_the_session_holds_what_came_before_the_stop(queued: Model) -> None:
    """Steps that were queued beyond it are forgotten."""
    session = queued.session(F32)
    free = list(queued.generate("hello", 20, temp=0, ignore_eos=True, session=queued.session(F32)))
    at = next(i for i in range(3, 20) if free[i].token not in ids(free[:i]))
    n = len(queued.tokenizer.encode("hello"))
    list(queued.generate("hello", 20, temp=0, ignore_eos=True, stop_ids=[free[at].token], session=session))
    assert session.n_past == n + at + 1
    rest = list(queued.generate([], 5, temp=0, ignore_eos=True, session=session))
    assert ids(rest) == ids(free[at + 1 : at + 6])


def test_why_a_text_ends(model: Model) -> None:
    pieces = list(
        model.generate(tokens(10), -1, temp=0, ignore_eos=True, session=model.session(SessionOptions(n_ctx=16)))
    )
    assert pieces[-1].finish == "context"
    assert list(model.generate(tokens(10), 2, temp=0, ignore_eos=True))[-1].finish == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": [""]}, "a stop must be a text of at least one character, got ''"),
        ({"stop": 5}, "stop must be a text or a list of texts, got int 5"),
        ({"stop": [None]}, r"stop must be a text or a list of texts, got list \[None\]"),
        ({"stop_ids": [329]}, "a stop id must be a token id, 0 to 328, got 329"),
        ({"stop_ids": "a"}, "stop_ids must be a list of whole numbers, got str 'a'"),
        ({"stop_ids": [True]}, r"got list \[True\]"),
        ({"logit_bias": {329: 1.0}}, "logit_bias must name token ids, 0 to 328, got 329"),
        ({"logprobs": 2.5}, "logprobs must be a whole number or None, got float 2.5"),
        ({"logprobs": True}, "logprobs must be a whole number or None, got bool True"),
        ({"logprobs": -1}, "logprobs must be how many"),
        ({"temperature": 1}, "must be one of temp,.*got 'temperature'"),
        ({"top_p": 2}, "top_p must be from 0 to 1"),
        ({"grammar": "root ::= \"a\"", "json_schema": "{}"}, "give one of grammar, json_schema, regex and ignore_eos"),
        ({"grammar": "root ::= \"a\"", "ignore_eos": True}, "give one of grammar, json_schema, regex and ignore_eos"),
        ({"grammar": 5}, "grammar must be a text or None, got int 5"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(model: Model, options: dict[str, Any], message: str) -> None:
    """They are refused by the call, not by the first token; nothing is read."""
    session = model.session()
    with pytest.raises(SessionError, match=message):
        model.generate("hello", 3, session=session, **options)
    assert session.n_past == 0


@pytest.mark.parametrize("n", [-2, 1.5, True, None, "3"])
def test_numbers_of_tokens_that_cannot_be(model: Model, n: Any) -> None:
    with pytest.raises(
        SessionError, match="at least -1, which is no limit" if n == -2 else "n must be a whole number, got"
    ):
        model.generate("hello", n)


def test_keywords_change_the_parameters(model: Model) -> None:
    params = SamplerParams(temp=2.0, seed=5)
    wanted = list(model.generate("hello", 8, sampling=SamplerParams(temp=2.0, seed=5, top_k=3), ignore_eos=True))
    assert list(model.generate("hello", 8, sampling=params, top_k=3, ignore_eos=True)) == wanted
    assert list(model.generate("hello", 8, temp=2.0, seed=5, top_k=3, ignore_eos=True)) == wanted


def test_help_shows_every_keyword() -> None:
    for function in (Model.generate, Model.samples):
        shown = inspect.signature(function).parameters
        assert {name: shown[name].default for name in SamplerParams.__dataclass_fields__} == {
            name: field.default for name, field in SamplerParams.__dataclass_fields__.items()
        }
        assert {"stop", "stop_ids", "grammar", "json_schema", "logprobs", "ignore_eos"} < set(shown)


# ---- the device and the host ----


def by_host(model: Model, prompt: list[int], n: int, sampler: Sampler) -> list[int]:
    """Each token chosen by the host, from the logits after the one before."""
    session, made = model.session(F32), list(prompt)
    logits = session.eval(prompt)
    for _ in range(n):
        made.append(sampler.sample(logits, made))
        logits = session.eval(made[-1:])
    return made[len(prompt) :]


def settings(likely: list[int]) -> Iterator[tuple[dict[str, Any], dict[str, Any], bool]]:
    """SamplerParams, what else the sampler is given, and whether tokens are queued ahead."""
    yield {"temp": 0}, {}, True
    yield {"temp": 0, "logit_bias": dict.fromkeys(likely[::3], -math.inf)}, {}, True
    yield {"temp": 0}, {"never": likely[:2]}, True
    yield {"temp": 1.5}, {}, True
    for one in (
        {"logit_bias": {likely[0]: -5.0}}, {"logit_bias": {likely[0]: -math.inf}, "temp": 2.0}, {"top_n_sigma": 1.5},
        {"dry_multiplier": 2.0}, {"dynatemp_range": 0.5}, {"mirostat": 1}, {"mirostat": 2}, {"repeat_penalty": 1.5},
    ):  # fmt: skip
        yield one, {}, False
    yield {"temp": 0}, {"best": 2}, False
    yield {}, {"never": likely[:2]}, False


def test_drawn_ahead_and_by_the_host_are_the_same(queued: Model) -> None:
    prompt = tokens(5)
    likely = by_host(queued, prompt, 12, Sampler(SamplerParams(temp=0)))
    for params, given_, ahead in settings(likely):

        def new(params: dict[str, Any] = params, given_: dict[str, Any] = given_) -> Sampler:
            return Sampler(SamplerParams(**{"seed": 3} | params), **given_)

        expected = by_host(queued, prompt, 12, new())
        session = queued.session(F32)
        found = list(itertools.islice(choices(session, prompt, 12, new()), 12))
        assert found == expected and session.n_past == len(prompt) + 12, params
        assert bool(session._chained) == ahead, params
        assert not set(found) & new().never


def test_what_the_device_likes_and_must_not_is_chosen_again_at_a_full_context(queued: Model) -> None:
    prompt = tokens(5)
    options = SessionOptions(n_ctx=12, type_k="f32", type_v="f32")
    likely = by_host(queued, prompt, 7, Sampler(SamplerParams(temp=0)))
    found = list(
        queued.generate(
            prompt, -1, temp=0, logit_bias=dict.fromkeys(likely[3:], -math.inf), session=queued.session(options)
        )
    )
    assert len(found) == 8 and found[-1].finish == "context"
    assert ids(found) == by_host(
        queued, prompt, 8, Sampler(SamplerParams(temp=0, logit_bias=dict.fromkeys(likely[3:], -math.inf)))
    )


# ---- log-probabilities ----


def test_logprobs_are_those_of_the_models_logits(queued: Model) -> None:
    prompt = tokens(6)
    pieces = list(
        queued.generate(prompt, 8, temp=1.5, seed=2, logprobs=4, ignore_eos=True, session=queued.session(F32))
    )
    plain = list(queued.generate(prompt, 8, temp=1.5, seed=2, ignore_eos=True, session=queued.session(F32)))
    assert [p._replace(logprobs=None) for p in pieces] == plain
    session = queued.session(F32)
    for i, piece in enumerate(pieces):
        logits = session.eval(prompt if i == 0 else [pieces[i - 1].token])
        assert piece.logprobs == logprobs_of(logits, piece.token, 4)
    assert list(queued.generate(prompt, 1, temp=0, logprobs=0))[0].logprobs.best == ()  # type: ignore[union-attr]


# ---- several texts ----


def test_several_texts_are_those_of_their_seeds(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to rounding, which these models' margins are far from; some end before others."""
    prompt, read = tokens(40), []
    step = PagedEngine.step
    monkeypatch.setattr(
        PagedEngine, "step",
        lambda self, part, **how: read.append(sum(map(len, part.values()))) or step(self, part, **how),
    )  # fmt: skip
    options = {"temp": 2.0, "stop": ["e"], "logprobs": 1}
    given_ = list(model.samples(prompt, 3, 12, seed=11, options=F32, **options))
    assert sum(n for n in read if n > 3) == len(prompt), "the prompt is read once"
    for i in range(3):
        mine = [piece for number, piece in given_ if number == i]
        alone = list(model.generate(prompt, 12, seed=11 + i, session=model.session(F32), **options))
        assert [p._replace(logprobs=None) for p in mine] == [p._replace(logprobs=None) for p in alone]
        wanted = [p.logprobs.token for p in alone]  # type: ignore[union-attr]
        assert [p.logprobs.token for p in mine] == pytest.approx(wanted, abs=1e-3)  # type: ignore[union-attr]


@pytest.mark.parametrize("how", [{"temp": 0.0}, {"temp": 1.5, "top_k": 40}], ids=["likeliest", "drawn"])
def test_several_texts_are_chosen_on_the_device(
    model: Model, how: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By steps that are queued: the host sees one row of logits, the prompt's. Each text ends by itself."""
    monkeypatch.setattr(type(model.backends[0]), "asynchronous", True)
    read, step, prompt = [], PagedEngine.step, tokens(40)
    monkeypatch.setattr(
        PagedEngine, "step",
        lambda self, part, **how: read.append(sum(map(len, part.values()))) or step(self, part, **how),
    )  # fmt: skip
    given_ = list(model.samples(prompt, 3, 12, seed=11, options=F32, stop=["e"], **how))
    assert sum(read) == len(prompt)
    for i in range(3):
        mine = [piece for number, piece in given_ if number == i]
        assert mine == list(model.generate(prompt, 12, seed=11 + i, session=model.session(F32), stop=["e"], **how))


def test_a_prompts_file(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has is not read again, by several texts or by one; another prompt's beginning is."""
    read, step, path = list[int](), PagedEngine.step, tmp_path / "a.session"
    monkeypatch.setattr(
        PagedEngine, "step",
        lambda self, part, **how: read.append(sum(map(len, part.values()))) or step(self, part, **how),
    )  # fmt: skip
    prompt, options = tokens(40), replace(F32, page=16)
    wanted = list(model.samples(prompt, 2, 6, temp=0, options=options))
    back = 23 if any(model.decoder.hp.windowed) else 3  # beyond what a window holds all is read anew
    other = [*prompt[:20], 9, 8, 7]
    for count, text, cost in ((2, prompt, 40), (2, prompt, 1), (1, [*prompt, 5], 1), (2, other, back)):
        read.clear()
        found = list(model.samples(text, count, 6, temp=0, options=options, cache=path))
        assert sum(read) == cost, "and tokens are chosen where the steps are"
        assert found == (wanted if text == prompt else list(model.samples(text, count, 6, temp=0, options=options)))
    with pytest.raises(SessionError, match="its cache has the types f32 and f32"):
        list(model.samples(prompt, 2, 6, options=SessionOptions(n_ctx=128), cache=path))


def test_texts_that_have_too_few_pages(model: Model) -> None:
    pieces = model.samples(tokens(20), 2, -1, temp=0, ignore_eos=True, options=replace(F32, page=16, n_pages=4))
    with pytest.raises(CacheFullError, match=r"4 pages of 16 tokens, .* give it more \(n_pages\)"):
        list(pieces)


def test_several_texts_fill_the_context(model: Model) -> None:
    found = list(model.samples(tokens(10), 2, -1, temp=0, ignore_eos=True, options=SessionOptions(n_ctx=16)))
    for i in (0, 1):
        mine = [piece for number, piece in found if number == i]
        assert len(mine) == 7 and mine[-1].finish == "context"
    assert list(model.samples("hello", 2, 0)) == []


@pytest.mark.parametrize("count", [0, 257, True, 1.0, "2"])
def test_numbers_of_texts_that_cannot_be(model: Model, count: Any) -> None:
    with pytest.raises(
        SessionError, match="must be 1 to 256" if type(count) is int else "count must be a whole number"
    ):
        model.samples("hello", count)


def test_a_prompt_that_is_too_long_for_several_texts(model: Model) -> None:
    with pytest.raises(SessionError, match="the context holds 16 tokens of each sequence, got 20"):
        list(model.samples(tokens(20), 2, 5, options=SessionOptions(n_ctx=16)))


# ---- grammars ----


def test_a_text_follows_its_grammar(queued: Model) -> None:
    """Whatever the model likes; it ends with the grammar. Masks are the host's, so that nothing is queued."""
    session = queued.session(F32)
    for temp in (0.0, 2.0):
        session.reset()
        pieces = list(
            queued.generate(
                tokens(5), 60, temp=temp, seed=1, grammar='root ::= "he" ("l" | "é"){3,5} "o"', session=session
            )
        )
        text = joined(pieces)
        assert text.startswith("he") and text.endswith("o") and set(text[2:-1]) <= set("lé") and 3 <= len(text) - 3 <= 5
        assert pieces[-1].finish == "eog" and len(session._chained) == 0
    texts: dict[int, str] = {0: "", 1: ""}
    for i, piece in queued.samples(tokens(5), 2, 40, temp=2.0, seed=1, grammar='root ::= [a-c]{2} "."'):
        texts[i] += piece.text
    assert all(len(text) == 3 and text[2] == "." and set(text[:2]) <= set("abc") for text in texts.values())


def test_a_grammar_and_biases_that_leave_nothing(model: Model) -> None:
    (h,) = model.tokenizer.encode("h", add_bos=False, goes_on=True)
    with pytest.raises(SessionError, match="the grammar and logit biases leave none"):
        list(model.generate("a", 5, grammar='root ::= "h"', logit_bias={h: -math.inf}))
