"""SEND, RECV: over torch's process group, or within a graph that plays both ranks."""

from __future__ import annotations

import torch

from graphrt.backends.cpu.memory import torch_type
from graphrt.backends.cpu.reference import reference
from graphrt.ops.send_recv import on_link
from graphrt.ranks import current
from graphrt.tensor import Tensor

T = torch.Tensor


@reference("SEND")
def send(node: Tensor, a: T) -> T:
    """What crosses the link is of the node's type, however wide the reference computes."""
    if on_link(node):
        current().give(a.to(torch_type(node.dtype)), node.params.other)
    return a


@reference("RECV", stored=("after",))
def recv(node: Tensor, after: T, sent: T | None = None) -> T:
    if sent is not None:
        return sent
    return current().take(torch.empty(node.shape, dtype=torch_type(node.dtype)), node.params.other)
