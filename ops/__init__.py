"""The ops: importing this package registers every one of them. Each function builds a node and computes nothing."""

from graphrt.op import register_cases_module
from graphrt.ops.view import permute, reshape, transpose, view

# isort: split
# Ops are listed in the order in which they are registered here: views come first.
from graphrt.ops.collectives import all_gather, all_reduce, reduce_scatter
from graphrt.ops.copy import concat, cont, cpy, dup, repeat
from graphrt.ops.cross_entropy import cross_entropy_loss, cross_entropy_loss_back
from graphrt.ops.elementwise import add, clamp, div, fill, mul, scale, sqr, sqrt, sub
from graphrt.ops.flash_attn_back import flash_attn_back, flash_attn_varlen_back
from graphrt.ops.flash_attn_ext import FlashAttnParams, flash_attn_ext, flash_attn_lse
from graphrt.ops.flash_attn_varlen import FlashAttnVarlenParams, flash_attn_varlen, flash_attn_varlen_lse
from graphrt.ops.kq_mask import kq_mask
from graphrt.ops.math_back import rms_norm_back, rope_back, silu_back, soft_max_back, unary_back
from graphrt.ops.movement_back import get_rows_back, repeat_back, set_rows_back, view_back
from graphrt.ops.mul_mat import mul_mat
from graphrt.ops.mul_mat_id import add_id, mul_mat_id
from graphrt.ops.norm import l2_norm, norm, rms_norm, sum_rows
from graphrt.ops.opt_step import opt_step_adamw, opt_step_sgd
from graphrt.ops.out_prod import mul_mat_id_back, out_prod, out_prod_id
from graphrt.ops.rope import RopeParams, rope
from graphrt.ops.rows import get_rows, set_rows
from graphrt.ops.sample import SampleParams, sample
from graphrt.ops.sample_each import RowSettings, penalize, sample_each
from graphrt.ops.send_recv import recv, send
from graphrt.ops.soft_max import soft_max
from graphrt.ops.sort import argmax, argsort, top_k
from graphrt.ops.unary import glu, unary

__all__ = [
    "FlashAttnParams", "FlashAttnVarlenParams", "RopeParams", "RowSettings", "SampleParams", "add", "add_id",
    "all_gather", "all_reduce", "argmax", "argsort", "clamp", "concat", "cont", "cpy", "cross_entropy_loss",
    "cross_entropy_loss_back", "div", "dup", "fill", "flash_attn_back", "flash_attn_ext", "flash_attn_lse",
    "flash_attn_varlen", "flash_attn_varlen_back", "flash_attn_varlen_lse", "get_rows", "get_rows_back", "glu",
    "kq_mask", "l2_norm", "mul", "mul_mat", "mul_mat_id", "mul_mat_id_back", "norm", "opt_step_adamw", "opt_step_sgd",
    "out_prod", "out_prod_id", "penalize", "permute", "recv", "reduce_scatter", "repeat", "repeat_back", "reshape",
    "rms_norm", "rms_norm_back", "rope", "rope_back", "sample", "sample_each", "scale", "send", "set_rows",
    "set_rows_back", "silu_back", "soft_max", "soft_max_back", "sqr", "sqrt", "sub", "sum_rows", "top_k", "transpose",
    "unary", "unary_back", "view", "view_back",
]  # fmt: skip

register_cases_module("graphrt.ops.cases")
import graphrt.ops.backward  # noqa: E402, F401  (their rules for gradients)
