"""A step's writing of the cache and its attention as the launches of an sm_90, in the emulator, behind its rotation or
without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from graphrt import ops
from graphrt.backend import Region, Usage
from graphrt.backends.triton.context import Context
from graphrt.backends.triton.kernels.flash_attn.fusions import attention_of
from graphrt.backends.triton.kernels.flash_attn.launcher import BLOCK_APPEND, Launcher
from graphrt.backends.triton.kernels.rope import ROPE_CACHE_ATTENTION, lower_rope_cache
from graphrt.backends.triton.kernels.rope_fusions import RopeCacheAttention
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.lowering import lower
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.fusion import fuse
from graphrt.graph import Graph
from graphrt.ops.rope import RopeParams
from graphrt.tensor import Tensor, new_input
from support import gluon_emulator
from support.aot_arch import target_of
from support.panel_steps import PanelStep


@dataclass
class Step:
    """A step's graph. values: of each leaf; caches: k's and v's; out: the attention."""

    values: dict[Tensor, np.ndarray]
    caches: tuple[Tensor, Tensor]
    out: Tensor

    @property
    def found(self) -> RopeCacheAttention:
        """What the fusion finds in it."""
        graph = Graph(self.out)
        (group,) = [g for g in fuse(Region(graph.nodes, lambda t: t is self.out), [ROPE_CACHE_ATTENTION]) if g.captured]
        assert isinstance(group.captured, RopeCacheAttention), group.kernel
        return group.captured


def step(
    d: int, heads: tuple[int, int], n_kv: int, cells: list[int], kind: str = "f16", mask: np.ndarray | None = None,
    mode: str = "neox", n_dims: int | None = None, n_cells: int | None = None, ids: str = "i64", **more: Any,
) -> Step:  # fmt: skip
    """A step of len(cells) sequences, one token each, which goes to cells[i] of its own cache. n_kv: cells that are
    read, of n_cells; mask: f16 [n_seq or 1, n_kv], None for none; more: of flash_attn_ext."""
    rng, n_seq, (n_head, n_head_kv) = np.random.default_rng(d + n_kv), len(cells), heads
    n_cells = n_cells or n_kv
    values: dict[Tensor, np.ndarray] = {}

    def leaf(name: str, of: str, *ne: int, given: Any = None) -> Tensor:
        t = new_input(of, *ne, name=name)
        found = rng.standard_normal(t.shape, np.float32) if given is None else np.asarray(given)
        values[t] = found.astype({"f16": np.float16, "f32": np.float32, "i32": np.int32, "i64": np.int64}[of])
        return t

    q, k = leaf("q", "f32", d, n_head, n_seq), leaf("k", "f32", d, n_head_kv, n_seq)
    v = leaf("v", "f32", d * n_head_kv, 1, n_seq)
    at = leaf("positions", "i32", n_seq, given=[7 + 3 * i for i in range(n_seq)])
    where = leaf("cells", ids, 1, n_seq, given=np.array(cells).reshape(1, 1, n_seq, 1))
    caches = tuple(leaf(f"cache of {x}", kind, d * n_head_kv, n_cells, n_seq) for x in "kv")
    masked = (
        None if mask is None else leaf("mask", "f16", n_kv, 1, 1, len(mask), given=mask.reshape(len(mask), 1, 1, n_kv))
    )
    params = RopeParams(n_dims or d, mode=mode)
    turned_q, turned_k = ops.rope(q, at, params), ops.rope(k, at, params)
    written_k = ops.set_rows(ops.reshape(turned_k, d * n_head_kv, 1, n_seq), where, caches[0])
    written_v = ops.set_rows(v, where, caches[1])

    def heads_of(t: Tensor) -> Tensor:
        size = t.dtype.type_size
        return ops.view(t, (d, n_kv, n_head_kv, n_seq), (t.nb[1], d * size, t.nb[2]))

    turned = ops.permute(ops.reshape(turned_q, d, n_head, 1, n_seq), 0, 2, 1, 3)
    out = ops.flash_attn_ext(turned, heads_of(written_k), heads_of(written_v), masked, d**-0.5, name="out", **more)
    return Step(values, caches, out)


def fill(buffer: TritonBuffer, values: np.ndarray) -> None:
    """Writes a leaf's values."""
    buffer.memory[: values.nbytes] = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).reshape(-1).copy())


def filled(
    values: Mapping[Tensor, np.ndarray],
) -> tuple[dict[Tensor, TritonBuffer], Callable[[Tensor], tuple[TritonBuffer, int]]]:
    """Memory by roots, which has the leaves' values, and what gives each tensor its place there. Memory that nothing
    was written to holds NaN."""
    places = dict[Tensor, TritonBuffer]()

    def place(t: Tensor) -> tuple[TritonBuffer, int]:
        unwritten = torch.full((t.root.nbytes,), 0xFF, dtype=torch.uint8)
        return places.setdefault(t.root, TritonBuffer(unwritten, Usage.COMPUTE)), t.view_offs

    for leaf, given in values.items():
        fill(place(leaf)[0], given)
    return places, place


def launcher_of(
    s: Step, arch: str = "sm_90", sm_count: int | None = None
) -> tuple[RopeCacheAttention, Launcher, Context, dict[Tensor, TritonBuffer]]:
    """What the fusion found, and who lowers it for a GPU. Memory that nothing was written to holds NaN."""
    places, place = filled(s.values)
    target = target_of(arch) if sm_count is None else replace(target_of(arch), sm_count=sm_count)
    return s.found, Launcher(target, place), Context(place, target, False), places


def run(s: Step, fused: bool, sm_count: int) -> tuple[list[str], list[np.ndarray]]:
    """(kernels that ran, result and both caches as numbers); fused: in one launch."""
    found, launcher, ctx, places = launcher_of(s, sm_count=sm_count)
    if fused:  # twice, as two layers: the second one's mask has been sorted before
        steps = [*launcher.appended(found, ctx), *launcher.appended(found, ctx)]
    else:
        steps = [*lower_rope_cache(found.cache, ctx), *launcher.launches(attention_of(found.attention))]
    names = list[str]()
    for launch in steps:
        assert isinstance(launch, Launch)
        if "flash_attn_decode_append" in names:  # of the first layer, whose cells are none of the second one's
            for cache in s.caches:
                fill(places[cache], s.values[cache])
        names.append(launch.name)
        _run(launch)
    kind = torch.bfloat16 if s.caches[0].dtype.name == "bf16" else torch.float16
    memory = [
        places[t.root].memory.view(of)[: t.n_elements]
        for t, of in ((s.out, torch.float32), *((c, kind) for c in s.caches))
    ]
    return names, [m.float().numpy() for m in memory]


def run_blocks(s: PanelStep, fused: bool, sm_count: int, schedule: str | None) -> tuple[list[str], list[np.ndarray]]:
    """A step over caches of blocks: (kernels that ran, result and both caches' bytes); fused: in one launch.

    Last programs come first: who has a tile's first k-block, after who has the new cell's, which is further on.
    """
    places, place = filled(s.values)
    target = replace(target_of("sm_90"), sm_count=sm_count)
    groups = fuse(Region(s.graph.nodes, lambda t: t is s.out), [BLOCK_APPEND] if fused else [])
    names = list[str]()
    for segment in lower(groups, Context(place, target, False), Launcher(target, place, schedule)):
        for launch in segment.steps:
            assert isinstance(launch, Launch)
            names.append(launch.name)
            _run(launch, backwards=True)
    memory = [places[t.root].memory for t in (s.out, s.k_set, s.v_set)]
    return names, [memory[0].view(torch.float32)[: s.out.n_elements].numpy(), *(m.numpy() for m in memory[1:])]


def _run(launch: Launch, backwards: bool = False) -> None:
    """A launch of the decode kernel in the emulator, others in Triton's interpreter."""
    if launch.name.startswith("flash_attn_decode"):
        gluon_emulator.emulate(launch, True, backwards)
    else:
        launch.args |= {name: False for name in ("PDL", "PTX") if name in launch.args}
        launch.options.pop("launch_pdl", None)
        launch()
