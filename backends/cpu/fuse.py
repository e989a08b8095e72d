"""The fusions of the CPU backend's fast form: which nodes become one native step."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.fusion import Fusion, Nodes, added_to, scaled_by_row
from graphrt.program import Group


def norm_mul(nodes: Nodes) -> Iterator[Group]:
    """RMS_NORM, then MUL with one row of weights."""
    for norm in nodes.of("RMS_NORM"):
        scaled = scaled_by_row(nodes, norm)
        if scaled is not None:
            yield Group([norm, scaled], kernel="norm_mul")


def matmul_add(nodes: Nodes) -> Iterator[Group]:
    """MUL_MAT, then ADD of a residual of the same shape."""
    for product in nodes.of("MUL_MAT"):
        total = nodes.only_reader(product)
        if total is None or total.op != "ADD" or total["a"] is total["b"]:
            continue
        residual = added_to(product, total)
        if residual.ne == product.ne and residual.dtype.name == "f32":
            yield Group([product, total], kernel="matmul_add")


def gate_up_glu(nodes: Nodes) -> Iterator[Group]:
    """Two MUL_MAT of one x, then GLU of both: gate and up of a feed-forward."""
    for out in nodes.of("GLU"):
        gate, up = out["gate"], out["value"]
        if up is None or gate is up or gate.op != "MUL_MAT" or up.op != "MUL_MAT":
            continue
        alone = nodes.only_reader(gate) is out and nodes.only_reader(up) is out
        same_x = gate["x"] is up["x"] and gate.ne == up.ne
        if alone and same_x and out.params.kind in ("swiglu", "geglu", "reglu"):
            yield Group([gate, up, out], kernel="gate_up_glu")


def mul_mat_id_add_id(nodes: Nodes) -> Iterator[Group]:
    """MUL_MAT_ID, then ADD_ID of the biases of the same experts."""
    for product in nodes.of("MUL_MAT_ID"):
        total = nodes.only_reader(product)
        if total is None or total.op != "ADD_ID":
            continue
        bias, same = total["bias"], total["a"] is product and total["ids"] is product["ids"]
        if same and bias.has_contiguous_rows and bias.ne[1] == product["weights"].ne[2]:
            yield Group([product, total], kernel="mul_mat_id_add_id")


def softcap(nodes: Nodes) -> Iterator[Group]:
    """SCALE by 1/c, tanh, SCALE by c."""
    for inner in nodes.of("SCALE"):
        bent = nodes.only_reader(inner)
        out = nodes.only_reader(bent) if bent is not None and bent.op == "UNARY" else None
        if bent is None or out is None or out.op != "SCALE" or bent.params.kind != "tanh":
            continue
        inverse = abs(inner.params.scale * out.params.scale - 1.0) < 1e-6
        if inverse and not inner.params.bias and not out.params.bias:
            yield Group([inner, bent, out], kernel="softcap")


#: In the order in which they are tried: a node belongs to the first group that takes it.
FUSIONS: tuple[Fusion, ...] = (
    Fusion("norm_mul", norm_mul),
    Fusion("gate_up_glu", gate_up_glu),
    Fusion("matmul_add", matmul_add),
    Fusion("mul_mat_id_add_id", mul_mat_id_add_id),
    Fusion("softcap", softcap),
)
