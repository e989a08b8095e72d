"""The kernels' integer arithmetic is stream_k.py's: run in Triton's interpreter on random tiles."""

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

from graphrt.backends.triton import interpreter  # noqa: F401  (mends the interpreter)
from graphrt.backends.triton.kernels.flash_attn import stream_k as sk
from graphrt.backends.triton.kernels.flash_attn.ranges import fixup_range, part_slot, program_range

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
    for p in range(programs):
        expected = sk.work_range(schedule, p, starts, programs)
        assert tuple(ranges[p, 1:]) == expected
        if expected[0] < expected[1]:
            assert ranges[p, 0] == sk.tile_of_unit(expected[0], starts)
    for tile in range(len(blocks)):
        found = [int(slot) for slot in slots[tile] if slot >= 0]
        assert found == sk.fixup_parts(schedule, tile, starts, programs)
