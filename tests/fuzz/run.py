"""Runs fuzzers: seeds in batches through children with limits, findings to build/fuzz, statistics at the end.

python -m fuzz.run                          every fuzzer, 10 minutes each
python -m fuzz.run gguf --count 300000 --jobs 2 --seed 5000
python -m fuzz.run --seconds 120 --today    all together 120 s: fixed seeds, then those of the day
python -m fuzz.run --go-on                  from the seeds at which the last such run ended
python -m fuzz.run gguf --replay build/fuzz/gguf-17.bin
"""

from __future__ import annotations

import argparse
import base64
import datetime
import json
import math
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz import names
from fuzz.limits import Limits

BATCH = 200
FOLDER = Path(__file__).resolve().parents[2] / "build" / "fuzz"
SAVED_PER_SIGN = 3  # findings that look alike: the first are saved, all are counted
A_DAY = 10**9  # seeds
SILENT = 600  # seconds after which a process that neither is ready nor answers is taken for stuck
PROGRESS = 10_000  # inputs between lines that tell how far it is


class Child:
    """A warmed process that tries inputs (child.py)."""

    def __init__(self, name: str, limits: Limits) -> None:
        command = [sys.executable, "-m", "fuzz.child", name, limits.text()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], SILENT)[0]:  # it answers with one line: none is buffered
            self._process.kill()
            raise RuntimeError(f"the fuzzer's process said nothing for {SILENT} s; see with py-spy where it waits")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fuzzer's process ended by itself, with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Campaign:
    """One fuzzer's seeds `first`, `first` + 1, ...; count: how many, seconds: for how long, None for no such end. The
    time counts from when a process is warm, else one that takes longer to warm than its share would try nothing.

    After run(): done, outcomes (word -> count), findings, following (every seed below it was tried)."""

    def __init__(
        self, name: str, first: int, count: int | None, seconds: float | None, jobs: int, limits: Limits = Limits()
    ) -> None:
        self.name, self.first, self.count, self.seconds, self.jobs, self.limits = (
            name,
            first,
            count,
            seconds,
            jobs,
            limits,
        )
        self.done, self.outcomes, self.findings = 0, Counter[str](), list[dict[str, Any]]()
        self.following = first
        self.took = 0.0
        self._tried: dict[int, int] = {}
        self._lock = threading.Lock()
        self._failed: list[BaseException] = []

    def run(self) -> Campaign:
        begun = time.monotonic()
        batches = self._batches()
        threads = [threading.Thread(target=self._job, args=(batches,)) for _ in range(self.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.took = time.monotonic() - begun
        if self._failed:
            raise self._failed[0]
        return self

    def _batches(self) -> Iterator[tuple[int, int]]:
        last = math.inf if self.count is None else self.first + self.count
        at = self.first
        while at < last:
            yield at, int(min(BATCH, last - at))
            at += BATCH

    def _job(self, batches: Iterator[tuple[int, int]]) -> None:
        try:
            child = Child(self.name, self.limits)
            until = None if self.seconds is None else time.monotonic() + self.seconds
            while until is None or time.monotonic() < until:
                with self._lock:
                    first, count = next(batches, (0, 0))
                if not count:
                    break
                self._note(first, count, child.ask(first=first, count=count, until=until))
            child.close()
        except BaseException as error:  # handed to run(), whose caller sees it
            self._failed.append(error)

    def _note(self, first: int, count: int, answer: dict[str, Any]) -> None:
        with self._lock:
            self.done += answer["done"]
            self.outcomes.update(answer["outcomes"])
            for finding in answer["findings"]:
                data = base64.b64decode(finding.pop("input"))
                self.findings.append(finding)
                alike = sum(f["sign"] == finding["sign"] for f in self.findings)
                if alike <= SAVED_PER_SIGN:
                    print(_story(self.name, finding, save(self.name, finding["seed"], data)), flush=True)
            if self.done // PROGRESS > (self.done - answer["done"]) // PROGRESS:
                print(f"{self.name}: {self.done} inputs, {len(self.findings)} findings", flush=True)
            if answer["done"] == count:
                self._tried[first] = count
            while self.following in self._tried:
                self.following += self._tried.pop(self.following)


def save(name: str, seed: int, data: bytes) -> Path:
    """Writes that seed's input where it can be replayed from."""
    path = FOLDER / f"{name}-{seed}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def _story(name: str, finding: dict[str, Any], path: Path | None) -> str:
    lines = [f"FINDING {name} {finding['seed']}: {finding['kind']}: {finding['what']}"]
    if not finding.get("alone", True):
        lines.append(f"  not when tried alone: seeds {finding['after']} to {finding['seed']} in one process")
    if path is not None:
        lines.append(f"  again: PYTHONPATH=tests python -m fuzz.run {name} --replay {path}")
    return "\n".join(lines + ["  | " + line for line in finding.get("said", "").splitlines()[-14:]])


def report(found: Campaign) -> str:
    """How many, how fast, and what became of them."""
    rate = found.done / found.took if found.took else 0.0
    lines = [
        f"{found.name}: {found.done} inputs from seed {found.first} on in {found.took:.0f} s ({rate:.0f} a second)"
    ]
    lines += [f"  {count:8} {word}" for word, count in found.outcomes.most_common()]
    signs = Counter(finding["sign"] for finding in found.findings)
    lines += [f"  {count:8} findings: {sign}" for sign, count in signs.most_common()]
    return "\n".join(lines)


def replay(name: str, path: Path, limits: Limits = Limits()) -> int:
    """Tries a saved input again; 1 when it is a finding."""
    child = Child(name, limits)
    answer = child.ask(path=str(path.resolve()))
    child.close()
    for finding in answer["findings"]:
        print(_story(name, finding, None))
    print(f"{path}: {', '.join(answer['outcomes'])}")
    return 1 if answer["findings"] else 0


def seed_of(day: datetime.date) -> int:
    """The first seed of a day's: no two days share any."""
    return day.toordinal() * A_DAY


def main(argv: list[str]) -> int:
    args = _arguments(argv)
    chosen = args.names or names()
    if args.replay:
        return replay(chosen[0], args.replay)
    state = FOLDER / "following.json"
    following = json.loads(state.read_text()) if args.go_on and state.exists() else {}
    starts = [args.seed]
    if args.today:
        today = datetime.datetime.now(datetime.UTC).date()
        starts.append(seed_of(today))
        print(f"the seed of the day {today}: {starts[1]}", flush=True)
    seconds = args.seconds if args.seconds is not None or args.count is not None else 600.0 * len(chosen)
    each = None if seconds is None else seconds / len(chosen) / len(starts)
    found = 0
    for name in chosen:
        for start in starts:
            campaign = Campaign(name, following.get(name, start), args.count, each, args.jobs).run()
            print(report(campaign), flush=True)
            found += len(campaign.findings)
            if args.go_on:
                following[name] = campaign.following
                state.parent.mkdir(parents=True, exist_ok=True)
                state.write_text(json.dumps(following))
    return 1 if found else 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fuzz.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; all of them by default")
    parser.add_argument("--seconds", type=float, help="of all fuzzers together, but for their start")
    parser.add_argument("--count", type=int, help="inputs of each fuzzer")
    parser.add_argument("--seed", type=int, default=0, help="the first one (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--today", action="store_true", help="half the time for seeds that every day has its own of")
    parser.add_argument("--go-on", action="store_true", help="begin where the last run with this option ended")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="try a saved input again")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
