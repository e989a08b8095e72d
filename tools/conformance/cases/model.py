"""Cases from a model: every distinct node of its prefill and decode graphs, with the real types, shapes and strides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from graphrt.graph import Graph
from graphrt.models.cache import KVCache
from graphrt.models.model import load
from graphrt.tensor import Tensor
from graphrt.testing import Case
from graphrt.tools.conformance.cases.operands import Operand, case_of
from graphrt.tools.conformance.run.reference import computing_nodes

#: Tokens of the prefill graph, and cells of the cache.
N_PROMPT, N_CTX = 32, 512


def model_cases(path: Path, type_k: str = "f16", type_v: str = "f16") -> Iterator[Case]:
    """Each under its own string, in the order of the graphs: prefill, then what decode has beside."""
    model = load(path, "cpu")
    decoder, hp = model.decoder, model.decoder.hp
    n_ctx = min(N_CTX, hp.n_ctx_train)
    cache = KVCache(hp, model.backends[0], hp.windowed, n_ctx, N_PROMPT, type_k, type_v)
    seen: set[str] = set()
    for n_tokens in (min(N_PROMPT, n_ctx), 1):
        for case in graph_cases(decoder.graph(n_tokens, 1, cache)):
            if str(case) not in seen:
                seen.add(str(case))
                yield case


def graph_cases(graph: Graph) -> Iterator[Case]:
    """A case for each node that computes; equal nodes give equal strings."""
    for node in computing_nodes(graph):
        roots: dict[Tensor, int] = {}
        src = [None if s is None else operand_of(s, roots) for s in node.src]
        while src and src[-1] is None:
            src.pop()
        yield case_of(node.op, node.params, src)


def operand_of(t: Tensor, roots: dict[Tensor, int]) -> Operand:
    """A source as a case has it. roots: the numbers of the memories that were met, which this adds to."""
    number = roots.setdefault(t.root, len(roots))
    return Operand(t.dtype, t.ne, t.nb, number, t.root.nbytes, t.view_offs)
