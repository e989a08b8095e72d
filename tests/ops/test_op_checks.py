"""What the builders refuse, and the work (FLOPs, bytes) that they state: hand-computed for one example of each op."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.judging import Judged
from support.reference64 import REFERENCE64

from graphrt import Tensor, new_input, ops
from graphrt.errors import GraphError
from graphrt.op import build, op_spec, registered_ops
from graphrt.ops.copy import ConcatParams
from graphrt.ops.rope import RopeParams, yarn_ramp
from graphrt.ops.soft_max import alibi_slopes
from graphrt.testing import all_cases


def t(dt: str, *ne: int, name: str = "t") -> Tensor:
    return new_input(dt, *ne, name=name)


def f32(*ne: int) -> Tensor:
    return t("f32", *ne)


YARN = RopeParams(4, n_ctx_orig=16, ext_factor=1.0)


def _attn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **rest: object) -> Tensor:
    return ops.flash_attn_ext(q, k, v, mask, 1.0, **rest)  # type: ignore[arg-type]


def _varlen(**given: object) -> Tensor:
    """Two sequences of three tokens over five pages of 16, but for what is given."""
    sources: dict[str, object] = {
        "q": f32(8, 3, 4), "k": f32(8, 16, 2, 5), "v": f32(8, 16, 2, 5), "q_starts": t("i32", 3),
        "lengths": t("i32", 2), "block_table": t("i32", 7, 2), **given,
    }  # fmt: skip
    return ops.flash_attn_varlen(scale=1.0, **sources)  # type: ignore[arg-type]


PLAIN = ops.FlashAttnParams(1.0)
PACKED = ops.FlashAttnVarlenParams(1.0)


def _each(**given: object) -> Tensor:
    """Two rows of four logits by a table of three, but for what is given."""
    sources: dict[str, object] = {
        "logits": f32(4, 2), "uniforms": t("f64", 2, 2), "slots": t("i32", 2), "settings": t("f64", 16, 3), **given,
    }  # fmt: skip
    return ops.sample_each(**sources)  # type: ignore[arg-type]


def _penalize(**given: object) -> Tensor:
    """Two rows of 40 logits by tables of three, but for what is given."""
    sources: dict[str, object] = {
        "logits": f32(40, 2), "slots": t("i32", 2), "settings": t("f64", 16, 3), "biased": t("i32", 4, 3),
        "biases": t("f64", 4, 3), "past": t("i32", 8, 3), "n_past": t("i32", 2), "allowed": t("i32", 2, 3), **given,
    }  # fmt: skip
    return ops.penalize(**sources)  # type: ignore[arg-type]


def _back(of: str = "q", params: ops.FlashAttnParams = PLAIN, **given: object) -> Tensor:
    """The gradient of an attention of 3 queries, 7 keys, 4 heads over 2, but for what is given."""
    sources: dict[str, object] = {
        "q": f32(16, 3, 4), "k": t("f16", 16, 7, 2), "v": t("f16", 8, 7, 2), "out": f32(8, 4, 3),
        "d_out": f32(8, 4, 3), "lse": f32(4, 3), **given,
    }  # fmt: skip
    return ops.flash_attn_back(of, params=params, **sources)  # type: ignore[arg-type]


def _varlen_back(of: str = "q", **given: object) -> Tensor:
    sources: dict[str, object] = {
        "q": f32(16, 3, 4), "k": f32(16, 7, 2), "v": f32(8, 7, 2), "out": f32(8, 4, 3), "d_out": f32(8, 4, 3),
        "lse": f32(4, 3), "q_starts": t("i32", 3), "k_starts": t("i32", 3), **given,
    }  # fmt: skip
    return ops.flash_attn_varlen_back(of, params=PACKED, **sources)  # type: ignore[arg-type]


#: (op, what is built, what the message must hold)
REFUSED: list[tuple[str, Callable[[], object], tuple[str, ...]]] = [
    ("ADD", lambda: ops.add(f32(4, 3), f32(3)), ("must divide", "f32[4, 3]", "f32[3]")),
    ("REPEAT_BACK", lambda: ops.repeat_back(f32(6, 4), 4, 4), ("[4, 4, 1, 1] must divide", "f32[6, 4]")),
    ("REPEAT_BACK", lambda: ops.repeat_back(t("f16", 6), 3), ("gradient must be f32", "f16[6]")),
    ("GET_ROWS_BACK", lambda: ops.get_rows_back(f32(4, 3), t("i64", 3), 5), ("indices must be i32", "i64[3]")),
    ("GET_ROWS_BACK", lambda: ops.get_rows_back(f32(4, 3), t("i32", 2), 5), ("must match dimensions 1 to 3", "i32[2]")),
    ("GET_ROWS_BACK", lambda: ops.get_rows_back(f32(4, 3), t("i32", 3), 0), ("n_rows must be at least 1, got 0",)),
    ("SET_ROWS_BACK", lambda: ops.set_rows_back(f32(4, 3), f32(3)), ("indices must be i64 or i32", "f32[3]")),
    ("SET_ROWS_BACK", lambda: ops.set_rows_back(f32(4, 3, 2), t("i64", 3, 4)), ("must divide dimensions 2 and 3",)),
    (
        "VIEW_BACK",
        lambda: ops.view_back(f32(3, 3), f32(8, 5), ops.view(f32(8, 5), (4, 3), (32,)).params),
        ("must have the view's shape [4, 3, 1, 1]", "f32[3, 3]"),
    ),
    (
        "VIEW_BACK",
        lambda: ops.view_back(f32(4, 3), f32(8, 2), ops.view(f32(8, 5), (4, 3), (32,)).params),
        ("the view must end inside its source",),
    ),
    ("SILU_BACK", lambda: ops.silu_back(f32(4), f32(5)), ("one shape", "f32[4]", "f32[5]")),
    ("UNARY_BACK", lambda: ops.unary_back(f32(4), f32(4), "silu"), ("the gradient of silu is SILU_BACK",)),
    ("UNARY_BACK", lambda: ops.unary_back(t("f16", 4), f32(4), "gelu"), ("gradient must be f32", "f16[4]")),
    ("RMS_NORM_BACK", lambda: ops.rms_norm_back(f32(4), t("f16", 4), 0.0), ("source must be f32", "f16[4]")),
    ("RMS_NORM_BACK", lambda: ops.rms_norm_back(f32(4), f32(4), -1.0), ("eps must not be negative, got -1.0",)),
    ("ROPE_BACK", lambda: ops.rope_back(f32(4, 2, 3), t("i32", 2), RopeParams(4)), ("one position for each",)),
    ("ROPE_BACK", lambda: ops.rope_back(t("f16", 4, 2, 3), t("i32", 3), RopeParams(4)), ("gradient must be f32",)),
    ("SOFT_MAX_BACK", lambda: ops.soft_max_back(f32(4), f32(4), math.inf), ("the scale must be finite, got inf",)),
    ("SOFT_MAX_BACK", lambda: ops.soft_max_back(f32(4), f32(4, 2)), ("one shape", "f32[4, 2]")),
    ("OUT_PROD", lambda: ops.out_prod(f32(4, 3), f32(4, 2)), ("equal ne[1]", "f32[4, 3]", "f32[4, 2]")),
    ("OUT_PROD", lambda: ops.out_prod(f32(4, 3), t("f16", 4, 3)), ("second factor must be f32", "f16[4, 3]")),
    ("OUT_PROD", lambda: ops.out_prod(f32(4, 3, 2), f32(4, 3, 3)), ("dimensions 2 and 3", "f32[4, 3, 3]")),
    (
        "MUL_MAT_ID_BACK",
        lambda: ops.mul_mat_id_back(f32(4, 5, 3), f32(6, 2, 7), t("i32", 2, 7)),
        ("gradient's ne[0] must be the weights' ne[1]", "f32[6, 2, 7]"),
    ),
    (
        "MUL_MAT_ID_BACK",
        lambda: ops.mul_mat_id_back(f32(4, 5, 3), f32(5, 2, 7), t("i32", 7, 2)),
        ("must be i32 [n_expert_used, n_tokens]", "i32[7, 2]"),
    ),
    (
        "OUT_PROD_ID",
        lambda: ops.out_prod_id(f32(4, 3, 7), f32(5, 2, 7), t("i32", 2, 7), 3),
        ("one row a token, or one for each", "f32[4, 3, 7]"),
    ),
    (
        "OUT_PROD_ID",
        lambda: ops.out_prod_id(f32(4, 1, 7), f32(5, 2, 7), t("i32", 2, 7), 0),
        ("n_expert must be at least 1, got 0",),
    ),
    ("CROSS_ENTROPY_LOSS", lambda: ops.cross_entropy_loss(f32(4), f32(5)), ("one shape", "f32[4]", "f32[5]")),
    ("CROSS_ENTROPY_LOSS", lambda: ops.cross_entropy_loss(f32(4), t("i32", 4)), ("must be f32", "i32[4]")),
    (
        "CROSS_ENTROPY_LOSS_BACK",
        lambda: ops.cross_entropy_loss_back(f32(2), f32(4), f32(4)),
        ("must be one f32 number", "f32[2]"),
    ),
    ("OPT_STEP_SGD", lambda: ops.opt_step_sgd(f32(4), f32(4), f32(3)), ("numbers must be f32 [2]", "f32[3]")),
    ("OPT_STEP_SGD", lambda: ops.opt_step_sgd(t("f16", 4), f32(4), f32(2)), ("weights must be f32", "f16[4]")),
    ("OPT_STEP_ADAMW", lambda: ops.opt_step_adamw(f32(4), f32(4), f32(5), f32(5)), ("have their shape", "f32[5]")),
    ("FLASH_ATTN_BACK", lambda: _back("w"), ("is of one of q, k, v, got 'w'",)),
    ("FLASH_ATTN_BACK", lambda: _back("sinks"), ("is of one of q, k, v, got 'sinks'",)),
    ("FLASH_ATTN_BACK", lambda: _back(k=t("q8_0", 32, 7, 2), q=f32(32, 3, 4)), ("a quantized cache has no gradient",)),
    ("FLASH_ATTN_BACK", lambda: _back(lse=f32(3, 4)), ("lse and its gradient must be f32 [4, 3, 1, 1]", "f32[3, 4]")),
    ("FLASH_ATTN_BACK", lambda: _back(d_out=f32(8, 3, 4)), ("must be f32 [8, 4, 3, 1]", "f32[8, 3, 4]")),
    ("FLASH_ATTN_BACK", lambda: _back(attn_bias=f32(7, 3, 3)), ("attn_bias must divide n_head and n_seq",)),
    ("FLASH_ATTN_VARLEN_BACK", lambda: _varlen_back("attn_bias"), ("is of one of q, k, v, got 'attn_bias'",)),
    ("FLASH_ATTN_VARLEN_BACK", lambda: _varlen_back(k_starts=t("i32", 4)), ("must be i32 [3]", "i32[4]")),
    (
        "FLASH_ATTN_EXT",
        lambda: _attn(f32(16, 3), f32(16, 7), f32(8, 7), attn_bias=f32(7, 2)),
        ("attn_bias must be [n_kv, n_q, ...]", "f32[7, 2]"),
    ),
    (
        "FLASH_ATTN_EXT",
        lambda: _attn(f32(16, 3), f32(16, 7), f32(8, 7), attn_bias=t("q8_0", 32, 3)),
        ("attn_bias must be f16, bf16 or f32", "q8_0[32, 3]"),
    ),
    (
        "FLASH_ATTN_EXT",
        lambda: _attn(f32(16, 3), f32(16, 7), f32(8, 7), dropout_p=1.0),
        ("dropout_p must be 0, for none, or more and below 1, got 1.0",),
    ),
    (
        "FLASH_ATTN_EXT",
        lambda: _attn(f32(16, 3), f32(16, 7), f32(8, 7), dropout_p=0.5, seed=-1),
        ("seed must have 64 bits, offset 32", "got -1 and 0"),
    ),
    ("ADD", lambda: ops.add(t("i32", 4), f32(4)), ("float types", "i32[4]")),
    ("ADD", lambda: build(op_spec("ADD"), f32(4)), ("takes the sources a, b, got 1 of them",)),
    ("ADD", lambda: build(op_spec("ADD"), f32(4), None), ("a and b must be present", "none")),
    ("SUB", lambda: ops.sub(f32(4), f32(8)), ("must divide", "f32[8]")),
    ("MUL", lambda: ops.mul(t("q8_0", 32), f32(32)), ("plain float", "q8_0[32]")),
    ("DIV", lambda: ops.div(f32(4, 2), f32(4, 4)), ("must divide", "f32[4, 4]")),
    ("SCALE", lambda: ops.scale(t("i32", 4), 2.0), ("float types", "i32[4]")),
    ("SCALE", lambda: build(op_spec("SCALE"), f32(4), params=2.0), ("parameters must be ScaleParams", "2.0")),
    ("CLAMP", lambda: ops.clamp(f32(4), 1.0, -1.0), ("low must not exceed high", "1.0 and -1.0")),
    ("SQR", lambda: ops.sqr(t("q4_0", 32)), ("float types", "q4_0[32]")),
    ("SQRT", lambda: ops.sqrt(t("i64", 2)), ("float types", "i64[2]")),
    ("UNARY", lambda: ops.unary(f32(4), "sine"), ("unary function must be one of silu", "'sine'")),
    ("UNARY", lambda: ops.unary(t("i32", 4), "silu"), ("float type", "i32[4]")),
    ("GLU", lambda: ops.glu(f32(4), None, "mish"), ("gated activation must be one of reglu", "'mish'")),
    ("GLU", lambda: ops.glu(f32(5), None, "swiglu"), ("must be even", "f32[5]")),
    ("GLU", lambda: ops.glu(f32(4), f32(4, 2), "swiglu"), ("one type and shape", "f32[4]", "f32[4, 2]")),
    ("NORM", lambda: ops.norm(t("f16", 4), 1e-5), ("must be f32", "f16[4]")),
    ("NORM", lambda: ops.norm(f32(4), math.nan), ("eps", "nan")),
    ("RMS_NORM", lambda: ops.rms_norm(f32(4), -1.0), ("eps must not be negative", "-1.0")),
    ("L2_NORM", lambda: ops.l2_norm(t("f16", 4), 1e-5), ("must be f32", "f16[4]")),
    ("SUM_ROWS", lambda: ops.sum_rows(t("f16", 4, 2)), ("must be f32", "f16[4, 2]")),
    ("ARGMAX", lambda: ops.argmax(f32(4, 2, 3)), ("f32 matrix", "f32[4, 2, 3]")),
    ("ARGSORT", lambda: ops.argsort(t("f16", 4)), ("must be f32", "f16[4]")),
    ("TOP_K", lambda: ops.top_k(f32(4), 5), ("k must be 1 to ne[0]", "got 5", "f32[4]")),
    ("TOP_K", lambda: ops.top_k(f32(4), 0), ("k must be 1 to ne[0]", "got 0")),
    ("SAMPLE", lambda: ops.sample(t("f16", 4), f32(1)), ("f32 matrix", "f16[4]")),
    ("SAMPLE", lambda: ops.sample(f32(4, 2), f32(3)), ("one number, f32 or f64, a row", "f32[4, 2]", "f32[3]")),
    (
        "SAMPLE",
        lambda: ops.sample(f32(4), f32(1), ops.SampleParams(temp=0)),
        ("temp must be finite and over 0, got 0",),
    ),
    ("SAMPLE", lambda: ops.sample(f32(4), f32(1), ops.SampleParams(top_k=0)), ("top_k must be 1 to 1024, got 0",)),
    ("SAMPLE", lambda: ops.sample(f32(4), f32(1), ops.SampleParams(min_p=2)), ("must be 0 to 1, got 0.95, 2",)),
    ("SAMPLE", lambda: ops.sample(f32(4), f32(1), ops.SampleParams(min_keep=-1)), ("min_keep must be 0 to 1024",)),
    *(
        ("SAMPLE_EACH", partial(_each, **given), said)
        for given, said in (
            ({"logits": f32(4, 2, 2)}, ("an f32 matrix", "f32[4, 2, 2]")),
            ({"uniforms": t("f64", 2)}, ("two numbers, f64, a row", "f64[2]")),
            ({"slots": t("i64", 2)}, ("slots must be i32, one a row", "i64[2]")),
            ({"settings": t("f64", 15, 3)}, ("settings must be f64 [16, slots]", "f64[15, 3]")),
            ({"most": 1025}, ("most must be 1 to 1024, got 1025",)),
        )
    ),
    *(
        ("PENALIZE", partial(_penalize, **given), said)
        for given, said in (
            ({"logits": t("f16", 40, 2)}, ("an f32 matrix", "f16[40, 2]")),
            ({"biases": t("f64", 5, 3)}, ("biased must be i32 and biases f64, both", "f64[5, 3]")),
            ({"past": t("i32", 8, 2)}, ("past must be i32 [n, slots]", "i32[8, 2]")),
            ({"n_past": t("i32", 3)}, ("n_past must be i32, one a row", "i32[3]")),
            ({"allowed": t("i32", 1, 3)}, ("allowed must be i32 with a bit a logit", "i32[1, 3]")),
        )
    ),
    ("KQ_MASK", lambda: ops.kq_mask(t("i64", 4), t("i32", 2)), ("the cells' positions", "i32 matrix", "i64[4]")),
    ("KQ_MASK", lambda: ops.kq_mask(t("i32", 4), t("i32", 2, 1, 2)), ("the tokens' positions", "i32[2, 1, 2]")),
    (
        "KQ_MASK",
        lambda: ops.kq_mask(t("i32", 4, 3), ops.transpose(t("i32", 3, 2))),
        ("tokens' positions must lie side by side", "ops.cont"),
    ),
    (
        "KQ_MASK",
        lambda: ops.kq_mask(t("i32", 4, 2), t("i32", 2, 3)),
        ("equally many sequences", "i32[4, 2]", "i32[2, 3]"),
    ),
    (
        "KQ_MASK",
        lambda: ops.kq_mask(t("i32", 4), t("i32", 2), -1),
        ("window must be 0, for none, to 2147483647, got -1",),
    ),
    ("MUL_MAT", lambda: ops.mul_mat(f32(4, 2), f32(5, 2)), ("equal ne[0]", "f32[4, 2]", "f32[5, 2]")),
    ("MUL_MAT", lambda: ops.mul_mat(t("i32", 4, 2), f32(4, 2)), ("weights must be", "i32[4, 2]")),
    ("MUL_MAT", lambda: ops.mul_mat(f32(4, 2), t("bf16", 4, 2)), ("activations must be", "bf16[4, 2]")),
    (
        "MUL_MAT",
        lambda: ops.mul_mat(f32(4, 2, 2), f32(4, 2, 3)),
        ("dimensions 2 and 3", "f32[4, 2, 2]", "f32[4, 2, 3]"),
    ),
    (
        "MUL_MAT_ID",
        lambda: ops.mul_mat_id(t("i32", 4, 2, 3), f32(4, 1, 5), t("i32", 2, 5)),
        ("weights must be", "i32[4, 2, 3]"),
    ),
    (
        "MUL_MAT_ID",
        lambda: ops.mul_mat_id(f32(4, 2, 3), t("f16", 4, 1, 5), t("i32", 2, 5)),
        ("activations must be f32", "f16[4, 1, 5]"),
    ),
    (
        "MUL_MAT_ID",
        lambda: ops.mul_mat_id(f32(4, 2, 3), f32(5, 1, 5), t("i32", 2, 5)),
        ("equal ne[0]", "f32[4, 2, 3]", "f32[5, 1, 5]"),
    ),
    (
        "MUL_MAT_ID",
        lambda: ops.mul_mat_id(f32(4, 2, 3, 2), f32(4, 1, 5), t("i32", 2, 5)),
        ("three dimensions", "f32[4, 2, 3, 2]"),
    ),
    (
        "MUL_MAT_ID",
        lambda: ops.mul_mat_id(f32(4, 2, 3), f32(4, 1, 5), t("i32", 2, 6)),
        ("must have the shape [n_expert_used, 5]", "i32[2, 6]"),
    ),
    (
        "MUL_MAT_ID",
        lambda: ops.mul_mat_id(f32(4, 2, 3), f32(4, 3, 5), t("i32", 2, 5)),
        ("one row a token, or one for each of its experts", "f32[4, 3, 5]", "i32[2, 5]"),
    ),
    (
        "MUL_MAT_ID",
        lambda: ops.mul_mat_id(f32(4, 2, 3), f32(4, 1, 5), t("i64", 2, 5)),
        ("numbers must be i32", "i64[2, 5]"),
    ),
    ("ADD_ID", lambda: ops.add_id(f32(4, 2, 5), f32(4, 3), t("i32", 2, 5, 2)), ("must be a matrix", "i32[2, 5, 2]")),
    ("ADD_ID", lambda: ops.add_id(f32(4, 2, 5), f32(4, 3), t("i32", 1, 5)), ("shape [2, 5]", "i32[1, 5]")),
    (
        "ADD_ID",
        lambda: ops.add_id(f32(4, 2, 5), f32(3, 3), t("i32", 2, 5)),
        ("equal ne[0]", "f32[4, 2, 5]", "f32[3, 3]"),
    ),
    ("ADD_ID", lambda: ops.add_id(f32(4, 2, 5), t("f16", 4, 3), t("i32", 2, 5)), ("must be f32", "f16[4, 3]")),
    ("ADD_ID", lambda: ops.add_id(f32(4, 2, 5), f32(4, 3, 2), t("i32", 2, 5)), ("[n, n_expert]", "f32[4, 3, 2]")),
    ("ADD_ID", lambda: ops.add_id(f32(4, 2, 5, 2), f32(4, 3), t("i32", 2, 5)), ("first summand", "f32[4, 2, 5, 2]")),
    ("FILL", lambda: ops.fill(t("i32", 4), 1.0), ("plain float types", "i32[4]")),
    ("GET_ROWS", lambda: ops.get_rows(f32(4, 9), t("i64", 2)), ("indices must be i32", "i64[2]")),
    ("GET_ROWS", lambda: ops.get_rows(f32(4, 9, 2), t("i32", 2)), ("must match dimensions 2 and 3", "f32[4, 9, 2]")),
    ("SET_ROWS", lambda: ops.set_rows(f32(4, 2), t("i64", 3), f32(4, 9)), ("one index a row", "f32[4, 2]", "i64[3]")),
    ("SET_ROWS", lambda: ops.set_rows(f32(4, 2), t("i64", 2), f32(8, 9)), ("equal ne[0]", "f32[4, 2]", "f32[8, 9]")),
    (
        "SET_ROWS",
        lambda: ops.set_rows(f32(256), t("i64", 1), t("q4_K", 256, 9)),
        ("target must be i32 or one of", "q4_K[256, 9]"),
    ),
    ("SET_ROWS", lambda: ops.set_rows(f32(4, 2), f32(2), f32(4, 9)), ("indices must be i64 or i32", "f32[2]")),
    (
        "SET_ROWS",
        lambda: ops.set_rows(f32(4, 2), t("i64", 2), ops.transpose(f32(9, 4))),
        ("rows must be contiguous", "f32[4, 9]"),
    ),
    ("SET_ROWS", lambda: ops.set_rows(f32(4, 2, 3), t("i64", 2, 2), f32(4, 9, 3)), ("must divide", "i64[2, 2]")),
    ("CPY", lambda: ops.cpy(f32(4, 2), f32(4, 3)), ("equally many elements", "f32[4, 2]", "f32[4, 3]")),
    ("CPY", lambda: ops.cpy(f32(4), t("i32", 4)), ("integer types only", "i32[4]")),
    ("CPY", lambda: ops.cpy(f32(64), t("q8_0", 32, 2)), ("quantized target", "q8_0[32, 2]")),
    ("CONT", lambda: build(op_spec("CONT")), ("takes the sources a, got 0 of them",)),
    ("DUP", lambda: build(op_spec("DUP"), None), ("must be present",)),
    ("CONCAT", lambda: ops.concat(f32(4, 2), f32(5, 2), 1), ("along dimension 1 only", "f32[4, 2]", "f32[5, 2]")),
    ("CONCAT", lambda: ops.concat(f32(4), f32(4), 4), ("dimension must be 0 to 3", "got 4")),
    ("CONCAT", lambda: ops.concat(f32(4), t("f16", 4), 0), ("one plain type", "f16[4]")),
    ("REPEAT", lambda: ops.repeat(f32(4, 2), 4, 3), ("must divide [4, 3, 1, 1]", "f32[4, 2]")),
    (
        "VIEW",
        lambda: ops.view(f32(4, 2), (4, 2), offs=16),
        ("end inside its source (32 bytes)", "byte 48", "f32[4, 2]"),
    ),
    ("VIEW", lambda: ops.view(f32(4, 2), (4,), offs=-4), ("must not be negative",)),
    ("VIEW", lambda: ops.view(f32(4, 2), (2,), offs=2), ("whole blocks of 4 bytes", "f32[4, 2]")),
    ("VIEW", lambda: ops.view(f32(4, 2), (2, 2), nb=(6,)), ("whole blocks of 4 bytes", "f32[4, 2]")),
    ("RESHAPE", lambda: ops.reshape(f32(4, 2), 3, 3), ("number of elements must stay", "f32[4, 2]")),
    ("RESHAPE", lambda: ops.reshape(ops.transpose(f32(4, 2)), 8), ("must be contiguous; cont()", "f32[2, 4]")),
    ("PERMUTE", lambda: ops.permute(f32(4, 2), 0, 1, 2, 2), ("0 to 3 once each", "(0, 1, 2, 2)")),
    ("PERMUTE", lambda: ops.permute(f32(4, 2), 0, 1), ("takes 4 axes",)),
    ("TRANSPOSE", lambda: ops.transpose(t("q8_0", 32, 32)), ("dimension 0, which must stay", "q8_0[32, 32]")),
    ("ROPE", lambda: ops.rope(f32(4, 2, 3), t("i32", 2), RopeParams(4)), ("one position", "f32[4, 2, 3]", "i32[2]")),
    ("ROPE", lambda: ops.rope(f32(4, 2, 3), t("i32", 3, 2), RopeParams(4)), ("one position", "i32[3, 2]")),
    ("ROPE", lambda: ops.rope(f32(4, 2, 3), t("i64", 3), RopeParams(4)), ("positions must be i32", "i64[3]")),
    ("ROPE", lambda: ops.rope(f32(4, 2, 3), t("i32", 3), RopeParams(6)), ("n_dims must be even and at most", "got 6")),
    ("ROPE", lambda: ops.rope(f32(4, 2, 3), t("i32", 3), RopeParams(3)), ("n_dims must be even", "got 3")),
    (
        "ROPE",
        lambda: ops.rope(f32(4, 2, 3), t("i32", 3), RopeParams(4, "glm")),
        ("mode must be one of normal, neox", "'glm'"),
    ),
    ("ROPE", lambda: ops.rope(f32(4, 2, 3), t("i32", 3), RopeParams(4, ext_factor=1.0)), ("n_ctx_orig over 0",)),
    ("ROPE", lambda: ops.rope(f32(4, 2, 3), t("i32", 3), RopeParams(4, freq_scale=0.0)), ("must be over 0", "0.0")),
    ("ROPE", lambda: ops.rope(f32(4, 2, 3), t("i32", 3), YARN, f32(1)), ("at least n_dims/2 = 2", "f32[1]")),
    ("ROPE", lambda: ops.rope(f32(4, 2, 3), t("i32", 3), RopeParams(4, freq_base=math.inf)), ("freq_base", "got inf")),
    ("ROPE", lambda: ops.rope(f32(4, 2, 3), t("i32", 3), RopeParams(4, attn_factor=math.nan)), ("finite", "nan")),
    (
        "ROPE",
        lambda: ops.rope(f32(4, 2, 3), t("i32", 3), replace(YARN, beta_fast=0.0)),
        ("YaRN needs beta_fast over 0", "0.0"),
    ),
    ("SCALE", lambda: ops.scale(f32(4), 1e300), ("scale must be a number that f32 holds", "1e+300")),
    ("SOFT_MAX", lambda: ops.soft_max(f32(4, 2), f32(4, 2), max_bias=-1.0), ("max_bias must be finite", "-1.0")),
    ("CPY", lambda: ops.cpy(f32(4, 2), ops.view(f32(4, 2), (4, 2), (0,))), ("memory of its own for each element",)),
    (
        "SET_ROWS",
        lambda: ops.set_rows(f32(4, 2), t("i64", 2), ops.view(f32(8, 8), (4, 3), (12,))),
        ("memory of its own for each element",),
    ),
    ("SOFT_MAX", lambda: ops.soft_max(f32(4, 2), f32(4, 1)), ("ne[0] and at least its ne[1]", "f32[4, 2]", "f32[4]")),
    ("SOFT_MAX", lambda: ops.soft_max(f32(4, 2), t("bf16", 4, 2)), ("mask must be f16 or f32", "bf16[4, 2]")),
    ("SOFT_MAX", lambda: ops.soft_max(f32(4, 2, 3), f32(4, 2, 2)), ("mask must divide", "f32[4, 2, 2]")),
    ("SOFT_MAX", lambda: ops.soft_max(f32(4, 2), max_bias=8.0), ("needs a mask", "f32[4, 2]")),
    ("SOFT_MAX", lambda: ops.soft_max(f32(4, 2, 3), None, f32(2)), ("one value for each", "f32[2]")),
    ("SOFT_MAX", lambda: ops.soft_max(f32(4), scale=math.inf), ("scale must be finite", "inf")),
    ("ADD", lambda: ops.add(f32(4), t("i32", 4)), ("float types", "i32[4]")),
    ("SQR", lambda: build(op_spec("SQR"), f32(4), f32(4)), ("takes the sources a, got 2 of them",)),
    ("GLU", lambda: ops.glu(f32(4), t("f16", 4), "swiglu"), ("one type and shape", "f32[4]", "f16[4]")),
    ("ARGMAX", lambda: ops.argmax(f32(4, 2, 1, 3)), ("f32 matrix", "f32[4, 2, 1, 3]")),
    ("SAMPLE", lambda: ops.sample(f32(4, 2), f32(2, 2)), ("one number", "f32[2, 2]")),
    ("SAMPLE", lambda: ops.sample(f32(4), f32(1), ops.SampleParams(temp=math.inf)), ("finite and over 0, got inf",)),
    ("SAMPLE", lambda: ops.sample(f32(4), f32(1), ops.SampleParams(top_p=95)), ("must be 0 to 1, got 95",)),
    ("KQ_MASK", lambda: ops.kq_mask(t("i32", 4), t("i32", 2), 2**31), ("to 2147483647, got 2147483648",)),
    (
        "KQ_MASK",
        lambda: ops.kq_mask(ops.transpose(t("i32", 3, 4)), t("i32", 2, 3)),
        ("cells' positions must lie side by side", "ops.cont"),
    ),
    ("MUL_MAT", lambda: ops.mul_mat(f32(4, 2, 1, 2), f32(4, 2, 1, 3)), ("dimensions 2 and 3", "f32[4, 2, 1, 3]")),
    (
        "MUL_MAT_ID",
        lambda: ops.mul_mat_id(f32(4, 2, 3), f32(4, 1, 5, 2), t("i32", 2, 5)),
        ("three dimensions", "f32[4, 1, 5, 2]"),
    ),
    ("GET_ROWS", lambda: ops.get_rows(f32(4, 9, 1, 2), t("i32", 2, 1, 3)), ("must match dimensions 2 and 3",)),
    ("GET_ROWS", lambda: ops.get_rows(f32(4, 9), t("i32", 2, 1, 1, 2)), ("[n, d2, d3]", "i32[2, 1, 1, 2]")),
    ("SET_ROWS", lambda: ops.set_rows(t("bf16", 4, 2), t("i64", 2), f32(4, 9)), ("rows must be f32 or f16",)),
    ("SET_ROWS", lambda: ops.set_rows(f32(4, 2, 3), t("i64", 2), f32(4, 9, 2)), ("agree in dimensions 2 and 3",)),
    (
        "SET_ROWS",
        lambda: ops.set_rows(f32(4, 2, 1, 3), t("i64", 2, 1, 2), f32(4, 9, 1, 3)),
        ("must divide dimensions 2 and 3", "i64[2, 1, 2]"),
    ),
    ("CPY", lambda: ops.cpy(t("i32", 4), f32(4)), ("integer types only", "i32[4]")),
    ("CONCAT", lambda: ops.concat(t("q8_0", 32), t("q8_0", 32), 0), ("one plain type", "q8_0[32]")),
    ("REPEAT", lambda: ops.repeat(t("q8_0", 32), 64), ("plain type", "q8_0[32]")),
    ("PERMUTE", lambda: ops.permute(t("q8_0", 32, 2, 3), 2, 0, 1, 3), ("dimension 0, which must stay",)),
    ("ROPE", lambda: ops.rope(f32(4, 2, 3), t("i32", 3), RopeParams(0)), ("n_dims must be even", "got 0")),
    (
        "ROPE",
        lambda: ops.rope(f32(4, 2, 3), t("i32", 3), RopeParams(4, freq_base=1.0, n_ctx_orig=16, ext_factor=1.0)),
        ("freq_base over 1, got 1.0",),
    ),
    (
        "ROPE",
        lambda: ops.rope(f32(4, 2, 3), t("i32", 3), RopeParams(4), t("f16", 2)),
        ("frequency factors must be f32", "f16[2]"),
    ),
    ("SOFT_MAX", lambda: ops.soft_max(f32(4, 2, 1, 3), f32(4, 2, 1, 2)), ("mask must divide", "f32[4, 2, 1, 2]")),
    ("SOFT_MAX", lambda: ops.soft_max(f32(4, 2, 3), None, t("f16", 3)), ("sinks must be f32", "f16[3]")),
    (
        "FLASH_ATTN_EXT",
        lambda: _attn(f32(8, 1, 2, 2), f32(8, 4, 2, 3), f32(8, 4, 2, 3)),
        ("equally many sequences", "f32[8, 1, 2, 2]", "f32[8, 4, 2, 3]"),
    ),
    (
        "FLASH_ATTN_EXT",
        lambda: _attn(f32(8, 2, 1, 3), f32(8, 4, 1, 3), f32(8, 4, 1, 3), t("f16", 4, 2, 1, 2)),
        ("must divide n_head and n_seq", "f16[4, 2, 1, 2]"),
    ),
    ("FLASH_ATTN_EXT", lambda: _attn(f32(8, 1), f32(8, 4), f32(8, 4), softcap=-1.0), ("not negative", "softcap=-1.0")),
    (
        "FLASH_ATTN_EXT",
        lambda: _attn(f32(8, 1, 2), f32(8, 4, 2), f32(8, 4, 2), sinks=t("f16", 2)),
        ("sinks must be f32", "f16[2]"),
    ),
    ("FLASH_ATTN_EXT", lambda: _attn(t("f16", 8, 1), f32(8, 4), f32(8, 4)), ("q must be f32", "f16[8]")),
    ("FLASH_ATTN_EXT", lambda: _attn(f32(8, 1), f32(4, 4), f32(8, 4)), ("equal head size", "f32[8]", "f32[4, 4]")),
    (
        "FLASH_ATTN_EXT",
        lambda: _attn(f32(8, 1), f32(8, 4), f32(8, 5)),
        ("k and v must agree", "f32[8, 4]", "f32[8, 5]"),
    ),
    (
        "FLASH_ATTN_EXT",
        lambda: _attn(f32(8, 1, 3), f32(8, 4, 2), f32(8, 4, 2)),
        ("heads of k must divide", "f32[8, 1, 3]"),
    ),
    ("FLASH_ATTN_EXT", lambda: _attn(f32(8, 1), t("i32", 8, 4), f32(8, 4)), ("k must be a float", "i32[8, 4]")),
    ("FLASH_ATTN_EXT", lambda: _attn(f32(8, 1), f32(8, 4), t("i8", 8, 4)), ("v must be a float", "i8[8, 4]")),
    ("FLASH_ATTN_EXT", lambda: _attn(f32(8, 1), f32(8, 4), f32(8, 4), f32(4, 1)), ("mask must be f16", "f32[4]")),
    (
        "FLASH_ATTN_EXT",
        lambda: _attn(f32(8, 2), f32(8, 4), f32(8, 4), t("f16", 4, 1)),
        ("mask must be [n_kv, n_q", "f16[4]"),
    ),
    (
        "FLASH_ATTN_EXT",
        lambda: _attn(f32(8, 1, 4), f32(8, 4), f32(8, 4), t("f16", 4, 1, 3)),
        ("must divide n_head and n_seq", "f16[4, 1, 3]"),
    ),
    ("FLASH_ATTN_EXT", lambda: _attn(f32(8, 1), f32(8, 4), f32(8, 4), max_bias=8.0), ("ALiBi", "needs a mask")),
    ("FLASH_ATTN_EXT", lambda: _attn(f32(8, 1), f32(8, 4), f32(8, 4), softcap=-1.0), ("not negative", "-1.0")),
    ("FLASH_ATTN_EXT", lambda: _attn(f32(8, 1), f32(8, 4), f32(8, 4), sinks=f32(2)), ("one value a head", "f32[2]")),
    ("FLASH_ATTN_LSE", lambda: ops.flash_attn_lse(f32(8, 1), f32(4, 4), None, 1.0), ("equal head size", "f32[4, 4]")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(q=t("f16", 8, 3, 4)), ("q must be f32", "f16[8, 3, 4]")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(q=f32(8, 3, 4, 2)), ("q must be [D_k, n_tokens, n_head]",)),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(q=f32(8, 3, 3)), ("heads of k must divide", "f32[8, 3, 3]")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(k=f32(4, 16, 2, 5)), ("equal head size", "f32[4, 16, 2, 5]")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(k=t("i32", 8, 16, 2, 5)), ("k must be a float", "i32[8, 16, 2, 5]")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(v=t("i8", 8, 16, 2, 5)), ("v must be a float", "i8[8, 16, 2, 5]")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(v=f32(8, 16, 2, 4)), ("keys, heads and pages", "f32[8, 16, 2, 4]")),
    (
        "FLASH_ATTN_VARLEN",
        lambda: _varlen(k=f32(8, 24, 2, 5), v=f32(8, 24, 2, 5)),
        ("one of 16, 32, 64, 128, 256 tokens", "f32[8, 24, 2, 5]"),
    ),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(q_starts=t("i32", 1)), ("for each sequence and one more", "i32[1]")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(q_starts=t("i64", 3)), ("q_starts must be i32 [3]", "i64[3]")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(lengths=t("i32", 3)), ("lengths must be i32 [2]", "i32[3]")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(block_table=t("i32", 7)), ("block_table must be i32 [7, 2]", "i32[7]")),
    (
        "FLASH_ATTN_VARLEN",
        lambda: _varlen(block_table=ops.transpose(t("i32", 2, 7))),
        ("block_table must lie side by side", "ops.cont"),
    ),
    (
        "FLASH_ATTN_VARLEN",
        lambda: _varlen(block_table=None),
        ("in pages, with lengths and block_table, or packed", "none"),
    ),
    (
        "FLASH_ATTN_VARLEN",
        lambda: _varlen(k_starts=t("i32", 3)),
        ("in pages, with lengths and block_table, or packed",),
    ),
    (
        "FLASH_ATTN_VARLEN",
        lambda: _varlen(lengths=None, block_table=None, k_starts=t("i32", 3)),
        ("packed k must be [D_k, n_keys, n_head_kv]", "f32[8, 16, 2, 5]"),
    ),
    (
        "FLASH_ATTN_VARLEN",
        lambda: _varlen(k=f32(8, 9, 2), v=f32(8, 9, 2), lengths=None, block_table=None, k_starts=t("i32", 2)),
        ("k_starts must be i32 [3]", "i32[2]"),
    ),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(prefixes=t("i32", 2, 4)), ("prefixes must be i32 [3, 4]", "i32[2, 4]")),
    (
        "FLASH_ATTN_VARLEN",
        lambda: _varlen(
            k=f32(8, 9, 2),
            v=f32(8, 9, 2),
            lengths=None,
            block_table=None,
            k_starts=t("i32", 3),
            prefixes=t("i32", 3, 1),
        ),
        ("prefixes are of pages", "i32[3]"),
    ),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(mask=t("f32", 9, 3)), ("mask must be f16", "f32[9, 3]")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(mask=t("f16", 9, 4)), ("a row for each query", "f16[9, 4]")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(mask=t("f16", 9, 3, 3)), ("must divide the heads of q", "f16[9, 3, 3]")),
    (
        "FLASH_ATTN_VARLEN",
        lambda: _varlen(mask=ops.transpose(t("f16", 3, 9))),
        ("columns must lie side by side", "ops.cont"),
    ),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(mask_new=True), ("give it a mask", "f32[8, 3, 4]")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(softcap=-1.0), ("not negative", "-1.0")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(max_bias=-1.0), ("not negative", "-1.0")),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(window=-1), ("window must be 0, for all, to 2147483647, got -1",)),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(window=2**31), ("window must be 0, for all, to 2147483647",)),
    ("FLASH_ATTN_VARLEN", lambda: _varlen(sinks=f32(2)), ("one value a head", "f32[2]")),
    (
        "FLASH_ATTN_VARLEN_LSE",
        lambda: ops.flash_attn_varlen_lse(f32(8, 3, 4), f32(4, 16, 2, 5), t("i32", 3), 1.0),
        ("equal head size", "f32[4, 16, 2, 5]"),
    ),
    (
        "FLASH_ATTN_VARLEN_LSE",
        lambda: ops.flash_attn_varlen_lse(f32(8, 3, 4), f32(8, 16, 2, 5), t("i32", 3), 1.0),
        ("in pages, with lengths and block_table, or packed",),
    ),
    ("ALL_REDUCE", lambda: ops.all_reduce(f32(4), ranks=1, rank=0), ("ranks must be 2 or more", "got 1 and 0")),
    ("ALL_REDUCE", lambda: ops.all_reduce(f32(4), ranks=2, rank=2), ("rank one of them", "got 2 and 2")),
    ("ALL_REDUCE", lambda: ops.all_reduce(f32(4), f32(4), ranks=3, rank=0), ("each of the 3 ranks", "got 2")),
    ("ALL_REDUCE", lambda: ops.all_reduce(f32(4), None, f32(4), ranks=2, rank=0), ("in their order", "got 2")),
    ("ALL_REDUCE", lambda: ops.all_reduce(f32(4), f32(5), ranks=2, rank=0), ("must have one shape", "f32[5]")),
    ("ALL_REDUCE", lambda: ops.all_reduce(t("i32", 4), ranks=2, rank=0), ("plain float type", "i32[4]")),
    ("ALL_REDUCE", lambda: ops.all_reduce(f32(4), t("f16", 4), ranks=2, rank=0), ("one type", "f16[4]")),
    ("ALL_GATHER", lambda: ops.all_gather(f32(4), ranks=2, rank=1, sizes=(4, 5)), ("as wide as sizes", "f32[4]")),
    ("ALL_GATHER", lambda: ops.all_gather(f32(4), ranks=2, rank=0, sizes=(4,)), ("2 numbers of at least 1", "(4,)")),
    ("ALL_GATHER", lambda: ops.all_gather(f32(4), ranks=2, rank=0, sizes=(4, 0)), ("at least 1", "(4, 0)")),
    ("ALL_GATHER", lambda: ops.all_gather(t("q8_0", 32), ranks=2, rank=0, sizes=(32, 32)), ("plain type", "q8_0[32]")),
    (
        "REDUCE_SCATTER",
        lambda: ops.reduce_scatter(f32(8), ranks=2, rank=0, sizes=(4, 5)),
        ("as wide as all sizes together", "f32[8]"),
    ),
    ("REDUCE_SCATTER", lambda: ops.reduce_scatter(t("i32", 9), ranks=2, rank=0, sizes=(4, 5)), ("float", "i32[9]")),
    ("SEND", lambda: ops.send(f32(4), rank=1, other=1), ("must be two ranks, from 0, got 1 and 1",)),
    ("SEND", lambda: ops.send(f32(4), rank=-1, other=1), ("must be two ranks", "got -1 and 1")),
    ("SEND", lambda: ops.send(t("q8_0", 32), rank=0, other=1), ("plain type", "q8_0[32]")),
    ("RECV", lambda: _recv(other=0), ("must be two ranks, from 0, got 0 and 0",)),
    ("RECV", lambda: _recv(type="q8_0"), ("plain type, got q8_0",)),
    ("RECV", lambda: _recv(ne=(4, 0)), ("1 to 4 numbers of at least 1, got (4, 0)",)),
    ("RECV", lambda: _recv(a=f32(5)), ("must be f32 of the shape [4]", "f32[5]")),
    ("RECV", lambda: _recv(a=t("f16", 4)), ("must be f32 of the shape [4]", "f16[4]")),
]


@pytest.mark.parametrize(("op", "bad", "parts"), REFUSED, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSED)])
def test_a_bad_call_is_refused_with_rule_and_shapes(op: str, bad: Callable[[], object], parts: tuple[str, ...]) -> None:
    with pytest.raises(GraphError) as caught:
        bad()
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert op in message or "must be one of" in message, message


def _recv(a: Tensor | None = None, **more: Any) -> Tensor:
    return ops.recv(f32(1), a, **{"rank": 0, "other": 1, "type": "f32", "ne": (4,)} | more)


#: What lies just inside of a rule.
TAKEN: list[Callable[[], Tensor]] = [
    lambda: ops.clamp(f32(4), 1.0, 1.0),
    lambda: ops.sample(f32(4), f32(1), ops.SampleParams(top_k=1024, top_p=1.0, min_p=1.0, min_keep=1024)),
    lambda: ops.sample(f32(4), f32(1), ops.SampleParams(top_p=0.0, min_p=0.0, min_keep=0)),
    lambda: ops.kq_mask(t("i32", 4), t("i32", 2), 2**31 - 1),
    lambda: ops.top_k(f32(4), 4),
    lambda: _varlen(window=2**31 - 1),
    lambda: _varlen(prefixes=t("i32", 3, 2)),
    lambda: _varlen(k=f32(8, 256, 2, 5), v=f32(4, 256, 2, 5), block_table=t("i32", 1, 2)),
    lambda: _varlen(k=f32(8, 9, 2), v=f32(8, 9, 2), lengths=None, block_table=None, k_starts=t("i32", 3)),
    lambda: ops.rope(f32(4, 2, 3), t("i32", 3), RopeParams(4), f32(2)),
    lambda: ops.norm(f32(4), 0.0),
    lambda: ops.view(f32(4, 2), (4,), offs=16),
    lambda: ops.soft_max(f32(4, 2), f32(4, 2)),
    lambda: ops.mul_mat(f32(4, 2, 2, 3), f32(4, 2, 4, 3)),
]


@pytest.mark.parametrize("make", TAKEN, ids=lambda make: str(TAKEN.index(make)))
def test_what_is_just_right_is_taken(make: Callable[[], Tensor]) -> None:
    assert make().n_elements > 0


def test_every_op_refuses_something() -> None:
    assert {row[0] for row in REFUSED} == set(registered_ops())


def test_params_are_the_ops_own() -> None:
    with pytest.raises(GraphError, match="parameters must be RopeParams"):
        build(op_spec("ROPE"), f32(4, 2, 3), t("i32", 3), params=ConcatParams(0))
    with pytest.raises(GraphError, match="parameters must be NoneType"):
        build(op_spec("ADD"), f32(4), f32(4), params=1)


def _row_view(a: Tensor) -> Tensor:
    return ops.view(a, (8, 4), a.nb[1:2])


K, KV = t("f16", 16, 4), t("f16", 16, 8)
#: (node, FLOPs, bytes): numbers of elements times sizes, written out.
WORK: list[tuple[Tensor, int, int]] = [
    (ops.add(f32(4, 3), f32(4)), 12, 48 + 16 + 48),
    (ops.sub(f32(4, 3), f32(4, 3)), 12, 3 * 48),
    (ops.mul(t("f16", 4, 3), t("f16", 1)), 12, 24 + 2 + 24),
    (ops.div(f32(4), f32(4)), 4, 3 * 16),
    (ops.scale(f32(4, 3), 2.0), 2 * 12, 2 * 48),
    (ops.clamp(f32(4), 0.0, 1.0), 2 * 4, 2 * 16),
    (ops.sqr(f32(4)), 4, 2 * 16),
    (ops.fill(f32(4), 1.0), 0, 16),
    (
        ops.mul_mat_id(t("q4_0", 32, 5, 8), f32(32, 1, 2), t("i32", 3, 2)),  # six of eight experts at most
        2 * 32 * 5 * 6,
        6 * 5 * 18 + 2 * 128 + 6 * 4 + 30 * 4,
    ),
    (
        ops.mul_mat_id(t("q4_0", 32, 5, 4), f32(32, 3, 2), t("i32", 3, 2)),
        2 * 32 * 5 * 6,
        4 * 5 * 18 + 6 * 128 + 6 * 4 + 30 * 4,
    ),
    (ops.add_id(f32(5, 3, 2), f32(5, 4), t("i32", 3, 2)), 30, 2 * 30 * 4 + 4 * 20 + 6 * 4),
    (ops.sqrt(f32(4)), 4, 2 * 16),
    (ops.unary(f32(4), "silu"), 8 * 4, 2 * 16),
    (ops.glu(f32(4), f32(4), "swiglu"), 10 * 4, 3 * 16),
    (ops.glu(f32(8), None, "swiglu"), 10 * 4, 32 + 16),
    (ops.norm(f32(4, 3), 0.0), 4 * 12, 2 * 48),
    (ops.rms_norm(f32(4, 3), 0.0), 4 * 12, 2 * 48),
    (ops.l2_norm(f32(4, 3), 0.0), 4 * 12, 2 * 48),
    (ops.sum_rows(f32(4, 3)), 12, 48 + 12),
    (ops.argmax(f32(4, 3)), 12, 48 + 12),
    (ops.argsort(f32(4, 3)), 10 * 12, 2 * 48),
    (ops.top_k(f32(4, 3), 2), 10 * 12, 48 + 24),
    (ops.sample(f32(4, 3), t("f64", 3)), 10 * 12, 48 + 24 + 12),
    (_each(), 10 * 8, 32 + 32 + 8 + 3 * 128 + 8),
    (_penalize(), 0, 2 * 320),
    (ops.kq_mask(t("i32", 8, 2), t("i32", 3, 2)), 3 * 48, 64 + 24 + 96),
    (ops.mul_mat(t("q8_0", 64, 5), f32(64, 3)), 2 * 64 * 5 * 3, 5 * 2 * 34 + 64 * 3 * 4 + 5 * 3 * 4),
    (ops.mul_mat(f32(4, 5, 2), f32(4, 3, 4)), 2 * 4 * 5 * 3 * 4, 160 + 192 + 240),
    (ops.get_rows(t("q4_0", 64, 1000), t("i32", 3)), 0, 3 * 36 + 3 * 4 + 3 * 256),
    (ops.set_rows(f32(64, 3), t("i64", 3), t("f16", 64, 1000)), 0, 3 * 256 + 3 * 8 + 3 * 128),
    (ops.cpy(f32(64, 2), t("q8_0", 64, 2)), 0, 512 + 4 * 34),
    (ops.cont(ops.transpose(f32(4, 3))), 0, 2 * 48),
    (ops.dup(t("i32", 4)), 0, 2 * 16),
    (ops.concat(f32(4), f32(2), 0), 0, 16 + 8 + 24),
    (ops.repeat(f32(4), 4, 5), 0, 16 + 80),
    (ops.view(f32(4), (2,)), 0, 0),
    (ops.reshape(f32(4), 2, 2), 0, 0),
    (ops.permute(f32(4), 1, 0, 2, 3), 0, 0),
    (ops.transpose(f32(4, 3)), 0, 0),
    (ops.rope(f32(4, 2, 3), t("i32", 3), RopeParams(4)), 6 * 24, 96 + 12 + 96),
    (ops.soft_max(f32(4, 3), t("f16", 4, 3)), 5 * 12, 48 + 24 + 48),
    (
        ops.flash_attn_ext(f32(16, 3, 4), t("f16", 16, 7, 2), t("q8_0", 32, 7, 2), t("f16", 7, 3), 1.0),
        2 * (16 + 32) * 7 * 3 * 4,
        16 * 12 * 4 + 16 * 14 * 2 + 34 * 14 + 7 * 3 * 2 + 32 * 12 * 4,
    ),
    (ops.flash_attn_ext(f32(16, 1), K, _row_view(K), None, 1.0), 2 * (16 + 8) * 4, 64 + 128 + 32),
    (  # a v that lies behind k in one buffer costs its bytes, one that lies in k does not
        ops.flash_attn_ext(f32(16, 1), ops.view(KV, (16, 4)), ops.view(KV, (16, 4), offs=4 * 32), None, 1.0),
        2 * (16 + 16) * 4,
        64 + 2 * 128 + 64,
    ),
    (ops.flash_attn_lse(f32(16, 3, 4), t("f16", 16, 7, 2), None, 1.0), 2 * 16 * 7 * 12, 768 + 448 + 48),
    (_varlen(), 2 * (8 + 8) * 7 * 16 * 12, 2 * 12 * 32 + 2 * 5 * 2 * 16 * 32 + 12 + 8 + 56),
    (  # of many pages a table can name so many
        _varlen(k=t("f16", 8, 16, 2, 99), v=t("q8_0", 32, 16, 2, 99)),
        2 * (8 + 32) * 7 * 16 * 12,
        12 * 32 + 12 * 128 + 14 * 32 * (16 + 34) + 12 + 8 + 56,
    ),
    (  # a v that lies in k
        _varlen(k=(pages := f32(8, 16, 2, 5)), v=ops.view(pages, (4, 16, 2, 5), pages.nb[1:])),
        2 * (8 + 4) * 7 * 16 * 12,
        12 * 32 + 12 * 16 + 5 * 2 * 16 * 32 + 12 + 8 + 56,
    ),
    (
        ops.flash_attn_varlen_lse(f32(8, 3, 4), f32(8, 9, 2), t("i32", 3), 1.0, k_starts=t("i32", 3)),
        2 * 8 * 9 * 12,
        12 * 32 + 48 + 9 * 2 * 32 + 12 + 12,
    ),
    (ops.mul((x := f32(4)), x), 4, 16 + 16),
    (ops.repeat_back(f32(6, 4), 3, 2), 24, 96 + 24),
    (ops.get_rows_back(f32(4, 3), t("i32", 3), 5), 12, 48 + 12 + 80),
    (ops.set_rows_back(f32(4, 9), t("i64", 3)), 0, 144 + 24 + 48),
    (ops.view_back(f32(4, 3), f32(8, 5), ops.view(f32(8, 5), (4, 3), (32,)).params), 12, 48 + 160),
    (ops.silu_back(f32(4), f32(4)), 40, 3 * 16),
    (ops.unary_back(f32(4), t("f16", 4), "gelu"), 48, 2 * 16 + 8),
    (ops.rms_norm_back(f32(4, 3), f32(4, 3), 0.0), 96, 3 * 48),
    (ops.rope_back(f32(4, 2, 3), t("i32", 3), RopeParams(4)), 6 * 24, 96 + 12 + 96),
    (ops.soft_max_back(f32(4, 3), f32(4, 3)), 60, 3 * 48),
    (ops.out_prod(t("q8_0", 64, 5), f32(3, 5)), 2 * 5 * 64 * 3, 5 * 68 + 60 + 64 * 3 * 4),
    (  # five of eight experts at most
        ops.mul_mat_id_back(t("q4_0", 32, 5, 8), f32(5, 1, 5), t("i32", 1, 5)),
        2 * 5 * 32 * 5,
        5 * 5 * 18 + 100 + 20 + 640,
    ),
    (ops.out_prod_id(f32(4, 1, 7), f32(5, 2, 7), t("i32", 2, 7), 3), 2 * 4 * 70, 112 + 280 + 56 + 240),
    (ops.cross_entropy_loss(f32(4, 3), f32(4, 3)), 72, 96 + 4),
    (ops.cross_entropy_loss_back(f32(1), f32(4, 3), f32(4, 3)), 72, 4 + 3 * 48),
    (ops.opt_step_sgd(f32(4), f32(4), f32(2)), 16, 3 * 16 + 8),
    (ops.opt_step_adamw(f32(4), f32(4), f32(4), f32(5)), 32, 4 * 16 + 20),
    (_back("q"), 2 * (2 * 16 + 8) * 7 * 12, 768 + 448 + 224 + 2 * 384 + 48 + 768),
    (_back("v"), 2 * (16 + 8) * 7 * 12, 768 + 448 + 224 + 2 * 384 + 48 + 448),
    (_back("sinks", sinks=f32(4)), 2 * 8 * 12, 768 + 448 + 224 + 2 * 384 + 48 + 16 + 16),
    (ops.all_reduce(f32(4, 3), ranks=2, rank=0), 12, 2 * 24),  # over the link
    (ops.send(f32(4, 3), rank=0, other=1), 0, 48),
    (ops.send(f32(4, 3), rank=0, other=1, played=True), 0, 2 * 48),  # in memory
    (_recv(ne=(4, 3)), 0, 48),
    (_recv(f32(4, 3), ne=(4, 3)), 0, 2 * 48),
    (ops.all_reduce(f32(4, 3), f32(4, 3), f32(4, 3), ranks=3, rank=0), 24, 4 * 48),
    (ops.all_gather(f32(3, 2), ranks=2, rank=0, sizes=(3, 5)), 0, 40),  # what it is given is more than what it gives
    (ops.all_gather(f32(3, 2), f32(5, 2), ranks=2, rank=0, sizes=(3, 5)), 0, 24 + 40 + 64),
    (ops.reduce_scatter(f32(8, 2), ranks=2, rank=1, sizes=(3, 5)), 10, 40),
    (_varlen_back("k"), 2 * (2 * 16 + 8) * 7 * 12, 768 + 896 + 448 + 2 * 384 + 48 + 24 + 896),
]


@pytest.mark.parametrize(("node", "flops", "nbytes"), WORK, ids=[f"{row[0].op}-{i}" for i, row in enumerate(WORK)])
def test_work_is_what_a_hand_computes(node: Tensor, flops: int, nbytes: int) -> None:
    assert op_spec(node.op).work(node) == (flops, nbytes)


def test_every_op_has_a_work_example() -> None:
    assert {row[0].op for row in WORK} == set(registered_ops())


@pytest.mark.parametrize("op", [name for name, spec in registered_ops().items() if spec.inplace])
def test_a_result_that_may_take_its_sources_memory_needs_no_other_row_of_it(op: str) -> None:
    """A kernel works row by row: what it writes in a source's place, no later row may need."""
    checked = 0
    for case in (c for c in all_cases(op) if not c.needs_bytes):
        judged = Judged(case)
        node, values = judged.node, judged.values(np.float64)
        for i, (name, source) in enumerate(node.sources_by_name().items()):
            if name not in op_spec(op).inplace or source.ne != node.ne or source.n_rows < 2:
                continue
            changed = [v if v is None else v.copy() for v in values]
            changed[i][0, 0, 0] = values[i][-1, -1, -1] + 1.0  # type: ignore[index]
            before, after = (REFERENCE64[op](node, *given) for given in (values, changed))
            same = np.isclose(before, after, rtol=0, atol=0, equal_nan=True).reshape(-1, node.ne[0]).all(1)
            assert same[1:].all(), str(case)
            checked += 1
        if checked > 4:
            break
    assert checked, f"no case of {op} shows it"


def test_an_op_that_maps_elements_may_take_its_sources_memory() -> None:
    """Without that each step of a chain needs memory of its own."""
    arithmetic = ("ADD", "SUB", "MUL", "DIV", "SCALE", "CLAMP", "SQR", "SQRT", "FILL", "UNARY", "ADD_ID")
    plain = (*arithmetic, "NORM", "RMS_NORM", "L2_NORM", "SOFT_MAX", "ROPE")
    mapping = {**dict.fromkeys(plain, ("a",)), "GLU": ("gate", "value"), "CROSS_ENTROPY_LOSS_BACK": ("logits",)}
    mapping |= {"PENALIZE": ("logits",), "SEND": ("a",)}
    mapping |= dict.fromkeys(("SILU_BACK", "UNARY_BACK", "RMS_NORM_BACK", "ROPE_BACK", "SOFT_MAX_BACK"), ("d",))
    assert {name: spec.inplace for name, spec in registered_ops().items() if spec.inplace} == mapping


def test_slopes_of_heads_by_hand() -> None:
    """The paper's series for a power of two; for 6 heads that of 4, then every other term of that of 8."""
    assert alibi_slopes(3, 0.0) == [1.0] * 3
    assert alibi_slopes(4, 8.0) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]
    assert alibi_slopes(6, 8.0) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


@pytest.mark.parametrize(
    "params, ramp",
    [
        (RopeParams(8, n_ctx_orig=16, ext_factor=1.0), [1, 0, 0, 0]),  # corners -1.1 and 0.4
        (RopeParams(8, n_ctx_orig=10**5, ext_factor=1.0, beta_fast=1e3), [1, 1, 0.75, 0.5]),  # 1.2 and 4.2
        (RopeParams(8, n_ctx_orig=10**9, ext_factor=0.5, beta_fast=1e6), [0.5, 0.5, 0.5, 0.4]),  # 2.2 and 8.2
    ],
)
def test_yarns_ramp_by_hand(params: RopeParams, ramp: list[float]) -> None:
    assert yarn_ramp(params) == pytest.approx(ramp)
