"""What one attention is given, read off its nodes, and how it is cut into tiles."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import triton.language as tl

from graphrt.backend import Place
from graphrt.backends.triton.device import interpreting
from graphrt.backends.triton.kernels.flash_attn.fusions import Attention
from graphrt.backends.triton.memory import TORCH_TYPES, elements
from graphrt.dtypes import DType
from graphrt.ops.flash_attn_ext import PREC_F32
from graphrt.ops.key_panels import ROWS, key_heads
from graphrt.ops.score import BUILT_IN, built_in
from graphrt.tensor import Tensor

AnyProblem = TypeVar("AnyProblem", bound="Problem")
DOT_TYPES = {"f32": tl.float32, "bf16": tl.bfloat16}


def split_head(d: int, at_least: int = 16) -> tuple[int, int]:
    """A head size as one or two powers of two that cover it: 576 as 512 + 64, 112 as 128 + 0."""
    whole = max(at_least, 1 << (d - 1).bit_length())
    half = whole // 2
    if d == whole or half < at_least:
        return whole, 0
    rest = max(at_least, 1 << (d - half - 1).bit_length())
    return (half, rest) if half + rest < whole else (whole, 0)


def dot_type(dt: DType) -> Any:
    """What products with a type compute in. Triton's interpreter gets bf16 wrong, so there it is f32."""
    kind = DOT_TYPES.get(dt.name, tl.float16)
    return tl.float32 if interpreting() and kind == tl.bfloat16 else kind


@dataclass(frozen=True, eq=False)
class Operand:
    """K or V as kernels take it.

    data: from its first element; strides: of keys, heads and sequences, in elements of `data`; kind: the type's name;
    aligned: quantized rows can be read as 4-byte words; by_words: rows of any kind can; dot: what its product computes
    in; d: the head size; parts: the powers of two that cover it. panel: (elements, stride) of keys in panels, else 0.
    """

    data: torch.Tensor
    strides: tuple[int, int, int]
    kind: str
    aligned: bool
    by_words: bool
    dot: Any
    d: int
    parts: tuple[int, int]
    panel: tuple[int, int] = (0, 0)


def operand(t: Tensor, place: Place, f32: bool = False) -> Operand:
    """A tensor of K or V at its place. f32: its products are to be in f32, whatever its type."""
    buffer, offset = place
    kind = t.dtype.name
    if t.dtype.is_quantized:
        aligned = all(n % 4 == 0 for n in (*t.nb[1:], offset))
        unit = torch.int32 if aligned else torch.int16
    else:
        aligned, unit = True, TORCH_TYPES[kind]
    n, h, s = (stride // unit.itemsize for stride in t.nb[1:])
    by_words = aligned and all(x % 4 == 0 for x in (*t.nb[1:], offset))
    # Triton 3.6 multiplies a second part of 16 or 32 columns wrongly on Hopper unless it comes by asynchronous copies
    # (D 80 with gaps, D 96 of q4_1 and q5_1: seen on an H100). Quantized rows never do, others where Triton sees that
    # they are aligned: it asks whether 16 divides the strides that it is told when it compiles.
    copied = t.dtype.kind == "float" and n * unit.itemsize % 16 == 0 and h % 16 == 0 and s % 16 == 0
    # Nor do rows that are widened to f32 on the way.
    widened = f32 and kind != "f32"
    least = 16 if copied and offset % 16 == 0 and not widened else 64
    parts = split_head(t.ne[0], least)
    data = elements(buffer, offset, t, unit)
    return Operand(data, (n, h, s), kind, aligned, by_words, tl.float32 if f32 else dot_type(t.dtype), t.ne[0], parts)


def panelled(t: Tensor, place: Place, d: int, f32: bool = False) -> Operand:
    """K in panels at its place: strides of keys, heads and sequences, and between panels; rows have d elements."""
    x = operand(t, place, f32)
    stride = x.strides[1]
    # A second part of 16 or 32 columns: see operand(); columns of panels never are one copy.
    parts = split_head(d, 64)
    strides = (x.strides[0], stride * (d // t.ne[0]), x.strides[2])
    return replace(x, strides=strides, d=d, parts=parts, panel=(t.ne[0], stride))


class Problem:
    """FLASH_ATTN_EXT, FLASH_ATTN_LSE, or both of the same sources. out, lse: the nodes, None for an absent one; in_f32:
    products are to be in f32, whatever K's and V's types; panels: K lies in panels."""

    in_f32 = False
    panels = False

    def __init__(self, attention: Attention, place: Callable[[Tensor], Place]) -> None:
        self.nodes, self.out, self.lse = attention.nodes, attention.out, attention.lse
        node = self.nodes[0]
        q, k, mask = node["q"], node["k"], node["mask"]
        v = self.out["v"] if self.out is not None else None
        self.q_t, self.k_t, self.v_t, self.mask_t, self.sinks_t = q, k, v, mask, node["sinks"]
        self.params = built_in(node.params)
        self.place = place
        self.in_f32 = getattr(node.params, "prec", 0) == PREC_F32
        self.panels = node.params.k_layout != ROWS
        of_panels = panelled(k, place(k), q.ne[0], self.in_f32) if self.panels else None
        self.k = of_panels or operand(k, place(k), self.in_f32)
        self.v = operand(v, place(v), self.in_f32) if v is not None else self.k
        self.n_kv, self.n_q, self.n_head, self.n_seq = k.ne[1], q.ne[1], q.ne[2], q.ne[3]
        self.gqa = q.ne[2] // key_heads(k, q.ne[0], node.params.k_layout)
        self.m2, self.m3 = (mask.ne[2], mask.ne[3]) if mask is not None else (1, 1)
        self.bias_t = node["attn_bias"]
        self.b2, self.b3 = self.bias_t.ne[2:] if self.bias_t is not None else (1, 1)

    @property
    def built_in(self) -> tuple[str, ...]:
        """The sentence that says so where the score function is what a parameter of the op stands for."""
        text = getattr(self.nodes[0].params, "score", "")
        if not text or self.params.score:
            return ()
        name = BUILT_IN[text][0]
        return (f"the score function {text} is computed as the op's {name}, {getattr(self.params, name):g}",)

    @property
    def dropout_p(self) -> float:
        return float(getattr(self.params, "dropout_p", 0.0)) if self.out is not None else 0.0

    @property
    def portable_only(self) -> str | None:
        """What only the portable kernel does of it, None where it asks for nothing of the kind."""
        if self.dropout_p:
            return f"it has no dropout, {self.dropout_p:g} here"
        return self.portable_but_dropout

    @property
    def portable_but_dropout(self) -> str | None:
        """The same for kernels that have dropout."""
        if self.in_f32 and (self.k.kind, self.v.kind) != ("f32", "f32"):
            return "it multiplies in k's and v's types, prec asks for f32"
        if self.panels:
            return "it reads keys in rows, the portable kernel in panels too"
        if self.bias_t is not None:
            return "it adds no such attn_bias, which the portable kernel does"
        return None

    @property
    def v_in_k(self) -> bool:
        """A tile of V is the first part of K's tile."""
        k, v = self.k_t, self.v_t
        if self.panels or v is None or v.dtype is not k.dtype or v.nb != k.nb or self.place(v) != self.place(k):
            return False
        return self.v.parts == (self.k.parts[0], 0)

    def memory(self, t: Tensor, kind: torch.dtype) -> torch.Tensor:
        """A tensor's memory as a flat torch tensor."""
        return elements(*self.place(t), t, kind)


def with_bias_as_mask(p: AnyProblem) -> AnyProblem:
    """The problem with its bias in the mask's place, for kernels that can take it for one: of f16, without a mask
    beside it. A mask without slopes is added to logits where a bias is."""
    if p.bias_t is None or p.mask_t is not None or p.bias_t.dtype.name != "f16":
        return p
    p = copy.copy(p)
    p.mask_t, p.m2, p.m3, p.bias_t = p.bias_t, p.b2, p.b3, None
    p.params = replace(p.params, max_bias=0.0)
    return p


@dataclass(frozen=True)
class Tiling:
    """A problem's tiles: block_m query rows of `pack` heads that share a KV head, against k-blocks of block_n keys.

    n_groups: of heads, n_qt: tiles of one group, n_blocks: k-blocks if the mask hides none; mask_groups: groups with
    masks of their own, 1 if all share one; n_mask_tiles: tiles whose masks differ.
    """

    block_m: int
    block_n: int
    pack: int
    n_groups: int
    n_qt: int
    n_tiles: int
    n_blocks: int
    mask_groups: int
    n_mask_tiles: int

    @staticmethod
    def of(p: Problem, block_m: int, block_n: int, pack: int | None = None) -> Tiling:
        """pack: heads a tile, by default as many of those that share a KV head as fit."""
        pack = pack or max(n for n in range(1, min(p.gqa, block_m) + 1) if p.gqa % n == 0)
        n_groups = p.n_head // pack
        n_qt = -(-p.n_q * pack // block_m)
        groups = 1 if p.m2 == 1 else n_groups
        return Tiling(
            block_m, block_n, pack, n_groups, n_qt, n_qt * n_groups * p.n_seq, -(-p.n_kv // block_n), groups,
            p.m3 * groups * n_qt,
        )  # fmt: skip

    def uniform(self, has_mask: bool) -> bool:
        """All tiles have equally many k-blocks for sure."""
        return not has_mask or self.n_mask_tiles == 1
