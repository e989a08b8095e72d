"""The work of a step: FLOPs, and the bytes that it must at least move."""

from __future__ import annotations

from collections.abc import Mapping

from graphrt.op import Work, made_by, op_spec
from graphrt.program import Group
from graphrt.tensor import Tensor


def group_work(group: Group, seen: Mapping[str, tuple[float, float]] | None = None) -> Work:
    """FLOPs of all nodes; bytes that come from outside the group, each source once, and those of its results.

    seen: by the name of a mask, the shares of cells that any query sees, and of pairs of query and cell that count
    (tools/profile/masks.py): of an attention counts what its mask shows, since the rest of a cache is skipped.
    """
    flops, moved = 0, 0
    read: set[Tensor] = set()
    for node in group.working:
        work = op_spec(node.op).work(node)
        mask, caches = attended(node)
        cells, pairs = (seen or {}).get(mask_name(mask), (1.0, 1.0)) if mask is not None else (1.0, 1.0)
        flops += round(work.flops * pairs)
        moved += work.bytes - (0 if node in group.results else node.data_nbytes)
        for source in dict.fromkeys(node.sources()):
            if source.root is node.root and op_spec(node.op).writes is not None:
                continue  # what it writes into
            if source in read or _stays_inside(source, group):
                moved -= source.data_nbytes
            elif source in caches:
                moved -= round(source.data_nbytes * (1 - cells))
            read.add(source)
    return Work(flops, max(moved, 0))


def _stays_inside(t: Tensor, group: Group) -> bool:
    """A group makes all of `t`: of what it writes a part of, such as a cache, the rest comes from outside."""
    made = made_by(t)
    return made in group.nodes and op_spec(made.op).writes is None


def attended(node: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    """The mask of a node and the caches that it hides parts of, one that lies in another (MLA's v in k) left out; none
    for an op without a mask."""
    spec = op_spec(node.op)
    if not spec.masked:
        return None, []
    caches = [node[name] for name in spec.masked]
    return node["mask"], [t for i, t in enumerate(caches) if all(t.root is not other.root for other in caches[:i])]


def mask_name(mask: Tensor) -> str:
    """A mask's name in the graph; a copy on another backend is called after both ("triton#mask")."""
    return mask.name.rpartition("#")[2]
