"""PENALIZE: a copy where it isn't in place, with what masks forbid, and the few logits that biases and penalties
change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import triton
import triton.language as tl

from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.ops.sample_each import FREQUENCY, LAST_N, MASKED, N_BIASES, N_SETTINGS, PRESENCE, REPEAT
from graphrt.tensor import Tensor

COLUMN = tl.constexpr(N_SETTINGS)
I_REPEAT, I_FREQUENCY, I_PRESENCE = (tl.constexpr(i) for i in (REPEAT, FREQUENCY, PRESENCE))
I_LAST_N, I_N_BIASES, I_MASKED = (tl.constexpr(i) for i in (LAST_N, N_BIASES, MASKED))
#: Logits that a program copies; biases that it adds at a time; tokens that it counts, and those it compares them with.
_COPIED, _BIASES, _MINE, _OTHERS = 2048, 128, 32, 64
#: Sources that are read whole.
_TABLES = ("slots", "settings", "biased", "biases", "past", "n_past")


@accesses(reads="p_a p_slots p_settings p_mask", writes="p_out")
@triton.jit
def masked_rows(
    p_a, p_slots, p_settings, p_mask, p_out, n, words, sa, so,
    COPY: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, i) copies SIZE logits of a row, those without a bit in its slot's mask as -inf. a, out: rows of n
    at strides sa and so; mask: int32 [slots, words]. Without COPY out is a, and a row without a mask stays."""
    take_turn(PDL)
    row = tl.program_id(0)
    slot = tl.load(p_slots + row).to(tl.int64)
    i = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    p_row = p_out + row.to(tl.int64) * so
    if COPY:
        tl.store(p_row + i, tl.load(p_a + row.to(tl.int64) * sa + i, mask=i < n), mask=i < n)
        tl.debug_barrier()
    if tl.load(p_settings + slot * COLUMN + I_MASKED) != 0:
        bits = tl.load(p_mask + slot * words + i // 32, mask=i < n, other=0)
        tl.store(p_row + i, float("-inf"), mask=(i < n) & (((bits >> (i % 32)) & 1) == 0))


@accesses(reads="p_out p_slots p_settings p_biased p_biases p_past p_n_past", writes="p_out")
@triton.jit
def change_some(
    p_out, p_slots, p_settings, p_biased, p_biases, p_past, p_n_past, n, so, most_biases, size,
    BIASES: tl.constexpr, MINE: tl.constexpr, OTHERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row) adds its slot's biases, and takes penalties off the tokens of its text. out: rows of n logits at
    stride so; biased: int32 [slots, most_biases], biases: f64, as many; past: int32 [slots, size]; n_past: int32
    [rows]."""
    take_turn(PDL)
    row = tl.program_id(0)
    slot = tl.load(p_slots + row).to(tl.int64)
    p_row, p_settings = p_out + row.to(tl.int64) * so, p_settings + slot * COLUMN
    n_biases = tl.minimum(tl.load(p_settings + I_N_BIASES).to(tl.int32), most_biases)
    for base in range(0, n_biases, BIASES):
        b = base + tl.arange(0, BIASES)
        i = tl.load(p_biased + slot * most_biases + b, mask=b < n_biases, other=-1)
        value = tl.load(p_biases + slot * most_biases + b, mask=b < n_biases, other=0.0)
        known = (i >= 0) & (i < n)
        x = (tl.load(p_row + i, mask=known, other=0.0).to(tl.float64) + value).to(tl.float32)
        tl.store(p_row + i, tl.where(value == float("-inf"), float("-inf"), x), mask=known)
    tl.debug_barrier()
    length = tl.load(p_n_past + row)
    last_n = tl.minimum(tl.minimum(tl.load(p_settings + I_LAST_N).to(tl.int32), size), length)
    repeat = tl.load(p_settings + I_REPEAT).to(tl.float32)
    frequency, presence = (
        tl.load(p_settings + I_FREQUENCY).to(tl.float32),
        tl.load(p_settings + I_PRESENCE).to(tl.float32),
    )
    if (repeat == 1.0) & (frequency == 0.0) & (presence == 0.0):
        last_n = 0
    first = length - last_n
    for base in range(0, last_n, MINE):
        at = base + tl.arange(0, MINE)
        mine = tl.load(p_past + slot * size + (first + at) % size, mask=at < last_n, other=-1)
        count, earlier = tl.zeros([MINE], tl.int32), tl.zeros([MINE], tl.int32)
        for start in range(0, last_n, OTHERS):
            by = start + tl.arange(0, OTHERS)
            other = tl.load(p_past + slot * size + (first + by) % size, mask=by < last_n, other=-1)
            same = (other[None, :] == mine[:, None]) & (by < last_n)[None, :]
            count += tl.sum(same.to(tl.int32), 1)
            earlier += tl.sum((same & (by[None, :] < at[:, None])).to(tl.int32), 1)
        changed = (at < last_n) & (earlier == 0) & (mine >= 0) & (mine < n)
        x = tl.load(p_row + mine, mask=changed, other=0.0)
        x = tl.where(x <= 0, x * repeat, tl.div_rn(x, tl.broadcast_to(repeat, [MINE])))
        tl.store(p_row + mine, x - (count.to(tl.float32) * frequency + presence), mask=changed)


def lower_penalize(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """PENALIZE."""
    node, sources = nodes[0], nodes[0].sources_by_name()
    a, out = ctx.view(sources["logits"]), ctx.view(node)
    data = {name: ctx.view(sources[name]).data for name in _TABLES}
    named, pdl = {f"p_{name}": tensor for name, tensor in data.items()}, {"PDL": ctx.target.has_pdl}
    n, m = a.ne[:2]
    there = a.data.data_ptr() == out.data.data_ptr()
    mask = {
        "p_a": a.data, "p_slots": data["slots"], "p_settings": data["settings"],
        "p_mask": ctx.view(sources["allowed"]).data, "p_out": out.data, "n": n, "words": sources["allowed"].ne[0],
        "sa": a.strides[1], "so": out.strides[1], "COPY": not there, "SIZE": _COPIED, **pdl,
    }  # fmt: skip
    change = {
        "p_out": out.data, **named, "n": n, "so": out.strides[1], "most_biases": sources["biased"].ne[0],
        "size": sources["past"].ne[0], "BIASES": _BIASES, "MINE": _MINE, "OTHERS": _OTHERS, **pdl,
    }  # fmt: skip
    exact = {**launch_options(ctx.target, 4), "enable_fp_fusion": False}
    return [
        Launch(masked_rows, (m, -(-n // _COPIED)), mask, launch_options(ctx.target, 4)),
        Launch(change_some, (m,), change, exact),
    ]


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {"PENALIZE": lower_penalize}
