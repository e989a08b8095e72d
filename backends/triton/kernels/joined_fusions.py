"""Which sums over ranks become one step with the residual and the norm behind them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.backends.triton.kernels.norm_fusions import MAX_SUM, ScaledNorm, norm_of_sum
from graphrt.backends.triton.kernels.products.fusions import are_whole_rows, private_to_products
from graphrt.fusion import Nodes, scaled_by_row, sum_of
from graphrt.ops.collectives import is_played
from graphrt.peers import ROWS, Peers
from graphrt.ranks import ONE_SHOT, peers
from graphrt.tensor import Tensor


class JoinedSum(NamedTuple):
    """An ALL_REDUCE and what is done with it: the norm behind a block, if there is one, the ADD of the residual, and
    the norm of that sum."""

    node: Tensor
    total: Tensor
    after: ScaledNorm | None = None
    before: ScaledNorm | None = None


def joined_add_norm(nodes: Nodes) -> Iterator[Group]:
    """ALL_REDUCE of up to 64 rows, RMS_NORM and MUL by a row if these follow, ADD of a residual, and RMS_NORM and MUL
    of the sum if these follow."""
    for node in nodes.of("ALL_REDUCE"):
        if why_apart(node) is not None:
            continue
        before = _norm_behind(nodes, node)
        block = node if before is None else before.scaled
        total = sum_of(nodes, block)
        if total is None or not all(are_whole_rows(s) and s.ne == total.ne for s in total.sources()):
            continue
        after = norm_of_sum(nodes, total)
        members = [node, *([before.norm, before.scaled] if before is not None else []), total]
        results, private = [total], []
        if after is not None:
            members += [after.norm, after.scaled]
            results, private = [total, after.scaled], private_to_products(nodes, after.scaled)
        kernel = "joined_add" if after is None else "joined_add_norm"
        found = JoinedSum(node, total, after, before)
        yield Group(members, kernel=kernel, results=results, private=private, captured=found)


def why_apart(node: Tensor) -> str | None:
    """Why one launch can't add up an ALL_REDUCE's parts and go on with the sum, None if it can."""
    if not are_whole_rows(next(node.sources())):
        return f"it takes rows of f32 without gaps, these are {node.dtype.name}"
    if node.ne[0] > MAX_SUM:
        return f"it takes rows of up to {MAX_SUM} elements, these have {node.ne[0]}"
    if node.n_rows > ROWS:
        return f"it takes up to {ROWS} rows, these are {node.n_rows}"
    if node.data_nbytes > ONE_SHOT and not is_played(node) and why_not_by_peers(node) is not None:
        return f"over NCCL it takes up to {ONE_SHOT >> 10} KB, these are {node.data_nbytes >> 10}"
    return None


def why_not_by_peers(node: Tensor) -> str | None:
    """Why ranks can't write to each other in the launch that adds up, None if they can."""
    if is_played(node):
        return "all ranks are played in this graph"
    found = peers(node.params.ranks)
    return None if isinstance(found, Peers) else found


def _norm_behind(nodes: Nodes, node: Tensor) -> ScaledNorm | None:
    norm = nodes.only_reader(node)
    if norm is None or norm.op != "RMS_NORM":
        return None
    scaled = scaled_by_row(nodes, norm)
    return None if scaled is None else ScaledNorm(norm, scaled)
