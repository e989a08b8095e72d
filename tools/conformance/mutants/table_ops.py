"""The planted bugs of MUL_MAT, ROPE, RMS_NORM, SET_ROWS and SOFT_MAX, in the form of mutants_table.py."""

from __future__ import annotations

import numpy as np

from graphrt.backend import Bytes
from graphrt.dtypes import DType
from graphrt.tensor import Tensor
from graphrt.tools.conformance.mutants import pieces as on
from graphrt.tools.conformance.mutants.kernels import BLOCK, MulMat, Rope, SetRows, SoftMax
from graphrt.tools.conformance.mutants.memory import Floats, Index, Kernel, Operand
from graphrt.tools.conformance.mutants.pieces import Mutant
from graphrt.tools.conformance.mutants.table_blocks import BLOCK_BUGS


def _to_f16(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def _rows_close(name: str) -> on.Pieces:
    """A source, or the result for "out", read as if it had no gaps."""

    def start(k: Kernel, x: Operand, i1: Index, i2: Index, i3: Index) -> Index:
        if x is not (k.out if name == "out" else k.sources[name]):
            return Kernel.start(k, x, i1, i2, i3)
        ne, row = x.t.ne, x.t.nb[0] * (x.t.ne[0] // x.t.dtype.block_size)
        return np.asarray(x.base + ((i3 * ne[2] + i2) * ne[1] + i1) * row)

    return {"start": start}


def _spoiled(span: slice, *kinds: str) -> on.Pieces:
    """unpack() with some bytes of the blocks zeroed."""

    def unpack(k: Kernel, dt: DType, raw: Bytes) -> Floats:
        spoiled = raw.copy()
        if dt.name in kinds:
            spoiled[..., span] = 0
        return Kernel.unpack(k, dt, spoiled)

    return {"unpack": unpack}


def _ids_as_i32(k: SetRows, x: Operand, at: Index) -> Index:
    words = x.memory[: x.memory.size // 4 * 4].view(np.int32)
    return np.asarray(np.take(words, (x.base + (at - x.base) // 2) // 4, mode="clip"), np.int64)


def _toward_zero(k: SetRows, values: Floats, dt: DType) -> Bytes:
    if dt.name == "bf16":
        return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)
    half = values.astype(np.float16)
    away = np.abs(half.astype(np.float32)) > np.abs(values)
    return np.ascontiguousarray(np.where(away, np.nextafter(half, np.float16(0)), half)).view(np.uint8)


def _q8_floor(k: SetRows, values: Floats, dt: DType) -> Bytes:
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    d = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    codes = np.trunc(blocks / np.where(d == 0, 1, d)).astype(np.int8).view(np.uint8)
    raw = np.concatenate((np.ascontiguousarray(d.astype(np.float16)).view(np.uint8), codes), axis=-1)
    return np.ascontiguousarray(raw.reshape(*values.shape[:-1], -1))


def _tail_turned(k: Rope, values: Floats, cos: Floats, sin: Floats) -> Floats:
    return np.asarray(values * cos[..., :1])


def _yarn(node: Tensor) -> bool:
    return bool(node.params.ext_factor)


def _neox(node: Tensor) -> bool:
    return bool(node.params.mode == "neox")


MM, ROPE, RMS, SET, SOFT = "MUL_MAT", "ROPE", "RMS_NORM", "SET_ROWS", "SOFT_MAX"

OP_MUTANTS = [
    *(Mutant(f"{name}_matmul", MM, what, pieces, on.types(*kinds)) for name, what, kinds, pieces in BLOCK_BUGS),
    Mutant("k_min_ignored_matmul", MM, "the minima of q4_K and q5_K are ignored",
           _spoiled(slice(2, 4), "q4_K", "q5_K"), on.types("q4_K", "q5_K")),
    Mutant("k_last_scale_matmul", MM, "the last 6-bit scale of q4_K and q5_K is lost",
           _spoiled(slice(15, 16), "q4_K", "q5_K"), on.types("q4_K", "q5_K")),
    Mutant("q6_high_bits_matmul", MM, "the upper bits of q6_K are lost",
           _spoiled(slice(128, 192), "q6_K"), on.types("q6_K")),
    Mutant("k_tail_dropped", MM, "K's last block is dropped when it is not full",
           {"k_end": lambda k, n, width: n // width * width}),
    Mutant("batch_modulo", MM, "matrix i of b takes matrix i mod n of a instead of i div r",
           {"batch": lambda k, i, n_b, n_a: i % n_a}),
    Mutant("batch_first", MM, "every matrix of b takes the first of a", {"batch": lambda k, i, n_b, n_a: 0}),
    Mutant("weights_taken_for_contiguous", MM, "the weights' strides are taken from their shape",
           _rows_close("weights")),
    Mutant("activations_taken_for_contiguous", MM, "the activations' strides are taken from their shape",
           _rows_close("x")),
    Mutant("last_weight_row_lost", MM, "the last row of the weights is lost", {"rows": lambda k, m: np.arange(m - 1)}),
    Mutant("f16_accumulator_matmul", MM, "sums are kept in f16", {"kept": lambda k, acc: _to_f16(acc)}),
    Mutant("weights_of_bf16_as_f16", MM, "bf16 weights are read as f16",
           {"read": lambda k, x, starts, n: np.take(
               x.memory[: x.memory.size // 2 * 2].view(np.float16), starts[..., None] // 2 + np.arange(n), mode="clip"
           ).astype(np.float32) if x.t.dtype.name == "bf16" else MulMat.read(k, x, starts, n)}, on.types("bf16")),
    Mutant("pairs_swapped", ROPE, "normal pairs as neox and neox as normal",
           {"pairs": lambda k: (slice(0, k.p.n_dims, 2), slice(1, k.p.n_dims, 2)) if k.p.mode == "neox" else
            (slice(0, k.p.n_dims // 2), slice(k.p.n_dims // 2, k.p.n_dims))}),
    Mutant("pairs_over_whole_head", ROPE, "neox pairs i with i + head_dim/2 instead of n_dims/2",
           {"pairs": lambda k: (slice(0, k.p.n_dims // 2), slice(k.out.t.ne[0] // 2,
                                                                 k.out.t.ne[0] // 2 + k.p.n_dims // 2))}, _neox),
    Mutant("turned_back", ROPE, "the sine has the wrong sign",
           {"turn": lambda k, x, y, cos, sin: (x * cos + y * sin, y * cos - x * sin)}),
    Mutant("position_plus_1", ROPE, "positions count from 1", {"position": lambda k, token: token + 1}),
    Mutant("position_is_index", ROPE, "a token's index serves as its position",
           {"position": lambda k, token: np.arange(token.size)}),
    Mutant("factors_ignored", ROPE, "frequency factors are ignored", {"factors": lambda k, n: np.ones(n)}),
    Mutant("factors_multiplied", ROPE, "frequency factors multiply", {"factors": lambda k, n: 1 / Rope.factors(k, n)}),
    Mutant("tail_turned", ROPE, "dimensions past n_dims are turned too", {"tail": _tail_turned}),
    Mutant("exponent_of_head_dim", ROPE, "frequencies go by the head size instead of n_dims",
           {"exponent": lambda k, i: -2.0 * i / k.out.t.ne[0]}),
    Mutant("ramp_inverted", ROPE, "YaRN's ramp is inverted", {"ramp": lambda k: k.p.ext_factor - Rope.ramp(k)}, _yarn),
    Mutant("ramp_by_dimension", ROPE, "YaRN's ramp runs over dimensions instead of pairs",
           {"ramp": lambda k: np.interp(2.0 * np.arange(k.p.n_dims // 2), np.arange(k.p.n_dims // 2), Rope.ramp(k))},
           _yarn),
    Mutant("magnitude_missing", ROPE, "attn_factor and YaRN's magnitude are left out", {"magnitude": lambda k: 1.0}),
    Mutant("yarn_magnitude_missing", ROPE, "YaRN's own magnitude is left out",
           {"magnitude": lambda k: k.p.attn_factor}, _yarn),
    Mutant("f32_angle", ROPE, "the angle is computed in float32",
           {"angle": lambda k, t, theta: (t[:, None].astype(np.float32) * theta.astype(np.float32)).astype(float)}),
    Mutant("rope_taken_for_contiguous", ROPE, "the source's strides are taken from its shape", _rows_close("a")),
    Mutant("eps_outside", RMS, "eps is added after the root",
           {"factor": lambda k, e, n: 1 / (np.sqrt(e / np.float32(n)) + np.float32(k.p.eps))}),
    Mutant("eps_ignored", RMS, "eps is not added", {"factor": lambda k, e, n: 1 / np.sqrt(e / np.float32(n))}),
    Mutant("mean_of_abs", RMS, "the mean of |x| instead of the root mean square",
           {"energy": lambda k, x: np.abs(x), "factor": lambda k, e, n: 1 / (e / np.float32(n))}),
    Mutant("sum_for_mean", RMS, "the sum of squares instead of their mean",
           {"factor": lambda k, e, n: 1 / np.sqrt(e + np.float32(k.p.eps))}),
    Mutant("mean_by_padded_row", RMS, "the mean is taken over the row padded to whole blocks",
           {"factor": lambda k, e, n: 1 / np.sqrt(e / np.float32(-(-n // 32) * 32) + np.float32(k.p.eps))}),
    Mutant("norm_tail_lost", RMS, "columns past the last full block do not count",
           {"blocks": lambda k, n: range(0, max(n // BLOCK, 1) * BLOCK, BLOCK)}),
    Mutant("f16_energy", RMS, "squares are taken in f16", {"energy": lambda k, x: _to_f16(x * x)}),
    Mutant("norm_taken_for_contiguous", RMS, "the source's strides are taken from its shape", _rows_close("a")),
    Mutant("index_as_i32", SET, "i64 indices are read as i32", {"read_ints": _ids_as_i32}, on.types("i64")),
    Mutant("next_row", SET, "rows go one further", {"index": lambda k, ids: ids + 1}),
    Mutant("index_first_batch", SET, "every batch uses the first batch of indices",
           {"id_batch": lambda k, i, n: i * 0}),
    Mutant("index_batch_clamped", SET, "batches past the indices' use their last batch instead of going round",
           {"id_batch": lambda k, i, n: np.minimum(i, n - 1)}),
    Mutant("last_source_row_lost", SET, "the last row is not copied",
           {"done": lambda k, i1: i1 < k.sources["rows"].t.ne[1] - 1}),
    Mutant("last_bytes_lost", SET, "the last element or block of a row is not copied",
           {"row_bytes": lambda k: SetRows.row_bytes(k) - k.out.t.nb[0]}),
    Mutant("truncated_floats", SET, "f16 and bf16 are rounded toward zero", {"encode": _toward_zero},
           lambda node: node.dtype.name in ("f16", "bf16")),
    Mutant("truncated_codes", SET, "q8_0's codes are rounded toward zero", {"encode": _q8_floor},
           lambda node: node.dtype.name == "q8_0"),
    Mutant("rows_taken_for_contiguous", SET, "the rows' strides are taken from their shape", _rows_close("rows")),
    Mutant("target_taken_for_contiguous", SET, "the target's strides are taken from its shape", _rows_close("out")),
    Mutant("soft_max_scale_missing", SOFT, "the scale is left out", {"scale": lambda k: np.float32(1)}),
    Mutant("soft_max_mask_first_head", SOFT, "every head reads the first head's mask",
           {"mask_head": lambda k, h, mask: h * 0}),
    Mutant("soft_max_mask_head_divided", SOFT, "consecutive heads share a mask",
           {"mask_head": lambda k, h, mask: h // (k.out.t.ne[2] // mask.ne[2])}),
    Mutant("soft_max_slope_next_head", SOFT, "a head has the next one's slope",
           {"slopes": lambda k, h, n: SoftMax.slopes(k, h + 1, n)}),
    Mutant("soft_max_slope_one_series", SOFT, "one series of slopes for any number of heads",
           {"slopes": lambda k, h, n: SoftMax.slopes(k, h, 1 << (n - 1).bit_length())}),
    Mutant("soft_max_sink_missing", SOFT, "the sink is left out", {"sink": lambda k, sink: sink * 0 - np.inf}),
    Mutant("soft_max_last_column", SOFT, "the last column is left out of the sum",
           {"summed": lambda k, w: w[..., :-1] if w.shape[-1] > 1 else w}),
    Mutant("soft_max_not_shifted", SOFT, "the maximum is not subtracted: large logits overflow",
           {"top": lambda k, s: np.zeros((*s.shape[:-1], 1), np.float32)}),
    Mutant("soft_max_empty_row_nan", SOFT, "a row of -inf divides 0 by 0", {"empty": lambda k, n: np.float32(np.nan)}),
    Mutant("soft_max_empty_row_mean", SOFT, "a row of -inf gives 1/n", {"empty": lambda k, n: np.float32(1 / n)}),
    Mutant("soft_max_mask_contiguous", SOFT, "the mask's rows are taken to be as many as the queries",
           {"start": lambda k, x, i1, i2, i3: Kernel.start(k, x, i1, i2, i3) if x is not k.sources.get("mask") else
            np.asarray(x.base + ((i3 * x.t.ne[2] + i2) * k.out.t.ne[1] + i1) * x.t.nb[1])}),
]  # fmt: skip
