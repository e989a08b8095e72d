"""The grid of ggml's own suite (test-backend-ops of ggml 0.25.3) for FLASH_ATTN_EXT: its axes, names and distributions.

They are here so that results can be compared with ggml's own case by case; flash_attn.py has cases for what these
miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from graphrt.dtypes import dtype
from graphrt.ops.flash_attn_ext import flash_attn_ext
from graphrt.ops.view import permute, view
from graphrt.tensor import Tensor
from graphrt.testing import Case, GgmlMask, GgmlSparseMask, Inputs, Uniform, grid, register_cases

Dims = tuple[int, int, int, int]


@dataclass(frozen=True)
class GgmlAxes:
    """A point of ggml's grid, under ggml's names. hsk, hsv: D_k and D_v; nh: heads of k and v; kv: keys; nb: queries.

    nr23: how many heads q has for each of k's, and the number of sequences. prec: of the sums; part of the name alone,
    since a backend chooses it here. kv_view: k and v are the first half of a tensor that is twice as long. n_kv_max: of
    GgmlSparseMask, 0 for GgmlMask.
    """

    hsk: int
    hsv: int
    nh: int = 4
    nr23: tuple[int, int] = (1, 1)
    kv: int = 113
    nb: int = 1
    mask: bool = True
    sinks: bool = False
    max_bias: float = 0.0
    logit_softcap: float = 0.0
    prec: str = "f32"
    type_K: str = "f16"
    type_V: str = "f16"
    permute: Dims = (0, 1, 2, 3)
    kv_view: bool = True
    v_is_view_of_k: bool = False
    n_kv_max: int = 0

    def named(self) -> dict[str, object]:
        """The axes as ggml prints them: 0 and 1 for flags, six digits after the point."""
        return {
            name: int(value) if isinstance(value, bool) else f"{value:.6f}" if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


_HEADS_FIRST: Dims = (0, 2, 1, 3)
_ALL_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")

#: The main loop: what each pair of head sizes has beyond the axes that all share.
_PAIRS: Mapping[tuple[int, int], Mapping[str, Sequence[object]]] = {
    (40, 40): {"nr23": [(r, s) for s in (1, 3) for r in (1, 4)]},
    (64, 64): {"nr23": [(r, s) for s in (1, 3) for r in (1, 4)], "type_K": _ALL_TYPES},
    (72, 72): {"type_K": _ALL_TYPES},
    (80, 80): {},
    (96, 64): {},
    (96, 96): {},
    (128, 128): {"logit_softcap": (0.0, 10.0), "nr23": ((1, 1), (4, 1), (12, 1)), "prec": ("f32", "def")},
    (192, 128): {"nr23": ((1, 1), (4, 1), (8, 1), (16, 1))},
    (192, 192): {"nr23": ((1, 1), (4, 1), (8, 1), (16, 1))},
    (256, 256): {},
    (320, 256): {"nh": (1, 4), "nr23": ((1, 1), (4, 1), (32, 1))},
    (512, 512): {},
    (576, 512): {"nh": (1, 4), "nr23": ((1, 1), (4, 1), (20, 1)), "v_is_view_of_k": (True,)},
}

_SHARED: Mapping[str, Sequence[object]] = {
    "mask": (True, False),
    "sinks": (True, False),
    "max_bias": (0.0, 8.0),
    "nr23": ((1, 1), (4, 1)),
    "kv": (113, 512, 1024),
    "nb": (1, 3, 32, 75),
    "type_K": ("f16",),
    "permute": ((0, 1, 2, 3), _HEADS_FIRST),
}

_EXCLUDED: Mapping[str, Callable[[GgmlAxes], bool]] = {
    "ALiBi without a mask": lambda a: a.max_bias > 0 and not a.mask,
    "grouped heads at another length than 512": lambda a: a.nr23[0] != 1 and a.kv != 512,
    "20 or 32 queries a head at more than one head of k": lambda a: a.nr23[0] in (20, 32) and a.nh != 1,
    "permuted without a mask or at another length than 512, with ALiBi or a softcap": lambda a: (
        a.permute == _HEADS_FIRST and (not a.mask or a.kv != 512 or a.max_bias > 0 or a.logit_softcap > 0)
    ),
}


def _main_grid() -> Iterator[GgmlAxes]:
    for (hsk, hsv), own in _PAIRS.items():
        for axes in grid(GgmlAxes(hsk, hsv), {**_SHARED, **own}, _EXCLUDED):
            yield replace(axes, type_V=axes.type_K)


def _prefill_grid() -> Iterator[GgmlAxes]:
    axes = {"kv": (1024, 2048), "hsk": (64, 128, 256), "nb": (32, 64), "type_K": ("f16", "q8_0", "q4_0")}
    for point in grid(GgmlAxes(64, 64, nh=8, nr23=(4, 1)), axes):
        yield replace(point, hsv=point.hsk, type_V=point.type_K)


def _hand_picked() -> Iterator[GgmlAxes]:
    """What ggml lists one by one: sizes, types, long q8_0, MLA, masks with few seen keys, v in k, long f16, no view."""
    f16 = GgmlAxes(64, 64)
    yield replace(f16, hsk=72, kv=256, nb=2)
    yield replace(f16, hsv=72, kv=256, nb=2)
    odd = replace(f16, hsk=65, hsv=67, nb=75)
    yield replace(odd, sinks=True, max_bias=8.0)
    yield replace(odd, kv=17, mask=False, logit_softcap=1.0)
    yield replace(odd, mask=False, logit_softcap=1.0)
    for hsk, hsv, kv, type_k, type_v in _MIXED:
        yield GgmlAxes(hsk, hsv, kv=kv, nb=2, type_K=type_k, type_V=type_v)
    yield GgmlAxes(128, 128, kv=256, nb=1, mask=False, type_V="q4_0")
    q8 = GgmlAxes(256, 256, 2, (16, 1), type_K="q8_0", type_V="q8_0")
    yield from (replace(q8, kv=kv) for kv in (113, 1024, 16384))
    yield replace(q8, kv=1024, permute=_HEADS_FIRST)
    yield replace(q8, nr23=(16, 2), kv=1025, sinks=True, max_bias=8.0, logit_softcap=30.0)
    yield replace(q8, kv=1025, nb=64, permute=_HEADS_FIRST)
    mla = GgmlAxes(576, 512, 1, (8, 1), v_is_view_of_k=True)
    for kv, nb in ((113, 1), (1024, 1), (1024, 64)):
        yield replace(mla, kv=kv, nb=nb, type_K="q8_0", type_V="q8_0")
    for size, nh, nr23, kv, nb, max_bias, n_kv_max in _SPARSE:
        yield GgmlAxes(size, size, nh, nr23, kv, nb, max_bias=max_bias, n_kv_max=n_kv_max)
    for r3, nb, n_kv_max in ((1, 1, 512), (2, 2, 768), (1, 64, 512), (1, 64, 2048)):
        yield replace(mla, nr23=(16, r3), kv=4096, nb=nb, n_kv_max=n_kv_max)
    for nb in (1, 64):
        yield GgmlAxes(128, 128, 1, (8, 1), 4096, nb, type_K="q8_0", type_V="q8_0", n_kv_max=512)
    yield GgmlAxes(320, 256, 1, (32, 1), 512, 1, v_is_view_of_k=True)
    yield GgmlAxes(192, 128, 4, (8, 1), 512, 1, v_is_view_of_k=True)
    yield GgmlAxes(128, 128, 8, (4, 1), 512, 8, v_is_view_of_k=True)
    yield GgmlAxes(64, 64, kv=512, type_K="q8_0", type_V="q8_0", v_is_view_of_k=True)
    for size, nh, ratio, kv, nb, sinks in _LONG:
        yield GgmlAxes(size, size, nh, (ratio, 1), kv, nb, sinks=sinks)
    no_view = GgmlAxes(64, 64, kv=512, nb=75, type_K="q8_0", type_V="q8_0", kv_view=False)
    yield replace(no_view, permute=_HEADS_FIRST)
    yield replace(no_view, permute=_HEADS_FIRST, nr23=(4, 1))
    yield replace(no_view, permute=_HEADS_FIRST, kv=1024)
    yield no_view
    yield GgmlAxes(192, 128, 8, (8, 1), 4096, 1)
    yield replace(mla, nr23=(20, 1), kv=512)


_MIXED = (
    (64, 64, 128, "q8_0", "q4_0"), (64, 64, 128, "q4_0", "f16"), (72, 72, 96, "q4_0", "q8_0"),
    (64, 64, 96, "f16", "f32"), (128, 128, 96, "q1_0", "q1_0"), (128, 64, 128, "q1_0", "q4_0"),
    (64, 128, 128, "q4_0", "q1_0"), (128, 64, 64, "q1_0", "f16"), (128, 128, 96, "q2_0", "q2_0"),
    (128, 64, 128, "q2_0", "q4_0"), (64, 128, 128, "q4_0", "q2_0"), (128, 64, 64, "q2_0", "f16"),
)  # fmt: skip

#: size, nh, nr23, kv, nb, max_bias, n_kv_max
_SPARSE = (
    (512, 1, (8, 1), 4096, 1, 0.0, 512), (512, 1, (8, 2), 4096, 3, 0.0, 768), (512, 1, (8, 1), 4096, 1, 0.0, 2304),
    (256, 1, (8, 1), 4096, 1, 0.0, 512), (128, 1, (8, 1), 4096, 1, 0.0, 512), (128, 1, (8, 1), 4096, 4, 8.0, 512),
    (512, 1, (8, 1), 4096, 64, 0.0, 512), (512, 1, (8, 1), 4096, 64, 0.0, 2048), (256, 1, (8, 1), 4096, 64, 0.0, 512),
    (128, 1, (8, 1), 4096, 64, 0.0, 512), (128, 1, (8, 1), 4096, 64, 0.0, 2048), (256, 2, (12, 1), 4096, 1, 0.0, 512),
    (256, 2, (12, 1), 8192, 64, 0.0, 512), (256, 1, (12, 2), 8192, 67, 0.0, 512), (256, 2, (12, 1), 8192, 1, 0.0, 2048),
)  # fmt: skip

#: size, nh, ratio, kv, nb, sinks
_LONG = (
    (256, 4, 6, 4096, 512, False), (128, 8, 4, 4096, 512, False), (256, 4, 6, 16384, 512, False),
    (128, 8, 4, 16384, 512, False), (256, 4, 6, 512, 512, False), (256, 4, 6, 4096, 64, False),
    (256, 4, 6, 4096, 16, False), (256, 4, 2, 4096, 512, False), (256, 4, 4, 4096, 512, False),
    (256, 2, 12, 4096, 512, False), (64, 8, 8, 4096, 4, False), (128, 8, 4, 4096, 8, True),
    (256, 4, 2, 1024, 32, False), (512, 4, 2, 1024, 4, False),
)  # fmt: skip


def _source(inputs: Inputs, name: str, dt: str, ne: Dims, axes: GgmlAxes, is_view: bool) -> Tensor:
    """A tensor of shape `ne`, permuted as axes.permute says. is_view: it is half of a tensor twice as long."""
    stored = (ne[0], ne[2], ne[1], ne[3]) if axes.permute == _HEADS_FIRST else ne
    whole = inputs(name, dt, (stored[0], stored[1] * (2 if is_view else 1), *stored[2:]), Uniform())
    t = view(whole, stored, whole.nb[1:]) if is_view else whole
    return permute(t, *axes.permute) if axes.permute == _HEADS_FIRST else t


def _padded(n: int, dt: str) -> int:
    block = dtype(dt).block_size
    return -(-n // block) * block


def _make(inputs: Inputs, axes: GgmlAxes) -> Tensor:
    (r2, n_seq), n_head_kv = axes.nr23, axes.nh
    d_k, d_v = _padded(axes.hsk, axes.type_K), _padded(axes.hsv, axes.type_V)
    q = _source(inputs, "q", "f32", (d_k, axes.nb, n_head_kv * r2, n_seq), axes, False)
    k = _source(inputs, "k", axes.type_K, (d_k, axes.kv, n_head_kv, n_seq), axes, axes.kv_view)
    if axes.v_is_view_of_k:
        v = view(k, (d_v, *k.ne[1:]), k.nb[1:])
    else:
        v = _source(inputs, "v", axes.type_V, (d_v, axes.kv, n_head_kv, n_seq), axes, axes.kv_view)
    mask = None
    if axes.mask:
        values = GgmlSparseMask(axes.n_kv_max) if axes.n_kv_max else GgmlMask()
        mask = inputs("m", "f16", (axes.kv, axes.nb, 1, n_seq), values)
    sinks = inputs("s", "f32", (n_head_kv * r2,), Uniform(-10, 10)) if axes.sinks else None
    return flash_attn_ext(
        q, k, v, mask, axes.hsk**-0.5, sinks=sinks, max_bias=axes.max_bias, softcap=axes.logit_softcap
    )


def ggml_points() -> list[GgmlAxes]:
    """Every point of ggml's grid: 36 prefill shapes, the main loop's 5,200, 72 hand-picked ones."""
    return [*_prefill_grid(), *_main_grid(), *_hand_picked()]


def ggml_cases() -> Iterator[Case]:
    """ggml's cases of FLASH_ATTN_EXT; it has none of FLASH_ATTN_LSE.

    One stands in ggml's grid twice (576/512 with 20 queries a head). Its second time has `again=1` in its name, and by
    that inputs of its own, as in ggml, where no two runs are alike.
    """
    met: set[GgmlAxes] = set()
    for axes in ggml_points():
        again = {"again": 1} if axes in met else {}
        met.add(axes)
        yield Case("FLASH_ATTN_EXT", {**axes.named(), **again}, partial(_make, axes=axes))


register_cases("FLASH_ATTN_EXT", ggml=ggml_cases)
