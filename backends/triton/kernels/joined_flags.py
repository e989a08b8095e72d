# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""How ranks tell each other many rows: as plain f32, and behind each row a flag, for which its reader waits.

As words that have a round's number beside each value (joined.py) a row is twice its bytes, and stores of 16 bytes that
lie apart use a link badly: 64 rows of 8,192 elements took 51 us on two H200, 82 GB/s. Here a program writes its row as
wide as it can, all its threads wait for each other, and one of them stores the row's flag, the number of its round,
behind a fence for the whole system; so whoever reads that number has the row. Buffers of odd and even rounds do for
these, too: a rank hands out round n + 2 after it has been handed round n + 1, which came after round n had been read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _plain(p_slots, number, row, source, RANKS: tl.constexpr, ROWS: tl.constexpr, LONGEST: tl.constexpr):
    """Where, in a rank's slots, the f32 lie that the rank `source` writes of a row, and the flag behind them, i32."""
    rows = 2 * ROWS * RANKS
    place = ((number & 1) * ROWS + row) * RANKS + source
    p_rows = p_slots.to(tl.pointer_type(tl.float32)) + 2 * rows * LONGEST
    return p_rows + place.to(tl.int64) * LONGEST, (p_rows + rows * LONGEST + place).to(tl.pointer_type(tl.int32))


@triton.jit
def _raise_flag(p, number, PTX: tl.constexpr):
    """Stores a flag, once what all threads of the program have stored before can be seen by other GPUs."""
    tl.debug_barrier()
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
            "@first fence.acq_rel.sys; @first st.relaxed.sys.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r", [p, number], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(p, number)


@triton.jit
def _wait_for_flag(p, number, PTX: tl.constexpr):
    """Waits until a flag has that number: what was stored before it is there to be read."""
    if PTX:  # each thread for itself
        tl.inline_asm_elementwise(
            "{ .reg .pred late; .reg .b32 now; ask: ld.acquire.sys.global.b32 now, [$1]; "
            "setp.ne.b32 late, now, $2; @late bra ask; mov.b32 $0, 0; }",
            "=r,l,r", [p, number], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        while tl.load(p, volatile=True) != number:
            pass


@triton.jit
def _hand(
    x, p_there, rank, row, number, i, m, RANKS: tl.constexpr, ROWS: tl.constexpr, LONGEST: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Writes a row, f32 [groups, 32], into the slots at p_there, an address of any rank's."""
    p_row, p_flag = _plain(p_there.to(tl.pointer_type(tl.int64)), number, row, rank, RANKS, ROWS, LONGEST)
    tl.store(p_row + i, x, mask=m)
    _raise_flag(p_flag, number, PTX)


@triton.jit
def _taken(
    p_slots, source, row, number, i, m, RANKS: tl.constexpr, ROWS: tl.constexpr, LONGEST: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The row that a rank has handed to this one, once it is there."""
    p_row, p_flag = _plain(p_slots, number, row, source, RANKS, ROWS, LONGEST)
    _wait_for_flag(p_flag, number, PTX)
    return tl.load(p_row + i, mask=m, other=0.0, volatile=True)


@triton.jit
def _all_taken(
    x, p_slots, rank, row, number, i, m, RANKS: tl.constexpr, ROWS: tl.constexpr, LONGEST: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' row, in the order of ranks, of which this one has x."""
    total = x
    for source in range(RANKS):
        part = x
        if source != rank:
            part = _taken(p_slots, source, row, number, i, m, RANKS, ROWS, LONGEST, PTX)
        if source == 0:
            total = part
        else:
            total += part
    return total


@triton.jit
def joined_by_flags(
    x, p_slots, p_table, rank, row, number, i, m, BY_OWNER: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    LONGEST: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' row, as joined.py's _joined() has it. x: f32 [groups, 32]; i, m: of each element."""
    if BY_OWNER and row % RANKS != rank:
        owner = row % RANKS
        _hand(x, tl.load(p_table + owner), rank, row, number, i, m, RANKS, ROWS, LONGEST, PTX)
        total = _taken(p_slots, owner, row, number, i, m, RANKS, ROWS, LONGEST, PTX)
    else:
        if not BY_OWNER:
            for peer in range(RANKS):
                if peer != rank:
                    _hand(x, tl.load(p_table + peer), rank, row, number, i, m, RANKS, ROWS, LONGEST, PTX)
        total = _all_taken(x, p_slots, rank, row, number, i, m, RANKS, ROWS, LONGEST, PTX)
        if BY_OWNER:
            for peer in range(RANKS):
                if peer != rank:
                    _hand(total, tl.load(p_table + peer), rank, row, number, i, m, RANKS, ROWS, LONGEST, PTX)
    return total
