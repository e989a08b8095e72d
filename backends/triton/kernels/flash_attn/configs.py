"""Block sizes and the like, by architecture. Only speed depends on a row, never the result.

Each row was measured or, where no such GPU was at hand, compiled: no spills, shared memory within the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Config:
    """block_m: query rows a tile; block_n: keys a k-block; warps: of 32 threads, 64 on AMD; stages: k-blocks in flight;
    ways: of the decode form, keys are shared out to so many warps, 0 for the other form; per_sm: programs that a
    multiprocessor holds at once, for the chooser; ieee: f32 products without the matrix units (the three tf32 products
    that stand for one take more registers than large heads leave). On AMD, 0 for the compiler's choice: waves_per_eu,
    waves that a SIMD shall hold, which bounds registers; matrix_instr_nonkdim: rows and columns of its matrix
    instructions, 16 or 32; pre_load_v: V is asked for before the softmax of its block, not after.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    ways: int = 0
    per_sm: int = 1
    ieee: bool = False
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0
    pre_load_v: bool = False


@dataclass(frozen=True)
class Row:
    """What config holds for: at most `rows` query rows (of all queries and heads that share a KV head), head sizes to
    `d` and these kinds of K: "half" (f16, bf16), "f32" or "quantized". v_in_k: only if V's tiles are parts of K's."""

    rows: int
    d: int
    kinds: tuple[str, ...]
    config: Config
    v_in_k: bool = False


MANY = 1 << 30
ALL = ("half", "f32", "quantized")

#: The first row that fits holds. On Hopper decode.py and the hopper kernels take most shapes; this is for the others.
_HOPPER = (
    Row(16, 64, ("half",), Config(16, 128, 4, 3, ways=4, per_sm=2)),
    Row(16, 128, ("half",), Config(16, 128, 4, 3, per_sm=1)),
    Row(16, 128, ("quantized",), Config(16, 64, 8, 3, ways=4, per_sm=1)),
    Row(16, 128, ("f32",), Config(16, 32, 4, 2, per_sm=2)),
    Row(16, 256, ("half",), Config(16, 64, 4, 2, per_sm=1)),
    Row(16, 256, ("quantized",), Config(16, 64, 4, 2, per_sm=2)),
    Row(16, 256, ("f32",), Config(16, 32, 8, 1, per_sm=1)),
    Row(16, MANY, ("half", "quantized"), Config(16, 64, 8, 2, per_sm=1)),
    Row(16, MANY, ("f32",), Config(16, 32, 16, 1, ieee=True)),
    Row(MANY, 64, ("half", "quantized"), Config(128, 64, 8, 3, per_sm=1)),
    Row(MANY, 128, ("half", "quantized"), Config(64, 64, 4, 3, per_sm=1)),
    Row(MANY, 256, ("half", "quantized"), Config(64, 64, 8, 2, per_sm=1)),
    Row(MANY, MANY, ("half",), Config(32, 32, 4, 2, per_sm=2)),
    Row(MANY, MANY, ("quantized",), Config(16, 32, 8, 1, per_sm=1)),
    Row(MANY, 128, ("f32",), Config(16, 32, 4, 2, per_sm=2)),
    Row(MANY, MANY, ("f32",), Config(16, 32, 16, 1, ieee=True)),
)
_AMPERE = (
    Row(16, 128, ("half", "quantized"), Config(16, 64, 8, 2, ways=4, per_sm=1)),
    Row(16, 128, ("f32",), Config(16, 64, 8, 2, per_sm=1)),
    Row(16, 256, ("half",), Config(16, 64, 4, 3, per_sm=1)),
    Row(16, 256, ("quantized",), Config(16, 64, 4, 2, per_sm=1)),
    Row(16, 256, ("f32",), Config(16, 32, 8, 1, per_sm=1)),
    Row(16, MANY, ("half", "quantized"), Config(16, 32, 8, 2, per_sm=1)),
    Row(MANY, 128, ("half",), Config(64, 64, 4, 3, per_sm=1)),
    Row(MANY, 128, ("quantized",), Config(64, 32, 8, 1, per_sm=1)),
    Row(MANY, 256, ("half",), Config(64, 64, 8, 2, per_sm=1)),
    Row(MANY, 256, ("quantized",), Config(32, 32, 8, 1, per_sm=1)),
    Row(MANY, MANY, ("half",), Config(32, 32, 4, 2, per_sm=1)),
    Row(MANY, MANY, ("quantized",), Config(16, 32, 8, 1, per_sm=1)),
    Row(MANY, 128, ("f32",), Config(16, 32, 4, 2, per_sm=1)),
    Row(MANY, MANY, ("f32",), Config(16, 32, 16, 1, ieee=True)),
)
#: By rows and d, what there is room for of the rows of halves on GPUs with 99 KiB of shared memory a program (compute
#: capability 8.6, 8.9, 12.0 and 12.1); the others of _AMPERE fit. Compiled, not measured.
_LESS = {
    (16, 256): Config(16, 64, 4, 2),
    (MANY, 128): Config(64, 64, 4, 2),
    (MANY, 256): Config(64, 32, 8, 2),
    (MANY, MANY): Config(32, 16, 4, 2),
}
_AMPERE_SMALL = tuple(replace(row, config=_LESS[row.rows, row.d]) if row.kinds == ("half",) else row for row in _AMPERE)
_CDNA3 = (
    Row(16, 128, ALL, Config(16, 32, 4, 1, per_sm=2)),
    Row(16, MANY, ALL, Config(16, 32, 4, 1, per_sm=1)),
    Row(MANY, 128, ("half", "quantized"), Config(64, 32, 4, 1, per_sm=1)),
    Row(MANY, 256, ("half", "quantized"), Config(32, 32, 4, 1, per_sm=1)),
    Row(MANY, 256, ("f32",), Config(16, 32, 4, 1, per_sm=1)),
    Row(MANY, MANY, ("half", "quantized"), Config(16, 32, 4, 1, per_sm=1)),
    Row(MANY, MANY, ("f32",), Config(16, 16, 4, 1, per_sm=1)),
)
#: Small blocks, so that small shapes have several tiles and k-blocks; both forms.
_INTERPRETER = (
    Row(16, 128, ALL, Config(16, 64, 1, 1, ways=2)),
    Row(16, MANY, ALL, Config(16, 32, 1, 1)),
    Row(MANY, MANY, ALL, Config(32, 32, 1, 1)),
)

TABLES: dict[str, tuple[Row, ...]] = {
    "sm_80": _AMPERE, "sm_86": _AMPERE_SMALL, "sm_89": _AMPERE_SMALL, "sm_120": _AMPERE_SMALL,
    "sm_90": _HOPPER, "sm_100": _HOPPER, "gfx942": _CDNA3, "interpreter": _INTERPRETER,
}  # fmt: skip

#: Tiles of too few rows for wgmma. ptxas 12.8, which Triton 3.6 brings, compiles the addresses of its operands wrong in
#: kernels that load head sizes like 40, 72 and 90 in masked pieces: a uniform register is read that nothing wrote
#: (12.9 does it right). tests/support/aot.py looks for such reads in every kernel.
_NO_WGMMA = Config(32, 32, 8, 2)


def kind_of(type_name: str) -> str:
    """The kind of a type of K or V: "half", "f32" or "quantized"."""
    return "half" if type_name in ("f16", "bf16") else "f32" if type_name == "f32" else "quantized"


def table_of(arch: str) -> tuple[Row, ...]:
    """The rows of an architecture, or of the nearest older one."""
    if arch in TABLES:
        return TABLES[arch]
    if arch.startswith("sm_"):
        capability = int(arch[3:])
        return TABLES["sm_120" if capability >= 120 else "sm_100" if capability >= 100 else "sm_80"]
    return TABLES["gfx942"]


def find_config(arch: str, rows: int, d: tuple[int, int], k_type: str, v_type: str, *, v_in_k: bool = False) -> Config:
    """The config for so many query rows that share a KV head, the head sizes and types of K and V.

    v_in_k: a tile of V is a part of K's and takes no memory of its own.
    """
    kinds = {kind_of(k_type), kind_of(v_type)}
    kind = "f32" if "f32" in kinds else "quantized" if "quantized" in kinds else "half"
    fits = (
        r.config
        for r in table_of(arch)
        if rows <= r.rows and max(d) <= r.d and kind in r.kinds and (v_in_k or not r.v_in_k)
    )
    config = next(fits)
    return _NO_WGMMA if arch == "sm_90" and config.block_m >= 64 and any(n % 16 for n in d) else config
