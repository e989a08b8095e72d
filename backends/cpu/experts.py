"""MUL_MAT_ID, with ADD_ID or without: straight from the file's blocks; many tokens of experts that are not quantized
expert by expert, through oneDNN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from graphrt.backends.cpu import fast
from graphrt.backends.cpu.lowering import Given, Lowering, rows_of
from graphrt.backends.cpu.products import Slice, dense, matrix_slices, panels_for
from graphrt.fusion import Fusion, Nodes
from graphrt.program import Group
from graphrt.tensor import Tensor


class BiasedExperts(NamedTuple):
    """MUL_MAT_ID, and the ADD_ID of it and of its experts' biases."""

    product: Tensor
    out: Tensor


def mul_mat_id_add_id(nodes: Nodes) -> Iterator[Group]:
    """MUL_MAT_ID, then ADD_ID of the biases of the same experts."""
    for product in nodes.of("MUL_MAT_ID"):
        total = nodes.only_reader(product)
        if total is None or total.op != "ADD_ID":
            continue
        bias, same = total["bias"], total["a"] is product and total["ids"] is product["ids"]
        if same and bias.has_contiguous_rows and bias.ne[1] == product["weights"].ne[2]:
            yield Group([product, total], kernel="mul_mat_id_add_id", captured=BiasedExperts(product, total))


def expert_weight(node: Tensor) -> Tensor | None:
    """The quantized weights of a MUL_MAT_ID whose activations may be rounded; else None."""
    experts = node["weights"]
    plain = rows_of(node["x"]) is not None and experts.has_contiguous_rows
    return experts if plain and experts.dtype.name in fast.CODE_TYPES else None


def mul_mat_id(low: Lowering, out: Tensor) -> Any | None:
    """MUL_MAT_ID: native steps or a function. None for types and layouts that the native kernels don't read."""
    return _mul_mat_id(low, out, out, None)


def lower_mul_mat_id_add_id(low: Lowering, found: BiasedExperts) -> Any | None:
    """The same with ADD_ID of the same experts."""
    return _mul_mat_id(low, found.product, found.out, found.out["bias"])


def _mul_mat_id(low: Lowering, product: Tensor, out: Tensor, bias: Tensor | None) -> Any | None:
    experts, x, ids = (product[name] for name in ("weights", "x", "ids"))
    known = experts.dtype.name in fast.TYPES and experts.has_contiguous_rows
    if not known or not x.has_contiguous_rows:
        return None
    tiled = rows_of(x) is not None and low.rounds(experts.dtype.name)
    if out.ne[2] > fast.MAX_TOKENS and (tiled or not low.rows_alone):
        return (_tiles if tiled else _by_expert)(low, out, experts, x, ids, bias)
    given, strides = Given([], low.at(x), 0, 32), x.nb[1:3]
    if rows_of(x) is not None:
        given = low.activations(x, experts.dtype.name)
        strides = (given.row_bytes, given.row_bytes * x.ne[1])
    return [
        *given.steps,
        fast.expert_gemv(
            experts.dtype.name, y=low.at(out), w=low.at(experts), x=given.at, ids=low.at(ids), n_rows=experts.ne[1],
            n=experts.ne[0], n_slots=out.ne[1], n_tok=out.ne[2], n_expert=experts.ne[2], w_nb=experts.nb[1],
            expert_nb=experts.nb[2], y_nb=out.nb[1:3], x_nb=(strides[0] if x.ne[1] > 1 else 0, strides[1]),
            ids_nb=ids.nb[:2], bias=low.at(bias), bias_nb=bias.nb[1] if bias is not None else 0, bits=given.bits,
        ),
    ]  # fmt: skip


def _tiles(low: Lowering, out: Tensor, experts: Tensor, x: Tensor, ids: Tensor, bias: Tensor | None) -> list[fast.Step]:
    """Each used expert's rows unpacked once for its pairs of a token and a slot."""
    n_slots, n_tok, n_expert = *out.ne[1:3], experts.ne[2]
    if fast.amx_tiles() is not None:
        return _amx_tiles(low, out, experts, x, ids, bias)
    given = low.activations(x, experts.dtype.name, panels=True)
    panels, n_panels = panels_for(low, experts, n_slots * n_tok)
    starts, order = low.experts_in_order(ids, n_expert, n_slots, n_tok)
    x_nb = given.row_bytes if x.ne[1] > 1 else 0, given.row_bytes * x.ne[1]
    return [
        *given.steps,
        *order,
        fast.expert_gemm(
            experts.dtype.name, y=low.at(out), w=low.at(experts), x=given.at, starts=starts, panels=panels,
            n_panels=n_panels, n_rows=experts.ne[1], n=experts.ne[0], n_slots=n_slots, n_tok=n_tok, n_expert=n_expert,
            w_nb=experts.nb[1], expert_nb=experts.nb[2], y_nb=out.nb[1:3], x_nb=x_nb, bits=low.bits, bias=low.at(bias),
            bias_nb=bias.nb[1] if bias is not None else 0, row_by_row=not low.rows_alone,
        ),
    ]  # fmt: skip


def _amx_tiles(
    low: Lowering, out: Tensor, experts: Tensor, x: Tensor, ids: Tensor, bias: Tensor | None
) -> list[fast.Step]:
    """The same where the processor has tiles."""
    n_slots, n_tok, n_expert = *out.ne[1:3], experts.ne[2]
    panels, n_panels = panels_for(low, experts, n_slots * n_tok)
    starts, order = low.experts_in_order(ids, n_expert, n_slots, n_tok)
    split, at = low.split_by_expert(x, experts.dtype.name, ids, starts, n_expert, n_slots, n_tok)
    product = fast.amx_expert_gemm(
        experts.dtype.name, y=low.at(out), w=low.at(experts), x=at, starts=starts, panels=panels, n_panels=n_panels,
        n_rows=experts.ne[1], n=experts.ne[0], n_slots=n_slots, n_tok=n_tok, n_expert=n_expert, w_nb=experts.nb[1],
        expert_nb=experts.nb[2], y_nb=out.nb[1:3], bits=low.bits, bias=low.at(bias),
        bias_nb=bias.nb[1] if bias is not None else 0,
    )  # fmt: skip
    return [*order, *split, product]


def _by_expert(
    low: Lowering, out: Tensor, experts: Tensor, x: Tensor, ids: Tensor, bias: Tensor | None
) -> Callable[[], None]:
    """Each used expert's pairs of a token and a slot together, through oneDNN."""
    m, n_slots, n_tokens = out.ne[:3]
    target, chosen = low.look(out).view(-1, m), low.look(ids)[0, 0]
    rows = low.look(x)[0].expand(n_tokens, n_slots, -1)
    added = low.look(bias)[0, 0] if bias is not None else None
    prepared: dict[int, list[Slice]] = {}

    def run() -> None:
        numbers = chosen.numpy().ravel()
        order = np.argsort(numbers, kind="stable")
        found, first = np.unique(numbers[order], return_index=True)
        together = np.split(order, first[1:])
        for expert, pairs in zip(found.tolist(), map(torch.from_numpy, together)):
            if not 0 <= expert < experts.ne[2]:
                target[pairs] = math.nan
                continue
            if expert not in prepared:
                prepared[expert] = list(matrix_slices(low, experts, expert))
            given = rows[pairs // n_slots, pairs % n_slots]
            for start, stop, decode, matrix in prepared[expert]:
                decode()
                y = dense(given, matrix)
                target[pairs, start:stop] = y if added is None else y + added[expert, start:stop]

    return run


MUL_MAT_ID_ADD_ID = Fusion("mul_mat_id_add_id", mul_mat_id_add_id, lower_mul_mat_id_add_id)
