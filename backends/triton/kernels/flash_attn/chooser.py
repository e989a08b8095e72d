"""Which schedule an attention gets, and why.

Pure arithmetic on static shapes. With a mask, how many k-blocks a tile really has is known in device memory only, and
changes from one replay of a graph to the next; so the choice assumes nothing about it but the upper bound.

    tile      the tiles alone fill the device: no scratch, no fixup
    split     too few tiles, all of one length (no mask, or one that all share): S equal parts each
    stream_k  too few tiles of unknown lengths, or no S divides well: equal shares of all units, whatever the mask hides

The estimate of the time, in k-blocks: waves of programs times what the longest program does, its k-blocks and the cost
of its partial results. Efficiency is the share of that time in which the programs that fit on the device at once visit
k-blocks, if none is hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.backends.triton.kernels.flash_attn.stream_k import Schedule, check_schedule, parts_per_tile, scratch_slots
from graphrt.errors import BackendError

#: From this efficiency on (percent) a simpler schedule is good enough. FA3 has 80 to 85 for the same question.
GOOD_EFFICIENCY = 85
#: From this many waves on the last, partial one is a small part of the whole.
MANY_WAVES = 4
#: With unknown lengths two waves at least: launched longest first, the second's short tiles fill the first's gaps.
MASKED_WAVES = 2
#: The fewest k-blocks of a part. The cost of partial results prefers larger ones where they fill the device too.
MIN_BLOCKS = 2
MAX_SPLITS = 128
#: The simpler of two ways is taken if it reaches this share (percent) of the better one's efficiency: a smaller S, with
#: fewer parts to write and merge; a split instead of stream_k.
NEAR_BEST = 95


@dataclass(frozen=True)
class Problem:
    """The static shape of one attention and the tiling of its kernel. Counts, all at least 1.

    n_q, n_kv: queries and keys of a sequence (with a mask the most that can be visible). packed_heads: query heads of
    one KV head that share a tile, block_m // packed_heads tokens each; it may exceed n_head // n_head_kv, whose missing
    rows are then padding. block_m, block_n: rows and keys of a block. d_v_stored: columns of a partial result, d_v's
    next power of two (at least 16) unless given. ragged: not even the number of tiles is known, what is here bounds it.

    Raises BackendError for a shape that can't be.
    """

    n_q: int
    n_kv: int
    n_head: int
    n_head_kv: int
    n_seq: int
    d_k: int
    d_v: int
    has_mask: bool
    block_m: int
    block_n: int
    packed_heads: int = 1
    d_v_stored: int = 0
    ragged: bool = False

    def __post_init__(self) -> None:
        if self.d_v_stored == 0:
            object.__setattr__(self, "d_v_stored", max(16, 1 << (self.d_v - 1).bit_length()))
        for name, value in vars(self).items():
            if name not in ("has_mask", "ragged") and value < 1:
                raise BackendError(f"{name} of an attention must be at least 1, got {value}")
        if self.n_head % self.n_head_kv:
            raise BackendError(f"the heads of k must divide the heads of q, got {self.n_head_kv} and {self.n_head}")
        if self.block_m % self.packed_heads:
            raise BackendError(f"packed_heads must divide block_m, got {self.packed_heads} and {self.block_m}")
        if self.d_v_stored < self.d_v:
            raise BackendError(f"d_v_stored must be at least d_v, got {self.d_v_stored} and {self.d_v}")

    @property
    def token_tiles(self) -> int:
        """Tiles along the queries of one head group."""
        return _ceil_div(self.n_q, self.block_m // self.packed_heads)

    @property
    def tiles(self) -> int:
        """Tiles in all: token tiles x head groups of a KV head x KV heads x sequences."""
        groups = _ceil_div(self.n_head // self.n_head_kv, self.packed_heads)
        return self.token_tiles * groups * self.n_head_kv * self.n_seq

    @property
    def k_blocks(self) -> int:
        """k-blocks of every tile without a mask, the most of any with one."""
        return _ceil_div(self.n_kv, self.block_n)

    @property
    def slot_bytes(self) -> int:
        """Scratch of one partial result, f32: block_m x d_v_stored numerators, block_m row maxima, block_m row sums."""
        return (self.block_m * self.d_v_stored + 2 * self.block_m) * 4

    @property
    def part_cost(self) -> int:
        """What writing and reading back a partial result takes, in k-blocks: the ratio of their bytes, k and v in f16.

        1 for the few rows of decode; 5 for 128 rows and d_v 128 with k-blocks of 64.
        """
        return _ceil_div(2 * self.slot_bytes, 2 * self.block_n * (self.d_k + self.d_v))


@dataclass(frozen=True)
class Device:
    """sm_count: multiprocessors. programs_per_sm: programs of this kernel that one holds at a time (occupancy)."""

    sm_count: int
    programs_per_sm: int = 1

    def __post_init__(self) -> None:
        if self.sm_count < 1 or self.programs_per_sm < 1:
            raise BackendError(f"a device runs at least one program at a time, got {self}")

    @property
    def at_once(self) -> int:
        """Programs that run at the same time."""
        return self.sm_count * self.programs_per_sm


@dataclass(frozen=True)
class Choice:
    """A schedule and its figures.

    splits: S of "split", 1 otherwise. waves: tiles / programs at once. efficiency_percent: 0 to 100, what was reckoned
    with, for no k-block hidden and merging counted; what a mask leaves busy is TilePlan.busy_percent. occupancy:
    programs a multiprocessor. scratch_bytes: all slots. reasons: short sentences.
    """

    schedule: Schedule
    programs: int
    splits: int
    tiles: int
    waves: float
    efficiency_percent: int
    occupancy: int
    scratch_bytes: int
    reasons: tuple[str, ...]

    def summary(self) -> str:
        """One line for `graphrt explain`; the reasons are the lines below it."""
        parts = f" in {self.splits} parts each" if self.schedule == "split" else ""
        return (
            f"{self.schedule}: {_count(self.programs, 'program')} for {_count(self.tiles, 'tile')}{parts}, "
            f"{self.waves:.2f} waves, {self.occupancy} an SM, "
            f"scratch {self.scratch_bytes / 1e6:.1f} MB"
        )


def choose(
    problem: Problem,
    device: Device,
    force: str | None = None,
    *,
    programs: int | None = None,
    splits: int | None = None,
) -> Choice:
    """The schedule of an attention on a device; the same for the same arguments.

    force: take this schedule; programs (stream_k: any number from 1; the others: what they have anyway) and splits
    (split: any number from 1) then replace the numbers that would be chosen.

    Raises BackendError for an unknown schedule, and for programs or splits that the schedule can't have.
    """
    if force is not None:
        return _forced(problem, device, check_schedule(force), programs, splits)
    if programs is not None or splits is not None:
        raise BackendError("programs and splits go with a forced schedule, got none; add force=")
    tiles, blocks, at_once = problem.tiles, problem.k_blocks, device.at_once
    efficiency = _split_efficiency(problem, device, 1)
    waves = f"{_count(tiles, 'tile')}, {_count(at_once, 'program')} at once: {tiles / at_once:.2f} waves"
    reasons = [waves]
    if blocks < 2 * MIN_BLOCKS:
        reasons.append(f"{_count(blocks, 'k-block')} a tile at most: too few to share a tile")
        return _choice(problem, device, "tile", tiles, 1, reasons)
    if problem.ragged:
        reasons.append("tiles and their lengths are known on the device only: equal shares of all units there are")
        return _choice(problem, device, "stream_k", _stream_k_programs(problem, device), 1, reasons)
    if problem.has_mask:
        return _masked(problem, device, efficiency, reasons)
    if efficiency >= GOOD_EFFICIENCY:
        reasons.append(
            f"it keeps {efficiency} % of the device busy, {GOOD_EFFICIENCY} are enough: no scratch, no fixup"
        )
        return _choice(problem, device, "tile", tiles, 1, reasons)
    if tiles >= MANY_WAVES * at_once:
        reasons.append(f"from {MANY_WAVES} waves on little is lost in the last one: no scratch, no fixup")
        return _choice(problem, device, "tile", tiles, 1, reasons)
    reasons.append(f"all tiles are of one length, {blocks} k-blocks at most")
    best = best_splits(problem, device)
    reached = _split_efficiency(problem, device, best)
    streamed = _stream_k_efficiency(problem, device, _stream_k_programs(problem, device))
    if reached * 100 < streamed * NEAR_BEST and tiles * blocks >= MIN_BLOCKS * at_once:
        split = f"with merging counted, the best split ({_count(best, 'part')} a tile) keeps {reached} % busy"
        reasons.append(f"{split}, equal shares of all units {streamed} %")
        return _choice(problem, device, "stream_k", _stream_k_programs(problem, device), 1, reasons)
    if best == 1:
        reasons.append(f"no split is more than {100 - NEAR_BEST} % better: no fixup")
        return _choice(problem, device, "tile", tiles, 1, reasons)
    part = _ceil_div(blocks, best)
    reasons.append(
        f"{best} parts of {_count(part, 'k-block')} or less: the fewest within {100 - NEAR_BEST} % of the best"
    )
    return _choice(problem, device, "split", tiles * best, best, reasons)


def best_splits(problem: Problem, device: Device) -> int:
    """The smallest S within NEAR_BEST of the best efficiency, for parts of MIN_BLOCKS or more; 1 is "tile"."""
    most = min(MAX_SPLITS, max(1, problem.k_blocks // MIN_BLOCKS))
    reached = [_split_efficiency(problem, device, s) for s in range(1, most + 1)]
    return next(s for s, e in enumerate(reached, 1) if e * 100 >= max(reached) * NEAR_BEST)


def _masked(problem: Problem, device: Device, efficiency: int, reasons: list[str]) -> Choice:
    tiles, at_once = problem.tiles, device.at_once
    several = problem.token_tiles > 1
    reasons.append("a mask: lengths are known on the device only")
    if several and tiles >= MANY_WAVES * at_once:
        reasons.append(f"{MANY_WAVES} waves or more of prefill: longest tile first, no fixup")
        return _choice(problem, device, "tile", tiles, 1, reasons)
    # Neither equal lengths (efficiency) nor a causal ramp (longest first, from two waves on) leaves much idle.
    if several and tiles >= MASKED_WAVES * at_once and efficiency >= GOOD_EFFICIENCY:
        reasons.append(f"{MASKED_WAVES} full waves or more of prefill: longest tile first, no fixup")
        return _choice(problem, device, "tile", tiles, 1, reasons)
    if several:
        reasons.append(f"under {MANY_WAVES} waves of prefill: equal shares of all units, whatever the mask hides")
    else:
        # One tile a sequence and head group: nothing tells the long ones from the short, and one may be all the work.
        reasons.append("one token tile a sequence: equal shares of all units, whatever the mask hides")
    return _choice(problem, device, "stream_k", _stream_k_programs(problem, device), 1, reasons)


def _forced(problem: Problem, device: Device, schedule: Schedule, programs: int | None, splits: int | None) -> Choice:
    tiles = problem.tiles
    for name, value in (("programs", programs), ("splits", splits)):
        if value is not None and value < 1:
            raise BackendError(f"{name} must be at least 1, got {value}")
    if schedule != "split" and splits not in (None, 1):
        raise BackendError(f'splits go with schedule "split", got {splits} for {schedule!r}')
    if schedule == "stream_k":
        programs = programs or _stream_k_programs(problem, device)
    elif schedule == "tile":
        programs = programs or tiles
    elif programs is None:
        # Two parts at least, so that forcing a split tests a fixup.
        programs = tiles * (splits or max(2, best_splits(problem, device)))
    parts = parts_per_tile(schedule, tiles, programs)
    if splits not in (None, parts):
        raise BackendError(
            f"{programs} programs are {_count(parts, 'part')} a tile, got splits={splits}; give only one"
        )
    return _choice(problem, device, schedule, programs, parts, [f"forced: {_count(programs, 'program')}"])


def _choice(
    problem: Problem, device: Device, schedule: Schedule, programs: int, splits: int, reasons: list[str]
) -> Choice:
    if schedule == "stream_k":
        efficiency = _stream_k_efficiency(problem, device, programs)
    else:
        efficiency = _split_efficiency(problem, device, splits)
    return Choice(
        schedule=schedule,
        programs=programs,
        splits=splits,
        tiles=problem.tiles,
        waves=problem.tiles / device.at_once,
        efficiency_percent=efficiency,
        occupancy=device.programs_per_sm,
        scratch_bytes=scratch_slots(schedule, problem.tiles, programs) * problem.slot_bytes,
        reasons=tuple(reasons),
    )


def _stream_k_programs(problem: Problem, device: Device) -> int:
    """As many as run at once: more would be a second wave of equal shares."""
    return min(device.at_once, problem.tiles * problem.k_blocks)


def _split_efficiency(problem: Problem, device: Device, splits: int) -> int:
    """Percent; splits = 1 is "tile"."""
    partial_results = 1 if splits > 1 else 0
    return _efficiency(problem, device, problem.tiles * splits, _ceil_div(problem.k_blocks, splits), partial_results)


def _stream_k_efficiency(problem: Problem, device: Device, programs: int) -> int:
    """Percent. A program has two partial results at most; fewer if its share begins or ends with a tile."""
    tiles = problem.tiles
    partial_results = 0 if tiles % programs == 0 else 1 if programs % tiles == 0 else 2
    longest = _ceil_div(tiles * problem.k_blocks, programs)
    return _efficiency(problem, device, programs, longest, partial_results)


def _efficiency(problem: Problem, device: Device, programs: int, longest: int, partial_results: int) -> int:
    waves = _ceil_div(programs, device.at_once)
    time = waves * (longest + partial_results * problem.part_cost)
    return 100 * problem.tiles * problem.k_blocks // (device.at_once * time)


def _ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
