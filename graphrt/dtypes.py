"""The table of types: name, ggml's id, elements per block, bytes per block.

Ids and block layouts are ggml's and are what a GGUF file stores. A plain type has one element per block; a quantized
type packs `block_size` consecutive elements of ne[0] into `type_size` bytes. Floats of 8 bits are this project's own:
plain types that ggml lacks, for caches and what is copied into them.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.errors import GraphError


@dataclass(frozen=True, slots=True)
class DType:
    """One type.

    name: ggml's lower-case name as files and flags spell it ("q4_K"); id: ggml's number, None for a type that ggml
    lacks and no GGUF file can hold; block_size: elements per block; type_size: bytes per block; kind: "float",
    "float8" (stored and read, never computed in), "int" or "quant".
    """

    name: str
    id: int | None
    block_size: int
    type_size: int
    kind: str

    @property
    def is_quantized(self) -> bool:
        return self.kind == "quant"

    @property
    def is_float8(self) -> bool:
        return self.kind == "float8"

    def row_size(self, n: int) -> int:
        """Bytes of `n` contiguous elements. Raises GraphError when `n` is not a whole number of blocks."""
        if n % self.block_size:
            raise GraphError(
                f"a row of {self.name} must hold whole blocks of {self.block_size} elements, got {n}; "
                f"pad the row or choose a type with smaller blocks"
            )
        return n // self.block_size * self.type_size

    def __repr__(self) -> str:
        return self.name


def _table(*rows: tuple[str, int | None, int, int, str]) -> dict[str, DType]:
    return {row[0]: DType(*row) for row in rows}


#: Every type of ggml 0.25.3 and the floats of 8 bits, by name.
TYPES: dict[str, DType] = _table(
    ("f32", 0, 1, 4, "float"),
    ("f16", 1, 1, 2, "float"),
    ("q4_0", 2, 32, 18, "quant"),
    ("q4_1", 3, 32, 20, "quant"),
    ("q5_0", 6, 32, 22, "quant"),
    ("q5_1", 7, 32, 24, "quant"),
    ("q8_0", 8, 32, 34, "quant"),
    ("q8_1", 9, 32, 36, "quant"),
    ("q2_K", 10, 256, 84, "quant"),
    ("q3_K", 11, 256, 110, "quant"),
    ("q4_K", 12, 256, 144, "quant"),
    ("q5_K", 13, 256, 176, "quant"),
    ("q6_K", 14, 256, 210, "quant"),
    ("q8_K", 15, 256, 292, "quant"),
    ("iq2_xxs", 16, 256, 66, "quant"),
    ("iq2_xs", 17, 256, 74, "quant"),
    ("iq3_xxs", 18, 256, 98, "quant"),
    ("iq1_s", 19, 256, 50, "quant"),
    ("iq4_nl", 20, 32, 18, "quant"),
    ("iq3_s", 21, 256, 110, "quant"),
    ("iq2_s", 22, 256, 82, "quant"),
    ("iq4_xs", 23, 256, 136, "quant"),
    ("i8", 24, 1, 1, "int"),
    ("i16", 25, 1, 2, "int"),
    ("i32", 26, 1, 4, "int"),
    ("i64", 27, 1, 8, "int"),
    ("f64", 28, 1, 8, "float"),
    ("iq1_m", 29, 256, 56, "quant"),
    ("bf16", 30, 1, 2, "float"),
    ("tq1_0", 34, 256, 54, "quant"),
    ("tq2_0", 35, 256, 66, "quant"),
    ("mxfp4", 39, 32, 17, "quant"),
    ("nvfp4", 40, 64, 36, "quant"),
    ("q1_0", 41, 128, 18, "quant"),
    ("q2_0", 42, 64, 18, "quant"),
    ("f8_e4m3", None, 1, 1, "float8"),
    ("f8_e5m2", None, 1, 1, "float8"),
)


@dataclass(frozen=True, slots=True)
class Float8:
    """What the codes of a float of 8 bits mean: a sign, an exponent, a mantissa.

    mantissa: its bits, the exponent has the other 7 - mantissa; bias: of the exponent; largest: the largest number,
    which everything larger is rounded to, infinity too; nan: the code of NaN, sign bit 0.
    """

    mantissa: int
    bias: int
    largest: float
    nan: int


#: OCP 8-bit Floating Point Specification (OFP8) 1.0. e4m3 is e4m3fn: no infinities, one NaN of each sign.
FLOATS8: dict[str, Float8] = {"f8_e4m3": Float8(3, 7, 448.0, 0x7F), "f8_e5m2": Float8(2, 15, 57344.0, 0x7F)}


@dataclass(frozen=True, slots=True)
class CacheType:
    """A type of which attention reads keys and values.

    written: ops round floats to it, which SET_ROWS and CPY do. steps: of a block's scale from zero to the largest
    value, 0 for a plain type; from_least: from the least to the largest. logits_nmse: what rounding into a cache adds
    to the NMSE of a model's logits where two backends round another way, a tenth of what the rounding itself costs;
    None: sessions don't offer it.
    """

    written: bool = True
    steps: float = 0.0
    from_least: bool = False
    logits_nmse: float | None = None


#: What can be in a cache. A new type is a row here and, where its codes are packed as no other's, what encodes them.
CACHES: dict[str, CacheType] = {
    "f32": CacheType(logits_nmse=0.0),
    "f16": CacheType(logits_nmse=1e-7),
    "bf16": CacheType(logits_nmse=1e-5),
    "q8_0": CacheType(steps=127.0, logits_nmse=1e-4),
    "q4_0": CacheType(steps=8.0, logits_nmse=1e-2),
    "f8_e4m3": CacheType(logits_nmse=1e-3),
    "f8_e5m2": CacheType(logits_nmse=4e-3),
    "q4_1": CacheType(steps=15.0, from_least=True, logits_nmse=1e-2),
    "q5_0": CacheType(steps=16.0, logits_nmse=3e-3),
    "q5_1": CacheType(steps=31.0, from_least=True, logits_nmse=3e-3),
    "iq4_nl": CacheType(written=False),
}
#: Types that floats are rounded to by SET_ROWS and CPY, and those of a session's cache.
WRITABLE = tuple(name for name, cache in CACHES.items() if cache.written)
CACHE_TYPES = tuple(name for name, cache in CACHES.items() if cache.logits_nmse is not None)

#: Ids that ggml once used and removed; a file that holds one is too old.
REMOVED_IDS = {
    4: "q4_2", 5: "q4_3", 31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8", 36: "iq4_nl_4_4", 37: "iq4_nl_4_8",
    38: "iq4_nl_8_8",
}  # fmt: skip

_BY_ID = {t.id: t for t in TYPES.values() if t.id is not None}
_BY_LOWER_NAME = {t.name.lower(): t for t in TYPES.values()} | {"f8": TYPES["f8_e4m3"]}

F32, F16, BF16, F64 = TYPES["f32"], TYPES["f16"], TYPES["bf16"], TYPES["f64"]
I8, I16, I32, I64 = TYPES["i8"], TYPES["i16"], TYPES["i32"], TYPES["i64"]


@checked(GraphError)
def dtype(name: str | DType) -> DType:
    """The type of that name, in any case; "f8" is f8_e4m3. Raises GraphError for an unknown one,
    listing what exists."""
    if isinstance(name, DType):
        return name
    found = _BY_LOWER_NAME.get(name.lower())
    if found is None:
        raise GraphError(f"a type must be one of {', '.join(TYPES)}, got {name!r}")
    return found


def dtype_by_id(type_id: int) -> DType | None:
    """The type with ggml's number `type_id`, or None when ggml has no such type (any more: see REMOVED_IDS)."""
    return _BY_ID.get(type_id)
