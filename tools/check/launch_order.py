"""Proves that launches which may overlap don't disturb each other, from what programs tell of them
(graphrt/program.py).

With programmatic dependent launch a kernel may begin as soon as all programs of the one before it have said so or
ended (gdc_launch_dependents), and gdc_wait returns once the one before it is complete. As each kernel waits before it
lets the next one go, a launch overlaps with no more than the one before it, and only until it waits itself. Whether
that holds is worked out here, launch by launch, for one run and the one that follows it without a pause. (A program
with nothing to do may leave without waiting: of each launch some program waits.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from graphrt.program import LaunchInfo, Use


class Rule(Enum):
    """What a step may break; values: the sentence that says what to do."""

    OVERLAP = "read it after gdc_wait, or launch with without_early_start()"
    NEVER_WAITS = "call gdc_wait in every form that is launched with launch_pdl, or launch without"
    LETS_GO_EARLY = "call gdc_launch_dependents after gdc_wait only"
    CACHED = "read it past the L1 cache (cache_modifier .cg) and declare it uncached, or read it after gdc_wait"


@dataclass(frozen=True)
class Event:
    """A step as the checker sees it. kernel: its name; node: of the graph, which it works for; starts_early: it may
    begin before the one before has ended; waits: it waits for that one then; lets_go_early: it lets the next one begin
    before it has waited."""

    kernel: str
    node: str = ""
    uses: tuple[Use, ...] = ()
    starts_early: bool = False
    waits: bool = True
    lets_go_early: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel} of {self.node}" if self.node else self.kernel

    @staticmethod
    def of(launch: LaunchInfo, node: str) -> Event:
        """node: the name of the graph's node that the launch works for."""
        return Event(launch.name, node, launch.uses, launch.starts_early, launch.waits, launch.lets_go_early)


@dataclass(frozen=True)
class Violation:
    """later: what does it wrongly; earlier: what it overlaps with, "" where that is no matter; use: of later, other: of
    earlier; nbytes: in common; next_run: later is of the run after earlier's."""

    rule: Rule
    later: str
    earlier: str = ""
    use: str = ""
    other: str = ""
    nbytes: int = 0
    next_run: bool = False

    def __str__(self) -> str:
        if self.rule is Rule.NEVER_WAITS:
            said = "begins before the launch before it has ended and never waits for it"
        elif self.rule is Rule.LETS_GO_EARLY:
            said = "lets the launch after it begin before it has waited itself"
        else:
            shared = f"{self.nbytes} bytes of {self.use!r}"
            earlier = f"{self.earlier} of the run before" if self.next_run else self.earlier
            if self.rule is Rule.OVERLAP:
                said = f"touches {shared} while {earlier} may still run, whose {self.other!r} they are"
            else:
                said = f"reads {shared} before it waits and through the L1 cache, where {earlier} writes {self.other!r}"
        return f"{self.later} {said}; {self.rule.value}"


def violations(events: Sequence[Event]) -> list[Violation]:
    """What is wrong in one run of these steps and the same again right behind it; nothing, if the order is proved."""
    found = [Violation(Rule.NEVER_WAITS, e.name) for e in events if e.starts_early and not e.waits]
    found += [Violation(Rule.LETS_GO_EARLY, e.name) for e in events if e.lets_go_early]
    found += _overlaps(events)
    return [*found, *_stale(events)]


def _overlaps(events: Sequence[Event]) -> Iterator[Violation]:
    n = len(events)
    for i, (at_start, at_wait) in enumerate(_unfinished(events)):
        event = events[i % n]
        for use in event.uses:
            for j in at_start if use.early or not event.waits else at_wait:
                if i >= n and j >= n:
                    continue  # the first run has shown it
                for other in events[j % n].uses:
                    if use.meets(other):
                        yield _violation(Rule.OVERLAP, event, use, events[j % n], other, j < n <= i)


def _unfinished(events: Sequence[Event]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each step of two runs: which ones may still run when it begins, and which when it has waited."""
    let_go: tuple[int, ...] = ()  # those that may still run when the step before lets the next one begin
    ended: tuple[int, ...] = ()  # and when that one has ended
    for i in range(2 * len(events)):
        event = events[i % len(events)]
        start = (*let_go, i - 1) if event.starts_early and i else ()
        wait = ended if event.waits else start
        wait = wait if event.starts_early else ()
        yield start, wait
        ended = wait
        let_go = start if event.lets_go_early else wait


def _stale(events: Sequence[Event]) -> Iterator[Violation]:
    """What is read before waiting through the L1 cache, which may hold what was there before some step wrote."""
    written: dict[int, list[tuple[Event, Use]]] = {}  # by storage: weights have none
    for event in events:
        for use in event.uses:
            if use.writes:
                written.setdefault(use.storage, []).append((event, use))
    for event in events:
        for use in event.uses:
            if use.early and use.reads and event.starts_early and not use.uncached:
                for other, write in written.get(use.storage, ()):
                    if use.meets(write):
                        yield _violation(Rule.CACHED, event, use, other, write, False)


def _violation(rule: Rule, later: Event, use: Use, earlier: Event, other: Use, next_run: bool) -> Violation:
    nbytes = min(use.stop, other.stop) - max(use.start, other.start)
    return Violation(rule, later.name, earlier.name, use.name, other.name, nbytes, next_run)
