"""Scales of k and v, of a whole tensor or of each head, and as products beside an attention without sources for them:
q.k times k_scale is (q times k_scale).k, and a sum of values times v_scale is what the result is multiplied by.
"""

from __future__ import annotations

from graphrt.dtypes import F32
from graphrt.op import require
from graphrt.ops.copy import cont
from graphrt.ops.elementwise import mul
from graphrt.ops.view import reshape, view
from graphrt.tensor import Tensor


def check_scale(op: str, name: str, scale: Tensor, n_head_kv: int) -> int:
    """How many values a scale of k or v has: one, or one a head. Raises GraphError."""
    fits = scale.dtype is F32 and scale.is_contiguous and scale.n_elements in (1, n_head_kv)
    require(fits, op, f"{name} must be f32, contiguous, with one value or one a head of v, {n_head_kv}", scale)
    return scale.n_elements


def scale_queries(op: str, q: Tensor, k_scale: Tensor, n_head_kv: int) -> Tensor:
    """q, [D, n_tokens, n_head], times k_scale's one value, or that of each head's KV head. Raises GraphError."""
    n, (d, tokens, heads, _) = check_scale(op, "k_scale", k_scale, n_head_kv), q.ne
    require(heads % n_head_kv == 0, op, "the heads of k must divide the heads of q", q)
    q = q if q.has_contiguous_rows else cont(q)
    group = heads // n_head_kv
    apart = view(q, (d, tokens, group, n_head_kv), (q.nb[1], q.nb[2], group * q.nb[2]))
    return reshape(mul(apart, reshape(k_scale, 1, 1, 1, n)), d, tokens, heads)


def scale_result(op: str, out: Tensor, v_scale: Tensor, n_head_kv: int, name: str = "") -> Tensor:
    """An attention's result, [D, n_head, n_tokens], times v_scale, likewise. Raises GraphError."""
    n, (d, heads, tokens, _) = check_scale(op, "v_scale", v_scale, n_head_kv), out.ne
    apart = reshape(out, d, heads // n_head_kv, n_head_kv, tokens)
    return reshape(mul(apart, reshape(v_scale, 1, 1, n, 1)), d, heads, tokens, name=name)
