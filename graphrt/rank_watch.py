"""The watch that ranks keep over each other: a rank that hangs is noticed by the others within half a minute.

Every second a thread of each rank notes a beat where all ranks can read it, and looks at the others' beats. Time is
counted in looks, not by a clock: a rank that was stopped itself, or a host that slept, has no silence of others to
report when it wakes. Two things are a fault of another rank: its beats stand still (the process is stopped, or gone, or
its host is), or this rank waits, and of those that wait for nobody it is one that comes to no meeting (an endless
loop), unless it has said that it is at something long. Ranks of a pipeline have meetings of their own, so how many each
has come to tells nothing but whether it goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from graphrt.presence import Presence, here

#: Seconds between two looks.
TICK = 1.0
#: Looks after which a rank is given up whose beats stand still; that does not come to where this one waits for it; that
#: is at something long; and after which all ranks that wait for each other at one place are.
SILENT, ABSENT, LONG, STUCK = 15, 15, 1800, 120


class Beat(NamedTuple):
    """What a rank tells: a number that grows with each beat, how many meetings it has come to, whether it is at
    something long, and whether it is at a meeting, so that others may be to blame. n is -1 once it has left for
    good."""

    n: int
    met: int
    busy: bool
    there: bool = False

    def encoded(self) -> str:
        return f"{self.n} {self.met} {self.busy:d} {self.there:d}"

    @classmethod
    def decoded(cls, data: bytes) -> Beat:
        n, met, busy, there = data.split()
        return cls(int(n), int(met), busy == b"1", there == b"1")


@dataclass(frozen=True)
class Fault:
    """rank: whose fault it is, -1 for the ranks' together or for nobody's; text: a sentence about it."""

    rank: int
    text: str


class Board(Protocol):
    """Where beats are noted: a store of torch.distributed, or a folder."""

    def set(self, key: str, value: str) -> None: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class Folder:
    """A board for the ranks of one host: a private folder, a file for each key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def set(self, key: str, value: str) -> None:
        beside = self.path / f"{key}.new"
        beside.write_text(value)
        beside.replace(self.path / key)  # nobody reads half of it

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [(self.path / key).read_bytes() for key in keys]


class Judge:
    """What a rank makes of the beats that it sees, look by look."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._last: list[int] = [-2] * size
        self._met: list[int] = [-1] * size
        self._silent, self._absent, self._long = [0] * size, [0] * size, [0] * size
        self._waits_at, self._together = -1, 0

    def look(self, beats: Sequence[Beat], mine: Presence) -> Fault | None:
        """beats: of all ranks; mine: where this one stands. The fault, if there is one now."""
        others = [(rank, beat) for rank, beat in enumerate(beats) if rank != self.rank and beat.n >= 0]
        for rank, beat in others:
            self._silent[rank] = self._silent[rank] + 1 if beat.n == self._last[rank] else 0
            self._last[rank] = beat.n
            if self._silent[rank] >= SILENT:
                return Fault(
                    rank, f"it has given no sign of life for {SILENT * TICK:.0f} s: it is stopped, or its host is "
                    f"gone; see whether it is there, and start all again"
                )  # fmt: skip
        stays = mine.waits and mine.met == self._waits_at
        self._waits_at = mine.met if mine.waits else -1
        rests = {rank: beat.met == self._met[rank] for rank, beat in others}
        self._met = [beat.met for beat in beats]
        self._together = self._together + 1 if stays and all(beat.there and rests[r] for r, beat in others) else 0
        if self._together >= STUCK:
            return Fault(
                -1, f"all ranks have waited for each other for {STUCK * TICK:.0f} s, so that the link between them "
                f"must be broken; see whether they reach each other, and start all again"
            )  # fmt: skip
        for rank, beat in others:
            late = stays and rests[rank] and not beat.there
            self._absent[rank] = self._absent[rank] + 1 if late and not beat.busy else 0
            self._long[rank] = self._long[rank] + 1 if late else 0
            if self._absent[rank] >= ABSENT or self._long[rank] >= LONG:
                looks = ABSENT if self._absent[rank] >= ABSENT else LONG
                return Fault(
                    rank, f"it runs, but for {looks * TICK:.0f} s has not come to where the other ranks wait for it; "
                    f"look at what it does (py-spy dump), and start all again"
                )  # fmt: skip
        return None


class Watch:
    """A rank's thread that beats and looks. ended: called with a fault, once, from that thread; where the rank's own
    thread waits in a call that nothing else ends, it ends the process."""

    def __init__(self, rank: int, size: int, board: Board, ended: Callable[[Fault], None], mark: str = "") -> None:
        self.board, self.ended, self.judge = board, ended, Judge(rank, size)
        self._keys = [f"beat{mark}-{i}" for i in range(size)]
        self._rank, self._n = rank, 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graphrt-rank-watch", daemon=True)

    def beat(self) -> None:
        """Notes a beat. The first one must be there on all ranks before any of them starts to look."""
        self._n += 1
        self.board.set(self._keys[self._rank], Beat(self._n, here.met, here.busy > 0, here.there).encoded())

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """This rank leaves, with nobody's fault."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _answered(self, ask: Callable[[], list[bytes]]) -> list[bytes]:
        """What the board says. Raises OSError where it says nothing for SILENT looks: over a link that is broken a
        store waits for ever."""
        answers: list[list[bytes] | Exception] = []
        there = threading.Event()

        def asking() -> None:
            try:
                answers.append(ask())
            except Exception as error:
                answers.append(error)
            there.set()

        threading.Thread(target=asking, name="graphrt-rank-board", daemon=True).start()
        for _ in range(SILENT):  # not all at once: a process that was stopped wakes up behind any moment
            if there.wait(TICK):
                break
        answer = answers[0] if answers else OSError(f"no answer for {SILENT * TICK:.0f} s, so that its host is gone "
                                                    f"or the link to it broken")  # fmt: skip
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _look(self) -> list[bytes]:
        self.beat()
        return self.board.multi_get(self._keys)

    def _leave(self) -> list[bytes]:
        self.board.set(self._keys[self._rank], Beat(-1, here.met, False).encoded())
        return []

    def _run(self) -> None:
        fault = None
        while fault is None and not self._stopping.wait(TICK):
            try:
                fault = self.judge.look([Beat.decoded(data) for data in self._answered(self._look)], here)
            except (RuntimeError, OSError, ValueError) as error:
                first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
                fault = Fault(
                    -1, f"ranks tell each other that they are there, and the place where they do is gone ({first}); "
                    f"start all again"
                )  # fmt: skip
                if self._stopping.wait(TICK):  # all leave, and this one a little later
                    return
        if fault is not None:
            self.ended(fault)
            return
        try:
            self._answered(self._leave)
        except (RuntimeError, OSError):
            return  # the others have left before
