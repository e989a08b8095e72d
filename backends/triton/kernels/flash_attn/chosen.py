"""What the launcher decided for an attention, for those who ask: `graphrt explain`, and tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphrt.backends.triton.kernels.flash_attn.chooser import Choice
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling


@dataclass(frozen=True, eq=False)
class Chosen:
    """One attention's kernel and schedule.

    kernel: its name ("forward", "decode", "hopper", "hopper_quant", "hopper_mla"); file: of kernels/flash_attn/ that
    has it; config: of its own kind; workers: the warps of a program, or who does what in it; stages: k-blocks in
    flight; shared: bytes of shared memory of a program, None where only the compiler knows; programs: of the launch,
    under schedule "tile" fewer than tiles where they are persistent; join: who merges the parts of tiles: "fixup" (a
    launch of its own), "kernel" (the last of a tile's programs), "" where none is shared; repairs: a launch behind does
    again what the kernel flags; refused: why kernels that were asked before do not serve, by name; beside: what other
    kernels do of the attention, and of which part, in words; section, last_first: AttentionKernel.tile_order; append:
    what of the step's row of the cache is done in the same launch, in words, "" for nothing.
    """

    kernel: str
    file: str
    problem: Problem
    tiling: Tiling
    choice: Choice
    config: Any
    workers: str
    stages: int
    shared: int | None
    programs: int
    join: str
    repairs: bool
    refused: Mapping[str, str]
    beside: tuple[str, ...] = ()
    section: int = 1
    last_first: bool = False
    append: str = ""
