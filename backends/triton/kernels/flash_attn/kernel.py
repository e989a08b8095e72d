"""What an attention kernel is to the launcher: which problems it serves, its tiles, its schedule, its launches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn import chooser
from graphrt.backends.triton.kernels.flash_attn.chooser import Choice
from graphrt.backends.triton.kernels.flash_attn.chosen import Chosen
from graphrt.backends.triton.kernels.flash_attn.dropout_launch import KeptBits
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling
from graphrt.backends.triton.kernels.flash_attn.stream_k import PASS_FORMS

#: A problem of a kernel's kind, and the plan that is made for it on the device: a mask's, or of lengths.
P = TypeVar("P", bound=Problem)
L = TypeVar("L")


class Scratch:
    """Device memory that the attentions of a program share, since they run in order.

    What was given out stays valid: where there is too little, later ones get fresh memory. redone: int32 [1] for each
    attention whose bad tiles are done again, how many were since it was made. kept: dropout's bits.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.kept = KeptBits()
        self._part = torch.empty(0, device=device)
        self._results = torch.empty(0, device=device)
        self._scaled = torch.empty(0, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._turns = torch.zeros(0, dtype=torch.int32, device=device)
        self.redone: list[torch.Tensor] = []

    def part(self, nbytes: int) -> torch.Tensor:
        """For parts of tiles, f32."""
        if self._part.numel() * 4 < max(nbytes, 4):
            self._part = torch.full((max(1, -(-nbytes // 4)),), math.nan, device=self.device)
        return self._part

    def results(self, n: int) -> torch.Tensor:
        """For n f32 of results that are joined."""
        if self._results.numel() < n:
            self._results = torch.full((n,), math.nan, device=self.device)
        return self._results[:n]

    def scaled(self, n: int) -> torch.Tensor:
        """For n f32 of queries and results beside their scales."""
        if self._scaled.numel() < n:
            self._scaled = torch.full((n,), math.nan, device=self.device)
        return self._scaled[:n]

    def counters(self, n: int) -> torch.Tensor:
        """One for each tile, int32, 0 between launches."""
        if self._counters.numel() < n:
            self._counters = torch.zeros(n, dtype=torch.int32, device=self.device)
        return self._counters

    def turns(self, n: int) -> torch.Tensor:
        """Two for each tile whose programs wait for each other, int32: who has come, 0 between launches, and how often
        all have."""
        if self._turns.numel() < n:
            self._turns = torch.zeros(n, dtype=torch.int32, device=self.device)
        return self._turns

    def flags(self, n_tiles: int) -> torch.Tensor:
        """int32 [tiles + 1], zeros: which tiles are bad, and how many were done again."""
        bad = torch.zeros(n_tiles + 1, dtype=torch.int32, device=self.device)
        self.redone.append(bad[n_tiles:])
        return bad


def warps_text(n: int) -> str:
    """How many warps, in words."""
    return "1 warp" if n == 1 else f"{n} warps"


class AttentionKernel(ABC, Generic[P, L]):
    """One kernel considered for one problem on one GPU. The rest may be asked only if serves() returns None.

    name: as people read it, with its form where a kernel has several; kernel: without it; file: of
    kernels/flash_attn/. force: the schedule that is asked for, None to choose; config: of its own kind.
    """

    name: ClassVar[str]
    kernel: ClassVar[str]
    file: ClassVar[str]

    def __init__(self, p: P, target: Target, force: str | None = None) -> None:
        self.p = p
        self.target = target
        self.force = None if force in PASS_FORMS else force  # which are decode_passes.py's alone

    @abstractmethod
    def serves(self) -> str | None:
        """None, or a sentence why it does not serve the problem."""

    @cached_property
    @abstractmethod
    def config(self) -> Any:
        """How its work is cut up; has block_m and block_n."""

    @cached_property
    def tiling(self) -> Tiling:
        return Tiling.of(self.p, self.config.block_m, self.config.block_n)

    @cached_property
    def choice(self) -> Choice:
        return self._choose(self.force)

    @property
    def per_sm(self) -> int:
        """Programs that a multiprocessor holds at once, for the chooser."""
        return 1

    @property
    def shares_out(self) -> bool:
        """Programs have ranges of units and not whole tiles."""
        return self.choice.schedule != "tile"

    @property
    def needs_units(self) -> bool:
        """The mask's plan must have the tiles' units summed up."""
        return self.shares_out and not self.tiling.uniform(True)

    @abstractmethod
    def launches(self, plan: L | None, plan_is_old: bool, scratch: Scratch) -> list[Step]:
        """The launches. plan: of the mask or of lengths, None without one; plan_is_old: a launch comes between that and
        these."""

    # What follows is for the record, and may be asked after launches().

    @property
    @abstractmethod
    def workers(self) -> str:
        """The warps of a program, or who does what in it."""

    @property
    def stages(self) -> int:
        """K-blocks in flight."""
        return int(self.config.stages)

    @property
    def shared(self) -> int | None:
        """Bytes of shared memory of a program, None where only the compiler knows."""
        return None

    @property
    def programs(self) -> int:
        """Of the launch."""
        return self.choice.programs

    @property
    def joined_by(self) -> str:
        """Who merges the parts of tiles, see Chosen.join."""
        return "fixup" if self.shares_out else ""

    @property
    def tile_order(self) -> tuple[int, bool]:
        """In which order whole tiles are taken: (groups of heads side by side, whether their last queries come first).

        So many groups at a time: all their tiles of one place along the queries, then those of the next.
        """
        return 1, False

    #: It can rotate q and k and write a step's k and v itself.
    can_append: bool = False
    #: Arguments for that, see rope.py's appended_arguments(), or for writing k and v alone, see append_launch.py; None:
    #: it is not asked to.
    appended: dict[str, Any] | None = None

    @property
    def why_no_blocks(self) -> str | None:
        """Why it can't write a step's k and v into caches of blocks itself: a sentence, or None."""
        return f"{self.name} has no such form"

    @property
    def has_whole_groups(self) -> bool:
        """Each KV head of a sequence has one tile, so one program alone reads a k-block."""
        return self.tiling.n_tiles * self.p.gqa == self.p.n_head * self.p.n_seq

    #: A launch behind does again what the kernel flags.
    repairs: ClassVar[bool] = False

    def chosen(self, refused: Mapping[str, str]) -> Chosen:
        """The record for those who ask. refused: why kernels that were asked before do not serve, by name."""
        return Chosen(
            self.kernel, self.file, self.p, self.tiling, self.choice, self.config, self.workers, self.stages,
            self.shared, self.programs, self.joined_by, self.repairs, refused, (), *self.tile_order,
        )  # fmt: skip

    def _choose(self, force: str | None) -> Choice:
        # A group of heads is to the chooser one head with as many more query rows; a mask that all tiles share leaves
        # them of one length, as none does.
        p, t = self.p, self.tiling
        problem = chooser.Problem(
            p.n_q * t.pack, p.n_kv, t.n_groups, p.n_head // p.gqa, p.n_seq, p.k.d, p.v.d,
            not t.uniform(p.mask_t is not None), t.block_m, t.block_n, d_v_stored=sum(p.v.parts),
        )  # fmt: skip
        return chooser.choose(problem, chooser.Device(self.target.sm_count, self.per_sm), force)
