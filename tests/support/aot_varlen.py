"""Launches of attention over pages and packed keys, as the launcher makes them, to be compiled without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graphrt import ops
from graphrt.backend import Place, Usage
from graphrt.backends.triton.kernels.flash_attn.chosen import Chosen
from graphrt.backends.triton.kernels.flash_attn.fusions import Attention
from graphrt.backends.triton.kernels.flash_attn.launcher import Launcher
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.ops.cases.scores import SCORES
from graphrt.ops.view import view
from graphrt.tensor import Tensor
from support.aot_arch import target_of

Case = tuple[str, Any, dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """d: of K and V, one type for both; page: 0 for packed keys; n_tokens: of n_seq sequences; heads: of q and of k;
    groups: of sequences that share pages; score: a name of ops/cases/scores.py's SCORES; mask: "keys" or "new", what
    its columns are, "" for none."""

    d: tuple[int, int]
    page: int = 16
    kind: str = "f16"
    n_tokens: int = 8
    n_seq: int = 8
    heads: tuple[int, int] = (8, 2)
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    max_bias: float = 0.0
    groups: int = 0
    score: str = ""
    mask: str = ""


def attention(shape: Shape) -> Attention:
    """The two nodes of a shape; keys as a cache has them, V in K where it is as DeepSeek's."""
    (d_k, d_v), (n_head, n_head_kv), page, n_seq = shape.d, shape.heads, shape.page, shape.n_seq

    def cache(d: int) -> Tensor:
        whole = Tensor(shape.kind, (d * n_head_kv, max(page, 1) * 40))
        row, head = whole.nb[1], whole.nb[1] // n_head_kv
        if page:
            return view(whole, (d, page, n_head_kv, 40), (row, head, page * row))
        return view(whole, (d, 40, n_head_kv), (row, head))

    q, k, starts = Tensor("f32", (d_k, shape.n_tokens, n_head)), cache(d_k), Tensor("i32", (n_seq + 1,))
    v = view(k, (d_v, *k.ne[1:]), k.nb[1:]) if d_k == 576 else cache(d_v)
    given: dict[str, Any] = {"window": shape.window, "softcap": shape.softcap, "max_bias": shape.max_bias}
    if page:
        given |= {"lengths": Tensor("i32", (n_seq,)), "block_table": Tensor("i32", (256, n_seq))}
        given |= {"prefixes": Tensor("i32", (3, shape.groups))} if shape.groups else {}
    else:
        given |= {"k_starts": Tensor("i32", (n_seq + 1,))}
    given["causal"] = shape.causal
    given["score"] = SCORES[shape.score](n_head, 300) if shape.score else None
    if shape.mask:
        given |= {"mask": Tensor("f16", (300, shape.n_tokens, n_head)), "mask_new": shape.mask == "new"}
    out = ops.flash_attn_varlen(q, k, v, starts, 0.1, **given)
    return Attention(out, ops.flash_attn_varlen_lse(q, k, starts, 0.1, **given))


def chosen(arch: str, shape: Shape) -> Chosen:
    """What the launcher decides for a shape."""
    return _launched(arch, shape)[1]


def launches(arch: str, shape: Shape) -> list[Launch]:
    """What the launcher makes of a shape, over memory of zeros."""
    return _launched(arch, shape)[0]


def _launched(arch: str, shape: Shape) -> tuple[list[Launch], Chosen]:
    places: dict[Tensor, TritonBuffer] = {}

    def place(t: Tensor) -> Place:
        if t.root not in places:
            places[t.root] = TritonBuffer(torch.zeros(t.root.nbytes, dtype=torch.uint8), Usage.COMPUTE)
        return places[t.root], t.view_offs

    launcher, nodes = Launcher(target_of(arch), place), attention(shape)
    steps = [step for step in launcher.launches(nodes) if isinstance(step, Launch)]
    return steps, launcher.chosen[nodes.nodes[0]]


#: Steps of single tokens and prompts, pages smaller and larger than k-blocks, all kinds of types.
SHAPES = (
    Shape((128, 128)), Shape((128, 128), 256), Shape((128, 128), 32, "q8_0"), Shape((64, 64), 64, "q4_0"),
    Shape((128, 128), 16, "q8_0"),
    Shape((128, 128), 16, n_tokens=512), Shape((64, 64), 0, n_tokens=512, causal=False, heads=(4, 4)),
    Shape((128, 128), 64, "q8_0", n_tokens=512), Shape((256, 256), 32, n_tokens=256, window=1024, softcap=30.0),
    Shape((256, 256), 128, window=512), Shape((576, 512), 64, heads=(16, 1)),
    Shape((576, 512), 64, "f16", 64, 2, (16, 1)),
    Shape((128, 128), 32, "f32"), Shape((64, 64), 16, "bf16", max_bias=8.0), Shape((40, 40), 16, n_tokens=300),
    Shape((128, 128), 0, "q4_0", n_tokens=200), Shape((128, 128), 16, groups=2),
    Shape((128, 128), 16, "bf16", n_tokens=300, groups=1), Shape((576, 512), 16, heads=(64, 1)),
    Shape((64, 64), 128, n_tokens=500, max_bias=8.0, softcap=10.0), Shape((256, 256), 64, n_tokens=256),
    Shape((128, 128), 64, n_tokens=64, n_seq=64, heads=(32, 8)), Shape((128, 128), 16, "f8_e4m3"),
    Shape((128, 128), 64, "f8_e4m3", n_tokens=512), Shape((128, 128), 16, n_tokens=512, score="relative"),
    Shape((128, 128), 64, n_tokens=8, score="branches"), Shape((128, 128), 16, n_tokens=64, mask="new"),
    Shape((128, 128), 64, n_tokens=512, causal=False, mask="keys"), Shape((64, 64), 16, "q8_0", mask="keys"),
    Shape((576, 512), 64, n_tokens=32, heads=(16, 1), mask="new"),
)  # fmt: skip


def aot_cases(arch: str) -> Iterator[Case]:
    """A name, a kernel, its arguments by name (tensors for pointers) and the options of its launch."""
    for shape in SHAPES:
        for launch in launches(arch, shape):
            yield f"varlen {shape}: {launch.kernel.fn.__name__}", launch.kernel, launch.args, launch.options
