"""Why one of torchrun's ranks has ended is said once, by the first one where it can: with torch's own store."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from graphrt.errors import GGUFError, RankError
from graphrt.tools.ranks import torchrun
from graphrt.tools.ranks.torchrun import Said


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.TCPStore]:
    """What torchrun's agent has."""
    there = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(there.port))
    yield there


def ranks() -> tuple[Said, Said]:
    first, second = (Said("run", (rank, 2), io.StringIO()) for rank in range(2))
    return first, second


def printed(rank: Said) -> str:
    assert isinstance(rank.errors, io.StringIO)
    rank.make_sure()
    return rank.errors.getvalue()


def lost() -> RankError:
    error = RankError("one has not answered")
    error.lost = True
    return error


DAMAGED = GGUFError("the file is damaged")
WHY = "rank 1 of 2: the file is damaged"


def test_the_first_rank_says_another_one_s_reason(store: dist.TCPStore) -> None:
    first, second = ranks()
    second.note(DAMAGED)
    first.note(lost())
    assert first.by_another(lost()) == WHY
    assert printed(second) == printed(first) == ""


def test_the_first_rank_has_the_same_reason(store: dist.TCPStore) -> None:
    first, second = ranks()
    second.note(DAMAGED)
    first.note(DAMAGED)
    assert first.by_another(RankError("all must have one file")) == ""
    assert printed(second) == printed(first) == ""


def test_where_the_first_rank_does_not_hear_the_other_one_says_it(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "HEARING", 0.2)
    _, second = ranks()
    second.note(MemoryError())
    assert printed(second).startswith("graphrt run: rank 1 of 2: its host has no memory left for it; ")
    monkeypatch.setenv("MASTER_PORT", "1")  # where nothing listens
    _, alone = ranks()
    alone.note(DAMAGED)
    assert printed(alone) == f"graphrt run: {WHY}\n"


def test_who_only_lost_another_one_has_nothing_to_say(store: dist.TCPStore) -> None:
    first, second = ranks()
    for error in (lost(), KeyboardInterrupt()):
        second.note(error)
        assert printed(second) == ""
    assert first.by_another(lost()) == "" and second.by_another(lost()) == ""


def test_a_job_that_is_started_again_has_notes_of_its_own(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks()[1].note(DAMAGED)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert ranks()[0].by_another(lost()) == ""
