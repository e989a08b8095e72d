"""From nodes to launches: which kernel an attention gets, and what it launches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphrt.backend import Place
from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.context import Context
from graphrt.backends.triton.device import Target
from graphrt.backends.triton.kernels.flash_attn.append_fusions import (
    BlockAppend,
    PanelAppend,
    appends_to_blocks,
    appends_to_panels,
    panel_append,
    why_blocks_apart,
    why_not_appended,
)
from graphrt.backends.triton.kernels.flash_attn.append_launch import block_arguments, panel_arguments
from graphrt.backends.triton.kernels.flash_attn.backward.launcher import BackLauncher
from graphrt.backends.triton.kernels.flash_attn.block_fusions import block_append, long_block_append
from graphrt.backends.triton.kernels.flash_attn.chosen import Chosen
from graphrt.backends.triton.kernels.flash_attn.configs import Config
from graphrt.backends.triton.kernels.flash_attn.fusions import (
    Attention,
    Gradients,
    attention_back,
    attention_lse,
    attention_of,
)
from graphrt.backends.triton.kernels.flash_attn.kernel import AttentionKernel, Scratch
from graphrt.backends.triton.kernels.flash_attn.kernels import kernels_of, not_of, varlen_kernels_of
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlan, MaskPlans
from graphrt.backends.triton.kernels.flash_attn.portable import Forward
from graphrt.backends.triton.kernels.flash_attn.problem import Problem
from graphrt.backends.triton.kernels.flash_attn.scaled import ScaledAttention
from graphrt.backends.triton.kernels.flash_attn.stream_k import PASS_FORMS
from graphrt.backends.triton.kernels.flash_attn.varlen.launch import VarlenKernel
from graphrt.backends.triton.kernels.flash_attn.varlen.parts import by_rows, cascade
from graphrt.backends.triton.kernels.flash_attn.varlen.plan import VarlenPlans
from graphrt.backends.triton.kernels.flash_attn.varlen.problem import VarlenProblem
from graphrt.backends.triton.kernels.rope import appended_arguments, lower_rope_cache, rope_table
from graphrt.backends.triton.kernels.rope_fusions import RopeCacheAttention, why_apart
from graphrt.backends.triton.kernels.rows import lower_set_rows
from graphrt.fusion import Fusion
from graphrt.op import made_by
from graphrt.ops.flash_attn_ext import is_scaled
from graphrt.tensor import Tensor

#: Chosen.append of the three forms.
ROTATED_APPEND = (
    "q and k are rotated, and k and v written into their row of the cache, in the same launch (decode_append.py)"
)
PANELS_APPEND = (
    "the step's k goes into its panels and its v into its row in the same launch (append.py): no program reads that "
    "cell, the first one of a tile has its key from the step's own k and v"
)
BLOCKS_APPEND = (
    "the step's k and v are rounded and written into their rows in the same launch, by the one program that reads "
    "them there, before it reads them"
)

#: Why an attention of blocks has its step's k and v written before it where nothing of its own is in the way.
NOT_BEFORE = (
    "the products of q and k can't rotate them, so the rotation has a launch that writes the cache too; or another "
    "fusion has one of its nodes"
)


class Launcher:
    """Makes the launches of a program's attentions. They run in order, so they share scratch and plans of masks and of
    lengths.

    schedule: forces one. config: forces the portable kernel, with that configuration. backward: the form of gradients.
    appends: names of the fusions with a step's append that are asked for, so that it is told where they do not apply.
    chosen: what each node got, for those who ask why.
    """

    def __init__(
        self,
        target: Target,
        place: Callable[[Tensor], Place],
        schedule: str | None = None,
        config: Config | None = None,
        backward: str = "split",
        appends: Collection[str] = (),
    ) -> None:
        self.target = target
        self.appends = appends
        self.place = place
        self.schedule = schedule
        self.config = config
        self.masks = MaskPlans(target.device)
        self.lengths = VarlenPlans(target.device)
        self.scratch = Scratch(target.device)
        self.chosen: dict[Tensor, Chosen] = {}
        self.backward = BackLauncher(target, place, backward)

    def launches(self, attention: Attention | Gradients) -> list[Step]:
        """The launches of an attention, the node of its denominators, both of the same sources, or its gradients."""
        if isinstance(attention, Gradients):
            return self.backward.launches(attention)
        if attention.nodes[0].op.startswith("FLASH_ATTN_VARLEN"):
            steps = self._varlen(VarlenProblem(attention, self.place))
        elif attention.out is not None and is_scaled(attention.out):
            steps = self._scaled(attention.out)
        else:
            steps = self._plain(Problem(attention, self.place))
        if attention.out is not None:
            self._tell_apart(attention.out)
        return steps

    def _tell_apart(self, node: Tensor) -> None:
        """Says of an attention of a cache why the step's row of it is written by another launch."""
        if node.op == "FLASH_ATTN_EXT" and "panel_append" in self.appends and appends_to_panels(node):
            reason = why_not_appended(node) or "another fusion has one of its nodes"
            self._refuse(node, "panel_append", reason)
        if node.op == "FLASH_ATTN_EXT" and "block_append" in self.appends and appends_to_blocks(node):
            reason = why_blocks_apart(node) or NOT_BEFORE
            self._refuse(node, "block_append", reason)
        if "rope_cache_attention" in self.appends and made_by(node["k"]).op == "SET_ROWS":
            kernel = self.chosen[node].kernel
            reason = why_apart(node) or f"{kernel} has no such form, or the step's nodes are not as it needs them"
            self._refuse(node, "rope_cache_attention", reason)

    def _refuse(self, node: Tensor, name: str, reason: str) -> None:
        self._tell(node, refused={**self.chosen[node].refused, name: reason})

    def _tell(self, node: Tensor, **more: Any) -> None:
        """Adds to the record of what a node got."""
        self.chosen[node] = replace(self.chosen[node], **more)

    def _plain(self, p: Problem) -> list[Step]:
        kernel, refused = self._kernel_of(p)
        return self._planned(p, kernel, refused)

    def _scaled(self, node: Tensor) -> list[Step]:
        """An attention with scales: without them, between two launches; its kernel is told as chosen."""
        whole = ScaledAttention(node, self.place, self.scratch.scaled, self.target)
        steps = [*whole.before, *self._plain(Problem(whole.inner, whole.place)), *whole.after]
        (inner,) = whole.inner.nodes
        told = "scales of k, v and the result are launches of their own (scaled.py)"
        chosen = self.chosen.pop(inner)
        self.chosen[node] = replace(chosen, beside=(*chosen.beside, told))
        return steps

    def _planned(
        self, p: Problem, kernel: AttentionKernel[Problem, MaskPlan], refused: Mapping[str, str]
    ) -> list[Step]:
        """A kernel's launches, behind those of its mask's plan where none has it yet."""
        plan, steps = None, list[Step]()
        if kernel.p.mask_t is not None:  # which a bias may stand for
            plan, made = self.masks.plan(kernel.p, kernel.tiling, kernel.needs_units)
            steps += made
        steps += kernel.launches(plan, plan is not None and not steps, self.scratch)
        self.chosen.update(dict.fromkeys(p.nodes, kernel.chosen(refused)))
        return steps

    def appended(self, found: RopeCacheAttention, ctx: Context) -> list[Step]:
        """The launches of a rotation, the writing of a step's k and v, and their attention: all in the attention's, or
        where its kernel has no such form, one before it."""
        p = Problem(attention_of(found.attention), self.place)
        kernel, refused = self._kernel_of(p)
        if not kernel.can_append:
            return [*lower_rope_cache(found.cache, ctx), *self.launches(attention_of(found.attention))]
        table, steps = rope_table(found.cache.q, ctx)
        kernel.appended = appended_arguments(found.cache, table, ctx)
        steps += self._planned(p, kernel, refused)
        self._tell(found.attention, append=ROTATED_APPEND)
        return steps

    def panel_append(self, found: PanelAppend, ctx: Context) -> list[Step]:
        """The launches of an attention over keys in panels whose first one writes the step's k and v too."""
        p = Problem(attention_of(found.attention), self.place)
        kernel, refused = self._kernel_of(p)
        assert isinstance(kernel, Forward), kernel.name  # who alone reads panels
        kernel.appended = panel_arguments(found, ctx)
        steps = self._planned(p, kernel, refused)
        self._tell(found.attention, append=PANELS_APPEND)
        return steps

    def block_append(self, found: BlockAppend, ctx: Context) -> list[Step]:
        """The launches of an attention over caches of blocks whose first one writes the step's k and v too; or, where
        its kernel has no such form, behind those that write them."""
        p = Problem(attention_of(found.attention), self.place)
        kernel, refused = self._kernel_of(p)
        if (reason := kernel.why_no_blocks) is not None:
            before = [*lower_set_rows([found.k_set], ctx), *lower_set_rows([found.v_set], ctx)]
            return before + self._planned(p, kernel, {**refused, "block_append": reason})
        kernel.appended = block_arguments(found, ctx)
        steps = self._planned(p, kernel, refused)
        self._tell(found.attention, append=BLOCKS_APPEND)
        return steps

    def _kernel_of(self, p: Problem) -> tuple[AttentionKernel[Problem, MaskPlan], dict[str, str]]:
        """The kernel of a contiguous attention, and why others do not serve it. Flash decoding in two passes comes
        first where the schedule asks for a form of it."""
        missing = not_of(self.target)
        if self.schedule in PASS_FORMS and self.target.is_nvidia and self.config is None:
            from graphrt.backends.triton.kernels.flash_attn.passes_launch import DecodePasses

            kernel = DecodePasses(p, self.target, self.schedule)
            if (reason := kernel.serves()) is None:
                return kernel, {}
            missing = {**missing, kernel.name: f"{self.schedule} is asked for, but {reason}"}
        return self._first(p, kernels_of(self.target), missing)

    def _varlen(self, p: VarlenProblem) -> list[Step]:
        """Of an attention that is done in parts the last one's kernel is told as chosen, the others beside it."""
        both = cascade(p, self.scratch, self.lengths)
        parts = self._by_rows(p) if both is None else [both.shared, *self._by_rows(both.own)]
        steps, beside = list[Step](), list[str]()
        for part in parts:
            kernel, refused = self._first(part, varlen_kernels_of(self.target), {})
            assert isinstance(kernel, VarlenKernel)
            plan, made = self.lengths.plan(
                part, kernel.tiling, kernel.sharing, kernel.rounds, kernel.turn, kernel.more
            )  # fmt: skip
            steps += [*made, *kernel.launches(plan, not made, self.scratch)]
            beside.append(f"{part.part.text}: {kernel.kernel}, {kernel.choice.summary()}")
        if both is not None:
            steps.append(both.join(self.target))
            beside.append("results of shared and of own keys are joined by their denominators, a launch of prefix.py")
        others = tuple(beside[: len(parts) - 1] + beside[len(parts) :])
        self.chosen.update(dict.fromkeys(p.nodes, replace(kernel.chosen(refused), beside=others)))
        return steps

    def _by_rows(self, p: VarlenProblem) -> list[VarlenProblem]:
        """Sequences of few query rows apart from the others, where a kernel of many would have both, and another takes
        the few better."""
        kinds = varlen_kernels_of(self.target)
        if self.config is not None or p.n_seq == 1 or not kinds[0].few_rows:
            return [p]
        few, many = by_rows(p, kinds[0].few_rows + 1)
        apart = kinds[0](p, self.target, self.schedule).serves() and not kinds[0](few, self.target).serves()
        return [few, many] if apart else [p]

    def _first(
        self, p: Problem, kinds: Sequence[type[AttentionKernel[Any, Any]]], missing: dict[str, str]
    ) -> tuple[AttentionKernel[Any, Any], dict[str, str]]:
        """The first kernel of a list that serves a problem, the last serving all, and why those before it do not.
        missing: why kernels of other GPUs are not in the list."""
        if self.config is not None:
            *others, last = kinds
            refused = {kind.name: "the portable kernel's config is forced" for kind in others}
            return last(p, self.target, self.schedule, config=self.config), {**missing, **refused}  # type: ignore[call-arg]
        for kind in kinds:
            kernel = kind(p, self.target, self.schedule)
            reason = kernel.serves()
            if reason is None:
                break
            missing[kernel.name] = reason
        return kernel, missing


#: Lowered by a Launcher, as attentions by themselves are.
ATTENTION_LSE = Fusion("attention_lse", attention_lse, exact=True)
#: So are gradients; in form "split" each is what it is by itself.
ATTENTION_BACK = Fusion("attention_back", attention_back, exact=True)
#: Likewise, behind attention_lse, which would compute the scores once more without it. It gains at short contexts and
#: loses at long ones, so it is asked for by name.
PANEL_APPEND = Fusion("panel_append", panel_append)
#: What ROPE_CACHE does in one launch is then in those before and behind it. It loses in short rings: it is asked for.
BLOCK_APPEND = Fusion("block_append", block_append)
#: Where it does not, it is on by itself.
LONG_BLOCK_APPEND = Fusion("long_block_append", long_block_append)
