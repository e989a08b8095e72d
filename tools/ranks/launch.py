"""`--tp N --pp M`: M stages of N ranks on this host, started by torch's own launcher, and ended together. Under
torchrun: one of them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from graphrt.errors import RankError, SessionError
from graphrt.ranks import in_environment
from graphrt.tools.ranks.keyboard import StandardInput, left_as_it_is
from graphrt.tools.ranks.member import OWN_CODES, SERVES, Generate, as_rank, be_quiet, ends_aloud, named, started

#: Seconds that ranks have to say why they ended, after the first one has; to end when they are asked to; and to end by
#: themselves when the first rank is done.
SAYING, ENDING, FINISHING = 2.0, 5.0, 10.0


def run_on_ranks(
    verb: str, args: argparse.Namespace, work: Generate, read: Callable[[], str], check: Callable[[], None],
    listens: Callable[[str, int], socket.socket] | None = None, *, talks: bool = False,
) -> int:  # fmt: skip
    """A verb over ranks: starts --tp times --pp of them, or is one of torchrun's. Its exit code. work: what each rank
    does; read: gives the verb's text, on the first rank or before there are any; check: raises for options that need
    one rank, at the same place; listens: of a server, makes the socket on which it listens, which outlives its ranks;
    talks: the first rank has this process's standard input, and its terminal.
    Raises RankError for a rank that is lost, with its own error."""
    if not in_environment():
        check()
        if talks:
            args.standard_input = StandardInput()
            with left_as_it_is():
                return Job(args, args.tp * args.pp, work, "").run()
        if listens is None:
            return Job(args, args.tp * args.pp, work, read()).run()  # ranks have no standard input
        with listens(args.host, args.port) as args.listening:
            return ServerJob(args, args.tp * args.pp, work, "").run()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    each = size // args.pp
    if args.tp not in (1, each) or each * args.pp != size:
        rest = f" in {args.pp} stages" if args.pp > 1 else ""
        raise SessionError(
            f"--tp must be the number of ranks that torchrun started, {size}{rest}, got {args.tp}; leave it out"
        )
    ended = ends_aloud(verb, rank, size)
    if rank:
        be_quiet()
        return as_rank(args, work, "", (rank, size), ended)
    check()
    return as_rank(args, work, read(), (rank, size), ended)  # all have one standard input: it is the first rank's


def refuse(found: Mapping[str, object], what: str) -> None:
    """Raises SessionError for options that need one rank: by flag, whether each is given. what: ranks do."""
    given = [name for name, there in found.items() if there]
    if given:
        raise SessionError(f"{what}, got {' and '.join(given)}; run that on one rank")


@dataclass(frozen=True)
class Failure:
    """Why a rank ended, or -1, all of them together. lost: because it lost another one, which says why by itself."""

    rank: int
    text: str
    lost: bool


class Job:
    """Ranks of one host. One that fails ends all of them."""

    def __init__(self, args: argparse.Namespace, size: int, generate: Generate, prompt: str) -> None:
        self.args, self.size, self.generate, self.prompt = args, size, generate, prompt

    def run(self) -> int:
        """Waits for the ranks, and gives the first one's exit code. Raises RankError with the error of the rank that
        failed first, once."""
        with tempfile.TemporaryDirectory(prefix="graphrt-ranks-") as folder:
            return self._run_in(Path(folder))

    def _run_in(self, folder: Path) -> int:
        from torch.multiprocessing.spawn import start_processes

        given = (self.size, str(folder), self.args, self.generate, self.prompt)
        context = start_processes(started, given, self.size, join=False, start_method="spawn")  # type: ignore[no-untyped-call]
        assert context is not None
        self.processes: Sequence[BaseProcess] = context.processes
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first rank's, which reports and ends
        try:
            return self._watch(self.processes, folder)
        finally:
            _end(self.processes)
            signal.signal(signal.SIGINT, before)

    def _watch(self, processes: Sequence[BaseProcess], folder: Path) -> int:
        while True:
            wait([p.sentinel for p in processes], 1)
            codes = [p.exitcode for p in processes]  # asked once: a rank may end between two looks
            if any(map(_failed, codes)):
                until = time.monotonic() + SAYING
                while time.monotonic() < until and not self._knows(processes, folder):
                    wait([p.sentinel for p in processes if p.is_alive()], 0.1)
                raise _error(self._failures(processes, folder), self.size)
            if codes[0] is not None:
                until = time.monotonic() + FINISHING
                willed = codes[0] in (0, *OWN_CODES.values())
                while willed and time.monotonic() < until and any(p.is_alive() for p in processes):
                    wait([p.sentinel for p in processes if p.is_alive()], 0.1)
                return {ended: code for code, ended in OWN_CODES.items()}.get(codes[0], codes[0])
            if any(code is not None for code in codes):
                time.sleep(0.05)  # one has ended well before the first, whose end is not far

    def _knows(self, processes: Sequence[BaseProcess], folder: Path) -> bool:
        """A rank has ended for a reason of its own, or all have ended."""
        ended = all(not p.is_alive() for p in processes)
        return ended or any(not failure.lost for failure in self._failures(processes, folder))

    def _failures(self, processes: Sequence[BaseProcess], folder: Path) -> list[Failure]:
        return [_failure(rank, p, folder) for rank, p in enumerate(processes) if _failed(p.exitcode)]


class ServerJob(Job):
    """The same of a server: where a rank fails after the server has answered, all ranks are started again. Whoever
    connects meanwhile waits: the socket stays. SIGTERM is the first rank's, which answers what is there, and ends."""

    def run(self) -> int:
        self.processes = ()
        asked = []

        def ask(number: int, _: object) -> None:
            asked.append(number)
            for process in self.processes[:1]:
                process.terminate()

        before = signal.signal(signal.SIGTERM, ask)
        try:
            while True:
                with tempfile.TemporaryDirectory(prefix="graphrt-ranks-") as folder:
                    try:
                        return self._run_in(Path(folder))
                    except RankError as error:
                        if asked or not Path(folder, SERVES).exists():
                            raise
                        print(f"graphrt serve: {error}\nthe ranks are started again", file=sys.stderr, flush=True)
        finally:
            signal.signal(signal.SIGTERM, before)


def _failed(code: int | None) -> bool:
    """A rank has ended with that code, and otherwise than by its own will: 130 is Ctrl-C."""
    return code not in (None, 0, *OWN_CODES.values(), 130)


def _failure(rank: int, process: BaseProcess, folder: Path) -> Failure:
    path, code = folder / f"{rank}.json", process.exitcode or 0
    if code > 0 and path.exists():
        said = json.loads(path.read_text())
        return Failure(said["rank"], said["text"], said["lost"])
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        memory = ", as the system does where memory runs out" if name == "SIGKILL" else ""
        return Failure(rank, f"it was ended by {name}{memory}; start all again", False)
    return Failure(rank, f"it ended with the exit code {code} and said nothing; start all again", False)


def _error(failures: Sequence[Failure], size: int) -> RankError:
    """The reason of the ranks that have one of their own; once, where all have the same."""
    own = [failure for failure in failures if not failure.lost] or list(failures)
    if len(own) == size and len({failure.text for failure in own}) == 1:
        return RankError(own[0].text)
    return RankError(f"{named(own[0].rank, size)}{own[0].text}")


def _end(processes: Sequence[BaseProcess]) -> None:
    """Ends those that still run: asked first, then not."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    until = time.monotonic() + ENDING
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
