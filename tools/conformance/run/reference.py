"""What a case's result must be: float64 from the CPU backend's reference functions, and the low-precision one."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from graphrt.backends.cpu import evaluate
from graphrt.backends.cpu.blocks import decode, encode
from graphrt.backends.cpu.memory import strided
from graphrt.graph import Graph
from graphrt.host import host_type
from graphrt.judge import Verdict, judge, judge_equal, judge_order, judge_written
from graphrt.judge_bias import why_cut
from graphrt.op import op_spec
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, dequantize
from graphrt.tools.conformance.run.lowprec import lows

Array = npt.NDArray[np.generic]
#: Ops whose results have one right set of bits.
_EXACT = ("CONT", "DUP", "CONCAT", "REPEAT", "ALL_GATHER", "SEND", "RECV", "GET_ROWS", "KQ_MASK")
_ORDERS = ("ARGMAX", "ARGSORT", "TOP_K")


def computing_nodes(graph: Graph) -> list[Tensor]:
    """The nodes that a backend runs: all but views."""
    return [node for node in graph.nodes if not op_spec(node.op).is_view]


def is_exact(node: Tensor) -> bool:
    """The result has one right set of bits: it is moved, not computed, or written in a type that says how to round."""
    moves = node.op in _EXACT and not any(s.dtype.is_quantized for s in node.sources())
    return moves or op_spec(node.op).writes is not None


def as_stored(t: Tensor, memory: npt.NDArray[np.uint8], offset: int = 0) -> Array:
    """A copy of the elements of `t` as they lie in memory, in torch's shape; quantized rows as bytes."""
    raw = raw_bytes(strided(torch.from_numpy(memory), offset, t))
    return raw.view(host_type(t.dtype)).reshape(*t.shape[:3], -1)


def raw_bytes(values: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor's elements in order: uint8, one dimension."""
    copy = values.clone(memory_format=torch.contiguous_format)  # contiguous() keeps odd strides of single elements
    raw: npt.NDArray[np.uint8] = copy.view(torch.uint8).reshape(-1).numpy()
    return raw


@dataclass
class Known:
    """expected: what the node must hold, as numbers. stored: the same as stored, where bytes decide. low: the
    low-precision results, [draws, *shape], None where nothing is rounded. values: what indices point into, for an op
    that orders. rounded: what low rounds activations to, None: to what the node's types suggest."""

    expected: Array
    stored: Array | None = None
    low: Array | None = None
    values: Array | None = None
    rounded: str | None = None

    def judge(self, node: Tensor, actual: Array) -> Verdict:
        """Judges a result, given as stored."""
        if self.values is not None:
            return judge_order(node, actual, self.expected, np.asarray(self.values, np.float64))
        if self.stored is not None:
            return (judge_written if node.dtype.is_quantized else judge_equal)(node, actual, self.stored)
        low_result = self.low if self.low is not None else np.nan
        numbers = dequantize(actual, node.dtype)
        verdict = judge(node, numbers, self.expected, low_result, self.rounded)
        if verdict.ok and os.environ.get("TRITON_INTERPRET") != "1":  # which cuts bf16 off, whatever the kernel
            cut = why_cut(node.dtype, np.asarray(numbers, np.float64), np.asarray(self.expected, np.float64))
            return replace(verdict, ok=not cut, message=cut)
        return verdict


def know(inputs: Inputs, rounded: str | None = None) -> Known:
    """Computes what the result must be. rounded: what the backend rounds activations to on purpose."""
    node = inputs.result
    memory = {t: np.ascontiguousarray(v).reshape(-1).view(np.uint8) for t, v in inputs.values.items()}
    written_roots = {n.root for n in inputs.graph().nodes if op_spec(n.op).writes is not None}
    memory.update({t: memory[t].copy() for t in written_roots if t in memory})
    for inner in computing_nodes(inputs.graph()):
        sources = [_source(s, memory) for s in inner.src]
        result = evaluate(inner, sources)
        if inner.root is not node and op_spec(inner.op).writes is None:
            memory[inner.root] = raw_bytes(encode(result, inner.dtype))
    if node.is_leaf or op_spec(node.op).is_view:
        raise AssertionError(f"a case ends in an op that computes, {inputs.case} ends in {node.op}")
    if op_spec(node.op).writes is not None:
        written = as_stored(node, memory[node.root], node.view_offs)
        return Known(dequantize(written, node.dtype), written)
    expected = result.numpy()
    if node.op in _ORDERS:
        values = sources[0]
        assert values is not None
        return Known(expected, values=values.to(torch.float64).contiguous().numpy())
    if node.dtype.kind == "int":
        return Known(expected, expected.astype(host_type(node.dtype)))
    if is_exact(node):
        stored = raw_bytes(encode(result, node.dtype)).view(host_type(node.dtype))
        return Known(expected, stored.reshape(node.shape))
    decoded = [None if s is None or t is None else decode(s, t.dtype, torch.float32) for s, t in zip(sources, node.src)]
    return Known(expected, low=lows(node, decoded, rounded).numpy(), rounded=rounded)


def _source(t: Tensor | None, memory: dict[Tensor, npt.NDArray[np.uint8]]) -> torch.Tensor | None:
    return None if t is None else strided(torch.from_numpy(memory[t.root]), t.view_offs, t)


class Memory:
    """Keeps what is known of the latest cases, for whoever runs one case on many backends."""

    def __init__(self, most_bytes: int = 256 * 2**20) -> None:
        self.most_bytes = most_bytes
        self._kept: dict[tuple[str, int, str | None], tuple[Case, Known]] = {}
        self._bytes = 0

    def know(self, case: Case, inputs: Inputs, rounded: str | None = None) -> Known:
        key = (str(case), inputs.seed, rounded)
        kept = self._kept.get(key)
        if kept is not None and kept[0] is case:
            return kept[1]
        known = know(inputs, rounded)
        size = sum(a.nbytes for a in vars(known).values() if isinstance(a, np.ndarray))
        if self._bytes + size > self.most_bytes:
            self._kept.clear()
            self._bytes = 0
        self._kept[key] = (case, known)
        self._bytes += size
        return known
