"""From a node to launches: geometry, configuration, schedule and scratch of one attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from graphrt.backend import Place
from graphrt.backends.triton.device import Target, interpreting
from graphrt.backends.triton.kernels.flash_attn import chooser
from graphrt.backends.triton.kernels.flash_attn.configs import Config, find_config
from graphrt.backends.triton.kernels.flash_attn.fixup import flash_attn_fixup
from graphrt.backends.triton.kernels.flash_attn.forward import flash_attn
from graphrt.backends.triton.kernels.flash_attn.mask import classify_blocks, list_blocks, sum_units
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TORCH_TYPES, elements
from graphrt.dtypes import DType
from graphrt.ops.soft_max import alibi_slopes
from graphrt.tensor import Tensor

LOG2E = math.log2(math.e)
DOT_TYPES = {"f32": tl.float32, "bf16": tl.bfloat16}


def split_head(d: int, at_least: int = 16) -> tuple[int, int]:
    """A head size as one or two powers of two that cover it: 576 as 512 + 64, 112 as 128 + 0."""
    whole = max(at_least, 1 << (d - 1).bit_length())
    half = whole // 2
    if d == whole or half < at_least:
        return whole, 0
    rest = max(at_least, 1 << (d - half - 1).bit_length())
    return (half, rest) if half + rest < whole else (whole, 0)


@dataclass(frozen=True)
class Operand:
    """K or V as the kernel takes it. data: from its first element; strides: of keys, heads and sequences, in elements

    of `data`; kind: the type's name; aligned: quantized rows can be read as words; dot: what the product computes in."""

    data: torch.Tensor
    strides: tuple[int, int, int]
    kind: str
    aligned: bool
    dot: Any
    d: int
    parts: tuple[int, int]


def operand(t: Tensor, place: Place) -> Operand:
    """A tensor of K or V at its place."""
    buffer, offset = place
    kind = t.dtype.name
    if t.dtype.is_quantized:
        aligned = all(n % 4 == 0 for n in (*t.nb[1:], offset))
        unit = torch.int32 if aligned else torch.int16
    else:
        aligned, unit = True, TORCH_TYPES[kind]
    n, h, s = (stride // unit.itemsize for stride in t.nb[1:])
    parts = split_head(t.ne[0], 32 if t.dtype.is_quantized else 16)
    return Operand(elements(buffer, offset, t, unit), (n, h, s), kind, aligned, dot_type(t.dtype), t.ne[0], parts)


def dot_type(dt: DType) -> Any:
    """What products with a type compute in. Triton's interpreter gets bf16 wrong, so there it is f32."""
    kind = DOT_TYPES.get(dt.name, tl.float16)
    return tl.float32 if interpreting() and kind == tl.bfloat16 else kind


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """What classify_blocks, list_blocks and sum_units leave for the layers that share a mask."""

    launches: tuple[Launch, ...]
    counts: torch.Tensor
    blocks: torch.Tensor
    seen: torch.Tensor
    unit_start: torch.Tensor


class Launcher:
    """Makes the launches of a program's attentions. They run in order, so they share scratch and masks' plans."""

    def __init__(self, target: Target, place: Callable[[Tensor], Place], schedule: str | None = None) -> None:
        self.target = target
        self.place = place
        self.schedule = schedule
        self.device = target.device
        self.masks: dict[object, MaskPlan] = {}
        self.scratch = torch.empty(0, device=self.device)
        #: What was chosen for each node, for those who ask why.
        self.choices: dict[Tensor, chooser.Choice] = {}

    def launches(self, nodes: Sequence[Tensor]) -> list[Callable[[], None]]:
        """The launches of FLASH_ATTN_EXT, FLASH_ATTN_LSE, or both of the same sources."""
        return list(Attention(self, nodes).launches())

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def part(self, nbytes: int) -> torch.Tensor:
        """Scratch for parts of tiles; fresh memory if what there is is too small (what was given out stays valid)."""
        if self.scratch.numel() * 4 < nbytes:
            self.scratch = torch.full((-(-nbytes // 4),), math.nan, device=self.device)
        return self.scratch


class Attention:
    """One attention: what its kernels are given."""

    def __init__(self, launcher: Launcher, nodes: Sequence[Tensor]) -> None:
        self.launcher = launcher
        self.target = launcher.target
        self.out = next((n for n in nodes if n.op == "FLASH_ATTN_EXT"), None)
        self.lse = next((n for n in nodes if n.op == "FLASH_ATTN_LSE"), None)
        node = nodes[0]
        sources = [*node.src, None, None]
        q, k = sources[:2]
        v, mask, sinks = sources[2:5] if self.out is not None else (None, *sources[2:4])
        assert q is not None and k is not None
        self.node, self.q_t, self.k_t, self.v_t, self.mask_t, self.sinks_t = node, q, k, v, mask, sinks
        place = launcher.place
        self.k = operand(k, place(k))
        self.v = operand(v, place(v)) if v is not None else self.k
        self.n_kv, self.n_q, self.n_head, self.n_seq = k.ne[1], q.ne[1], q.ne[2], q.ne[3]
        self.gqa = q.ne[2] // k.ne[2]
        self.config = self._config()
        c = self.config
        self.heads_packed = max(p for p in range(1, min(self.gqa, c.block_m) + 1) if self.gqa % p == 0)
        self.n_groups = self.n_head // self.heads_packed
        self.n_qt = -(-self.n_q * self.heads_packed // c.block_m)
        self.n_tiles = self.n_qt * self.n_groups * self.n_seq
        self.n_blocks = -(-self.n_kv // c.block_n)
        self.m2, self.m3 = (mask.ne[2], mask.ne[3]) if mask is not None else (1, 1)
        self.mask_groups = 1 if self.m2 == 1 else self.n_groups
        self.n_mask_tiles = self.m3 * self.mask_groups * self.n_qt
        self.uniform = mask is None or self.n_mask_tiles == 1
        self.choice = self._choose()
        for n in nodes:
            launcher.choices[n] = self.choice

    def _config(self) -> Config:
        d = max(self.k.d, self.v.d)
        return find_config(self.target.arch, self.n_q * self.gqa, d, self.k.kind, self.v.kind)

    def _choose(self) -> chooser.Choice:
        c = self.config
        # A group of heads is to the chooser one head with as many more query rows.
        problem = chooser.Problem(
            self.n_q * self.heads_packed, self.n_kv, self.n_groups, self.n_head // self.gqa, self.n_seq, self.k.d,
            self.v.d, self.mask_t is not None, c.block_m, c.block_n, d_v_stored=sum(self.v.parts),
        )  # fmt: skip
        device = chooser.Device(self.target.sm_count, c.per_sm)
        return chooser.choose(problem, device, self.launcher.schedule)

    def launches(self) -> list[Launch]:
        plan = self._mask_plan() if self.mask_t is not None else None
        first = list(plan.launches) if plan is not None and plan.launches else []
        if plan is not None and first:
            self.launcher.masks[self._mask_key()] = MaskPlan((), plan.counts, plan.blocks, plan.seen, plan.unit_start)
        ranges = self.choice.schedule != "tile"
        main = self._main(plan, ranges)
        return [*first, main, *([self._fixup(main.args)] if ranges else [])]

    def _pointer(self, t: Tensor | None, kind: torch.dtype) -> torch.Tensor:
        """A tensor's memory; for an absent one any memory: nothing reads it."""
        if t is None:
            return self.launcher.zeros(1).view(kind)
        return elements(*self.launcher.place(t), t, kind)

    def _main(self, plan: MaskPlan | None, ranges: bool) -> Launch:
        c, k, v, p = self.config, self.k, self.v, self.node.params
        none = self.launcher.zeros(1)
        q_strides = [n // 4 for n in (self.q_t.nb[1], self.q_t.nb[2], self.q_t.nb[3])]
        mask_strides = [n // 2 for n in self.mask_t.nb[1:]] if self.mask_t is not None else [0, 0, 0]
        scale = abs(p.scale) / p.softcap if p.softcap else abs(p.scale) * LOG2E
        slopes = torch.tensor(alibi_slopes(self.n_head, p.max_bias), device=self.launcher.device)
        part = self.launcher.part(self.choice.scratch_bytes) if ranges else none.view(torch.float32)
        args = {
            "p_q": self._pointer(self.q_t, torch.float32), "p_k": k.data, "p_v": v.data,
            "p_mask": self._pointer(self.mask_t, torch.float16), "p_sinks": self._pointer(self.sinks_t, torch.float32),
            "p_slopes": slopes, "p_out": self._pointer(self.out, torch.float32),
            "p_lse": self._pointer(self.lse, torch.float32),
            "p_counts": plan.counts if plan else none, "p_blocks": plan.blocks if plan else none,
            "p_seen": plan.seen if plan else none, "p_unit_start": plan.unit_start if plan else none,
            "p_part": part, "p_bad": none,
            **dict(zip(("sq_t", "sq_h", "sq_s"), q_strides)), **dict(zip(("sk_n", "sk_h", "sk_s"), k.strides)),
            **dict(zip(("sv_n", "sv_h", "sv_s"), v.strides)), **dict(zip(("sm_t", "sm_h", "sm_s"), mask_strides)),
            "n_q": self.n_q, "n_kv": self.n_kv, "n_head": self.n_head, "gqa": self.gqa,
            "n_groups": self.n_groups, "n_qt": self.n_qt, "n_blocks": self.n_blocks, "n_tiles": self.n_tiles,
            "m2": self.m2, "m3": self.m3, "mask_groups": self.mask_groups,
            "programs": self.choice.programs, "splits": self.choice.splits if self.choice.schedule == "split" else 0,
            "section": self._section(), "sign": math.copysign(1.0, p.scale), "factor": scale, "softcap": p.softcap,
            "has_sinks": int(self.sinks_t is not None), "has_lse": int(self.lse is not None),
            "D_K": k.d, "D_V": v.d, "DK0": k.parts[0], "DK1": k.parts[1], "DV0": v.parts[0], "DV1": v.parts[1],
            "K_KIND": k.kind, "V_KIND": v.kind, "K_ALIGNED": k.aligned, "V_ALIGNED": v.aligned,
            "K_DOT": k.dot, "V_DOT": v.dot, "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "WAYS": c.ways,
            "SOFTCAP": p.softcap != 0, "HAS_MASK": self.mask_t is not None, "V_IN_K": self._v_in_k(),
            "HAS_V": self.out is not None, "PACK": self.heads_packed, "PER_HEAD": self.m2 > 1, "RANGES": ranges,
            "UNIFORM": self.uniform, "BIG": self._big(), "REPAIR": False,
            "WIDE": max(k.strides[0], v.strides[0]) * c.block_n >= 2**31, "PTX": self.target.is_nvidia,
            "PDL": self.target.has_pdl, "PRECISION": "tf32x3" if self.target.is_nvidia else "ieee", "STAGES": c.stages,
            "PARTIAL_STAGES": c.stages,
        }  # fmt: skip
        return Launch(flash_attn, (self.choice.programs,), args, self._options(c.warps))

    def _big(self) -> bool:
        """Programs times units may pass 32 bits (the fixup counts a few programs past the last)."""
        return (self.choice.programs + 64) * self.n_tiles * (self.n_blocks + 1) >= 2**31

    def _options(self, warps: int) -> dict[str, Any]:
        return {"num_warps": warps, **({"launch_pdl": True} if self.target.has_pdl else {})}

    def _section(self) -> int:
        """Groups of heads whose tiles run at the same time, so that their K and V stay in the cache."""
        groups = self.n_groups * self.n_seq
        per_kv_head = self.gqa // self.heads_packed
        nbytes = sum(t.data_nbytes // (t.ne[2] * t.ne[3]) for t in (self.k_t, self.v_t) if t is not None)
        fitting = max(1, int(0.6 * self.target.l2 / max(nbytes, 1))) * per_kv_head
        return max(s for s in range(1, groups + 1) if groups % s == 0 and (s <= fitting or s == 1))

    def _v_in_k(self) -> bool:
        k, v, place = self.k_t, self.v_t, self.launcher.place
        if v is None or v.dtype is not k.dtype or v.nb != k.nb or place(v) != place(k):
            return False
        return self.v.parts == (self.k.parts[0], 0)

    def _fixup(self, main: Any) -> Launch:
        parts_most = self.choice.programs // max(1, self.n_tiles) + 2
        parts = min(32, max(2, 1 << (parts_most - 1).bit_length()))
        width = sum(self.v.parts)
        d = 1 << (width - 1).bit_length()
        used = min(self.config.block_m, self.n_q * self.heads_packed)
        rows = max(1, min(8192 // (parts * d), 16))
        rows = 1 << (rows.bit_length() - 1)
        names = (
            "p_part", "p_sinks", "p_out", "p_lse", "p_counts", "p_unit_start", "n_q", "n_head", "n_groups", "n_qt",
            "n_blocks", "n_tiles", "programs", "splits", "has_sinks", "has_lse", "D_V", "DV0",
            "DV1", "V_KIND", "V_ALIGNED", "HAS_MASK", "HAS_V", "UNIFORM", "BIG",
            "PACK", "BLOCK_M", "PDL",
        )  # fmt: skip
        args = {**{name: main[name] for name in names}, "ROWS": rows, "PARTS": parts, "DP": d}
        return Launch(flash_attn_fixup, (self.n_tiles, -(-used // rows)), args, self._options(4))

    def _mask_key(self) -> object:
        c = self.config
        return (self.mask_t, c.block_m, c.block_n, self.heads_packed, self.n_groups if self.m2 > 1 else 1, self.n_tiles)

    def _mask_plan(self) -> MaskPlan:
        """The plan of this mask and these tiles, with its launches if no attention before had the same."""
        known = self.launcher.masks.get(self._mask_key())
        if known is not None:
            return known
        c, mask, zeros = self.config, self.mask_t, self.launcher.zeros
        assert mask is not None
        tiles, blocks = self.n_mask_tiles, self.n_blocks
        counts, listed = zeros(tiles, 2), zeros(tiles, blocks)
        seen, starts, kinds = zeros(tiles, blocks, c.block_n // 32), zeros(self.n_tiles + 1), zeros(tiles, blocks)
        per_head = self.m2 > 1
        most = c.block_m if per_head else min(self.n_q, c.block_m // self.heads_packed + 1)
        rows = min(16, 1 << (most - 1).bit_length())
        chunk = max(1, min(1 << (blocks - 1).bit_length(), 4096 // (rows * c.block_n)))
        sizes = {"n_qt": self.n_qt, "n_blocks": blocks, "mask_groups": self.mask_groups}
        strides = dict(zip(("sm_t", "sm_h", "sm_s"), (n // 2 for n in mask.nb[1:])))
        classify = Launch(
            classify_blocks, (tiles, -(-blocks // chunk)),
            {"p_mask": self._pointer(mask, torch.float16), "p_class": kinds, "p_seen": seen, **strides, "n_q": self.n_q,
             "n_kv": self.n_kv, "m2": self.m2, "heads_packed": self.heads_packed, **sizes, "PER_HEAD": per_head,
             "BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "ROWS": rows, "CHUNK": chunk},
        )  # fmt: skip
        step = min(1024, 1 << (blocks - 1).bit_length())
        args = {"p_class": kinds, "p_counts": counts, "p_blocks": listed, "n_blocks": blocks, "CHUNK": step}
        launches = [classify, Launch(list_blocks, (tiles,), args)]
        if not self.uniform and self.choice.schedule != "tile":
            sizes = {"n_tiles": self.n_tiles, "n_qt": self.n_qt, "n_groups": self.n_groups, "m3": self.m3}
            args = {"p_counts": counts, "p_unit_start": starts, **sizes, "mask_groups": self.mask_groups, "CHUNK": 1024}
            launches.append(Launch(sum_units, (1,), args))
        return MaskPlan(tuple(launches), counts, listed, seen, starts)
