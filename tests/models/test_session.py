"""Session and Model as a library: generating, batches, rows of logits, limits. Tiny models; equality is exact where
the same graph runs, and NMSE where another one does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.tiny import CHAT, IM_END, IM_START, tokens, write_model

import graphrt
from graphrt.errors import BackendError, GGUFError, SessionError
from graphrt.models import Model, Piece, SamplerParams, load
from graphrt.models.cells import Ring
from graphrt.models.engine import MAX_PREPARED, SessionOptions
from graphrt.models.session import Session, _batches
from graphrt.testing import nmse

GREEDY = SamplerParams(temp=0.0)
F32 = SessionOptions(type_k="f32", type_v="f32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("session")


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    """Random weights, an SPM vocabulary of 329 tokens, a context of 256."""
    return write_model(folder / "spm.gguf", "llama", tokenizer="spm", chat=CHAT)


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return load(path, "cpu")


@pytest.fixture(scope="module")
def windowed(folder: Path) -> Model:
    return load(write_model(folder / "windowed.gguf", "gemma3"), "cpu")


def ids(pieces: Sequence[Piece]) -> list[int]:
    return [piece.token for piece in pieces]


# ---- generate ----


def test_generate_gives_tokens_and_their_text(model: Model) -> None:
    pieces = list(model.generate("hello", 40, sampling=GREEDY, ignore_eos=True))
    assert len(pieces) == 40
    joined = b"".join(model.tokenizer.piece(t, special=False) for t in ids(pieces))
    assert "".join(p.text for p in pieces) == joined.decode("utf-8", "replace")
    assert ids(list(model.generate("hello", 40, sampling=GREEDY, ignore_eos=True))) == ids(pieces)
    prompt = model.tokenizer.encode("hello")
    assert list(model.generate(prompt, 40, sampling=GREEDY, ignore_eos=True)) == pieces, "ids are as good as text"


def test_generate_is_greedy_over_the_logits(model: Model) -> None:
    """Each token is the largest logit after all that came before it, in a sequence read anew."""
    sequence = model.tokenizer.encode("hello the sea")
    n = len(sequence)
    sequence += ids(list(model.generate(sequence, 12, sampling=GREEDY, ignore_eos=True)))
    assert model.logits(sequence).argmax(-1)[n - 1 : -1].tolist() == sequence[n:]


@pytest.mark.parametrize("kind", ["eos_token_id", "eot_token_id"])
def test_generate_ends_with_an_end_token(model: Model, folder: Path, kind: str) -> None:
    free = list(model.generate("hello", 20, sampling=GREEDY, ignore_eos=True))
    stop = next(i for i in range(3, 20) if free[i].token not in ids(free[:i]) and free[i].token > 260)
    other = write_model(folder / f"{kind}.gguf", "llama", tokenizer="spm", vocab={kind: free[stop].token})
    ended = load(other, "cpu")
    pieces = list(ended.generate("hello", 20, sampling=GREEDY))
    assert ids(pieces) == ids(free[: stop + 1])
    assert model.tokenizer.piece(pieces[-1].token) not in (b"", pieces[-1].text.encode()), "an end token has no text"
    assert [p.finish for p in pieces] == [""] * stop + ["eog"]
    on = ids(list(ended.generate("hello", 20, sampling=GREEDY, ignore_eos=True)))
    assert on[:stop] == ids(free)[:stop] and len(on) == 20 and free[stop].token not in on


@pytest.mark.parametrize("n", [0, 1, 7])
def test_generate_makes_at_most_n(model: Model, n: int) -> None:
    session = model.session()
    assert len(list(model.generate("hello", n, sampling=GREEDY, session=session, ignore_eos=True))) == n
    assert session.n_past == len(model.tokenizer.encode("hello")) + n, "the prompt and each made token"


def test_generate_refuses_a_negative_n(model: Model) -> None:
    with pytest.raises(SessionError, match="at least -1, which is no limit, got -2"):
        next(model.generate("hello", -2))


def test_generate_ends_with_the_context(model: Model) -> None:
    session = model.session(SessionOptions(n_ctx=16))
    pieces = list(model.generate(tokens(10), -1, sampling=GREEDY, session=session, ignore_eos=True))
    assert len(pieces) == 7 and session.n_past == 16
    with pytest.raises(SessionError, match="holds 16 tokens, got 1 after 16 that the cache holds"):
        session.eval([1])
    full = model.session(SessionOptions(n_ctx=10))
    assert len(list(model.generate(tokens(10), 5, session=full, ignore_eos=True))) == 1, (
        "a full prompt has a next token"
    )


def test_unfinished_characters_come_out_at_the_end(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    spelled = [3 + byte for byte in "é日".encode()[:4]]  # the last character lacks a byte
    made = iter(spelled)
    monkeypatch.setattr(Model, "next_token", lambda *args: next(made))
    assert [p.text for p in model.generate("hello", 4)] == ["", "é", "", "\ufffd"]


def test_generate_continues_a_session(model: Model) -> None:
    whole = list(model.generate(tokens(10), 8, sampling=GREEDY, ignore_eos=True))
    session = model.session()
    first = list(itertools.islice(model.generate(tokens(10), 8, sampling=GREEDY, session=session, ignore_eos=True), 3))
    rest = list(model.generate([], 5, sampling=GREEDY, session=session, ignore_eos=True))
    assert ids(first + rest) == ids(whole)


def test_sampling_is_reproducible_by_seed(model: Model) -> None:
    def made(seed: int) -> list[int]:
        return ids(list(model.generate("hello", 12, sampling=SamplerParams(temp=2.0, seed=seed), ignore_eos=True)))

    assert made(1) == made(1) != made(2)


def test_prompts_through_the_chat_template(model: Model) -> None:
    text = f"{IM_START}user\nhi{IM_END}\n{IM_START}assistant\n"
    wanted = [1, *model.tokenizer.encode(text, add_bos=False, parse_special=True)]
    assert model.prompt_tokens("hi", raw=False) == wanted, "one BOS: the template's own"
    assert model.prompt_tokens("hi") == model.tokenizer.encode("hi")
    with pytest.raises(SessionError, match="must not be empty"):
        model.prompt_tokens("", raw=False)


# ---- sessions ----


def test_logits_of_every_token(model: Model) -> None:
    rows = model.logits(tokens())
    assert rows.dtype == np.float32 and rows.shape == (40, 329) and rows.flags["C_CONTIGUOUS"]
    session = model.session()
    one_by_one = np.stack([session.eval([t]).copy() for t in tokens()])
    assert nmse(one_by_one, rows) < 1e-5  # an f16 cache holds the same numbers; only the order of sums differs
    assert np.array_equal(model.logits(tokens()), rows), "sequences share nothing"


@pytest.mark.parametrize("batch", [1, 7, 40, 512])
@pytest.mark.parametrize("first", [0, 1, 13, 39, 40])
def test_later_rows_are_the_tail_of_all_rows(windowed: Model, batch: int, first: int) -> None:
    options = SessionOptions(n_batch=batch, type_k="f32", type_v="f32")
    rows = windowed.session(options).eval_rows(tokens(), first)
    assert rows.shape == (40 - first, 128)
    if first < 40:
        assert nmse(rows, windowed.logits(tokens(), F32)[first:]) < 1e-9


@pytest.mark.parametrize("first", [-1, 41])
def test_rows_that_do_not_exist(model: Model, first: int) -> None:
    session = model.session()
    with pytest.raises(SessionError, match=f"must be 0 to 40, the number of tokens, got {first}"):
        session.eval_rows(tokens(), first)
    assert session.n_past == 0


def test_how_rows_are_cut() -> None:
    for first, n, without, with_logits in itertools.product((0, 1, 5, 8), (8, 9), (1, 4, 9), (1, 3, 9)):
        batches = list(_batches(first, n, without, with_logits))
        assert [i for start, stop in batches for i in range(start, stop)] == list(range(n))
        wanted = [max(0, stop - max(start, first)) for start, stop in batches]
        assert all(0 < stop - start <= without for start, stop in batches) and max(wanted) <= with_logits
        whole = [stop - start == without or rows == with_logits for (start, stop), rows in zip(batches, wanted)]
        assert all(whole[:-1]), "as few as possible"


def test_rows_of_a_batch_that_begins_before_them(model: Model) -> None:
    session = model.session(F32)
    rows = session.eval_rows(tokens(), 33)
    assert nmse(rows, model.logits(tokens(), F32)[33:]) < 1e-9
    assert set(session._prepared) == {(40, 7)} and session.n_past == 40


def test_many_logits_are_made_in_pieces(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = model.session(F32).eval_rows(tokens())
    monkeypatch.setattr("graphrt.models.session.MAX_LOGITS_BYTES", 3 * 4 * 329)
    session = model.session(F32)
    assert nmse(session.eval_rows(tokens()), rows) < 1e-9
    assert set(session._prepared) == {(3, 3), (1, 1)}


def test_reset_forgets_the_sequence_and_keeps_the_graphs(windowed: Model) -> None:
    session = windowed.session()
    first = session.eval(tokens()).copy()
    exe = session.executable(40, 1)
    session.eval(tokens(5))
    session.reset()
    assert session.n_past == 0
    assert np.array_equal(session.eval(tokens()), first)
    assert session.executable(40, 1) is exe


def test_prepared_graphs_are_bounded_and_the_oldest_goes(model: Model) -> None:
    session = model.session()
    kept = session.executable(1, 1)
    for n in range(2, 2 + 2 * MAX_PREPARED):
        assert session.executable(1, 1) is kept, "one that is in use stays"
        session.executable(n, 1)
        assert len(session._prepared) <= MAX_PREPARED
    assert (2, 1) not in session._prepared


@pytest.mark.parametrize("kind", ["cpu", "exact"])
def test_batches_longer_than_the_context(path: Path, kind: str) -> None:
    model = load(path, "cpu", exact=kind == "exact")
    session = model.session(SessionOptions(n_ctx=10, n_batch=1000))
    assert session.n_batch == 10
    session.eval(tokens(10))
    assert session.n_past == 10


def test_a_refused_prompt_leaves_the_session_as_it_was(model: Model) -> None:
    session = model.session(SessionOptions(n_ctx=20))
    before = session.eval(tokens(10)).copy()
    for bad in ([], [1] * 11, [0, 329], [-1]):
        with pytest.raises(SessionError):
            session.eval(bad)
    assert session.n_past == 10
    other = model.session(SessionOptions(n_ctx=20))
    other.eval(tokens(10))
    assert np.array_equal(session.eval([5]), other.eval([5])) and not np.array_equal(session.eval([5]), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SessionOptions(n_ctx=2**31), "must be 1 to 2147483647, what positions hold, got 2147483648"),
        (SessionOptions(n_ctx=-2), "must be 1 to 2147483647, what positions hold, got -2"),
        (SessionOptions(n_batch=0), "must be at least 1, got 0"),
    ],
    ids=["long", "negative", "batch"],
)
def test_options_that_can_not_be(model: Model, options: SessionOptions, message: str) -> None:
    with pytest.raises(SessionError, match=message):
        model.session(options)


def test_the_default_context(model: Model, folder: Path) -> None:
    assert model.session().n_ctx == 256
    long = load(write_model(folder / "long.gguf", "llama", context_length=100_000), "cpu")
    assert long.session().n_ctx == 4096
    assert long.session(SessionOptions(n_ctx=5000)).n_ctx == 5000


# ---- load ----


def test_load_takes_a_path_and_a_backend(path: Path, folder: Path, model: Model) -> None:
    rows = model.logits(tokens(5))
    for backend in ("auto", "cpu", ["cpu"], graphrt.get_backend("cpu"), [graphrt.get_backend("cpu")]):
        assert nmse(load(str(path), backend).logits(tokens(5)), rows) < 1e-9
    assert graphrt.models.load is load
    with pytest.raises(BackendError, match="must be one of"):
        load(path, "frob")
    with pytest.raises(GGUFError):
        load(folder)


def test_models_share_no_state(path: Path) -> None:
    one, two = load(path).session(), load(path).session()
    one.eval(tokens())
    assert np.array_equal(two.eval([1]), load(path).session().eval([1]))


def test_steps_that_run_ahead(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """likeliest() gives what eval() and a choice by the host give, and forgets what nobody took."""
    prompt = [1, 5, 9, 3]
    plain = model.session()
    logits, expected = plain.eval(prompt), []
    for _ in range(12):
        expected.append(int(logits.argmax()))
        logits = plain.eval(expected[-1:])
    ahead = model.session()
    first = int(ahead.eval(prompt).argmax())
    assert [first, *ahead.likeliest(first, 11)] == expected
    assert ahead.n_past == len(prompt) + 11
    ahead.reset()
    ahead.eval(prompt)
    taken = [token for token, _ in zip(ahead.likeliest(first, 100), range(3))]
    assert taken == expected[1:4]
    # zip took the first three and asked the range for a fourth: nothing beyond counts.
    assert ahead.n_past == len(prompt) + 4
    monkeypatch.setattr(type(model.backends[0]), "asynchronous", True)
    again = model.session()
    assert ids(list(model.generate(prompt, 12, sampling=GREEDY, session=again, ignore_eos=True))) == expected


def test_steps_that_run_ahead_pass_the_window_and_fill_the_context(windowed: Model) -> None:
    plain = windowed.session()
    logits, expected = plain.eval([1, 5, 9]), []
    while plain.n_past < plain.n_ctx:
        expected.append(int(logits.argmax()))
        logits = plain.eval(expected[-1:])
    ahead = windowed.session()
    first = int(ahead.eval([1, 5, 9]).argmax())
    assert [first, *ahead.likeliest(first, 10**6)][: len(expected)] == expected
    assert ahead.n_past == ahead.n_ctx


@pytest.mark.parametrize("n_batch", [1, 2, 5])
def test_steps_that_nobody_takes_overwrite_nothing_that_is_seen(windowed: Model, n_batch: int) -> None:
    """A window's ring has n_batch cells to spare: as many steps may be queued, and no more."""
    options = SessionOptions(n_ctx=64, n_batch=n_batch, type_k="f32", type_v="f32")
    plain, ahead = windowed.session(options), windowed.session(options)
    token = int(plain.eval(tokens(30)).argmax())
    assert token == int(ahead.eval(tokens(30)).argmax())
    stream = ahead.likeliest(token, 100)
    following = next(stream)
    stream.close()
    assert following == int(plain.eval([token]).argmax()) and ahead.n_past == plain.n_past
    assert holds_only_what_is_past(ahead)
    assert nmse(ahead.eval([following]), plain.eval([following])) < 1e-12


def holds_only_what_is_past(session: Session) -> bool:
    return all(int(cells.positions.max()) == session.n_past - 1 for cells in session.cache.cells.values())


def test_no_cell_holds_what_was_not_read(windowed: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session = windowed.session(SessionOptions(n_ctx=64))
    session.eval(tokens(5))
    assert holds_only_what_is_past(session)

    def interrupted(exe: graphrt.Executable) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(graphrt.Executable, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.eval(tokens(9))
    assert session.n_past == 5 and holds_only_what_is_past(session)
    session.reset()
    assert holds_only_what_is_past(session), "-1: nothing"


def test_a_ring_knows_what_its_cells_hold() -> None:
    ring, held = Ring(16, 5, 2), [dict.fromkeys(range(16), -1) for _ in range(2)]
    position = np.zeros(2, np.int64)
    for n in (1, 3, 7, 1, 1, 8, 2, 5, 1, 6):
        at = position[:, None] + np.arange(n)
        np.testing.assert_array_equal(ring.take(at), at % 16)
        for seq in range(2):
            held[seq] |= {p % 16: p for p in at[seq].tolist()}
        before = ring.saved()
        position += n
        if n % 2:  # a sequence that was cut off: cells are empty now that held older positions
            position[1] -= 1
            ring.forget_from(int(position[1]), 1)
            held[1] = {cell: -1 if p >= position[1] else p for cell, p in held[1].items()}
        assert ring.positions.dtype == np.int32 and ring.positions.tolist() == [list(h.values()) for h in held]
        ring.restore(before)
        assert ring.positions[0].tolist() == list(held[0].values())
        ring.forget_from(int(position[1]), 1)
    ring.clear()
    assert (ring.positions == -1).all()


def test_each_step_has_its_own_look_at_the_cells(windowed: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are queued ahead: what a step is given is what the cells hold with its own tokens, and no later ones."""
    session, seen = windowed.session(SessionOptions(n_ctx=24, n_batch=4)), []
    run = graphrt.Executable.run

    def noted(exe: graphrt.Executable) -> None:
        seen.append((int(exe.read("inp_pos").max()), exe.read("attn_inp_kq_cells").max()))
        run(exe)

    monkeypatch.setattr(graphrt.Executable, "run", noted)
    session.eval(tokens(6))
    assert len(list(session.likeliest(1, 10))) == 10
    assert seen == [(3, 3), (5, 5), *((p, p) for p in range(6, 16))]


def test_the_host_writes_no_mask(windowed: Model) -> None:
    """What a step is given grows with the cells and the tokens, never with their product."""
    exe = windowed.session(SessionOptions(n_ctx=200, n_batch=100)).executable(100, 1)
    assert {t.name for t in exe.graph.inputs if t.n_elements > 300} == set()
    assert {n.name for n in exe.graph.nodes if n.op == "KQ_MASK"} == {"attn_inp_kq_mask", "attn_inp_kq_mask_swa"}


@pytest.mark.parametrize("taken", [1, 3, 6])
def test_a_session_goes_on_behind_all_that_was_said(model: Model, taken: int) -> None:
    """The last generated token too, whether the caller takes all or stops before; as the same text in one prompt."""
    first, second = tokens(5), tokens(9)[5:]
    session = model.session(F32)
    stream = model.generate(first, 6, sampling=GREEDY, session=session, ignore_eos=True)
    made = ids(list(itertools.islice(stream, taken)))
    stream.close()
    assert session.n_past == 5 + taken
    whole = model.session(F32)
    expected = whole.eval_rows([*first, *made, *second])[-len(second) :]
    kept = list(session.unread)
    assert kept == made[-1:]
    rows = session.eval_rows(second)
    assert nmse(rows, expected) < 1e-9 and session.n_past == whole.n_past == 9 + taken
    session.reset()
    assert session.n_past == 0


def test_an_interrupted_prompt_reads_nothing_twice(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two batches was read, and with it the token that was unread before."""
    session = model.session(SessionOptions(n_batch=4, type_k="f32", type_v="f32"))
    next(model.generate(tokens(3), 6, sampling=GREEDY, session=session, ignore_eos=True))
    run, runs = graphrt.Executable.run, []

    def second_fails(exe: graphrt.Executable) -> None:
        runs.append(exe)
        if len(runs) == 2:
            raise KeyboardInterrupt
        run(exe)

    monkeypatch.setattr(graphrt.Executable, "run", second_fails)
    with pytest.raises(KeyboardInterrupt):
        session.eval(tokens(6))
    assert session.unread == [] and session.n_past == 3 + 4


def test_text_that_goes_on_begins_no_sequence(model: Model) -> None:
    session = model.session(F32)
    list(model.generate("hello", 2, sampling=GREEDY, session=session, ignore_eos=True))
    before = session.n_past
    list(model.generate(" the sea", 0, session=session))
    ids_of = model.tokenizer.encode(" the sea", add_bos=False, parse_special=True)
    assert session.n_past == before + len(ids_of)


def test_a_token_that_a_failed_step_did_not_read_stays(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session = model.session(F32)
    stream = model.generate(tokens(5), 6, sampling=SamplerParams(temp=0.7, repeat_penalty=1.1), session=session)
    next(stream)
    token = next(stream).token
    with monkeypatch.context() as patch:
        patch.setattr(graphrt.Executable, "run", lambda exe: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert session.unread == [token] and session.n_past == 7


def test_a_token_that_was_read_is_not_read_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is the choice after it, as for logits that are NaN."""
    session = model.session(F32)
    stream = model.generate(tokens(5), 6, sampling=SamplerParams(temp=0.7, repeat_penalty=1.1), session=session)
    next(stream)

    def refused(*_: object) -> int:
        raise SessionError("no choice")

    monkeypatch.setattr(Model, "next_token", refused)
    with pytest.raises(SessionError, match="no choice"):
        next(stream)
    assert session.unread == [] and session.n_past == 6


def test_one_session_serves_one_thread_at_a_time(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    session, inside, go_on = model.session(F32), threading.Event(), threading.Event()
    run = graphrt.Executable.run

    def slow(exe: graphrt.Executable) -> None:
        inside.set()
        assert go_on.wait(60)
        run(exe)

    monkeypatch.setattr(graphrt.Executable, "run", slow)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(session.eval(tokens(4)).copy()))
    thread.start()
    assert inside.wait(60)
    for use in (session.eval, session.eval_rows, lambda ids: next(session.likeliest(ids[0], 2))):
        with pytest.raises(SessionError, match="one thread at a time"):
            use(tokens(3))
    go_on.set()
    thread.join()
    assert session.n_past == 4 and np.array_equal(found[0], model.session(F32).eval(tokens(4)))


def test_sessions_of_one_model_in_threads(model: Model) -> None:
    wanted = model.session(F32).eval_rows(tokens(12))
    found: dict[int, np.ndarray] = {}

    def work(i: int) -> None:
        session = model.session(F32)
        found[i] = np.stack([session.eval([t]).copy() for t in tokens(12)])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 4 and all(nmse(rows, wanted) < 1e-9 for rows in found.values())
