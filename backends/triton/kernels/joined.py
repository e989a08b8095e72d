# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: no-check-untyped-defs, disable-error-code=annotation-unchecked
"""The sum over ranks in one launch with what follows it: the residual, the norm of that, and its rounding for products.

GPUs of one host write to each other's memory (graphrt/peers.py). A word of 64 bits holds an f32 and the number of a
row's round, so whoever waits for a value asks for the word until it has the number of its own round: nobody waits for
more than what it needs, and there is no fence. Rounds are counted in memory by the kernel itself, so that a CUDA graph
can be replayed.

Slots of odd and of even rounds are others. That is enough: a rank writes those of round n + 2 after it has been given
what others had to say in round n + 1, which they said after they were done with round n.

Many rows travel another way, as plain f32 with a flag behind each: joined_flags.py.

One shot: each rank writes its row to all others, and adds up all. Two shots: the rows' owners, in turn, add up what
they are given, and write the sum to all others. Both add rank 0's and 1's first, then 2's, so that all ranks have the
bits of played ranks.

A row is one program's, or several programs': each writes its part of the row to all ranks, waits for all parts of all
ranks, and has the whole sum and its norm, of which it stores its part. So what leaves a GPU leaves through several
multiprocessors, and nothing is handed on between them. The sum may take the residual's place, which the programs beside
it read too: each writes to others only after it has read, so whoever has all words may store. A program waits only for
programs that have been given what they wait for, or write it first. All programs of a launch must be on the GPU
together, since those of another rank may run in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.device import Target, interpreting
from graphrt.backends.triton.kernels.common.pdl import gdc_launch_dependents, gdc_wait
from graphrt.backends.triton.kernels.joined_flags import joined_by_flags
from graphrt.backends.triton.kernels.products.activations import (
    MAX_ADD_NORM,
    NormWeight,
    Q8Rows,
    add_norm_row,
    form_of,
    norm_weight,
    outputs_of,
    uses_ptx,
)
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.peers import LONGEST, ROWS, SPLITS, Peers
from graphrt.ranks import ONE_SHOT

#: Elements of a part of a row that has a program of its own. At least so many: each program reads all parts.
PART = 512
#: Programs of a launch whose rows have several: of more (16 rows by 8) reading whole rows costs more than it saves.
MOST_PROGRAMS = 32
#: Bytes of a tensor from which its rows travel as plain f32 with a flag behind each. They were faster than words in all
#: shapes that were timed (BENCHMARKS.md), of which the smallest had half as many bytes.
FLAGGED = 1 << 18
#: A round's number is below this, so that it is a positive int32.
MOST_ROUNDS = tl.constexpr(2147483646)


@triton.jit
def fours(x):
    """[groups, 32] as four of [groups, 8], of elements that lie side by side: what a thread writes together."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 8, 2, 2)))  # elements 0 and 2, 1 and 3
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def whole(a, b, c, d):
    """What fours() has taken apart."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 32))


@triton.jit
def write_words(p, x, number, m, PTX: tl.constexpr):
    """Stores fours() of f32 as the low halves of words whose high half is the round's number, int32: each whole, where
    another GPU asks for it. p, m: [groups, 8], where the first of four goes, and whether they do."""
    a, b, c, d = x
    a, b = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
    c, d = c.to(tl.int32, bitcast=True), d.to(tl.int32, bitcast=True)
    high = tl.full(a.shape, 0, tl.int32) + number
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred there; .reg .b64 a, b, c, d; setp.ne.b32 there, $7, 0; mov.b64 a, {$2, $6}; "
            "mov.b64 b, {$3, $6}; mov.b64 c, {$4, $6}; mov.b64 d, {$5, $6}; "
            "@there st.relaxed.sys.global.v2.b64 [$1], {a, b}; "
            "@there st.relaxed.sys.global.v2.b64 [$1 + 16], {c, d}; mov.b32 $0, 0; }",
            "=r,l,r,r,r,r,r,r", [p, a, b, c, d, high, m.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(p, (a.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32), mask=m)
        tl.store(p + 1, (b.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32), mask=m)
        tl.store(p + 2, (c.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32), mask=m)
        tl.store(p + 3, (d.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32), mask=m)


@triton.jit
def _halves(word):
    """The low half of int64 as f32, and the high one."""
    return (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32)


@triton.jit
def asked(p, number, m, PTX: tl.constexpr):
    """fours() of f32 that another rank writes, as they are now, and an int32 [groups, 8] that is not 0 where some are
    not of this round. p, m: as write_words() has them."""
    high = tl.full(m.shape, 0, tl.int32) + number
    if PTX:
        a, b, c, d, late = tl.inline_asm_elementwise(
            "{ .reg .pred there; .reg .b64 a, b, c, d; .reg .b32 i, j, k, l; setp.ne.b32 there, $6, 0; "
            "mov.b64 a, {$7, $7}; mov.b64 b, a; mov.b64 c, a; mov.b64 d, a; "
            "@there ld.relaxed.sys.global.v2.b64 {a, b}, [$5]; "
            "@there ld.relaxed.sys.global.v2.b64 {c, d}, [$5 + 16]; "
            "mov.b64 {$0, i}, a; mov.b64 {$1, j}, b; mov.b64 {$2, k}, c; mov.b64 {$3, l}, d; "
            "xor.b32 i, i, $7; xor.b32 j, j, $7; xor.b32 k, k, $7; xor.b32 l, l, $7; "
            "or.b32 i, i, j; or.b32 k, k, l; or.b32 $4, i, k; }",
            "=&r,=&r,=&r,=&r,=&r,l,r,r", [p, m.to(tl.int32), high],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        a, i = _halves(tl.load(p, mask=m, other=0, volatile=True))
        b, j = _halves(tl.load(p + 1, mask=m, other=0, volatile=True))
        c, k = _halves(tl.load(p + 2, mask=m, other=0, volatile=True))
        d, l = _halves(tl.load(p + 3, mask=m, other=0, volatile=True))
        late = (m & ((i != high) | (j != high) | (k != high) | (l != high))).to(tl.int32)
    return a, b, c, d, late


@triton.jit
def _place(number, row, source, RANKS: tl.constexpr, ROWS: tl.constexpr, LONGEST: tl.constexpr):
    """Where, in any rank's slots, the words lie that the rank `source` writes of a row."""
    return (((number & 1) * ROWS + row) * RANKS + source).to(tl.int64) * LONGEST


@triton.jit
def _tell(p_table, peer, place, x, number, m, PTX: tl.constexpr):
    """Writes a row to a rank. place: of each element, i64."""
    p_there = tl.load(p_table + peer).to(tl.pointer_type(tl.int64))
    write_words(p_there + place, x, number, m, PTX)


@triton.jit
def _tell_all(
    x, p_table, rank, row, number, i, m, RANKS: tl.constexpr, ROWS: tl.constexpr, LONGEST: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Writes a row to all ranks, this one too, so that it reads all alike."""
    for peer in range(RANKS):
        _tell(p_table, peer, _place(number, row, rank, RANKS, ROWS, LONGEST) + i, x, number, m, PTX)


@triton.jit
def _is_late(late):
    return tl.max((late != 0).to(tl.int32)) != 0


@triton.jit
def _arrived(p, number, m, PTX: tl.constexpr):
    """fours() of f32 that one rank writes, once all are of this round."""
    a, b, c, d, late = asked(p, number, m, PTX)
    while _is_late(late):
        a, b, c, d, late = asked(p, number, m, PTX)
    return a, b, c, d


@triton.jit
def _all_asked(
    p_slots, row, number, i, m, RANKS: tl.constexpr, ROWS: tl.constexpr, LONGEST: tl.constexpr, PTX: tl.constexpr
):
    """fours() of the sum of what all ranks have written of a row, as it is now, and where it is late."""
    a, b, c, d, late = asked(p_slots + _place(number, row, 0, RANKS, ROWS, LONGEST) + i, number, m, PTX)
    for source in tl.static_range(1, RANKS):
        p = p_slots + _place(number, row, source, RANKS, ROWS, LONGEST) + i
        a1, b1, c1, d1, late1 = asked(p, number, m, PTX)
        a, b, c, d, late = a + a1, b + b1, c + c1, d + d1, late | late1
    return a, b, c, d, late


@triton.jit
def _added_up(
    p_slots, row, number, i, m, RANKS: tl.constexpr, ROWS: tl.constexpr, LONGEST: tl.constexpr, PTX: tl.constexpr
):
    """fours() of the sum of all ranks' row, once all have written it here: up to four ranks are asked at once."""
    if RANKS <= 4:
        a, b, c, d, late = _all_asked(p_slots, row, number, i, m, RANKS, ROWS, LONGEST, PTX)
        while _is_late(late):
            a, b, c, d, late = _all_asked(p_slots, row, number, i, m, RANKS, ROWS, LONGEST, PTX)
    else:
        a, b, c, d = _arrived(p_slots + _place(number, row, 0, RANKS, ROWS, LONGEST) + i, number, m, PTX)
        for source in range(1, RANKS):
            p = p_slots + _place(number, row, source, RANKS, ROWS, LONGEST) + i
            a1, b1, c1, d1 = _arrived(p, number, m, PTX)
            a, b, c, d = a + a1, b + b1, c + c1, d + d1
    return a, b, c, d


@triton.jit
def _after(number, values, PTX: tl.constexpr):
    """The number, once all f32 `values` have been read: words that carry it leave no earlier."""
    found = tl.max(tl.reshape(values, [values.numel]).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    if PTX:  # which no compiler can tell to be nothing
        found = tl.inline_asm_elementwise("and.b32 $0, $1, 0x80000000;", "=r,r", [found], tl.int32, False, 1)
    return number + tl.where(found == -1, 1, 0)


@triton.jit
def _joined(
    x, own, p_slots, p_table, rank, row, number, k, BY_OWNER: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    LONGEST: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' row, f32 [groups, 32] of k elements. own: bool [groups, 1], which of them this program
    writes; BY_OWNER: one rank has all parts and writes the sum to all; else every rank has."""
    i = tl.arange(0, x.shape[0])[:, None] * 32 + tl.arange(0, 8)[None, :] * 4
    m = i < k
    mine = fours(x)
    if not BY_OWNER:
        _tell_all(mine, p_table, rank, row, number, i, m & own, RANKS, ROWS, LONGEST, PTX)
        a, b, c, d = _added_up(p_slots, row, number, i, m, RANKS, ROWS, LONGEST, PTX)
    else:
        owner = row % RANKS
        _tell(p_table, owner, _place(number, row, rank, RANKS, ROWS, LONGEST) + i, mine, number, m, PTX)
        a, b, c, d = mine
        if owner == rank:
            a, b, c, d = _added_up(p_slots, row, number, i, m, RANKS, ROWS, LONGEST, PTX)
            _tell_all((a, b, c, d), p_table, rank, row, number, i, m, RANKS, ROWS, LONGEST, PTX)
        else:
            a, b, c, d = _arrived(p_slots + _place(number, row, owner, RANKS, ROWS, LONGEST) + i, number, m, PTX)
    return whole(a, b, c, d)


@accesses(
    reads="p_x p_slots p_table p_rounds p_w p_residual p_w2", writes="p_slots p_rounds p_sum p_out p_q p_d p_s",
    early_if={"EARLY": "p_w p_w2"}, elsewhere=True,
)  # fmt: skip
@triton.jit(do_not_specialize=["rank"])
def join_rows(
    p_x, p_slots, p_table, p_rounds, rank, p_w, eps, p_residual, p_sum, p_w2, eps2, p_out, p_q, p_d, p_s, k,
    HOW: tl.constexpr, FLAGGED: tl.constexpr, SPLIT: tl.constexpr, MOST: tl.constexpr, RANKS: tl.constexpr,
    ROWS: tl.constexpr, LONGEST: tl.constexpr, TO: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
    BLOCK: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, part): sum = x of rank 0 + x of rank 1 + ..., after norm() * w if there is a w, + residual if there
    is one; norm(sum) * w2 stored as TO says, if there is a w2.

    HOW: "parts": x is f32 [RANKS, n, k], all ranks'; "one shot", "two shots": x is this rank's, f32 [n, k], and the
    others' come as the module says: p_slots, p_table, p_rounds as Peers has them, ROWS, LONGEST of theirs, MOST is its
    SPLITS; FLAGGED: as plain f32 with a flag. SPLIT: parts of a row, a power of two up to MOST, 1 of "parts", of two
    shots and of what is flagged. residual, sum: f32 [n, k] without gaps; sum's memory may be x's or residual's. w, w2:
    f32 [k], read before what other kernels wrote if EARLY. out: norm(sum) * w2 in f32, or None. TO, PARTS: as
    store_row(). A block is a row.
    """
    program = tl.program_id(0)
    row = program.to(tl.int64)
    i = tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    m = i < k
    at = row * k + i
    part = tl.program_id(1)
    group = tl.arange(0, BLOCK // 32)
    own = (group // (BLOCK // 32 // SPLIT) == part)[:, None]
    if EARLY:
        w, w2 = norm_weight(p_w, i, m), norm_weight(p_w2, i, m)
    if PDL:
        gdc_wait()
    x = tl.load(p_x + at, mask=m & own, other=0.0)
    residual = 0.0
    if p_residual is not None and SPLIT > 1:
        residual = tl.load(p_residual + at, mask=m, other=0.0)
    if HOW == "parts":
        every = tl.num_programs(0).to(tl.int64) * k
        for source in tl.static_range(1, RANKS):
            x += tl.load(p_x + source * every + at, mask=m, other=0.0)
    else:
        last = tl.load(p_rounds + program * MOST + part)
        number = tl.where(last >= MOST_ROUNDS, 1, last + 1)
        told = number
        if p_residual is not None and SPLIT > 1:
            told = _after(number, residual, PTX)
        by_owner: tl.constexpr = HOW == "two shots"
        if FLAGGED:
            x = joined_by_flags(
                x, p_slots, p_table, rank, program, told, i, m, by_owner, RANKS, ROWS, LONGEST, PTX
            )  # fmt: skip
        else:
            x = _joined(x, own, p_slots, p_table, rank, program, told, k, by_owner, RANKS, ROWS, LONGEST, PTX)
        # All of a row's counts go on, in whatever number of parts the next launch has it.
        tl.store(p_rounds + program * MOST + part + tl.arange(0, MOST // SPLIT) * SPLIT, number)
    if p_residual is not None and SPLIT == 1:
        residual = tl.load(p_residual + at, mask=m, other=0.0)
    if PDL:
        gdc_launch_dependents()
    if not EARLY:
        w, w2 = norm_weight(p_w, i, m), norm_weight(p_w2, i, m)
    add_norm_row(
        x, p_w, w, eps, p_residual, residual, p_sum, p_w2, w2, eps2, p_out, p_q, p_d, p_s, row, i, m & own, k, TO, PARTS
    )  # fmt: skip


def shots(ranks: int, nbytes: int) -> int:
    """In how many steps ranks join so many bytes. Two ranks have the same bytes on their link either way."""
    return 1 if ranks == 2 or nbytes <= ONE_SHOT else 2


def split_of(target: Target, n: int, k: int) -> int:
    """Into how many parts n rows of k elements go, each a program's: as many as are worth it and on the GPU at once, of
    at least PART elements."""
    if interpreting():
        return 1  # which runs one program after the other
    most = min(SPLITS, -(-k // PART), min(MOST_PROGRAMS, target.sm_count) // n)
    return 1 << max(0, most.bit_length() - 1)


def join_launch(
    target: Target, x: torch.Tensor, ranks: int, peers: Peers | None, total: torch.Tensor,
    residual: torch.Tensor | None = None, norm: NormWeight | None = None, second: NormWeight | None = None,
    out: Q8Rows | torch.Tensor | None = None, early: bool = False, ordered: bool = False,
    out_f32: torch.Tensor | None = None, split: int = 0, flagged: bool | None = None,
) -> Launch:  # fmt: skip
    """total = the sum over ranks, after `norm` if there is one, and with residual if there is one; and out, `second` of
    total, rounded.

    x: this rank's part, f32 [n, k], where ranks share `peers`; else all ranks', [ranks, n, k]. total, residual: f32
    [n, k] without gaps, n up to ROWS and k to LONGEST; total may be x or residual. out, early, ordered, out_f32: as
    add_norm_quantize() has them. split: parts of a row that are told by themselves, 0 to choose.
    flagged: rows are told as plain f32 with a flag, None to choose.
    """
    n, k = total.shape
    assert k <= min(LONGEST, MAX_ADD_NORM) and n <= ROWS and (peers is None or n <= target.sm_count)
    block = max(32, 1 << (k - 1).bit_length())
    how = "parts" if peers is None else "one shot" if shots(ranks, 4 * n * k) == 1 else "two shots"
    split = split or split_of(target, n, k)
    flagged = how != "parts" and (4 * n * k >= FLAGGED if flagged is None else flagged)
    split = 1 if how != "one shot" or flagged else split
    args = {
        "p_x": x, "p_slots": peers and peers.slots, "p_table": peers and peers.table,
        "p_rounds": peers and peers.rounds, "rank": 0 if peers is None else peers.rank, "p_w": norm and norm.row,
        "eps": norm.eps if norm else 0.0, "p_residual": residual, "p_sum": total, "p_w2": second and second.row,
        "eps2": second.eps if second else 0.0, "p_out": out_f32, **outputs_of(out), "k": k, "HOW": how,
        "FLAGGED": flagged, "SPLIT": split, "MOST": SPLITS, "RANKS": ranks, "ROWS": ROWS, "LONGEST": LONGEST,
        "TO": form_of(out, ordered), "EARLY": early, "BLOCK": block, "PTX": uses_ptx(target), "PDL": target.has_pdl,
    }  # fmt: skip
    return Launch(join_rows, (n, split), args, launch_options(target, min(16, max(1, block // 256))))
