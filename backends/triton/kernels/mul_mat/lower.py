"""MUL_MAT: which of the ways a product takes, by type and number of tokens, and its steps.

gemv.py: few tokens times packed weights, activations rounded to 8 bits, of short rows in two parts; never if results
are to be exact. heads.py: the same of a matrix a head.
batch_mma.py, batch_wgmma.py, batch.py: up to 64 tokens in 16 bits times most packed types, on NVIDIA. gemm.py, few.py:
the same for the others and elsewhere; all dequantize weights on their way. dense.py: many tokens, weights dequantized
before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from graphrt.backends.triton.context import Context, Step, View
from graphrt.backends.triton.kernels.dequantize_rare import RARE_TYPES, dequantize_rare
from graphrt.backends.triton.kernels.mul_mat import batch, dense, few
from graphrt.backends.triton.kernels.mul_mat.activations import GLU_KINDS, Activations, Rows, quantize_rows
from graphrt.backends.triton.kernels.mul_mat.batch_arguments import MAX_SEGMENTS
from graphrt.backends.triton.kernels.mul_mat.few import Batch
from graphrt.backends.triton.kernels.mul_mat.gemv import MAX_ALONE, MAX_INLINE, MAX_TOKENS, Segment, gemv
from graphrt.backends.triton.kernels.mul_mat.half import (
    Gate,
    Half,
    Sums,
    as_half,
    as_it_was,
    copying,
    finish_as_half,
    finish_steps,
    rescaling,
)
from graphrt.backends.triton.kernels.mul_mat.heads import head_gemv
from graphrt.backends.triton.kernels.rows import block_rows
from graphrt.backends.triton.launch import Launch, in_turn
from graphrt.backends.triton.nodes import looked_at
from graphrt.backends.triton.packing import Packed, PackedBuffer, packing_of
from graphrt.tensor import Tensor

#: Up to so many tokens a product takes gemm.py, by the kind of its weights.
GEMM_TOKENS = {"packed": 64, "plain": 64, "f32": 8}

#: gemv.py rounds activations in each of its programs for at most so many tokens; a launch before is cheaper for more.
INLINE_TOKENS = 2
#: Of one token it rounds rows of more than MAX_ALONE elements too, where all programs together (of four rows each) have
#: so little to round that it costs less than a launch: half a microsecond on an H100 at most.
INLINE_WORK = 1 << 20
#: Weights that gemv.py takes in one launch.
_SEGMENTS = 3

#: Types of weights that are multiplied as they are.
PLAIN = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def batch_of(w: Tensor, x_ne: Sequence[int]) -> Batch:
    """Which matrix of the weights serves which tokens, with as many tokens together as can be."""
    (n, b2, b3), (a2, a3) = x_ne[1:], w.ne[2:]
    if a2 == 1 and a3 == 1:
        return Batch(n * b2 * b3)
    if a2 == 1:
        return Batch(b3 // a3 * b2 * n, a3)
    return Batch(b2 // a2 * n, a2 * b3, a2, b3 // a3)


def half_type(w: Tensor) -> torch.dtype:
    """The type of activations that weights are multiplied with, but by gemv.py."""
    return torch.float32 if w.dtype.name == "f64" else PLAIN.get(w.dtype.name, torch.float16)


def takes_gemm(w: Tensor, tokens: int) -> bool:
    kind = "f32" if w.dtype.name == "f32" else "plain" if w.dtype.name in PLAIN else "packed"
    known = kind != "packed" or packing_of(w.dtype.name) is not None
    return known and tokens <= GEMM_TOKENS[kind]


Prepared = Half | Activations


@dataclass(frozen=True, eq=False)
class _Matrix:
    """One of a product's matrices. out: f32 [tokens, m], without gaps; a gate's two have the same. bias: f32 [m].

    constant: no kernel writes the weight or the bias."""

    weight: Tensor
    out: torch.Tensor
    bias: torch.Tensor | None
    constant: bool

    @property
    def kind(self) -> str:
        return self.weight.dtype.name

    @property
    def is_plain(self) -> bool:
        return packing_of(self.kind) is None


def product(
    weights: Sequence[Tensor], x: Tensor | Prepared, outs: Sequence[Tensor], ctx: Context, *,
    biases: Sequence[Tensor | None] = (), residual: Tensor | None = None, gate: Gate | None = None,
    rounded: bool = False,
) -> list[Step]:  # fmt: skip
    """Products of one x with some weights.

    x: f32 or f16; or, prepared for all of the weights, f16 [tokens, k], or 8 bits where takes_gemv() says so. outs: for
    each weight f32 [m, tokens...], without gaps; with a gate there are two weights and one out,
    activation(weights[0] x) * (weights[1] x). biases: without a gate, for each weight f32 [m] that no kernel writes, or
    None. residual: is added to the only out, of its shape, f32 without gaps; its memory may be out's. rounded: of a
    gate's out only products with packed weights are made; it may hold what they take, which ctx.rounded then has.
    """
    if isinstance(x, Tensor):
        x = ctx.rounded.get(x, x)
    assert not biases or (gate is None and len(biases) == len(weights))
    targets = [_lines(ctx.view(out)) for out in outs] * (2 if gate else 1)
    given = biases or [None] * len(weights)
    rows = [None if b is None else ctx.view(b).data for b in given]
    constant = [ctx.is_constant(w) and (b is None or ctx.is_constant(b)) for w, b in zip(weights, given)]
    matrices = [_Matrix(*parts) for parts in zip(weights, targets, rows, constant, strict=True)]
    added = None if residual is None else _lines(ctx.view(residual))
    if gate is not None:
        if all(takes_gemv(w, x, ctx) for w in weights) and _may_share(matrices, gate):
            return _gemv(matrices, x, ctx, added, gate)
        return _in_16_bits(matrices, x, ctx, added, gate, outs[0] if rounded else None)
    steps: list[Step] = []
    rest: list[_Matrix] = []
    together: dict[bool, list[_Matrix]] = {}
    for matrix in matrices:
        few = takes_gemv(matrix.weight, x, ctx)
        (together.setdefault(matrix.is_plain, []) if few else rest).append(matrix)
    for found in together.values():
        for first in range(0, len(found), _SEGMENTS):
            steps += _gemv(found[first : first + _SEGMENTS], x, ctx, added, None)
    if rest:
        steps += _in_16_bits(rest, x, ctx, added, None)
    return steps


class Exactness(Protocol):
    """What says whether results are to be exact: a Context, or the backend."""

    @property
    def exact(self) -> bool: ...


def takes_gemv(w: Tensor, x: Tensor | Prepared, ctx: Exactness) -> bool:
    """Whether a product takes gemv.py: plain weights times f32 x as they are, packed ones unless exact."""
    if isinstance(x, Activations):
        return True
    if isinstance(x, Half):
        return False
    batch = batch_of(w, x.ne)
    if batch.count > 1 or batch.tokens > MAX_TOKENS or not (x.is_contiguous or x.ne[2] == x.ne[3] == 1):
        return False
    if w.dtype.name in PLAIN:
        return x.dtype.name == "f32" and x.has_contiguous_rows and w.has_contiguous_rows
    return packing_of(w.dtype.name) is not None and not ctx.exact


def takes_head_gemv(w: Tensor, x: Tensor, ctx: Exactness) -> bool:
    """Whether a product of a matrix a head takes heads.py: plain weights times f32 x as they are, packed ones of short

    rows unless exact."""
    of_heads = w.ne[2] > 1 and w.ne[3] == 1 and x.ne[2:] == w.ne[2:] and x.ne[1] <= MAX_TOKENS
    if not of_heads or x.dtype.name != "f32" or not x.has_contiguous_rows:
        return False
    if w.dtype.name in PLAIN:
        return w.has_contiguous_rows
    return packing_of(w.dtype.name) is not None and w.ne[0] <= MAX_INLINE and not ctx.exact


def head_products(w: Tensor, x: Tensor, out: torch.Tensor, ctx: Context) -> list[Step]:
    """out, f32 [heads, n, m], of matrices w [k, m, heads] and x, f32 [k, n, heads]; all but f64 weights without gaps.

    Of x and out elements of a row lie side by side, all else of them may lie anywhere.
    """
    values = ctx.view(x).torch()[0]
    if takes_head_gemv(w, x, ctx):
        if packing_of(w.dtype.name) is None:
            return _then([], head_gemv(ctx.target, ctx.view(w).torch()[0], values, out), ctx.is_constant(w))
        packed, steps = ctx.packed(w)
        return _then(steps, head_gemv(ctx.target, packed, values, out), ctx.is_constant(w))
    # Rows are rounded in the order in which they lie, a token's heads side by side.
    half, steps = as_half(values.transpose(0, 1)[None], half_type(w), ctx)
    heads, n, _ = out.shape
    made = each_steps(w, half.values.view(n, heads, half.k).transpose(0, 1), out, ctx)
    assert made is not None
    return [*steps, *made, *rescaling(out.transpose(0, 1), half.factors)]


def _may_share(matrices: Sequence[_Matrix], gate: Gate) -> bool:
    """gemv.py takes both of a gate's matrices in one launch: all packed or all plain."""
    return gate.kind in GLU_KINDS and len({matrix.is_plain for matrix in matrices}) == 1


def _gemv(
    matrices: Sequence[_Matrix], x: Tensor | Prepared, ctx: Context, residual: torch.Tensor | None, gate: Gate | None
) -> list[Step]:
    """One launch for up to three matrices, all packed or all plain."""
    steps: list[Step] = []
    segments: list[Segment] = []
    for matrix in matrices:
        weight: Packed | torch.Tensor
        if matrix.is_plain:
            weight = ctx.view(matrix.weight).torch()[0, 0]
        else:
            weight, made = ctx.packed(matrix.weight)
            steps += made
        segments.append(Segment(weight, matrix.out.view(-1), matrix.out.shape[1], matrix.bias))
    assert not isinstance(x, Half)
    if isinstance(x, Tensor):
        rows = _rows(ctx.view(x))
        before = None if matrices[0].is_plain else rounded_before(x, ctx)
        x_form: Activations | Rows = before or rows
        inside = matrices[0].is_plain or _rounds_inside([matrix.weight for matrix in matrices], x, rows, gate)
        if before is None and not inside:
            memory = ctx.shared_scratch("activations in 8 bits", Activations.nbytes(rows.n, rows.k))
            x_form = Activations.inside(memory, rows.n, rows.k)
            steps.append(quantize_rows(ctx.target, rows, x_form))
    else:
        x_form = x
    added = None if residual is None else (residual.view(-1), residual.shape[1])
    kind = gate.kind if gate else ""
    launch = gemv(ctx.target, segments, x_form, glu=kind, residual=added)
    return _then(steps, launch, all(matrix.constant for matrix in matrices))


def _then(steps: list[Step], launch: Launch, constant: bool) -> list[Step]:
    """Steps, and a launch that reads weights and biases first of all: before the last step has ended only if no kernel

    writes them (constant)."""
    packs = any(not isinstance(step, Launch) for step in steps)
    return [*steps, launch if constant and not packs else in_turn(launch)]


def rounded_before(x: Tensor, ctx: Context) -> Activations | None:
    """x in 8 bits, if the launch that made it in f32 wrote that too."""
    whole = looked_at(x)
    found: Activations | None = ctx.beside.get(whole)
    return found if found is not None and has_rows_of(x, whole) else None


def has_rows_of(x: Tensor, whole: Tensor) -> bool:
    """x is a tensor without gaps, or a view of all of it that has the same rows in the same order."""
    return x is whole or (x.is_contiguous and x.ne[0] == whole.ne[0] and x.n_elements == whole.n_elements)


def _rounds_inside(weights: Sequence[Tensor], x: Tensor, rows: Rows, gate: Gate | None) -> bool:
    """Whether gemv.py's programs round x themselves."""
    if x.dtype.name != "f32" or rows.stride != 1 or rows.n > INLINE_TOKENS:
        return False
    if rows.k <= MAX_ALONE:
        return True
    programs = sum(-(-w.ne[1] // 4) for w in weights[: 1 if gate else None])
    return rows.n == 1 and rows.k <= MAX_INLINE and programs * rows.k <= INLINE_WORK


def _rows(x: View) -> Rows:
    """Activations as rows at equal distances: all of one matrix, or without gaps."""
    one = x.ne[2] == x.ne[3] == 1
    return Rows(x.data, x.ne[1] * x.ne[2] * x.ne[3], x.ne[0], x.strides[1] if one else x.ne[0], x.strides[0])


def _in_16_bits(
    matrices: Sequence[_Matrix], x: Tensor | Prepared, ctx: Context, residual: torch.Tensor | None, gate: Gate | None,
    rounded: Tensor | None = None,
) -> list[Step]:  # fmt: skip
    """Products of f16, bf16 or f32 activations, whichever each of the weights wants. rounded: see product()."""
    assert not isinstance(x, Activations)
    x_ne = (x.k, x.rows, 1, 1) if isinstance(x, Half) else x.ne
    halves = _Halves(x, ctx)
    gated: list[Sums] = []
    taken: set[int] = set()
    together, steps = _together(matrices, x, x_ne, ctx, gate)
    for part in together:
        results = [matrices[i].out for i in part][: 1 if gate else None]
        biases = [b for i in part if (b := matrices[i].bias) is not None]
        packed = list(part.values())
        ordered = batch.takes_order(ctx.target, packed[0].kind, x_ne[0], math.prod(x_ne[1:]))
        half = halves.get(torch.float16, ordered, steps)
        launch = batch.product(packed, half, results, ctx, biases, residual, gate)
        steps = _then(steps, launch, all(matrices[i].constant for i in part))
        taken.update(part)
    for i, matrix in enumerate(matrices):
        if i in taken:
            continue
        half = halves.get(half_type(matrix.weight), False, steps)
        free = gate is None and residual is None
        sums, made = _Job(matrix, half, batch_of(matrix.weight, x_ne), residual, ctx, i, free).run()
        steps += made
        if gate is None:
            steps += finish_steps(sums, matrix.out, matrix.bias, residual)
        else:
            gated.append(sums)
    if gated:
        assert gate is not None
        joined = finish_as_half(gated[0], gated[1], matrices[0].out, gate) if rounded is not None else None
        if rounded is not None and joined is not None:
            ctx.rounded[rounded], made = joined
            return steps + made
        steps += finish_steps(gated[0], matrices[0].out, b=gated[1], gate=gate)
    return steps


class _Halves:
    """One x in the forms that its products want, each made once."""

    def __init__(self, x: Tensor | Half, ctx: Context) -> None:
        self.x = x
        self.ctx = ctx
        self._made: dict[tuple[torch.dtype, bool], Half] = {}

    def get(self, kind: torch.dtype, ordered: bool, steps: list[Step]) -> Half:
        """x in a type, ordered if that can be; what makes it so is added to the steps."""
        if (kind, ordered) not in self._made:
            if isinstance(self.x, Half):
                self._made[kind, ordered], made = (self.x, []) if ordered else as_it_was(self.x, self.ctx)
            else:
                self._made[kind, ordered], made = as_half(self.ctx.view(self.x).torch(), kind, self.ctx, ordered)
            steps += made
        return self._made[kind, ordered]


def takes_order(w: Tensor, tokens: int, ctx: Context) -> bool:
    """Whether a product of so many tokens wants its activations ordered (half.Half)."""
    buffer, _ = ctx.place(w)
    kind, k = w.dtype.name, w.ne[0]
    if not isinstance(buffer, PackedBuffer) or not batch.fits(kind, k, tokens, ctx.target):
        return False
    return batch.takes_order(ctx.target, kind, k, tokens) and batch.aligned(ctx.packed(w)[0])


def _together(
    matrices: Sequence[_Matrix], x: Tensor | Half, x_ne: Sequence[int], ctx: Context, gate: Gate | None
) -> tuple[list[dict[int, Packed]], list[Step]]:
    """(what batch.py takes, the weights of a launch by number; the steps that pack them): of a gate both or none.

    In a launch either all have biases or none."""
    steps: list[Step] = []
    found: dict[tuple[str, bool], dict[int, Packed]] = {}
    if (x.values if isinstance(x, Half) else ctx.view(x).data).data_ptr() % 16:
        return [], []
    for i, matrix in enumerate(matrices):
        w = matrix.weight
        b = batch_of(w, x_ne)
        if b.count > 1 or not batch.fits(matrix.kind, w.ne[0], b.tokens, ctx.target):
            continue
        packed, made = ctx.packed(w)
        if batch.aligned(packed):
            steps += made
            found.setdefault((packed.kind, matrix.bias is not None), {})[i] = packed
    if gate is not None:
        both = [part for part in found.values() if batch.takes_together(list(part.values()), gate)]
        return (both, steps) if both else ([], [])
    parts = []
    for group in found.values():
        items = list(group.items())
        parts += [dict(items[j : j + MAX_SEGMENTS]) for j in range(0, len(items), MAX_SEGMENTS)]
    return parts, steps


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
    """One product. free: out may be written before all is read that the steps read. place: see few.packed_product."""

    matrix: _Matrix
    x: Half
    batch: Batch
    residual: torch.Tensor | None
    ctx: Context
    place: int
    free: bool

    @property
    def w(self) -> Tensor:
        return self.matrix.weight

    @property
    def out(self) -> torch.Tensor:
        return self.matrix.out

    def run(self) -> tuple[Sums, list[Step]]:
        """The sums, and what makes them."""
        kind, is_few = self.w.dtype.name, takes_gemm(self.w, self.batch.tokens)
        if not is_few and self.batch.one_each and (found := self._dense_each()) is not None:
            return found
        if packing_of(kind) is not None:
            packed, steps = self.ctx.packed(self.w)
            sums, made = self._gemm_packed(packed) if is_few else self._dense_packed(packed)
            return sums, steps + made
        if kind in RARE_TYPES:
            return self._dense_rare()
        return self._gemm_plain() if is_few else self._dense_plain()

    def _gemm_packed(self, packed: Packed) -> tuple[Sums, list[Step]]:
        target = self.out if self.free or self.residual is not None else self._own()
        m, bias = self.w.ne[1], self.matrix.bias
        return few.packed_product(packed, m, self.x, self.batch, target, bias, self.residual, self.ctx, self.place)

    def _gemm_plain(self) -> tuple[Sums, list[Step]]:
        view, steps = with_whole_rows(self.w, self.ctx)
        target = self.out if self.free or self.residual is not None else self._own()
        bias = self.matrix.bias
        sums, made = few.plain_product(view, self.x, self.batch, target, bias, self.residual, self.ctx, self.place)
        return sums, steps + made

    def _dense_packed(self, packed: Packed) -> tuple[Sums, list[Step]]:
        m = self.w.ne[1]
        return self._each(lambda i, x, out: dense.packed_steps(packed, i * m, m, x, out, self.ctx))

    def _dense_rare(self) -> tuple[Sums, list[Step]]:
        """Types that aren't packed: their blocks as they are."""
        blocks, k = block_rows(self.ctx.view(self.w)), self.w.ne[0]
        values = partial(_rare_values, kind=self.w.dtype.name)

        def steps(i: int, x: torch.Tensor, out: torch.Tensor) -> list[Step]:
            return dense.raw_steps(blocks[divmod(i, self.w.ne[2])], values, k, x, out, self.ctx)

        return self._each(steps)

    def _dense_plain(self) -> tuple[Sums, list[Step]]:
        matrices = self.ctx.view(self.w).torch()
        kind = self.x.values.dtype

        def steps(i: int, x: torch.Tensor, out: torch.Tensor) -> list[Step]:
            return [dense.multiply_as_step(kind, x, matrices[divmod(i, self.w.ne[2])], out)]

        return self._each(steps)

    def _each(self, steps: Callable[[int, torch.Tensor, torch.Tensor], list[Step]]) -> tuple[Sums, list[Step]]:
        """One product a matrix. steps(matrix, its x, its part of the sums) makes them."""
        b, (sums, x, out) = self.batch, self._lines()
        found: list[Step] = []
        for i in range(b.count):
            matrix = i // b.matrices2 // b.ratio3 * b.matrices2 + i % b.matrices2
            found += steps(matrix, x[i], out[i])
        return sums, found

    def _dense_each(self) -> tuple[Sums, list[Step]] | None:
        """All products at once, None for weights that don't lie so."""
        sums, x, out = self._lines()
        steps = each_steps(self.w, x, out, self.ctx)
        return None if steps is None else (sums, steps)

    def _lines(self) -> tuple[Sums, torch.Tensor, torch.Tensor]:
        """The sums, x as [count, tokens, k], and the sums' memory as [count, tokens, m]."""
        out = self.out if self.free else self._own()
        shape = (self.batch.count, self.batch.tokens, -1)
        complete = self.free and self.x.factors is None and self.matrix.bias is None
        sums = Sums(out[None], self.x.factors, complete)
        return sums, self.x.values.view(shape), out.view(shape)

    def _own(self) -> torch.Tensor:
        """Memory like out's, for sums that are not the result yet."""
        nbytes = self.out.numel() * 4
        memory = self.ctx.shared_scratch(f"sums {self.place}", nbytes)[:nbytes]
        return memory.view(torch.float32).view(self.out.shape)


def each_steps(w: Tensor, x: torch.Tensor, out: torch.Tensor, ctx: Context) -> list[Step] | None:
    """w's matrices, each times its own of x, [count, n, k] in half_type(w), to out, f32 [count, n, m], the plain way.

    Of x and out elements of a row lie side by side. None for weights that don't lie one after the other.
    """
    kind, m = w.dtype.name, w.ne[1]
    if packing_of(kind) is not None:
        packed, steps = ctx.packed(w)
        return [*steps, *dense.packed_each_steps(packed, m, x, out, ctx)]
    rare = kind in RARE_TYPES
    matrices = _in_a_row(block_rows(ctx.view(w)) if rare else ctx.view(w).torch())
    if matrices is None or not (rare or matrices.dtype is x.dtype):
        return None
    if rare:
        return dense.raw_each_steps(matrices, partial(_rare_values, kind=kind), x, out, ctx)
    return [dense.multiply_each_step(x, matrices, out)]


def _in_a_row(t: torch.Tensor) -> torch.Tensor | None:
    """Matrices [a3, a2, rows, ...] as [a3 * a2, rows, ...] in the same memory, None if they don't lie so."""
    if t.shape[1] == 1:
        return t[:, 0]
    even = t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1)
    return t.flatten(0, 1) if even else None


def _rare_values(blocks: torch.Tensor, out: torch.Tensor, kind: str) -> None:
    dequantize_rare(blocks.flatten(0, -2), kind, out)
