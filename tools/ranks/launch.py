"""`--tp N --pp M`: M stages of N ranks on this host, started by torch's own launcher, and ended together."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from graphrt.errors import RankError, SessionError
from graphrt.ranks import in_environment
from graphrt.tools.ranks.keyboard import StandardInput, left_as_it_is
from graphrt.tools.ranks.member import OWN_CODES, SERVES, Generate, named, started
from graphrt.tools.ranks.torchrun import as_torchrun_rank

#: Seconds that ranks have to say why they ended, after the first one has; to say the same, after one has a reason of
#: its own; to end when they are asked to; and to end by themselves when the first rank is done.
SAYING, AGREEING, ENDING, FINISHING = 2.0, 0.3, 5.0, 10.0


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
    return as_torchrun_rank(verb, args, work, read, check)


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
        with _ends_in_order(), tempfile.TemporaryDirectory(prefix="graphrt-ranks-") as folder:
            return self._run_in(Path(folder))

    def _run_in(self, folder: Path) -> int:
        from torch.multiprocessing.spawn import start_processes

        given = (self.size, str(folder), self.args, self.generate, self.prompt)
        context = start_processes(started, given, self.size, join=False, start_method="spawn")  # type: ignore[no-untyped-call]
        assert context is not None
        self.processes: Sequence[BaseProcess] = context.processes
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first rank's, which reports and ends
        try:
            check_plan(self.args, self.size)  # while the ranks' processes start, which takes longer
            return self._watch(self.processes, folder)
        finally:
            _end(self.processes)
            signal.signal(signal.SIGINT, before)

    def _watch(self, processes: Sequence[BaseProcess], folder: Path) -> int:
        while True:
            wait([p.sentinel for p in processes], 1)
            codes = [p.exitcode for p in processes]  # asked once: a rank may end between two looks
            if any(map(_failed, codes)):
                self._hear(processes, folder)
                raise _error(self._failures(processes, folder), self.size)
            if codes[0] is not None:
                until = time.monotonic() + FINISHING
                willed = codes[0] in (0, *OWN_CODES.values())
                while willed and time.monotonic() < until and any(p.is_alive() for p in processes):
                    wait([p.sentinel for p in processes if p.is_alive()], 0.1)
                return {ended: code for code, ended in OWN_CODES.items()}.get(codes[0], codes[0])
            if any(code is not None for code in codes):
                time.sleep(0.05)  # one has ended well before the first, whose end is not far

    def _hear(self, processes: Sequence[BaseProcess], folder: Path) -> None:
        """Waits for ranks to say why they end: a little longer, once one has a reason of its own, since all may have
        the same."""
        until = time.monotonic() + SAYING
        while time.monotonic() < until and any(p.is_alive() for p in processes):
            if any(not failure.lost for failure in self._failures(processes, folder)):
                until = min(until, time.monotonic() + AGREEING)
            wait([p.sentinel for p in processes if p.is_alive()], 0.1)

    def _failures(self, processes: Sequence[BaseProcess], folder: Path) -> list[Failure]:
        return [_failure(rank, p, folder) for rank, p in enumerate(processes) if _failed(p.exitcode)]


class ServerJob(Job):
    """The same of a server: where a rank fails after the server has answered, all ranks are started again. Whoever
    connects meanwhile waits: the socket stays. SIGTERM is the first rank's, which answers what is there, and ends."""

    processes: Sequence[BaseProcess] = ()
    asked = False

    def run(self) -> int:
        before = signal.signal(signal.SIGTERM, self._ask)
        try:
            while not self.asked:
                with tempfile.TemporaryDirectory(prefix="graphrt-ranks-") as folder:
                    try:
                        return self._run_in(Path(folder))
                    except RankError as error:
                        serves = Path(folder, SERVES).exists()
                        if self.asked and not serves:
                            return 128 + signal.SIGTERM
                        if self.asked or not serves:
                            raise
                        print(f"graphrt serve: {error}\nthe ranks are started again", file=sys.stderr, flush=True)
            return 0
        finally:
            signal.signal(signal.SIGTERM, before)

    def _ask(self, *_: object) -> None:
        """To end: whoever connects from now on is refused, also where the ranks are being started again."""
        self.asked = True
        self.args.listening.close()
        for process in self.processes[:1]:
            process.terminate()

    def _watch(self, processes: Sequence[BaseProcess], folder: Path) -> int:
        if self.asked:  # while they started
            processes[0].terminate()
        return super()._watch(processes, folder)


def check_plan(args: argparse.Namespace, size: int) -> None:
    """Raises what all ranks would: for a file that is not there, and for a model that can't be cut so. Of a model that
    the first rank is to fetch, or makes up, nothing is known yet."""
    from graphrt.models.arch import architecture, read_file
    from graphrt.models.gguf import GGUFFile
    from graphrt.models.hub import is_fetched, resolve
    from graphrt.models.ranks.network import plan_of

    if size == 1 or getattr(args, "synthetic", None) or is_fetched(args.model):
        return
    file = GGUFFile.open(resolve(args.model))
    hp = read_file(file)
    plan_of(architecture(hp.arch), hp, file, size, getattr(args, "pp", 1), getattr(args, "ep", False))


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process as an exit does, so that its ranks and their folder go with it; but for one
    that is ignored, as under nohup."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, old in before.items():
        if old is signal.SIG_DFL:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


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
    """Ends those that still run: the first one is asked before, the others have nothing to do without it."""
    for process in processes[1:]:
        process.kill()
    processes[0].terminate()
    processes[0].join(ENDING)
    processes[0].kill()
    for process in processes:
        process.join()
