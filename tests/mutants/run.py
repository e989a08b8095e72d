"""Plants the bugs of tests/mutants/*.toml one at a time, and says which ones the project's tests see.

    python tests/mutants/run.py [NAME ...] [--area A] [--again] [--seconds S] [--jobs N] [--limit S]

Each bug is planted in a copy of the tree (build/mutants/), where pytest runs the tests that it names in a process of
its own, with a time limit. What came of it is a line of build/mutants/results.jsonl, by a digest of the bug, of its
file and of its tests: a run that was stopped goes on where it was, and what has not changed since is not run again.

caught: a test fails, or Python dies. timed out: the tests pass within the limit without the bug and don't end with it,
which counts as caught. survived: all pass. broken: pytest could not run the tests, so that the bug says nothing.
Exit code 0 with 95 % caught of those that are not argued to survive, 1 under that, 2 if a list or a tree is not in
order, 3 if --seconds ended before all had run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from mutants.planted import AREAS, ROOT, Bug, Rotten, load, problems  # noqa: E402

#: The part of the bugs that must be caught, of those that are not argued to survive.
ENOUGH = 0.95
#: What counts as caught.
CAUGHT = ("caught", "timed out")
SOURCES = ("graphrt", "ops", "backends", "models", "tools")


def digest(*parts: bytes | str) -> str:
    """A digest of the parts, which can't run into one another."""
    found = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        found.update(len(raw).to_bytes(8, "little") + raw)
    return found.hexdigest()[:24]


def tracked(root: Path) -> list[str]:
    """The files that git knows or would add: no caches, nothing that was built."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    return sorted({name for name in listed if name and os.path.lexists(root / name)})


class Tree:
    """A copy of the checkout in which one bug at a time is planted. root: the checkout; path: where the copy lies.
    sources: a digest of all that is no test."""

    def __init__(self, root: Path, path: Path) -> None:
        self.root, self.path = root, path
        names = tracked(root)
        for old in self._own_files():
            if old not in names:
                (path / old).unlink()
        for name in names:
            self._bring(name)
        sources = [n for n in names if n.partition("/")[0] in SOURCES and (path / n).is_file()]
        self.sources = digest(*(part for n in sources for part in (n, (path / n).read_bytes())))

    def _own_files(self) -> list[str]:
        found = []
        for folder, _, files in os.walk(self.path):
            if "__pycache__" not in folder:
                found += [str((Path(folder) / f).relative_to(self.path)) for f in files]
        return found

    def _bring(self, name: str) -> None:
        source, target = self.root / name, self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            if not target.is_symlink():
                target.symlink_to(os.readlink(source))
        elif not target.exists() or target.read_bytes() != source.read_bytes():
            self._write(name, source.read_bytes())

    def _write(self, name: str, data: bytes) -> None:
        """Also drops the compiled file: it goes by the time in whole seconds and the size, which may be the same."""
        target = self.path / name
        for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
            compiled.unlink()
        target.write_bytes(data)

    @contextlib.contextmanager
    def planted(self, bug: Bug) -> Iterator[None]:
        """The tree with the bug, and afterwards as it was."""
        before = (self.path / bug.file).read_bytes()
        self._write(bug.file, bug.planted_in(before.decode()).encode())
        try:
            yield
        finally:
            self._write(bug.file, before)


#: What runs now: ended with the runner, however that ends.
_running: set[subprocess.Popen[bytes]] = set()


def run_tests(tree: Path, tests: Sequence[str], limit: float) -> dict[str, Any]:
    """How the tests end in a tree: "code", None after `limit` seconds; "seconds"; "said", pytest's last lines."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_WAIT_POLICY": "passive"}
    log = tree.with_suffix(".log")
    started = time.perf_counter()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=tree, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        _running.add(process)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # what the tests started must not outlive them either
            _end(process)
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-6:]
    return {"code": code, "seconds": round(time.perf_counter() - started, 1), "said": said}


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of them may have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _running.discard(process)


def verdict(code: int | None) -> str:
    """What pytest's exit code says of a planted bug."""
    if code is None:
        return "timed out"
    if code < 0 or code == 1:
        return "caught"
    return "survived" if code == 0 else "broken"


class State:
    """Results by digest, kept in a file of one JSON object a line; several threads may add."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, threading.Lock()
        self.known: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # the last line of a run that was killed
                    continue
                self.known[row["key"]] = row

    def add(self, key: str, **result: Any) -> dict[str, Any]:
        row = {"key": key, **result}
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            self.known[key] = row
            file.write(json.dumps(row) + "\n")
        return row


def _tests_of(root: Path, tests: Sequence[str]) -> str:
    return digest(*tests, *((root / t.partition("::")[0]).read_bytes() for t in tests))


def key_of(bug: Bug, root: Path) -> str:
    """Changes with the bug, with its file and with its tests."""
    return digest(bug.name, bug.file, bug.find, bug.replace, (root / bug.file).read_bytes(), _tests_of(root, bug.tests))


@dataclass
class Runner:
    """Runs bugs in copies of the tree under `work`. limit: seconds that a bug's tests may take."""

    root: Path
    work: Path
    limit: float

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        self.state = State(self.work / "results.jsonl")
        self._locks: dict[tuple[str, ...], threading.Lock] = {}
        self._lock = threading.Lock()

    def check_unchanged(self, tree: Tree, tests: tuple[str, ...]) -> None:
        """Raises Rotten unless the tests pass within the limit where nothing is planted; asked once for each set."""
        with self._lock:
            lock = self._locks.setdefault(tests, threading.Lock())
        with lock:
            key = digest("unchanged", tree.sources, _tests_of(tree.path, tests))
            found = self.state.known.get(key)
            if found is None:
                found = self.state.add(key, unchanged=tests, **run_tests(tree.path, tests, self.limit))
            if found["code"] != 0 or found["seconds"] > self.limit:
                self.state.known.pop(key, None)
                how = "did not end" if found["code"] is None else f"ended with {found['code']}"
                raise Rotten(
                    f"{' '.join(tests)} must pass without a bug within {self.limit:g} s, it {how} after "
                    f"{found['seconds']} s: " + "\n".join(found["said"])
                )

    def run(self, tree: Tree, bug: Bug) -> dict[str, Any]:
        """Plants one bug and runs its tests. Raises Rotten if the unchanged tree fails them."""
        self.check_unchanged(tree, bug.tests)
        key = key_of(bug, tree.path)
        with tree.planted(bug):
            ran = run_tests(tree.path, bug.tests, self.limit)
        return self.state.add(key, bug=bug.name, area=bug.area, result=verdict(ran["code"]), **ran)


def run_all(runner: Runner, bugs: Sequence[Bug], jobs: int, seconds: float) -> list[str]:
    """Runs the bugs in `jobs` copies, starting none after `seconds`; what is not in order, a sentence each."""
    todo: queue.SimpleQueue[Bug] = queue.SimpleQueue()
    for bug in bugs:
        todo.put(bug)
    rotten: list[str] = []
    until = time.monotonic() + seconds

    def work(job: int) -> None:
        tree = Tree(runner.root, runner.work / f"tree-{job}")
        while time.monotonic() < until:
            try:
                bug = todo.get_nowait()
            except queue.Empty:
                return
            try:
                row = runner.run(tree, bug)
                print(f"{row['result']:<9} {row['seconds']:6.1f} s  {bug.area:<8} {bug.name}", flush=True)
            except Rotten as error:
                rotten.append(str(error))
                print(f"not in order  {bug.name}: {error}", flush=True)

    threads = [threading.Thread(target=work, args=(job,), daemon=True) for job in range(min(jobs, len(bugs)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    finally:  # after Ctrl-C or a signal; the copies are put right by the next run
        for process in list(_running):
            _end(process)
    return rotten


def report(bugs: Sequence[Bug], results: dict[str, str]) -> tuple[str, float]:
    """The score in words, and as a part of all that are not argued to survive; results: by the bug's name."""
    counted = [b for b in bugs if not b.survives]
    caught = [b for b in counted if results.get(b.name) in CAUGHT]
    share = len(caught) / len(counted) if counted else 1.0
    argued = f", {len(bugs) - len(counted)} more are argued to survive" if len(counted) < len(bugs) else ""
    lines = [f"{len(caught)} of {len(counted)} planted bugs caught ({100 * share:.1f} %){argued}"]
    for kind in ("timed out", "survived", "broken"):
        names = [b.name for b in counted if results.get(b.name) == kind]
        lines += [f"{kind}: {', '.join(names)}"] if names else []
    waiting = sum(b.name not in results for b in bugs)
    lines += [f"not run yet: {waiting}; the same command goes on with them"] if waiting else []
    wrong = [b.name for b in bugs if b.survives and results.get(b.name) in CAUGHT]
    lines += [f"argued to survive, yet caught (drop the argument): {', '.join(wrong)}"] if wrong else []
    return "\n".join(lines), share


def chosen(bugs: Sequence[Bug], names: Sequence[str], area: str | None) -> list[Bug]:
    """The bugs of these names and this area. Raises Rotten for a name that no bug has."""
    unknown = set(names) - {b.name for b in bugs}
    if unknown:
        raise Rotten(f"no bug has the name {', '.join(sorted(unknown))}")
    return [b for b in bugs if (not names or b.name in names) and area in (None, b.area)]


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these bugs")
    parser.add_argument("--area", choices=AREAS, help="only the bugs of one area")
    parser.add_argument("--again", action="store_true", help="forget what came of them before")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after so long")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a bug's tests may take (default: 300)")
    args = parser.parse_args(argv)
    try:
        bugs = chosen(load(root / "tests" / "mutants"), args.names, args.area)
        wrong = problems(bugs, root)
    except Rotten as error:
        wrong = [str(error)]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    runner = Runner(root, root / "build" / "mutants", args.limit)
    keys = {bug.name: key_of(bug, root) for bug in bugs}
    if args.again:
        for key in keys.values():
            runner.state.known.pop(key, None)
    rotten = run_all(runner, [b for b in bugs if keys[b.name] not in runner.state.known], args.jobs, args.seconds)
    results = {name: runner.state.known[key]["result"] for name, key in keys.items() if key in runner.state.known}
    text, share = report(bugs, results)
    print(text)
    if rotten:
        return 2
    return 3 if len(results) < len(bugs) else 0 if share >= ENOUGH else 1


if __name__ == "__main__":
    raise SystemExit(main())
