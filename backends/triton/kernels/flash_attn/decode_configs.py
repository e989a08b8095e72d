"""The decode kernel's configurations, and which problems it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphrt.backends.triton.kernels.flash_attn.decode_layouts import ROWS, THIN_ROWS
from graphrt.backends.triton.occupancy import MULTIPROCESSORS, RESERVED
from graphrt.dtypes import FLOATS8


@dataclass(frozen=True)
class Config:
    """block_n: keys a k-block; warps: ways; stages: k-blocks in flight; per_sm: programs that a
    multiprocessor of Hopper's holds, see programs_held; registers: the most that a thread may have, 0: no bound;
    codes: tiles of at most 8 rows multiply K's codes without their scales (decode_codes.py); join: numbers of parts
    that a thread holds at once, a power of two, where the last of a tile's programs joins them in the same launch; 0:
    the fixup's launch joins them."""

    block_n: int
    warps: int
    stages: int
    per_sm: int
    registers: int = 0
    codes: bool = False
    join: int = 0

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return int(ROWS.value)


#: By head size and kind of cache ("half", "f8", "q8_0", "q4_0"), the wider of K's and V's. With less shared memory than
#: Hopper has, fewer stages fit: see shared_bytes. f8: heads of 128 measured on an H200 in this form alone.
CONFIGS: dict[tuple[int, str], Config] = {
    (64, "half"): Config(128, 4, 3, 2, join=128),
    (128, "half"): Config(128, 4, 3, 1, join=128),
    (256, "half"): Config(64, 4, 3, 1),
    (64, "f8"): Config(64, 2, 4, 4),
    (128, "f8"): Config(64, 4, 4, 2),
    (64, "q8_0"): Config(64, 2, 4, 4),
    (128, "q8_0"): Config(32, 2, 4, 4),
    (256, "q8_0"): Config(64, 4, 3, 1),
    (64, "q4_0"): Config(128, 4, 3, 2),
    (128, "q4_0"): Config(64, 4, 3, 2),
    (256, "q4_0"): Config(64, 4, 4, 1),
}
#: Where tiles are enough for each multiprocessor to have three: programs of its own instead of blocks in flight in one,
#: since a tile's start and end then run beside others' middles (H100, 64 sequences of 250 keys: 25.0 us, 32.1 before).
MANY_TILES: dict[tuple[int, str], Config] = {(128, "half"): Config(128, 4, 1, 3, join=128)}
#: By head size, of K and V that are both f16 or bf16: heads whose columns are shared out among the warps.
COLUMNS: dict[int, Config] = {256: Config(32, 4, 6, 1)}
#: By head size and kind, of K and V that have none of f16 and bf16: decode_thin.py's. More warps hide what unpacking
#: waits for, so registers are bounded. Measured on an H200: BENCHMARKS.md, "What bounds q8_0 and q4_0".
THIN: dict[tuple[int, str], Config] = {
    (128, "f8"): Config(64, 4, 3, 3, 168, join=32),
    (128, "q8_0"): Config(64, 4, 3, 3, 168, codes=True, join=32),
    (128, "q4_0"): Config(64, 4, 3, 3, 168, codes=True, join=32),
}
#: The same where keys lie in runs, see in_runs: their copies take few instructions, and fewer warps do.
IN_RUNS: dict[tuple[int, str], Config] = {
    (128, "q8_0"): Config(64, 4, 3, 2, codes=True),
    (128, "q4_0"): Config(128, 4, 2, 2, codes=True),
}
KINDS = ("f16", "bf16", *FLOATS8, "q8_0", "q4_0")


def owns_columns(d: int, k_kind: str, v_kind: str) -> bool:
    """Whether a warp has columns of the result, and not keys, as its own."""
    return d in COLUMNS and all(k in ("f16", "bf16") for k in (k_kind, v_kind))


def is_thin(rows: int, k_kind: str, v_kind: str) -> bool:
    """Whether a tile of so many query rows takes decode_thin.py's loop."""
    return rows <= THIN_ROWS.value and not {k_kind, v_kind} & {"f16", "bf16"}


def thin_form(rows: int, k_kind: str, v_kind: str, config: Config) -> str:
    """What a tile's loop is called by flash_attn_decode's THIN."""
    if not is_thin(rows, k_kind, v_kind):
        return ""
    return "codes" if config.codes and k_kind in ("q8_0", "q4_0") else "values"


def find_decode_config(
    d: int, k_kind: str, v_kind: str, tiles_a_multiprocessor: int = 1, rows: int = 16, runs: bool = False
) -> Config:  # fmt: skip
    """The configuration for a head size and the types of K and V. rows: query rows of a tile; runs: in_runs's."""
    if owns_columns(d, k_kind, v_kind):
        return COLUMNS[d]
    kinds = ("half" if k in ("f16", "bf16") else "f8" if k in FLOATS8 else k for k in (k_kind, v_kind))
    key = d, min(kinds, key=("half", "f8", "q8_0", "q4_0").index)
    if is_thin(rows, k_kind, v_kind):
        for table in (IN_RUNS, THIN) if runs else (THIN,):
            if key in table:
                return table[key]
    many = MANY_TILES.get(key)
    return many if many is not None and tiles_a_multiprocessor >= many.per_sm else CONFIGS[key]


def in_runs(p: Any) -> bool:
    """Whether K and V of a problem (problem.py's Problem) are of blocks, and a head's keys lie side by side in memory,
    from a unit of 16 bytes on: what a k-block has of them is then one run, which copies of 16 bytes take as it is. (Of
    keys that are whole 16 bytes apart they do so anyway.)"""
    return all(
        x.kind in ("q8_0", "q4_0")
        and t.nb[1] == t.dtype.row_size(x.d)
        and t.nb[1] % 16
        and not any(n % 16 for n in (*t.nb[2:], p.place(t)[1]))
        for x, t in ((p.k, p.k_t), (p.v, p.v_t))
    )


def shared_bytes(d: int, k_kind: str, v_kind: str, config: Config) -> int:
    """Shared memory of a program."""
    rows: int = ROWS.value
    # Of a row; those of blocks with a unit for scales and neighbours, see decode_layouts.py's row_units.
    row = {"f16": 2 * d, "bf16": 2 * d, "q8_0": d + 16, "q4_0": d // 2 + 16, **dict.fromkeys(FLOATS8, d)}
    ring = config.stages * config.block_n * (row[k_kind] + row[v_kind])
    if owns_columns(d, k_kind, v_kind):  # while Q or weights pass through
        return ring + rows * max(d * 2, config.block_n * 2 + 64)
    join = config.warps * rows * (d + 2) * 4
    return max(ring, join)


def programs_held(config: Config, shared: int, arch: str) -> int:
    """Programs of a multiprocessor: the table's number, which is Hopper's, or fewer where its shared memory holds no
    more. shared: bytes of a program."""
    found = MULTIPROCESSORS.get(arch)
    return config.per_sm if found is None else max(1, min(config.per_sm, found.shared // (shared + RESERVED)))


def with_words(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the portable kernel as the decode kernels take them: floats of 8 bits by words of four."""
    words = dict(args)
    for side in "kv":
        if args[f"{side.upper()}_KIND"] in FLOATS8:
            words[f"p_{side}"] = args[f"p_{side}"].view(torch.int32)
            words |= {name: n // 4 for name in (f"s{side}_{of}" for of in "nhsp") if (n := args.get(name)) is not None}
    return words


def config_for(
    p: Any, rows: int, tiles_a_multiprocessor: int, hopper: bool, runs: bool = False, has_thin: bool = True
) -> Config | str:
    """The configuration for a problem (problem.py's Problem), else a reason why this kernel does not serve it.

    rows: query rows that share a KV head of a sequence; runs: in_runs's; has_thin: the kernel has decode_thin.py's
    loop; hopper: the GPU is an sm_90 or later. On others heads of 256 are the portable kernel's: there registers spill
    here, and nobody has measured whether it is the faster one all the same, as it is on an H100.
    """
    k, v = p.k, p.v
    if p.out is None:
        return "the log-sum-exp alone is the portable kernel's"
    if rows > ROWS.value:
        return f"it takes {ROWS.value} query rows of a KV head at most, here {rows}"
    if k.d != v.d or k.d not in (64, 128, 256):
        return f"heads must be of 64, 128, 256, they are of {k.d} and {v.d}"
    if k.d == 256 and not hopper:
        return "heads of 256 spill its registers before sm_90"
    for x, t in ((k, p.k_t), (v, p.v_t)):
        half = x.kind in ("f16", "bf16")
        if x.kind not in KINDS:
            return f"K and V must be one of {', '.join(KINDS)}, they are {k.kind} and {v.kind}"
        if x.kind in FLOATS8 and k.d == 256:
            return f"heads of 256 of {x.kind} spill its registers"
        if x.kind in FLOATS8 and not hopper:
            return f"it reads {x.kind} by an instruction that GPUs before sm_90 may lack"
        # What Triton must know to copy 16 bytes at once: of an address that they are its unit, of an element count that
        # 16 divides it (of words, where values are of 8 bits). Rows of blocks are copied by words, or by 16 bytes
        # with what else of their neighbours is in these.
        row, far = (16, 32) if half else (16, 64) if x.kind in FLOATS8 else (4, 4)
        if any(n % row for n in (t.nb[1], p.place(t)[1])):
            return f"keys of {x.kind} must be whole {row} bytes apart"
        if not (half or x.kind in FLOATS8) and t.nb[1] % 16 == 0 and (p.place(t)[1] % 16 or t.nb[3] % 16):
            return f"keys of {x.kind} that are whole 16 bytes apart must begin so, in each sequence or page"
        if any(n % far for n in t.nb[2:]):
            return f"heads and sequences of {x.kind} must be whole {far} bytes apart"
    of_loop = rows if has_thin else ROWS.value
    config = find_decode_config(k.d, k.kind, v.kind, tiles_a_multiprocessor, of_loop, runs)
    if max(t.nb[1] for t in (p.k_t, p.v_t)) * config.block_n >= 2**31:
        return "a k-block's keys lie over more than 2 GiB"
    return config
