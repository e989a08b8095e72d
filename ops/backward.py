"""The rules for gradients: what OpSpec.backward builds. Each is the derivative of the formula in its op's docstring.

A rule gets the node, the gradient d of its result (f32, any strides) and the names of the sources whose gradients are
wanted, and gives those as nodes. Integers have no gradient, nor have a mask of attention and parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graphrt.errors import GraphError
from graphrt.op import Backward, register_backward
from graphrt.ops.copy import concat, cont, dup, repeat
from graphrt.ops.cross_entropy import cross_entropy_loss_back
from graphrt.ops.elementwise import clamp, div, fill, mul, scale, sqr, sqrt, sub
from graphrt.ops.flash_attn_back import flash_attn_back, flash_attn_varlen_back
from graphrt.ops.flash_attn_ext import flash_attn_lse, is_scaled
from graphrt.ops.flash_attn_varlen import FlashAttnVarlenParams, flash_attn_varlen_lse
from graphrt.ops.key_panels import ROWS
from graphrt.ops.math_back import rms_norm_back, rope_back, silu_back, soft_max_back, unary_back
from graphrt.ops.movement_back import get_rows_back, repeat_back, set_rows_back, view_back
from graphrt.ops.norm import sum_rows
from graphrt.ops.out_prod import mul_mat_id_back, out_prod, out_prod_id
from graphrt.ops.rows import set_rows
from graphrt.ops.score import built_in, of_params
from graphrt.ops.unary import unary
from graphrt.ops.view import permute, reshape, transpose, view
from graphrt.tensor import Tensor

Found = dict[str, Tensor]
Wanted = frozenset[str]


def rule(*ops: str) -> Callable[[Backward], Backward]:
    """Declares the rule of some ops."""

    def declare(function: Backward) -> Backward:
        for op in ops:
            register_backward(op, function)
        return function

    return declare


def contiguous(t: Tensor) -> Tensor:
    return t if t.is_contiguous else cont(t)


def reshaped(t: Tensor, *ne: int) -> Tensor:
    return reshape(contiguous(t), *ne)


def summed_to(d: Tensor, small: Tensor) -> Tensor:
    """What was repeated over d's shape has the sum as its gradient."""
    return d if d.ne == small.ne else repeat_back(d, *small.ne)


def _refused(node: Tensor, name: str, why: str) -> GraphError:
    return GraphError(f"{node.op} of {node.name or 'a node'} gives no gradient of {name!r}: {why}")


# -- elementwise


@rule("ADD", "SUB")
def _add(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    found: Found = {"a": d} if "a" in wanted else {}
    if "b" in wanted:
        of_b = summed_to(d, node["b"])
        found["b"] = of_b if node.op == "ADD" else scale(of_b, -1.0)
    return found


@rule("MUL")
def _mul(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    found: Found = {"a": mul(d, node["b"])} if "a" in wanted else {}
    if "b" in wanted:
        found["b"] = summed_to(mul(d, node["a"]), node["b"])
    return found


@rule("DIV")
def _div(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    """b's is -d a / b^2, and the result is a / b."""
    of_a = div(d, node["b"])
    found: Found = {"a": of_a} if "a" in wanted else {}
    if "b" in wanted:
        found["b"] = scale(summed_to(mul(of_a, node), node["b"]), -1.0)
    return found


@rule("SCALE")
def _scale(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    return {"a": scale(d, node.params.scale)}


def _inside(d: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    """d where low < a < high, else 0."""
    if low > -3.4e38:
        d = unary_back(d, scale(a, 1.0, -low), "relu")
    if high < 3.4e38:
        d = unary_back(d, scale(a, -1.0, high), "relu")
    return d


@rule("CLAMP")
def _clamp(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    return {"a": _inside(d, node["a"], node.params.low, node.params.high)}


@rule("SQR")
def _sqr(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    return {"a": scale(mul(d, node["a"]), 2.0)}


@rule("SQRT")
def _sqrt(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    return {"a": scale(div(d, node), 0.5)}


@rule("FILL")
def _fill(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    return {}


def _of_unary(d: Tensor, a: Tensor, kind: str) -> Tensor:
    return silu_back(d, a) if kind == "silu" else unary_back(d, a, kind)


@rule("UNARY")
def _unary(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    return {"a": _of_unary(d, node["a"], node.params.kind)}


GATES = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}


@rule("GLU")
def _glu(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    gate, value = node["gate"], node["value"]
    if value is not None:
        return _of_glu(node, d, gate, value, wanted)
    n, source = node.ne[0], gate
    halves = [view(source, (n, *source.ne[1:]), source.nb[1:], offs) for offs in (0, n * source.nb[0])]
    first, second = halves[::-1] if node.params.swapped else halves
    found = _of_glu(node, d, cont(first), cont(second), frozenset({"gate", "value"}))
    pair = (found["gate"], found["value"])
    return {"gate": concat(*(pair[::-1] if node.params.swapped else pair), 0)}


def _of_glu(node: Tensor, d: Tensor, gate: Tensor, value: Tensor, wanted: Wanted) -> Found:
    """Of gate and value apart. swiglu_oai is x sigmoid(alpha x) (y + 1), x sigmoid(alpha x) = silu(alpha x) / alpha."""
    p, found = node.params, {}
    if p.kind != "swiglu_oai":
        if "gate" in wanted:
            found["gate"] = _of_unary(mul(d, value), gate, GATES[p.kind])
        if "value" in wanted:
            found["value"] = mul(d, unary(gate, GATES[p.kind]))
        return found
    x = scale(clamp(gate, -3.4e38, p.limit), p.alpha)
    y = scale(clamp(value, -p.limit, p.limit), 1.0, 1.0)
    if "gate" in wanted:
        of_x = silu_back(mul(d, y), x)
        found["gate"] = _inside(of_x, gate, -3.4e38, p.limit)
    if "value" in wanted:
        of_y = scale(mul(d, unary(x, "silu")), 1.0 / p.alpha)
        found["value"] = _inside(of_y, value, -p.limit, p.limit)
    return found


# -- rows


def _mean(a: Tensor) -> Tensor:
    return scale(sum_rows(a), 1.0 / a.ne[0])


@rule("NORM")
def _norm(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    """(d - mean(d) - y mean(d y)) / sqrt(variance + eps), with y the result."""
    centred = sub(node["a"], _mean(node["a"]))
    deviation = sqrt(scale(_mean(sqr(centred)), 1.0, node.params.eps))
    along = mul(node, _mean(mul(d, node)))
    return {"a": div(sub(sub(d, _mean(contiguous(d))), along), deviation)}


@rule("RMS_NORM")
def _rms_norm(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    return {"a": rms_norm_back(d, node["a"], node.params.eps)}


@rule("L2_NORM")
def _l2_norm(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    """(d - y sum(d y)) / length, with y the result; d / eps for a row shorter than eps."""
    eps = node.params.eps
    length = sqrt(sum_rows(sqr(node["a"])))
    shared = sum_rows(mul(d, node))
    if eps > 0:
        shared, length = _inside(shared, length, eps, 3.5e38), clamp(length, eps, 3.4e38)
    return {"a": div(sub(d, mul(node, shared)), length)}


@rule("SUM_ROWS")
def _sum_rows(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    return {"a": repeat(d, *node["a"].ne)}


@rule("ROPE")
def _rope(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    if "factors" in wanted:
        raise _refused(node, "factors", "they are constants of a model; leave them out of wrt")
    return {"a": rope_back(d, node["positions"], node.params, node["factors"])}


@rule("SOFT_MAX")
def _soft_max(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    found: Found = {}
    if "a" in wanted:
        found["a"] = soft_max_back(d, node, node.params.scale)
    if "mask" in wanted:
        mask = node["mask"]
        assert mask is not None
        if node.params.max_bias != 0 or mask.ne[1] != node.ne[1]:
            raise _refused(node, "mask", "it has one without ALiBi and with as many rows as the logits alone")
        found["mask"] = summed_to(soft_max_back(d, node), mask)
    if "sinks" in wanted:
        sinks = node["sinks"]
        assert sinks is not None
        left = scale(sum_rows(node), -1.0, 1.0)  # a sink's own weight is what the others leave
        each = mul(sum_rows(mul(d, node)), left)  # [1, n_q, n_head, n_seq]
        total = repeat_back(each, 1, 1, node.ne[2], 1)
        found["sinks"] = scale(reshaped(total, *sinks.ne), -1.0)
    return found


@rule("CROSS_ENTROPY_LOSS")
def _cross_entropy(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    if "labels" in wanted:
        raise _refused(node, "labels", "they are what is to be learned; leave them out of wrt")
    return {"logits": cross_entropy_loss_back(d, node["logits"], node["labels"])}


# -- movement


@rule("CONT", "DUP")
def _same(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    return {"a": d}


@rule("CPY")
def _cpy(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    """All of the target is overwritten: what it was does not matter."""
    return {"a": reshaped(d, *node["a"].ne)} if "a" in wanted else {}


@rule("CONCAT")
def _concat(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    d, dim = contiguous(d), node.params.dim
    starts = {"a": 0, "b": node["a"].ne[dim] * d.nb[dim]}
    return {name: view(d, node[name].ne, d.nb[1:], starts[name]) for name in wanted}


@rule("REPEAT")
def _repeat(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    return {"a": summed_to(d, node["a"])}


@rule("RESHAPE")
def _reshape(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    return {"a": reshaped(d, *node["a"].ne)}


@rule("TRANSPOSE")
def _transpose(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    return {"a": transpose(d)}


@rule("PERMUTE")
def _permute(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    axes = node.params.axes
    return {"a": permute(d, *[axes.index(i) for i in range(4)])}


@rule("VIEW")
def _view(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    a, p = node["a"], node.params
    if p.ne == a.ne and p.nb == a.nb[1:]:
        return {"a": d}
    return {"a": view_back(d, a, p)}


@rule("GET_ROWS")
def _get_rows(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    if node["table"].dtype.is_quantized:
        raise _refused(node, "table", f"a step can't change rows of {node['table'].dtype.name}; train plain ones")
    return {"table": get_rows_back(d, node["ids"], node["table"].ne[1])}


@rule("SET_ROWS")
def _set_rows(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    """Of the rows that were written, and of the target where it was not written over."""
    found: Found = {}
    if "rows" in wanted:
        found["rows"] = set_rows_back(d, node["ids"])
    if "target" in wanted:
        given = node["rows"]
        zeros = fill(cont(given), 0.0)
        found["target"] = set_rows(zeros, node["ids"], dup(d))
    return found


# -- products


@rule("MUL_MAT")
def _mul_mat(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    weights, x = node["weights"], node["x"]
    found: Found = {}
    if "x" in wanted:
        found["x"] = out_prod(weights, transpose(d))
    if "weights" in wanted:
        _only_plain(node, weights)
        found["weights"] = _over_shared(out_prod(x, d), weights)
    return found


def _only_plain(node: Tensor, weights: Tensor) -> None:
    if weights.dtype.is_quantized:
        why = f"they are {weights.dtype.name}, which a step can't change; train adapters beside them, or plain weights"
        raise _refused(node, "weights", why)


def _over_shared(each: Tensor, weights: Tensor) -> Tensor:
    """The sum over consecutive matrices that shared one of the weights, along dimension 2, then 3."""
    k, m, w2, w3 = weights.ne
    x2, x3 = each.ne[2:]
    if x2 != w2:
        each = repeat_back(reshape(each, k * m, x2 // w2, w2, x3), k * m, 1, w2, x3)
    if x3 != w3:
        size = k * m * w2
        each = repeat_back(reshape(each, size, x3 // w3, w3), size, 1, w3)
    return each if each.ne == weights.ne else reshape(each, *weights.ne)


@rule("MUL_MAT_ID")
def _mul_mat_id(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    weights, x, ids = node["weights"], node["x"], node["ids"]
    found: Found = {}
    if "x" in wanted:
        found["x"] = summed_to(mul_mat_id_back(weights, d, ids), x)
    if "weights" in wanted:
        _only_plain(node, weights)
        found["weights"] = out_prod_id(x, d, ids, weights.ne[2])
    return found


@rule("ADD_ID")
def _add_id(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    found: Found = {"a": d} if "a" in wanted else {}
    if "bias" in wanted:
        n = node.ne[1] * node.ne[2]
        ids = reshaped(node["ids"], n)
        found["bias"] = get_rows_back(reshaped(d, node.ne[0], n), ids, node["bias"].ne[1])
    return found


# -- attention


def _no_mask(node: Tensor, wanted: Wanted) -> None:
    if "mask" in wanted:
        raise _refused(node, "mask", "a mask is a constant; what is learned is added by attn_bias")
    if node.params.k_layout != ROWS:
        raise _refused(node, "k", "keys in panels are of a cache, which is not trained; give k in rows")


@rule("FLASH_ATTN_EXT")
def _flash_attn(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    _no_mask(node, wanted)
    if is_scaled(node):
        raise _refused(
            node, "q", "scales of k, v and the result are of 8-bit caches, which are not trained; leave them"
        )
    p = node.params
    beside: dict[str, Any] = {name: node[name] for name in ("mask", "sinks", "attn_bias")}
    q, k, v = node["q"], node["k"], node["v"]
    lse = flash_attn_lse(q, k, beside["mask"], p.scale, sinks=beside["sinks"], max_bias=p.max_bias, softcap=p.softcap,
                         attn_bias=beside["attn_bias"], score=of_params(p.score, p.score_numbers),
                         prec=p.prec)  # fmt: skip
    d = contiguous(d)
    return {of: flash_attn_back(of, d, q, k, v, node, lse, p, **beside) for of in sorted(wanted)}


@rule("FLASH_ATTN_LSE")
def _flash_attn_of_lse(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    """As of an attention whose result does not matter; its values, which don't either, are k."""
    _no_mask(node, wanted)
    q, k = node["q"], node["k"]
    beside: dict[str, Any] = {name: node[name] for name in ("mask", "sinks", "attn_bias")}
    none = fill(cont(permute(q, 0, 2, 1, 3)), 0.0)
    p = node.params
    return {
        of: flash_attn_back(of, none, q, k, k, none, node, p, d_lse=contiguous(d), **beside) for of in sorted(wanted)
    }  # fmt: skip


def _packed(node: Tensor) -> Tensor:
    starts = node["k_starts"]
    if starts is None:
        raise _refused(node, "k", "pages are of a cache, which is not trained; give packed keys with k_starts")
    return starts


def _unscored(node: Tensor) -> FlashAttnVarlenParams:
    p: FlashAttnVarlenParams = built_in(node.params)
    if node["mask"] is not None:
        why = "of packed sequences with an explicit mask there is none; run them one by one with flash_attn_ext()"
        raise _refused(node, "q", why)
    if p.score:
        why = "of packed sequences score functions have none but the softcap; run them one by one with flash_attn_ext()"
        raise _refused(node, "q", why)
    return p


@rule("FLASH_ATTN_VARLEN")
def _flash_attn_varlen(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    p, sinks, starts, d = _unscored(node), node["sinks"], _packed(node), contiguous(d)
    q, k, v, q_starts = (node[name] for name in ("q", "k", "v", "q_starts"))
    lse = flash_attn_varlen_lse(q, k, q_starts, p.scale, k_starts=starts, sinks=sinks, max_bias=p.max_bias,
                                softcap=p.softcap, causal=p.causal, window=p.window)  # fmt: skip
    return {
        of: flash_attn_varlen_back(of, d, q, k, v, node, lse, q_starts, starts, p, sinks=sinks)
        for of in sorted(wanted)
    }  # fmt: skip


@rule("FLASH_ATTN_VARLEN_LSE")
def _flash_attn_varlen_of_lse(node: Tensor, d: Tensor, wanted: Wanted) -> Mapping[str, Tensor]:
    sinks, starts, d = node["sinks"], _packed(node), contiguous(d)
    q, k, q_starts = (node[name] for name in ("q", "k", "q_starts"))
    none = fill(cont(permute(q, 0, 2, 1, 3)), 0.0)
    return {
        of: flash_attn_varlen_back(
            of, none, q, k, k, none, node, q_starts, starts, _unscored(node), sinks=sinks, d_lse=d
        ) for of in sorted(wanted)
    }  # fmt: skip


# -- what has none

for _op in ("ARGMAX", "ARGSORT", "TOP_K", "SAMPLE", "SAMPLE_EACH"):
    register_backward(_op, f"{_op} yields integers, which have no gradient")
register_backward("PENALIZE", "PENALIZE changes logits that a token is chosen by, which has no gradient")
register_backward("KQ_MASK", "KQ_MASK is made of integers, which have no gradient")
for _op in (
    "SILU_BACK", "UNARY_BACK", "RMS_NORM_BACK", "ROPE_BACK", "SOFT_MAX_BACK", "REPEAT_BACK", "GET_ROWS_BACK",
    "SET_ROWS_BACK", "VIEW_BACK", "OUT_PROD", "MUL_MAT_ID_BACK", "OUT_PROD_ID", "CROSS_ENTROPY_LOSS_BACK",
    "FLASH_ATTN_BACK", "FLASH_ATTN_VARLEN_BACK",
):  # fmt: skip
    register_backward(_op, f"{_op} is a gradient itself, and second ones are not there")
for _op in ("ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "SEND", "RECV"):
    register_backward(_op, f"{_op} is what ranks meet at, and training over several ranks is not there")
for _op in ("OPT_STEP_SGD", "OPT_STEP_ADAMW"):
    register_backward(_op, f"{_op} is an optimizer's step, through which nothing is differentiated")
