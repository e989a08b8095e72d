"""The shapes that `graphrt bench op` measures, as data: sizes, types, and the figures each is held against.

Where the figures come from. `llama` is llama.cpp's CUDA backend (ggml 0.25.3, built from source for sm_90a), measured
on one H100 80GB HBM3 with its own `test-backend-ops perf`: f16 K and V, a mask given, TFLOP/s counted over every score.
It is quoted, never measured here. Its table (us for 1 query, else TFLOP/s), 8 KV heads unless said:

    kv                           4096    16384   65536
    D64, 4096 queries, GQA 4      207      217     185
    D128, 4096 queries, GQA 4     245      231     217
    D256, 4096 queries, GQA 4     258      220     223
    576/512, 4096 queries, GQA 4  155      158     158
    D64, 1 query, GQA 8          10.6     13.1    52.9
    D128, 1 query, GQA 4         13.1     36.8     128
    D128, 1 query, GQA 8         19.4     30.7    95.8
    D256, 1 query, GQA 8         14.3     53.3     183
    576/512, 1 query, GQA 8      29.5     73.3     259
    D256, 2 KV heads, GQA 16, kv 10000 / 20000: 1 query 185 / 522; 512 queries 66
    D64, kv 7680, GQA 8: 1 query f16 17.6, q8_0 25.9, q4_0 29.2; 512 queries q8_0 170

`first` and `goal` are what a backend for that GPU is to reach first and in the end. The goals are cuDNN's figures on
that machine where it has the shape; for decode, what memory allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphrt.dtypes import dtype
from graphrt.errors import GraphError
from graphrt.ops.flash_attn_ext import PREC_F8
from graphrt.tools.bench.models import heads_of

#: What is capped is capped to so much.
CAP = 30.0
#: Forms of flash decoding that are measured beside what the backend chooses (graphrt/ops/decode_costs.py).
PASS_FORMS = ("partial-wait", "partial-two", "global-wait", "global-two")
#: A set holds the shapes of those before it too.
SETS = ("quick", "default", "full")
LLAMA_SOURCE = "llama.cpp ggml 0.25.3 (sm_90a), test-backend-ops perf on an H100 80GB HBM3; quoted, not measured here"


@dataclass(frozen=True)
class Mark:
    """A figure to reach, by its unit.

    "TFLOP/s": at least `value`; "us": at most; "of cuDNN": at least that part of cuDNN's speed in this run; "speed of"
    and "time of": at least that part of the speed, and at most that part of the time, of the shape `of` in this run.
    """

    value: float
    unit: str
    of: Shape | None = None

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit}" + (f" {self.of.name}" if self.of else "")


@dataclass(frozen=True)
class Shape:
    """One attention: q [d, n_q, n_head] f32, k [d, n_kv, n_head_kv] and v [d_v, n_kv, n_head_kv] of `kv_type`.

    mask: "none"; "visible", all 0; "causal", the last query sees the last key; "distance", causal with ALiBi's
    distances; "dense", random finite values. v_in_k: v is a view of k's first d_v elements. apart: standard attention,
    three ops whose scores and weights lie in memory. dropout_p: the part of the weights that is left out. prec: the
    op's, 8 for products of 8-bit floats. score: a score function, "identity", "softcap" (of CAP), "gate" or "slopes"
    (ALiBi's). llama: us for one query, else TFLOP/s; elsewhere: what that was measured on, where it is not this very
    shape. panels: k lies in panels (ops/key_panels.py). form: the backend's option `schedule` for it, "" for its own
    choice.
    """

    kind: str
    d: int
    n_head: int
    n_head_kv: int
    n_q: int
    n_kv: int
    d_v: int
    kv_type: str = "f16"
    mask: str = "none"
    softcap: float = 0.0
    max_bias: float = 0.0
    sinks: bool = False
    v_in_k: bool = False
    apart: bool = False
    dropout_p: float = 0.0
    prec: int = 0
    score: str = ""
    panels: bool = False
    form: str = ""
    llama: float | None = None
    elsewhere: str = ""
    first: Mark | None = None
    goal: Mark | None = None
    set: str = "default"
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", _name(self))

    @property
    def is_decode(self) -> bool:
        """Few queries: bound by memory and latency, told in us and GB/s; all others in TFLOP/s."""
        return self.n_q == 1 or self.kind == "decode"

    @property
    def scale(self) -> float:
        """1/sqrt(d), twice that with a softcap: scores of deviation 1 would hardly tell whether one was applied."""
        return (2.0 if self.softcap or self.score == "softcap" else 1.0) / math.sqrt(self.d)

    @property
    def counted(self) -> float:
        """The share of the scores that counts as work: what a causal mask leaves, half of a square."""
        return 1.0 - self.n_q / (2.0 * self.n_kv) if self.mask in ("causal", "distance") else 1.0

    @property
    def cache_bytes(self) -> int:
        """Bytes of k and v, v only where it is not a part of k."""
        elements = self.n_kv * self.n_head_kv * (self.d + (0 if self.v_in_k else self.d_v))
        return dtype(self.kv_type).row_size(elements)

    @property
    def needs(self) -> list[Shape]:
        """The shapes that its marks are relative to."""
        return [m.of for m in (self.first, self.goal) if m is not None and m.of is not None]


def _name(s: Shape) -> str:
    """`prefill D128 H32/8 4096x4096 causal softcap`: sizes are heads of q/k, queries x keys."""
    size = f"D{s.d}" if s.d == s.d_v else f"D{s.d}/{s.d_v}"
    extras = [s.mask] if s.mask in ("causal", "dense") else ["alibi"] if s.mask == "distance" else []
    extras += ["standard"] * s.apart
    extras += ["softcap"] * (s.softcap > 0) + ["sinks"] * s.sinks + [s.kv_type] * (s.kv_type != "f16")
    extras += ["dropout"] * (s.dropout_p > 0)
    extras += ["products"] * (s.prec == PREC_F8)
    extras += [f"score {s.score}"] * bool(s.score) + ["panels"] * s.panels
    extras += [s.form] * bool(s.form)
    return " ".join([s.kind, size, f"H{s.n_head}/{s.n_head_kv}", f"{s.n_q}x{s.n_kv}", *extras])


def _tflops(value: float) -> Mark:
    return Mark(value, "TFLOP/s")


def _prefill(d: int, heads: tuple[int, int], n_q: int, n_kv: int, mask: str = "none", **more: Any) -> Shape:
    return replace(Shape("prefill", d, *heads, n_q, n_kv, d, mask=mask), name="", **more)


def _decode(d: int, heads: tuple[int, int], n_kv: int, us: tuple[float, float] | None = None, **more: Any) -> Shape:
    """One query. us: the time to reach first, and the goal."""
    marks = {"first": Mark(us[0], "us"), "goal": Mark(us[1], "us")} if us else {}
    return replace(Shape("decode", d, *heads, 1, n_kv, d, mask="visible"), **{"name": "", **marks, **more})


def _relative(of: Shape, **change: Any) -> Shape:
    """`of` with a feature more: 0.85 of its speed first, 0.95 in the end."""
    first, goal = Mark(0.85, "speed of", of), Mark(0.95, "speed of", of)
    return replace(of, name="", llama=None, set="default", first=first, goal=goal, **change)


def _scored(of: Shape, score: str, part: float, **change: Any) -> Shape:
    """`of` with a score function, which is to reach a part of its speed. change: what it takes the place of."""
    mark = Mark(part, "speed of", of)
    return replace(
        of, name="", llama=None, set="default", first=mark, goal=Mark(1.0, "speed of", of), score=score, **change
    )


def _quantized(of: Shape, kind: str, first: float, goal: float) -> Shape:
    """`of` with a quantized cache, or one of 8-bit floats, which is to take these parts of its time."""
    marks = (Mark(first, "time of", of), Mark(goal, "time of", of))
    return replace(of, kv_type=kind, name="", llama=None, first=marks[0], goal=marks[1])


def _eight(of: Shape, prec: int = PREC_F8, rates: tuple[float, float] | None = None) -> Shape:
    """`of` with a cache of 8-bit floats, and products of them unless prec is 0. rates: to reach first, and the goal."""
    first, goal = (_tflops(rate) for rate in rates) if rates else (None, None)
    return replace(of, kv_type="f8_e4m3", prec=prec, name="", llama=None, set="default", first=first, goal=goal)


_H32_8, _H64_8 = (32, 8), (64, 8)
_MLA: dict[str, Any] = {"d_v": 512, "v_in_k": True}
_CUDNN = Mark(1.0, "of cuDNN")

_CAUSAL = _prefill(128, _H32_8, 4096, 4096, "causal", first=_tflops(420), goal=_tflops(509), set="quick")
_FULL = _prefill(128, _H32_8, 4096, 4096, llama=245, first=_tflops(540), goal=_CUDNN, set="quick")
_LONGER = _prefill(128, _H32_8, 16384, 16384)
_CAPPED = [_relative(_FULL, softcap=CAP), _relative(_CAUSAL, softcap=CAP)]

_PREFILL = [
    _CAUSAL,
    _FULL,
    _prefill(64, _H32_8, 4096, 4096, llama=207, first=_tflops(420), goal=_CUDNN),
    _prefill(256, (16, 4), 4096, 4096, llama=258, elsewhere="H32/8", first=_tflops(600), goal=_CUDNN),
    _prefill(128, _H32_8, 4096, 4096, "dense", llama=245, first=_tflops(450), goal=_tflops(540)),
    *_CAPPED,
    *(_scored(s, "softcap", 0.97, softcap=0.0) for s in _CAPPED),
    _scored(_CAUSAL, "identity", 1.0),
    *(_scored(_CAUSAL, name, 0.75) for name in ("gate", "slopes")),
    _relative(_CAUSAL, mask="distance", max_bias=8.0),
    _relative(_FULL, sinks=True),
    replace(_relative(_FULL, dropout_p=0.1), first=Mark(0.8, "speed of", _FULL), goal=Mark(0.9, "speed of", _FULL)),
    _LONGER,
    _prefill(128, _H32_8, 16384, 16384, "causal"),
    _eight(_FULL, prec=0),
    _eight(_FULL, rates=(700, 1000)),
    _eight(_LONGER, rates=(800, 1000)),
    _eight(_CAUSAL),
    _prefill(64, _H32_8, 4096, 4096, "causal"),
    _eight(_prefill(64, _H32_8, 4096, 4096)),
    _prefill(256, (16, 4), 4096, 4096, "causal"),
    _prefill(576, _H32_8, 4096, 4096, **_MLA, llama=155, first=_tflops(350), goal=_tflops(500)),
    _prefill(
        576, (8, 1), 4096, 4096, **_MLA, llama=155, elsewhere="H32/8", first=_tflops(350), goal=_tflops(500)
    ),
]  # fmt: skip

_DECODE_128 = [
    _decode(128, _H32_8, 4096, (11, 7), llama=13.1, set="quick"),
    _decode(128, _H32_8, 16384, (28, 24), llama=36.8),
    _decode(128, _H32_8, 65536, (93, 91), llama=128, set="quick"),
]
#: One query of 32 heads over keys in panels, and in rows where no other shape has them: KV heads, keys, in panels.
_PANELS = [
    (8, 4096, True),
    (8, 65536, True),
    (32, 4096, False),
    (32, 4096, True),
    (32, 16384, False),
    (32, 16384, True),
]
_DECODE = [
    *_DECODE_128,
    *(replace(_decode(128, (32, kv), n), name="", panels=p) for kv, n, p in _PANELS),
    *(_decode(128, _H64_8, n, llama=us) for n, us in ((4096, 19.4), (16384, 30.7), (65536, 95.8))),
    *(_decode(64, _H64_8, n, llama=us) for n, us in ((4096, 10.6), (16384, 13.1), (65536, 52.9))),
    *(_decode(256, _H64_8, n, llama=us) for n, us in ((4096, 14.3), (16384, 53.3), (65536, 183))),
    *(_decode(576, _H64_8, n, llama=us, **_MLA) for n, us in ((4096, 29.5), (16384, 73.3), (65536, 259))),
    _decode(256, (32, 2), 10000, (14, 8), llama=185, set="quick"),
    _decode(256, (32, 2), 20000, (22, 15), llama=522),
    _scored(_DECODE_128[2], "softcap", 0.97),
    _quantized(_DECODE_128[2], "q8_0", 0.65, 0.56),
    _quantized(_DECODE_128[2], "q4_0", 0.5, 0.36),
    _quantized(_DECODE_128[2], "f8_e4m3", 0.62, 0.54),
    *(
        _decode(64, _H64_8, 7680, llama=us, kv_type=kind)
        for kind, us in (("f16", 17.6), ("q8_0", 25.9), ("q4_0", 29.2))
    ),
]

#: Some queries at the end of a long cache.
_CHUNKS = [
    _prefill(256, (32, 2), 512, 10000, "causal", llama=66),
    _prefill(256, (32, 2), 512, 20000, "causal", llama=66),
    _prefill(
        64, _H64_8, 512, 7680, "causal", kv_type="q8_0", llama=170, first=_tflops(300), goal=_tflops(380), set="quick"
    ),
]

#: The rest of llama.cpp's table, whose figures are of a mask that is given.
_LONG = [
    _prefill(256, _H32_8, 4096, 4096, "dense", llama=258, set="full"),
    *(
        _prefill(d, _H32_8, 4096, n_kv, "dense", llama=rate, set="full", **(_MLA if d == 576 else {}))
        for n_kv, rates in ((16384, (217, 231, 220, 158)), (65536, (185, 217, 223, 158)))
        for d, rate in zip((64, 128, 256, 576), rates)
    ),
]

#: Standard attention and the fused op over the same sizes: what the papers of FlashAttention compare.
_BOTH = [
    replace(_prefill(d, _H32_8, n, n, mask, set="full"), name="", apart=apart)
    for d in (64, 128) for n in (1024, 2048, 4096, 8192) for mask in ("none", "causal") for apart in (False, True)
]  # fmt: skip
#: Flash decoding's two algorithms: queries and heads, of at most 16 rows a KV head; keys; every form, and our choice.
_PASSES = [
    replace(_decode(d, heads, n_kv, set="full"), name="", n_q=n_q, form=form)
    for d, n_q, heads in ((128, 1, _H32_8), (128, 4, _H32_8), (128, 16, (8, 8)), (64, 1, _H32_8))
    for n_kv in (4096, 16384, 65536) for form in ("", *PASS_FORMS)
]  # fmt: skip
_KNOWN = {s.name for s in (*_PREFILL, *_LONG, *_DECODE)}

#: op -> its shapes.
SHAPES: dict[str, list[Shape]] = {
    "FLASH_ATTN_EXT": [*_PREFILL, *_DECODE, *_CHUNKS, *_LONG, *(s for s in (*_BOTH, *_PASSES) if s.name not in _KNOWN)]
}
#: every op that `bench op` measures; varlen_shapes.py and back_shapes.py have the others' shapes
MEASURED = (*SHAPES, "FLASH_ATTN_VARLEN", "FLASH_ATTN_BACK")


def shapes_of(op: str, which: str = "default", part: str = "", model: str | None = None) -> list[Shape]:
    """The shapes of a set whose names have `part` in them, in any case, and those that their marks are relative to.
    model: by its name, those of its attention instead of a set's.

    Raises GraphError for an op without shapes, and where nothing is left.
    """
    if op.upper() not in SHAPES:
        raise GraphError(
            f"an op to measure must be one of {', '.join(MEASURED)}, got {op[:40]!r}; `graphrt test perf -o OP` times "
            f"the conformance cases of any op"
        )
    everything = SHAPES[op.upper()] if model is None else model_shapes(model)
    in_set = [s for s in everything if SETS.index(s.set) <= SETS.index(which)]
    chosen = [s for s in in_set if part.lower() in s.name.lower()]
    if not chosen:
        raise GraphError(f"a shape's name must have {part[:80]!r} in it, none of set {which} does; --list shows them")
    wanted = {s.name for shape in chosen for s in (shape, *shape.needs)}
    return [s for s in everything if s.name in wanted]


def model_shapes(name: str) -> list[Shape]:
    """A model's attention: prompts, a batch at the end of a long cache, and steps of one token. Raises GraphError."""
    n_head, n_head_kv, d_k, d_v = heads_of(name)
    more: dict[str, Any] = {"d_v": d_v, "v_in_k": d_v != d_k, "set": "quick"}
    heads = (n_head, n_head_kv)
    found = [_prefill(d_k, heads, n, n, "causal", **more) for n in (512, 4096, 16384)]
    found.append(_prefill(d_k, heads, 512, 16384, "causal", **more))
    return [*found, *(_decode(d_k, heads, n, **more) for n in (4096, 16384, 65536))]


def tiny(shapes: Sequence[Shape]) -> list[Shape]:
    """The same shapes with few heads, queries and keys, for a CPU: no figure of the table holds for them."""
    return [_tiny(s) for s in shapes]


def _tiny(s: Shape) -> Shape:
    heads_kv = min(s.n_head_kv, 2)
    # Odd sizes keep their unevenness: 10000 keys become 78, 4096 become 32 and so on.
    return replace(
        s, n_head_kv=heads_kv, n_head=heads_kv * min(s.n_head // s.n_head_kv, 4), n_q=-(-s.n_q // 128),
        n_kv=min(max(s.n_kv // 128, 32), 160), llama=None, elsewhere="", first=None, goal=None,
    )  # fmt: skip
