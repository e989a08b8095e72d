"""What a saved case may ask for: a few hundred bytes can describe a graph of terabytes, or one that computes for days.

A case that `graphrt test --save` wrote holds its inputs and the expected result, so its size tells about what running
it takes.
"""

from __future__ import annotations

from collections.abc import Callable

from graphrt.errors import GraphError
from graphrt.graph import Graph
from graphrt.op import op_spec
from graphrt.ops.flash_attn_varlen import longest
from graphrt.tensor import Tensor

#: Files of up to so many bytes may all take the same: 354 MB, a second or two. Larger ones in proportion to their size.
SMALL_FILE = 2 * 2**20
#: Elements that are held at a time, those of the result counted three times: float64, what it is judged by, runs that
#: are compared. One takes up to 75 bytes.
ELEMENTS, ELEMENTS_PER_BYTE = 9 * 2**19, 16
#: Floating-point operations of one evaluation.
FLOPS, FLOPS_PER_BYTE = 2**30, 2000
#: Rounds of loops that the reference goes in Python, a quarter of a millisecond each.
ROUNDS, ROUNDS_PER_BYTE = 2048, 1 / 256


def check_budget(graph: Graph, file_bytes: int) -> None:
    """Raises GraphError when a graph asks for more than a file of that size may."""
    elements = sum(t.n_elements for t in graph.leafs)
    # A view counts where it has more elements than what it looks at: a reference copies it out.
    elements += sum(t.n_elements for t in graph.nodes if t.view_src is None or t.n_elements > t.root.n_elements)
    elements += 2 * sum(t.n_elements for t in graph.outputs) + sum(_most(_SCRATCH, t) for t in graph.nodes)
    asked = (
        ("elements", elements, ELEMENTS, ELEMENTS_PER_BYTE),
        ("floating-point operations", sum(op_spec(t.op).work(t).flops for t in graph.nodes), FLOPS, FLOPS_PER_BYTE),
        ("rounds of loops", sum(_most(_ROUNDS, t) for t in graph.nodes), ROUNDS, ROUNDS_PER_BYTE),
    )
    for what, needed, small, per_byte in asked:
        most = small if file_bytes <= SMALL_FILE else max(small, int(per_byte * file_bytes))
        if needed > most:
            raise GraphError(
                f"a saved case of {file_bytes} bytes may take {most} {what}, this one needs {needed}; run it "
                f"from where it was saved, with `graphrt test -o`"
            )


def _most(table: dict[str, Callable[[Tensor], int]], node: Tensor) -> int:
    return table[node.op](node) if node.op in table else 0


def _attention(node: Tensor) -> int:
    """Scores of all pairs, and k and v once for each head of q, which take no more than 16 bytes an element."""
    q, k = node["q"], node["k"]
    scores = q.n_rows * k.ne[1]
    return 2 * scores + q.ne[2] * q.ne[3] * k.ne[1] * (k.ne[0] + node.ne[0]) // 4


def _varlen(node: Tensor) -> int:
    """The same for sequences that may all be as long as the longest can be, each gathered by itself."""
    q, k = node["q"], node["k"]
    keys = longest(node)
    return 2 * q.n_rows * keys + (node["q_starts"].ne[0] + q.ne[2]) * keys * (k.ne[0] + node.ne[0])


def _repeated_weights(node: Tensor) -> int:
    """The weights once for each matrix of activations, where several share them."""
    weights = node["weights"]
    return weights.ne[0] * node.ne[0] * node.ne[2] * node.ne[3] if weights.ne[2:] != node.ne[2:] else 0


#: Elements that the reference, or the low-precision form beside it, makes beside a node's sources and result.
_SCRATCH: dict[str, Callable[[Tensor], int]] = {
    "MUL_MAT": _repeated_weights,
    "MUL_MAT_ID": lambda t: t.n_elements * t["weights"].ne[2],  # every expert for every token
    "FLASH_ATTN_EXT": _attention,
    "FLASH_ATTN_LSE": _attention,
    "FLASH_ATTN_VARLEN": _varlen,
    "FLASH_ATTN_VARLEN_LSE": _varlen,
    "FLASH_ATTN_BACK": lambda t: 3 * _attention(t),
    "FLASH_ATTN_VARLEN_BACK": lambda t: 6 * t["q"].n_rows * t["k"].ne[1],  # all pairs, hidden or not
    "SOFT_MAX": lambda t: 2 * t.n_elements,
    "SET_ROWS": lambda t: t["rows"].n_elements,
}
_ROUNDS: dict[str, Callable[[Tensor], int]] = {
    "MUL_MAT_ID": lambda t: min(t["weights"].ne[2], t["ids"].n_elements),
    "KQ_MASK": lambda t: t.ne[3] * -(-t.ne[1] // 16),
    "FLASH_ATTN_VARLEN": lambda t: t["q_starts"].ne[0],
    "FLASH_ATTN_VARLEN_LSE": lambda t: t["q_starts"].ne[0],
    "FLASH_ATTN_VARLEN_BACK": lambda t: t["q_starts"].ne[0],
    "SAMPLE": lambda t: t.n_elements,
    "SAMPLE_EACH": lambda t: t.n_elements,
    "PENALIZE": lambda t: t.ne[1] * (1 + t["biased"].ne[0] + t["past"].ne[0]),
    "ROPE": lambda t: t.params.n_dims // 64,
}
