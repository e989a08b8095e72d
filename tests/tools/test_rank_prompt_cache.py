"""--prompt-cache over ranks: a file for each, and all keep as many tokens as the one that can keep the fewest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.ranked import F32
from support.tiny import tokens, write_model

from graphrt.models import load
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
