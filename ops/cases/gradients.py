"""The cases of `graphrt test grad`, set "grad": small nodes of every op that has a gradient.

Values are such that no function is tried at a corner (relu at 0, a clamp at its limits), where finite differences see
half of either side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from graphrt import ops
from graphrt.op import build, op_spec
from graphrt.ops.cases.mul_mat_id import Choice
from graphrt.ops.cases.scores import SCORES
from graphrt.ops.rope import RopeParams
from graphrt.ops.unary import GLU_KINDS, UNARY_KINDS
from graphrt.tensor import Tensor
from graphrt.testing import Case, Given, Inputs, Normal, Positions, Rows, Uniform, register_cases
from graphrt.testing.masks import CausalMask, MaskValues

#: By a name, what builds a node from inputs.
Named = dict[str, Any]

AWAY = Given((0.31, -1.7, 2.3, -0.45, 0.9, -2.9, 1.4, -0.12, 7.6, -7.7, 0.55))


def _f32(i: Inputs, name: str, *ne: int, init: Any = None) -> Tensor:
    return i(name, "f32", ne, init)


def _turned(i: Inputs, name: str, n: int, m: int) -> Tensor:
    return ops.transpose(_f32(i, name, m, n))


def _binary(op: str) -> Named:
    def make(i: Inputs, ne: tuple[int, ...], b: tuple[int, ...], kind: str = "f32") -> Tensor:
        divisor = Uniform(0.5, 2.0) if op == "DIV" else None
        return build(op_spec(op), _f32(i, "a", *ne), i("b", kind, b, divisor))

    shapes = {"same": ((5, 3), (5, 3)), "row": ((5, 3, 2), (5,)), "repeated": ((6, 4, 2, 2), (3, 2, 1, 2))}
    found: Named = {name: partial(make, ne=ne, b=b) for name, (ne, b) in shapes.items()}
    found["f16"] = partial(make, ne=(5, 3), b=(5, 1), kind="f16")
    if op in ("ADD", "MUL"):  # of the others nothing is left
        found["twice"] = lambda i: build(op_spec(op), (a := _f32(i, "a", 5, 2, init=Uniform(0.5, 2.0))), a)
    found["turned"] = lambda i: build(op_spec(op), _turned(i, "a", 4, 3), _f32(i, "b", 4, 3, init=Uniform(0.5, 2.0)))
    return found


def _glus() -> Named:
    found: Named = {}
    for kind in GLU_KINDS:
        found[kind] = lambda i, kind=kind: ops.glu(_f32(i, "g", 11, 2, init=AWAY), _f32(i, "v", 11, 2), kind)
        for swapped in (False, True):
            found[f"{kind} in one, {swapped}"] = lambda i, kind=kind, swapped=swapped: ops.glu(
                _f32(i, "g", 22, 2, init=AWAY), None, kind, swapped=swapped
            )
    found["oai, clamped value"] = lambda i: ops.glu(
        _f32(i, "g", 11, 2, init=AWAY), _f32(i, "v", 11, 2, init=AWAY), "swiglu_oai", alpha=1.3, limit=1.1
    )
    return found


def _views() -> dict[str, Named]:
    def gapped(i: Inputs) -> Tensor:
        return ops.view(a := _f32(i, "a", 8, 5, 2), (3, 4, 2), a.nb[1:3], offs=2 * 4 + a.nb[1])

    def of_turned(i: Inputs) -> Tensor:
        turned = ops.permute(_f32(i, "a", 6, 2, 5), 0, 2, 1, 3)  # [6, 5, 2]
        return ops.view(turned, (4, 3, 2), turned.nb[1:3], offs=turned.nb[1])

    def overlapping(i: Inputs) -> Tensor:
        return ops.view(_f32(i, "a", 12), (4, 5), (8,))

    def of_f16(i: Inputs) -> Tensor:
        return ops.mul(_f32(i, "b", 3, 4), ops.view(a := i("a", "f16", (8, 5)), (3, 4), a.nb[1:2], offs=4))

    return {
        "VIEW": {"gapped": gapped, "of turned": of_turned, "overlapping": overlapping, "f16": of_f16,
                 "all": lambda i: ops.view(_f32(i, "a", 4, 3), (4, 3))},  # fmt: skip
        "RESHAPE": {"": lambda i: ops.reshape(_f32(i, "a", 4, 6), 8, 3)},
        "PERMUTE": {str(p): lambda i, p=p: ops.permute(_f32(i, "a", 2, 3, 4, 5), *p)
                    for p in ((0, 2, 1, 3), (2, 0, 3, 1))},  # fmt: skip
        "TRANSPOSE": {"": lambda i: ops.transpose(_f32(i, "a", 4, 3, 2))},
        "CONT": {"turned": lambda i: ops.cont(_turned(i, "a", 4, 3))},
        "DUP": {"": lambda i: ops.dup(_f32(i, "a", 4, 3))},
        "CPY": {"reshaped": lambda i: ops.cpy(_turned(i, "a", 4, 3), _constant(i, "target", "f32", (6, 2), None))},
        "CONCAT": {f"dim {dim}": lambda i, dim=dim: ops.concat(
            _f32(i, "a", 3, 2, 2, 2), _f32(i, "b", *[5 if k == dim else n for k, n in enumerate((3, 2, 2, 2))]), dim)
            for dim in range(4)},  # fmt: skip
        "REPEAT": {"": lambda i: ops.repeat(_f32(i, "a", 3, 1, 2), 6, 4, 2, 3)},
        "GET_ROWS": {
            "f32": lambda i: ops.get_rows(_f32(i, "a", 5, 4), i("ids", "i32", (7,), Rows(4))),
            "f16, batches": lambda i: ops.get_rows(i("a", "f16", (5, 4, 2, 3)), i("ids", "i32", (6, 2, 3), Rows(4))),
        },
        "SET_ROWS": {
            "i64": lambda i: ops.set_rows(_f32(i, "rows", 5, 3), i("ids", "i64", (3,), Rows(6, True)),
                                          _f32(i, "target", 5, 6)),
            "batches": lambda i: ops.set_rows(_f32(i, "rows", 5, 3, 4, 2), i("ids", "i32", (3, 2), Rows(6, True)),
                                              _f32(i, "target", 5, 6, 4, 2)),
        },
    }  # fmt: skip


def _rows() -> dict[str, Named]:
    found: dict[str, Named] = {}
    for op in ("NORM", "RMS_NORM", "L2_NORM"):
        make = getattr(ops, op.lower())
        found[op] = {
            "": lambda i, make=make: make(_f32(i, "a", 7, 3, 2), 1e-5),
            "eps counts": lambda i, make=make: make(_f32(i, "a", 7, 3, init=Uniform(0.1, 0.3)), 0.2),
            "turned": lambda i, make=make: make(_turned(i, "a", 6, 4), 1e-6),
        }
    found["L2_NORM"]["shorter"] = lambda i: ops.l2_norm(_f32(i, "a", 7, 3), 9.0)
    found["SUM_ROWS"] = {"": lambda i: ops.sum_rows(_f32(i, "a", 7, 3, 2))}
    yarn = RopeParams(8, "neox", n_ctx_orig=16, ext_factor=0.7, attn_factor=1.3, freq_scale=0.5)
    for name, p in {"normal": RopeParams(8), "neox": RopeParams(6, "neox"), "yarn": yarn}.items():
        found.setdefault("ROPE", {})[name] = lambda i, p=p: ops.rope(
            _f32(i, "a", 8, 2, 3), i("pos", "i32", (3,), Positions(50)), p
        )
    found["ROPE"]["factors"] = lambda i: ops.rope(
        _f32(i, "a", 8, 2, 3), i("pos", "i32", (3,), Positions(50)), RopeParams(8),
        _constant(i, "factors", "f32", (4,), Uniform(1.0, 3.0)),
    )  # fmt: skip
    mask, hidden = (6, 3, 2), MaskValues(0.3)
    found["SOFT_MAX"] = {
        "plain": lambda i: ops.soft_max(_f32(i, "a", 6, 3), scale=1.7),
        "mask": lambda i: ops.soft_max(_f32(i, "a", *mask), _constant(i, "mask", "f16", (6, 4), hidden), scale=0.6),
        "learned mask": lambda i: ops.soft_max(_f32(i, "a", *mask), _f32(i, "mask", 6, 3), scale=0.6),
        "alibi": lambda i: ops.soft_max(_f32(i, "a", *mask), _constant(i, "mask", "f16", (6, 3), hidden), max_bias=8.0),
        "sinks": lambda i: ops.soft_max(_f32(i, "a", 6, 3, 2, 2), None, _f32(i, "sinks", 2), scale=1.2),
    }
    labels = Uniform(0.1, 0.9)
    found["CROSS_ENTROPY_LOSS"] = {
        "": lambda i: ops.cross_entropy_loss(_f32(i, "a", 6, 3, 2), _constant(i, "labels", "f32", (6, 3, 2), labels))
    }
    return found


def _constant(i: Inputs, name: str, dt: str, ne: tuple[int, ...], init: Any) -> Tensor:
    """An input that has no gradient: check_case() leaves those out whose name says so."""
    return i(f"constant {name}", dt, ne, init)


def _products() -> dict[str, Named]:
    def mul_mat(i: Inputs, kind: str, w: tuple[int, ...], x: tuple[int, ...]) -> Tensor:
        return ops.mul_mat(i("w", kind, w), _f32(i, "x", *x))

    def by_id(i: Inputs, kind: str, n_x: int, how: str = "any") -> Tensor:
        ids = i("ids", "i32", (2, 5), Choice(4, how))
        return ops.mul_mat_id(i("w", kind, (32, 3, 4)), _f32(i, "x", 32, n_x, 5), ids)

    def add_id(i: Inputs, turned: bool) -> Tensor:
        ids = i("ids", "i32", (5, 2) if turned else (2, 5), Choice(4, "any"))
        ids = ops.permute(ids, 1, 0, 2, 3) if turned else ids
        return ops.add_id(_f32(i, "a", 3, 2, 5), _f32(i, "bias", 3, 4), ids)

    shapes = {"plain": ((5, 4), (5, 3)), "batches": ((5, 4, 2, 2), (5, 3, 4, 6)), "one": ((5, 4), (5, 1, 3, 2))}
    products: Named = {name: partial(mul_mat, kind="f32", w=w, x=x) for name, (w, x) in shapes.items()}
    products |= {kind: partial(mul_mat, kind=kind, w=(32, 4), x=(32, 3)) for kind in ("f16", "bf16", "q8_0", "q4_0")}
    products["turned"] = lambda i: ops.mul_mat(_turned(i, "w", 5, 4), _turned(i, "x", 5, 3))
    experts: Named = {f"{kind}, {n} a token": partial(by_id, kind=kind, n_x=n)
                      for kind in ("f32", "q8_0") for n in (1, 2)}  # fmt: skip
    experts["few"] = partial(by_id, kind="f32", n_x=1, how="few")
    return {
        "MUL_MAT": products,
        "MUL_MAT_ID": experts,
        "ADD_ID": {str(t): partial(add_id, turned=t) for t in (False, True)},
    }


#: n_q, n_kv, n_head, n_head_kv, n_seq, D_k, D_v and what differs.
_ATTENTION: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((3, 5, 2, 2, 1, 4, 4), {}),
    "grouped": ((3, 5, 6, 2, 2, 4, 3), {}),
    "one kv head": ((2, 5, 7, 1, 1, 3, 5), {"mask": (1, 1), "kind": "f16"}),
    "causal": ((4, 4, 2, 1, 1, 4, 4), {"mask": (1, 1), "causal": CausalMask()}),
    "window": ((6, 6, 2, 1, 1, 4, 4), {"mask": (1, 1), "causal": CausalMask(window=3)}),
    "mask a head": ((3, 5, 4, 2, 2, 4, 4), {"mask": (4, 2)}),
    "softcap": ((3, 5, 2, 1, 1, 4, 4), {"softcap": 0.8, "mask": (1, 1)}),
    "alibi": ((3, 5, 6, 2, 1, 4, 4), {"max_bias": 8.0, "mask": (1, 1)}),
    "sinks": ((3, 5, 4, 2, 2, 4, 4), {"sinks": True, "mask": (2, 1)}),
    "bias": ((3, 5, 4, 2, 2, 4, 4), {"bias": (1, 1)}),
    "bias a head": ((3, 5, 4, 2, 2, 4, 4), {"bias": (4, 2), "mask": (1, 1), "max_bias": 4.0, "softcap": 1.5}),
    "bias some heads": ((3, 5, 4, 2, 2, 4, 4), {"bias": (2, 1), "sinks": True}),
    "score": ((3, 5, 4, 2, 2, 4, 4), {"score": SCORES["smooth"](4, 5), "softcap": 2.0, "mask": (1, 1)}),
    "score by position": ((3, 5, 4, 2, 2, 4, 4), {"score": SCORES["gate"](4, 5) + SCORES["relative"](4, 5)}),
    "dropout": ((3, 5, 4, 2, 2, 4, 4), {"dropout_p": 0.4, "seed": 2**40 + 5, "offset": 3}),
    "all of it": ((3, 6, 4, 2, 2, 4, 3), {"dropout_p": 0.25, "seed": 7, "softcap": 2.0, "bias": (2, 2), "sinks": True,
                                          "mask": (1, 2), "max_bias": 3.0}),
}  # fmt: skip


def _attention(i: Inputs, dims: tuple[int, ...], given: dict[str, Any], lse: bool = False) -> Tensor:
    n_q, n_kv, n_head, n_head_kv, n_seq, d_k, d_v = dims
    rest, kind = dict(given), given.get("kind", "f32")
    rest.pop("kind", None)
    q = _f32(i, "q", d_k, n_q, n_head, n_seq, init=Normal(1.0))
    k = i("k", kind, (d_k, n_kv, n_head_kv, n_seq), Normal(1.0))
    init, of_mask = rest.pop("causal", MaskValues(0.3)), rest.pop("mask", None)
    mask = None if of_mask is None else _constant(i, "mask", "f16", (n_kv, n_q, *of_mask), init)
    if rest.pop("sinks", False):
        rest["sinks"] = _f32(i, "sinks", n_head)
    if (dims_b := rest.pop("bias", None)) is not None:
        rest["attn_bias"] = _f32(i, "bias", n_kv, n_q, *dims_b)
    if lse:
        rest = {name: value for name, value in rest.items() if name not in ("dropout_p", "seed", "offset")}
        return ops.flash_attn_lse(q, k, mask, 0.7, **rest)
    return ops.flash_attn_ext(q, k, i("v", kind, (d_v, n_kv, n_head_kv, n_seq)), mask, 0.7, **rest)


#: Starts of queries and of keys, and what differs. One sequence is empty, one has no keys, two queries are nobody's.
_VARLEN: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False, "softcap": 1.3},
    "window": {"window": 2, "max_bias": 8.0},
    "sinks": {"sinks": True},
}


def _varlen(i: Inputs, given: dict[str, Any], lse: bool = False) -> Tensor:
    rest = dict(given)
    q, k = _f32(i, "q", 4, 10, 4, init=Normal(1.0)), _f32(i, "k", 4, 9, 2, init=Normal(1.0))
    starts = {"q_starts": i("q_starts", "i32", (5,), Given((0, 3, 3, 4, 8)))}
    k_starts = i("k_starts", "i32", (5,), Given((0, 4, 4, 5, 9)))
    if rest.pop("sinks", False):
        rest["sinks"] = _f32(i, "sinks", 4)
    if lse:
        used = ops.flash_attn_varlen_lse(q, k, starts["q_starts"], 0.7, k_starts=k_starts, **rest)
        return ops.cont(ops.view(used, (4, 8), used.nb[1:2]))  # -inf of nobody's queries is no number
    return ops.flash_attn_varlen(q, k, _f32(i, "v", 3, 9, 2), starts["q_starts"], 0.7, k_starts=k_starts, **rest)


def _clamped(i: Inputs, low: float, high: float) -> Tensor:
    return ops.clamp(_f32(i, "a", 11, 2, init=AWAY), low, high)


def _all() -> dict[str, Named]:
    limits = ((-1.0, 1.0), (-math.inf, 0.5), (0.0, math.inf))
    clamped: Named = {f"{low}, {high}": partial(_clamped, low=low, high=high) for low, high in limits}
    maps: dict[str, Named] = {
        "SCALE": {"": lambda i: ops.scale(_f32(i, "a", 5, 3), -1.7, 0.4)},
        "CLAMP": clamped,
        "SQR": {"": lambda i: ops.sqr(_f32(i, "a", 5, 3))},
        "SQRT": {"": lambda i: ops.sqrt(_f32(i, "a", 5, 3, init=Uniform(0.5, 3.0)))},
        "FILL": {"": lambda i: ops.add(_f32(i, "b", 5, 3), ops.fill(_constant(i, "a", "f32", (5, 3), None), 2.0))},
        "UNARY": {k: lambda i, k=k: ops.unary(_f32(i, "a", 11, 2, init=AWAY), k) for k in UNARY_KINDS},
        "GLU": _glus(),
    }
    attention: dict[str, Named] = {
        "FLASH_ATTN_EXT": {name: partial(_attention, dims=d, given=g) for name, (d, g) in _ATTENTION.items()},
        "FLASH_ATTN_LSE": {
            name: partial(_attention, dims=d, given=g, lse=True)
            for name, (d, g) in _ATTENTION.items() if "dropout" not in name and g.get("mask") in (None, (1, 1))
        },
        "FLASH_ATTN_VARLEN": {name: partial(_varlen, given=g) for name, g in _VARLEN.items()},
        "FLASH_ATTN_VARLEN_LSE": {"sinks": partial(_varlen, given=_VARLEN["sinks"], lse=True)},
    }  # fmt: skip
    binary = {op: _binary(op) for op in ("ADD", "SUB", "MUL", "DIV")}
    return {**binary, **maps, **_rows(), **_views(), **_products(), **attention}


def _cases(op: str, named: Named) -> Iterator[Case]:
    yield from (Case(op, {"grad": name or "plain"}, make) for name, make in named.items())


for _op, _named in _all().items():
    register_cases(_op, grad=partial(_cases, _op, _named))
