"""ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER: what ranks that work on one graph together give each other.

A node stands in one of two forms. In a rank's own graph it has one source, what this rank has; the other ranks' come
over the link while it runs. In a graph that plays all ranks (linked.py) it has a source for each rank, in their order,
and nothing crosses a link: that is what tests, tools and references compute. Both forms have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Work, build, moved_bytes, register, require
from graphrt.tensor import Tensor

#: Ranks that one graph can play: as many sources as an op's node may have, less some room.
MAX_PLAYED = 8
#: Sources of a node that is played.
PARTS = ("a", *(f"a{i}?" for i in range(1, MAX_PLAYED)))

Given = Tensor | None


@dataclass(frozen=True)
class RanksParams:
    """ranks: how many there are; rank: whose node this is, from 0."""

    ranks: int
    rank: int


@dataclass(frozen=True)
class SizesParams:
    """ranks, rank: as RanksParams; sizes: how many elements along dimension 0 each rank has."""

    ranks: int
    rank: int
    sizes: tuple[int, ...]


def is_played(node: Tensor) -> bool:
    """The node has all ranks' parts as sources, so that nothing crosses a link."""
    return len(list(node.sources())) > 1


def _parts(op: str, params: RanksParams | SizesParams, given: Sequence[Given]) -> list[Tensor]:
    """The sources that are there. Raises GraphError for numbers of ranks and sources that can't be."""
    fits = params.ranks >= 2 and 0 <= params.rank < params.ranks
    require(fits, op, f"ranks must be 2 or more and rank one of them, got {params.ranks} and {params.rank}")
    parts = [t for t in given if t is not None]
    whole = len(parts) == 1 or list(given[: params.ranks]) == parts
    rule = f"it takes this rank's part, or one of each of the {params.ranks} ranks in their order"
    require(whole and len(parts) in (1, params.ranks), op, f"{rule}, got {len(parts)} of them")
    first = parts[0]
    same = all(t.dtype == first.dtype and t.ne[1:] == first.ne[1:] for t in parts)
    require(same, op, "parts have one type, and one shape behind dimension 0", *parts)
    return parts


def _sizes(op: str, params: SizesParams) -> None:
    sane = len(params.sizes) == params.ranks and min(params.sizes, default=0) >= 1
    require(sane, op, f"sizes are {params.ranks} numbers of at least 1, one a rank, got {params.sizes}")


def _infer_all_reduce(
    params: RanksParams, a: Tensor, a1: Given, a2: Given, a3: Given, a4: Given, a5: Given, a6: Given, a7: Given
) -> Result:  # fmt: skip
    parts = _parts("ALL_REDUCE", params, (a, a1, a2, a3, a4, a5, a6, a7))
    require(parts[0].dtype.kind == "float", "ALL_REDUCE", "parts must be of a plain float type", *parts)
    require(all(t.ne == parts[0].ne for t in parts), "ALL_REDUCE", "parts must have one shape", *parts)
    return Result(parts[0].dtype, parts[0].ne)


def _infer_all_gather(
    params: SizesParams, a: Tensor, a1: Given, a2: Given, a3: Given, a4: Given, a5: Given, a6: Given, a7: Given
) -> Result:  # fmt: skip
    parts = _parts("ALL_GATHER", params, (a, a1, a2, a3, a4, a5, a6, a7))
    _sizes("ALL_GATHER", params)
    require(not parts[0].dtype.is_quantized, "ALL_GATHER", "parts must be of a plain type", *parts)
    wanted = params.sizes if len(parts) > 1 else params.sizes[params.rank : params.rank + 1]
    fits = all(t.ne[0] == n for t, n in zip(parts, wanted))
    require(fits, "ALL_GATHER", f"each part must be as wide as sizes says, {params.sizes}", *parts)
    return Result(parts[0].dtype, (sum(params.sizes), *parts[0].ne[1:]))


def _infer_reduce_scatter(
    params: SizesParams, a: Tensor, a1: Given, a2: Given, a3: Given, a4: Given, a5: Given, a6: Given, a7: Given
) -> Result:  # fmt: skip
    parts = _parts("REDUCE_SCATTER", params, (a, a1, a2, a3, a4, a5, a6, a7))
    _sizes("REDUCE_SCATTER", params)
    require(parts[0].dtype.kind == "float", "REDUCE_SCATTER", "parts must be of a plain float type", *parts)
    fits = all(t.ne[0] == sum(params.sizes) for t in parts)
    require(fits, "REDUCE_SCATTER", f"every part must be as wide as all sizes together, {params.sizes}", *parts)
    return Result(parts[0].dtype, (params.sizes[params.rank], *parts[0].ne[1:]))


def sent_bytes(node: Tensor) -> int:
    """Bytes that a rank hands to the link, or takes from it, whichever are more, of a node of its own graph.

    An all-reduce is a reduce-scatter and an all-gather: all but a rank's own share, twice. An all-gather sends its own
    part to each of the others and takes all of theirs.
    """
    p, a = node.params, next(node.sources())
    others = int(p.ranks) - 1
    if node.op == "ALL_REDUCE":
        return 2 * others * (a.data_nbytes // (others + 1))
    gathers = node.op == "ALL_GATHER"
    own, whole = (a, node) if gathers else (node, a)
    return max(others * own.data_nbytes, whole.data_nbytes - own.data_nbytes)


def _work(node: Tensor) -> Work:
    """Bytes on the link in a rank's own graph, in memory where all ranks are played; sums are of f32."""
    p = node.params
    adds = 0 if node.op == "ALL_GATHER" else (p.ranks - 1) * node.n_elements
    return Work(adds, moved_bytes(node) if is_played(node) else sent_bytes(node))


ALL_REDUCE = register(OpSpec("ALL_REDUCE", _infer_all_reduce, _work, PARTS, params=RanksParams))
ALL_GATHER = register(OpSpec("ALL_GATHER", _infer_all_gather, _work, PARTS, params=SizesParams))
REDUCE_SCATTER = register(OpSpec("REDUCE_SCATTER", _infer_reduce_scatter, _work, PARTS, params=SizesParams))

#: The ops whose nodes ranks meet at.
COLLECTIVES = ("ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER")


def _there(*parts: Given) -> tuple[Given, ...]:
    """Without those that are absent at the end."""
    n = max(i + 1 for i, part in enumerate(parts) if part is not None or i == 0)
    return parts[:n]


@checked(GraphError)
def all_reduce(
    a: Tensor, a1: Tensor | None = None, a2: Tensor | None = None, a3: Tensor | None = None, a4: Tensor | None = None,
    a5: Tensor | None = None, a6: Tensor | None = None, a7: Tensor | None = None, *, ranks: int, rank: int,
    name: str = "",
) -> Tensor:  # fmt: skip
    """The sum over all ranks, on every rank: result = ((a_0 + a_1) + a_2) + ..., in the order of ranks.

    a: this rank's part, any plain float type (f32, f16, bf16, f64) and shape, or rank 0's, with a1, a2, a3, a4, a5, a6,
    a7 those of the others, alike, where all are played in one graph; ranks: 2 or more; rank: this one's number, from 0.
    Sums are f32 and rounded to the type once, so that every rank has the same bits, however many bytes there are. The
    result has the type and shape of a part. Source: MPI_Allreduce, with its order fixed. Raises GraphError for other
    types, shapes and numbers.
    """
    return build(ALL_REDUCE, *_there(a, a1, a2, a3, a4, a5, a6, a7), params=RanksParams(ranks, rank), name=name)


@checked(GraphError)
def all_gather(
    a: Tensor, a1: Tensor | None = None, a2: Tensor | None = None, a3: Tensor | None = None, a4: Tensor | None = None,
    a5: Tensor | None = None, a6: Tensor | None = None, a7: Tensor | None = None, *, ranks: int, rank: int,
    sizes: Sequence[int], name: str = "",
) -> Tensor:  # fmt: skip
    """All ranks' parts side by side along dimension 0, on every rank.

    No formula: no value changes. a: this rank's part, any plain type, [sizes[rank], ...], or rank 0's, with a1, a2, a3,
    a4, a5, a6, a7 those of the others, alike but for dimension 0, where all are played in one graph; ranks, rank: as in
    all_reduce(); sizes: what each rank has along dimension 0. The result has the parts' type and the shape [sum of
    sizes, ...]. Source: MPI_Allgatherv. Raises GraphError for other types, shapes and numbers.
    """
    return build(
        ALL_GATHER, *_there(a, a1, a2, a3, a4, a5, a6, a7), params=SizesParams(ranks, rank, tuple(sizes)), name=name
    )


@checked(GraphError)
def reduce_scatter(
    a: Tensor, a1: Tensor | None = None, a2: Tensor | None = None, a3: Tensor | None = None, a4: Tensor | None = None,
    a5: Tensor | None = None, a6: Tensor | None = None, a7: Tensor | None = None, *, ranks: int, rank: int,
    sizes: Sequence[int], name: str = "",
) -> Tensor:  # fmt: skip
    """This rank's piece of the sum over all ranks: result[i] = (a_0 + a_1 + ...)[start + i], in the order of ranks.

    a: this rank's part, any plain float type, [sum of sizes, ...], or rank 0's, with a1, a2, a3, a4, a5, a6, a7 those
    of the others, alike, where all are played in one graph; ranks, rank: as in all_reduce(); sizes: how much of
    dimension 0 each rank is given, one after the other, so that start is the sum of those before this rank's. Sums are
    as all_reduce() has them. The result has the parts' type and the shape [sizes[rank], ...]. Source:
    MPI_Reduce_scatter. Raises GraphError for other types, shapes and numbers.
    """
    return build(
        REDUCE_SCATTER, *_there(a, a1, a2, a3, a4, a5, a6, a7), params=SizesParams(ranks, rank, tuple(sizes)), name=name
    )
