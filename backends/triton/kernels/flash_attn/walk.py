"""One program of an attention's launch, step by step: which part of which tile, and what becomes of it.

The names of ggml's stream-K kernels stand beside ours, so that a session in its debugger can be laid beside this:

    kbc, kbc_stop           the program's first unit, and the end of its range, counted over all tiles
    sequence, zt, jt        a tile's sequence, its group of heads within it, its place along the queries
    kb0_start, kb0_stop     the k-blocks of that tile that the program visits
    needs_fixup             it has the end of a tile whose beginning others have
    is_fixup                it has a part without the end, which goes to scratch

ggml counts iter_k units for every tile; here a tile has as many as its mask leaves, so that kb0 numbers places in the
list of visited k-blocks (mask.py: full ones first).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from graphrt.backends.triton.kernels.flash_attn.mask_blocks import FULL, PARTIAL, block_kinds, mask_tile
from graphrt.backends.triton.kernels.flash_attn.tile_plan import AttentionPlan, program_segments
from graphrt.backends.triton.kernels.flash_attn.varlen.problem import VarlenProblem
from graphrt.errors import BackendError
from graphrt.printing import count_text
from graphrt.program import Fact, MaskValues

#: K-blocks that are listed one by one.
MOST_LISTED = 12


@dataclass(frozen=True)
class Visit:
    """What a program does of one tile.

    sequence, group (zt), i_qt (jt): the tile's; kv_head: whose keys it reads; heads: first and last of q's; tokens:
    first and last query; kbc: the first unit of all tiles' that it does here; start, stop (kb0_start, kb0_stop): of the
    tile's units; units: of the tile; blocks: the k-blocks in the order of their visit, full of them first; slot: of
    scratch, None where it writes the result.
    """

    tile: int
    sequence: int
    group: int
    i_qt: int
    kv_head: int
    heads: tuple[int, int]
    tokens: tuple[int, int]
    kbc: int
    start: int
    stop: int
    units: int
    blocks: tuple[int, ...]
    full: int
    needs_fixup: bool
    is_fixup: bool
    slot: int | None


def visits(plan: AttentionPlan, program: int, mask: MaskValues) -> tuple[Visit, ...]:
    """What a program does, in order; nothing for one that has no unit. mask: as for attention_plan().

    Raises BackendError for a program that the launch lacks, and where tiles are listed on the device.
    """
    chosen, t, p = plan.chosen, plan.chosen.tiling, plan.chosen.problem
    if isinstance(p, VarlenProblem):
        raise BackendError(
            "a program's walk needs tiles that are known before the run, those of packed sequences are listed on the "
            "device; leave --program out"
        )
    if not 0 <= program < chosen.programs:
        raise BackendError(f"a program must be one of 0 to {chosen.programs - 1}, got {program}")
    kinds = block_kinds(mask, t) if mask is not None else None
    starts, found = plan.unit_start, []
    for s in program_segments(chosen, plan.k_blocks)[program]:
        seq, group, i_qt = s.tile // (t.n_qt * t.n_groups), s.tile // t.n_qt % t.n_groups, s.tile % t.n_qt
        listed, n_full = _listed(plan, None if kinds is None else kinds[mask_tile(s.tile, t, p.m3)])
        head, last_row = group * t.pack, min((i_qt + 1) * t.block_m, p.n_q * t.pack) - 1
        found.append(Visit(
            s.tile, seq, group, i_qt, head // p.gqa, (head, head + t.pack - 1),
            (i_qt * t.block_m // t.pack, last_row // t.pack), starts[s.tile] + s.start, s.start, s.stop,
            starts[s.tile + 1] - starts[s.tile], listed[s.start : s.stop],
            max(0, min(n_full, s.stop) - s.start), s.needs_fixup, s.is_fixup, s.slot,
        ))  # fmt: skip
    return tuple(found)


def _listed(plan: AttentionPlan, kinds: Any) -> tuple[tuple[int, ...], int]:
    """A tile's k-blocks in the order of their visit, and how many of them are full; kinds: of each, None without a
    mask whose values are known."""
    t, p = plan.chosen.tiling, plan.chosen.problem
    if kinds is None:
        return tuple(range(t.n_blocks)), 0 if p.mask_t is not None else p.n_kv // t.block_n
    full, partial = (np.flatnonzero(kinds == kind).tolist() for kind in (FULL, PARTIAL))
    return (*full, *partial), len(full)


def walk_facts(plan: AttentionPlan, program: int, mask: MaskValues) -> Iterator[Fact]:
    """The same in words."""
    chosen, found = plan.chosen, visits(plan, program, mask)
    launch = f"of {chosen.programs}; blockIdx.x in ggml, program_id(0) in {chosen.file}"
    yield "program", f"{program} {launch}"
    if not found:
        yield "program", "it has no unit: it ends at once"
        return
    if chosen.choice.schedule != "tile":
        first, last = found[0], found[-1]
        stop = last.kbc + last.stop - last.start
        yield "program", f"units {first.kbc} to {stop - 1} of {plan.unit_start[-1]} (kbc {first.kbc}, kbc_stop {stop})"
    if chosen.problem.mask_t is not None and mask is None:
        yield "program", "the mask's values are not known here: as if it hid no k-block"
    for i, visit in enumerate(found, 1):
        yield from ((f"tile {i} of {len(found)}", text) for text in _visit_text(plan, visit))


def _visit_text(plan: AttentionPlan, v: Visit) -> Iterator[str]:
    t, p = plan.chosen.tiling, plan.chosen.problem
    heads = f"heads {v.heads[0]} to {v.heads[1]}" if t.pack > 1 else f"head {v.heads[0]}"
    names = f"(sequence {v.sequence}, zt {v.group}, jt {v.i_qt})"
    where = f"sequence {v.sequence}, {heads} of KV head {v.kv_head}, tile {v.i_qt} along the queries"
    yield f"tile {v.tile}: {where} {names}"
    rows = (v.tokens[1] - v.tokens[0] + 1) * t.pack
    yield f"queries {v.tokens[0]} to {v.tokens[1]}: at most {rows} of {t.block_m} rows in use"
    yield f"units {v.start} to {v.stop - 1} of the tile's {v.units} (kb0_start {v.start}, kb0_stop {v.stop})"
    if not v.blocks:
        yield "all k-blocks are hidden: it writes the row's zeros, or the sink's share"
    else:
        blocks = ", ".join(map(str, v.blocks[:MOST_LISTED])) + (", ..." if len(v.blocks) > MOST_LISTED else "")
        low, high = min(v.blocks) * t.block_n, min((max(v.blocks) + 1) * t.block_n, p.n_kv) - 1
        kinds = f", {v.full} full" if p.mask_t is None or plan.kinds is not None else ""
        yield f"{count_text(len(v.blocks), 'k-block')}{kinds}: {blocks}; keys {low} to {high}"
    yield f"needs_fixup {str(v.needs_fixup).lower()}, is_fixup {str(v.is_fixup).lower()}: {_end(plan, v)}"


def _end(plan: AttentionPlan, v: Visit) -> str:
    """What becomes of the sums."""
    if v.slot is None:
        return "it has the whole tile, divides by the sums and writes the result"
    by = "a launch of fixup.py" if plan.join == "fixup" else "the last of the tile's programs to arrive"
    whose = "the tile's last part" if v.needs_fixup else "a part without the tile's last unit"
    return f"{whose}: sums, maxima and unnormalised rows go to slot {v.slot} of scratch, {by} joins them"


def walk_data(plan: AttentionPlan, program: int, mask: MaskValues) -> dict[str, Any]:
    """The same for machines: Visit's fields, and ggml's names for those that have one."""
    found = visits(plan, program, mask)
    return {
        "program": program, "programs": plan.chosen.programs,
        "visits": [
            {**asdict(v), "ggml": {
                "kbc": v.kbc, "sequence": v.sequence, "zt": v.group, "jt": v.i_qt, "kb0_start": v.start,
                "kb0_stop": v.stop, "needs_fixup": v.needs_fixup, "is_fixup": v.is_fixup,
            }}
            for v in found
        ],
    }  # fmt: skip
