"""Conformance cases of MUL_MAT: every type, the tails of tiles, broadcasting, and memory that is not contiguous."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from graphrt.dtypes import dtype
from graphrt.ops.cases.gaps import gapped
from graphrt.ops.mul_mat import mul_mat
from graphrt.ops.view import permute
from graphrt.tensor import Tensor
from graphrt.testing import Case, Init, Inputs, Normal, Uniform, grid, register_cases


@dataclass(frozen=True)
class Axes:
    """One point: weights a [k, m, *batch_a] of a type times activations b [k, n, *batch_b] of type_b.

    layout, of both in memory: plain; permuted, with dimensions 1 and 2 swapped; or gaps, with NaN between rows and
    between matrices. values: small, from -1 to 1, or large, whose sums are out of f16's range.
    """

    type: str
    type_b: str = "f32"
    m: int = 16
    n: int = 3
    k: int = 256
    batch_a: tuple[int, int] = (1, 1)
    batch_b: tuple[int, int] = (1, 1)
    layout: str = "plain"
    values: str = "small"


TYPES = (
    "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl",
    "iq4_xs", "mxfp4", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0", "nvfp4",
)  # fmt: skip
#: One of each kind of memory: plain, blocks of 32, superblocks of 256.
KINDS = ("f16", "q4_0", "q8_0", "q4_K", "q6_K")
BATCHES = (((1, 1), (3, 2)), ((2, 1), (4, 3)), ((2, 2), (2, 4)), ((3, 2), (6, 2)), ((2, 3), (6, 6)))
_VALUES: Mapping[str, Init] = {"small": Uniform(), "large": Normal(1.0, 8.0)}
_EXCLUDED: Mapping[str, Callable[[Axes], bool]] = {
    "rows of no whole blocks": lambda a: a.k % dtype(a.type).block_size != 0,
    "one number, near 0 by chance": lambda a: a.m == a.n == 1 and a.values == "small",
}


def _groups(full: bool) -> Iterator[tuple[Axes, Mapping[str, Sequence[object]]]]:
    base = Axes("f16")
    yield base, {"type": TYPES, "n": (1, 2, 3, 4, 8, 9, 33) if full else (1, 2, 9)}
    yield base, {"type": TYPES if full else ("f16", "q8_0", "q4_K"), "n": (3, 4, 5, 6, 7, 8, 16, 17, 33, 128)}
    yield base, {"type": TYPES if full else KINDS, "m": (1, 5, 17, 63, 65, 130), "n": (1, 9)}
    yield base, {"type": ("f32", "f16"), "k": (1, 2, 31, 33, 65, 257, 1000), "n": (1, 9)}
    yield base, {"type": TYPES if full else KINDS, "k": (32, 96, 512, 544, 2304, 4096), "n": (1, 9), "m": (5,)}
    for batch_a, batch_b in BATCHES:
        kinds = TYPES if full else ("f32", "f16", "q8_0", "q4_K")
        yield replace(base, m=5, batch_a=batch_a, batch_b=batch_b), {"type": kinds, "n": (1, 3)}
    yield replace(base, batch_a=(2, 2), batch_b=(4, 2)), {"layout": ("gaps",), "type": TYPES if full else KINDS,
                                                         "n": (1, 9), "m": (17,)}  # fmt: skip
    yield replace(base, k=64, m=7, batch_a=(3, 1), batch_b=(6, 1)), {"layout": ("permuted",), "n": (1, 5),
                                                                     "type": ("f16", "f32", "q8_0")}  # fmt: skip
    yield replace(base, values="large", k=4096), {"type": ("f32", "f16", "bf16", "q8_0"), "n": (1, 9, 33)}
    yield replace(base, values="large", m=1), {"type": KINDS, "n": (1, 2)}
    for k, m, n in ((700, 16, 258), (16, 264, 300), (300, 258, 9)):  # one short side each
        yield replace(base, k=k, m=m, n=n), {"type": ("f32",)}
    yield replace(base, type_b="f16"), {"type": ("f16", "q8_0", "q4_K"), "n": (1, 9)}


def make(inputs: Inputs, axes: Axes) -> Tensor:
    ne_a, ne_b = (axes.k, axes.m, *axes.batch_a), (axes.k, axes.n, *axes.batch_b)
    values = _VALUES[axes.values]
    if axes.layout == "gaps":
        return mul_mat(gapped(inputs, "a", axes.type, ne_a, values), gapped(inputs, "b", axes.type_b, ne_b, values))
    if axes.layout == "permuted":
        a = inputs("a", axes.type, (ne_a[0], ne_a[2], ne_a[1], ne_a[3]), values)
        b = inputs("b", axes.type_b, (ne_b[0], ne_b[2], ne_b[1], ne_b[3]), values)
        return mul_mat(permute(a, 0, 2, 1, 3), permute(b, 0, 2, 1, 3))
    return mul_mat(inputs("a", axes.type, ne_a, values), inputs("b", axes.type_b, ne_b, values))


def cases(which: str = "quick") -> Iterator[Case]:
    """The cases of a set, quick or full, each once."""
    base = asdict(Axes(""))
    found = [axes for base_axes, axis in _groups(which == "full") for axes in grid(base_axes, axis, _EXCLUDED)]
    for axes in dict.fromkeys(found):
        always = ("type", "m", "n", "k")
        shown = {name: value for name, value in asdict(axes).items() if name in always or value != base[name]}
        yield Case("MUL_MAT", shown, partial(make, axes=axes))


register_cases("MUL_MAT", quick=cases, full=partial(cases, "full"))
