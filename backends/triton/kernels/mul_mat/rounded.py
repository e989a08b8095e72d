"""Products of few tokens whose activations are rounded to 8 bits, or for plain weights not at all: gemv.py's launches."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.kernels.mul_mat.activations import Activations, Rows, quantize_rows
from graphrt.backends.triton.kernels.mul_mat.gemv import MAX_INLINE, MAX_TOKENS, Segment, gemv
from graphrt.backends.triton.packing import packing_of
from graphrt.tensor import Tensor

#: Activations are rounded by each program anew for at most so many tokens; for more a launch before is cheaper.
INLINE_TOKENS = 2
_PLAIN = ("f32", "f16", "bf16")


def can_round(weights: Sequence[Tensor], x: Tensor, ctx: Context) -> bool:
    """Whether rounded_product() may serve: few tokens of one matrix each, contiguous, and no exact results asked."""
    if ctx.exact or x.dtype.name != "f32" or not x.is_contiguous or x.ne[0] % 32 or x.n_rows > MAX_TOKENS:
        return False
    packed = all(packing_of(w.dtype.name) is not None for w in weights)
    plain = all(w.dtype.name in _PLAIN for w in weights)
    flat = all(w.is_contiguous and w.ne[2] == w.ne[3] == 1 and w.ne[1] > 1 for w in weights)
    return (packed or plain) and flat and x.ne[2] == x.ne[3] == 1


def rounded_product(
    weights: Sequence[Tensor], x: Tensor, outs: Sequence[Tensor], ctx: Context, *, glu: str = "",
    residual: Tensor | None = None, norm: tuple[View, View, float] | None = None,
) -> list[Step]:  # fmt: skip
    """One launch for up to three weights of one x; see gemv(). outs: for each weight, with glu one for both.

    norm: (source, weights, eps) of the RMS norm that makes x, which then has no memory of its own.
    """
    steps: list[Step] = []
    segments = []
    for i, w in enumerate(weights):
        out = ctx.view(outs[0 if glu else i])
        weight, made = ctx.packed(w) if packing_of(w.dtype.name) is not None else (_matrix(ctx.view(w)), [])
        steps += made
        segments.append(Segment(weight, out.data, w.ne[1]))
    given, made = _activations(x, ctx, norm, packing_of(weights[0].dtype.name) is not None)
    added = None if residual is None else (ctx.view(residual).data, residual.ne[0])
    weights_of_norm = None if norm is None else (norm[1].data, norm[2])
    return [*steps, *made, gemv(ctx.target, segments, given, glu=glu, residual=added, norm=weights_of_norm)]


def _matrix(view: View):  # type: ignore[no-untyped-def]
    return view.data.view(view.ne[1], view.ne[0])


def rows_of(view: View) -> Rows:
    """A tensor's rows, of all its dimensions, as they lie side by side."""
    return Rows(view.data, view.tensor.n_rows, view.ne[0], view.ne[0])


def _activations(
    x: Tensor, ctx: Context, norm: tuple[View, View, float] | None, packed: bool
) -> tuple[Activations | Rows, list[Step]]:
    if x in ctx.rounded:
        return ctx.rounded[x], []
    rows = rows_of(ctx.view(x) if norm is None else norm[0])
    if norm is not None or not packed or (rows.k <= MAX_INLINE and rows.n <= INLINE_TOKENS):
        return rows, []
    memory = ctx.shared_scratch("activations", Activations.nbytes(rows.n, rows.k) + 16)
    found = Activations.inside(memory, rows.n, rows.k)
    return found, [quantize_rows(ctx.target, rows, found)]
