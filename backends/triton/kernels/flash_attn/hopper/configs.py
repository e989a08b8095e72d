"""How Hopper's kernels cut up their work: the configurations, each measured, and the shared memory they take."""

from __future__ import annotations

from dataclasses import dataclass

from graphrt.backends.triton.kernels.flash_attn.hopper.specs import WG_ROWS

#: Head sizes of K and V that mla.py serves.
D_K, D_V = 576, 512


@dataclass(frozen=True)
class Config:
    """Of half.py, quant.py and fp8.py; every field is a compile-time constant of the kernel.

    block_n: keys of one block (64 or 128).
    stages: buffers in each of the K and V rings.
    n_wg: consumer warpgroups (2 or 3).
    pingpong: the warpgroups take turns at issuing their products.
    persistent: one program per multiprocessor walks several tiles, and the producer runs ahead into the next one.
    """

    block_n: int
    stages: int
    n_wg: int = 2
    pingpong: bool = False
    persistent: bool = True

    @property
    def block_m(self) -> int:
        """Query rows of one tile."""
        return WG_ROWS * self.n_wg

    @property
    def registers_at_start(self) -> int:
        """Registers of a thread at launch, before setmaxnreg: an even share of all, the producer's group included."""
        return 65536 // (128 * (self.n_wg + 1)) // 8 * 8

    def shared_bytes(self, d: int) -> int:
        """Shared memory of a program whose values have 16 bits: queries, both rings, and some room for barriers and the
        compiler's own use."""
        return 2 * d * (self.block_m + 2 * self.stages * self.block_n) + 1024


#: Of half.py by head size. The fastest of those tried on an H100; see BENCHMARKS.md.
HALF: dict[int, Config] = {
    64: Config(block_n=128, stages=2, n_wg=2, pingpong=True),
    128: Config(block_n=128, stages=2, n_wg=2, persistent=False),
    256: Config(block_n=64, stages=2, n_wg=2, persistent=False),
}
#: Of quant.py, likewise.
QUANT: dict[int, Config] = {
    64: Config(block_n=128, stages=3, n_wg=2, pingpong=True, persistent=False),
    128: Config(block_n=128, stages=2, n_wg=2, persistent=False),
    256: Config(block_n=64, stages=2, n_wg=2, persistent=False),
}
#: Of fp8.py: heads of 128 the fastest of those tried on an H200, heads of 64 not measured.
FP8: dict[int, Config] = {
    64: Config(block_n=128, stages=3, n_wg=2, persistent=False),
    128: Config(block_n=128, stages=3, n_wg=2, persistent=False),
}
#: Softmax weights of fp8.py reach 2 to this, of the 448 that e4m3 holds.
HEADROOM = 8
#: By head size: tiles of K and V are loaded and unpacked in units of so many values, 64 or 32 of each of the producer's
#: threads, which have so many registers; the two consumer warpgroups share what is left of 3 * 168.
PRODUCERS: dict[int, tuple[int, int]] = {64: (8192, 88), 128: (8192, 88), 256: (4096, 72)}


@dataclass(frozen=True)
class MlaConfig:
    """Of mla.py; every field is a compile-time constant of the kernel.

    block_n: keys of one block (32 or 64). stages: blocks in shared memory.
    persistent: one program per multiprocessor walks several tiles; the scorer starts on the next one while the
      accumulators store the last.
    early_decay: the accumulators learn of a block's row factors before its weights are ready.
    """

    block_n: int = 64
    stages: int = 2
    persistent: bool = True
    early_decay: bool = True

    @property
    def block_m(self) -> int:
        """Query rows of one tile."""
        return WG_ROWS

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program: queries, K, weights, and room for barriers and the compiler's own use."""
        return 2 * (D_K * (WG_ROWS + self.stages * self.block_n) + WG_ROWS * self.block_n) + 2048


#: The one believed best, for whole tiles and for work that is shared out; see BENCHMARKS.md.
MLA = MlaConfig()
