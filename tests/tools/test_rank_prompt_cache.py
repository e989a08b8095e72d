"""--prompt-cache over ranks: a file for each, of which all take as much as the one that can take the least; and a
server's ranks all of it or nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ranked import F32, Alone
from support.tiny import tokens, write_model

from graphrt.errors import SessionError
from graphrt.models import Model, load
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.prefix_file import load_prefixes, save_prefixes
from graphrt.models.ranks.prefixes import digest_of, load_on_all, save_on_all
from graphrt.ranks import Ranks
from graphrt.tools.prompt_cache import start


class Among(Ranks):
    """The second of three ranks, whose last one says what is in `group`."""

    def everyones(self, value: Any) -> list[Any]:
        return [value, value, self.group.pop(0)]


def test_ranks_keep_what_all_can(tmp_path: Path) -> None:
    model, path, ids = load(write_model(tmp_path / "m.gguf", "llama"), "cpu", exact=True), tmp_path / "c", tokens()
    wanted = model.session(F32).eval(ids[:9])
    model.ranks = Among(1, 3, [False])
    first = start(model, ids[:6], F32, path)
    assert (first.rest, first.path) == (ids[:6], tmp_path / "c.1-of-3")
    first.session.eval(first.rest)
    list(first.saving(piece for piece in ()))
    for said, kept in (([True, 6], 6), ([True, 2], 2), ([False], 0)):
        model.ranks = Among(1, 3, said)
        found = start(model, ids[:9], F32, path)
        assert (found.n_read, found.rest, found.path) == (9 - kept, ids[kept:9], tmp_path / "c.1-of-3")
        assert (found.session.eval(found.rest) == wanted).all()
    model.ranks = Among(1, 3, [True, 6])
    assert start(model, ids[:6], F32, path).path is None  # it is there already


#: Of a page of the tiny model's f32 rows: k and v of two heads of 16 in two layers.
PAGE = 16
PAGE_BYTES = PAGE * 2 * 2 * 2 * 16 * 4


def engine_of(model: Model) -> PagedEngine:
    return PagedEngine(model.decoder, model.backends, replace(F32, n_ctx=128, page=PAGE, n_pages=16), 2)


def test_a_server_s_ranks_know_the_same_prompts(tmp_path: Path) -> None:
    """Or nothing of any: what all ranks have together counts, and what one can't take none does."""
    model, path, ids = load(write_model(tmp_path / "m.gguf", "llama"), "cpu", exact=True), tmp_path / "kept", tokens()
    engine = engine_of(model)
    for prompt in (ids[:20] * 3, ids[20:40] * 2):
        engine.read({0: prompt})
        engine.free(0)
    last = {"full": 2 * PAGE_BYTES}  # the last rank has twice as much of a page as each of the two others
    for most, kept in ((1 << 30, 5), (8 * PAGE_BYTES, 2)):
        assert save_on_all(Among(1, 3, [last, ""]), engine, path, most) == kept * PAGE
    with pytest.raises(SessionError, match="rank 2 of 3: the disk is full"):
        save_on_all(Among(1, 3, [last, "the disk is full"]), engine, path, 1 << 30)
    fresh, alike = engine_of(model), engine_of(model)
    assert load_prefixes(alike, path) == 5 * PAGE
    others = ("", digest_of(alike.cache.pool)), ("", digest_of(fresh.cache.pool)), ("it is damaged", b"")
    new = digest_of(fresh.cache.pool)
    for said, refused in zip(others[1:], ("must be of the same prompts on all ranks", "rank 2 of 3: it is damaged")):
        with pytest.raises(SessionError, match=refused):
            load_on_all(Among(1, 3, [said]), fresh, path)
        assert digest_of(fresh.cache.pool) == new, "it gives out the pages that the others do"
    assert load_on_all(Among(1, 3, [others[0]]), fresh, path) == 5 * PAGE
    assert fresh.cache.pool.n_known(0, ids[:20] * 3) == 3 * PAGE


def test_a_rank_takes_no_other_one_s_rows(tmp_path: Path) -> None:
    file, path = write_model(tmp_path / "m.gguf", "llama"), tmp_path / "kept"
    ranks = [load(file, "cpu", exact=True, ranks=Alone(rank, 2)) for rank in range(2)]
    assert save_prefixes(engine_of(ranks[0]), path, 1 << 30) == 0
    assert load_prefixes(engine_of(ranks[0]), path) == 0
    with pytest.raises(SessionError, match="it is of another model"):
        load_prefixes(engine_of(ranks[1]), path)
