"""Flash decoding in two passes (decode_passes.py) for the launcher: which problems, how many parts, its launches.

Nothing chooses it: the backend's option `schedule` asks for one of its forms by name, and what they do not serve goes
to the other kernels. BENCHMARKS.md has what they cost beside schedule "split".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn import chooser, portable
from graphrt.backends.triton.kernels.flash_attn.chooser import Choice
from graphrt.backends.triton.kernels.flash_attn.decode import flash_attn_decode
from graphrt.backends.triton.kernels.flash_attn.decode_configs import owns_columns
from graphrt.backends.triton.kernels.flash_attn.decode_launch import Decode, arguments
from graphrt.backends.triton.kernels.flash_attn.decode_passes import flash_attn_decode_passes
from graphrt.backends.triton.kernels.flash_attn.kernel import Scratch
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.backends.triton.occupancy import occupancy
from graphrt.errors import BackendError


class TogetherLaunch(Launch):
    """A launch whose programs wait for each other: all of them must be on the device at the same time.

    The driver is told so (a cooperative launch, which it refuses where they do not fit, and starts when all do), and
    before the first one they are held against what the compiled kernel's registers and shared memory leave room for.
    Calling it raises BackendError where there is too little.
    """

    def __init__(self, kernel: Any, programs: int, args: Mapping[str, Any], warps: int, target: Target) -> None:
        super().__init__(kernel, (programs,), args, {"num_warps": warps, "launch_cooperative_grid": True})
        self.target = target
        self.fits = False

    def __call__(self) -> None:
        if not self.fits:
            compiled = self.kernel.warmup(grid=self.grid, **self.args, **self.options)
            compiled._init_handles()
            self.check(compiled.n_regs, compiled.metadata.shared)
            self.fits = True
        super().__call__()

    def check(self, registers: int, shared: int) -> None:
        """Raises BackendError if the programs do not fit. registers: of a thread; shared: bytes of a program."""
        held = occupancy(self.target.arch, registers, shared, self.options["num_warps"])
        most = held.programs * self.target.sm_count
        if self.grid[0] > most:
            raise BackendError(
                f"programs that wait for each other must all be on the device at once: {self.name} has "
                f"{self.grid[0]}, and {self.target.sm_count} multiprocessors hold {most} by its {held.bound}; take "
                f"schedule global-two, whose launches wait for nobody"
            )


class DecodePasses(Decode):
    """decode_passes.py, by the form's name (PASS_FORMS of stream_k.py); "partial-two" is decode.py and fixup.py."""

    name = kernel = "decode_passes"
    file = "decode_passes.py"

    def __init__(self, p: Any, target: Target, form: str) -> None:
        super().__init__(p, target)
        self.form = form

    @property
    def can_append(self) -> bool:  # type: ignore[override]
        return False

    @property
    def waits(self) -> bool:
        """Its programs wait for each other."""
        return self.form.endswith("-wait")

    def serves(self) -> str | None:
        if (reason := super().serves()) is not None:
            return reason
        if any(x.kind not in ("f16", "bf16") for x in (self.p.k, self.p.v)):
            return f"its passes are for f16 and bf16, K and V are {self.p.k.kind} and {self.p.v.kind}"
        if owns_columns(self.p.k.d, self.p.k.kind, self.p.v.kind):
            return f"its warps own keys, heads of {self.p.k.d} take columns"
        if self.choice.splits < 2:
            return f"it is for tiles in parts; {self.tiling.n_tiles} tiles of {self.tiling.n_blocks} k-blocks have none"
        return None

    @cached_property
    def choice(self) -> Choice:
        """A split; where programs wait, of as many parts as the device holds at once."""
        p, t = self.p, self.tiling
        problem = chooser.Problem(
            p.n_q * t.pack, p.n_kv, t.n_groups, p.n_head // p.gqa, p.n_seq, p.k.d, p.v.d, False, t.block_m, t.block_n,
            d_v_stored=sum(p.v.parts),
        )  # fmt: skip
        device = chooser.Device(self.target.sm_count, self.per_sm)
        splits = min(chooser.best_splits(problem, device), max(1, device.at_once // t.n_tiles))
        return chooser.choose(problem, device, "split", splits=splits)

    def _joined_at_a_time(self) -> tuple[int, int]:
        """(rows, parts) that the last program joins at a time, as join_of() has them, of however many bytes."""
        rows = 1 << (self.p.n_q * self.tiling.pack - 1).bit_length()
        fitting = 128 * 32 * self.config.warps // (rows * self.p.k.d)
        return rows, max(32 // rows, min(1 << (self.choice.splits - 1).bit_length(), fitting))

    def launches(self, plan: MaskPlan | None, plan_is_old: bool, scratch: Scratch) -> list[Step]:
        t, choice, config = self.tiling, self.choice, self.config
        part = scratch.part(choice.scratch_bytes)
        main = portable.main_arguments(self.p, t, self._main, choice, plan, part, self.target)
        runs = plan.runs if plan is not None else main["p_counts"]
        counters = scratch.counters(t.n_tiles)
        if self.form == "partial-two":
            known = arguments(main, config, runs, counters) | {"STAGES": self.stages}
            first = Launch(flash_attn_decode, (choice.programs,), known, launch_options(self.target, config.warps))
            return [first, portable.fixup_launch(main, t, self.p, self.target)]
        rows, parts = self.join = self._joined_at_a_time()
        kept = -(-t.n_blocks // choice.splits)
        n_tops = choice.programs * config.warps * t.block_m
        keep = self.form == "global-wait"
        memory = scratch.results(n_tops + (choice.programs * kept * rows * t.block_n if keep else 0))
        known = {
            **main, "D": self.p.k.d, "p_runs": runs, "p_counter": counters, "JOIN": rows, "JOIN_PARTS": parts,
            "p_top": memory, "p_scores": memory[n_tops:] if keep else memory, "p_turns": scratch.turns(2 * t.n_tiles),
            "kept_blocks": kept, "GLOBAL": self.form.startswith("global"), "PASSES": "both", "KEEP": keep,
            "STAGES": self.stages, "PDL": False,
        }  # fmt: skip
        known = {name: known[name] for name in flash_attn_decode_passes.arg_names}
        if self.waits:
            return [TogetherLaunch(flash_attn_decode_passes, choice.programs, known, config.warps, self.target)]
        options = launch_options(self.target, config.warps)
        known["PDL"] = self.target.has_pdl
        return [
            Launch(flash_attn_decode_passes, (choice.programs,), known | {"PASSES": which}, options)
            for which in ("first", "second")
        ]
