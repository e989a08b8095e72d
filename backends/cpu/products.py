"""MUL_MAT, alone and with what follows it: from the file's blocks where activations are rounded or tokens are few, else
through oneDNN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from graphrt.backends.cpu import fast
from graphrt.backends.cpu.lowering import Lowering, rows_of
from graphrt.fusion import Fusion, GateUpGlu, Nodes, added_to, gated_products, sum_of
from graphrt.program import Group
from graphrt.tensor import Tensor

ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}

#: First row, end, what decodes them, the f32 matrix that this leaves.
Slice = tuple[int, int, Callable[[], None], torch.Tensor]

#: Decoded slices of a matrix are at most this large, so that they are still in cache when the product reads them.
SLICE_BYTES = 4 * 2**20


class MatmulAdd(NamedTuple):
    """MUL_MAT, and the ADD of it and of a residual."""

    product: Tensor
    out: Tensor
    residual: Tensor


def matmul_add(nodes: Nodes) -> Iterator[Group]:
    """MUL_MAT, then ADD of a residual of the same shape."""
    for product in nodes.of("MUL_MAT"):
        total = sum_of(nodes, product)
        residual = added_to(product, total) if total is not None else None
        if total is not None and residual is not None and residual.ne == product.ne and residual.dtype.name == "f32":
            yield Group([product, total], kernel="matmul_add", captured=MatmulAdd(product, total, residual))


def gate_up_glu(nodes: Nodes) -> Iterator[Group]:
    """Two MUL_MAT of one x, then GLU of both: gate and up of a feed-forward."""
    for found in gated_products(nodes):
        yield Group(list(found), kernel="gate_up_glu", captured=found)


def _product(t: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """Weights, activations and the number of tokens of a MUL_MAT that is one matrix times rows; else None."""
    weight, x = t["weights"], t["x"]
    rows = rows_of(x)
    plain = weight.ne[2] == weight.ne[3] == 1 and weight.has_contiguous_rows and weight.dtype.name in fast.TYPES
    return (weight, x, rows[0]) if plain and rows is not None else None


def matrix_weight(node: Tensor) -> Tensor | None:
    """The quantized weights of a MUL_MAT whose activations may be rounded; else None."""
    found = _product(node)
    return found[0] if found is not None and found[0].dtype.name in fast.CODE_TYPES else None


def matmul(low: Lowering, out: Tensor) -> Any | None:
    """MUL_MAT."""
    return _matmul(low, out, out, None)


def lower_matmul_add(low: Lowering, found: MatmulAdd) -> Any | None:
    """MUL_MAT and the residual that is added."""
    return _matmul(low, found.product, found.out, found.residual)


def _matmul(low: Lowering, product: Tensor, out: Tensor, residual: Tensor | None) -> Any | None:
    found, extra = _product(product), rows_of(residual) if residual is not None else (0, 0)
    if found is None and residual is None:
        return _side_by_side(low, out)
    if found is None or extra is None:
        return None
    weight, x, n_tok = found
    if n_tok > fast.MAX_TOKENS and low.rounds(weight.dtype.name):
        return _tiles(low, weight, x, low.at(out), low.at(residual), extra[1])
    if n_tok > fast.MAX_TOKENS:
        return _matmul_large(low, weight, x, out, residual)
    given = low.few(x, weight.dtype.name)
    return [
        *given.steps,
        fast.gemv(
            weight.dtype.name, y=low.at(out), w=low.at(weight), x=given.at, n_rows=weight.ne[1], n=weight.ne[0],
            w_nb=weight.nb[1], n_tok=n_tok, x_nb=given.row_bytes, y_nb=weight.ne[1] * 4, res=low.at(residual),
            res_nb=extra[1], bits=given.bits, columns=given.columns,
        ),
    ]  # fmt: skip


def _side_by_side(low: Lowering, out: Tensor) -> list[fast.Step] | None:
    """Several matrices, each times few tokens of its own rows: as experts that all tokens have, one after the other."""
    weight, x = out["weights"], out["x"]
    n_matrices, n_tok, n_x = weight.ne[2], x.ne[1], x.ne[2]
    known = weight.dtype.name in fast.TYPES and weight.has_contiguous_rows and x.dtype.name == "f32"
    plain = weight.ne[3] == x.ne[3] == 1 and x.has_contiguous_rows and out.has_contiguous_rows
    if not known or not plain or n_tok > fast.MAX_TOKENS:
        return None
    matrices = np.arange(n_x, dtype=np.int32) // (n_x // n_matrices)
    return [
        fast.expert_gemv(
            weight.dtype.name, y=low.at(out), w=low.at(weight), x=low.at(x), ids=low.array(matrices.tolist(), np.int32),
            n_rows=weight.ne[1], n=weight.ne[0], n_slots=n_x, n_tok=n_tok, n_expert=n_matrices, w_nb=weight.nb[1],
            expert_nb=weight.nb[2], y_nb=(out.nb[2], out.nb[1]), x_nb=(x.nb[2], x.nb[1]), ids_nb=(4, 0),
        )
    ]  # fmt: skip


def _tiles(low: Lowering, weight: Tensor, x: Tensor, y: int, res: int = 0, res_nb: int = 0) -> list[fast.Step]:
    """y = x times weights, whose codes are unpacked 16 rows at a time; rows of y lie side by side."""
    if fast.amx_tiles() is not None:
        return _amx_tiles(low, weight, x, y, res, res_nb)
    given, n, kind = low.activations(x, weight.dtype.name, panels=True), weight.ne[0], weight.dtype.name
    panels, n_panels = panels_for(low, weight, x.n_rows)
    product = fast.gemm(
        kind, y=y, w=low.at(weight), x=given.at, panels=panels, n_panels=n_panels, n_rows=weight.ne[1], n=n,
        n_tok=x.n_rows, w_nb=weight.nb[1], x_nb=given.row_bytes, y_nb=4 * weight.ne[1], bits=low.bits, res=res,
        res_nb=res_nb,
    )  # fmt: skip
    return [*given.steps, product]


def _amx_tiles(low: Lowering, weight: Tensor, x: Tensor, y: int, res: int, res_nb: int) -> list[fast.Step]:
    """The same where the processor has tiles."""
    kind, (panels, n_panels) = weight.dtype.name, panels_for(low, weight, x.n_rows)
    steps, at = low.split(x, kind)
    product = fast.amx_gemm(
        kind, y=y, w=low.at(weight), x=at, panels=panels, n_panels=n_panels, n_rows=weight.ne[1], n=weight.ne[0],
        n_tok=x.n_rows, w_nb=weight.nb[1], y_nb=4 * weight.ne[1], bits=low.bits, res=res, res_nb=res_nb,
    )  # fmt: skip
    return [*steps, product]


def panels_for(low: Lowering, weight: Tensor, n_tok: int) -> tuple[int, int]:
    """The address of panels that rows of a matrix are unpacked into for n_tok tokens, and how many there are: one a
    thread."""
    n_panels = fast.max_threads()
    if fast.amx_tiles() is not None:
        n_bytes = fast.amx_panel_bytes(fast.split_of(weight.dtype.name, low.bits), n_tok)
    else:
        n_bytes = fast.panel_bytes(fast.panel_form_of(weight.dtype.name, low.bits), n_tok)
    return low.temporary("panels", n_panels, n_bytes // 4).data_ptr(), n_panels


def _matmul_large(low: Lowering, weight: Tensor, x: Tensor, out: Tensor, residual: Tensor | None) -> Callable[[], None]:
    """Products of decoded slices of the weights with all tokens."""
    target = low.look(out).view(-1, out.ne[0])
    return _product_into(low, weight, x, target, low.look(residual).view(-1, out.ne[0]) if residual else None)


def _product_into(
    low: Lowering, weight: Tensor, x: Tensor, target: torch.Tensor, added: torch.Tensor | None = None
) -> Callable[[], None]:
    activations = low.look(x).view(-1, x.ne[0])
    slices = list(matrix_slices(low, weight))

    def run() -> None:
        for start, stop, decode, matrix in slices:
            decode()
            y = dense(activations, matrix)
            if added is None:
                target[:, start:stop] = y
            else:
                torch.add(y, added[:, start:stop], out=target[:, start:stop])

    return run


def _glu_large(low: Lowering, nodes: GateUpGlu, act: str) -> Any:
    gate, up, out = nodes
    w_gate, w_up, x = gate["weights"], up["weights"], gate["x"]
    halves = low.temporary("gate", x.n_rows, out.ne[0]), low.temporary("up", x.n_rows, out.ne[0])
    join = fast.elementwise(
        f"{act}_glu", y=low.at(out), a=halves[0].data_ptr(), b=halves[1].data_ptr(), n_rows=x.n_rows, n=out.ne[0],
        y_nb=out.nb[1], a_nb=4 * out.ne[0], b_nb=4 * out.ne[0],
    )  # fmt: skip

    if low.rounds(w_gate.dtype.name) and low.rounds(w_up.dtype.name):
        parts = [_tiles(low, w, x, half.data_ptr()) for w, half in zip((w_gate, w_up), halves)]
        return [*parts[0], *parts[1], join]
    make_gate, make_up = (_product_into(low, w, x, half) for w, half in zip((w_gate, w_up), halves))

    def run() -> None:
        make_gate()
        make_up()
        join()

    return run


def matrix_slices(low: Lowering, weight: Tensor, index: int = 0) -> Iterator[Slice]:
    """A matrix, or one of those in ne[2], in slices that stay in cache when decoded; a plain f32 one whole."""
    n, m = weight.ne[0], weight.ne[1]
    if weight.dtype.name == "f32":
        yield 0, m, lambda: None, low.look(weight)[0, index]
        return
    base, step = low.at(weight) + index * weight.nb[2], max(1, min(m, SLICE_BYTES // (4 * n)))
    for start in range(0, m, step):
        stop = min(m, start + step)
        matrix = low.temporary("weights", step, n)[: stop - start]
        decode = fast.dequant_rows(
            weight.dtype.name, "f32", dst=matrix.data_ptr(), w=base + start * weight.nb[1],
            n_rows=stop - start, n=n, w_nb=weight.nb[1], dst_nb=4 * n,
        )  # fmt: skip
        yield start, stop, decode, matrix


def _onednn() -> Callable[..., torch.Tensor] | None:
    ops = getattr(torch.ops, "mkldnn", None)
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return getattr(ops, "_linear_pointwise", None) if available else None


_ONEDNN = _onednn()


def dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [n, k] times w [m, k] transposed, f32.

    oneDNN's product is asked for by name where torch has it: torch's own choice, MKL, reaches less than half of its
    speed on AMD processors. The arithmetic is plain f32 either way.
    """
    if _ONEDNN is None:
        return torch.nn.functional.linear(x, w)
    # oneDNN takes a matrix with gaps between its rows too, by a code a thousand times slower
    y: torch.Tensor = _ONEDNN(x.contiguous(), w.contiguous(), None, "none", [], "")
    return y


def lower_gate_up_glu(low: Lowering, nodes: GateUpGlu) -> Any | None:
    gate, up, out = nodes
    found, other, target = _product(gate), _product(up), rows_of(out)
    if found is None or other is None or target is None:
        return None
    (w_gate, x, n_tok), w_up = found, other[0]
    act = ACTIVATIONS[out.params.kind]
    if n_tok > fast.MAX_TOKENS:
        return _glu_large(low, nodes, act)
    for_gate, for_up = low.few(x, w_gate.dtype.name), low.few(x, w_up.dtype.name)
    return [
        *for_gate.steps,
        *for_up.steps,
        fast.gemv_glu(
            w_gate.dtype.name, w_up.dtype.name, act, y=low.at(out), w_gate=low.at(w_gate), w_up=low.at(w_up),
            x_gate=for_gate.at, x_up=for_up.at, n_rows=w_gate.ne[1], n=w_gate.ne[0], w_nb_gate=w_gate.nb[1],
            w_nb_up=w_up.nb[1], n_tok=n_tok, x_nb_gate=for_gate.row_bytes, x_nb_up=for_up.row_bytes, y_nb=target[1],
            bits=(for_gate.bits, for_up.bits), columns=(for_gate.columns, for_up.columns),
        ),
    ]  # fmt: skip


MATMUL_ADD = Fusion("matmul_add", matmul_add, lower_matmul_add)
GATE_UP_GLU = Fusion("gate_up_glu", gate_up_glu, lower_gate_up_glu)
