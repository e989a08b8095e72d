"""The memory planner: lifetimes to offsets in one arena.

Steps are numbered in the order of execution. A block of memory is taken at the step that writes it and given back after
the last step that reads it; a result may take over a source's block when the op allows it and nothing reads the source
later. Placement is best fit over the gaps between blocks that are alive, which for a sequence of known lifetimes needs
no free list and no run-time work.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Request:
    """Memory for one tensor: `nbytes` from step `first` to step `last`, both included.

    takes_over: keys of earlier requests, in order of preference, whose block the tensor may use from `first` on.
    """

    key: object
    nbytes: int
    first: int
    last: int
    takes_over: tuple[object, ...] = ()


@dataclass
class MemoryPlan:
    """offsets: bytes from the arena's start by key; peak: the arena's size; total: the sum without any reuse.

    peak_step: the first step at which the live bytes are at their most, live_peak; taken_over: who reuses whose block.
    """

    offsets: dict[object, int] = field(default_factory=dict)
    peak: int = 0
    total: int = 0
    live_peak: int = 0
    peak_step: int = 0
    taken_over: dict[object, object] = field(default_factory=dict)


def plan_memory(requests: Sequence[Request], alignment: int = 64) -> MemoryPlan:
    """Offsets for every request such that no two that are alive at one step overlap. Deterministic."""
    plan = MemoryPlan(total=sum(_aligned(r.nbytes, alignment) for r in requests))
    live: list[tuple[int, int, int]] = []  # (offset, size, last step), by offset
    for chain in sorted(_chains(requests, alignment, plan.taken_over), key=lambda c: (c.first, -c.size)):
        live = [block for block in live if block[2] >= chain.first]
        offset = _best_fit(live, chain.size)
        insort(live, (offset, chain.size, chain.last))
        plan.offsets.update(dict.fromkeys(chain.keys, offset))
        plan.peak = max(plan.peak, offset + chain.size)
        in_use = sum(block[1] for block in live)
        if in_use > plan.live_peak:
            plan.live_peak, plan.peak_step = in_use, chain.first
    return plan


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


@dataclass
class _Chain:
    """Requests that share one block, one after the other."""

    size: int
    first: int
    last: int
    keys: list[object]


def _chains(requests: Sequence[Request], alignment: int, taken_over: dict[object, object]) -> list[_Chain]:
    """Requests joined where one takes over another's block; who took whose is noted in `taken_over`."""
    of: dict[object, _Chain] = {}
    chains: list[_Chain] = []
    for request in requests:
        size = _aligned(request.nbytes, alignment)
        giver = next((k for k in request.takes_over if k in of and _can_give(of[k], k, size, request.first)), None)
        if giver is not None:
            chain = of[giver]
            chain.last = request.last
            chain.keys.append(request.key)
            taken_over[request.key] = giver
        else:
            chain = _Chain(size, request.first, request.last, [request.key])
            chains.append(chain)
        of[request.key] = chain
    return chains


def _can_give(chain: _Chain, key: object, size: int, step: int) -> bool:
    """`key` still has the block, and `step` is the last one that reads it."""
    return chain.keys[-1] == key and chain.last == step and chain.size >= size


def _best_fit(live: list[tuple[int, int, int]], size: int) -> int:
    """The start of the smallest gap that holds `size` bytes, or the end of all blocks."""
    best, best_gap, end = -1, 0, 0
    for offset, block, _ in live:
        gap = offset - end
        if gap >= size and (best < 0 or gap < best_gap):
            best, best_gap = end, gap
        end = max(end, offset + block)
    return best if best >= 0 else end
