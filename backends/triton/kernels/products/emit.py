"""The launches of planned MUL_MATs (plan.py): which kernel takes which memory. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.kernels.products import gemm_large
from graphrt.backends.triton.kernels.products.activations import Q8Rows, Rows, quantize_rows
from graphrt.backends.triton.kernels.products.forms import Form, f16_in_place, q8_copy, q8_in_place
from graphrt.backends.triton.kernels.products.gemm_small import mma_launch
from graphrt.backends.triton.kernels.products.gemm_small.portable_launch import packed_product, plain_product
from graphrt.backends.triton.kernels.products.gemv import Segment, gemv
from graphrt.backends.triton.kernels.products.gemv_heads import head_gemv
from graphrt.backends.triton.kernels.products.half import (
    Activations,
    Sums,
    copying,
    finish_in_f16,
    finish_steps,
    in_type,
    rescaling,
)
from graphrt.backends.triton.kernels.products.plan import Made, Part, Planned
from graphrt.backends.triton.kernels.products.product import Product
from graphrt.backends.triton.kernels.products.route import SMALL_MMA
from graphrt.backends.triton.kernels.products.skinny import skinny_steps
from graphrt.backends.triton.launch import Launch, without_early_start
from graphrt.backends.triton.packing import Packed, packing_of
from graphrt.op import made_by
from graphrt.tensor import Tensor


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A product's memory. out: f32 [tokens, m], without gaps; a gate's two have the same. bias: f32 [m].

    place: its number among the products of its group; constant: no kernel writes the weight or the bias."""

    product: Product
    out: torch.Tensor
    bias: torch.Tensor | None
    place: int
    constant: bool

    @property
    def weight(self) -> Tensor:
        return self.product.weight


def product(planned: Planned, ctx: Context) -> list[Step]:
    """The steps of a group's MUL_MATs, with what the group adds to them or joins them by."""
    group = planned.group
    if planned.parts[0].route.kernel.name == "gemv_heads":
        return head_products(planned, ctx.view(group.outs[0]).torch()[0], ctx)
    outs = [_lines(ctx.view(out)) for out in group.outs] * (2 if group.gate else 1)
    matrices: dict[Product, _Matrix] = {}
    for place, (p, out) in enumerate(zip(group.products, outs, strict=True)):
        constant = ctx.is_constant(p.weight) and (p.bias is None or ctx.is_constant(p.bias))
        matrices[p] = _Matrix(p, out, None if p.bias is None else ctx.view(p.bias).data, place, constant)
    residual = None if group.residual is None else _lines(ctx.view(group.residual))
    steps: list[Step] = []
    rest: list[Part] = []
    for part in planned.parts:
        if part.route.kernel.name == "gemv":
            steps += _gemv(part, [matrices[p] for p in part.products], residual, ctx)
        else:
            rest.append(part)
    return steps + (_in_16_bits(planned, rest, matrices, residual, ctx) if rest else [])


def head_products(planned: Planned, out: torch.Tensor, ctx: Context) -> list[Step]:
    """out, f32 [heads, n, m], of the only product of a group: a matrix a head, all but f64 ones without gaps.

    Of x and out elements of a row lie side by side, all else of them may lie anywhere.
    """
    (part,) = planned.parts
    (p,) = part.products
    w, values = p.weight, ctx.view(p.x).torch()[0]
    if part.route.kernel.name == "gemv_heads":
        weight, steps = ctx.packed(w) if p.is_packed else (ctx.view(w).torch()[0], [])
        return append_launch(steps, head_gemv(ctx.target, weight, values, out), ctx.is_constant(w))
    # Rows are rounded in the order in which they lie, a token's heads side by side.
    x, steps = in_type(values.transpose(0, 1)[None], part.route.form.dtype, ctx)
    heads, n, _ = out.shape
    made = each_steps(w, x.values.view(n, heads, x.k).transpose(0, 1), out, ctx)
    return [*steps, *made, *rescaling(out.transpose(0, 1), x.factors)]


# ---- up to 8 tokens ----


def _gemv(part: Part, matrices: Sequence[_Matrix], residual: torch.Tensor | None, ctx: Context) -> list[Step]:
    """One launch for up to three matrices, all packed or all plain."""
    steps: list[Step] = []
    segments: list[Segment] = []
    for matrix in matrices:
        weight: Packed | torch.Tensor
        if matrix.product.is_packed:
            weight, made = ctx.packed(matrix.weight)
            steps += made
        else:
            weight = ctx.view(matrix.weight).torch()[0, 0]
        segments.append(Segment(weight, matrix.out.view(-1), matrix.out.shape[1], matrix.bias))
    given, made = activations_of(part, ctx)
    steps += made
    gate = matrices[0].product.gate
    added = None if residual is None else (residual.view(-1), residual.shape[1])
    launch = gemv(ctx.target, segments, given, glu=gate.kind if gate else "", residual=added)
    return append_launch(steps, launch, all(matrix.constant for matrix in matrices))


def activations_of(part: Part, ctx: Context) -> tuple[Rows | Q8Rows, list[Step]]:
    """The activations of a part as gemv.py's kernels read them, and the launch that makes them so if one has to."""
    x = part.products[0].x
    if part.made in (Made.AS_IT_LIES, Made.INSIDE):
        return rows_of(ctx.view(x)), []
    given = _in_8_bits(part, ctx)
    return given, [quantize_rows(ctx.target, rows_of(ctx.view(x)), given)] if part.made is Made.BEFORE else []


def _in_8_bits(part: Part, ctx: Context) -> Q8Rows:
    """A part's x in 8 bits: what its producer made, or memory for what a launch before makes."""
    x = part.products[0].x
    if part.made is Made.BY_PRODUCER:
        return q8_in_place(x, ctx)
    return q8_copy(made_by(x), ctx) if part.made is Made.IN_COPY else q8_scratch(x, ctx)


def q8_scratch(x: Tensor, ctx: Context) -> Q8Rows:
    """Memory for x's rows in 8 bits until the next product needs it."""
    memory = ctx.shared_scratch("activations in 8 bits", Q8Rows.nbytes(x.n_rows, x.ne[0]))
    return Q8Rows.inside(memory, x.n_rows, x.ne[0])


def rows_of(x: View) -> Rows:
    """Activations as rows at equal distances: all of one matrix, or without gaps."""
    one = x.ne[2] == x.ne[3] == 1
    return Rows(x.data, x.ne[1] * x.ne[2] * x.ne[3], x.ne[0], x.strides[1] if one else x.ne[0], x.strides[0])


def append_launch(steps: list[Step], launch: Launch, constant: bool) -> list[Step]:
    """Steps, then a launch that reads weights and biases before it waits for the step before.

    It may begin before that has ended only if no kernel writes them (constant) and no step packs them.
    """
    packs = any(not isinstance(step, Launch) for step in steps)
    return [*steps, launch if constant and not packs else without_early_start(launch)]


# ---- more tokens, or in 16 bits ----


def _in_16_bits(
    planned: Planned, parts: Sequence[Part], matrices: dict[Product, _Matrix], residual: torch.Tensor | None,
    ctx: Context,
) -> list[Step]:  # fmt: skip
    """Products of f16, bf16 or f32 activations, whichever each of the weights wants."""
    group = planned.group
    gate, steps = group.gate, list[Step]()
    small = {p for part in parts if part.route.kernel.name in SMALL_MMA for p in part.products}
    packed: dict[Product, Packed] = {}
    for p in (p for p in group.products if p in small):
        packed[p], made = ctx.packed(p.weight)
        steps += made
    converted = _Converted(group.products[0], ctx)
    sums: list[Sums] = []
    for part in parts:
        x = converted.get(part.route.form, steps)
        of_part = [matrices[p] for p in part.products]
        if part.route.kernel.name in SMALL_MMA:
            outs = [matrix.out for matrix in of_part][: 1 if gate else None]
            biases = [matrix.bias for matrix in of_part if matrix.bias is not None]
            launch = mma_launch.product([packed[p] for p in part.products], x, outs, ctx, biases, residual, gate)
            steps = append_launch(steps, launch, all(matrix.constant for matrix in of_part))
            continue
        (matrix,) = of_part
        found, made = _Job(matrix, x, residual, ctx, gate is None and residual is None).run(part)
        steps += made
        sums.append(found)
        if gate is None:
            steps += finish_steps(found, matrix.out, matrix.bias, residual)
    if gate is None or not sums:
        return steps
    if planned.stored.form is Form.F16_SCALED:
        return steps + finish_in_f16(sums[0], sums[1], f16_in_place(group.outs[0], Form.F16_SCALED, ctx), gate)
    return steps + finish_steps(sums[0], matrices[group.products[0]].out, b=sums[1], gate=gate)


class _Converted:
    """One x in the forms that its products read, each made once."""

    def __init__(self, p: Product, ctx: Context) -> None:
        self.p = p
        self.ctx = ctx
        self._made: dict[Form, Activations] = {}

    def get(self, form: Form, steps: list[Step]) -> Activations:
        """x in a form; what makes it so is added to the steps."""
        if form not in self._made:
            if self.p.x_form is Form.AS_IS:
                x = self.ctx.view(self.p.x).torch()
                self._made[form], made = in_type(x, form.dtype, self.ctx, form is Form.F16_ORDERED)
                steps += made
            else:
                self._made[form] = f16_in_place(self.p.x, self.p.x_form, self.ctx)
        return self._made[form]


def _lines(view: View) -> torch.Tensor:
    """A tensor without gaps as [rows, ne[0]]."""
    return view.data.view(-1, view.ne[0])


def with_whole_rows(w: Tensor, ctx: Context) -> tuple[View, list[Step]]:
    """Plain weights whose rows' elements lie side by side: a copy, if they don't."""
    view = ctx.view(w)
    if view.strides[0] == 1 or view.ne[0] == 1:
        return view, []
    source = view.torch()
    copy = ctx.scratch(tuple(source.shape), source.dtype)
    s3, s2, s1, s0 = copy.stride()
    return View(w, copy.view(-1), (s0, s1, s2, s3)), [copying(source, copy)]


@dataclass(frozen=True, eq=False)
class _Job:
    """One product by gemm_small/portable.py, skinny.py or gemm_large.py.

    free: out may be written before all is read that the steps read."""

    matrix: _Matrix
    x: Activations
    residual: torch.Tensor | None
    ctx: Context
    free: bool

    @property
    def w(self) -> Tensor:
        return self.matrix.weight

    @property
    def out(self) -> torch.Tensor:
        return self.matrix.out

    def run(self, part: Part) -> tuple[Sums, list[Step]]:
        """The sums, and what makes them."""
        small = part.route.kernel.name == "gemm_small"
        if part.route.kernel.name == "gemm_skinny":
            w = self.ctx.view(self.w).torch()[0, 0]
            done = Sums(self.out[None], complete=True)
            return done, skinny_steps(self.x.values, w.t(), self.out, self.ctx, self.residual)
        if part.route.kernel.name == "gemm_large_each":
            sums, x, out = self._lines()
            return sums, each_steps(self.w, x, out, self.ctx)
        if self.matrix.product.is_packed:
            packed, steps = self.ctx.packed(self.w)
            sums, made = self._small_packed(packed) if small else self._large_packed(packed)
            return sums, steps + made
        return self._small_plain() if small else self._large_plain()

    def _small_packed(self, packed: Packed) -> tuple[Sums, list[Step]]:
        target = self.out if self.free or self.residual is not None else self._own()
        m, bias, place, b = self.w.ne[1], self.matrix.bias, self.matrix.place, self.matrix.product.broadcast
        return packed_product(packed, m, self.x, b, target, bias, self.residual, self.ctx, place)

    def _small_plain(self) -> tuple[Sums, list[Step]]:
        view, steps = with_whole_rows(self.w, self.ctx)
        target = self.out if self.free or self.residual is not None else self._own()
        bias, place, b = self.matrix.bias, self.matrix.place, self.matrix.product.broadcast
        sums, made = plain_product(view, self.x, b, target, bias, self.residual, self.ctx, place)
        return sums, steps + made

    def _large_packed(self, packed: Packed) -> tuple[Sums, list[Step]]:
        m = self.w.ne[1]
        return self._each(lambda i, x, out: gemm_large.packed_steps(packed, i * m, m, x, out, self.ctx))

    def _large_plain(self) -> tuple[Sums, list[Step]]:
        matrices = self.ctx.view(self.w).torch()
        kind = self.x.values.dtype

        def steps(i: int, x: torch.Tensor, out: torch.Tensor) -> list[Step]:
            return [gemm_large.multiply_as_step(kind, x, matrices[divmod(i, self.w.ne[2])], out)]

        return self._each(steps)

    def _each(self, steps: Callable[[int, torch.Tensor, torch.Tensor], list[Step]]) -> tuple[Sums, list[Step]]:
        """One product a matrix. steps(matrix, its x, its part of the sums) makes them."""
        b, (sums, x, out) = self.matrix.product.broadcast, self._lines()
        found: list[Step] = []
        for i in range(b.count):
            matrix = i // b.matrices2 // b.ratio3 * b.matrices2 + i % b.matrices2
            found += steps(matrix, x[i], out[i])
        return sums, found

    def _lines(self) -> tuple[Sums, torch.Tensor, torch.Tensor]:
        """The sums, x as [count, tokens, k], and the sums' memory as [count, tokens, m]."""
        out, b = self.out if self.free else self._own(), self.matrix.product.broadcast
        shape = (b.count, b.tokens, -1)
        complete = self.free and self.x.factors is None and self.matrix.bias is None
        sums = Sums(out[None], self.x.factors, complete)
        return sums, self.x.values.view(shape), out.view(shape)

    def _own(self) -> torch.Tensor:
        """Memory like out's, for sums that are not the result yet."""
        nbytes = self.out.numel() * 4
        memory = self.ctx.shared_scratch(f"sums {self.matrix.place}", nbytes)[:nbytes]
        return memory.view(torch.float32).view(self.out.shape)


def each_steps(w: Tensor, x: torch.Tensor, out: torch.Tensor, ctx: Context) -> list[Step]:
    """w's matrices, which lie one after the other, each times its own of x, [count, n, k] in the type that they are
    multiplied in, to out, f32 [count, n, m]. Of x and out elements of a row lie side by side."""
    if packing_of(w.dtype.name) is not None:
        packed, steps = ctx.packed(w)
        return [*steps, *gemm_large.packed_each_steps(packed, w.ne[1], x, out, ctx)]
    return [gemm_large.multiply_each_step(x, _in_a_row(ctx.view(w).torch()), out)]


def _in_a_row(t: torch.Tensor) -> torch.Tensor:
    """Matrices [a3, a2, rows, ...] that lie one after the other as [a3 * a2, rows, ...] in the same memory."""
    if t.shape[1] == 1:
        return t[:, 0]
    assert t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1)
    return t.flatten(0, 1)
