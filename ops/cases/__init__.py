"""Conformance cases of the ops, a module for each of their files: importing this package registers all of them.

graphrt.testing.all_cases() imports it; nothing that builds or runs a graph does.
"""

from graphrt.ops.cases import (  # noqa: F401  (each registers the cases of its ops)
    copy,
    elementwise,
    flash_attn,
    flash_attn_ggml,
    kq_mask,
    mul_mat,
    mul_mat_id,
    norm,
    rope,
    rows,
    sample,
    soft_max,
    sort,
    unary,
    view,
)
