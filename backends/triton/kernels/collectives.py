"""ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECV: what ranks give each other, on GPUs.

A rank's own node moves bytes over NCCL, queued on the GPU as kernels are, and captured with them; played ranks' parts
are copied. Either way all parts then lie side by side in their order, and one kernel adds them up in that order: the
bits are those of played ranks, on every rank, run after run, whatever order a library would add in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl

from graphrt.backends.triton.accesses import Call, accesses
from graphrt.backends.triton.context import Context, Step
from graphrt.backends.triton.kernels.common.pdl import take_turn
from graphrt.backends.triton.kernels.joined import join_launch, shots
from graphrt.backends.triton.kernels.joined_fusions import why_apart, why_not_by_peers
from graphrt.backends.triton.launch import Launch, launch_options
from graphrt.ops.collectives import is_played
from graphrt.ops.send_recv import on_link
from graphrt.peers import Peers
from graphrt.program import Choice
from graphrt.ranks import ONE_SHOT, current, peers
from graphrt.tensor import Tensor

#: Elements that one program adds up.
_SIZE = 1024


@accesses(reads="p_parts", writes="p_out")
@triton.jit
def sum_ranks(p_parts, p_out, n, RANKS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr):
    """Program i adds up SIZE elements of all ranks, the first two ranks' first.

    parts: [RANKS, n] of a float type; out: [n] of the same; sums are of f32, with WIDE of f64, and rounded once.
    """
    take_turn(PDL)
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total = tl.load(p_parts + i, mask=i < n, other=0.0).to(kind)
    for rank in tl.static_range(1, RANKS):
        total += tl.load(p_parts + rank * n.to(tl.int64) + i, mask=i < n, other=0.0).to(kind)
    tl.store(p_out + i, total.to(p_out.dtype.element_ty), mask=i < n)


def _copy(source: torch.Tensor, target: torch.Tensor) -> Step:
    return Call("copy", partial(target.copy_, source), [source], [target], helper=True)


def _side_by_side(parts: torch.Tensor, own: torch.Tensor, ranks: int) -> None:
    current(ranks).into(parts, own)


def _swapped(pieces: torch.Tensor, own: torch.Tensor, ranks: int) -> None:
    current(ranks).swapped(pieces, own)


def _memory(ctx: Context, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Of the split's, which each step fills anew."""
    nbytes = math.prod(shape) * like.element_size()
    return ctx.shared_scratch(name, nbytes)[:nbytes].view(like.dtype).view(shape)


def _flat(t: torch.Tensor, ctx: Context) -> tuple[torch.Tensor, list[Step]]:
    """A tensor's elements side by side, and the step that lays them so where they are not."""
    if t.is_contiguous():
        return t.view(-1), []
    memory = _memory(ctx, "a rank's own part", tuple(t.shape), t)
    return memory.view(-1), [_copy(t, memory)]


def parts_side_by_side(sources: Sequence[torch.Tensor], ranks: int, ctx: Context) -> tuple[torch.Tensor, list[Step]]:
    """All ranks' elements, [ranks, n], and the steps that bring them there. sources: this rank's, or everyone's, of
    one shape."""
    first = sources[0]
    parts = _memory(ctx, "all ranks' parts", (ranks, first.numel()), first)
    if len(sources) > 1:
        return parts, [_copy(t, parts[i].view(t.shape)) for i, t in enumerate(sources)]
    own, steps = _flat(first, ctx)
    return parts, [*steps, Call("all_gather", partial(_side_by_side, parts, own, ranks), [own], [parts])]


def _sum(parts: torch.Tensor, out: torch.Tensor, ctx: Context) -> Step:
    """Adds up the rows of parts, [ranks, n], into out, [n]."""
    ranks, n = parts.shape
    args = {
        "p_parts": parts.view(-1), "p_out": out, "n": n, "RANKS": ranks, "SIZE": _SIZE,
        "WIDE": parts.dtype == torch.float64, "PDL": ctx.target.has_pdl,
    }  # fmt: skip
    return Launch(sum_ranks, (-(-n // _SIZE),), args, launch_options(ctx.target, 4))


def _views(node: Tensor, ctx: Context) -> list[torch.Tensor]:
    return [ctx.view(t).torch() for t in node.sources()]


def joined_choice(node: Tensor) -> Choice:
    """How an ALL_REDUCE is added up, and why so."""
    p, kb = node.params, -(-node.data_nbytes // 1024)
    alone, apart = why_not_by_peers(node), why_apart(node)
    if alone is None and apart is None:
        n = shots(p.ranks, node.data_nbytes)
        each = "every rank writes its part to all others" if n == 1 else "a row's owner adds up and writes the sum"
        reason = f"{kb} KB over {p.ranks} ranks whose GPUs share memory: {each}, in the launch that goes on with it"
        return Choice("join_rows, one shot" if n == 1 else "join_rows, two shots", [reason])
    refused = {"a launch that writes to other ranks": apart or alone or ""}
    if is_played(node):
        return Choice("parts side by side", [], refused)
    gathers = node.data_nbytes <= ONE_SHOT
    reason = f"{kb} KB: " + ("every rank has all parts" if gathers else "each rank adds up a piece")
    return Choice("all_gather (NCCL)" if gathers else "all_to_all and all_gather (NCCL)", [reason], refused)


def lower_all_reduce(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """ALL_REDUCE: one launch where GPUs share memory. Else, of up to 64 KB every rank has all parts; of more it adds up
    a piece, and pieces are handed on."""
    node = nodes[0]
    sources, ranks, out = _views(node, ctx), int(node.params.ranks), ctx.view(node).data
    ctx.choices[node] = joined_choice(node)
    shared = peers(ranks) if why_not_by_peers(node) is None and why_apart(node) is None else None
    if isinstance(shared, Peers):
        return [join_launch(ctx.target, sources[0].reshape(-1, node.ne[0]), ranks, shared, out.view(-1, node.ne[0]))]
    if is_played(node) or node.data_nbytes <= ONE_SHOT:
        parts, steps = parts_side_by_side(sources, ranks, ctx)
        return [*steps, _sum(parts, out, ctx)]
    own, steps = _flat(sources[0], ctx)
    n, each = own.numel(), -(-own.numel() // ranks)
    whole = out
    if n % ranks:
        padded, whole = (_memory(ctx, name, (ranks * each,), own) for name in ("padded part", "padded sum"))
        steps = [*steps, _copy(own, padded[:n])]
        own = padded
    pieces, mine = _memory(ctx, "all ranks' parts", (ranks, each), own), _memory(ctx, "a rank's piece", (each,), own)
    steps += [
        Call("all_to_all", partial(_swapped, pieces, own, ranks), [own], [pieces]),
        _sum(pieces, mine, ctx),
        Call("all_gather", partial(_side_by_side, whole.view(ranks, each), mine, ranks), [mine], [whole]),
    ]
    return [*steps, _copy(whole[:n], out)] if n % ranks else steps


def lower_all_gather(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """ALL_GATHER: parts of one size travel, those that are narrower with what happens to lie behind them."""
    node = nodes[0]
    sources, out, sizes = _views(node, ctx), ctx.view(node).torch(), node.params.sizes
    steps: list[Step] = []
    if not is_played(node):
        (own,), most = sources, max(sizes)
        shape = (*own.shape[:-1], most)
        if own.shape[-1] < most:
            padded = _memory(ctx, "padded part", shape, own)
            steps.append(_copy(own, padded[..., : own.shape[-1]]))
            own = padded
        parts, more = parts_side_by_side([own], len(sizes), ctx)
        steps += more
        sources = [part.view(shape)[..., :n] for part, n in zip(parts, sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [*steps, *(_copy(t, out.narrow(-1, start, n)) for t, start, n in zip(sources, starts, sizes))]


def lower_reduce_scatter(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """REDUCE_SCATTER: played, only what this rank is given is added up."""
    node = nodes[0]
    p, out = node.params, ctx.view(node)
    start, width = sum(p.sizes[: p.rank]), p.sizes[p.rank]
    sources = _views(node, ctx)
    if is_played(node):
        parts, steps = parts_side_by_side([t.narrow(-1, start, width) for t in sources], p.ranks, ctx)
        return [*steps, _sum(parts, out.data, ctx)]
    parts, steps = parts_side_by_side(sources, p.ranks, ctx)
    total = _memory(ctx, "padded sum", tuple(sources[0].shape), sources[0])
    return [*steps, _sum(parts, total.view(-1), ctx), _copy(total.narrow(-1, start, width), out.torch())]


def _given(own: torch.Tensor, other: int) -> None:
    current().give(own, other)


def _taken(into: torch.Tensor, other: int) -> None:
    current().take(into, other)


def lower_send(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    """SEND: queued, and its result is the source for those that come after it."""
    node, source = nodes[0], ctx.view(nodes[0]["a"])
    out = ctx.view(node)
    same = out.torch().data_ptr() == source.torch().data_ptr() and source.torch().is_contiguous()
    steps = [] if same else [_copy(source.torch(), out.torch())]
    if on_link(node):
        steps.append(Call("send", partial(_given, out.data, node.params.other), [out.data], [out.data]))
    return steps or [_copy(source.torch(), out.torch())]


def lower_recv(nodes: Sequence[Tensor], ctx: Context) -> list[Step]:
    node, out = nodes[0], ctx.view(nodes[0])
    sent = node["sent"]
    if sent is not None:
        return [_copy(ctx.view(sent).torch(), out.torch())]
    after = ctx.view(node["after"]).torch()
    return [Call("recv", partial(_taken, out.data, node.params.other), [after], [out.data])]


LOWERINGS: dict[str, Callable[[Sequence[Tensor], Context], list[Step]]] = {
    "ALL_REDUCE": lower_all_reduce, "ALL_GATHER": lower_all_gather, "REDUCE_SCATTER": lower_reduce_scatter,
    "SEND": lower_send, "RECV": lower_recv,
}  # fmt: skip
