"""Sessions that go back, are copied, saved, shortened and used for another prompt: each as a new session that is given
the tokens that stay. Tiny models; equality is exact where the same steps run, and NMSE where others do."""

from __future__ import annotations

import os
import stat
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import tiny_archs  # noqa: F401  (its models)
from support.tiny import tokens, write_model

import graphrt
from graphrt.errors import SessionError
from graphrt.models import Model, SamplerParams, load
from graphrt.models.engine import SessionOptions
from graphrt.models.session import Session
from graphrt.testing import nmse

GREEDY = SamplerParams(temp=0.0)
#: gemma3's window is 12 tokens: its ring has 12 + 8 cells, and 60 tokens go round it three times.
SMALL = SessionOptions(n_ctx=96, n_batch=8, type_k="f32", type_v="f32")
IDS = tokens(60)
#: A cache of k and v, a ring of a window, learned positions, ALiBi, and latents alone.
ARCHS = ("llama", "gemma3", "gpt2", "bloom", "deepseek2")


@pytest.fixture(scope="module", params=ARCHS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("state") / "model.gguf", request.param), "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("session_state")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Model:
    return load(write_model(folder / "llama.gguf", "llama", tokenizer="spm"), "cpu")


@pytest.fixture(scope="module")
def windowed(folder: Path) -> Model:
    return load(write_model(folder / "gemma3.gguf", "gemma3"), "cpu")


def fed_session(model: Model, ids: list[int], options: SessionOptions = SMALL) -> Session:
    session = model.session(options)
    session.eval(ids)
    return session


def fed(model: Model, ids: list[int], options: SessionOptions = SMALL) -> np.ndarray:
    """The logits after these tokens, in a new session."""
    return model.session(options).eval(ids).copy()


def goes_on_as(model: Model, session: Session, ids: list[int]) -> None:
    """The session holds these tokens, and what follows is what follows in a new session of them."""
    assert session.tokens == ids and session.n_past == len(ids)
    more = [3, 4, 5]
    assert nmse(session.eval(more), fed(model, [*ids, *more], session.options)) < 1e-9
    assert session.tokens == [*ids, *more]


# ---- tokens ----


def test_a_session_tells_its_tokens(llama: Model) -> None:
    """At each piece of a generation, greedy on the device or drawn by the host, read or unread."""
    for sampling in (GREEDY, SamplerParams(temp=1.0, seed=3)):
        session, made = llama.session(SMALL), list[int]()
        for piece in llama.generate(IDS[:9], 20, sampling=sampling, session=session, ignore_eos=True):
            assert session.tokens in ([*IDS[:9], *made], [*IDS[:9], *made, piece.token])
            made.append(piece.token)
        assert session.tokens == [*IDS[:9], *made]
        session.eval([5])
        assert session.tokens == [*IDS[:9], *made, 5]
        session.reset()
        assert session.tokens == []


def test_tokens_of_steps_that_run_ahead(windowed: Model) -> None:
    session = windowed.session(SMALL)
    token = int(session.eval(IDS[:30]).argmax())
    found = [token]
    for following in session.likeliest(token, 10**6):
        assert session.tokens == [*IDS[:30], *found]
        found.append(following)
        if len(found) == 50:
            break
    assert session.tokens == [*IDS[:30], *found[:-1]]
    rest = list(session.likeliest(found[-1], 10**6))  # the context is full at last
    assert session.tokens == [*IDS[:30], *found, *rest][: session.n_ctx] and session.n_past == session.n_ctx


# ---- going back ----


@pytest.mark.parametrize("n", [60, 59, 51, 50, 13, 1, 0])
def test_going_back(model: Model, n: int) -> None:
    session = fed_session(model, IDS)
    session.rewind(n)
    ring = "swa" in session.cache.cells
    assert session.unread == (IDS[:n] if ring and n < 51 else []), "a full cache reads nothing again"
    assert all(int(cells.positions.max()) < n for cells in session.cache.cells.values())
    goes_on_as(model, session, IDS[:n])


def test_going_back_within_what_is_unread(llama: Model) -> None:
    session = fed_session(llama, IDS[:10])
    session.unread = IDS[10:14]
    session.rewind(12)
    assert session.unread == IDS[10:12]
    goes_on_as(llama, session, IDS[:12])


@pytest.mark.parametrize("n", [-1, 61])
def test_going_back_to_where_one_never_was(llama: Model, n: int) -> None:
    session = fed_session(llama, IDS)
    with pytest.raises(SessionError, match="goes back to 0 to 60 tokens, which it has, got"):
        session.rewind(n)
    assert session.tokens == IDS


@pytest.mark.parametrize(("keep", "drop"), [(0, 1), (5, 20), (5, 55), (40, 8), (60, 0)])
def test_a_shift_is_a_session_without_the_dropped_tokens(model: Model, keep: int, drop: int) -> None:
    session = fed_session(model, IDS)
    session.shift(keep, drop)
    goes_on_as(model, session, IDS[:keep] + IDS[keep + drop :])


def test_a_shift_reads_nothing_before_what_it_drops(llama: Model) -> None:
    session = fed_session(llama, IDS)
    session.shift(40, 8)
    assert session.unread == IDS[48:] and session.lengths[0] == 40


@pytest.mark.parametrize(("keep", "drop"), [(-1, 2), (2, -1), (30, 31)])
def test_a_shift_that_can_not_be(llama: Model, keep: int, drop: int) -> None:
    session = fed_session(llama, IDS)
    with pytest.raises(SessionError, match="within the session's 60 tokens"):
        session.shift(keep, drop)
    with pytest.raises(SessionError, match="within the session's 60 tokens"):
        session.shift(np.int64(2**63 - 1), np.int64(2**63 - 1))  # whose own sum is -2
    assert session.tokens == IDS


@pytest.mark.parametrize(
    ("wanted", "read"),
    [([*IDS[:50], 1, 2, 3], 3), (IDS, 1), (IDS[:20], 1), ([*IDS, 9], 1), ([127, *IDS], 61)],
    ids=["another end", "the same", "its beginning", "more", "nothing alike"],
)
def test_a_prompt_that_begins_alike_reads_what_differs(model: Model, wanted: list[int], read: int) -> None:
    session = fed_session(model, IDS)
    rest = session.keep_prefix(wanted)
    assert rest == wanted[-read:] and session.tokens + rest == wanted
    assert nmse(session.eval(rest), fed(model, wanted)) < 1e-9 and session.tokens == wanted


def test_no_prompt_shares_nothing(llama: Model) -> None:
    with pytest.raises(SessionError, match="at least one token, got none"):
        llama.session().keep_prefix([])


# ---- copies ----


def test_a_copy_goes_its_own_way(model: Model) -> None:
    session = fed_session(model, IDS)
    session.unread = [7]
    other = session.copy()
    assert other.options == session.options
    session.eval([1, 2])
    goes_on_as(model, other, [*IDS, 7])
    goes_on_as(model, session, [*IDS, 7, 1, 2])
    assert model.session(SMALL).copy().tokens == []


# ---- files ----


@pytest.mark.parametrize(
    ("k", "v"), [("f32", "f32"), ("f16", "q8_0"), ("bf16", "q4_0"), ("f8", "f16"), ("q8_0", "f8_e4m3")]
)
def test_a_session_read_back_is_the_one_that_was_written(windowed: Model, folder: Path, k: str, v: str) -> None:
    """Heads of 32 elements, so that every type serves; tokens that nobody has read yet too."""
    session = windowed.session(SessionOptions(n_ctx=96, type_k=k, type_v=v))
    session.eval(IDS)
    session.unread = [9, 8]
    session.save(folder / "types.session")
    back = windowed.load_session(folder / "types.session")
    assert back.options == session.options and back.tokens == [*IDS, 9, 8] and back.unread == [9, 8]
    assert np.array_equal(back.eval([1]), session.eval([1]))


def test_a_file_in_every_architecture_and_with_other_sizes(model: Model, folder: Path) -> None:
    session = fed_session(model, IDS)
    path = folder / "sizes.session"
    session.save(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "what was said is nobody else's"
    goes_on_as(model, model.load_session(str(path)), IDS)
    for n_ctx, n_batch in ((96, 8), (64, 1), (256, 100)):
        options = SessionOptions(n_ctx, n_batch, "f32", "f32")
        back = model.load_session(path, options)
        assert back.n_ctx == n_ctx and back.unread == [] and back.tokens == IDS
        goes_on_as(model, back, IDS)
    empty = model.session(SMALL)
    empty.save(path)
    assert model.load_session(path).tokens == []


def test_a_file_that_does_not_fit(llama: Model, windowed: Model, folder: Path) -> None:
    path = folder / "refused.session"
    fed_session(llama, IDS).save(path)
    other = load(write_model(folder / "other.gguf", "llama", tokenizer="spm", **{"rope.freq_base": 5e5}), "cpu")
    for model, options, message in (
        (windowed, None, "it is of another model"),
        (other, None, "it is of another model"),
        (llama, SessionOptions(n_ctx=96), "cache has the types f32 and f32; give these as type_k and type_v"),
        (
            llama,
            SessionOptions(59, type_k="f32", type_v="f32"),
            "has 60 tokens, the context holds 59; give a larger n_ctx",
        ),
    ):
        with pytest.raises(SessionError, match=message):
            model.load_session(path, options)


def test_weights_tell_models_apart(llama: Model, folder: Path) -> None:
    """Of the same sizes and keys: one byte in the middle of one tensor differs."""
    data = bytearray((folder / "llama.gguf").read_bytes())
    info = llama.file.tensors["blk.1.ffn_up.weight"]
    data[info.offset + info.nbytes // 2] ^= 1
    (folder / "tuned.gguf").write_bytes(data)
    fed_session(llama, IDS).save(folder / "tuned.session")
    with pytest.raises(SessionError, match="it is of another model"):
        load(folder / "tuned.gguf", "cpu").load_session(folder / "tuned.session")


def test_rotations_that_depend_on_the_context(folder: Path) -> None:
    """phi3's factors are others from its original context on: rows of a cache are then of no use."""
    model = load(write_model(folder / "phi3.gguf", "phi3-long"), "cpu")
    fed_session(model, IDS, SessionOptions(n_ctx=240)).save(folder / "phi3.session")
    assert model.load_session(folder / "phi3.session", SessionOptions(n_ctx=250)).tokens == IDS
    with pytest.raises(SessionError, match="rotates otherwise in its context of 240; give that as n_ctx"):
        model.load_session(folder / "phi3.session", SessionOptions(n_ctx=61))


def test_damaged_files(llama: Model, folder: Path) -> None:
    good, path = folder / "good.session", folder / "damaged.session"
    fed_session(llama, IDS[:7]).save(good)
    data = good.read_bytes()
    for n in [*range(0, 120, 7), len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:n])
        refused(llama, path, "damaged or cut short")
    path.write_bytes(data + b"\0")
    refused(llama, path, "damaged or cut short")
    for at in [*range(0, 120), *range(120, len(data), 997)]:
        changed = bytearray(data)
        changed[at] ^= 0x41
        path.write_bytes(changed)
        refused(llama, path, "must be a file that Session.save")


#: Where a header's numbers stand: the context, tokens, tokens read, kinds, tokens held.
N_CTX, N_TOKENS, N_READ, N_KINDS, HELD = range(64, 84, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({N_CTX: 2**32 - 1}, "its context is 4294967295, over the 256 that a file may ask for"),
        ({N_CTX: 0}, "damaged or cut short"),
        ({N_CTX: 5}, "it has 7 tokens, the context holds 5"),
        ({N_TOKENS: 2**32 - 1}, "it has 4294967295 tokens"),
        ({N_READ: 8}, "damaged or cut short"),
        ({N_READ: 6}, "damaged or cut short"),
        ({N_KINDS: 0}, "damaged or cut short"),
        ({N_KINDS: 9}, "damaged or cut short"),
        ({N_KINDS: 2**32 - 1}, "damaged or cut short"),
        ({HELD: 6}, "damaged or cut short"),
        ({HELD: 2**32 - 1}, "damaged or cut short"),
        ({HELD + 4: 329}, "damaged or cut short"),
        ({HELD + 4: 2**32 - 1}, "damaged or cut short"),
    ],
    ids=str,
)
def test_files_that_say_what_can_not_be(llama: Model, folder: Path, changes: dict[int, int], message: str) -> None:
    """Their checksum is right. The last two are a token's id."""
    path = folder / "hostile.session"
    fed_session(llama, IDS[:7]).save(path)
    data = bytearray(path.read_bytes()[:-4])
    for at, value in changes.items():
        struct.pack_into("<I", data, at, value)
    path.write_bytes(data + struct.pack("<I", zlib.crc32(data)))
    refused(llama, path, message)


def test_a_window_that_lacks_tokens(windowed: Model, folder: Path) -> None:
    """A file whose ring says to hold 3 of 11 tokens that are needed, and has as many bytes."""
    path = folder / "lacking.session"
    session = fed_session(windowed, IDS[:11])
    session.cache.cells["swa"].positions[session.cache.cells["swa"].positions < 8] = -1
    session.save(path)
    refused(windowed, path, "damaged or cut short")


def refused(model: Model, path: Path, message: str) -> None:
    with pytest.raises(SessionError, match=message):
        model.load_session(path)


def test_files_that_are_none(llama: Model, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for path in (folder / "nowhere", folder, folder / "pipe", Path("a\0b")):
        refused(llama, path, "must be a file that Session.save")
    session = fed_session(llama, IDS)
    for path in (folder, folder / "nowhere" / "x", Path("a\0b")):
        with pytest.raises(SessionError, match="session's file must be writable"):
            session.save(path)
    assert not list(folder.glob("writing-*"))


# ---- threads ----


def test_one_thread_at_a_time(llama: Model, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, inside, go_on = fed_session(llama, IDS), threading.Event(), threading.Event()
    run = graphrt.Executable.run

    def slow(exe: graphrt.Executable) -> None:
        inside.set()
        assert go_on.wait(60)
        run(exe)

    monkeypatch.setattr(graphrt.Executable, "run", slow)
    thread = threading.Thread(target=session.eval, args=([1],))
    thread.start()
    assert inside.wait(60)
    uses: list[Callable[[], object]] = [
        lambda: session.rewind(3),
        lambda: session.shift(1, 2),
        lambda: session.keep_prefix([1]),
        session.copy,
        session.reset,
        lambda: session.save(folder / "busy.session"),
    ]
    for use in uses:
        with pytest.raises(SessionError, match="one thread at a time"):
            use()
    go_on.set()
    thread.join()
    assert session.tokens == [*IDS, 1] and not (folder / "busy.session").exists()
