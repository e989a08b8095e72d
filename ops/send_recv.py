"""SEND, RECV: what one rank gives another, as one stage of a pipeline hands its result to the next.

A node stands in one of two forms, as a collective does. In a rank's own graph SEND gives its source to another rank
over the link, and RECV has what comes from there. In a graph that plays all ranks (linked.py) a RECV has the other
rank's SEND as a source, and nothing crosses a link. What two ranks tell each other comes in the order in which it was
sent, so the nodes of a graph that send and receive must be in one chain: RECV names what comes before it, and SEND
yields its source, for those that come after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.dtypes import DType, dtype
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Work, build, moved_bytes, register, require
from graphrt.ops.collectives import COLLECTIVES, is_played, sent_bytes
from graphrt.tensor import Tensor, full_dims


@dataclass(frozen=True)
class SendParams:
    """rank: whose node this is, from 0; other: the rank that gets it; played: all ranks are in this graph."""

    rank: int
    other: int
    played: bool = False


@dataclass(frozen=True)
class RecvParams:
    """rank: whose node this is, from 0; other: the rank that it comes from; type, ne: what comes."""

    rank: int
    other: int
    type: str
    ne: tuple[int, ...]


def _ends(op: str, params: SendParams | RecvParams) -> None:
    fits = params.rank >= 0 and params.other >= 0 and params.rank != params.other
    require(fits, op, f"rank and other must be two ranks, from 0, got {params.rank} and {params.other}")


def _plain(kind: DType) -> bool:
    return not (kind.is_quantized or kind.is_float8)


def _infer_send(params: SendParams, a: Tensor) -> Result:
    _ends("SEND", params)
    require(_plain(a.dtype), "SEND", "what is sent must be of a plain type", a)
    return Result(a.dtype, a.ne)


def _infer_recv(params: RecvParams, after: Tensor, sent: Tensor | None) -> Result:
    _ends("RECV", params)
    kind = dtype(params.type)
    require(_plain(kind), "RECV", f"what comes must be of a plain type, got {params.type}")
    sane = 1 <= len(params.ne) <= 4 and min(params.ne) >= 1
    require(sane, "RECV", f"ne must be 1 to 4 numbers of at least 1, got {params.ne}")
    same = sent is None or (sent.dtype == kind and sent.ne == full_dims(params.ne))
    require(same, "RECV", f"what was sent must be {params.type} of the shape {list(params.ne)}", sent)
    return Result(kind, params.ne)


def on_link(node: Tensor) -> bool:
    """Something crosses a link when the node runs: it is a rank's own, and others must do their part."""
    if node.op == "SEND":
        return not node.params.played
    if node.op == "RECV":
        return node["sent"] is None
    return node.op in COLLECTIVES and not is_played(node)


def link_bytes(node: Tensor) -> int:
    """Bytes that a rank hands to the link, or takes from it, whichever are more, of a node of its own graph."""
    return sent_bytes(node) if node.op in COLLECTIVES else node.data_nbytes


def _work(node: Tensor) -> Work:
    """Bytes on the link in a rank's own graph, in memory where all ranks are played."""
    return Work(0, link_bytes(node) if on_link(node) else _moved(node))


def _moved(node: Tensor) -> int:
    if node.op == "SEND":
        return moved_bytes(node)
    sent = node["sent"]
    return node.data_nbytes + (0 if sent is None else sent.data_nbytes)  # `after` is not read


SEND = register(OpSpec("SEND", _infer_send, _work, params=SendParams, inplace=("a",)))
RECV = register(OpSpec("RECV", _infer_recv, _work, ("after", "sent?"), params=RecvParams))

#: All ops whose nodes need other ranks.
LINKED = (*COLLECTIVES, "SEND", "RECV")


@checked(GraphError)
def send(a: Tensor, *, rank: int, other: int, played: bool = False, name: str = "") -> Tensor:
    """Gives a to another rank, which has a recv() of it.

    No formula: the result is a itself, of its type and shape, for what comes after it. a: any plain type and shape;
    rank: whose node this is, from 0; other: the rank that gets it; played: the other rank's node is in this graph, so
    that nothing crosses a link. Source: MPI_Send. Raises GraphError for other types and numbers.
    """
    return build(SEND, a, params=SendParams(rank, other, played), name=name)


@checked(GraphError)
def recv(
    after: Tensor, sent: Tensor | None = None, *, rank: int, other: int, type: str, ne: Sequence[int], name: str = ""
) -> Tensor:
    """What another rank gives this one by send().

    No formula: no value changes. after: any tensor, which this node waits for and does not read: what this rank sends
    or receives before; sent: the other rank's send(), where both are played in one graph; rank: whose node this is,
    from 0; other: the rank that it comes from; type, ne: the result's, a plain one as f32. Source: MPI_Recv. Raises
    GraphError for other types, shapes and numbers.
    """
    sources = (after,) if sent is None else (after, sent)
    return build(RECV, *sources, params=RecvParams(rank, other, type, tuple(ne)), name=name)
