"""What prompts began with, in a file: a later engine reads no more than differs, and has the same rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters import write_adapter
from support.poisoned_engines import poisoned
from support.tiny import write_model

from graphrt.errors import SessionError
from graphrt.models import Model, load
from graphrt.models.engine import SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.paging.check import check
from graphrt.models.prefix_file import load_prefixes, save_prefixes

OPTIONS = SessionOptions(n_ctx=96, n_batch=32, type_k="f16", type_v="f32", page=16)
MOST = 1 << 30
SHARED = [7, 3, 100, 51] * 9
TEXTS = [[*SHARED, *range(40)], [*SHARED, *range(50, 80)], list(range(60, 90))]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("kept") / "m.gguf", request.param), "cpu", exact=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write_model(tmp_path_factory.mktemp("kept") / "m.gguf", "llama"), "cpu", exact=True)


def engine_of(model: Model, n_seq: int = 3, **changed: Any) -> PagedEngine:
    """An engine whose pages hold NaN, as those of a device may."""
    engine = model.engine(n_seq, replace(OPTIONS, **changed))
    assert isinstance(engine, PagedEngine)
    return poisoned(engine)


def left(engine: PagedEngine, path: Path, most: int = MOST) -> int:
    """The tokens that are kept of an engine whose texts have ended."""
    for seq in range(engine.n_seq):
        engine.free(seq)
    return save_prefixes(engine, path, most)


def test_a_later_engine_goes_on_from_it(model: Model, tmp_path: Path) -> None:
    first, later, path = engine_of(model), engine_of(model), tmp_path / "kept"
    expected = [first.read({seq: ids})[0] for seq, ids in enumerate(TEXTS)]
    kept = left(first, path)
    assert load_prefixes(later, path) == kept > 0
    check(later.cache.pool)
    for seq, ids in enumerate(TEXTS):
        with later.alone():
            rest = later.after_what_is_known({seq: np.array(ids, np.int32)})[seq]
        assert len(ids) - len(rest) == (len(ids) - 1) // 16 * 16, "all its full pages"
        np.testing.assert_array_equal(later.read({seq: rest})[0], expected[seq])
        check(later.cache.pool)
    again = left(later, tmp_path / "again")
    assert again == kept and len((tmp_path / "again").read_bytes()) == len(path.read_bytes())
    assert load_prefixes(engine_of(model), tmp_path / "none") == 0


def test_what_was_used_last_is_kept(llama: Model, tmp_path: Path) -> None:
    engine, path = engine_of(llama), tmp_path / "kept"
    for ids in TEXTS:
        engine.read({0: ids})
        engine.free(0)
    page = 16 * sum(leaf.nb[1] for layer in engine.cache.layers for leaf in layer.leafs)
    assert save_prefixes(engine, path, 6 * page - 1) == 5 * 16
    assert path.stat().st_size < 6 * page
    later = engine_of(llama)
    assert load_prefixes(later, path) == 80
    assert [later.cache.pool.adopt(seq, ids) for seq, ids in enumerate(TEXTS)] == [32, 64, 16]


def test_fewer_pages(model: Model, tmp_path: Path) -> None:
    engine, path = engine_of(model), tmp_path / "kept"
    expected = [engine.read({seq: ids})[0] for seq, ids in enumerate(TEXTS)]
    kept = left(engine, path)
    later = engine_of(model, 1, n_pages=6)
    assert 0 < load_prefixes(later, path) < kept
    check(later.cache.pool)
    for ids, logits in zip(TEXTS, expected):
        np.testing.assert_array_equal(later.read({0: ids})[0], logits)
        later.free(0)
        check(later.cache.pool)


def test_the_ends_of_texts_are_given_away_first(llama: Model, tmp_path: Path) -> None:
    engine, path = engine_of(llama), tmp_path / "kept"
    engine.read({0: TEXTS[0]})
    n_pages = left(engine, path) // 16
    later = engine_of(llama, n_pages=n_pages)
    load_prefixes(later, path)
    later.read({0: [*range(20)]})
    check(later.cache.pool)
    assert later.cache.pool.adopt(1, TEXTS[0]) == (n_pages - 2) * 16


def test_adapters_keep_their_own(llama: Model, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a.gguf", llama)
    path, engines = tmp_path / "kept", list[PagedEngine]()
    for _ in range(2):
        model = load(llama.file, "cpu", exact=True)
        model.use_adapters({"a": tmp_path / "a.gguf"}, [0.0])
        engines.append(engine_of(model))
        engines[-1].use_adapters(1, [1.0])
    expected = engines[0].read({0: TEXTS[0], 1: TEXTS[0]})
    left(engines[0], path)
    load_prefixes(engines[1], path)
    check(engines[1].cache.pool)
    np.testing.assert_array_equal(engines[1].read({0: TEXTS[0], 1: TEXTS[0]}), expected)
    plain = engine_of(llama, n_pages=3)
    load_prefixes(plain, path)
    check(plain.cache.pool)


def test_what_can_not_be_taken(llama: Model, tmp_path: Path) -> None:
    engine, path = engine_of(llama), tmp_path / "kept"
    expected = engine.read({0: TEXTS[0]})[0]
    left(engine, path)
    data = path.read_bytes()

    def refused(said: str, engine: PagedEngine, changed: bytes | None = None) -> None:
        if changed is not None:
            path.write_bytes(changed)
        with pytest.raises(SessionError, match=said):
            load_prefixes(engine, path)
        check(engine.cache.pool)
        assert not engine.cache.pool.root.children
        path.write_bytes(data)

    later = engine_of(llama)
    for n in (0, 15, 16, 51, 60, 200, len(data) // 2, len(data) - 1):
        refused("cut short", later, data[:n])
    refused("damaged", later, data + b"\0")
    rng = np.random.default_rng(0)
    for at in [16, 48, 52, 53, 56, 57, 60, 61, *rng.integers(52, len(data), 40).tolist()]:
        refused("damaged|another model", later, data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
    refused("begins otherwise", later, b"G" + data[1:])
    for changed in ({"n_ctx": 80}, {"type_k": "f32"}, {"page": 32}):
        refused("another model, context", engine_of(llama, **changed))
    path.chmod(0o666)
    refused("written by others", later)
    path.chmod(0o600)
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    refused("symbolic link", later)
    path.unlink()
    path.write_bytes(data)
    later.read({0: [1]})
    with pytest.raises(SessionError, match="before anything else"):
        load_prefixes(later, path)
    assert later.tokens(0) == [1]
    later.reset()
    assert load_prefixes(later, path) > 0
    np.testing.assert_array_equal(later.read({0: TEXTS[0]})[0], expected)
    with pytest.raises(SessionError, match="must be writable"):
        save_prefixes(later, tmp_path / "no" / "folder", MOST)
