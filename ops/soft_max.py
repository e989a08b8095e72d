"""SOFT_MAX over ne[0], with scale, mask, ALiBi and sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, elementwise_work, register, require
from graphrt.tensor import Tensor


def alibi_slopes(n_head: int, max_bias: float) -> list[float]:
    """The slope of each head: 1 without ALiBi, else the geometric series of the ALiBi paper (arXiv 2108.12409).

    Where the number of heads is no power of two, the heads beyond the largest power of two in it take every other term
    of the series for twice that power.
    """
    if max_bias <= 0.0:
        return [1.0] * n_head
    n2 = 1 << (n_head.bit_length() - 1)
    m0, m1 = 2.0 ** (-max_bias / n2), 2.0 ** (-max_bias / 2 / n2)
    return [m0 ** (h + 1) if h < n2 else m1 ** (2 * (h - n2) + 1) for h in range(n_head)]


@dataclass(frozen=True)
class SoftMaxParams:
    """scale: factor on the logits; max_bias: ALiBi's, 0 without."""

    scale: float = 1.0
    max_bias: float = 0.0


def _infer(params: SoftMaxParams, a: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Result:
    op = "SOFT_MAX"
    require(a.dtype.name == "f32", op, "the source must be f32", a)
    require(math.isfinite(params.scale), op, f"the scale must be finite, got {params.scale}")
    sane = 0 <= params.max_bias < math.inf
    require(sane, op, f"max_bias must be finite and not negative, got {params.max_bias}")
    if mask is not None:
        require(mask.dtype.name in ("f16", "f32"), op, "the mask must be f16 or f32", mask)
        fits = mask.ne[0] == a.ne[0] and mask.ne[1] >= a.ne[1]
        require(fits, op, "the mask must have the source's ne[0] and at least its ne[1]", a, mask)
        divides = a.ne[2] % mask.ne[2] == 0 and a.ne[3] % mask.ne[3] == 0
        require(divides, op, "dimensions 2 and 3 of the mask must divide the source's", a, mask)
    require(params.max_bias == 0 or mask is not None, op, "ALiBi (max_bias over 0) needs a mask", a)
    if sinks is not None:
        fits = sinks.dtype.name == "f32" and sinks.n_elements == a.ne[2]
        require(fits, op, "sinks must be f32 with one value for each of dimension 2", a, sinks)
    return Result(a.dtype, a.ne)


SOFT_MAX = register(
    OpSpec(
        "SOFT_MAX", _infer, elementwise_work(5), ("a", "mask?", "sinks?"), params=SoftMaxParams, inplace=("a",)
    )
)  # fmt: skip


@checked(GraphError)
def soft_max(
    a: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None, scale: float = 1.0, max_bias: float = 0.0,
    name: str = "",
) -> Tensor:  # fmt: skip
    """Softmax over ne[0]: result = exp(x) / (sum(exp(x)) + exp(sink)) with x = a * scale + slope(head) * mask.

    a: f32 [n, n_q, n_head, n_seq], whose type and shape the result has; mask: f16 or f32 [n, >= n_q, m2, m3], m2 and m3
    dividing n_head and n_seq, or None; sinks: f32 [n_head], or None for no sink; scale: a number; max_bias: ALiBi's,
    from which alibi_slopes() makes each head's slope, 0 for a slope of 1. !! A row with every logit at -inf gives 0, as
    FLASH_ATTN_EXT does, not ggml's NaN. Source: ggml_soft_max_ext and ggml_soft_max_add_sinks; ALiBi from arXiv
    2108.12409. Raises GraphError for other types and shapes, for ALiBi without a mask, and for numbers that are not
    finite.
    """
    return build(SOFT_MAX, a, mask, sinks, params=SoftMaxParams(float(scale), float(max_bias)), name=name)
