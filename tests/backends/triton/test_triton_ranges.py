"""The kernels' integer arithmetic is stream_k.py's, on random tiles: ranges.py in Triton's interpreter, gluon_ranges.py
in the emulator, and the same of which k-blocks a tile visits (visits.py, gluon_visits.py).
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("these kernels are interpreted; set TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl
from support.gluon_emulator import Gl, Memory, Value, rebuilt

from graphrt.backends.triton import interpreter  # noqa: F401  (mends the interpreter)
from graphrt.backends.triton.kernels.flash_attn import gluon_ranges, gluon_visits
from graphrt.backends.triton.kernels.flash_attn import stream_k as sk
from graphrt.backends.triton.kernels.flash_attn.ranges import (
    fixup_range,
    part_of_tile,
    part_slot,
    program_range,
    slot_of_part,
    tile_units,
)
from graphrt.backends.triton.kernels.flash_attn.visits import mask_tile, visited_block

PARTS = 64


@triton.jit
def _program_ranges(
    p_out, programs, splits, n_tiles, n_blocks, p_counts, p_start, UNIFORM: tl.constexpr, BIG: tl.constexpr
):
    pid = tl.program_id(0)
    tile, unit, stop = program_range(pid, programs, splits, n_tiles, n_blocks, p_counts, p_start, False, UNIFORM, BIG)
    tl.store(p_out + 3 * pid, tile)
    tl.store(p_out + 3 * pid + 1, unit.to(tl.int64))
    tl.store(p_out + 3 * pid + 2, stop.to(tl.int64))


@triton.jit
def _fixup_slots(
    p_out, programs, splits, n_tiles, n_blocks, p_counts, p_start, UNIFORM: tl.constexpr, BIG: tl.constexpr
):
    tile = tl.program_id(0)
    first, last, n, total = fixup_range(
        tile, programs, splits, n_tiles, n_blocks, p_counts, p_start, False, UNIFORM, BIG
    )
    part = first + tl.arange(0, 64)
    slot, used = part_slot(part, first, last, programs, splits, n, total)
    tl.store(p_out + tile * 64 + tl.arange(0, 64), tl.where(used & (first != last), slot, -1))


def _run(blocks: list[int], programs: int, splits: int, uniform: bool, big: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ranges [programs, 3] and slots [tiles, PARTS], -1 for none."""
    starts = torch.tensor(sk.unit_starts(blocks), dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int32)
    ranges = torch.full((programs, 3), -7, dtype=torch.int64)
    slots = torch.full((len(blocks), PARTS), -7, dtype=torch.int32)
    args = (programs, splits, len(blocks), max(1, blocks[0]), counts, starts, uniform, big)
    _program_ranges[(programs,)](ranges, *args)
    _fixup_slots[(len(blocks),)](slots, *args)
    return ranges.numpy(), slots.numpy()


@triton.jit
def _segments(p_out, programs, splits, n_tiles, n_blocks, p_counts, p_start, UNIFORM: tl.constexpr, BIG: tl.constexpr):
    """Of each segment of a program [programs, n_tiles, 5]: tile, first unit, end, whether it is whole, its slot."""
    pid = tl.program_id(0)
    tile, unit, stop = program_range(pid, programs, splits, n_tiles, n_blocks, p_counts, p_start, False, UNIFORM, BIG)
    p_out += pid * n_tiles * 5
    while unit < stop:
        start, n = tile_units(tile, p_counts, n_blocks, p_start, False, UNIFORM, BIG)
        low, high, finishes, whole = part_of_tile(start, n, unit, stop)
        tl.store(p_out, tile)
        tl.store(p_out + 1, low)
        tl.store(p_out + 2, high)
        tl.store(p_out + 3, whole.to(tl.int32))
        tl.store(p_out + 4, slot_of_part(pid, splits, finishes))
        p_out += 5
        unit = start + high
        tile += 1


class Gluon:
    """gluon_ranges.py over some tiles."""

    def __init__(self, blocks: list[int], programs: int, splits: int, uniform: bool) -> None:
        self.starts = torch.tensor(sk.unit_starts(blocks), dtype=torch.int32)
        self.counts = torch.tensor([blocks[0] // 2, blocks[0] - blocks[0] // 2], dtype=torch.int32)
        memory = Memory({"counts": self.counts, "starts": self.starts})
        self.gl = {"gl": Gl(memory, 4)}
        self.programs, self.splits, self.n_tiles, self.uniform = programs, splits, len(blocks), uniform
        # Of a mask that all tiles share, the units are counted from what it leaves.
        self.rest = (*_numbers(999), memory.pointer(self.counts), memory.pointer(self.starts), True, uniform)

    def call(self, name: str, *args: object) -> tuple[int, ...]:
        found = rebuilt(getattr(gluon_ranges, name), self.gl)(*args)
        found = found if isinstance(found, tuple) else (found,)
        return tuple(int(x.data) if isinstance(x, Value) else int(x) for x in found)

    def range(self, program: int) -> tuple[int, ...]:
        numbers = _numbers(program, self.programs, self.splits, self.n_tiles)
        return self.call("program_range", *numbers, *self.rest, True)

    def segments(self, program: int) -> list[tuple[int, ...]]:
        """As _segments has them."""
        tile, last, unit, stop = self.range(program)
        found = []
        while unit < stop:
            counts, starts = self.rest[1:3]
            start, n = self.call("tile_units", *_numbers(tile), counts, *_numbers(999), starts, True, self.uniform)
            low, high, finishes, whole = self.call("part_of_tile", *_numbers(start, n, unit, stop))
            slot = self.call("slot_of_part", *_numbers(program, self.splits), Value(np.bool_(finishes)))
            found.append((tile, low, high, whole, *slot))
            unit, tile = start + high, tile + 1
        assert not found or found[-1][0] == last
        return found

    def sharing(self, tile: int) -> list[int]:
        """The programs that have units of a tile, as decode_join.py counts them."""
        args = _numbers(tile, self.programs, self.splits, self.n_tiles)
        first, last, parts, shares, units = self.call("fixup_range", *args, *self.rest)
        indices = [i if self.splits == 0 else i - first for i in range(first, last + 1)]
        used = [p for p, i in zip(range(first, last + 1), indices) if i * units // shares < (i + 1) * units // shares]
        assert len(used) == parts
        return used


def _numbers(*values: int) -> list[Value]:
    return [Value(np.int32(v)) for v in values]


def _expected(schedule: str, program: int, starts: tuple[int, ...], programs: int) -> list[tuple[int, ...]]:
    """stream_k.py's segments as _segments has them; the slot of a whole tile is left out."""
    found = sk.segments(schedule, program, starts, programs)
    return [(s.tile, s.start, s.stop, int(s.slot is None), -1 if s.slot is None else s.slot) for s in found]


def _slotless(found: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """A whole tile's slot means nothing."""
    return [(*s[:4], -1 if s[3] else s[4]) for s in found]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_kernel_program_has_the_range_and_a_fixup_the_parts_of_the_schedule(data: st.DataObject) -> None:
    uniform, big = data.draw(st.booleans()), data.draw(st.booleans())
    if uniform:
        blocks = [data.draw(st.integers(1, 30))] * data.draw(st.integers(1, 6))
    else:
        blocks = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))
    splits = data.draw(st.integers(0, 5))
    schedule = "split" if splits else "stream_k"
    programs = len(blocks) * splits if splits else data.draw(st.integers(1, 40))
    starts = sk.unit_starts(blocks)
    ranges, slots = _run(blocks, programs, splits, uniform, big)
    found = torch.full((programs, len(blocks), 5), -7, dtype=torch.int32)
    counts = torch.zeros(2, dtype=torch.int32)
    units = torch.tensor(starts, dtype=torch.int32)
    _segments[(programs,)](
        found, programs, splits, len(blocks), max(1, blocks[0]), counts, units, uniform, big
    )  # fmt: skip
    for p in range(programs):
        expected = sk.work_range(schedule, p, starts, programs)
        assert tuple(ranges[p, 1:]) == expected
        segments = [tuple(s.tolist()) for s in found[p] if s[0] >= 0]
        assert _slotless(segments) == _expected(schedule, p, starts, programs)
        if expected[0] < expected[1]:
            assert ranges[p, 0] == sk.tile_of_unit(expected[0], starts)
    for tile in range(len(blocks)):
        found = [int(slot) for slot in slots[tile] if slot >= 0]
        assert found == sk.fixup_parts(schedule, tile, starts, programs)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_gluon_has_the_same_ranges_parts_and_sharers(data: st.DataObject) -> None:
    uniform = data.draw(st.booleans())
    if uniform:
        blocks = [data.draw(st.integers(0, 30))] * data.draw(st.integers(1, 6))
    else:
        blocks = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=8))
    splits = data.draw(st.integers(0, 5))
    schedule = "split" if splits else "stream_k"
    programs = len(blocks) * splits if splits else data.draw(st.integers(1, 40))
    starts = sk.unit_starts(blocks)
    gluon = Gluon(blocks, programs, splits, uniform)
    for p in range(programs):
        assert gluon.range(p)[2:] == sk.work_range(schedule, p, starts, programs)
        assert _slotless(gluon.segments(p)) == _expected(schedule, p, starts, programs)
    for tile in range(len(blocks)):
        parts = sk.fixup_parts(schedule, tile, starts, programs)
        sharing = gluon.sharing(tile)
        assert len(sharing) == max(1, len(parts))
        if len(parts) > 1:
            slots = [slot if splits else slot // 2 for slot in parts]
            assert sharing == slots


@triton.jit
def _visits(p_out, p_list, n_blocks, mask_groups, n_qt, m3, HAS_MASK: tl.constexpr):
    """[m3 * 2, mask_groups * 2, n_qt] mask tiles and the list's blocks, one past its end included."""
    for i in range(0, n_blocks + 1):
        tl.store(p_out + i, visited_block(p_list, i, n_blocks, HAS_MASK, False))
    p_out += n_blocks + 1
    for seq in range(0, 2 * m3):
        for group in range(0, 2 * mask_groups):
            for qt in range(0, n_qt):
                tl.store(p_out, mask_tile(seq, group, qt, n_qt, mask_groups, m3))
                p_out += 1


@pytest.mark.parametrize("masked", [True, False])
def test_both_dialects_find_the_same_blocks(masked: bool) -> None:
    n, groups, n_qt, m3 = 5, 3, 2, 2
    blocks = torch.tensor([3, 4, 0, 2, 9], dtype=torch.int32)
    out = torch.full((n + 1 + 4 * m3 * groups * n_qt,), -1, dtype=torch.int32)
    _visits[(1,)](out, blocks, n, groups, n_qt, m3, masked)
    expected = [*blocks.tolist(), 9] if masked else list(range(n + 1))
    assert out[: n + 1].tolist() == expected

    memory = Memory({"blocks": blocks})
    scope = {"gl": Gl(memory, 4)}

    def gluon(name: str, *args: object) -> int:
        return int(rebuilt(getattr(gluon_visits, name), scope)(*args).data)

    if masked:
        p = memory.pointer(blocks)
        assert [gluon("listed_block", p, i) for i in range(n)] == blocks.tolist()
        # Its first two count up from 3.
        assert [gluon("block_of_run", p, v, *_numbers(3, 2)) for v in _numbers(*range(n))] == blocks.tolist()
        assert [gluon("block_in_range", *_numbers(b, n)) for b in (-7, 0, 4, 5)] == [0, 0, 4, 4]
    places = [(s, g, q) for s in range(2 * m3) for g in range(2 * groups) for q in range(n_qt)]
    tiles = [gluon("mask_tile", *_numbers(*place, n_qt, groups, m3)) for place in places]
    assert out[n + 1 :].tolist() == tiles == [((s % m3) * groups + g % groups) * n_qt + q for s, g, q in places]
