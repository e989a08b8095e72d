"""Scales of an attention's k, v and result: two launches around the attention without them.

Scores are times k_scale, so q is multiplied by it before; sums of values are times v_scale, so the result is after,
where it is divided by out_scale and rounded to its type too. Any kernel may so serve the attention between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from graphrt.backend import Place, Usage
from graphrt.backends.triton.accesses import accesses
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.common.float8 import float8_codes, float8_values, is_float8
from graphrt.backends.triton.kernels.flash_attn.fusions import Attention, attention_of
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer, elements
from graphrt.dtypes import F32
from graphrt.op import build
from graphrt.ops.flash_attn_ext import FLASH_ATTN_EXT
from graphrt.tensor import Tensor

_ROWS, _COLUMNS = 4, 128


@accesses(reads="p_x p_scale", writes="p_y")
@triton.jit(do_not_specialize=["n_rows", "n_head", "n_tokens", "group"])
def attention_scale_heads(
    p_x, p_scale, p_y, n_rows, n_head, n_tokens, group, sx_h, sx_t, sx_s, sy_h, sy_t, sy_s, divisor,
    D: tl.constexpr, HAS_SCALE: tl.constexpr, X_KIND: tl.constexpr, Y_KIND: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """y = x * scale / divisor, rows of D of (sequence, token, head), each with strides of its own.

    scale: f32, of head h the h // group-th; kinds: f32, or a float of 8 bits as codes.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < n_rows) & (column < D)
    head = row % n_head
    token = row // n_head % n_tokens
    seq = (row // n_head // n_tokens).to(tl.int64)
    x = tl.load(p_x + (seq * sx_s + token * sx_t + head * sx_h + column), mask=mask, other=0)
    if is_float8(X_KIND):
        x = float8_values(x, X_KIND, PTX)
    x = x.to(tl.float32)
    if HAS_SCALE:
        x = x * tl.load(p_scale + head // group, mask=row < n_rows, other=0.0)
    x = x / divisor
    if is_float8(Y_KIND):
        x = float8_codes(x, Y_KIND)
    tl.store(p_y + (seq * sy_s + token * sy_t + head * sy_h + column), x, mask=mask)


def _launch(
    x: Tensor, y: Tensor, heads: int, scale: Tensor | None, divisor: float, n_kv_head: int,
    place: Callable[[Tensor], Place], target: Target,
) -> Launch:  # fmt: skip
    """x times scale over divisor to y, of one shape. heads: the dimension that numbers heads, 1 or 2, the other tokens.
    n_kv_head: heads that scale would have one value each for."""

    def memory(t: Tensor) -> torch.Tensor:
        return elements(*place(t), t, torch.uint8 if t.dtype.is_float8 else torch.float32)

    def strides(t: Tensor) -> tuple[int, int, int]:
        units = [n // t.dtype.type_size for n in t.nb]
        return units[heads], units[3 - heads], units[3]

    (xh, xt, xs), (yh, yt, ys) = strides(x), strides(y)
    n_head, d = x.ne[heads], x.ne[0]
    group = n_head // n_kv_head if scale is None or scale.n_elements > 1 else n_head
    args: dict[str, Any] = {
        "p_x": memory(x), "p_scale": memory(scale) if scale is not None else memory(x), "p_y": memory(y),
        "n_rows": x.n_rows, "n_head": n_head, "n_tokens": x.ne[3 - heads], "group": group,
        "sx_h": xh, "sx_t": xt, "sx_s": xs, "sy_h": yh, "sy_t": yt, "sy_s": ys, "divisor": divisor, "D": d,
        "HAS_SCALE": scale is not None, "X_KIND": x.dtype.name, "Y_KIND": y.dtype.name, "ROWS": _ROWS,
        "COLUMNS": _COLUMNS, "PTX": int(target.arch[3:]) if target.is_nvidia else 0,
    }  # fmt: skip
    grid = (-(-x.n_rows // _ROWS), -(-d // _COLUMNS))
    return Launch(attention_scale_heads, grid, args, {"num_warps": 4})


class ScaledAttention:
    """An attention as one without scales between two launches. inner: that; place: where its tensors lie; before,
    after: the launches. memory: gives f32 on the device, n of them."""

    def __init__(
        self, node: Tensor, place: Callable[[Tensor], Place], memory: Callable[[int], torch.Tensor], target: Target
    ) -> None:
        q, k_scale, v_scale = node["q"], node["k_scale"], node["v_scale"]
        own: dict[Tensor, Place] = {}
        scaled_q = q if k_scale is None else Tensor(F32, q.ne)
        params = replace(node.params, out_type="f32", out_scale=1.0)
        others = (node[name] for name in ("k", "v", "mask", "sinks", "attn_bias"))
        plain = build(FLASH_ATTN_EXT, scaled_q, *others, None, None, params=params)
        n_q = scaled_q.n_elements if k_scale is not None else 0
        room = memory(n_q + plain.n_elements).view(torch.uint8)
        own[plain] = TritonBuffer(room[4 * n_q :], Usage.COMPUTE), 0
        if k_scale is not None:
            own[scaled_q] = TritonBuffer(room, Usage.COMPUTE), 0

        def found(t: Tensor) -> Place:
            return own[t] if t in own else place(t)

        self.place = found
        self.inner: Attention = attention_of(plain)
        n_kv_head = node["v"].ne[2]
        self.before = [_launch(q, scaled_q, 2, k_scale, 1.0, n_kv_head, found, target)] if k_scale is not None else []
        self.after = [_launch(plain, node, 1, v_scale, node.params.out_scale, n_kv_head, found, target)]
