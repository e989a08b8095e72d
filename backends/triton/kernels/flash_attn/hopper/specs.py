"""The compile-time choices of Hopper's kernels: a record of constants each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WG_ROWS = 64  # the M of one wgmma instruction: query rows of one warpgroup


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What all of them have: how the work is cut up, and which of the optional features are on.

    n_wg: warpgroups that have 64 query rows of a tile each. block_n: keys of one block; stages: such blocks in shared
    memory. persistent: one program a multiprocessor walks several tiles. reversed_order: the last queries come first.
    pack: heads whose rows share a tile: row r is token r // pack of head r % pack. q_vec: strides of q and out come in
    units of so many elements (4 or 1), which lets loads be 16 bytes wide; mask_vec: the same for the mask's (8 or 1).
    visits_one: a tile all of whose blocks are hidden visits one all the same.

    ranges: programs share tiles out; then uniform: all tiles have as many units. pdl: the kernel is launched as a
    dependent of the one before.

    varlen: tiles are of sequences of any length (varlen/hopper_work.py), keys in pages of so many, 0: packed ones; what
    a row sees follows from positions: causal, and window: only so many keys back.

    score, score_rows: gluon_score.py's functions, None without a score function.
    """

    n_wg: int
    block_n: int
    stages: int
    persistent: bool
    reversed_order: bool
    pack: int
    q_vec: int
    mask_vec: int
    has_mask: bool
    has_softcap: bool
    has_alibi: bool
    has_sinks: bool
    has_bad: bool
    has_lse: bool
    visits_one: bool = False
    ranges: bool = False
    uniform: bool = True
    pdl: bool = False
    varlen: bool = False
    page: int = 0
    causal: bool = False
    window: bool = False
    has_dropout: bool = False
    score: Any = None
    score_rows: Any = None

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return WG_ROWS * self.n_wg


@dataclass(frozen=True, kw_only=True)
class TileSpec(Spec):
    """Of half.py, quant.py and fp8.py. d: the head size; pingpong: the warpgroups take turns at issuing their products.

    k_kind, v_kind: types of 8 and 4 bits, whose order of elements (queries.slot_elements) the columns of the query
    tile and of the output have; "" for 16 bits. pack is 1, 2, 4 or 8. mask_stages: buffers of the ring through
    which TMA brings the mask, 0: consumers load it themselves. large_cap: a row's largest score alone tells which
    form of the soft cap serves (softcap.cap_level); else the least counts too.

    headroom: of fp8.py, weights reach 2 to that.
    """

    d: int
    pingpong: bool
    k_kind: str = ""
    v_kind: str = ""
    mask_stages: int = 0
    large_cap: bool = False
    headroom: int = 0


@dataclass(frozen=True, kw_only=True)
class MlaSpec(Spec):
    """Of mla.py. early_decay: the accumulators learn of a block's row factors before its weights are ready; rows: of
    queries that are loaded, of a tile's 64."""

    d_v: int
    early_decay: bool
    rows: int
