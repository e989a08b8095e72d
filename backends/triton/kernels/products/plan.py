"""The plan of a split's products: before anything is launched, a Route for each and a form for each result they read.

1. Every product is routed as if its x lay as the graph has it (route.py). The kernel's form is its wish.
2. Group by group, in order: the form of the group's x is known now, so its products get their final routes. Then what
   the group makes gets its own form (forms.Stored): the one that all readers wish for, where nobody but products reads
   it (`Group.private`, which fuse.py finds out) and the launch that makes it can write that; else as the graph has it.
   A norm whose result others read too adds a copy in 8 bits if a product wishes for it.
3. Products of a group that one launch makes are one Part, and a Part knows who makes its activations.

All of it is a function of the groups, the target and where tensors lie. emit.py and the norms' lowerings obey it,
`graphrt explain` prints it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from graphrt.backend import Group
from graphrt.backends.triton.context import Context
from graphrt.backends.triton.kernels.joined_fusions import JoinedSum
from graphrt.backends.triton.kernels.norm_fusions import NormOfSum, ScaledNorm
from graphrt.backends.triton.kernels.products.forms import Form, Stored
from graphrt.backends.triton.kernels.products.gemm_small import mma_launch
from graphrt.backends.triton.kernels.products.gemm_small.arguments import MAX_SEGMENTS
from graphrt.backends.triton.kernels.products.gemv import MAX_ALONE, MAX_INLINE
from graphrt.backends.triton.kernels.products.half import MAX_WHOLE_ROW
from graphrt.backends.triton.kernels.products.product import PRODUCTS, Product, ProductGroup, products_of
from graphrt.backends.triton.kernels.products.route import OF_ONE_TYPE, Route, route_of
from graphrt.op import made_by
from graphrt.tensor import Tensor

#: gemv.py rounds activations in each of its programs for at most so many tokens; a launch before is cheaper for more.
INLINE_TOKENS = 2
#: Of one token it rounds rows of more than MAX_ALONE elements too, where all programs together (of four rows each) have
#: so little to round that it costs less than a launch: half a microsecond on an H100 at most.
INLINE_WORK = 1 << 20
#: Weights that gemv.py takes in one launch.
GEMV_SEGMENTS = 3
MAX_F16 = 65504.0


class Made(Enum):
    """Who makes activations what a kernel reads."""

    AS_IT_LIES = "its activations are read as they lie"
    BY_PRODUCER = "the launch that makes its activations stores them so"
    IN_COPY = "the launch that makes its activations also writes them so, beside the f32 that others read"
    INSIDE = "its own programs round them"
    BEFORE = "a launch before makes them so"


@dataclass(frozen=True, eq=False)
class Part:
    """Products of a group that one launch makes, all by one route, and who makes their activations."""

    products: tuple[Product, ...]
    route: Route
    made: Made


@dataclass(frozen=True, eq=False)
class Planned:
    """A group's products, in parts, and how what the group makes is stored."""

    group: ProductGroup
    parts: tuple[Part, ...]
    stored: Stored = Stored()


@dataclass(frozen=True, eq=False)
class Plan:
    """products: by the first of a group's products; stored: of results that are not just as the graph has
    them, or have a copy."""

    products: dict[Tensor, Planned] = field(default_factory=dict)
    stored: dict[Tensor, Stored] = field(default_factory=dict)

    def of(self, product: Tensor) -> Planned:
        """The products of the group whose first one this is."""
        return self.products[product]

    def stored_as(self, t: Tensor) -> Stored:
        return self.stored.get(t, Stored())


def plan_of(ctx: Context) -> Plan:
    """The plan that planned() made of the split that is being compiled."""
    assert isinstance(ctx.plan, Plan)
    return ctx.plan


def planned(groups: Sequence[Group], ctx: Context) -> Plan:
    """The plan of a split."""
    found = [products_of(group) for group in groups]
    asked = [None if made is None else with_addresses(made, ctx) for made in found]
    wishes: dict[Tensor, list[tuple[Product, Route]]] = {}
    for made in asked:
        for p in made.products if made is not None else ():
            if not p.transposed:  # which converts what it reads by itself
                wishes.setdefault(made_by(p.x), []).append((p, route_of(p, ctx)))
    plan = Plan()
    for group, made in zip(groups, asked):
        own = plan_group(made, ctx, plan) if made is not None else None
        out = group.results[-1]
        stored = _stored(group, own.parts if own is not None else (), wishes.get(out, []), ctx)
        if stored != Stored():
            plan.stored[out] = stored
        if own is not None:
            first = next(n for n in group.nodes if n.op in PRODUCTS)
            plan.products[first] = replace(own, stored=stored)
    return plan


def with_addresses(group: ProductGroup, ctx: Context) -> ProductGroup:
    """The same, its products knowing where x and weights begin."""
    x_aligned = ctx.view(group.x).data.data_ptr() % 16 == 0
    found = []
    for p in group.products:
        packed = [ctx.packed_in_place(w) for w in p.halves] if p.is_packed and p.ids is None else []
        aligned = all(w is None or mma_launch.aligned(w) for w in packed)
        found.append(replace(p, x_aligned=x_aligned, aligned=aligned))
    return replace(group, products=tuple(found))


# ---- what one launch makes ----


def plan_group(group: ProductGroup, ctx: Context, plan: Plan) -> Planned:
    """A group's products by launches, their x being stored as planned so far."""
    form, has_copy = plan.stored_as(group.x).form, _has_copy(group.x, plan)
    group = replace(group, products=tuple(replace(p, x_form=form) for p in group.products))
    few: dict[bool, list[tuple[Product, Route]]] = {}
    some: dict[tuple[str, bool], list[tuple[Product, Route]]] = {}
    rest: list[list[tuple[Product, Route]]] = []
    for p in group.products:
        route = route_of(p, ctx)
        if route.kernel.name == "gemv":
            few.setdefault(p.is_packed, []).append((p, route))
        elif route.kernel.name in OF_ONE_TYPE:
            some.setdefault((p.type, p.bias is not None), []).append((p, route))
        elif route.joined and rest:
            rest[0].append((p, route))
        else:
            rest.append([(p, route)])
    launches = (*_cut(few.values(), GEMV_SEGMENTS), *_cut(some.values(), MAX_SEGMENTS), *rest)
    found = [(tuple(p for p, _ in launch), launch[0][1]) for launch in launches]
    return Planned(group, tuple(Part(products, route, _made(products, route, has_copy)) for products, route in found))


def _cut(lists: Iterable[list[tuple[Product, Route]]], most: int) -> Iterator[list[tuple[Product, Route]]]:
    """Each list in pieces of up to `most`."""
    for items in lists:
        yield from (items[i : i + most] for i in range(0, len(items), most))


def _made(products: Sequence[Product], route: Route, has_copy: bool) -> Made:
    """Who makes the activations of a launch."""
    x = products[0].x
    if products[0].x_form is not Form.AS_IS:
        return Made.BY_PRODUCER
    if route.form is Form.Q8:
        inside = route.kernel.name == "gemv" and rounds_inside(products, x)
        return Made.IN_COPY if has_copy else Made.INSIDE if inside else Made.BEFORE
    if route.form is Form.AS_IS:
        if route.kernel.name == "expert_wgmma":
            return Made.BEFORE
        return Made.INSIDE if products[0].is_packed else Made.AS_IT_LIES
    even = x.is_contiguous or (products[0].transposed and route.form is Form.F32)
    return Made.AS_IT_LIES if x.dtype.name == route.form.value and even else Made.BEFORE


def rounds_inside(products: Sequence[Product], x: Tensor) -> bool:
    """Whether gemv.py's programs round x themselves."""
    n, k = x.n_rows, x.ne[0]
    if x.dtype.name != "f32" or x.nb[0] != x.dtype.type_size or n > INLINE_TOKENS:
        return False
    if k <= MAX_ALONE:
        return True
    joined = products[0].gate is not None
    programs = sum(-(-p.weight.ne[1] // 4) for p in products[: 1 if joined else None])
    return n == 1 and k <= MAX_INLINE and programs * k <= INLINE_WORK


# ---- what a group stores ----


def _has_copy(x: Tensor, plan: Plan) -> bool:
    """x is there in 8 bits too: the launch that made it, or what it is a view of, wrote that."""
    whole = made_by(x)
    return plan.stored_as(whole).q8_copy and _has_rows_of(x, whole)


def _has_rows_of(x: Tensor, whole: Tensor) -> bool:
    """x is a tensor without gaps, or a view of all of it that has the same rows in the same order."""
    return x is whole or (x.is_contiguous and x.ne[0] == whole.ne[0] and x.n_elements == whole.n_elements)


def _stored(group: Group, parts: Sequence[Part], readers: Sequence[tuple[Product, Route]], ctx: Context) -> Stored:
    """How a group stores its last result, which some products read."""
    out, wishes = group.results[-1], {route.form for _, route in readers}
    private = bool(wishes) and out in group.private
    in_f16 = private and wishes <= {Form.F16, Form.F16_ORDERED}
    if group.kernel == "gate_up_glu":
        writes = not any(part.route.joined for part in parts) and 2 <= out.ne[0] <= MAX_WHOLE_ROW
        return Stored(Form.F16_SCALED) if in_f16 and writes else Stored()
    row = _row_of_norm(group)
    if row is None:
        return Stored()
    if private and wishes == {Form.Q8}:
        return Stored(Form.Q8)
    if in_f16 and _stays_in_f16(row, ctx):
        return Stored(Form.F16_ORDERED if wishes == {Form.F16_ORDERED} else Form.F16)
    return Stored(q8_copy=any(route.form is Form.Q8 and _has_rows_of(p.x, out) for p, route in readers))


def _row_of_norm(group: Group) -> Tensor | None:
    """The weights of a group whose launch can write a norm in other forms: the norm's rows lie at equal distances."""
    found = group.captured
    if isinstance(found, (NormOfSum, JoinedSum)):
        return None if found.after is None else found.after.scaled["b"]
    if not isinstance(found, ScaledNorm) or found.total is not None:
        return None
    x = found.norm["a"]
    return found.scaled["b"] if x.ne[2] == x.ne[3] == 1 or x.is_contiguous else None


def _stays_in_f16(weights: Tensor, ctx: Context) -> bool:
    """No norm times these weights can be over f16's largest number: a norm's elements are at most sqrt(k)."""
    k = weights.ne[0]
    largest = float(ctx.view(weights).data[:k].abs().max()) if ctx.is_constant(weights) else math.inf
    return largest * math.sqrt(k) < MAX_F16
