"""Attentions as a GPU that is not here would run them: their nodes, masks, and what is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import graphrt
from graphrt import new_input, ops, prepare
from graphrt.backends.triton import TritonBackend, device
from graphrt.backends.triton.kernels.flash_attn.chosen import Chosen
from graphrt.backends.triton.kernels.flash_attn.tile_plan import AttentionPlan, attention_plan
from graphrt.execute import Executable
from graphrt.tensor import Tensor
from graphrt.tools.explain.devices import DEVICES, KnownDevice


@dataclass(frozen=True)
class Shape:
    """An attention. d: of K and V; kind: of both; mask: (ne2, ne3), None for none; mla: V is the start of K's rows."""

    d: tuple[int, int] = (128, 128)
    n_q: int = 1
    n_kv: int = 4096
    heads: tuple[int, int] = (32, 8)
    kind: str = "f16"
    mask: tuple[int, int] | None = (1, 1)
    mla: bool = False
    n_seq: int = 1

    def node(self) -> Tensor:
        """Over inputs q, k, v and mask."""
        (d_k, d_v), (h, h_kv) = self.d, self.heads
        q = new_input("f32", d_k, self.n_q, h, self.n_seq, name="q")
        k = new_input(self.kind, d_k, self.n_kv, h_kv, self.n_seq, name="k")
        v = ops.view(k, (d_v, self.n_kv, h_kv, self.n_seq), k.nb[1:]) if self.mla else None
        v = v or new_input(self.kind, d_v, self.n_kv, h_kv, self.n_seq, name="v")
        mask = new_input("f16", self.n_kv, self.n_q, *self.mask, name="mask") if self.mask else None
        return ops.flash_attn_ext(q, k, v, mask, 0.125, name="attention")


def prepared(node: Tensor, backend: TritonBackend) -> Executable:
    return prepare(graphrt.Graph(node), [backend])


def chosen_on(shape: Shape, on: str | KnownDevice, **options: Any) -> Chosen:
    """What a device that is not here would run."""
    target = device.Target.elsewhere((DEVICES[on] if isinstance(on, str) else on).elsewhere)
    exe = prepared(shape.node(), TritonBackend(exact=False, target=target, **options))
    found = exe.splits[0].run.segments[0].chosen  # type: ignore[attr-defined]
    assert isinstance(found, Chosen)
    return found


def causal(n_q: int, n_kv: int, held: int) -> np.ndarray:
    """f16 [1, 1, n_q, n_kv]: queries at positions held.. see the cells up to their own."""
    seen = np.arange(n_kv)[None] <= held + np.arange(n_q)[:, None]
    return np.where(seen, 0, -np.inf).astype(np.float16)[None, None]


RUNS = {
    "causal": (Shape((64, 64), 40, 200, (4, 2)), causal(40, 200, 100)),
    "a mask a head": (Shape((64, 64), 20, 130, (4, 2), mask=(4, 1)), None),
    "a mask a sequence": (Shape((64, 64), 20, 130, (4, 4), mask=(1, 2), n_seq=4), None),
    "a mask a head and sequence": (Shape((64, 64), 20, 130, (4, 4), mask=(4, 2), n_seq=4), None),
    "decode": (Shape((64, 64), 1, 500, (4, 2)), causal(1, 500, 300)),
}


def random_mask(shape: Shape) -> np.ndarray:
    """Blocks of 32 keys hidden, plain or in parts, by head, sequence and query."""
    assert shape.mask is not None
    rng = np.random.default_rng(7)
    n2, n3 = shape.mask
    kinds = rng.integers(0, 3, (n3, n2, 1, -(-shape.n_kv // 32)))
    values = np.choose(kinds, [-np.inf, 0.0, 0.5]).repeat(32, 3)[..., : shape.n_kv]
    return np.broadcast_to(values, (n3, n2, shape.n_q, shape.n_kv)).astype(np.float16)


def ran(case: str) -> tuple[np.ndarray, dict[str, Any], AttentionPlan]:
    """One of RUNS in Triton's interpreter, by stream-K: its mask, its kernel's arguments after the run, its plan."""
    shape, given = RUNS[case]
    mask = random_mask(shape) if given is None else given
    exe = prepared(shape.node(), TritonBackend(exact=False, schedule="stream_k"))
    rng = np.random.default_rng(1)
    for leaf in exe.graph.leafs:
        exe.write(leaf, mask if leaf.name == "mask" else rng.standard_normal(leaf.shape).astype(np.float16))
    exe.run()
    segment = exe.splits[0].run.segments[0]  # type: ignore[attr-defined]
    args = next(s.args for s in segment.steps if s.name == "flash_attn")
    return mask, args, attention_plan(segment.chosen, device.INTERPRETER.sm_count, mask)
