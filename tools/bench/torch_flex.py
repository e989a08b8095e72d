"""torch's FlexAttention beside us, for shapes that bend their scores: compiled by torch, captured as SDPA is.

It takes q in f16, where ours is f32 as in ggml. A causal mask is a block mask, so that it skips what is hidden too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from graphrt.ops.soft_max import alibi_slopes
from graphrt.tools.bench import torch_sdpa
from graphrt.tools.bench.op_shapes import CAP, Shape
from graphrt.tools.bench.timing import Clock, Run
from graphrt.tools.bench.torch_sdpa import Peer

T = torch.Tensor
Bend = Callable[[T, T, T, T, T], T]


def why_not(s: Shape) -> str | None:
    """Why it is no peer of a shape, None where it is one."""
    if not s.score and not s.softcap:
        return "its scores are not bent"
    if s.kv_type != "f16" or s.v_in_k or s.sinks or s.mask not in ("none", "visible", "causal"):
        return f"it is given f16 keys and causal masks here, not {s.name}"
    return None


def flex_peers(s: Shape, n_nodes: int, clock: Clock) -> dict[str, Peer | str]:
    """The peer warmed up, or the reason why it can't run; nothing for shapes that it is no peer of."""
    if why_not(s) is not None:
        return {}
    try:
        return {"flex": Peer(torch_sdpa.captured(_work(s, n_nodes, clock)), "compiled")}
    except Exception as error:  # a compiler's or a driver's: torch may raise anything
        return {"flex": str(error).strip().partition("\n")[0][:120] or type(error).__name__}


def _work(s: Shape, n_nodes: int, clock: Clock) -> Run:
    nodes = [torch_sdpa.random(s) for _ in range(n_nodes)]
    attend: Any = torch.compile(flex_attention, dynamic=False)
    given = arguments(s, torch_sdpa.DEVICE)

    def work() -> None:
        with torch.no_grad():
            for q, k, v in nodes:
                attend(q, k, v, **given)

    return work


def arguments(s: Shape, device: str) -> dict[str, Any]:
    """What flex_attention() is given beside q, k and v."""
    behind = s.n_kv - s.n_q
    block_mask = None
    if s.mask == "causal":
        block_mask = create_block_mask(
            lambda b, h, i, j: i + behind >= j, None, None, s.n_q, s.n_kv, device=device
        )  # fmt: skip
    slopes = torch.tensor(alibi_slopes(s.n_head, 8.0), device=device)
    bends: dict[str, Bend] = {
        "softcap": _softcap, "gate": lambda score, b, h, i, j: score * torch.sigmoid(score),
        "slopes": lambda score, b, h, i, j: score - slopes[h] * (i - j).abs(),
    }  # fmt: skip
    bend = bends.get("softcap" if s.softcap else s.score)
    return {"score_mod": bend, "block_mask": block_mask, "scale": s.scale, "enable_gqa": s.n_head != s.n_head_kv}


def _softcap(score: T, b: T, h: T, i: T, j: T) -> T:
    return CAP * torch.tanh(score / CAP)
