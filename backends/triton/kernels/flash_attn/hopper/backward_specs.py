"""The compile-time choices of Hopper's kernels for attention's gradients, and the configurations, each measured."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.backends.triton.kernels.flash_attn.hopper.specs import WG_ROWS

#: Queries of a block in the lists of what is to be visited: a mask's plan has tiles of so many.
PLAN_QUERIES = 128
#: Warpgroups that multiply.
N_WG = 2


@dataclass(frozen=True)
class Buffers:
    """Of a ring (rings.make_ring): its number of buffers, and rows of each."""

    stages: int
    block_n: int


@dataclass(frozen=True, kw_only=True)
class GradientSpec:
    """What the kernels of keys and of queries have.

    d: the head size; n_wg: warpgroups that multiply; block_m: queries of a step; block_n: keys of a block; stages:
    buffers of what is walked; of_k, of_v: which gradients are stored. weight: 1 over the factor of weights, see
    backward_rows.py. mask_vec: strides of the mask come in units of so many elements; mask_stages: buffers of the ring
    through which TMA brings the mask, 0: consumers load it themselves.
    """

    d: int
    block_m: int
    block_n: int
    stages: int
    has_mask: bool
    has_softcap: bool
    has_alibi: bool
    weight: float
    mask_vec: int
    mask_stages: int = 0
    has_dropout: bool = False
    #: Every block adds the mask's values; those that come first in the lists hide nothing.
    dense: bool = False
    n_wg: int = N_WG
    of_k: bool = True
    of_v: bool = True
    #: The kernel of keys stores dS^T.
    stored: bool = False
    #: Of packed sequences: what is seen comes from positions.
    packed: bool = False
    causal: bool = False
    window: bool = False
    #: As half.py's kernels have them, whose parts ask: heads are not packed, nothing is quantized.
    pack: int = 1
    k_kind: str = ""

    @property
    def of_queries(self) -> Buffers:
        """The ring of Q and of d_out, where queries are walked."""
        return Buffers(self.stages, self.block_m)

    @property
    def of_values(self) -> Buffers:
        """The ring of V, where keys are walked: what it holds is used once, K is used twice."""
        return Buffers(max(1, self.stages - 1) if self.d > 128 else self.stages, self.block_n)


@dataclass(frozen=True)
class GradientConfig:
    """block_m, block_n, stages: see GradientSpec. wide: one warpgroup adds up the gradient of V and one that of K, both
    for all keys of the block; else each has both for 64 keys."""

    block_m: int
    block_n: int
    stages: int
    wide: bool = False

    def keys_bytes(self, d: int) -> int:
        """Shared memory of a program that owns keys, but for the mask: K, V, Q, d_out, a row of lse and one of delta
        for each query, weights on their way, and some room for barriers."""
        weights = 2 * self.stages * self.block_n * self.block_m if self.wide else 0
        rows = 8 * self.stages * self.block_m
        return 4 * d * (self.block_n + self.stages * self.block_m) + rows + weights + 1024

    def fused_bytes(self, d: int) -> int:
        """The same of one that adds to the gradient of Q: three buffers of gradients of scores of 16 bits, and what it
        adds, of f32."""
        return self.keys_bytes(d) + 6 * self.block_n * self.block_m + 4 * d * self.block_m

    def queries_bytes(self, d: int) -> int:
        """Shared memory of a program that owns queries, but for the mask: Q, d_out, K, V and some room."""
        ring = self.stages + (max(1, self.stages - 1) if d > 128 else self.stages)
        return 2 * d * (2 * WG_ROWS * N_WG + ring * self.block_n) + 1024

    def scores_bytes(self) -> int:
        """What a program that owns keys needs more to store dS^T: a block of 16 bits."""
        return 2 * self.block_n * self.block_m

    def bias_bytes(self, d: int) -> int:
        """Shared memory of a program that owns a tile of a bias, but for that: pairs of tiles and some room."""
        return 4 * d * self.stages * self.block_n + 1024


#: Of the kernels that own keys, by head size; and of those that are crowded().
KEYS: dict[int, GradientConfig] = {
    64: GradientConfig(block_m=128, block_n=128, stages=2),
    128: GradientConfig(block_m=64, block_n=128, stages=2),
    256: GradientConfig(block_m=64, block_n=64, stages=2, wide=True),
}
KEYS_CAPPED = KEYS | {64: GradientConfig(block_m=64, block_n=128, stages=2)}
#: Of the kernel that owns queries, likewise.
QUERIES: dict[int, GradientConfig] = {
    64: GradientConfig(block_m=128, block_n=128, stages=2),
    128: GradientConfig(block_m=128, block_n=128, stages=2),
    256: GradientConfig(block_m=128, block_n=64, stages=2),
}
QUERIES_CAPPED = QUERIES | {128: GradientConfig(block_m=128, block_n=64, stages=3)}
#: Of the kernel that owns tiles of a bias, by head size; stages: of pairs, Q and K or d_out and V. Not measured.
BIAS: dict[int, GradientConfig] = dict.fromkeys((64, 128), GradientConfig(block_m=128, block_n=128, stages=3))
#: Of the kernel that owns queries and reads dS^T, by head size.
STORED: dict[int, GradientConfig] = {
    64: GradientConfig(block_m=128, block_n=128, stages=3),
    128: GradientConfig(block_m=128, block_n=128, stages=3),
}
#: Of the kernel that owns keys and adds to the gradient of Q, by head size.
FUSED: dict[int, GradientConfig] = {128: GradientConfig(block_m=64, block_n=128, stages=2)}
#: Head sizes of packed sequences.
PACKED_HEADS = (64, 128)
#: By what programs own: the configurations, and those of crowded kernels.
TABLES = {
    "keys": (KEYS, KEYS_CAPPED),
    "queries": (QUERIES, QUERIES_CAPPED),
    "bias": (BIAS, BIAS),
    "fused": (FUSED, FUSED),
    "stored": (STORED, STORED),
}


def crowded(own: str, softcap: float, dropout: float, dense: bool) -> bool:
    """Whether a kernel needs more registers than a plain one's tiles leave. dense: every block adds the mask's values,
    as with ALiBi or a bias."""
    return softcap != 0.0 or (own == "keys" and dropout > 0.0) or (own == "queries" and dense)


def config_of(own: str, d: int, is_crowded: bool) -> GradientConfig:
    """The configuration of the kernels that own "keys", "queries", tiles of a "bias", keys, and make all ("fused"), or
    queries, and read dS ("stored")."""
    return TABLES[own][is_crowded][d]
