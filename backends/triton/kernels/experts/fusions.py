"""Fusion patterns of mixtures of experts, as llama.cpp's models are built: routing, gate and up, the weighted sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from graphrt.backend import Group
from graphrt.backends.triton.kernels.products.fusions import Products, Summed
from graphrt.fusion import Nodes
from graphrt.op import made_by
from graphrt.tensor import Tensor

#: What one program of the routing's kernel holds.
MAX_EXPERTS, MAX_USED = 1024, 64


class Choice(NamedTuple):
    """The choice of experts. source: what it begins with, logits or probabilities; order: ARGSORT or TOP_K; gate: what
    makes probabilities of logits; biased: the ADD of a bias for the choice alone; both may be absent."""

    source: Tensor
    order: Tensor
    gate: Tensor | None
    biased: Tensor | None


class Shares(NamedTuple):
    """What follows the chosen probabilities. share: SOFT_MAX, or DIV by the SUM_ROWS `total` and perhaps its CLAMP;
    scaled: SCALE. Each may be absent."""

    total: Tensor | None = None
    clamp: Tensor | None = None
    share: Tensor | None = None
    scaled: Tensor | None = None


class Routing(NamedTuple):
    """picked: GET_ROWS of the chosen probabilities; last: the last node of all."""

    choice: Choice
    picked: Tensor
    shares: Shares
    last: Tensor


class ExpertSum(NamedTuple):
    """weighted: MUL of experts' results by their weights; total: the last ADD of a token's. product: MUL_MAT_ID before
    that, None if another step makes the results."""

    weighted: Tensor
    total: Tensor
    product: Summed | None


def expert_routing(nodes: Nodes) -> Iterator[Group]:
    """Logits to experts and their weights: SOFT_MAX or sigmoid, perhaps ADD of a bias, ARGSORT or TOP_K, GET_ROWS of
    the chosen probabilities; then SOFT_MAX of these, or SUM_ROWS, CLAMP and DIV; then SCALE. All but the order and
    GET_ROWS may be missing."""
    for picked in nodes.of("GET_ROWS"):
        choice = _choice(nodes, picked)
        if choice is None:
            continue
        before, shares = list(filter(None, (choice.gate, choice.biased))), _shares(nodes, picked)
        after = list(filter(None, shares))
        if not before and not after:
            continue  # nothing but an order: kernels of its own do that
        found = Routing(choice, picked, shares, after[-1] if after else picked)
        members = [*before, choice.order, picked, *after]
        yield Group(members, kernel="expert_routing", results=[choice.order, found.last], captured=found)


def _choice(nodes: Nodes, picked: Tensor) -> Choice | None:
    """The choice whose probabilities a GET_ROWS takes; None, if it is none that one launch makes."""
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
    readers = [select if biased else order, picked]
    whole = _makes_probabilities(probs) and not nodes.kept(probs) and set(nodes.readers(probs)) == set(readers)
    gate = probs if whole and probs in nodes.all else None
    return Choice(probs if gate is None else gate["a"], order, gate, select if biased else None)


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


def _shares(nodes: Nodes, picked: Tensor) -> Shares:
    """What follows the chosen probabilities and can be the same launch; nothing, if another node needs these."""
    found = _normalized(nodes, picked) if not nodes.kept(picked) else Shares()
    scaled = _reader(nodes, picked if found.share is None else found.share, "SCALE")
    return found._replace(scaled=scaled) if scaled is not None and not scaled.params.bias else found


def _normalized(nodes: Nodes, picked: Tensor) -> Shares:
    """SOFT_MAX of the chosen ones, or SUM_ROWS, perhaps CLAMP, and DIV by that."""
    row = (picked.ne[1], picked.ne[2], 1, 1)
    share = _reader(nodes, picked, "SOFT_MAX")
    if share is not None:
        return Shares(share=share) if share.ne == row and _is_bare(share) else Shares()
    readers = nodes.readers(picked)
    total = next((n for n in readers if n.op == "SUM_ROWS"), None)
    share = next((n for n in readers if n.op == "DIV"), None)
    if total is None or share is None or len(readers) != 2 or share.ne != row or total.ne != (1, *row[1:]):
        return Shares()
    divisor = nodes.only_reader(total)
    clamped = divisor is not None and divisor.op == "CLAMP" and nodes.only_reader(divisor) is share
    clamp = divisor if clamped else None
    by = total if clamp is None else clamp
    whole = share["b"] is by and _looks_whole(share["a"], picked) and _looks_whole(total["a"], picked)
    return Shares(total, clamp, share) if whole and (clamped or divisor is share) else Shares()


def _looks_whole(t: Tensor, of: Tensor) -> bool:
    """All of a tensor's elements in their order, as they are or reshaped."""
    return made_by(t) is of and t.n_elements == of.n_elements and t.is_contiguous


def _reader(nodes: Nodes, t: Tensor, op: str) -> Tensor | None:
    """The one node that reads t or a reshape of it, if it is of that op and alone."""
    readers = nodes.readers(t)
    alone = len(readers) == 1 and readers[0].op == op and not nodes.kept(t)
    return readers[0] if alone and _looks_whole(readers[0]["a"], t) else None


def _product(nodes: Nodes, t: Tensor | None) -> Summed | None:
    """MUL_MAT_ID, or it and the ADD_ID of the same ids whose result t is; None if t is neither."""
    if t is None or t.op == "MUL_MAT_ID":
        return Summed(t, t) if t is not None else None
    product = t["a"] if t.op == "ADD_ID" else t
    if product.op != "MUL_MAT_ID" or nodes.only_reader(product) is not t:
        return None
    return Summed(product, t, t["bias"]) if t["ids"] is product["ids"] and t["bias"].has_contiguous_rows else None


def _nodes_of(product: Summed) -> list[Tensor]:
    return list(dict.fromkeys([product.product, product.out]))


def expert_gate_up(nodes: Nodes) -> Iterator[Group]:
    """Two MUL_MAT_IDs of one x and one choice of experts, ADD_ID after them or not, and GLU of both."""
    for out in nodes.of("GLU"):
        first, second = out["gate"], out["value"]
        gate, up = _product(nodes, first), _product(nodes, second)
        if gate is None or up is None or first is second:
            continue
        alone = all(nodes.only_reader(half.out) is out for half in (gate, up))
        a, b = gate.product, up.product
        same = all(a[name] is b[name] for name in ("x", "ids")) and a.ne == b.ne
        if alone and same and a["weights"].ne == b["weights"].ne:
            members = [*_nodes_of(gate), *_nodes_of(up), out]
            yield Group(members, kernel="expert_gate_up", captured=Products((gate, up), out))


def expert_sum(nodes: Nodes) -> Iterator[Group]:
    """MUL of experts' results by their weights and ADDs of a token's; MUL_MAT_ID, and ADD_ID, before that if it is."""
    for weighted in nodes.of("MUL"):
        results, weights = weighted["a"], weighted["b"]
        sums = _sums_of_slots(nodes, weighted)
        of_slots = weights.ne == (1, *weighted.ne[1:]) and weighted.ne[3] == 1
        plain = all(t.dtype.name == "f32" for t in (results, weights)) and results.has_contiguous_rows
        if not sums or not of_slots or not plain:
            continue
        product, total = _product(nodes, results), sums[-1]
        if product is not None and nodes.only_reader(product.out) is weighted:
            members, found = [*_nodes_of(product), weighted, *sums], ExpertSum(weighted, total, product)
            yield Group(members, kernel="expert_down", results=[total], captured=found)
        else:
            found = ExpertSum(weighted, total, None)
            yield Group([weighted, *sums], kernel="expert_sum", results=[total], captured=found)


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
