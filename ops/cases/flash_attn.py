"""The cases of FLASH_ATTN_EXT and FLASH_ATTN_LSE: groups of axes, each there because kernels have broken on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from graphrt.dtypes import CACHES
from graphrt.ops.cases.flash_attn_axes import IMPOSSIBLE, MASKS, ROWS, SINKS, SPOILS, VALUES, Axes, as_case
from graphrt.ops.cases.scores import SCORES
from graphrt.testing import Case, grid, register_cases

Choices = Mapping[str, Sequence[object]]

TYPES = tuple(CACHES)
OTHERS = tuple(t for t in TYPES if t != "f16")
HEAD_SIZES = (
    (32, 32), (40, 40), (64, 128), (65, 67), (72, 72), (80, 80), (96, 64), (112, 112), (128, 128), (192, 128),
    (256, 256), (320, 256), (512, 512),
)  # fmt: skip
RATIOS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 32, 64)
#: Around the tiles of 16 to 256 keys, and the ends.
CONTEXTS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1024, 1025)


@dataclass(frozen=True)
class Group:
    """Points around `base`: the quick set has every combination of the values in `quick`.

    The full set has the combinations of these values and those of `more` together.
    """

    base: Axes
    quick: Choices = field(default_factory=dict)
    more: Choices = field(default_factory=dict)

    def axes(self, full: bool) -> Iterator[Axes]:
        added = self.more if full else {}
        names = dict.fromkeys([*self.quick, *added])
        yield from grid(
            self.base, {n: [*self.quick.get(n, [getattr(self.base, n)]), *added.get(n, ())] for n in names}, IMPOSSIBLE
        )


BASE = Axes()
_WIDE = replace(BASE, heads=(6, 2), n_seq=2)
_LONG = replace(BASE, d=(64, 64), heads=(4, 1), n_q=1)

_EIGHT = replace(BASE, d=(128, 128), types=("f8_e4m3", "f8_e4m3"), n_q=75, n_kv=300, mask="random")

_BIASES = ((1, 1, "f32"), (1, 1, "bf16"), (6, 2, "f16"), (3, 1, "f32"))

_MANY = replace(BASE, n_q=140, n_kv=208, mask=None, heads=(4, 2))

GROUPS: Mapping[str, Sequence[Group]] = {
    "head sizes": (
        Group(replace(BASE, layout="padded"), {"d": HEAD_SIZES, "n_q": (1, 9)}, {"n_kv": (300,), "n_q": (33, 65)}),
        Group(
            replace(BASE, d=(576, 512), heads=(16, 1)),
            {"layout": ("v_in_k",), "n_q": (1, 4)},
            {"layout": ("plain",), "n_kv": (512,), "heads": ((20, 1),)},
        ),
        Group(replace(BASE, d=(576, 512), heads=(16, 1), layout="v_in_k"), {"types": (("q8_0", "q8_0"),)}),
    ),
    "types": (
        Group(BASE, {"types": [(t, t) for t in OTHERS], "n_q": (1, 33)}, {"layout": ("cache",), "d": ((128, 128),)}),
        Group(BASE, {"types": [(t, "f16") for t in OTHERS] + [("f16", t) for t in OTHERS]}, {"n_q": (1, 33)}),
        Group(
            replace(BASE, d=(96, 128)),
            {"types": [("q8_0", "q4_0"), ("q4_0", "q8_0"), ("q5_1", "bf16")]},
            {"types": [(k, v) for k in OTHERS for v in OTHERS if k != v], "n_q": (1,)},
        ),
        # A head's keys lie side by side, and each head begins on 16 bytes, though its keys do not.
        Group(
            replace(BASE, d=(128, 128), n_q=1, n_kv=300, mask="random", types=("q8_0", "q8_0")),
            {},
            {"types": (("q4_0", "q4_0"), ("q8_0", "q4_0")), "spoil": ("nan",), "n_q": (2, 9), "values": ("raised",)},
        ),
    ),
    # Two heads of k and v, so that a head's modulo is not its quotient, and a sequence each of them misses.
    "gqa": (
        Group(
            replace(BASE, d=(32, 32), n_seq=2, mask="random"),
            {"heads": [(2 * r, 2) for r in RATIOS], "n_q": (1, 4)},
            {"n_q": (9, 33), "layout": ("permuted",), "n_kv": (300,)},
        ),
        Group(replace(BASE, d=(128, 128), mask="random"), {"heads": [(12, 1), (15, 3), (64, 1)]}, {"n_q": (1, 17)}),
    ),
    "n_kv": (
        Group(replace(BASE, layout="padded", mask=None), {"n_kv": CONTEXTS}, {"n_q": (1, 33), "mask": ("random",)}),
        Group(BASE, {"n_kv": (1, 17, 255, 257, 1025), "n_q": (1, 9), "sinks": ("near",)}, {"sinks": (None, "large")}),
    ),
    # Keys of many programs, of which a sequence's length leaves some without any: parts must agree on a row's maximum.
    "parts": (
        Group(
            replace(BASE, n_q=1, n_kv=1100, heads=(4, 1), mask="lengths", n_seq=2, values="raised"),
            {},
            {"values": ("sunken", "huge"), "n_kv": (2100, 16300), "d": ((128, 128),)},
        ),
        Group(
            replace(BASE, n_q=4, n_kv=1100, heads=(4, 1), mask=None, values="huge"),
            {"softcap": (5.0,)},
            {"softcap": (0.0,), "n_kv": (2100, 16300), "d": ((128, 128),)},
        ),
    ),
    "n_q": (
        Group(
            BASE,
            {"n_q": (1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 31, 33, 63, 65, 127)},
            {"n_kv": (40, 512), "mask": ("random",), "heads": ((8, 1),)},
        ),
        Group(replace(BASE, heads=(2, 1), d=(32, 32)), {"n_q": (512,), "n_kv": (40, 257)}, {"mask": ("random", None)}),
    ),
    "masks": (
        Group(replace(_WIDE, n_q=40), {"mask": [None, *MASKS], "softcap": (0.0, 5.0)}, {"n_kv": (300,), "n_q": (1,)}),
        Group(
            replace(BASE, heads=(8, 2), n_seq=4),
            {"mask": ("some_heads", "lengths", "head_lengths", "one_for_all"), "sinks": ("near",)},
            {"n_q": (1, 33), "sinks": (None,)},
        ),
        Group(replace(BASE, n_q=70, layout="mask_padded"), {"mask": ("random", "per_head")}, {"n_q": (1, 5)}),
        Group(replace(BASE, n_q=75, n_kv=40), {"mask": ("causal", "window", "random")}, {"sinks": ("near",)}),
        # One sequence sees 127 keys: of a block of 16 to 128 keys the mask hides the last one alone.
        Group(replace(BASE, mask="lengths", n_seq=4), {"n_kv": (508,)}),
    ),
    "rows masked": (
        Group(
            replace(BASE, n_q=70, n_kv=300),
            {"rows": tuple(ROWS), "sinks": (None, "near"), "softcap": (0.0, 5.0)},
            {"mask": ("random", "window"), "n_q": (9, 33), "d": ((512, 512),)},
        ),
        Group(replace(BASE, n_q=1), {"rows": ("all",), "sinks": (None, "large"), "n_kv": (1, 1025)}),
        Group(replace(_WIDE, n_q=9, mask="per_head"), {"rows": ("leading", "trailing"), "sinks": ("none_of_it",)}),
    ),
    "sinks": (
        Group(BASE, {"sinks": tuple(SINKS), "mask": (None, "random"), "n_q": (1, 9)}, {"heads": ((12, 4),)}),
        Group(BASE, {"sinks": ("near",), "values": ("hot", "sunken", "raised"), "n_kv": (1025,)}, {"n_q": (1, 33)}),
    ),
    "alibi": (
        Group(
            replace(BASE, max_bias=8.0),
            {"heads": [(4, 4), (6, 3), (7, 1), (12, 4)], "mask": ("distance", "random")},
            {"max_bias": (4.0,), "n_q": (1, 33), "sinks": ("near",), "softcap": (5.0,), "mask": ("per_head",)},
        ),
        Group(replace(BASE, max_bias=4.0, heads=(12, 2), mask="distance"), {"sinks": ("near",), "softcap": (5.0,)}),
    ),
    "values": (
        Group(BASE, {"values": tuple(VALUES), "n_q": (1, 9), "n_kv": (113, 1025)}, {"mask": (None,), "n_q": (33,)}),
        # At a scale that is a power of two the logits stay exact.
        Group(
            replace(BASE, scale=0.0625),
            {"values": ("sunken", "raised", "peaked"), "d": [(128, 128), (256, 256)]},
            {"sinks": ("near",), "n_q": (1, 33)},
        ),
        Group(
            replace(BASE, softcap=10.0),
            {"values": ("hot", "peaked", "huge"), "mask": ("random", None)},
            {"softcap": (2.0, 30.0), "n_q": (1, 33), "sinks": ("near",), "n_kv": (1025,)},
        ),
        Group(BASE, {"scale": (1.0, 0.3)}, {"d": [(128, 128)], "softcap": (30.0,), "n_q": (1, 33)}),
        Group(replace(BASE, values="level"), {"types": [("q8_0", "f32"), ("f16", "bf16"), ("f16", "f32")]}),
    ),
    "spoiled": (
        Group(
            replace(BASE, n_q=9, spoil="nan"),
            {"mask": ("random", "blocks", "per_head"), "sinks": (None, "near"), "spoil": SPOILS},
            {"n_q": (1, 33), "n_kv": (300,), "heads": ((8, 1),), "layout": ("permuted",)},
        ),
        Group(replace(BASE, mask="random", spoil="nan"), {"types": [(t, t) for t in OTHERS]}, {"n_q": (1, 33)}),
        Group(replace(BASE, mask="random", spoil="nan", n_q=9, softcap=5.0), {"rows": ("leading", "all")}),
    ),
    "layouts": (
        Group(
            _WIDE,
            {"layout": ("permuted", "padded", "cache"), "types": [("f16", "f16"), ("q8_0", "q4_0")], "n_q": (1, 9)},
            {"d": [(128, 128), (192, 128)], "n_kv": (257,), "sinks": ("near",)},
        ),
        Group(
            replace(_WIDE, d=(96, 64)),
            {"layout": ("v_in_k", "v_after"), "types": [("f16", "f16"), ("q8_0", "q8_0")]},
            {"d": [(64, 64), (192, 128)], "n_q": (1, 33)},
        ),
    ),
    # Thousands of keys: splits with a sum of their own, some of them empty, and sums that f16 can't hold.
    "long": (
        Group(_LONG, {"n_kv": (10000,), "values": ("normal", "level"), "sinks": (None, "near")}, {"n_q": (4, 16)}),
        Group(
            _LONG,
            {"n_kv": (10000,), "mask": ("window", "big_blocks"), "values": ("normal", "sunken"), "n_q": (1, 4)},
            {"sinks": ("near",), "heads": ((8, 2),), "types": (("q8_0", "q8_0"),)},
        ),
        Group(replace(_LONG, n_kv=10000), {"rows": ("all",), "values": ("peaked", "huge")}),
        Group(replace(_LONG, n_kv=10000, mask="random", spoil="nan"), {}, {"n_q": (4,), "n_seq": (2,)}),
        Group(
            replace(_LONG, n_kv=4097, layout="cache", types=("q8_0", "q8_0")),
            {"mask": ("lengths",), "n_seq": (3,)},
            {"mask": ("causal", "window"), "n_q": (4, 32)},
        ),
    ),
    "far": (Group(replace(BASE, layout="far"), {"mask": ("random",)}),),
    "biases": (
        Group(_WIDE, {"bias": _BIASES, "n_q": (1, 9)}, {"mask": (None, "random"), "softcap": (5.0,)}),
        Group(replace(_WIDE, bias=_BIASES[2], softcap=5.0, sinks="near", mask="distance"), {"max_bias": (0.0, 8.0)}),
    ),
    # Tolerances are those of f32: k, v or weights that are rounded show.
    "precision": (
        Group(replace(_WIDE, prec=10), {"types": [("f16", "f16"), ("bf16", "f32")], "n_q": (1, 9)}),
        Group(
            replace(_WIDE, prec=10, d=(96, 128), n_q=9),
            {"types": [("f16", "q8_0")], "layout": ("padded",)},
            {"d": [(128, 128), (256, 256)], "n_q": (1, 65)},
        ),
    ),
    # Enough queries for a kernel for many of them, with products of k's and v's type and of wider ones.
    "floats of 8 bits": (
        Group(_EIGHT, {"prec": (0, 8), "d": [(64, 64), (128, 128)], "mask": ("random", None)}, {"mask": ("causal",)}),
        Group(replace(_EIGHT, sinks="near", layout="cache", heads=(6, 1), n_kv=1025), {"prec": (0, 8)}),
        Group(replace(_EIGHT, spoil="nan"), {"prec": (0, 8), "rows": ("leading",)}, {"rows": ("all",)}),
        Group(
            replace(_EIGHT, prec=8, n_seq=2),
            {"values": ("level",)},
            {"values": ("large_v",), "n_q": (1, 9), "n_kv": (512,)},
        ),
        Group(replace(_EIGHT, d=(256, 256), types=("f8_e5m2", "f8_e4m3")), {}, {"mask": (None,)}),
        Group(replace(BASE, q_type="f8_e4m3", types=("f8_e4m3", "f16"), layout="cache"), {"n_q": (1, 9)}),
        # The last scale is one that many results are too large for.
        Group(
            replace(_WIDE, types=("f8_e4m3", "f8_e4m3"), scaled="heads", layout="cache"),
            {"n_q": (1, 9), "out": (("f32", 1.0), ("f8_e4m3", 0.25), ("f8_e4m3", 0.001))},
            {"scaled": ("one",), "types": (("q8_0", "f16"),)},
        ),
        # Many rows, of scores that are near each other: a factor of 1.01 is more than chance explains.
        Group(replace(_EIGHT, n_q=160, heads=(8, 2), scale=0.03, prec=8)),
        Group(replace(_WIDE, n_q=50, types=("f8_e4m3", "f8_e4m3"), scaled="heads", out=("f8_e4m3", 0.05))),
        Group(replace(BASE, heads=(6, 2), out=("f8_e4m3", 0.1)), {}, {"n_q": (1, 33), "d": ((128, 128), (576, 512))}),
        Group(replace(_EIGHT, q_type="f8_e4m3"), {}, {"prec": (0, 8)}),
        Group(replace(_WIDE, q_type="f8_e4m3", sinks="near"), {}, {"layout": ("panels",), "max_bias": (8.0,)}),
    ),
    "dropout": (
        Group(replace(_WIDE, n_q=9), {"dropout_p": (0.1, 0.9), "mask": ("causal", None)}, {"n_kv": (1, 257)}),
        Group(replace(_WIDE, dropout_p=0.5, sinks="near", bias=_BIASES[3]), {"max_bias": (0.0, 8.0)}),
        # Enough queries for kernels of many; a bias of f16 without a mask, which they take for one.
        Group(replace(_MANY, dropout_p=0.3, bias=(4, 2, "f16"), n_seq=2), {"d": [(64, 64), (256, 256)]}),
        Group(replace(_MANY, dropout_p=0.3, n_kv=203, sinks="near"), {"d": [(128, 128)]}),
        Group(replace(_MANY, dropout_p=0.1, mask="causal", heads=(6, 2)), {"d": [(64, 64), (128, 128)]}),
    ),
    # Head sizes of one part and of two, types of 4, 8 and 16 elements a panel, keys that end within a tile.
    "panels": (
        Group(replace(BASE, layout="panels"), {"d": [(d, d) for d in (32, 64, 96, 128, 256)], "n_q": (1, 9)}),
        Group(
            replace(_WIDE, layout="panels", n_kv=257),
            {"types": [(t, t) for t in ("f32", "bf16", "f8_e4m3")], "mask": (None, "random")},
            {"n_q": (1, 70)},
        ),
        Group(replace(_WIDE, layout="panels", spoil="nan", sinks="near", softcap=5.0), {"mask": ("window",)}),
        Group(replace(_WIDE, layout="panels", score="branches", prec=10), {"n_kv": (1, 150)}),
    ),
    # Keys beyond a tile's last, heads that share keys and sequences, rows of one query and of several tiles.
    "scores": (
        Group(replace(_WIDE, n_q=19, n_kv=150), {"score": tuple(SCORES)}),
        Group(replace(_WIDE, score="branches"), {"n_q": (1, 5), "mask": ("window", "random")}, {"n_kv": (1025,)}),
        Group(
            replace(BASE, n_q=70, n_kv=300, heads=(2, 1), sinks="near", softcap=5.0), {"score": ("relative", "hides")}
        ),
        Group(replace(_WIDE, n_q=65, n_kv=150, score="branches"), {"mask": (None, "causal")}),
        Group(replace(_WIDE, n_q=65, n_kv=150, heads=(8, 2), score="branches", max_bias=8.0), {"mask": ("distance",)}),
        Group(replace(BASE, score="temperature", spoil="nan", bias=(4, 1, "f32"), max_bias=8.0), {"mask": ("random",)}),
        Group(
            replace(BASE, score="softcap", d=(128, 128)),
            {"types": [("q8_0", "q4_0"), ("bf16", "bf16"), ("f32", "f32")], "n_q": (1, 33)},
        ),
    ),
    # D that is no power of two ends in NaN, so that what a kernel pads it with must be its own zeros.
}

#: In the full set only.
FULL_ONLY: Mapping[str, Sequence[Group]] = {
    # More tiles than multiprocessors have programs.
    "many": (Group(replace(_LONG, d=(128, 128), n_kv=130, n_seq=64, heads=(16, 8)), {"mask": ("causal", "lengths")}),),
    "very long": (
        Group(replace(_LONG, d=(32, 32), heads=(2, 1), n_kv=131072),
              {"values": ("normal", "level"), "sinks": (None, "near"), "mask": ("causal", "window", "big_blocks")}),
        Group(replace(_LONG, n_kv=131072), {"types": [("f16", "f16"), ("q8_0", "q8_0")]}),
    ),
    "prefill": (
        Group(replace(BASE, d=(128, 128), heads=(8, 2)), {"n_q": (128, 512), "n_kv": (512, 1025),
              "mask": ("causal", "window", "blocks", None), "sinks": (None, "near")}),
        Group(replace(BASE, d=(64, 64), n_q=130, n_seq=2), {"heads": [(6, 2), (5, 1)], "values": tuple(VALUES),
              "mask": ("causal", "random")}),
    ),
    "pairs": (
        Group(replace(BASE, n_q=9, layout="cache"), {"d": [(40, 40), (80, 80), (128, 128), (256, 256)],
              "heads": [(4, 4), (6, 2), (8, 1)], "mask": ("causal", "window", "per_head"), "sinks": (None, "near"),
              "softcap": (0.0, 5.0), "n_kv": (113, 257)}),
    ),
}  # fmt: skip


def points(which: str) -> list[Axes]:
    """The points of a set, each once, in the order of the groups."""
    if which not in ("quick", "full"):
        raise ValueError(f"a set of points is quick or full, got {which!r}")
    groups = [*GROUPS.values(), *(FULL_ONLY.values() if which == "full" else ())]
    return list(dict.fromkeys(axes for group in groups for part in group for axes in part.axes(which == "full")))


#: Of the quick set FLASH_ATTN_LSE has the groups that change logits or their sum; v it doesn't know.
_LSE_GROUPS = ("n_kv", "masks", "rows masked", "sinks", "alibi", "biases", "scores", "panels")


def _lse_points(which: str) -> list[Axes]:
    of_groups = (axes for name in _LSE_GROUPS for part in GROUPS[name] for axes in part.axes(False))
    found = points("full") if which == "full" else of_groups
    changed = (replace(a, d=(a.d[0], a.d[0]), types=(a.types[0], "f16"), dropout_p=0.0) for a in found)
    return [a for a in dict.fromkeys(changed) if a.layout not in ("v_in_k", "v_after", "far")]


def cases(op: str, which: str = "quick") -> Iterator[Case]:
    """The cases of one of the two ops. which: "quick", or "full", which has the quick ones too."""
    chosen = points(which) if op == "FLASH_ATTN_EXT" else _lse_points(which)
    yield from (as_case(op, axes) for axes in chosen)


for _op in ("FLASH_ATTN_EXT", "FLASH_ATTN_LSE"):
    register_cases(_op, quick=partial(cases, _op), full=partial(cases, _op, "full"))
