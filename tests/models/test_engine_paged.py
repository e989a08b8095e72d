"""PagedEngine: sequences in shared pages give what each gives alone, whatever is read together, forked or put away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.poisoned_engines import poisoned
from support.tiny import write_model
from support.tiny_archs import DECODERS

import graphrt
from graphrt.errors import CacheFullError, SessionError
from graphrt.models import Model, load
from graphrt.models.engine import SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.paging.check import check
from graphrt.models.paging.ladder import block_rung, coarse_rung, rung
from graphrt.models.paging.pool import GONE
from graphrt.testing import nmse

OPTIONS = SessionOptions(n_ctx=96, n_batch=12, type_k="f32", type_v="f32", page=16)
RINGS = replace(OPTIONS, page=0)
#: One of each family, and those that differ in attention.
FAMILIES = (
    "llama", "gemma3", "qwen2", "qwen3", "qwen3moe", "llama-moe", "gpt-oss", "deepseek2", "gemma",
    "gemma2-caps", "phi3-long", "gpt2-grouped", "mpt-full", "bloom", "refact", "falcon-40b", "olmo2-window",
    "command-r", "starcoder2", "stablelm-12b",
)  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("paged")
    return load(write_model(folder / "model.gguf", request.param), "cpu", exact=True)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("windowed") / "model.gguf", "gemma3"), "cpu", exact=True)


def paged(model: Model, n_seq: int, **changed: object) -> PagedEngine:
    """An engine whose pages hold NaN, as those of a device may."""
    engine = model.engine(n_seq, replace(OPTIONS, **changed))
    assert isinstance(engine, PagedEngine)
    return poisoned(engine)


def texts_of(n: int, seed: int = 5, longest: int = 60) -> list[np.ndarray]:
    r = np.random.default_rng(seed)
    return [r.integers(0, 60, int(r.integers(1, longest))).astype(np.int32) for _ in range(n)]


def alone(model: Model, ids: np.ndarray) -> np.ndarray:
    return model.session(RINGS).eval(ids.tolist()).copy()


def counted(engine: PagedEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """How many tokens of which sequences each step from now on reads."""
    seen: list[dict[int, int]] = []
    step = engine.step

    def note(part: Mapping[int, np.ndarray], **how: bool) -> np.ndarray:
        seen.append({seq: len(ids) for seq, ids in part.items()})
        return step(part, **how)

    monkeypatch.setattr(engine, "step", note)
    return seen


# ---- any mix in one step ----


def test_all_families_are_named() -> None:
    assert {DECODERS[name].arch if name in DECODERS else name for name in FAMILIES} == {
        "llama", "gemma3", *(tiny.arch for tiny in DECODERS.values())
    }  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_sixteen_sequences_are_bit_for_bit_as_alone(tmp_path: Path, name: str) -> None:
    model = load(write_model(tmp_path / "m.gguf", name), "cpu", exact=True)
    texts = texts_of(16, len(name))
    together, single = paged(model, 16, share=False), paged(model, 16, share=False)
    first = together.read(dict(enumerate(texts)))
    next_ids = first.argmax(1)
    second = together.read({seq: [int(token)] for seq, token in enumerate(next_ids)})
    assert together.lengths.tolist() == [len(ids) + 1 for ids in texts]
    for seq in (*range(5), 15):
        assert np.array_equal(single.read({3: texts[seq]})[0], first[seq])
        assert np.array_equal(single.read({3: [int(next_ids[seq])]})[0], second[seq])
        single.free(3)
    assert nmse(first[0], alone(model, texts[0])) < 1e-10


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "deepseek2"])
def test_how_a_prompt_is_cut_changes_no_bit(tmp_path: Path, name: str) -> None:
    """Nor whether its beginning was read before, by another sequence."""
    model = load(write_model(tmp_path / "m.gguf", name), "cpu", exact=True)
    ids = np.random.default_rng(6).integers(0, 60, 230).astype(np.int32)
    whole = paged(model, 2, n_ctx=256, n_batch=230)
    wanted = whole.read({0: ids})[0]
    assert np.array_equal(whole.read({1: ids})[0], wanted), "of which 224 tokens were there"
    for size in (50, 97):
        engine = paged(model, 2, n_ctx=256, n_batch=size)
        engine.read({1: ids[:100]})
        engine.read({0: ids[:227]})
        for token in ids[227:229]:
            engine.read({0: [int(token)]})
        assert np.array_equal(engine.read({0: ids[229:]})[0], wanted)


def test_chunks_and_single_tokens_in_one_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, texts = paged(model, 4), texts_of(4, 8)
    engine.read({0: texts[0], 1: texts[1][:5]})
    seen = counted(engine, monkeypatch)
    found = engine.read({0: [7], 1: [9], 2: list(range(20)), 3: [3] * 4})
    assert seen == [{0: 1, 1: 1, 2: 12}, {2: 8, 3: 4}], "whole pieces of 12 tokens, and single tokens beside them"
    wanted = ([*texts[0], 7], [*texts[1][:5], 9], list(range(20)), [3] * 4)
    assert all(nmse(row, alone(model, np.array(ids))) < 1e-10 for row, ids in zip(found, wanted))


def test_random_mixes(model: Model) -> None:
    """Some read many tokens, some few, some none, in any order, up to a full context: as rings give them."""
    random = np.random.default_rng(7)
    ids = random.integers(0, 60, (5, 96)).astype(np.int32)
    engine, single = paged(model, 5), [model.session(RINGS) for _ in range(5)]
    while engine.lengths.min() < 96:
        part = {
            int(seq): ids[seq, engine.lengths[seq] :][: int(random.integers(1, 30))]
            for seq in random.permutation(5)[: int(random.integers(1, 6))]
            if engine.lengths[seq] < 96
        }
        if part:
            for (seq, tokens), row in zip(part.items(), engine.read(part)):
                assert nmse(row, single[seq].eval(tokens.tolist())) < 1e-9
    assert len(engine._prepared) <= 12, "few steps serve all"


def test_every_token(model: Model) -> None:
    engine, (a, b) = paged(model, 3), texts_of(2, 3, 7)
    rows = engine.step({2: a, 0: b}, every=True)
    assert rows.shape[0] == len(a) + len(b)
    assert nmse(rows[: len(a)], model.logits(a.tolist(), RINGS)) < 1e-10
    assert nmse(rows[len(a) :], model.logits(b.tolist(), RINGS)) < 1e-10
    with pytest.raises(SessionError, match="at most 15 tokens, n_batch and one of each sequence, got 16"):
        engine.step({0: np.zeros(16, np.int32)})


def test_rungs() -> None:
    rungs = sorted({rung(n, 700) for n in range(1, 701)})
    assert rungs == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 700]
    assert all(n <= rung(n, 700) for n in range(1, 701)) and all(n <= coarse_rung(n, 70) for n in range(1, 71))
    assert sorted({coarse_rung(n, 70) for n in range(1, 71)}) == [1, 16, 70]
    assert sorted({block_rung(n, 600) for n in range(1, 601)}) == [128, 256, 512, 600]
    assert sorted({block_rung(n, 600, 4) for n in range(1, 601)}) == [128, 512, 600]


def test_likeliest_tokens_of_each(model: Model) -> None:
    texts = texts_of(3, 4)
    engine = paged(model, 3)
    tokens = engine.read(dict(enumerate(texts))).argmax(1).astype(np.int32)
    found = np.stack([tokens, *(t.copy() for t in engine.run_ahead(tokens, 20))], 1)
    for seq, ids in enumerate(texts):
        single = model.session(RINGS)
        token = int(single.eval(ids.tolist()).argmax())
        assert found[seq].tolist() == [token, *single.likeliest(token, 20)]
        assert engine.tokens(seq) == [*ids, *found[seq][:-1]]
    assert engine.lengths.tolist() == [len(ids) + 20 for ids in texts]


def test_steps_that_nobody_takes_are_forgotten(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.backends[0]), "asynchronous", True)  # only such a backend's steps are queued
    texts = texts_of(2, 9)
    plain, ahead = paged(model, 2), paged(model, 2)
    first = plain.read(dict(enumerate(texts))).argmax(1).astype(np.int32)
    ahead.read(dict(enumerate(texts)))
    stream = ahead.run_ahead(first, 9)
    second = next(stream).copy()
    assert all(ahead.cache.pool.of(seq).reserved > ahead.lengths[seq] for seq in (0, 1)), "some are queued"
    stream.close()
    check(ahead.cache.pool)
    assert ahead.tokens(0) == [*texts[0], first[0]] and ahead.cache.pool.of(0).reserved == ahead.lengths[0]
    plain.read({seq: [int(t)] for seq, t in enumerate(first)})
    part = {seq: [int(t)] for seq, t in enumerate(second)}
    assert np.array_equal(ahead.read(part), plain.read(part))


def test_nothing_stays_of_an_interrupted_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, (a, b) = paged(model, 2), texts_of(2, 6)
    engine.read({0: a})

    def interrupted(exe: graphrt.Executable) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(graphrt.Executable, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.read({0: [1], 1: b})
    check(engine.cache.pool)
    assert engine.lengths.tolist() == [len(a), 0] and engine.cache.pool.of(0).reserved == len(a)
    assert nmse(engine.read({0: [1]})[0], alone(model, np.array([*a, 1]))) < 1e-10


# ---- pages ----


def test_a_full_cache_changes_nothing(model: Model) -> None:
    engine, texts = paged(model, 4, n_pages=5), [np.full(n, n, np.int32) for n in (20, 40, 16)]
    engine.read({0: texts[0]})
    with pytest.raises(CacheFullError, match="5 pages of 16 tokens, of which 3 can be had and .* 2 sequences need 4"):
        engine.read({1: texts[1], 2: texts[2]})
    assert engine.lengths.tolist() == [20, 0, 0, 0] and engine.tokens(1) == []
    found = engine.read({1: texts[1]})
    engine.free(0)
    assert nmse(found[0], alone(model, texts[1])) < 1e-10
    assert nmse(engine.read({2: texts[2]})[0], alone(model, texts[2])) < 1e-10


def test_what_is_refused_takes_nothing_over(model: Model) -> None:
    engine, text = paged(model, 3, n_pages=5), np.arange(40, dtype=np.int32)
    engine.read({0: text})
    with pytest.raises(CacheFullError):
        engine.read({1: [*text[:33], 7], 2: [9] * 40})
    assert engine.lengths.tolist() == [40, 0, 0] and engine.tokens(1) == []
    engine.read({1: [*text[:33], 7]})


def test_a_cache_that_fills_up_while_tokens_are_generated(model: Model) -> None:
    engine = paged(model, 2, n_pages=3, share=False)
    tokens = engine.read({0: [1] * 14, 1: [2] * 20}).argmax(1).astype(np.int32)
    taken = []
    with pytest.raises(CacheFullError):
        taken.extend(t.copy() for t in engine.run_ahead(tokens, 30))
    check(engine.cache.pool)
    assert engine.lengths.tolist() == [14 + len(taken), 20 + len(taken)], "what was given counts, no more"
    engine.free(1)
    row = engine.read({0: [5]})[0]
    assert nmse(row, alone(model, np.array([*engine.tokens(0)]))) < 1e-10


def test_forks_go_their_own_ways(model: Model) -> None:
    engine, text = paged(model, 4), texts_of(1, 2)[0][:37]
    engine.read({0: text})
    for into in (1, 2):
        engine.fork(0, into)
    in_use = sum(n > 0 for n in next(iter(engine.cache.pool.kinds.values())).users)
    assert in_use == 3, "nothing is copied yet"
    found = engine.read({seq: [seq] * (1 + seq) for seq in (0, 1, 2)})
    for seq, row in enumerate(found):
        assert nmse(row, alone(model, np.array([*text, *[seq] * (1 + seq)]))) < 1e-10
    engine.free(0)
    assert nmse(engine.read({2: [9]})[0], alone(model, np.array([*text, 2, 2, 2, 9]))) < 1e-10
    with pytest.raises(SessionError, match="must be empty, got one of 39; free it"):
        engine.fork(2, 1)
    with pytest.raises(SessionError, match="a sequence must be 0 to 3, got 4"):
        engine.fork(4, 0)


def test_what_was_read_before_is_not_read_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, text = paged(model, 3), texts_of(1, 2)[0][:40]
    first = engine.read({0: text})
    engine.free(0)
    seen = counted(engine, monkeypatch)
    again = engine.read({1: text, 2: [*text[:20], 1, 2, 3]})
    assert seen == [{1: 8, 2: 4}, {2: 3}], "two whole pages, and one, were there"
    assert nmse(again[0], first[0]) < 1e-10
    assert nmse(again[1], alone(model, np.array([*text[:20], 1, 2, 3]))) < 1e-10
    engine.reset()
    engine.read({0: text})
    assert sum(seen[-1].values()) == 40 % 12, "a reset forgets what was shared"


def test_going_back(model: Model) -> None:
    engine, text = paged(model, 2), texts_of(1, 2)[0][:40]
    engine.read({0: text})
    n = engine.truncate(0, 35)
    assert n == 35 and nmse(engine.read({0: [4]})[0], alone(model, np.array([*text[:35], 4]))) < 1e-10
    with pytest.raises(SessionError, match="goes back to 0 to 36 tokens, which it has, got 37"):
        engine.truncate(0, 37)


def test_windows_need_few_pages(windowed: Model) -> None:
    """A window of 12 tokens holds a few pages of a text of six; going back beyond what it holds begins anew."""
    engine, text = paged(windowed, 2, share=False), texts_of(1, 2)[0][:40]
    text = np.concatenate([text, text])
    engine.read({0: text})
    tables = engine.cache.pool.of(0).tables
    assert tables["swa"][:-2] == [GONE] * 3 and GONE not in tables["full"]
    assert engine.cache.sizes.n_pages["swa"] < engine.cache.sizes.n_pages["full"]
    assert nmse(engine.read({0: [1]})[0], alone(windowed, np.array([*text, 1]))) < 1e-10
    assert engine.truncate(0, 30) == 0 and engine.lengths[0] == 0


def test_all_windows_at_once_have_pages(windowed: Model) -> None:
    """As many sequences as there may be, each at its longest, in steps as large as they may be."""
    engine = paged(windowed, 6, share=False)
    ids = np.random.default_rng(1).integers(0, 60, (6, 96)).astype(np.int32)
    for start in range(0, 96, 12):
        engine.read({seq: row[start : start + 12] for seq, row in enumerate(ids)})
    assert (engine.lengths == 96).all()


# ---- host memory and files ----


def test_swapped_out_and_back(model: Model) -> None:
    engine, (a, b) = paged(model, 3, n_pages=4), texts_of(2, 2)[:2]
    a, b = np.resize(a, 40), np.resize(b, 35)
    engine.read({0: a})
    away = engine.swap_out(0)
    assert engine.lengths[0] == 0 and away.nbytes > 0
    engine.read({1: b})
    with pytest.raises(CacheFullError):
        engine.swap_in(0, away)
    assert engine.lengths[0] == 0 and engine.tokens(0) == []
    engine.free(1)
    engine.swap_in(2, away)
    assert engine.tokens(2) == a.tolist()
    assert np.array_equal(engine.read({2: [3]})[0], paged_alone(model, [*a, 3], 40))


def paged_alone(model: Model, ids: list[int], cut: int) -> np.ndarray:
    engine = paged(model, 3)
    engine.read({0: ids[:cut]})
    return engine.read({0: ids[cut:]})[0]


@pytest.mark.parametrize("types", [("f32", "f32"), ("q8_0", "f16"), ("f8", "f8_e4m3")], ids="/".join)
def test_files_are_those_of_sessions(windowed: Model, tmp_path: Path, types: tuple[str, str]) -> None:
    kinds = {"type_k": types[0], "type_v": types[1]}
    engine, text = paged(windowed, 3, **kinds), np.resize(texts_of(1, 2)[0], 45).tolist()
    engine.read({1: text})
    engine.save(1, tmp_path / "paged.session")
    rings = replace(RINGS, **kinds)
    session = windowed.load_session(tmp_path / "paged.session", rings)
    assert session.tokens == text
    wanted = engine.read({1: [5]})[0]
    assert nmse(session.eval([5]), wanted) < 1e-10
    session.save(tmp_path / "ring.session")
    assert engine.load(2, tmp_path / "ring.session") == []
    assert engine.tokens(2) == [*text, 5]
    assert nmse(engine.read({2: [6]})[0], engine.read({1: [6]})[0]) < 1e-10


def test_a_file_changes_nothing_that_others_read(model: Model, tmp_path: Path) -> None:
    """Its rows may be a stranger's, and wrong, for tokens that another sequence has too."""
    engine, text = paged(model, 3), texts_of(1, 2)[0][:40]
    session = model.session(RINGS)
    session.eval(text.tolist())
    for layer in session.cache.layers:
        for leaf in layer.leafs:
            assert leaf.buffer is not None
            leaf.buffer.write(0, np.zeros(leaf.nbytes, np.uint8))
    session.save(tmp_path / "zeros.session")
    engine.load(0, tmp_path / "zeros.session")
    wanted = alone(model, text)
    assert nmse(engine.read({1: text})[0], wanted) < 1e-10, "its pages are not shared"
    engine.free(0)
    engine.load(0, tmp_path / "zeros.session")
    engine.free(1)
    assert nmse(engine.read({2: text})[0], wanted) < 1e-10, "nor does it write into those that are"


def test_a_damaged_file_leaves_the_sequence_empty(model: Model, tmp_path: Path) -> None:
    engine, text = paged(model, 2), texts_of(1, 2)[0][:40]
    engine.read({0: text})
    engine.save(0, tmp_path / "a.session")
    data = bytearray((tmp_path / "a.session").read_bytes())
    data[-100] ^= 1
    (tmp_path / "a.session").write_bytes(data)
    with pytest.raises(SessionError, match="damaged"):
        engine.load(1, tmp_path / "a.session")
    assert engine.lengths.tolist() == [40, 0] and engine.tokens(1) == []
    with pytest.raises(SessionError, match="into an empty sequence, 0 has 40 tokens; free it"):
        engine.load(0, tmp_path / "a.session")


# ---- what can't be ----


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"page": 20}, "one of 16, 32, 64, 128, 256 tokens, or 0 for no pages, got 20"),
        ({"page": -16}, "one of 16, 32, 64, 128, 256 tokens, or 0 for no pages, got -16"),
        ({"n_pages": -1}, "at least one page, or 0 for whole contexts, got n_pages -1"),
    ],
)
def test_options_that_can_not_be(model: Model, changed: dict[str, int], message: str) -> None:
    with pytest.raises(SessionError, match=message):
        model.engine(2, replace(OPTIONS, **changed))


def test_sessions_have_rings(model: Model) -> None:
    with pytest.raises(SessionError, match="page must be 0, got 16; engines have pages"):
        model.session(OPTIONS)


def test_bad_tokens_are_refused(model: Model) -> None:
    engine = paged(model, 2)
    for tokens, message in (
        ({}, "at least one sequence"),
        ({2: [1]}, "a sequence must be 0 to 1, got 2"),
        ({0: [1], 1: []}, "at least one token"),
        ({0: [1], 1: [0] * 97}, "the context holds 96 tokens of each sequence, got 97"),
        ({0: [1], 1: [-1]}, "a token id must be"),
    ):
        with pytest.raises(SessionError, match=message):
            engine.read(tokens)
        assert engine.lengths.tolist() == [0, 0], "nothing is read of what is refused"
