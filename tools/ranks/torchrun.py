"""One of the ranks that torchrun has started. The first one speaks: what another one could not do it says too, which it
reads from a note in torchrun's store. Where it doesn't hear of that, such as over a link that is broken, the other one
says it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from graphrt.errors import RankError, SessionError
from graphrt.rank_watch import Fault
from graphrt.ranks import torchrun_store
from graphrt.tools.ranks.member import Generate, as_rank, be_quiet, end_since, named, reason_of

#: Seconds in which the first rank hears of a note, and in which the store must answer.
HEARING = 3.0


def as_torchrun_rank(
    verb: str, args: argparse.Namespace, work: Generate, read: Callable[[], str], check: Callable[[], None],
) -> int:  # fmt: skip
    """Does what a verb does as one of torchrun's ranks: its exit code. work, read, check: as run_on_ranks() has
    them."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    said = Said(verb, (rank, size), sys.stderr)
    ended = ends_aloud(verb, rank, size)
    if rank:
        be_quiet()
    _check_number(args, size)
    if not rank:
        check()
    prompt = "" if rank else read()  # all have one standard input: it is the first rank's
    try:
        return as_rank(args, work, prompt, (rank, size), ended, failed=said.note)
    except RankError as error:
        reason = said.by_another(error)
        if reason:
            raise RankError(reason) from error
        raise
    finally:
        said.make_sure()


def _check_number(args: argparse.Namespace, size: int) -> None:
    each = size // args.pp
    if args.tp not in (1, each) or each * args.pp != size:
        rest = f" in {args.pp} stages" if args.pp > 1 else ""
        raise SessionError(
            f"--tp must be the number of ranks that torchrun started, {size}{rest}, got {args.tp}; leave it out"
        )


class Said:
    """A rank's error is said once: by the first rank, which has one of its own or reads another's note. errors: where
    this rank says its own if the first one does not."""

    def __init__(self, verb: str, place: tuple[int, int], errors: TextIO) -> None:
        self.verb, self.rank, self.errors = verb, place[0], errors
        self.name = named(*place)
        mark = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        self._note, self._heard = f"graphrt-failed{mark}", f"graphrt-heard{mark}"
        self._store: Any = None
        self.own = ""

    def note(self, error: BaseException) -> None:
        """Before this rank leaves, so that whoever notices finds it. A rank that has lost another one has no reason of
        its own."""
        if not isinstance(error, Exception) or (isinstance(error, RankError) and error.lost):
            return
        self.own = f"{self.name}{reason_of(error)}"
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone
            self._store = torchrun_store(HEARING)
            if self.rank:
                self._store.set(self._note, self.own)
            else:
                self._store.add(self._heard, 1)

    def by_another(self, error: RankError) -> str:
        """Why the first rank has lost another one, if that has left a note; else ""."""
        if self.rank == 0 and error.lost:
            with contextlib.suppress(RuntimeError, OSError):
                store = torchrun_store(HEARING)
                if store.check([self._note]):
                    store.add(self._heard, 1)
                    return str(store.get(self._note).decode())
        return ""

    def make_sure(self) -> None:
        """Of a rank that isn't the first: waits until that one knows why this one ends, or says it."""
        if self.rank and self.own and not self._is_heard():
            print(f"graphrt {self.verb}: {self.own}", file=self.errors, flush=True)

    def _is_heard(self) -> bool:
        until = time.monotonic() + HEARING
        with contextlib.suppress(RuntimeError, OSError):
            while self._store is not None and time.monotonic() < until:
                if self._store.add(self._heard, 0):
                    return True
                time.sleep(0.02)
        return False


def ends_aloud(verb: str, rank: int, size: int) -> Callable[[Fault], None]:
    """What ends a rank when another one hangs: the first that is not to blame says it, on the stderr of now; of what is
    no rank's fault, such as a link that is broken, the first one of each host."""
    errors = sys.stderr

    def ended(fault: Fault) -> None:
        speaks = int(os.environ.get("LOCAL_RANK", rank)) == 0 if fault.rank < 0 else rank == (fault.rank == 0)
        if speaks:
            print(f"graphrt {verb}: {named(fault.rank, size)}{fault.text}", file=errors, flush=True)
        end_since(fault, size)

    return ended
