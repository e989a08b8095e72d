"""Tiles of the products of few tokens (portable.py) by architecture, type and number of tokens: they change speed only.

Each row was measured or, where no such GPU was at hand, compiled: no spills, shared memory within the limit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """rows: of weights a tile; width: elements of k a step; tokens: a tile, at most; warps, stages: of the kernel.

    per_sm: programs that a multiprocessor should have; least_steps, most_splits: bounds of a split of k.
    """

    rows: int
    width: int
    tokens: int
    warps: int
    stages: int
    per_sm: int = 2
    least_steps: int = 4
    most_splits: int = 16


@dataclass(frozen=True)
class Row:
    """config holds for up to `n` tokens and these kinds of weights: "packed", "half" (f16, bf16) or "f32"."""

    n: int
    kinds: tuple[str, ...]
    config: Config


MANY = 1 << 30

#: The first row that fits holds.
_HOPPER = (
    Row(16, ("packed",), Config(64, 128, 16, 4, 4, per_sm=4, least_steps=4)),
    Row(32, ("packed",), Config(64, 128, 32, 4, 3, per_sm=3, least_steps=4)),
    Row(64, ("packed",), Config(128, 128, 64, 8, 3, per_sm=2, least_steps=6)),
    Row(MANY, ("packed",), Config(128, 128, 128, 8, 3, per_sm=1, least_steps=8)),
    Row(16, ("half",), Config(64, 128, 16, 4, 4, per_sm=3)),
    Row(32, ("half",), Config(64, 128, 32, 4, 4, per_sm=2)),
    Row(MANY, ("half",), Config(128, 64, 128, 8, 4, per_sm=1, least_steps=8)),
    Row(MANY, ("f32",), Config(32, 32, 16, 4, 3, per_sm=4, least_steps=8)),
)
_AMPERE = (
    Row(16, ("packed",), Config(64, 128, 16, 4, 3, per_sm=2, least_steps=6)),
    Row(MANY, ("packed",), Config(64, 128, 64, 4, 3, per_sm=2, least_steps=6)),
    Row(16, ("half",), Config(64, 128, 16, 4, 3, per_sm=2)),
    Row(MANY, ("half",), Config(64, 64, 64, 4, 3, per_sm=2, least_steps=8)),
    Row(MANY, ("f32",), Config(32, 32, 16, 4, 3, per_sm=4, least_steps=8)),
)
_CDNA3 = (
    Row(16, ("packed",), Config(32, 128, 16, 4, 1, per_sm=2, least_steps=6)),
    Row(MANY, ("packed",), Config(64, 128, 64, 4, 1, per_sm=1, least_steps=6)),
    Row(16, ("half",), Config(64, 128, 16, 4, 2, per_sm=2)),
    Row(MANY, ("half",), Config(64, 64, 64, 4, 2, per_sm=1, least_steps=8)),
    Row(MANY, ("f32",), Config(32, 32, 16, 4, 1, per_sm=2, least_steps=8)),
)
#: Small tiles, so that small shapes have several, and splits.
_INTERPRETER = (
    Row(MANY, ("packed",), Config(32, 128, 16, 1, 1, per_sm=1, least_steps=1, most_splits=3)),
    Row(MANY, ("half", "f32"), Config(32, 64, 16, 1, 1, per_sm=1, least_steps=2, most_splits=3)),
)

TABLES: dict[str, tuple[Row, ...]] = {
    "sm_80": _AMPERE, "sm_90": _HOPPER, "sm_100": _HOPPER, "gfx942": _CDNA3, "interpreter": _INTERPRETER,
}  # fmt: skip


def kind_of(type_name: str) -> str:
    """The kind of a type of weights: "packed", "half" or "f32"."""
    return "half" if type_name in ("f16", "bf16") else "f32" if type_name == "f32" else "packed"


def table_of(arch: str) -> tuple[Row, ...]:
    """The rows of an architecture, or of the nearest older one."""
    if arch in TABLES:
        return TABLES[arch]
    if arch.startswith("sm_"):
        return TABLES["sm_100"] if int(arch[3:]) in range(100, 120) else TABLES["sm_80"]
    return TABLES["gfx942"]


def find_config(arch: str, type_name: str, n: int) -> Config:
    """The config for weights of a type and n tokens."""
    kind = kind_of(type_name)
    return next(row.config for row in table_of(arch) if n <= row.n and kind in row.kinds)
