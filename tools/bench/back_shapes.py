"""The shapes of `graphrt bench op FLASH_ATTN_BACK`, and what each is held against.

first and goal are TFLOP/s of 2.5 times the forward's work, what a causal mask hides left out, to be reached on one H200
in the form that a shape names; where they are parts of another shape's speed, that one is named beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphrt.errors import GraphError


@dataclass(frozen=True)
class BackShape:
    """d: of q, k and v; heads: of q, and of k and v; seqs: queries, and as many keys, of each sequence; packed: they
    follow one another, else there is one. form: of the backend's option `backward`. bias: a dense one of all heads,
    whose gradient is made too. beside: the name of the shape whose speed this one's is told as a part of."""

    name: str
    d: int
    heads: tuple[int, int]
    seqs: tuple[int, ...]
    causal: bool = False
    packed: bool = False
    form: str = "split"
    softcap: float = 0.0
    max_bias: float = 0.0
    sinks: bool = False
    dropout_p: float = 0.0
    bias: bool = False
    kv_type: str = "f16"
    beside: str = ""
    first: str = ""
    goal: str = ""

    @property
    def n(self) -> int:
        """Queries, and keys, of all."""
        return sum(self.seqs)

    @property
    def of(self) -> tuple[str, ...]:
        """The sources whose gradients are made."""
        return ("q", "k", "v", *(["attn_bias"] if self.bias else []), *(["sinks"] if self.sinks else []))

    @property
    def flops(self) -> float:
        """2.5 times the forward's, of what is seen."""
        pairs = sum(n * (n + 1) / 2 if self.causal else float(n * n) for n in self.seqs)
        return 2.5 * 4 * self.d * self.heads[0] * pairs

    @property
    def bytes(self) -> int:
        """q, d_out, out and their gradient in f32, k and v in two bytes, their gradients in f32, once each."""
        rows, keys = 4 * self.d * self.heads[0] * self.n, self.d * self.heads[1] * self.n
        return 4 * rows + 2 * (2 + 4) * keys


_FULL = BackShape("d128 full", 128, (32, 32), (4096,), first="330", goal="cuDNN")
_CAUSAL = replace(_FULL, name="d128 causal", causal=True, first="270")
_FUSED = (
    replace(_FULL, name="d128 full fused-k", form="fused-k", first="420", goal="1.05 of cuDNN"),
    replace(_CAUSAL, name="d128 causal fused-k", form="fused-k", first="340", goal="1.05 of cuDNN"),
    replace(_FULL, name="d128 full fused-q", form="fused-q", first="", goal=""),
)


def _beside(plain: BackShape, first: str = "0.85 of plain", goal: str = "0.95 of plain") -> BackShape:
    """The same shape, to be changed in something that is timed beside it."""
    return replace(plain, beside=plain.name, first=first, goal=goal)


_SEQS = tuple(64 + 4032 * (i * i) // 225 for i in range(16))
#: 8 sequences of 32 heads that are not packed: each of the 256 has its own queries and keys, as 256 heads have.
_EQUAL = BackShape("d128 equal, not packed", 128, (256, 256), (2048,), causal=True)
SHAPES = (
    _FULL, _CAUSAL, *_FUSED,
    replace(_FULL, name="d128 full bf16", kv_type="bf16", first="", goal=""),
    replace(_CAUSAL, name="d128 causal gqa4", heads=(32, 8), first="", goal=""),
    BackShape("d64 full", 64, (32, 32), (4096,), first="280", goal="cuDNN"),
    BackShape("d256 full", 256, (16, 16), (4096,), first="300", goal="cuDNN"),
    BackShape("d128 causal 16384", 128, (32, 32), (16384,), causal=True, first="400", goal="540"),
    replace(_beside(_FULL), name="d128 full softcap", softcap=30.0),
    replace(_beside(_CAUSAL), name="d128 causal alibi", max_bias=8.0),
    replace(_beside(_FULL), name="d128 full sinks", sinks=True),
    replace(_beside(_FULL, "", ""), name="d128 full dropout", dropout_p=0.1),
    replace(_beside(_FULL, "0.65 of plain", "0.8 of plain"), name="d128 full dropout bias", dropout_p=0.1, bias=True),
    _EQUAL,
    replace(_EQUAL, name="d128 packed equal", heads=(32, 32), seqs=(2048,) * 8, packed=True, beside=_EQUAL.name),
    BackShape(
        "d128 packed 64 to 4096", 128, (32, 32), _SEQS, causal=True, packed=True, beside=_EQUAL.name,
        first="0.88 of equal", goal="0.96 of equal",
    ),
)  # fmt: skip


def shapes_of(part: str = "") -> list[BackShape]:
    """Those with `part` in their names, and those that they are told beside. Raises GraphError where none has it."""
    chosen = [s for s in SHAPES if part.lower() in s.name]
    if not chosen:
        raise GraphError(f"a shape's name must have {part[:80]!r} in it, none does; --list shows them")
    names = {name for s in chosen for name in (s.name, s.beside)}
    return [s for s in SHAPES if s.name in names]


def tiny(shapes: Sequence[BackShape]) -> list[BackShape]:
    """The same with few heads and queries, for a CPU: no figure holds for them."""
    return [
        replace(s, heads=(2 * s.heads[0] // s.heads[1], 2), seqs=tuple(-(-n // 128) for n in s.seqs), first="", goal="")
        for s in shapes
    ]
