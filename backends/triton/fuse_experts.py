"""Fusion patterns of mixtures of experts, as llama.cpp's models are built: routing, gate and up, the weighted sum."""

from __future__ import annotations

from collections.abc import Iterator

from graphrt.backend import Group
from graphrt.fusion import Fusion, Nodes
from graphrt.op import made_by
from graphrt.tensor import Tensor

#: What one program of the routing's kernel holds.
MAX_EXPERTS, MAX_USED = 1024, 64


def expert_routing(nodes: Nodes) -> Iterator[Group]:
    """Logits to experts and their weights: SOFT_MAX or sigmoid, perhaps ADD of a bias, ARGSORT or TOP_K, GET_ROWS of
    the chosen probabilities; then SOFT_MAX of these, or SUM_ROWS, CLAMP and DIV; then SCALE. All but the order and
    GET_ROWS may be missing."""
    for picked in nodes.of("GET_ROWS"):
        found = _choice(nodes, picked)
        if found is None:
            continue
        before, order = found
        after = _shares(nodes, picked)
        if not before and not after:
            continue  # nothing but an order: kernels of its own do that
        last = after[-1] if after else picked
        yield Group([*before, order, picked, *after], kernel="expert_routing", results=[order, last])


def _choice(nodes: Nodes, picked: Tensor) -> tuple[list[Tensor], Tensor] | None:
    """What makes the probabilities and what changes them for the choice, if anything, and the node that orders them."""
    table, ids = picked["table"], picked["ids"]
    order, probs = made_by(ids), made_by(table)
    select = order["a"] if order.op in ("ARGSORT", "TOP_K") else None
    if select is None or not _is_column(table, probs) or not _is_plain(probs) or made_by(select) is not select:
        return None
    biased = select is not probs
    if biased and not (_is_biased(select, probs) and nodes.only_reader(select) is order):
        return None
    if not _only_first_are_read(nodes, order, ids) or picked.ne[1] > MAX_USED or probs.ne[0] > MAX_EXPERTS:
        return None
    before = [select] if biased else []
    readers = [select if biased else order, picked]
    whole = _makes_probabilities(probs) and not nodes.kept(probs) and set(nodes.readers(probs)) == set(readers)
    if whole and probs in nodes.all:
        before.insert(0, probs)
    return (before, order) if before or not biased else None


def _is_plain(t: Tensor) -> bool:
    """A matrix of f32 [n_expert, tokens] without gaps."""
    return t.dtype.name == "f32" and t.is_contiguous and t.ne[2] == t.ne[3] == 1


def _is_column(table: Tensor, probs: Tensor) -> bool:
    """Probabilities [n_expert, tokens] as [1, n_expert, tokens], whose rows are one element each."""
    return table.ne == (1, *probs.ne[:2], 1) and table.is_contiguous and table.view_offs == probs.view_offs


def _is_biased(select: Tensor, probs: Tensor) -> bool:
    """probs and a row of f32."""
    bias = select["b"] if select.op == "ADD" and select["a"] is probs else None
    return bias is not None and bias.dtype.name == "f32" and bias.ne == (probs.ne[0], 1, 1, 1)


def _makes_probabilities(probs: Tensor) -> bool:
    if probs.op == "UNARY":
        return probs.params.kind == "sigmoid" and probs["a"].dtype.name == "f32"
    return probs.op == "SOFT_MAX" and _is_bare(probs)


def _is_bare(node: Tensor) -> bool:
    """SOFT_MAX of its source alone."""
    return node["mask"] is None and node["sinks"] is None and node.params.scale == 1.0 and node.params.max_bias == 0.0


def _only_first_are_read(nodes: Nodes, order: Tensor, ids: Tensor) -> bool:
    """Of the order nobody needs more than the first ids.ne[0] of each row, from the best on."""
    used, kind = ids.ne[0], order.dtype.type_size
    if order.ne[2:] != (1, 1) or ids.ne[1:] != order.ne[1:]:
        return False
    if order.op == "TOP_K":
        return bool(order.params.k == used)
    if not order.params.descending or nodes.kept(order):
        return False
    looks = [s for n in nodes.readers(order) for s in n.sources() if made_by(s) is order]
    return all(
        s.ne[0] <= used and s.ne[1:] == order.ne[1:] and s.nb[:2] == (kind, order.nb[1]) and s.view_offs == 0
        for s in looks
    )


def _shares(nodes: Nodes, picked: Tensor) -> list[Tensor]:
    """What follows the chosen probabilities and can be the same launch; nothing, if another node needs these."""
    after: list[Tensor] = []
    last = picked
    if not nodes.kept(picked):
        after = _normalized(nodes, picked)
        last = after[-1] if after else picked
    scaled = _reader(nodes, last, "SCALE")
    return [*after, scaled] if scaled is not None and not scaled.params.bias else after


def _normalized(nodes: Nodes, picked: Tensor) -> list[Tensor]:
    """SOFT_MAX of the chosen ones, or SUM_ROWS, perhaps CLAMP, and DIV by that."""
    row = (picked.ne[1], picked.ne[2], 1, 1)
    share = _reader(nodes, picked, "SOFT_MAX")
    if share is not None:
        return [share] if share.ne == row and _is_bare(share) else []
    readers = nodes.readers(picked)
    total = next((n for n in readers if n.op == "SUM_ROWS"), None)
    share = next((n for n in readers if n.op == "DIV"), None)
    if total is None or share is None or len(readers) != 2 or share.ne != row or total.ne != (1, *row[1:]):
        return []
    divisor = nodes.only_reader(total)
    clamp = [divisor] if divisor is not None and divisor.op == "CLAMP" and nodes.only_reader(divisor) is share else []
    by = clamp[0] if clamp else total
    whole = share["b"] is by and _looks_whole(share["a"], picked) and _looks_whole(total["a"], picked)
    return [total, *clamp, share] if whole and (clamp or divisor is share) else []


def _looks_whole(t: Tensor, of: Tensor) -> bool:
    """All of a tensor's elements in their order, as they are or reshaped."""
    return made_by(t) is of and t.n_elements == of.n_elements and t.is_contiguous


def _reader(nodes: Nodes, t: Tensor, op: str) -> Tensor | None:
    """The one node that reads t or a reshape of it, if it is of that op and alone."""
    readers = nodes.readers(t)
    alone = len(readers) == 1 and readers[0].op == op and not nodes.kept(t)
    return readers[0] if alone and _looks_whole(readers[0]["a"], t) else None


def _product(nodes: Nodes, t: Tensor | None) -> list[Tensor]:
    """MUL_MAT_ID, or it and the ADD_ID of the same ids whose result t is; nothing if t is neither."""
    if t is None or t.op == "MUL_MAT_ID":
        return [t] if t is not None else []
    product = t["a"] if t.op == "ADD_ID" else t
    if product.op != "MUL_MAT_ID" or nodes.only_reader(product) is not t:
        return []
    return [product, t] if t["ids"] is product["ids"] and t["bias"].has_contiguous_rows else []


def expert_gate_up(nodes: Nodes) -> Iterator[Group]:
    """Two MUL_MAT_IDs of one x and one choice of experts, ADD_ID after them or not, and GLU of both."""
    for out in nodes.of("GLU"):
        first, second = out["gate"], out["value"]
        gate, up = _product(nodes, first), _product(nodes, second)
        if not gate or not up or first is second:
            continue
        alone = all(nodes.only_reader(half[-1]) is out for half in (gate, up))
        same = all(gate[0][name] is up[0][name] for name in ("x", "ids")) and gate[0].ne == up[0].ne
        if alone and same and gate[0]["weights"].ne == up[0]["weights"].ne:
            yield Group([*gate, *up, out], kernel="expert_gate_up")


def expert_sum(nodes: Nodes) -> Iterator[Group]:
    """MUL of experts' results by their weights and ADDs of a token's; MUL_MAT_ID, and ADD_ID, before that if it is."""
    for weighted in nodes.of("MUL"):
        results, weights = weighted["a"], weighted["b"]
        sums = _sums_of_slots(nodes, weighted)
        of_slots = weights.ne == (1, *weighted.ne[1:]) and weighted.ne[3] == 1
        plain = all(t.dtype.name == "f32" for t in (results, weights)) and results.has_contiguous_rows
        if not sums or not of_slots or not plain:
            continue
        product = _product(nodes, results)
        if product and nodes.only_reader(product[-1]) is weighted:
            yield Group([*product, weighted, *sums], kernel="expert_down", results=[sums[-1]])
        else:
            yield Group([weighted, *sums], kernel="expert_sum", results=[sums[-1]])


def _sums_of_slots(nodes: Nodes, weighted: Tensor) -> list[Tensor]:
    """The ADDs, in order, that add up dimension 1 of a tensor, one view after the other; nothing if it isn't so."""
    sums = nodes.readers(weighted)
    if nodes.kept(weighted) or len(sums) != weighted.ne[1] - 1:
        return []
    for i, total in enumerate(sums):
        if total.op != "ADD":
            return []
        first = _slot(total["a"], weighted) == 0 if i == 0 else total["a"] is sums[i - 1]
        if not first or _slot(total["b"], weighted) != i + 1:
            return []
        if i and nodes.only_reader(sums[i - 1]) is not total:
            return []
    return sums


def _slot(t: Tensor, of: Tensor) -> int | None:
    """Which of dimension 1 a view [n, tokens] has; None if t is no such view."""
    n, _, tokens, _ = of.ne
    if made_by(t) is not of or t is of or t.ne != (n, tokens, 1, 1) or t.nb[0] != of.nb[0]:
        return None
    return t.view_offs // of.nb[1] if (t.nb[1] == of.nb[2] or tokens == 1) and t.view_offs % of.nb[1] == 0 else None


EXPERT_FUSIONS: tuple[Fusion, ...] = (
    Fusion("expert_routing", expert_routing),
    Fusion("expert_gate_up", expert_gate_up),
    Fusion("expert_sum", expert_sum),
)
