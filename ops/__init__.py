"""The ops: importing this package registers every one of them. Each function builds a node and computes nothing."""

from graphrt.op import register_cases_module
from graphrt.ops.view import permute, reshape, transpose, view

# isort: split
# Ops are listed in the order in which they are registered here: views come first.
from graphrt.ops.copy import concat, cont, cpy, dup, repeat
from graphrt.ops.elementwise import add, clamp, div, fill, mul, scale, sqr, sqrt, sub
from graphrt.ops.flash_attn_ext import FlashAttnParams, flash_attn_ext, flash_attn_lse
from graphrt.ops.flash_attn_varlen import FlashAttnVarlenParams, flash_attn_varlen, flash_attn_varlen_lse
from graphrt.ops.kq_mask import kq_mask
from graphrt.ops.mul_mat import mul_mat
from graphrt.ops.mul_mat_id import add_id, mul_mat_id
from graphrt.ops.norm import l2_norm, norm, rms_norm, sum_rows
from graphrt.ops.rope import RopeParams, rope
from graphrt.ops.rows import get_rows, set_rows
from graphrt.ops.sample import SampleParams, sample
from graphrt.ops.soft_max import soft_max
from graphrt.ops.sort import argmax, argsort, top_k
from graphrt.ops.unary import glu, unary

__all__ = [
    "FlashAttnParams", "FlashAttnVarlenParams", "RopeParams", "SampleParams", "add", "add_id", "argmax",
    "argsort", "clamp", "concat", "cont", "cpy", "div", "dup", "fill", "flash_attn_ext", "flash_attn_lse",
    "flash_attn_varlen", "flash_attn_varlen_lse", "get_rows", "glu", "kq_mask", "l2_norm", "mul", "mul_mat",
    "mul_mat_id", "norm", "permute", "repeat", "reshape", "rms_norm", "rope", "sample", "scale", "set_rows",
    "soft_max", "sqr", "sqrt", "sub", "sum_rows", "top_k", "transpose", "unary", "view",
]  # fmt: skip

register_cases_module("graphrt.ops.cases")
