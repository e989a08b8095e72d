"""How heads and columns are shared out over ranks: as evenly as blocks of quantized types allow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from graphrt.errors import ArchError
from graphrt.models.gguf import TensorInfo
from graphrt.models.hparams import HParams
from graphrt.models.ranks.share import Span


@dataclass(frozen=True)
class LayerSpans:
    """What each rank has of a layer: heads of q, heads of k and v, columns of the feed-forward."""

    heads: tuple[Span, ...]
    kv: tuple[Span, ...]
    columns: tuple[Span, ...]


def width(span: Span) -> int:
    return span[1] - span[0]


def block_of(tensors: list[TensorInfo]) -> int:
    return math.lcm(*(t.dtype.block_size for t in tensors), 1)


def shared_out(what: str, n: int, ranks: int, step: int) -> tuple[Span, ...]:
    """n things in order over the ranks, as evenly as cuts at multiples of `step` allow. Raises ArchError where a rank
    would have none."""
    pieces = n // step
    if pieces < ranks:
        blocks = f" in blocks of {step}, which a quantized type keeps whole" if step > 1 else ""
        raise ArchError(
            f"each of {ranks} ranks must have a part of {what}, there are {n}{blocks}: that is enough for {pieces} "
            f"ranks; use at most so many"
        )
    edges = [pieces * rank // ranks * step for rank in range(ranks)] + [n]
    return tuple(zip(edges, edges[1:]))


def layer_spans(hp: HParams, tensors: Mapping[str, TensorInfo], il: int, ranks: int) -> LayerSpans:
    """What each rank has of a layer."""
    out, down = (tensors.get(f"blk.{il}.{name}.weight") for name in ("attn_output", "ffn_down"))
    n_head, n_kv = hp.n_head[il], hp.n_head_kv[il]
    step = 1
    if out is not None:
        block = out.dtype.block_size
        step = block // math.gcd(block, max(1, out.ne[0] // n_head))
    heads, kv = heads_of(il, n_head, n_kv, ranks, step)
    columns = ((0, hp.n_ff[il]),) * ranks
    if down is not None:
        columns = shared_out(f"the feed-forward's columns in layer {il}", hp.n_ff[il], ranks, block_of([down]))
    return LayerSpans(heads, kv, columns)


def heads_of(il: int, n_head: int, n_kv: int, ranks: int, step: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Heads of q and those of k and v that they read: whole groups where there are enough, else several ranks share a
    head of k and v, and each has a copy. step: heads of q that the type of attn_output keeps together."""
    _check_heads(il, n_head, n_kv, ranks, step)
    group = n_head // n_kv
    if n_kv >= ranks:
        kv = shared_out(f"the heads of k and v in layer {il}", n_kv, ranks, step // math.gcd(step, group))
        return tuple((first * group, stop * group) for first, stop in kv), kv
    each = ranks // n_kv
    inside = shared_out(f"the {group} heads of q that read one head of k in layer {il}", group, each, step)
    heads = tuple((g * group + a, g * group + b) for g in range(n_kv) for a, b in inside)
    return heads, tuple((rank // each, rank // each + 1) for rank in range(ranks))


def _check_heads(il: int, n_head: int, n_kv: int, ranks: int, step: int) -> None:
    """Raises ArchError, with the nearest numbers of ranks that a layer's heads do for."""
    if _shares_heads(n_head, n_kv, ranks, step):
        return
    fewer = max((n for n in range(1, ranks) if _shares_heads(n_head, n_kv, n, step)), default=1)
    more = next((n for n in range(ranks + 1, n_head + 1) if _shares_heads(n_head, n_kv, n, step)), None)
    kept = f", {step} of which the type of attn_output keeps together" if step > 1 else ""
    use = " or ".join(str(n) for n in (fewer, more) if n is not None)
    raise ArchError(
        f"each of {ranks} ranks must have heads of attention, and as many others as share a head of k and v: layer "
        f"{il} has {n_head} heads of q{kept}, and {n_kv} of k and v; use {use}"
    )


def _shares_heads(n_head: int, n_kv: int, ranks: int, step: int) -> bool:
    """Whether each rank has whole groups of heads, or as many ranks as others an equal number of a group's."""
    group = n_head // n_kv
    if n_kv >= ranks:
        return n_kv // (step // math.gcd(step, group)) >= ranks
    whole = n_kv == 1 or group % step == 0  # else another group's heads would be needed
    return ranks % n_kv == 0 and group // step >= ranks // n_kv and whole
