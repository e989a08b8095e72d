"""The fusion pass of the CPU backend's fast form: which runs of nodes become one step.

Each pattern is a function of (region, i) that returns the Group that starts at node i, or None. They are tried in the
order of PATTERNS; what none takes runs node by node.
"""

from __future__ import annotations

from collections.abc import Callable

from graphrt.backend import Group, Region
from graphrt.tensor import Tensor

Pattern = Callable[[Region, int], "Group | None"]


def _chain(region: Region, i: int, *ops: str) -> list[Tensor] | None:
    """The nodes from i on when they are these ops, each but the last read only by the next."""
    nodes = region.nodes[i : i + len(ops)]
    if [n.op for n in nodes] != list(ops):
        return None
    for node, following in zip(nodes, nodes[1:]):
        if node not in following.src or not region.only_used_once(node):
            return None
    return nodes


def _is_row(weight: Tensor | None, of: Tensor) -> bool:
    """`weight` is one contiguous f32 row as long as `of`'s."""
    return (
        weight is not None and weight.dtype.name == "f32" and weight.ne == (of.ne[0], 1, 1, 1) and weight.is_contiguous
    )


def norm_mul(region: Region, i: int) -> Group | None:
    """RMS_NORM, then MUL with one row of weights."""
    nodes = _chain(region, i, "RMS_NORM", "MUL")
    if nodes is None or nodes[1].src[0] is not nodes[0] or not _is_row(nodes[1].src[1], nodes[0]):
        return None
    return Group(nodes, kernel="norm_mul")


def matmul_add(region: Region, i: int) -> Group | None:
    """MUL_MAT, then ADD of a residual of the same shape."""
    nodes = _chain(region, i, "MUL_MAT", "ADD")
    if nodes is None:
        return None
    product, total = nodes
    residual = total.src[1] if total.src[0] is product else total.src[0]
    fits = residual is not None and residual is not product and residual.ne == product.ne
    return Group(nodes, kernel="matmul_add") if fits and residual.dtype.name == "f32" else None  # type: ignore[union-attr]


def gate_up_glu(region: Region, i: int) -> Group | None:
    """Two MUL_MAT of one x, then GLU of both: gate and up of a feed-forward."""
    nodes = region.nodes[i : i + 3]
    if [n.op for n in nodes] != ["MUL_MAT", "MUL_MAT", "GLU"]:
        return None
    gate, up, out = nodes
    alone = region.only_used_once(gate) and region.only_used_once(up)
    same_x = gate.src[1] is up.src[1] and gate.ne == up.ne
    known = out.params.kind in ("swiglu", "geglu", "reglu")
    return Group(nodes, kernel="gate_up_glu") if alone and same_x and known and out.src == (gate, up) else None


def mul_mat_id_add_id(region: Region, i: int) -> Group | None:
    """MUL_MAT_ID, then ADD_ID of the biases of the same experts."""
    nodes = _chain(region, i, "MUL_MAT_ID", "ADD_ID")
    if nodes is None:
        return None
    product, total = nodes
    bias = total.src[1]
    fits = total.src[0] is product and total.src[2] is product.src[2] and bias is not None and bias.has_contiguous_rows
    return Group(nodes, kernel="mul_mat_id_add_id") if fits and bias.ne[1] == product.src[0].ne[2] else None  # type: ignore[union-attr]


def softcap(region: Region, i: int) -> Group | None:
    """SCALE by 1/c, tanh, SCALE by c."""
    nodes = _chain(region, i, "SCALE", "UNARY", "SCALE")
    if nodes is None or nodes[1].params.kind != "tanh" or nodes[0].params.bias or nodes[2].params.bias:
        return None
    inverse = abs(nodes[0].params.scale * nodes[2].params.scale - 1.0) < 1e-6
    return Group(nodes, kernel="softcap") if inverse else None


PATTERNS: tuple[Pattern, ...] = (norm_mul, gate_up_glu, matmul_add, mul_mat_id_add_id, softcap)


def fuse(region: Region, patterns: tuple[Pattern, ...] = PATTERNS) -> list[Group]:
    """The region cut into groups, first match first."""
    groups: list[Group] = []
    i = 0
    while i < len(region.nodes):
        found = next((g for p in patterns if (g := p(region, i)) is not None), None)
        group = found or Group([region.nodes[i]], kernel=region.nodes[i].op)
        groups.append(group)
        i += len(group.nodes)
    return groups
