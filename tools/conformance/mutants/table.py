"""The planted bugs of FLASH_ATTN_EXT and FLASH_ATTN_LSE, and all of them: MUTANTS.

A row: name, op, what is wrong, the replaced pieces of the kernel (its methods, see mutants_attention.py), and, where
the bug sits in a feature, the nodes that have it. In the replacements `k` is the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile

import numpy as np

from graphrt import float8
from graphrt.backend import Bytes
from graphrt.dtypes import FLOATS8, DType, dtype
from graphrt.ops.flash_attn_ext import PREC_F8
from graphrt.ops.key_panels import ROWS
from graphrt.tensor import Tensor
from graphrt.tools.conformance.mutants import pieces as on
from graphrt.tools.conformance.mutants.attention import HIDDEN, LOG2E, NEG_INF, Attention
from graphrt.tools.conformance.mutants.memory import Floats, Index, Operand
from graphrt.tools.conformance.mutants.pieces import Mutant
from graphrt.tools.conformance.mutants.schedule import Part, Tile
from graphrt.tools.conformance.mutants.table_blocks import BLOCK_BUGS
from graphrt.tools.conformance.mutants.table_experts import EXPERT_MUTANTS
from graphrt.tools.conformance.mutants.table_ops import OP_MUTANTS
from graphrt.tools.conformance.mutants.table_varlen import VARLEN_MUTANTS

FA, LSE = "FLASH_ATTN_EXT", "FLASH_ATTN_LSE"


def _to_f16(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def _contiguous(k: Attention, x: Operand, i1: Index, i2: Index, i3: Index, mine: bool) -> Index:
    """The address of a row as if the tensor lay without gaps in the order of its dimensions."""
    if not mine:
        return Attention.start(k, x, i1, i2, i3)
    ne, row = x.t.ne, x.t.nb[0] * (x.t.ne[0] // x.t.dtype.block_size)
    return np.asarray(x.base + ((i3 * ne[2] + i2) * ne[1] + i1) * row)


def _no_sequence(k: Attention, x: Operand, i1: Index, i2: Index, i3: Index) -> Index:
    return Attention.start(k, x, i1, i2, i3 * 0 if x in (k.k, k.v) else i3)


def _with_k_strides(k: Attention, x: Operand, i1: Index, i2: Index, i3: Index) -> Index:
    nb = k.k.t.nb if x is k.v else x.t.nb
    return np.asarray(x.base + i1 * nb[1] + i2 * nb[2] + i3 * nb[3])


def _one_neighbour(k: Attention, number: int) -> None:
    b, part = k.unfinished[number]
    k.store(k.tile(number), k.merge(part, k.found_part(b - 1)))


def _leave_if_seen(k: Attention, b: int, part: Part) -> None:
    if part.total.any():
        Attention.leave_part(k, b, part)


def _empty_as(total: float) -> on.Pieces:
    def leave(k: Attention, b: int, part: Part) -> None:
        empty = part.total == 0
        top = np.where(empty, np.float32(0), part.top)
        Attention.leave_part(k, b, Part(top, np.where(empty, np.float32(total), part.total), part.acc))

    return {"leave_part": leave}


def _sink_beside_acc(k: Attention, tile: Tile, part: Part) -> Part:
    return Attention.with_sink(k, tile, part)._replace(acc=part.acc)


def _scaled(node: Tensor) -> bool:
    return bool(node["k_scale"] is not None)


def _stores_float8(node: Tensor) -> bool:
    return node.dtype.is_float8


def _may_multiply_in_8_bits(node: Tensor) -> bool:
    return bool(node.params.prec == PREC_F8)


def _to_nan(k: Attention, values: Floats, dt: DType) -> Bytes:
    return float8.encode(np.where(np.abs(values) > FLOATS8[dt.name].largest, np.nan, values), dt)


def _cut_off(k: Attention, values: Floats, dt: DType) -> Bytes:
    """Rounded toward zero: the code before the nearest where that is larger."""
    codes = float8.encode(values, dt)
    return np.where(np.abs(float8.decode(codes, dt)) > np.abs(values), codes - 1, codes).astype(np.uint8)


def _one_unscaled(k: Attention, name: str, heads: Index) -> Floats:
    """The scale of the last head is taken for 1 where it is v_scale's."""
    left_out = (heads == k.n_head - 1)[:, None] & (name == "v_scale")
    return np.where(left_out, np.float32(1), Attention.scales(k, name, heads))


def _panelled(node: Tensor) -> bool:
    return bool(node.params.k_layout != ROWS)


def _moved(**changes: Callable[[Attention, Tile, Index], Index]) -> Callable[..., dict[str, Index]]:
    """Positions, some of them changed."""

    def positions(k: Attention, tile: Tile, cells: Index) -> dict[str, Index]:
        found = Attention.positions(k, tile, cells)
        return found | {name: change(k, tile, found[name]) for name, change in changes.items()}

    return positions


ATTENTION_MUTANTS = [
    # scales of k, v and the result
    Mutant("key_scale_missing", FA, "k_scale is not read",
           {"scales": lambda k, name, heads: Attention.scales(k, name, heads) if name != "k_scale" else np.float32(1)},
           _scaled),
    Mutant("value_scale_missing", FA, "v_scale is not read",
           {"scales": lambda k, name, heads: Attention.scales(k, name, heads) if name != "v_scale" else np.float32(1)},
           _scaled),
    Mutant("scale_of_another_head", FA, "a scale is the query head's modulo their number",
           {"scale_number": lambda k, x, heads: heads % x.t.n_elements}, _scaled),
    Mutant("out_scale_multiplied", FA, "the result is multiplied by out_scale",
           {"scaled_out": lambda k, tile, rows: rows * k.scales("v_scale", tile.heads) * np.float32(k.p.out_scale)},
           _stores_float8),
    Mutant("value_scale_of_one_head_missing", FA, "of the last head v_scale is not read", {"scales": _one_unscaled},
           _scaled),
    Mutant("out_1_percent_large", FA, "a result of 8 bits is 1.01 times what it must be",
           {"scaled_out": lambda k, tile, rows: Attention.scaled_out(k, tile, rows) * np.float32(1.01)},
           _stores_float8),
    Mutant("out_2_percent_small", FA, "a result of 8 bits is 0.98 times what it must be",
           {"scaled_out": lambda k, tile, rows: Attention.scaled_out(k, tile, rows) * np.float32(0.98)},
           _stores_float8),
    Mutant("out_cut_off", FA, "a result is rounded to 8 bits toward zero", {"codes8": _cut_off}, _stores_float8),
    Mutant("products_of_8_bits_1_percent_large", FA, "with prec 8 a result is 1.01 times what it must be",
           {"scaled_out": lambda k, tile, rows: Attention.scaled_out(k, tile, rows) * np.float32(1.01)},
           _may_multiply_in_8_bits),
    Mutant("out_not_saturated", FA, "what is too large for 8 bits becomes NaN", {"codes8": _to_nan}, _stores_float8),
    Mutant("out_in_another_format", FA, "results are stored as e5m2",
           {"codes8": lambda k, values, dt: float8.encode(values, dtype("f8_e5m2"))}, _stores_float8),
    # scale and softcap
    Mutant("scale_missing", FA, "q.k is not scaled", {"scale": lambda k: np.float32(1)}),
    Mutant(
        "scale_of_padded_head", FA, "the scale is taken of the head size padded to a power of two",
        {"scale": lambda k: np.float32(k.p.scale * math.sqrt(k.d_k / (1 << (k.d_k - 1).bit_length())))},
    ),
    Mutant(
        "log2e_missing", FA, "logits in base e go into exp2",
        {"score": lambda k, dot, bias, slopes: k.capped(dot * k.scale()) + slopes * bias},
    ),
    Mutant("softcap_dropped", FA, "softcap is not applied", {"capped": lambda k, s: s}, on.softcap),
    Mutant(
        "softcap_after_mask", FA, "softcap bends the sum of logit and mask",
        {"score": lambda k, dot, bias, slopes: k.capped(dot * k.scale() + slopes * bias) * LOG2E}, on.softcap,
    ),
    Mutant(
        "softcap_in_base_2", FA, "softcap bends logits that are in base 2 already",
        {"score": lambda k, dot, bias, slopes: k.biased(k.capped(dot * k.scale() * LOG2E), bias, slopes)}, on.softcap,
    ),
    Mutant(
        "softcap_before_scale", FA, "softcap is applied before the scale",
        {"score": lambda k, dot, bias, slopes: k.biased(k.capped(dot) * k.scale() * LOG2E, bias, slopes)}, on.softcap,
    ),
    Mutant(
        "softcap_not_multiplied", FA, "tanh(s / softcap) is not multiplied by softcap",
        {"capped": lambda k, s: np.tanh(s / np.float32(k.p.softcap))}, on.softcap,
    ),
    # keys in panels
    Mutant("panel_of_the_next_head", FA, "heads have their panels in turn", {
        "first_panel": lambda k, tile: tile.kv_head}, lambda node: _panelled(node) and node["v"].ne[2] > 1),
    Mutant("panel_lost", FA, "the last panel of a head is not read", {
        "panels": lambda k: max(1, k.d_k // k.k.t.ne[0] - 1)}, _panelled),
    # score functions
    Mutant("score_dropped", FA, "the score function is not applied", {"scored": lambda k, s: s}, on.scored),
    Mutant(
        "score_after_mask", FA, "the score function gets the sum of score and mask",
        {"score": lambda k, dot, bias, slopes: k.scored(k.capped(dot * k.scale()) + slopes * bias) * LOG2E}, on.scored,
    ),
    Mutant(
        "score_in_base_2", FA, "the score function gets logits that are in base 2 already",
        {"score": lambda k, dot, bias, slopes: k.biased(k.scored(k.capped(dot * k.scale()) * LOG2E), bias, slopes)},
        on.scored,
    ),
    Mutant(
        "score_before_scale", FA, "the score function comes before the scale",
        {"score": lambda k, dot, bias, slopes: k.biased(k.scored(dot) * k.scale() * LOG2E, bias, slopes)}, on.scored,
    ),
    Mutant("score_of_kv_head", FA, "it gets the head of k", {"positions": _moved(h=lambda k, t, h: h * 0 + t.kv_head)},
           on.scored),
    Mutant("score_of_first_sequence", FA, "it gets no sequence", {"positions": _moved(b=lambda k, t, b: b * 0)},
           on.scored),
    Mutant("score_query_in_tile", FA, "queries count from the tile's first",
           {"positions": _moved(i=lambda k, t, i: i - i.min())}, on.scored),
    Mutant("score_key_in_block", FA, "keys count from the block's first",
           {"positions": _moved(j=lambda k, t, j: j - j.min())}, on.scored),
    # mask
    Mutant("mask_only_hides", FA, "finite mask values are ignored", {"biased": lambda k, s, b, m: s}, on.masked),
    Mutant(
        "mask_in_base_e", FA, "the mask is added to base-2 logits as it is",
        {"biased": lambda k, s, bias, slopes: s + slopes * bias}, on.masked,
    ),
    Mutant(
        "mask_scaled", FA, "the scale is applied to the mask too",
        {"biased": lambda k, s, bias, slopes: s + slopes * bias * k.scale() * LOG2E}, on.masked,
    ),
    Mutant(
        "mask_first_head", FA, "every head reads the first head's mask", {"mask_head": lambda k, h: h * 0},
        on.mask_heads,
    ),
    Mutant(
        "mask_head_divided", FA, "consecutive heads share a mask instead of every m2-th",
        {"mask_head": lambda k, h: h // (k.n_head // k.mask.t.ne[2])}, on.mask_heads_in_turn,
    ),
    Mutant(
        "mask_first_sequence", FA, "every sequence reads the first one's mask", {"mask_seq": lambda k, s: 0},
        on.mask_seqs,
    ),
    Mutant(
        "mask_sequence_divided", FA, "consecutive sequences share a mask instead of every m3-th",
        {"mask_seq": lambda k, s: s // (k.n_seq // k.mask.t.ne[3])}, on.mask_seqs_in_turn,
    ),
    Mutant(
        "mask_taken_for_causal", FA, "keys past the query's own position are skipped unread",
        {"blocks": lambda k, t, k0, k1: [
            b for b in range(k0, k1) if b * k.block <= t.tokens.max() + max(0, k.n_kv - k.n_q)
        ]}, on.masked_queries,
    ),
    Mutant(
        "hidden_as_minus_1e30", FA, "-inf in the mask is read as -1e30",
        {"load_bias": lambda k, t, b: np.where(
            np.arange(b * k.block, (b + 1) * k.block) < k.n_kv, np.maximum(Attention.load_bias(k, t, b), -1e30), NEG_INF
        ).astype(np.float32)}, on.masked,
    ),
    Mutant(
        "hidden_score_minus_1e30", FA, "hidden keys score -1e30 within a block: a row that sees none averages v",
        {"hide": lambda k, score, seen: np.where(seen, score, np.float32(-1e30))},
    ),
    Mutant(
        "nan_in_hidden_k", FA, "a hidden key's logit is added to -inf, so that NaN stays",
        {"hide": lambda k, score, seen: score + np.where(seen, np.float32(0), NEG_INF)},
    ),
    Mutant(
        "nan_in_hidden_v", FA, "a weight of 0 meets NaN in v (0 * NaN)", {"weigh": lambda k, w, v, seen: w @ v},
    ),
    Mutant(
        "empty_row_nan", FA, "a row that sees no key divides 0 by 0",
        {"divided": lambda k, part: part.acc / part.total},
    ),
    Mutant(
        "empty_block_nan", FA, "the maximum of -inf is subtracted from -inf", {"shift": lambda k, top: top},
    ),
    # blocks of the mask
    Mutant(
        "class_last_column", FA, "a mask block's class overlooks its last column (a window off by one)",
        {"class_window": lambda k, t, bias: bias[t.stored][:, :-1]}, on.masked,
    ),
    Mutant(
        "class_first_column", FA, "a mask block's class overlooks its first column",
        {"class_window": lambda k, t, bias: bias[t.stored][:, 1:]}, on.masked,
    ),
    Mutant(
        "class_first_row", FA, "a mask block's class is that of its first row",
        {"class_window": lambda k, t, bias: bias[t.stored][:1]}, on.masked,
    ),
    Mutant(
        "class_last_row", FA, "a mask block's class is that of its last row",
        {"class_window": lambda k, t, bias: bias[t.stored][-1:]}, on.masked,
    ),
    Mutant(
        "class_finite_is_full", FA, "a mask block without -inf counts as zeros",
        {"is_full": lambda k, bias: bool(np.isfinite(bias).all())}, on.masked,
    ),
    Mutant(
        "class_any_row_hidden", FA, "a mask block is skipped when one of its rows is hidden",
        {"is_hidden": lambda k, bias: bool((bias == NEG_INF).all(axis=1).any())}, on.masked,
    ),
    Mutant(
        "stops_at_hidden_block", FA, "the first hidden block ends the loop (a window's start is hidden)",
        {"blocks": lambda k, t, k0, k1: takewhile(
            lambda b: k.block_class(t, k.load_bias(t, b)) != HIDDEN, range(k0, k1)
        )}, on.masked,
    ),
    # ALiBi
    Mutant("slope_next_head", FA, "a head has the next one's slope",
           {"slopes": lambda k, heads: Attention.slopes(k, heads + 1)}, on.alibi),
    Mutant("slope_in_group", FA, "the slope goes by the head's place in its group",
           {"slopes": lambda k, heads: Attention.slopes(k, heads % k.gqa)}, on.alibi),
    Mutant("slope_of_kv_head", FA, "the slope goes by the KV head",
           {"slopes": lambda k, heads: Attention.slopes(k, heads // k.gqa)}, on.alibi),
    Mutant("slope_one_series", FA, "one series of slopes for any number of heads, not only a power of two",
           {"slope_heads": lambda k: 1 << (k.n_head - 1).bit_length()}, on.alibi_odd),
    Mutant("slope_of_n_heads", FA, "the series is taken of the number of heads, no power of two",
           {"slope_heads": lambda k: k.n_head}, on.alibi_odd),
    # sinks
    Mutant("sink_missing", FA, "sinks are not added", {"with_sink": lambda k, t, part: part}, on.sinks),
    Mutant("sink_twice", FA, "the fixup adds the sink once more",
           {"at_fixup": lambda k, t, part: k.with_sink(t, part)}, on.sinks),
    Mutant("sink_in_every_split", FA, "every part adds the sink", {"adds_sink": lambda k, k0, k1: True}, on.sinks),
    Mutant("sink_only_in_whole_tiles", FA, "a tile of several parts gets no sink",
           {"adds_sink": lambda k, k0, k1: k0 == 0 and k1 == k.iter_k}, on.sinks),
    Mutant("sink_scaled", FA, "the sink is scaled as q.k is",
           {"sink_logits": lambda k, h: Attention.sink_logits(k, h) * k.scale()}, on.sinks),
    Mutant("sink_in_base_e", FA, "the sink joins base-2 logits as it is",
           {"sink_logits": lambda k, h: Attention.sink_logits(k, h) / LOG2E}, on.sinks),
    Mutant("sink_of_kv_head", FA, "the sink goes by the KV head",
           {"sink_logits": lambda k, h: Attention.sink_logits(k, h // k.gqa)}, on.sinks),
    Mutant("sink_without_rescale", FA, "the numerator keeps its old maximum when the sink joins",
           {"with_sink": _sink_beside_acc}, on.sinks),
    # heads, rows, columns
    Mutant("gqa_modulo", FA, "query head h reads KV head h mod n_head_kv instead of h div gqa",
           {"q_head": lambda k, kv_head, c: c * k.n_head_kv + kv_head}, on.grouped),
    Mutant("gqa_padded_group", FA, "groups start at multiples of gqa rounded up to a power of two",
           {"q_head": lambda k, kv_head, c: (kv_head * (1 << (k.gqa - 1).bit_length()) + c) % k.n_head}, on.grouped),
    Mutant("gqa_one_tile", FA, "the tile index leaves out the group's further tiles",
           {"in_group": lambda k, z, c: c}, on.grouped),
    Mutant("last_head_lost", FA, "the last head is not written",
           {"written": lambda k, t: t.stored & (t.heads < k.n_head - 1)}),
    Mutant("last_row_lost", FA, "the last query is not written",
           {"written": lambda k, t: t.stored & (t.tokens < k.n_q - 1)}),
    Mutant("last_column_lost", FA, "the last value of each row is not written", {"out_width": lambda k: k.d_v - 1}),
    Mutant("last_key_lost", FA, "the last key is not seen", {"kv_end": lambda k: k.n_kv - 1}),
    Mutant("k_tail_unmasked", FA, "cells past n_kv in the last block count as keys of logit 0",
           {"kv_end": lambda k: k.iter_k * k.block}, on.ragged),
    Mutant("v_tail_unmasked", FA, "v past n_kv is read and meets its weight of 0",
           {"loaded": lambda k, x, cells: (cells < k.n_kv) | (x is k.v),
            "values_used": lambda k, seen, b: seen | (np.arange(b * k.block, (b + 1) * k.block) >= k.n_kv)},
           on.ragged),
    Mutant("output_not_permuted", FA, "the result is written [D_v, n_q, n_head]",
           {"out_start": lambda k, t: np.asarray(
               k.out.base + ((t.seq * k.n_head + t.heads) * k.n_q + t.tokens) * k.d_v * 4)}),
    Mutant("head_padded_with_garbage", FA, "the padding of a head to a power of two holds what lies behind it",
           {"inside": lambda k, cols, d: cols >= 0}),
    # strides
    Mutant("k_taken_for_contiguous", FA, "k's strides are taken from its shape",
           {"start": lambda k, x, i1, i2, i3: _contiguous(k, x, i1, i2, i3, x is k.k)}),
    Mutant("v_taken_for_contiguous", FA, "v's strides are taken from its shape",
           {"start": lambda k, x, i1, i2, i3: _contiguous(k, x, i1, i2, i3, x is k.v)}),
    Mutant("q_taken_for_contiguous", FA, "q's strides are taken from its shape",
           {"start": lambda k, x, i1, i2, i3: _contiguous(k, x, i1, i2, i3, x is k.q)}),
    Mutant("mask_taken_for_contiguous", FA, "the mask's strides are taken from its shape",
           {"start": lambda k, x, i1, i2, i3: _contiguous(k, x, i1, i2, i3, x is k.mask)}, on.mask_gapped),
    Mutant("v_with_k_strides", FA, "v is read with k's strides", {"start": _with_k_strides}),
    Mutant("kv_of_first_sequence", FA, "k and v are read from the first sequence", {"start": _no_sequence},
           on.sequences),
    Mutant("int32_element", FA, "the number of an element overflows 32 bits",
           {"element": lambda k, address, size: (address // size).astype(np.int32)},
           on.long_buffer),
    Mutant("int32_byte", FA, "a byte address overflows 32 bits",
           {"element": lambda k, address, size: address.astype(np.int32) // size}, on.long_buffer),
    # online softmax, splits, fixup
    Mutant("online_without_rescale", FA, "sums are not rescaled when the maximum grows",
           {"alpha": lambda k, old, shift: np.ones_like(old)}),
    Mutant("maximum_starts_at_0", FA, "the running maximum starts at 0: logits far below it vanish",
           {"first_top": lambda k: np.float32(0)}),
    Mutant("merge_without_rescale", FA, "parts are added whatever their maxima",
           {"merge": lambda k, a, b: Part(np.maximum(a.top, b.top), a.total + b.total, a.acc + b.acc)}),
    Mutant("empty_split_max_0", FA, "a part without keys reports maximum 0", _empty_as(0.0)),
    Mutant("empty_split_sum_1", FA, "a part without keys reports maximum 0 and sum 1", _empty_as(1.0)),
    Mutant("stale_fixup", FA, "a part without keys is not written, the fixup reads what lay there",
           {"leave_part": _leave_if_seen}),
    Mutant("fixup_of_one_neighbour", FA, "the fixup joins two parts of a tile, never three", {"fixup": _one_neighbour}),
    Mutant("f16_accumulator", FA, "the numerator is kept in f16", {"kept": lambda k, acc: _to_f16(acc)}),
    Mutant("f16_logits", FA, "q.k is rounded to f16", {"dot": lambda k, q, keys: _to_f16(q @ keys.T)}),
    # the log of the denominators
    Mutant("lse_without_sink", LSE, "the sink is left out", {"with_sink": lambda k, t, part: part}, on.sinks),
    Mutant("lse_in_base_2", LSE, "the logarithm stays in base 2",
           {"lse": lambda k, part: part.top + np.log2(part.total)}),
    Mutant("lse_of_empty_row", LSE, "a row that sees no key gives a finite number",
           {"lse": lambda k, part: (k.shift(part.top) + np.log2(part.total + 1e-30)) * math.log(2)}),
]  # fmt: skip

ATTENTION_MUTANTS += [Mutant(f"{name}_kv", FA, f"{what}, in k and v", pieces, on.types(*kinds))
                      for name, what, kinds, pieces in BLOCK_BUGS]  # fmt: skip

_SHOWS_ON = {
    on.hides: ("hidden_as_minus_1e30", "hidden_score_minus_1e30", "empty_row_nan", "empty_block_nan", "stale_fixup",
               "stops_at_hidden_block", "empty_split_max_0", "empty_split_sum_1"),
    on.has_blocks: ("class_last_column", "class_first_column", "class_first_row", "class_last_row",
                    "class_any_row_hidden"),
    on.unfinite: ("nan_in_hidden_k", "nan_in_hidden_v"),
}  # fmt: skip
_SHOWS = {name: condition for condition, names in _SHOWS_ON.items() for name in names}

MUTANTS: dict[str, Mutant] = {
    m.name: replace(m, shows_on=_SHOWS.get(m.name, on.any_inputs))
    for m in (*ATTENTION_MUTANTS, *OP_MUTANTS, *EXPERT_MUTANTS, *VARLEN_MUTANTS)
}
