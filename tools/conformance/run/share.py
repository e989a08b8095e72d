"""`graphrt test --share N`: N processes use one device at the same time, each repeats cases and compares bits.

Processes that share a GPU stop each other's kernels in the middle, so that what is right only by good timing shows.
Half of the N places are taken by one process for the whole time; in the others processes of a few seconds follow one
another, since contexts that come and go disturb most.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from graphrt.errors import BackendError, GraphError
from graphrt.testing import Case
from graphrt.tools.common import printable, write_text
from graphrt.tools.conformance.cases.share import share_cases
from graphrt.tools.conformance.cases.sources import Source, pick, source_of
from graphrt.tools.conformance.run.pool import child_environment, run_threads

#: Seconds that a process lives where processes follow one another, its start included.
SHORT_LIFE = 8.0
#: Seconds beyond its time after which a process is taken to hang: its first kernels may have to be compiled.
PATIENCE = 300.0


@dataclass
class Tally:
    """A case's sum over all processes. short_lived: the runs of processes that came and went meanwhile; digests: of
    each process's first run, which should be one."""

    runs: int = 0
    short_lived: int = 0
    differing: int = 0
    processes: int = 0
    refused: str = ""
    messages: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def told(self) -> list[str]:
        """What is wrong, in sentences."""
        if len(self.digests) < 2:
            return self.messages
        return [*self.messages, f"processes' first runs gave {len(self.digests)} different results"]


def chosen_cases(source: dict[str, Any] | None, op: str | None, params: str | None) -> list[Case]:
    """The cases of a source, by default those of share_cases.py, that -o and -p leave."""
    return pick(list(Source(**source).cases() if source is not None else share_cases()), op, params)


class Sharing:
    """The places and what their processes say. Raises BackendError when no process can work."""

    def __init__(self, settings: dict[str, Any], places: int, seconds: float) -> None:
        self.settings, self.places, self.seconds = settings, places, seconds
        self.tallies: dict[str, Tally] = {}
        self.problems: list[str] = []
        self.started = 0
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stop = threading.Event()

    def run(self) -> None:
        """Returns when the time is over and every process has ended."""
        end = time.monotonic() + self.seconds
        threads = [threading.Thread(target=self._place, args=(i, end), daemon=True) for i in range(self.places)]

        def stop() -> None:
            self._stop.set()
            for process in list(self._running):  # after Ctrl-C
                process.kill()

        run_threads(threads, stop)

    def _place(self, place: int, end: float) -> None:
        short = place % 2 == 1
        while not self._stop.is_set() and (left := end - time.monotonic()) > 0:
            self._process(place, min(left, SHORT_LIFE) if short else left)
            if self.problems:
                return

    def _process(self, place: int, seconds: float) -> None:
        with self._lock:
            self.started += 1
            first = place * 7 + self.started
            runs = {case: tally.runs for case, tally in self.tallies.items()}
        whole_round = place % 2 == 0  # so that no case is left out, however short the time
        mine = {"seconds": seconds, "first": first, "runs": runs, "whole_round": whole_round}
        settings = json.dumps(self.settings | mine)
        command = [sys.executable, "-m", "graphrt.tools.conformance.run.share_worker", settings]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe, env=child_environment())
        self._running.add(process)
        try:
            said, errors = process.communicate(timeout=seconds + PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            said, errors = process.communicate()
            self.problems.append(f"a process hung: no end {PATIENCE:.0f} s after its time")
        finally:
            self._running.discard(process)
        self._add([json.loads(line) for line in said.splitlines() if line.endswith("}")], short=not whole_round)
        if process.returncode != 0 and not self._stop.is_set() and not self.problems:
            last = errors.strip().splitlines()[-1:] or [""]
            self.problems.append(f"a process ended with exit code {process.returncode}: {last[0][:300]}")

    def _add(self, answers: list[dict[str, Any]], short: bool) -> None:
        with self._lock:
            mine = set()
            for answer in answers:
                if "error" in answer:
                    self.problems.append(answer["error"])
                    continue
                tally = self.tallies.setdefault(answer["case"], Tally())
                tally.runs += answer["runs"]
                tally.short_lived += answer["runs"] if short else 0
                tally.differing += answer["differing"]
                tally.refused = answer["refused"]
                tally.messages += [answer["message"]] if answer["message"] else []
                tally.digests += [d] if (d := answer["digest"]) and d not in tally.digests else []
                mine.add(answer["case"])
            for case in mine:
                self.tallies[case].processes += 1


def main(args: argparse.Namespace) -> int:
    """Exit code 1 when a run differed, a process failed, or nothing ran."""
    if not args.seconds > 0:  # nor NaN
        raise GraphError(f"--seconds must be over 0, got {args.seconds:g}")
    given = [args.from_model, args.test_file, args.cases, args.graphs]
    if args.graphs:
        raise GraphError("--share repeats cases of one node and models' steps, not --graphs; leave one of them out")
    source = source_of(args).to_json() if args.set is not None or any(given) else None
    chosen_cases(source, args.op, args.params)  # refuses here, once, what every process would refuse
    settings = {
        "source": source, "op": args.op, "params": args.params, "backend": args.backend, "seed": args.seed,
    }  # fmt: skip
    sharing = Sharing(settings, args.share, args.seconds)
    sharing.run()
    if sharing.problems and not sharing.tallies:
        raise BackendError(sharing.problems[0])
    text = _json(sharing) if args.output == "json" else "\n".join(_lines(sharing, args))
    if args.output_file is not None:
        write_text(args.output_file, text + "\n")
    else:
        print(text)
    tallies = sharing.tallies.values()
    wrong = any(t.differing or t.told() for t in tallies)
    return 1 if sharing.problems or wrong or not any(t.runs for t in tallies) else 0


def _lines(sharing: Sharing, args: argparse.Namespace) -> Iterator[str]:
    """A line for each case, then what differed."""
    yield f"{args.backend}, seed {args.seed}, {sharing.places} processes at a time, {sharing.started} in all"
    yield ""
    width = max((len(case) for case in sharing.tallies), default=0)
    for case, t in sorted(sharing.tallies.items()):
        what = f"refused: {t.refused}" if t.refused else f"{t.runs:>10,} runs, {t.differing:,} differ"
        yield f"  {case:<{width}}  {what}"
    for case, t in sorted(sharing.tallies.items()):
        if t.told():
            yield f"\nDIFFERS: {case}\n  {printable(t.told()[0])}"
    yield from (f"\nPROBLEM: {printable(problem)}" for problem in sharing.problems)
    runs, short, differing = (
        sum(getattr(t, name) for t in sharing.tallies.values()) for name in ("runs", "short_lived", "differing")
    )
    yield f"\n{differing:,} of {runs:,} runs differ ({short:,} of them in processes that came and went)"


def _json(sharing: Sharing) -> str:
    cases = {case: vars(tally) for case, tally in sorted(sharing.tallies.items())}
    report = {"places": sharing.places, "processes": sharing.started, "cases": cases, "problems": sharing.problems}
    return json.dumps(report, indent=1)
