"""The attention kernel's schedules against a walk over every unit, and the choice between them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphrt.backends.triton.kernels.flash_attn import stream_k as sk
from graphrt.backends.triton.kernels.flash_attn.chooser import (
    GOOD_EFFICIENCY,
    MAX_SPLITS,
    MIN_BLOCKS,
    Choice,
    Device,
    Problem,
    best_splits,
    choose,
)
from graphrt.errors import BackendError

Launch = tuple[str, list[int], int]  # schedule, k-blocks of each tile, programs


@st.composite
def launches(draw: st.DrawFn, schedules: tuple[str, ...] = sk.SCHEDULES) -> Launch:
    """Ragged tiles, empty ones among them, and a number of programs that the schedule can have."""
    blocks = draw(st.lists(st.one_of(st.just(0), st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=12))
    schedule = draw(st.sampled_from(schedules))
    if schedule == "stream_k":
        total = sum(max(1, n) for n in blocks)
        some = st.one_of(st.integers(1, 3 * total + 3), st.sampled_from([1, len(blocks), max(1, total - 1), total]))
        return schedule, blocks, draw(some | st.just(total + 1))
    return schedule, blocks, len(blocks) * (1 if schedule == "tile" else draw(st.integers(1, 9)))


def emitted(launch: Launch) -> list[list[sk.Segment]]:
    """The segments of every program."""
    schedule, blocks, programs = launch
    starts = sk.unit_starts(blocks)
    return [list(sk.segments(schedule, p, starts, programs)) for p in range(programs)]


def walk(launch: Launch) -> list[list[tuple[int, int, int]]]:
    """(tile, first unit, end) of every program that gets units, one unit after the other, from the definitions."""
    schedule, blocks, programs = launch
    owned: list[dict[int, list[int]]] = [{} for _ in range(programs)]
    total = sum(max(1, n) for n in blocks)
    at = 0
    for tile, n in enumerate(blocks):
        u = max(1, n)
        for i in range(u):
            if schedule == "tile":
                owner = tile
            elif schedule == "split":
                parts = programs // len(blocks)
                owner = tile * parts + next(s for s in range(parts) if s * u // parts <= i < (s + 1) * u // parts)
            else:
                owner = next(p for p in range(programs) if p * total // programs <= at < (p + 1) * total // programs)
            owned[owner].setdefault(tile, []).append(i)
            at += 1
    return [[(tile, min(us), max(us) + 1) for tile, us in mine.items()] for mine in owned]


# --- the schedules ---


@given(launches())
@settings(max_examples=250)
@example(("stream_k", [0, 0, 5], 7))
@example(("stream_k", [0], 4))
@example(("split", [0, 3], 8))
def test_every_unit_is_done_once_and_the_ranges_are_a_walks(launch: Launch) -> None:
    schedule, blocks, programs = launch
    starts = sk.unit_starts(blocks)
    found = emitted(launch)
    done = Counter((s.tile, i) for mine in found for s in mine for i in range(s.start, s.stop))
    assert done == {(t, i): 1 for t, n in enumerate(blocks) for i in range(max(1, n))}
    assert [[(s.tile, s.start, s.stop) for s in mine if s.start < s.stop] for mine in found] == walk(launch)
    visited = Counter((s.tile, b) for mine in found for s in mine for b in s.k_blocks(blocks[s.tile]))
    assert visited == {(t, b): 1 for t, n in enumerate(blocks) for b in range(n)}
    ends = [sk.work_range(schedule, p, starts, programs) for p in range(programs)]
    assert ends[0][0] == 0 and ends[-1][1] == starts[-1] == sum(max(1, n) for n in blocks)
    assert all(stop == start for (_, stop), (start, _) in zip(ends[:-1], ends[1:]))


@given(launches())
@settings(max_examples=250)
@example(("stream_k", [0, 0, 5], 20))
def test_one_finisher_a_tile_and_the_merge_order_is_that_of_the_programs(launch: Launch) -> None:
    schedule, blocks, programs = launch
    starts = sk.unit_starts(blocks)
    found = emitted(launch)
    for tile in range(len(blocks)):
        parts = [(p, s) for p, mine in enumerate(found) for s in mine if s.tile == tile]
        (finisher,) = [s for _, s in parts if not s.is_fixup]
        assert finisher.stop == max(1, blocks[tile]) and finisher.start < finisher.stop
        assert parts[-1][1] is finisher, "the finisher comes last"
        merged = sk.fixup_parts(schedule, tile, starts, programs)
        if len(parts) == 1:
            assert finisher.slot is None and not finisher.needs_fixup and merged == []
            assert finisher.start == 0
        else:
            assert finisher.needs_fixup and all(s.is_fixup for _, s in parts[:-1])
            assert merged == [s.slot for _, s in parts], "ascending programs, and what was emitted"
        if schedule == "stream_k":
            first, last = sk.contributors(tile, starts, programs)
            assert (first, last) == (parts[0][0], parts[-1][0])


@given(launches())
@settings(max_examples=250)
def test_slots_are_unique_and_in_the_scratch(launch: Launch) -> None:
    schedule, blocks, programs = launch
    found = emitted(launch)
    slots = [s.slot for mine in found for s in mine if s.slot is not None]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < sk.scratch_slots(schedule, len(blocks), programs) for slot in slots)
    for p, mine in enumerate(found):
        assert all((s.slot is not None) == (s.needs_fixup or s.is_fixup) for s in mine)
        assert not any(s.needs_fixup and s.is_fixup for s in mine)
        assert not any(s.is_fixup for s in mine[:-1]), "only the last one is open"
        assert not any(s.needs_fixup for s in mine[1:]), "only the first one finishes what others began"
        if schedule == "stream_k":
            assert all(s.slot == 2 * p + s.is_fixup for s in mine if s.slot is not None)


@given(st.integers(1, 60), st.integers(1, 200))
@settings(max_examples=150)
def test_program_of_unit_is_the_inverse_of_the_ranges(total: int, programs: int) -> None:
    owner = {u: p for p in range(programs) for u in range(p * total // programs, (p + 1) * total // programs)}
    assert {u: sk.program_of_unit(u, programs, total) for u in range(total)} == owner
    sizes = Counter((p + 1) * total // programs - p * total // programs for p in range(programs))
    assert set(sizes) <= {total // programs, -(-total // programs)}, "shares differ by one unit at most"


@given(st.integers(1, 2**40), st.integers(1, 2**20), st.data())
@settings(max_examples=150)
def test_program_of_unit_at_sizes_of_64_bits(total: int, programs: int, data: st.DataObject) -> None:
    unit = data.draw(st.integers(0, total - 1))
    p = sk.program_of_unit(unit, programs, total)
    assert 0 <= p < programs
    assert sk.range_start(p, programs, total) <= unit < sk.range_start(p + 1, programs, total)
    assert (unit + 1) * programs < 2**63


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
@settings(max_examples=60)
def test_tile_of_unit_is_the_tile(blocks: list[int]) -> None:
    owner = [t for t, n in enumerate(blocks) for _ in range(max(1, n))]
    starts = sk.unit_starts(blocks)
    assert [sk.tile_of_unit(u, starts) for u in range(starts[-1])] == owner


def test_a_tile_is_one_segment_and_needs_no_scratch() -> None:
    starts = sk.unit_starts([3, 0, 7])
    assert starts == (0, 3, 4, 11)
    got = [sk.segments("tile", p, starts, 3) for p in range(3)]
    assert got == [
        (sk.Segment(0, 0, 3, False, False, None),),
        (sk.Segment(1, 0, 1, False, False, None),),
        (sk.Segment(2, 0, 7, False, False, None),),
    ]
    assert sk.scratch_slots("tile", 3, 3) == sk.scratch_slots("split", 3, 3) == 0
    assert list(got[1][0].k_blocks(0)) == []


def test_of_a_split_only_parts_with_units_deliver() -> None:
    starts = sk.unit_starts([3, 0])
    got = [sk.segments("split", p, starts, 8) for p in range(8)]
    assert [[(s.tile, s.start, s.stop, s.slot) for s in mine] for mine in got] == [
        [], [(0, 0, 1, 1)], [(0, 1, 2, 2)], [(0, 2, 3, 3)], [], [], [], [(1, 0, 1, None)],
    ]  # fmt: skip
    assert [p for p, mine in enumerate(got) if any(s.needs_fixup for s in mine)] == [3]
    assert sk.fixup_parts("split", 0, starts, 8) == [1, 2, 3] and sk.scratch_slots("split", 2, 8) == 8
    assert sk.fixup_parts("split", 1, starts, 8) == [], "one program has the empty tile's unit and writes its zeros"
    assert list(got[7][0].k_blocks(0)) == []


def test_a_program_finishes_one_tile_does_another_and_opens_a_third() -> None:
    starts = sk.unit_starts([3, 0, 4, 4])  # W = 12: program 0 has 0..5, program 1 has 6..11
    (a, b, c), (d, e) = (sk.segments("stream_k", p, starts, 2) for p in range(2))
    assert a == sk.Segment(0, 0, 3, False, False, None) and b == sk.Segment(1, 0, 1, False, False, None)
    assert c == sk.Segment(2, 0, 2, False, True, 1) and d == sk.Segment(2, 2, 4, True, False, 2)
    assert e == sk.Segment(3, 0, 4, False, False, None)
    assert [sk.fixup_parts("stream_k", t, starts, 2) for t in range(4)] == [[], [], [1, 2], []]


@pytest.mark.parametrize(
    ("schedule", "program", "programs", "message"),
    [
        ("stream-k", 0, 2, "one of tile, split, stream_k, got 'stream-k'"),
        ("tile", 0, 3, "3 programs for 2 tiles"),
        ("split", 0, 3, "take a multiple of 2"),
        ("stream_k", 4, 4, "0 to 3, got 4"),
        ("stream_k", 0, 0, "got 2 and 0"),
    ],
)
def test_what_cannot_be_launched_is_refused(schedule: str, program: int, programs: int, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        sk.segments(schedule, program, sk.unit_starts([3, 4]), programs)


# --- the choice ---


def problem(n_q: int, n_kv: int, n_head: int, n_head_kv: int, **other: int) -> Problem:
    decode = n_q == 1
    packed = min(4, n_head // n_head_kv)
    made = {"n_seq": 1, "d_k": 128, "d_v": 128, "has_mask": False, "block_m": 16 if decode else 128, "block_n": 64}
    return Problem(n_q, n_kv, n_head, n_head_kv, **{**made, "packed_heads": packed, **other})  # type: ignore[arg-type]


problems = st.builds(
    lambda n_q, n_kv, kv, gqa, n_seq, d, mask, rows, cols: Problem(
        n_q, n_kv, kv * gqa, kv, n_seq, d, d, mask, rows, cols, min(rows, 1 << (gqa - 1).bit_length())
    ),
    n_q=st.sampled_from([1, 2, 17, 512, 4096]),
    n_kv=st.integers(1, 200_000),
    kv=st.integers(1, 16),
    gqa=st.integers(1, 12),
    n_seq=st.integers(1, 9),
    d=st.sampled_from([40, 64, 128, 576]),
    mask=st.booleans(),
    rows=st.sampled_from([16, 64, 128]),
    cols=st.sampled_from([32, 64, 128]),
)
devices = st.builds(Device, st.integers(1, 160), st.integers(1, 4))


def check(choice: Choice, p: Problem, d: Device) -> None:
    """What holds for every choice, forced or not."""
    assert 0 <= choice.efficiency_percent <= 100 and choice.programs >= 1 and choice.splits >= 1
    assert choice.tiles == p.tiles and choice.occupancy == d.programs_per_sm
    assert choice.waves == p.tiles / (d.sm_count * d.programs_per_sm)
    assert choice.reasons and all(choice.reasons)
    assert choice.summary().startswith(f"{choice.schedule}: {choice.programs} program")
    slot = (p.block_m * p.d_v_stored + 2 * p.block_m) * 4
    assert choice.scratch_bytes == sk.scratch_slots(choice.schedule, choice.tiles, choice.programs) * slot
    if choice.schedule != "stream_k":
        assert choice.programs == choice.tiles * choice.splits
        assert sk.parts_per_tile(choice.schedule, choice.tiles, choice.programs) == choice.splits


@given(problems, devices)
@settings(max_examples=250)
def test_a_choice_fits_its_problem(p: Problem, d: Device) -> None:
    choice = choose(p, d)
    check(choice, p, d)
    assert choice == choose(p, d)
    if choice.schedule == "split":
        assert not p.has_mask and 2 <= choice.splits <= MAX_SPLITS and p.k_blocks // choice.splits >= MIN_BLOCKS
    if choice.schedule == "stream_k":
        assert choice.programs == min(d.at_once, p.tiles * p.k_blocks)
    if not p.has_mask:
        tile = choose(p, d, "tile")
        assert choice.efficiency_percent >= min(GOOD_EFFICIENCY, tile.efficiency_percent), "never worse than no choice"


@given(problems, devices, st.integers(1, 300), st.integers(1, 300))
@settings(max_examples=150)
def test_a_forced_choice_is_honoured(p: Problem, d: Device, programs: int, splits: int) -> None:
    for name in sk.SCHEDULES:
        choice = choose(p, d, name)
        check(choice, p, d)
        assert choice.schedule == name and choice.programs % (1 if name == "stream_k" else p.tiles) == 0
    assert choose(p, d, "split").splits >= 2, "forcing a split tests a fixup"
    for choice in (
        streamed := choose(p, d, "stream_k", programs=programs),
        cut := choose(p, d, "split", splits=splits),
    ):
        check(choice, p, d)
    assert streamed.programs == programs and cut.splits == splits
    assert choose(p, d, "split", programs=p.tiles * splits) == cut


def test_long_decode_gives_a_tile_several_programs() -> None:
    for device in (Device(132), Device(132, 2), Device(132, 4)):
        split = choose(problem(1, 65536, 32, 8), device)
        assert split.schedule == "split" and split.splits > 1 and split.efficiency_percent >= 90
        streamed = choose(problem(1, 65536, 32, 8, has_mask=True), device)
        assert streamed.schedule == "stream_k" and streamed.programs == device.at_once > streamed.tiles
    assert choose(problem(1, 65536, 32, 8), Device(132)).splits == 16  # 128 of 132 programs


def test_large_prefill_has_one_program_a_tile() -> None:
    for mask in (False, True):
        for device in (Device(132), Device(132, 2)):
            choice = choose(problem(4096, 4096, 32, 8, has_mask=mask), device)
            assert choice.schedule == "tile" and choice.programs == choice.tiles == 1024 and choice.scratch_bytes == 0


def test_small_prefill_is_divided() -> None:
    assert choose(problem(512, 16384, 32, 8, has_mask=True), Device(132)).schedule == "stream_k"  # 128 tiles, ragged
    assert choose(problem(512, 16384, 32, 8), Device(132)).schedule == "tile"  # 128 tiles of 132, all equal
    over = choose(problem(640, 16384, 32, 8), Device(132))  # 160 tiles: a second wave of 28
    assert over.schedule == "stream_k" and over.efficiency_percent >= 95
    half = choose(problem(256, 16384, 32, 8), Device(132))  # 64 tiles
    assert half.schedule == "split" and half.splits == 2


def test_tiles_are_counted_by_tokens_head_groups_kv_heads_and_sequences() -> None:
    # 128 rows of 8 heads are 16 tokens: ceil(33 / 16) x ceil(12 / 8) x 3 x 5
    p = Problem(33, 100, 36, 3, 5, 64, 64, False, 128, 64, packed_heads=8)
    assert (p.token_tiles, p.tiles, p.k_blocks) == (3, 3 * 2 * 3 * 5, 2)


def test_a_device_that_is_nearly_full_is_left_alone() -> None:
    # A split or equal shares would come out 5 % ahead and more, on paper.
    for n_head, reason in ((114, "86 % of the device busy"), (132 * 4 + 1, "from 4 waves on")):
        choice = choose(problem(1, 65536, n_head, n_head), Device(132))
        assert choice.schedule == "tile" and reason in choice.reasons[-1]
        other = choose(problem(1, 65536, n_head, n_head), Device(132), "stream_k")
        assert other.efficiency_percent * 0.95 > choice.efficiency_percent
    assert choose(problem(1, 65536, 111, 111), Device(132)).schedule != "tile"  # 84 %


def test_a_second_wave_is_worth_it_if_the_tiles_fill_it() -> None:
    full = problem(1920, 2048, 16, 4, has_mask=True)  # 240 tiles
    assert choose(full, Device(120)).schedule == "tile" and choose(full, Device(121)).schedule == "stream_k"
    assert choose(full, Device(100)).schedule == "stream_k", "2.4 waves take as long as 3"
    assert choose(full, Device(60)).schedule == "tile"


def test_a_batch_of_ragged_sequences_is_not_left_to_its_longest() -> None:
    choice = choose(problem(1, 65536, 32, 8, n_seq=128, has_mask=True), Device(132))
    assert choice.tiles == 1024 and choice.schedule == "stream_k" and "one token tile" in choice.reasons[-1]


def test_short_contexts_and_parts_too_small_to_pay() -> None:
    for mask in (False, True):
        short = choose(problem(1, 3 * 64, 32, 8, has_mask=mask), Device(132))
        assert short.schedule == "tile" and "3 k-blocks" in short.reasons[-1]
    four = choose(problem(1, 4 * 64, 32, 8), Device(132))
    assert four.schedule == "split" and four.splits == 2


def test_where_no_split_divides_well_all_units_are_shared() -> None:
    device = Device(132)
    awkward = problem(1, 28 * 64, 100, 100)  # 100 tiles of 28 k-blocks on 132
    choice = choose(awkward, device)
    split = max(choose(awkward, device, "split", splits=s).efficiency_percent for s in range(1, 15))
    assert choice.schedule == "stream_k" and split < GOOD_EFFICIENCY < choice.efficiency_percent
    assert f"equal shares of all units {choice.efficiency_percent} %" in choice.reasons[-1]
    small = choose(problem(1, 7 * 64, 100, 100), device)  # shares of 5 or 6 k-blocks would not pay for two fixups
    assert small.schedule == "tile" and "no fixup" in small.reasons[-1]


def test_the_best_split_is_the_smallest_that_is_nearly_best() -> None:
    for p, device in ((problem(1, 20_000, 32, 2), Device(132, 2)), (problem(1, 7680, 64, 8), Device(114))):
        got = {s: choose(p, device, "split", splits=s).efficiency_percent for s in range(1, p.k_blocks // 2 + 1)}
        near = [s for s, e in got.items() if s <= MAX_SPLITS and e >= 0.95 * max(got.values())]
        assert best_splits(p, device) == near[0] > 1


def test_a_partial_result_costs_more_with_more_rows() -> None:
    assert problem(1, 64, 32, 8).part_cost == 1 and problem(512, 64, 32, 8).part_cost == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"force": "lean"}, "one of tile, split, stream_k, got 'lean'"),
        ({"programs": 4}, "add force="),
        ({"force": "tile", "programs": 9}, "one program a tile, got 9 programs for 8 tiles"),
        ({"force": "tile", "splits": 2}, 'go with schedule "split"'),
        ({"force": "split", "splits": 3, "programs": 8}, "8 programs are 1 part a tile, got splits=3"),
        ({"force": "split", "programs": 12}, "got 12 programs for 8 tiles; take a multiple of 8"),
        ({"force": "split", "programs": 4}, "take a multiple of 8"),
        ({"force": "split", "splits": 0}, "splits must be at least 1, got 0"),
        ({"force": "stream_k", "programs": -1}, "programs must be at least 1, got -1"),
    ],
)
def test_a_force_that_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        choose(problem(1, 4096, 32, 8), Device(132), **options)  # type: ignore[arg-type]


def test_problems_that_cannot_be_are_refused() -> None:
    for other, message in (
        ({"n_seq": 0}, "n_seq of an attention must be at least 1, got 0"),
        ({"packed_heads": 3}, "must divide block_m, got 3 and 16"),
        ({"d_v_stored": 64}, "at least d_v, got 64 and 128"),
    ):
        with pytest.raises(BackendError, match=message):
            problem(1, 64, 32, 8, **other)
    with pytest.raises(BackendError, match="must divide the heads of q, got 3 and 32"):
        problem(1, 64, 32, 3)
    with pytest.raises(BackendError, match="at least one program"):
        Device(0)
    assert problem(1, 64, 32, 8, d_v=80).d_v_stored == 128 and problem(1, 64, 32, 8, d_v=8).d_v_stored == 16
