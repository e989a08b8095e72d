"""Hopper's kernels of gradients of packed sequences for the launcher: which problems each serves, and its launches."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
import triton

from graphrt.backends.triton.accesses import Step
from graphrt.backends.triton.kernels.flash_attn.backward import plans
from graphrt.backends.triton.kernels.flash_attn.backward.kernel import BackKernel
from graphrt.backends.triton.kernels.flash_attn.backward.problem import KINDS
from graphrt.backends.triton.kernels.flash_attn.backward.shared import ELEMENTS, Shared
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_launch import OPTIONS
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_packed import (
    hopper_attn_back_packed_keys,
    hopper_attn_back_packed_queries,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_packing import attention_back_slots, order_packed_tiles
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_rows import WEIGHT_BITS
from graphrt.backends.triton.kernels.flash_attn.hopper.backward_specs import (
    N_WG,
    PACKED_HEADS,
    PLAN_QUERIES,
    GradientConfig,
    GradientSpec,
    config_of,
    crowded,
)
from graphrt.backends.triton.kernels.flash_attn.hopper.launch import L2_SECTION_BYTES, as_torch, box_descriptor
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import RECORD
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.ops.soft_max import alibi_slopes

#: Queries or keys of a sequence, on average, of which fewer leave most of a tile empty.
MIN_ROWS = 48
#: Tiles that a program of order_packed_tiles places, and of how many it looks at the work at a time.
TILES, CHUNK = 64, 256


class PackedGradient(BackKernel):
    """What both have in common. own: what its programs own, for config_of()."""

    forms = ("split",)
    own: ClassVar[str]
    file = "hopper/backward_packed.py"

    def serves(self) -> str | None:
        p, (d_k, d_v) = self.p, self.p.d
        if not p.is_packed:
            return "sequences are not packed"
        if p.k_t.dtype is not p.v_t.dtype or p.kind not in ("f16", "bf16"):
            return f"K and V must both be f16 or both bf16, they are {p.k_t.dtype.name} and {p.v_t.dtype.name}"
        if d_k != d_v or d_k not in PACKED_HEADS:
            return f"heads must be of {', '.join(map(str, PACKED_HEADS))}, they are of {d_k} and {d_v}"
        if min(p.n_q, p.n_kv) < MIN_ROWS * p.n_seq:
            return f"it takes {MIN_ROWS} queries and keys a sequence or more, here {p.n_q} and {p.n_kv} of {p.n_seq}"
        if p.params.scale <= 0:
            return f"the scale must be positive, it is {p.params.scale:g}"
        if any(n % 16 for t in (p.k_t, p.v_t) for n in (*t.nb[1:], p.place(t)[1])):
            return "addresses and strides of K and V must be whole 16 bytes"
        return None

    @cached_property
    def config(self) -> GradientConfig:
        return config_of(self.own, self.p.d[0], crowded(self.own, self.p.params.softcap, 0.0, False))

    @property
    def tiles(self) -> str:
        c = self.config
        brings = "Q and d_out" if self.own == "keys" else "K and V"
        return (
            f"{c.block_m} queries x {c.block_n} keys of a sequence, those with the most work first, {N_WG} warpgroups "
            f"multiply, a warp brings {brings} by TMA"
        )

    @cached_property
    def spec(self) -> GradientSpec:
        p, c = self.p, self.config
        return GradientSpec(
            d=p.d[0], block_m=c.block_m, block_n=c.block_n, stages=c.stages, has_mask=False,
            has_softcap=p.params.softcap != 0.0, has_alibi=p.params.max_bias > 0,
            weight=2.0 ** -(WEIGHT_BITS if p.kind == "f16" else 0), mask_vec=1, packed=True, causal=p.params.causal,
            window=p.params.window > 0, of_k="k" in self.of, of_v="v" in self.of,
        )  # fmt: skip

    def _tiles(self, of_keys: bool, shared: Shared) -> tuple[torch.Tensor, list[Step]]:
        """order_packed_tiles's list."""
        p = self.p
        listed, steps = plans.packed_tiles(p, PLAN_QUERIES, of_keys, shared)
        n = listed.shape[0]

        def make() -> tuple[torch.Tensor, list[Step]]:
            made = torch.zeros((n, RECORD.value), dtype=torch.int32, device=self.target.device)
            args = {
                "p_tiles": listed, "p_ordered": made, "n_tiles": n, "window": p.params.window, "BLOCK": PLAN_QUERIES,
                "CAUSAL": p.params.causal, "WINDOW": p.params.window > 0, "OF_KEYS": of_keys, "TILES": TILES,
                "CHUNK": CHUNK, "PDL": self.target.has_pdl,
            }  # fmt: skip
            return made, [Launch(order_packed_tiles, (triton.cdiv(n, TILES),), args, launch_options(self.target, 4))]

        key = ("ordered", p.q_starts, p.k_starts, of_keys, p.params.causal, p.params.window)
        found, made = shared.once(key, make)
        return found, steps + made

    def _slots(self, shared: Shared) -> tuple[tuple[torch.Tensor, ...], list[Step]]:
        """(q, d_out, lse and delta in slots, scales), see attention_back_slots."""
        p, d = self.p, self.p.d[0]
        rows, steps = shared.rows(p)
        tiles, listed = self._tiles(False, shared)
        padded = (p.n_q // PLAN_QUERIES + p.n_seq + 1) * PLAN_QUERIES

        def make() -> tuple[tuple[torch.Tensor, ...], list[Step]]:
            q, d_out = (shared.empty(1, p.n_head, padded, d, kind=KINDS[p.kind]) for _ in range(2))
            made = q, d_out, shared.empty(p.n_head, 2, padded)
            (_, d_h, d_t, _), (l_h, l_t, _, _) = p.strides(p.d_out_t), p.strides(p.lse_t)
            _, q_t, q_h, _ = p.strides(p.q_t)
            at_once = min(PLAN_QUERIES, ELEMENTS // d)
            args = {
                "p_tiles": tiles, "p_q": p.f32(p.q_t), "p_d_out": p.f32(p.d_out_t), "p_lse": p.f32(p.lse_t),
                "p_delta": rows.delta, "p_scales": rows.scales, "p_made_q": made[0], "p_made_d": made[1],
                "p_rows": made[2], "n_q": p.n_q, "padded": padded, "q_t": q_t, "q_h": q_h, "d_t": d_t, "d_h": d_h,
                "l_t": l_t, "l_h": l_h, "D": d, "ROWS": at_once, "BITS": WEIGHT_BITS if p.kind == "f16" else 0,
                "SCALED": p.kind == "f16", "PDL": self.target.has_pdl,
            }  # fmt: skip
            grid = (p.n_head, tiles.shape[0] * (PLAN_QUERIES // at_once))
            return made, [Launch(attention_back_slots, grid, args, launch_options(self.target, 4))]

        key = ("slots", p.q_t, p.d_out_t, p.lse_t, p.out_t, p.d_lse_t, p.v_t, p.kind, p.q_starts)
        found, made = shared.once(key, make)
        return (*found, rows.scales), [*steps, *listed, *made]

    def _launch(self, kernel: Any, shared: Shared, results: dict[str, torch.Tensor | None]) -> list[Step]:
        """The launch, and those before it. results: memory of gradients by argument."""
        p, c, of_keys = self.p, self.config, self.own == "keys"
        tiles, listed = self._tiles(of_keys, shared)
        (q, d_out, rows, scales), steps = self._slots(shared)
        rows_of_q, rows_of_k = (c.block_m, c.block_n) if of_keys else (PLAN_QUERIES, c.block_n)
        k, v = as_torch(p.k_t, p.k.data), as_torch(p.v_t, p.v.data)
        boxes = {
            "q_desc": (q, rows_of_q),
            "o_desc": (d_out, rows_of_q),
            "k_desc": (k, rows_of_k),
            "v_desc": (v, rows_of_k),
        }
        slopes = None
        if p.params.max_bias > 0:
            slopes = torch.tensor(alibi_slopes(p.n_head, p.params.max_bias), device=self.target.device)
        heads, walked = (p.n_head // p.gqa, p.gqa * p.n_q) if of_keys else (p.n_head, p.n_kv)
        side = max(1, L2_SECTION_BYTES // (4 * p.d[0] * walked)) * (1 if of_keys else p.gqa)
        args = results | {name: box_descriptor(t, n, p.d[0], idle=p.d[0]) for name, (t, n) in boxes.items()} | {
            "rows": rows, "tiles": tiles, "slopes": slopes, "scales": scales, "scale": float(p.params.scale),
            "softcap": float(p.params.softcap), "n_head": p.n_head, "gqa": p.gqa, "n_tiles": tiles.shape[0],
            "padded": rows.shape[2], "n_rows": p.n_kv if of_keys else p.n_q, "window": p.params.window,
            "section": side, "spec": self.spec,
        }  # fmt: skip
        return [*listed, *steps, Launch(kernel, (tiles.shape[0] * heads,), args, OPTIONS)]


class HopperPackedKeys(PackedGradient):
    name, makes = "hopper_packed_keys", ("k", "v")
    own = "keys"

    def launches(self, shared: Shared) -> list[Step]:
        made = {of: self.p.f32(self.p.of[of]) for of in self.of}
        some = next(iter(made.values()))
        return self._launch(hopper_attn_back_packed_keys, shared, {f"d{of}": made.get(of, some) for of in "kv"})


class HopperPackedQueries(PackedGradient):
    name, makes = "hopper_packed_queries", ("q",)
    own = "queries"

    def launches(self, shared: Shared) -> list[Step]:
        return self._launch(hopper_attn_back_packed_queries, shared, {"dq": self.p.f32(self.p.of["q"])})
