"""Tiles of the kernels of attention's gradients, by architecture. Only speed depends on a row, and in what order sums
are taken.

Each row was measured or, where no such GPU was at hand, compiled: no spills in loops, shared memory within the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Who owns what in a program: queries (queries.py; bias.py has their tiles), or keys (keys.py), alone or adding to the
#: gradients of the others in memory.
QUERIES, KEYS, FUSED_Q, FUSED_K = "queries", "keys", "fused-q", "fused-k"


@dataclass(frozen=True)
class BackConfig:
    """block_m, block_n: queries and keys of a tile, the latter 32 or more; warps; stages: tiles in flight; keep:
    "keep", what a program owns is read once and stays on chip, or "reload", it is read again for each tile, which
    leaves room for more programs (of f32 all are "reload")."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    keep: str = "keep"


@dataclass(frozen=True)
class Row:
    """What config holds for: those who own, head sizes to d, products in f16 and bf16 ("half") or in f32."""

    owner: str
    d: int
    kind: str
    config: BackConfig


MANY = 1 << 30
#: Of f32, whose products take no matrix units: what a tile needs is registers.
_PLAIN = (
    Row(FUSED_K, 64, "f32", BackConfig(16, 32, 8, 1, "reload")),
    *(
        Row(owner, d, "f32", config)
        for owner in (QUERIES, KEYS, FUSED_Q, FUSED_K)
        for d, config in (
            (64, BackConfig(32, 32, 8, 1, "reload")), (256, BackConfig(16, 32, 8, 1, "reload")),
            (MANY, BackConfig(16, 32, 16, 1, "reload")),
        )
    ),
)  # fmt: skip
_HOPPER = (
    Row(QUERIES, 64, "half", BackConfig(128, 64, 8, 2)),
    Row(QUERIES, 128, "half", BackConfig(128, 64, 8, 2)),
    Row(QUERIES, 256, "half", BackConfig(64, 32, 8, 2)),
    Row(QUERIES, MANY, "half", BackConfig(16, 32, 8, 2)),
    Row(KEYS, 64, "half", BackConfig(64, 128, 8, 2)),
    Row(KEYS, 128, "half", BackConfig(32, 128, 8, 2)),
    Row(KEYS, 256, "half", BackConfig(32, 32, 8, 2)),
    Row(KEYS, MANY, "half", BackConfig(16, 32, 8, 2)),
    Row(FUSED_Q, 64, "half", BackConfig(64, 64, 8, 2)),
    Row(FUSED_Q, 128, "half", BackConfig(64, 32, 8, 2)),
    Row(FUSED_Q, MANY, "half", BackConfig(32, 32, 8, 1, "reload")),
    Row(FUSED_K, 64, "half", BackConfig(64, 128, 8, 1)),
    Row(FUSED_K, 128, "half", BackConfig(32, 64, 8, 2)),
    Row(FUSED_K, MANY, "half", BackConfig(32, 32, 8, 1, "reload")),
    *_PLAIN,
)
_AMPERE = (
    Row(QUERIES, 64, "half", BackConfig(64, 64, 4, 2)),
    Row(QUERIES, 128, "half", BackConfig(64, 32, 4, 2)),
    Row(QUERIES, 256, "half", BackConfig(32, 32, 8, 1, "reload")),
    Row(QUERIES, MANY, "half", BackConfig(16, 32, 8, 1, "reload")),
    Row(KEYS, 64, "half", BackConfig(32, 64, 4, 2)),
    Row(KEYS, 128, "half", BackConfig(32, 64, 8, 2)),
    Row(KEYS, 256, "half", BackConfig(32, 32, 8, 1, "reload")),
    Row(KEYS, MANY, "half", BackConfig(16, 32, 16, 1, "reload")),
    Row(FUSED_Q, 64, "half", BackConfig(64, 32, 4, 1)),
    Row(FUSED_Q, 128, "half", BackConfig(32, 32, 8, 1, "reload")),
    Row(FUSED_Q, MANY, "half", BackConfig(16, 32, 8, 1, "reload")),
    Row(FUSED_K, 64, "half", BackConfig(32, 64, 4, 1)),
    Row(FUSED_K, 128, "half", BackConfig(32, 32, 8, 1, "reload")),
    Row(FUSED_K, MANY, "half", BackConfig(16, 32, 16, 1, "reload")),
)
_CDNA3 = (
    Row(QUERIES, 64, "half", BackConfig(64, 32, 4, 1)),
    Row(QUERIES, 128, "half", BackConfig(32, 32, 4, 1, "reload")),
    Row(QUERIES, MANY, "half", BackConfig(16, 32, 8, 1, "reload")),
    Row(KEYS, 64, "half", BackConfig(32, 64, 4, 1)),
    Row(KEYS, 128, "half", BackConfig(32, 32, 4, 1, "reload")),
    Row(KEYS, MANY, "half", BackConfig(16, 32, 8, 1, "reload")),
    Row(FUSED_Q, MANY, "half", BackConfig(16, 32, 8, 1, "reload")),
    Row(FUSED_K, MANY, "half", BackConfig(16, 32, 8, 1, "reload")),
    *_PLAIN,
)
#: Small tiles, so that small shapes have several; whatever is owned is kept by some and read again by others.
_INTERPRETER = tuple(
    Row(owner, d, kind, BackConfig(*tile, 1, 1, keep))
    for owner, tile in ((QUERIES, (32, 32)), (KEYS, (32, 64)), (FUSED_Q, (64, 32)), (FUSED_K, (32, 32)))
    for d, kind, keep in ((48, "half", "reload"), (MANY, "half", "keep"), (MANY, "f32", "reload"))
)

TABLES: dict[str, tuple[Row, ...]] = {
    "sm_80": (*_AMPERE, *_PLAIN), "sm_86": (*_AMPERE, *_PLAIN), "sm_89": (*_AMPERE, *_PLAIN),
    "sm_120": (*_AMPERE, *_PLAIN), "sm_90": _HOPPER, "sm_100": _HOPPER, "gfx942": _CDNA3, "interpreter": _INTERPRETER,
}  # fmt: skip

#: Tiles of too few rows for wgmma, of head sizes whose rows are loaded in masked pieces: see _NO_WGMMA of configs.py.
_NO_WGMMA = BackConfig(32, 32, 8, 1)


def table_of(arch: str) -> tuple[Row, ...]:
    """The rows of an architecture, or of the nearest older one."""
    if arch in TABLES:
        return TABLES[arch]
    if arch.startswith("sm_"):
        capability = int(arch[3:])
        return TABLES["sm_120" if capability >= 120 else "sm_100" if capability >= 100 else "sm_80"]
    return TABLES["gfx942"]


def back_config(arch: str, owner: str, d: tuple[int, int], kind: str) -> BackConfig:
    """The first row that fits. d: D_k and D_v; kind: "f16", "bf16" or "f32"."""
    which = "f32" if kind == "f32" else "half"
    rows = table_of(arch)
    config = next(r.config for r in rows if r.owner == owner and max(d) <= r.d and r.kind == which)
    wgmma = arch == "sm_90" and which == "half" and max(config.block_m, config.block_n) >= 64
    return _NO_WGMMA if wgmma and any(n % 16 for n in d) else config
