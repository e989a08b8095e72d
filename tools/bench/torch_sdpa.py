"""torch's scaled_dot_product_attention beside us, in the same process and run: by cuDNN and by its own flash kernel.

It takes q in f16, where ours is f32 as in ggml. It is captured in a CUDA graph, over as many caches as our graph has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphrt.tools.bench.op_shapes import Shape
from graphrt.tools.bench.timing import Clock, Run, Times

KINDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
DEVICE = "cuda"
_TRIAL_RUNS = 5

T = torch.Tensor


class Peer:
    """One peer ready to run. form: how it was given the heads that share keys."""

    def __init__(self, run: Run, form: str) -> None:
        self.run = run
        self.form = form
        self.taken: Times | None = None

    def measure(self, clock: Clock, n: int) -> None:
        """`n` runs more."""
        times = clock.times(self.run, n, lambda: None)
        self.taken = times if self.taken is None else self.taken + times


@dataclass(frozen=True)
class Form:
    """A way to tell SDPA about heads that share keys. q, k, v: [1, heads, queries or keys, d]."""

    name: str
    grouped: bool
    prepare: Callable[[Shape, T], T] = lambda s, t: t


def _as_rows(s: Shape, t: T) -> T:
    """One query's heads that share keys as several queries of one head: the same sums where nothing is masked.

    k and v come out as they are."""
    return t.reshape(1, s.n_head_kv, -1, t.shape[-1])


def _expanded(s: Shape, t: T) -> T:
    """k and v with each head copied for the heads of q that share it; q comes out as it is."""
    return t.repeat_interleave(s.n_head // t.shape[1], 1)


def forms(s: Shape) -> list[Form]:
    """The forms worth a trial. Keys are never copied for decode, whose time is that of reading them."""
    if s.n_head == s.n_head_kv:
        return [Form("plain", False)]
    ungrouped = Form("heads as queries", False, _as_rows) if s.n_q == 1 else Form("keys repeated", False, _expanded)
    return [Form("enable_gqa", True), ungrouped]


def why_not(s: Shape) -> str | None:
    """Why SDPA can't be a peer of a shape, None where it may."""
    if s.kv_type != "f16":
        return f"it knows no {s.kv_type} keys"
    wanted = {
        "keys in panels": s.panels,
        "score function": s.score not in ("", "identity"),
        "softcap": s.softcap > 0,
        "ALiBi": s.max_bias > 0,
        "sinks": s.sinks,
    }
    missing = [name for name, is_wanted in wanted.items() if is_wanted]
    return f"it has no {' or '.join(missing)}" if missing else None


def sdpa_peers(s: Shape, n_nodes: int, clock: Clock) -> dict[str, Peer | str]:
    """Each peer warmed up and in its fastest form, or the reason why it can't run. Needs a CUDA device."""
    reason = why_not(s)
    if reason is not None:
        return dict.fromkeys(KINDS, reason)
    return {name: _fastest(s, n_nodes, kind, clock) for name, kind in KINDS.items()}


def _fastest(s: Shape, n_nodes: int, kind: SDPBackend, clock: Clock) -> Peer | str:
    best: Peer | None = None
    reason = ""
    for form in forms(s):
        try:
            peer = Peer(captured(_work(s, n_nodes, kind, form)), form.name)
            peer.measure(clock, _TRIAL_RUNS)
        except RuntimeError as error:  # so torch says that a kernel does not take the arguments, or lack of memory
            reason = reason or str(error).partition("\n")[0][:120]
            continue
        if best is None or _median(peer) < _median(best):
            best = peer
    if best is None:
        return reason
    best.taken = None
    return best


def _median(peer: Peer) -> float:
    assert peer.taken is not None
    return peer.taken.median


def _work(s: Shape, n_nodes: int, kind: SDPBackend, form: Form) -> Run:
    """What runs every node's attention once, on values of its own."""
    nodes = [[form.prepare(s, t) for t in random(s)] for _ in range(n_nodes)]
    mask = _mask(s)

    def work() -> None:
        with warnings.catch_warnings(), sdpa_kernel([kind]):
            warnings.simplefilter("ignore")  # it warns of each kernel that it was not to use
            for q, k, v in nodes:
                attend(s, form, q, k, v, mask)

    return work


def attend(s: Shape, form: Form, q: T, k: T, v: T, mask: T | None) -> T:
    """One attention of a shape: [1, heads, queries, d_v], in the heads and queries of the form."""
    is_causal = _is_square_causal(s)
    return F.scaled_dot_product_attention(
        q, k, v, mask, s.dropout_p, is_causal, scale=s.scale, enable_gqa=form.grouped
    )  # fmt: skip


def random(s: Shape) -> list[T]:
    """q, k and v as [1, heads, queries or keys, d]."""

    def normal(heads: int, rows: int, d: int) -> T:
        return torch.randn(1, heads, rows, d, device=DEVICE).half()

    q, k = normal(s.n_head, s.n_q, s.d), normal(s.n_head_kv, s.n_kv, s.d)
    return [q, k, k[..., : s.d_v] if s.v_in_k else normal(s.n_head_kv, s.n_kv, s.d_v)]


def _is_square_causal(s: Shape) -> bool:
    """Elsewhere torch's is_causal would let the first query see the first key alone, where ours sees many."""
    return s.mask == "causal" and s.n_q == s.n_kv


def _mask(s: Shape) -> T | None:
    """[1, 1, n_q, n_kv] f16, random or causal from the end; None where is_causal or nothing does."""
    if s.mask in ("none", "visible") or _is_square_causal(s):
        return None
    mask = torch.randn(1, 1, s.n_q, s.n_kv, device=DEVICE).half()
    if s.mask == "dense":
        return mask
    hidden = torch.ones(s.n_q, s.n_kv, device=DEVICE, dtype=torch.bool).triu(1 + s.n_kv - s.n_q)
    return torch.zeros_like(mask).masked_fill_(hidden, float("-inf"))


def captured(work: Run) -> Run:
    """A replay of `work`, which runs three times before it is captured. Raises RuntimeError where it can't run."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay(keep: Run = work) -> None:  # what it reads lives as long as the replay
        graph.replay()

    return replay
