"""What the lowerings of mixtures of experts launch, for compiling without a GPU (see aot.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from graphrt import ops
from graphrt.backend import Group, Place, Usage
from graphrt.backends.triton.context import Context, View
from graphrt.backends.triton.kernels.experts import hopper
from graphrt.backends.triton.kernels.experts.gemm import expert_gemm
from graphrt.backends.triton.kernels.experts.lower import EXPERT_GATE_UP, EXPERT_SUM
from graphrt.backends.triton.kernels.experts.pairs import Pairs
from graphrt.backends.triton.kernels.experts.route import EXPERT_ROUTING
from graphrt.backends.triton.kernels.products.gemm_small.configs import table_of
from graphrt.backends.triton.kernels.products.half import Activations, Gate
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.backends.triton.packing import PACKED_TYPES, Packed, PackedBuffer, packing_of
from graphrt.graph import Graph
from graphrt.tensor import Tensor, new_tensor
from support.aot_arch import target_of
from support.planned import groups_in, lowered, lowered_group

#: name, kernel, arguments by name, options.
Case = tuple[str, Any, dict[str, Any], dict[str, Any]]

N_EXPERT, USED, K, M = 32, 4, 512, 256
#: A type of each of the table's kinds.
_PLAIN = {"half": "f16", "f32": "f32"}


def _context(arch: str) -> Context:
    """Places every tensor in memory of its own that nobody reads; matrices of packed types packed."""
    places: dict[Tensor, TritonBuffer] = {}

    def place(t: Tensor) -> Place:
        root = t.root
        if root not in places:
            if packing_of(root.dtype.name) is not None:
                places[root] = PackedBuffer(
                    Packed.empty(root.dtype.name, root.n_rows, root.ne[0], "cpu"), Usage.WEIGHTS
                )
            else:
                places[root] = TritonBuffer(torch.empty(root.nbytes, dtype=torch.uint8), Usage.COMPUTE)
        return places[root], t.view_offs

    return Context(place, target_of(arch), exact=False)


def layer(kind: str, tokens: int, act: str = "swiglu_oai", gating: str = "softmax", k: int = K) -> dict[str, Group]:
    """The fused groups of a layer, by their kernels' names."""
    logits = new_tensor("f32", N_EXPERT, tokens)
    probs = ops.soft_max(logits) if gating == "softmax" else ops.unary(logits, "sigmoid")
    biased = ops.add(probs, new_tensor("f32", N_EXPERT))
    order = ops.argsort(biased, descending=True)
    ids = ops.view(order, (USED, tokens), order.nb[1:2])
    picked = ops.get_rows(ops.reshape(probs, 1, N_EXPERT, tokens), ids)
    total = ops.sum_rows(ops.reshape(picked, USED, tokens))
    share = ops.div(ops.reshape(picked, USED, tokens), ops.clamp(total, 6e-5, 1e9))
    x, weights = new_tensor("f32", k, 1, tokens), ops.reshape(share, 1, USED, tokens)

    def product(x: Tensor, m: int) -> list[Tensor]:
        made = ops.mul_mat_id(new_tensor(kind, x.ne[0], m, N_EXPERT), x, ids)
        return [made, ops.add_id(made, new_tensor("f32", m, N_EXPERT), ids)]

    gate, up = product(x, M), product(x, M)
    glu = ops.glu(gate[1], up[1], act)
    down = product(glu, k)
    weighted = ops.mul(down[1], weights)
    looks = [ops.view(weighted, (k, tokens), weighted.nb[2:3], offs=i * weighted.nb[1]) for i in range(USED)]
    sums = [ops.add(looks[0], looks[1])]
    for look in looks[2:]:
        sums.append(ops.add(sums[-1], look))
    return groups_in(Graph(sums[-1]), EXPERT_ROUTING, EXPERT_GATE_UP, EXPERT_SUM)


def _launches(arch: str) -> Iterator[tuple[str, Launch]]:
    """Few pairs: every type in one form, some in the other, in the lengths of rows that models have. Many: _tiles()."""
    for kind in (*PACKED_TYPES, "f16", "f32"):
        k = 2880 if kind in ("mxfp4", "f16") else 2048
        groups = layer(kind, 1, k=k)
        for name in ("expert_gate_up", "expert_down") if kind in ("q4_K", "mxfp4", "f16") else ("expert_gate_up",):
            *_, step = lowered_group(groups[name], _context(arch))
            assert isinstance(step, Launch)
            yield f"{name} {kind} {k}", step
    groups = layer("q8_0", 64)
    for i, step in enumerate(lowered_group(groups["expert_down"], _context(arch))):
        assert isinstance(step, Launch)
        yield f"expert_down q8_0, many pairs, step {i}", step
    for gating in ("softmax", "sigmoid"):
        (step,) = lowered_group(layer("f16", 64, gating=gating)["expert_routing"], _context(arch))
        assert isinstance(step, Launch)
        yield f"expert_routing {gating}", step
    for step in lowered(groups["expert_down"].nodes[1], _context(arch)):
        assert isinstance(step, Launch)
        yield "ADD_ID", step
    yield from _tiles(arch)


def _tiles(arch: str) -> Iterator[tuple[str, Launch]]:
    """expert_gemm in the tables' tiles: packed ones with rows of whole steps and, as gpt-oss has them, without."""
    target, none = target_of(arch), torch.zeros(4096, dtype=torch.int32)
    for i, row in enumerate(table_of(arch)):
        for kind, k in (("q4_K", 2048), ("mxfp4", 2880)) if "packed" in row.kinds else ((_PLAIN[row.kinds[0]], 2048),):
            pairs = Pairs(N_EXPERT, USED, none, torch.zeros(min(row.n, 128) * N_EXPERT, dtype=torch.int32))
            like = Tensor("f32" if kind == "f32" else "f16", (k, 64, N_EXPERT))
            memory = torch.zeros(like.n_elements, dtype=torch.float32 if kind == "f32" else torch.float16)
            plain = View(like, memory, (1, k, 64 * k, 64 * k * N_EXPERT))
            weight = plain if kind in _PLAIN.values() else Packed.empty(kind, 64 * N_EXPERT, k, "cpu")
            x = Activations(
                torch.zeros(pairs.count // USED, k, dtype=memory.dtype), None if kind == "f32" else torch.zeros(1)
            )
            out, bias = torch.zeros(pairs.count, 64), torch.zeros(N_EXPERT, 64)
            yield f"expert_gemm row {i} {kind} {k}", expert_gemm(target, weight, N_EXPERT, x, pairs, out, bias)


def _hopper() -> Iterator[tuple[str, Launch]]:
    """wgmma.py: types of every kind in the largest tiles; the smaller ones; rows that are not whole steps, a gate."""
    target, none = target_of("sm_90"), torch.zeros(4096, dtype=torch.int32)
    pairs = Pairs(N_EXPERT, USED, none, none)

    def case(kind: str, k: int, config: hopper.TileConfig, act: str = "") -> tuple[str, Launch]:
        given = hopper.Matrices(Packed.empty(kind, 64 * N_EXPERT, k, "cpu"), torch.zeros(N_EXPERT, 64))
        row = -(-k // 128) * 128
        x = Activations(torch.zeros(pairs.count, row, dtype=torch.float16), torch.zeros(pairs.count), True)
        found = hopper.fitted(config, kind, target.shared_memory)
        gate = Gate(act, 1.702, 7.0) if act else None
        out, tiles = torch.zeros(pairs.count, 64), torch.zeros(64, 4, dtype=torch.int32)
        launch = hopper.launch(target, [given] * (2 if act else 1), x, pairs, tiles, k, out, found, gate)
        return f"expert_wgmma {kind} {k} {config.tokens} {act}", launch

    *small, (_, large) = hopper._CONFIGS
    for kind in ("q4_1", "q8_0", "q5_K", "q6_K", "iq4_xs", "nvfp4"):
        yield case(kind, 2048, large)
    for kind, act in (("mxfp4", "swiglu_oai"), ("q5_0", "")):
        yield case(kind, 2880, large, act)
    for _, config in small:
        yield case("q4_K", 2048, config, "swiglu")
        yield case("q8_0", 1408, config)


def aot_cases(arch: str) -> Iterator[Case]:
    """What to compile: a name, the kernel, its arguments by name, its options."""
    for name, launch in (*_launches(arch), *(_hopper() if arch == "sm_90" else ())):
        yield name, launch.kernel, launch.args, launch.options
