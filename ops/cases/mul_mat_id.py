"""Conformance cases of MUL_MAT_ID and ADD_ID: every type, every way that tokens may choose experts, tails, strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from graphrt.dtypes import dtype
from graphrt.ops.cases.gaps import gapped
from graphrt.ops.cases.mul_mat import TYPES
from graphrt.ops.mul_mat_id import add_id, mul_mat_id
from graphrt.ops.view import permute, view
from graphrt.tensor import Tensor
from graphrt.testing import Case, Init, Inputs, Spoiled, Uniform, grid, register_cases
from graphrt.testing.blocks import AnyArray

#: One of each kind of memory: plain, blocks of 32, superblocks of 256, a type that few backends keep packed.
KINDS = ("f32", "f16", "q4_0", "q8_0", "q4_K", "q6_K", "mxfp4", "iq3_s")


@dataclass(frozen=True)
class Choice:
    """Which of n experts each token gets; how:

    topk: a token's experts are all different; any: they may repeat; twice: a token's first expert is its last one too;
    same: every token has the same experts; few: only the first three experts are chosen; last: only the last two; one:
    one expert is the first choice of every token; outside: some ids name no expert: -1, n, and numbers far from both.
    """

    n: int
    how: str

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        used = shape[-1]
        low, high = {"few": (0, min(3, self.n)), "last": (max(0, self.n - 2), self.n)}.get(self.how, (0, self.n))
        if self.how in ("topk", "same", "one") and used <= self.n:
            every = np.broadcast_to(np.arange(self.n), (*shape[:-1], self.n)).copy()
            ids = rng.permuted(every, axis=-1)[..., :used]
        else:
            ids = rng.integers(low, high, shape)
            if high - low > 1 and np.ptp(ids) == 0:  # one expert for all is choice "one"
                ids.reshape(-1)[0] = low + (ids.reshape(-1)[0] - low + 1) % (high - low)
        if self.how == "twice":
            ids[..., -1] = ids[..., 0]
        elif self.how == "same":
            ids[...] = ids.reshape(-1, used)[0]
        elif self.how == "one":
            ids[..., 0] = self.n // 2
        elif self.how == "outside":
            flat = ids.reshape(-1)
            flat[::3] = np.resize([-1, self.n, 2**31 - 1, -(2**31), self.n + 1], flat[::3].shape)
        return ids


@dataclass(frozen=True)
class Axes:
    """One point: weights [k, m, n_expert] of a type, `tokens` tokens with `used` experts each.

    per_slot: activations have a row for each expert of a token, instead of one for all of them. choice: of the experts,
    see Choice.how. ids, in memory: plain; view, the first columns of a larger tensor, as of ARGSORT's result; turned,
    slots and tokens swapped. layout: plain; gaps, with NaN between rows and between matrices of weights and
    activations; permuted, with rows and experts of the weights swapped in memory; spoiled, the weights of the fourth
    expert and those after it being NaN. values, of the activations: small, from -1 to 1, or large, out of f16's range.
    """

    type: str
    m: int = 16
    k: int = 256
    n_expert: int = 4
    used: int = 2
    tokens: int = 3
    per_slot: bool = False
    choice: str = "topk"
    ids: str = "plain"
    layout: str = "plain"
    values: str = "small"


_VALUES: Mapping[str, Init] = {"small": Uniform(), "large": Uniform(-9e4, 9e4)}
_EXCLUDED: Mapping[str, Callable[[Axes], bool]] = {
    "rows of no whole blocks": lambda a: a.k % dtype(a.type).block_size != 0,
    "more experts a token than there are": lambda a: a.used > a.n_expert and a.choice == "topk",
}


def _groups(full: bool) -> Iterator[tuple[Axes, Mapping[str, Sequence[object]]]]:
    base, kinds, slots = Axes("f16"), TYPES if full else KINDS, (False, True)
    yield base, {"type": TYPES, "tokens": (1, 9), "per_slot": slots if full else (False,)}
    yield replace(base, per_slot=True, m=5), {"type": TYPES, "tokens": (2,)}
    yield replace(base, n_expert=8), {"type": kinds, "used": (1, 2, 4), "tokens": (1, 5), "per_slot": slots}
    choices = ("any", "twice", "same", "few", "last", "one", "outside")
    some = kinds if full else ("f32", "q4_K")
    yield replace(base, n_expert=8, used=3), {"type": some, "choice": choices, "tokens": (2, 40), "per_slot": slots}
    yield replace(base, choice="any"), {"type": kinds, "m": (3, 17, 65, 130), "tokens": (2, 33)}
    yield replace(base, m=7, per_slot=True), {"type": kinds, "k": (32, 96, 512, 544, 2304), "tokens": (2, 17)}
    yield replace(base, m=7), {"type": ("f32", "f16"), "k": (1, 2, 31, 33, 257), "tokens": (2, 17)}
    yield replace(base, n_expert=5, used=3), {"type": some, "ids": ("view", "turned"), "tokens": (1, 4, 24),
                                              "per_slot": slots}  # fmt: skip
    yield replace(base, n_expert=5, m=9, layout="gaps"), {"type": kinds, "tokens": (1, 3, 24), "per_slot": slots}
    yield replace(base, m=6, layout="permuted"), {"type": ("f16", "f32", "q8_0"), "tokens": (1, 24)}
    yield replace(base, n_expert=7, choice="few", layout="spoiled"), {"type": some, "tokens": (1, 3, 24)}
    yield replace(base, values="large", k=512), {"type": ("f32", "f16", "q8_0", "q4_K"), "tokens": (1, 3, 24)}
    # many experts, more than tokens have; many tokens, more than a tile of any kernel
    yield replace(base, m=33, used=6), {"type": ("f16", "q4_K"), "n_expert": (60, 128), "tokens": (1, 7, 70)}
    yield replace(base, m=5, n_expert=3), {"type": ("f16", "q8_0"), "tokens": (300,), "choice": ("topk", "one", "few")}
    yield replace(base, m=5, n_expert=1, used=1), {"type": ("f16", "q4_0"), "tokens": (2, 70), "choice": ("any",),
                                                   "ids": ("view",)}  # fmt: skip


def _ids(inputs: Inputs, axes: Axes) -> Tensor:
    """i32 [used, tokens]. Where they are a view, the memory beside them holds numbers of other experts."""
    values = Choice(axes.n_expert, axes.choice)
    if axes.ids == "view":
        whole = inputs("ids", "i32", (axes.used + 3, axes.tokens), Beside(values, axes.used))
        return view(whole, (axes.used, axes.tokens), whole.nb[1:2])
    if axes.ids == "turned":
        return permute(inputs("ids", "i32", (axes.tokens, axes.used), Turned(values)), 1, 0, 2, 3)
    return inputs("ids", "i32", (axes.used, axes.tokens), values)


@dataclass(frozen=True)
class Beside:
    """`base` in the first `used` columns, other experts' numbers after them."""

    base: Choice
    used: int

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        first = self.base(rng, (*shape[:-1], self.used))
        return np.concatenate((first, rng.integers(0, self.base.n + 3, (*shape[:-1], shape[-1] - self.used))), axis=-1)


@dataclass(frozen=True)
class Turned:
    """`base` with slots and tokens swapped."""

    base: Choice

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        return self.base(rng, (*shape[:-2], shape[-1], shape[-2])).swapaxes(-1, -2)


def make(inputs: Inputs, axes: Axes) -> Tensor:
    ne_a, ne_b = (axes.k, axes.m, axes.n_expert), (axes.k, axes.used if axes.per_slot else 1, axes.tokens)
    ids, values = _ids(inputs, axes), _VALUES[axes.values]
    if axes.layout == "gaps":
        return mul_mat_id(gapped(inputs, "experts", axes.type, ne_a), gapped(inputs, "b", "f32", ne_b, values), ids)
    if axes.layout == "permuted":
        experts = permute(inputs("experts", axes.type, (ne_a[0], ne_a[2], ne_a[1])), 0, 2, 1, 3)
        b = permute(inputs("b", "f32", (ne_b[0], ne_b[2], ne_b[1]), values), 0, 2, 1, 3)
        return mul_mat_id(experts, b, ids)
    weights = Spoiled(Uniform(), range(3, axes.n_expert), -3) if axes.layout == "spoiled" else None
    return mul_mat_id(inputs("experts", axes.type, ne_a, weights), inputs("b", "f32", ne_b, values), ids)


def _make_add(inputs: Inputs, axes: Axes) -> Tensor:
    ne_a, ne_b, ids = (axes.m, axes.used, axes.tokens), (axes.m, axes.n_expert), _ids(inputs, axes)
    if axes.layout == "gaps":
        return add_id(gapped(inputs, "a", "f32", ne_a), gapped(inputs, "b", "f32", ne_b), ids)
    if axes.layout == "permuted":
        a = permute(inputs("a", "f32", (ne_a[0], ne_a[2], ne_a[1])), 0, 2, 1, 3)
        return add_id(a, permute(inputs("b", "f32", ne_b[::-1]), 1, 0, 2, 3), ids)
    return add_id(inputs("a", "f32", ne_a), inputs("b", "f32", ne_b), ids)


def _add_groups() -> Iterator[tuple[Axes, Mapping[str, Sequence[object]]]]:
    base = Axes("f32", k=1)
    yield base, {"m": (1, 17, 1025), "used": (1, 2, 4), "tokens": (1, 33)}
    yield replace(base, m=33, used=3), {"choice": ("any", "same", "last", "outside"), "tokens": (3, 300)}
    yield replace(base, m=33), {"ids": ("view", "turned"), "tokens": (1, 5)}
    yield replace(base, m=33, n_expert=6), {"layout": ("gaps", "permuted"), "tokens": (1, 5)}


def cases(op: str, which: str = "quick") -> Iterator[Case]:
    """The cases of a set, quick or full, of one of the two ops, each once."""
    base = asdict(Axes(""))
    groups, maker = (_groups(which == "full"), make) if op == "MUL_MAT_ID" else (_add_groups(), _make_add)
    found = [axes for base_axes, axis in groups for axes in grid(base_axes, axis, _EXCLUDED)]
    always = ("type", "m", "k", "n_expert", "used", "tokens") if op == "MUL_MAT_ID" else (
        "m", "n_expert", "used", "tokens"
    )  # fmt: skip
    for axes in dict.fromkeys(found):
        fields = [
            (name, value) for name, value in asdict(axes).items() if op == "MUL_MAT_ID" or name not in ("type", "k")
        ]
        shown = {name: value for name, value in fields if name in always or value != base[name]}
        yield Case(op, shown, partial(maker, axes=axes))


register_cases("MUL_MAT_ID", quick=partial(cases, "MUL_MAT_ID"), full=partial(cases, "MUL_MAT_ID", "full"))
register_cases("ADD_ID", quick=partial(cases, "ADD_ID"))
