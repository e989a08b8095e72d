"""What ranks make of each other's beats: who hangs, who is only busy, who has left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from graphrt import rank_watch
from graphrt.presence import Presence, here
from graphrt.rank_watch import ABSENT, LONG, SILENT, STUCK, Beat, Fault, Folder, Judge, Watch


def looks(judge: Judge, n: int, mine: Presence, others: Sequence[tuple[Any, ...]], *, still: int = -1) -> Fault | None:
    """The fault that shows within n looks. others: of each rank its meetings, whether it is busy, and whether it is at
    one; still: the rank whose beats stand still."""
    for i in range(n):
        beats = [Beat(7 if rank == still else 10 + i, *given) for rank, given in enumerate(others)]
        found = judge.look(beats, mine)
        if found is not None:
            return found
    return None


def waiting(met: int, *, needs_all: bool = True) -> Presence:
    return Presence(met, needs_all)


def test_a_rank_without_beats_is_given_up_whatever_else_there_is() -> None:
    for mine in (waiting(5), Presence(5)):
        judge = Judge(0, 3)
        assert looks(judge, SILENT, mine, [(5, False), (5, False), (5, True)], still=2) is None
        fault = looks(judge, 1, mine, [(5, False), (5, False), (5, True)], still=2)
        assert fault is not None and fault.rank == 2 and f"no sign of life for {SILENT} s" in fault.text


def test_silence_begins_anew_with_a_beat() -> None:
    judge = Judge(0, 2)
    assert looks(judge, SILENT, Presence(), [(0, False), (0, False)], still=1) is None
    assert looks(judge, 1, Presence(), [(0, False), (0, False)]) is None
    assert looks(judge, SILENT, Presence(), [(0, False), (0, False)], still=1) is None


def test_a_rank_that_does_not_come_is_given_up_while_this_one_waits() -> None:
    behind = [(4, False), (3, False), (4, False, True)]
    judge = Judge(0, 3)
    fault = looks(judge, ABSENT + 1, waiting(4), behind)
    assert fault is not None and fault.rank == 1 and f"for {ABSENT} s has not come" in fault.text
    assert looks(Judge(0, 3), 3 * ABSENT, Presence(4), behind) is None, "nobody waits here"
    assert looks(Judge(0, 3), 3 * ABSENT, waiting(4, needs_all=False), behind) is None, (
        "it waits for the first one alone"
    )
    judge = Judge(0, 3)
    for met in range(4, 4 + 3 * ABSENT):  # others are late each time, and come
        assert (
            judge.look([Beat(met, met, False), Beat(met, met - 1, False), Beat(met, met, False)], waiting(met)) is None
        )


def test_the_last_of_all_is_to_blame() -> None:
    """The others wait, too; in a pipeline a rank has come to fewer meetings than another that it waits for."""
    for met in (5, 12):
        fault = looks(Judge(0, 3), ABSENT + 1, waiting(9), [(9, False), (8, False, True), (met, False)])
        assert fault is not None and fault.rank == 2


def test_one_that_goes_on_is_not_to_blame() -> None:
    judge = Judge(0, 2)
    for i in range(3 * ABSENT):
        assert judge.look([Beat(i, 3, False), Beat(i, i, False)], waiting(3)) is None


def test_one_that_is_busy_has_more_time() -> None:
    judge, behind = Judge(1, 2), [(2, True), (3, False)]
    assert looks(judge, LONG, waiting(3), behind) is None
    fault = looks(judge, 2, waiting(3), behind)
    assert fault is not None and fault.rank == 0 and f"for {LONG} s" in fault.text


def test_all_wait_for_each_other() -> None:
    judge = Judge(0, 2)
    all_there = [(3, False, True), (7, False, True)]
    assert looks(judge, STUCK, waiting(3), all_there) is None
    fault = looks(judge, 1, waiting(3), all_there)
    assert fault is not None and fault.rank == -1 and "the link between them must be broken" in fault.text


def test_one_that_has_left_is_not_missed() -> None:
    judge = Judge(0, 2)
    for _ in range(2 * STUCK):
        assert judge.look([Beat(1, 3, False), Beat(-1, 2, False)], Presence(3)) is None


def test_presence() -> None:
    at = Presence()
    with at.meeting():
        assert (at.met, at.waits, at.there) == (1, True, True)
    with at.meeting(needs_all=False), at.at_length(), at.at_length():
        assert (at.met, at.waits, at.there, at.busy) == (2, False, True, 2)
    assert (at.waits, at.there, at.busy) == (False, False, 0)


class Instant:
    """An event that is never set, and for which nobody waits; `left` more looks and it is."""

    def __init__(self, left: int) -> None:
        self.left = left

    def wait(self, _: float) -> bool:
        self.left -= 1
        return self.left < 0


class Gone:
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("connection reset\nmore")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        raise AssertionError


def watched(board: object, left: int) -> list[Fault]:
    faults: list[Fault] = []
    watch = Watch(0, 2, board, faults.append)  # type: ignore[arg-type]
    watch._stopping = Instant(left)  # type: ignore[assignment]
    watch._run()
    return faults


def test_the_watch_beats_looks_and_leaves(tmp_path: Path) -> None:
    board = Folder(tmp_path)
    board.set("beat-1", Beat(1, 0, False).encoded())
    assert watched(board, SILENT) == []
    left = Beat.decoded(board.multi_get(["beat-0"])[0])
    assert left == Beat(-1, here.met, False)
    (fault,) = watched(board, SILENT + 2)
    assert fault.rank == 1
    assert Beat.decoded(board.multi_get(["beat-0"])[0]).n == SILENT + 1


@pytest.mark.parametrize(("left", "n"), [(2, 1), (1, 0)])
def test_a_board_that_is_gone_is_a_fault_unless_all_leave(left: int, n: int) -> None:
    faults = watched(Gone(), left)
    assert len(faults) == n
    if n:
        assert faults[0].rank == -1 and "where they do is gone (connection reset); start" in faults[0].text


class Silent(Gone):
    """A store at the other end of a link that is broken."""

    def set(self, key: str, value: str) -> None:
        Event().wait()


def test_a_board_that_says_nothing_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within as many looks as any silence, or in a thread that nobody waits for longer."""
    monkeypatch.setattr(rank_watch, "TICK", 0.002)
    found: list[Fault] = []
    watching = Thread(target=lambda: found.extend(watched(Silent(), 2)), daemon=True)
    watching.start()
    watching.join(60)
    (fault,) = found
    assert fault.rank == -1 and "no answer for 0 s, so that its host is gone or the link to it broken" in fault.text
