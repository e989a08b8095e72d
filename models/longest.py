"""The longest context that fits in so much memory, found by planning graphs; nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from graphrt.backend import Backend, Buffer, Bytes, Usage
from graphrt.errors import MemoryPlanError
from graphrt.execute import plan_arenas
from graphrt.graph import Graph
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.cache import KVCache
from graphrt.models.engine import SessionOptions, check_options
from graphrt.models.placement import for_cache, for_weights


@dataclass(frozen=True)
class ContextNeeds:
    """What a session of n_ctx tokens takes with the backend that multiplies with the weights, in bytes.

    weights: as they are stored, mapped ones too; cache: 0 where another backend holds it; prefill, decode: the arenas
    of a whole batch and of one token, which a session keeps side by side.
    """

    backend: str
    n_ctx: int
    weights: int
    cache: int
    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.prefill + self.decode


def context_needs(decoder: Decoder, backends: Sequence[Backend], options: SessionOptions) -> ContextNeeds:
    """What a session with these options takes. Raises SessionError for options that the model can't have."""
    hp, home = decoder.hp, for_weights(backends)
    n_ctx, n_batch = check_options(options, hp)
    promising = cast(Backend, _Promising(for_cache(backends, options.type_k).id))
    cache = KVCache(hp, promising, hp.windowed, n_ctx, n_batch, options.type_k, options.type_v)
    prefill, decode = (decoder.graph(n, 1, cache) for n in (n_batch, 1))
    held = [t.buffer for t in decode.leafs if t.buffer is not None and t.buffer.backend == home.id]
    by_usage = {u: sum(b.footprint for b in held if b.usage is u) for u in (Usage.WEIGHTS, Usage.STATE)}
    return ContextNeeds(
        home.id,
        n_ctx,
        by_usage[Usage.WEIGHTS],
        by_usage[Usage.STATE],
        _arena(prefill, backends, home.id) if n_batch > 1 else 0,
        _arena(decode, backends, home.id),
    )


def longest_context(
    decoder: Decoder, backends: Sequence[Backend], options: SessionOptions, limit: int
) -> ContextNeeds | None:
    """The needs of the longest context that takes at most `limit` bytes, None where not even one token's do.

    options.n_ctx does not count. Halving: a longer context is taken to need more, which holds but for the few bytes by
    which best fit may lay a larger graph out more tightly. Raises SessionError for cache types that can't be.
    """
    best = None
    low, high = 0, decoder.hp.n_ctx_train
    while low < high:
        middle = (low + high + 1) // 2
        needs = context_needs(decoder, backends, replace(options, n_ctx=middle))
        if needs.total <= limit:
            low, best = middle, needs
        else:
            high = middle - 1
    return best


def _arena(graph: Graph, backends: Sequence[Backend], name: str) -> int:
    plan = plan_arenas(graph, backends).get(name)
    return plan.peak if plan is not None else 0


class _Promised(Buffer):
    """A buffer to plan with: it has a size and no memory."""

    def __init__(self, backend: str, nbytes: int, usage: Usage) -> None:
        self.backend, self.nbytes, self.usage = backend, nbytes, usage

    def read(self, offset: int, nbytes: int) -> Bytes:
        raise MemoryPlanError(
            f"a planned buffer has no memory to read, got a read of {nbytes} bytes; prepare the graph"
        )

    def write(self, offset: int, data: Bytes) -> None:
        raise MemoryPlanError(f"a planned buffer has no memory to write, got {data.size} bytes; prepare the graph")


class _Promising:
    """Takes a cache's requests for memory and gives buffers to plan with."""

    def __init__(self, home: str) -> None:
        self.id = home

    def alloc(self, nbytes: int, usage: Usage) -> Buffer:
        return _Promised(self.id, nbytes, usage)
