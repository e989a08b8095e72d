"""What parts of a step take on each of several ranks, joins and waits told apart.

A rank that comes early to where ranks meet waits for the others, and its clock counts that as the meeting. The one that
comes last waits for nobody: what it takes is the join, and what others take longer is their wait. So no clocks are
compared, and ranks may be on several hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphrt.ops.collectives import COLLECTIVES
from graphrt.ops.linked import name_on
from graphrt.ranks import Ranks
from graphrt.tools.common import table_lines
from graphrt.tools.profile.phase import Phase, time_by_node

#: What parts end in whose last node is one for a stage in the graph of all ranks.
_SHARED = ("ALL_REDUCE", "ALL_GATHER")


@dataclass(frozen=True)
class Told:
    """A phase on one rank, as others are told of it. labels, meets, seconds: of its parts, as Part and Phase have them;
    runs: of the parts that meet, run by run; by_mean: seconds are the mean of these, and not the median; step: seconds
    of a whole one; by_node: microseconds; shared: nodes that all ranks of a stage have in common where one graph has
    all ranks."""

    kind: str
    labels: list[str]
    meets: list[str]
    seconds: list[float]
    runs: list[list[float]]
    by_mean: bool
    step: float
    by_node: dict[str, float]
    shared: list[str]

    @classmethod
    def of(cls, p: Phase) -> Told:
        meets = [part.meets for part in p.parts]
        runs = [[seconds for seconds, met in zip(run, meets) if met] for run in p.runs]
        shared = [part.tensors[-1] for part in p.parts if part.label.rpartition("+")[2] in _SHARED]
        labels = [part.label for part in p.parts]
        return cls(p.kind, labels, meets, p.seconds, runs, p.in_step, p.step, time_by_node(p), shared)


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a phase's step on one rank. parts: by label, without waits; waits: of those at which ranks meet."""

    kind: str
    parts: dict[str, float]
    waits: dict[str, float]
    step: float


def gather(ranks: Ranks, phases: Sequence[Phase]) -> list[list[Told]]:
    """Each phase on each rank, known to all of them. Raises RankError."""
    return [list(phase) for phase in zip(*ranks.everyones([Told.of(p) for p in phases]))]


def told_apart(phase: Sequence[Told], stages: int = 1) -> list[RankTimes]:
    """The times of each rank. Ranks of a stage meet at collectives; who receives from another stage waits for it, and
    does little else."""
    each = len(phase) // stages
    found = []
    for first in range(0, len(phase), each):
        joins = _joins(phase[first : first + each])
        found += [_times(told, joins) for told in phase[first : first + each]]
    return found


def _joins(stage: Sequence[Told]) -> list[float]:
    """Seconds of each collective without waits: what the rank takes in each run that comes last in it."""
    runs = [np.array(told.runs).reshape(len(told.runs), sum(map(bool, told.meets))) for told in stage]
    own = [run[:, _collectives(told)] for run, told in zip(runs, stage)]
    n = min(map(len, own))  # a profiler may lose the last runs of a rank
    if not n:
        met = ([seconds for seconds, met in zip(told.seconds, told.meets) if met in COLLECTIVES] for told in stage)
        return [min(seconds) for seconds in zip(*met)]
    last = np.min([part[:n] for part in own], axis=0)
    middle = last.mean(axis=0) if stage[0].by_mean else np.median(last, axis=0)
    return list(middle.tolist())


def _collectives(told: Told) -> list[int]:
    """Which of the parts that meet are collectives."""
    return [i for i, met in enumerate(filter(None, told.meets)) if met in COLLECTIVES]


def _times(told: Told, joins: Sequence[float]) -> RankTimes:
    parts: dict[str, float] = {}
    waits: dict[str, float] = {}
    left = iter(joins)
    for label, met, seconds in zip(told.labels, told.meets, told.seconds):
        wait = seconds if met == "RECV" else 0.0
        if met in COLLECTIVES:
            wait = max(0.0, seconds - next(left))
        if met:
            waits[label] = waits.get(label, 0.0) + wait
        parts[label] = parts.get(label, 0.0) + seconds - wait
    return RankTimes(told.kind, parts, waits, told.step)


def lines(phases: Sequence[Sequence[RankTimes]]) -> list[str]:
    """A table for each phase: a column for each rank."""
    out = []
    for times in phases:
        what = (
            f"{times[0].kind} on {len(times)} ranks: us of a step; a join takes what it takes the rank that comes last"
        )
        out += ["", f"{what}, what others take longer is their wait", *_table(times)]
    return out


def _table(times: Sequence[RankTimes]) -> list[str]:
    body = [["all parts", *(sum(t.parts.values()) + sum(t.waits.values()) for t in times)]]
    labels = dict.fromkeys(label for t in times for label in t.parts)
    for label in sorted(labels, key=lambda label: -max(t.parts.get(label, 0.0) for t in times)):
        body.append([label, *(t.parts.get(label, 0.0) for t in times)])
    for label in dict.fromkeys(label for t in times for label, seconds in t.waits.items() if seconds):
        body.append([f"waits: {label}", *(t.waits.get(label, 0.0) for t in times)])
    body.append(["a whole step", *(t.step for t in times)])
    cells = [[str(name), *(f"{1e6 * float(us):.0f}" for us in figures)] for name, *figures in body]
    columns = ["part", *(f"rank {rank}" for rank in range(len(times)))]
    widths = [max(len(row[i]) for row in [columns, *cells]) for i in range(len(columns))]
    columns, *cells = [
        [c.rjust(w) if i else c for i, (c, w) in enumerate(zip(row, widths))] for row in [columns, *cells]
    ]
    return table_lines(columns, cells)


def as_json(phases: Sequence[Sequence[RankTimes]]) -> list[list[dict[str, Any]]]:
    """By phase and rank: microseconds of a step, of each part and of its waits."""
    return [
        [
            {
                "rank": rank, "phase": t.kind, "step_us": 1e6 * t.step,
                "parts": [
                    {"group": label, "us": 1e6 * seconds, "waits_us": 1e6 * t.waits.get(label, 0.0)}
                    for label, seconds in t.parts.items()
                ],
            }
            for rank, t in enumerate(times)
        ]
        for times in phases
    ]  # fmt: skip


def by_node(phase: Sequence[Told], stages: int = 1) -> dict[str, float]:
    """Microseconds by node of the graph of all ranks, as `graphrt dump --ranks` has it: see ops/linked.py."""
    each, found = len(phase) // stages, dict[str, float]()
    for rank, told in enumerate(phase):
        left_out = {*told.shared} if rank % each else set()
        if stages > 1 and rank not in (
            0,
            len(phase) - each,
        ):  # that graph has the way of logits to the first rank alone
            left_out.add("result_output")
        found |= {name_on(name, rank): us for name, us in told.by_node.items() if name not in left_out}
    return found
