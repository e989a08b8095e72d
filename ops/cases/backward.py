"""Conformance cases of the gradients' ops but attention's: types, tails, gaps, batches, ids twice or never."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from graphrt import ops
from graphrt.ops.cases.gaps import gapped
from graphrt.ops.cases.mul_mat_id import Choice
from graphrt.ops.rope import RopeParams
from graphrt.ops.unary import UNARY_KINDS
from graphrt.ops.view import ViewParams
from graphrt.tensor import Tensor, new_tensor
from graphrt.testing import Case, Given, Init, Inputs, Normal, Positions, Rows, Uniform, register_cases

#: What varies at a point, and what builds its node from inputs.
Points = Iterator[tuple[dict[str, object], Any]]


def _f32(i: Inputs, name: str, ne: tuple[int, ...], gaps: bool = False, init: Init | None = None) -> Tensor:
    return gapped(i, name, "f32", ne, init) if gaps else i(name, "f32", ne, init)


# -- movement

_REPEATED = (((6, 4, 2, 2), (3, 2, 1, 2)), ((33, 5, 1, 1), (33, 1, 1, 1)), ((5, 1, 1, 1), (1, 1, 1, 1)),
             ((1025, 3, 2, 1), (1025, 1, 1, 1)), ((8, 1000, 1, 1), (8, 1, 1, 1)), ((7, 3, 2, 2), (7, 3, 2, 2)),
             ((64, 6, 4, 3), (32, 3, 2, 1)))  # fmt: skip


def _repeat_back() -> Points:
    for big, small in _REPEATED:
        for gaps in (False, True):
            yield ({"ne": big, "small": small, "gaps": gaps},
                   lambda i, b=big, s=small, g=gaps: ops.repeat_back(_f32(i, "d", b, g), *s))  # fmt: skip


def _get_rows_back() -> Points:
    one = (1, 1)
    for n, n_rows, n_ids, batch in ((33, 9, 5, one), (33, 3, 70, one), (1025, 9, 5, (3, 2)), (1, 700, 300, one),
                                    (64, 2, 1, (2, 1)), (128, 1000, 40, one)):  # fmt: skip
        for gaps in (False, True):
            yield ({"n": n, "n_rows": n_rows, "n_ids": n_ids, "batch": batch, "gaps": gaps},
                   lambda i, n=n, r=n_rows, k=n_ids, b=batch, g=gaps: ops.get_rows_back(
                       _f32(i, "d", (n, k, *b), g), i("ids", "i32", (k, *b), Rows(r + (r > 2))), r))  # fmt: skip


def _set_rows_back() -> Points:
    for kind, batch, ids_batch in (("i64", (1, 1), (1, 1)), ("i32", (3, 2), (3, 2)), ("i64", (4, 2), (2, 1))):
        for n, gaps in ((33, False), (1025, True), (1, False)):
            yield ({"n": n, "ids": kind, "batch": batch, "ids_batch": ids_batch, "gaps": gaps},
                   lambda i, n=n, k=kind, b=batch, e=ids_batch, g=gaps: ops.set_rows_back(
                       _f32(i, "d", (n, 9, *b), g), i("ids", k, (5, *e), Rows(10, True))))  # fmt: skip


def _view_back() -> Points:
    def of(i: Inputs, dt: str, ne: tuple[int, ...], how: tuple[int, ...], nb: tuple[int, ...], offs: int) -> Tensor:
        a = new_tensor(dt, *ne)  # what is looked at need not be there
        looked = ops.view(a, how, nb or a.nb[1 : len(how)], offs)
        assert isinstance(looked.params, ViewParams)
        return ops.view_back(i("d", "f32", looked.ne), a, looked.params)

    def of_turned(i: Inputs) -> Tensor:
        turned = ops.permute(new_tensor("f32", 6, 2, 5), 0, 2, 1, 3)
        looked = ops.view(turned, (4, 3, 2), turned.nb[1:3], offs=turned.nb[1])
        return ops.view_back(i("d", "f32", looked.ne), turned, looked.params)

    points: dict[str, tuple[Any, ...]] = {
        "columns": ("f32", (40, 5, 2), (33, 5, 2), (), 12), "rows": ("f32", (8, 9), (8, 3), (), 64),
        "overlapping": ("f32", (12,), (4, 5), (8,), 0), "f16": ("f16", (40, 5), (33, 4), (), 6),
        "every other": ("f32", (65, 8), (65, 4), (520,), 260), "large": ("f32", (1030, 7), (1025, 7), (), 8),
    }  # fmt: skip
    for name, given in points.items():
        yield {"view": name}, lambda i, given=given: of(i, *given)
    yield {"view": "of turned"}, of_turned


# -- elements and rows

_SHAPES = ((33, 5, 2, 1), (1, 7, 1, 1), (1025, 2, 1, 1), (64, 4, 3, 2))


def _unary_back(kind: str) -> Points:
    wide = Given((-700.0, -90.0, -20.0, -1e-3, 0.0, 1e-3, 20.0, 80.0))
    for dt in ("f32", "f16"):
        for ne in _SHAPES:
            for values, init in (("spread", Normal(3.0)), ("wide", wide)):
                if kind == "exp" and values == "wide":
                    continue
                yield {"kind": kind, "type": dt, "ne": ne, "values": values}, partial(_of_unary, kind, dt, ne, init)
    yield (
        {"kind": kind, "type": "f32", "ne": (33, 5, 2, 1), "gaps": True},
        partial(_of_unary, kind, "", (33, 5, 2), None),
    )


def _of_unary(kind: str, dt: str, ne: tuple[int, ...], init: Init | None, i: Inputs) -> Tensor:
    d = _f32(i, "d", ne, not dt)
    a = i("a", dt, ne, init) if dt else gapped(i, "a", "f32", ne)
    return ops.silu_back(d, a) if kind == "silu" else ops.unary_back(d, a, kind)


def _unary_kinds() -> Points:
    for kind in UNARY_KINDS:
        if kind != "silu":
            yield from _unary_back(kind)


def _rms_norm_back() -> Points:
    inits: dict[str, Init] = {"spread": Uniform(-1, 2), "tiny": Normal(1e-4), "huge": Normal(1e6)}
    # The norm of a row of one element is its sign but for eps: where the square is much larger than eps, float32 has no
    # digit of the gradient.
    one: dict[str, Init] = {"small": Normal(3e-3)}
    for ne in (*_SHAPES, (8193, 2, 1, 1), (2, 3, 1, 1)):
        for values, init in (one if ne[0] == 1 else inits).items():
            yield {"ne": ne, "eps": 1e-5, "values": values}, lambda i, ne=ne, init=init: ops.rms_norm_back(
                i("d", "f32", ne), i("a", "f32", ne, init), 1e-5)  # fmt: skip
    for eps in (0.0, 0.1):
        yield {"ne": (65, 5, 4, 1), "eps": eps, "gaps": True}, lambda i, eps=eps: ops.rms_norm_back(
            _f32(i, "d", (65, 5, 4), True), _f32(i, "a", (65, 5, 4), True), eps)  # fmt: skip


def _rope_back() -> Points:
    yarn = RopeParams(64, "neox", n_ctx_orig=4096, ext_factor=1.0, attn_factor=0.9, freq_scale=0.25)
    for params in (RopeParams(64), RopeParams(64, "neox"), RopeParams(40, "neox", freq_base=1e6), yarn):
        for factors in (False, True):
            for gaps in (False, True):
                yield ({"params": params, "factors": factors, "gaps": gaps},
                       partial(_of_rope, params, factors, gaps))  # fmt: skip


def _of_rope(params: RopeParams, factors: bool, gaps: bool, i: Inputs) -> Tensor:
    given = i("factors", "f32", (params.n_dims // 2,), Uniform(0.5, 4.0)) if factors else None
    d = _f32(i, "d", (64, 3, 5, 2), gaps)
    return ops.rope_back(d, i("positions", "i32", (5,), Positions(4000)), params, given)


def _soft_max_back() -> Points:
    for ne in ((33, 5, 2, 2), (1, 3, 1, 1), (1025, 2, 1, 1), (8193, 1, 1, 1)):
        for s in (1.0, 0.125):
            for gaps in (False, True):
                yield {"ne": ne, "scale": s, "gaps": gaps}, lambda i, ne=ne, s=s, g=gaps: ops.soft_max_back(
                    _f32(i, "d", ne, g), _f32(i, "weights", ne, g, Uniform(0, 2 / ne[0])), s)  # fmt: skip


# -- products


def _out_prod() -> Points:
    kinds = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_K", "q6_K", "mxfp4")
    for kind in kinds:
        for m, rows, p in ((256, 5, 3), (256, 33, 1), (256, 7, 70)):
            yield {"type": kind, "m": m, "rows": rows, "p": p}, partial(_of_out_prod, kind, (m, rows), (p, rows), False)
    # the last three have one short side each: columns, what is added up over, rows
    for a, b in (((5, 4, 2, 2), (3, 4, 4, 6)), ((65, 130), (129, 130)), ((1, 1), (1, 1)), ((17, 1000), (9, 1000)),
                 ((16, 300), (265, 300)), ((258, 16), (300, 16)), ((300, 700), (5, 700))):  # fmt: skip
        for turned in (False, True):
            yield {"a": a, "b": b, "turned": turned}, partial(_of_out_prod, "f32", a, b, turned)


def _of_out_prod(kind: str, a: tuple[int, ...], b: tuple[int, ...], turned: bool, i: Inputs) -> Tensor:
    of_a = gapped(i, "a", kind, a) if turned else i("a", kind, a)
    of_b = ops.transpose(i("b", "f32", (b[1], b[0], *b[2:]))) if turned else i("b", "f32", b)
    return ops.out_prod(of_a, of_b)


_CHOICES = ("topk", "any", "twice", "few", "one", "outside")


def _mul_mat_id_back() -> Points:
    for kind in ("f32", "f16", "q8_0", "q4_K"):
        for how in _CHOICES if kind == "f32" else ("any",):
            for tokens in (3, 40):
                yield {"type": kind, "choice": how, "tokens": tokens}, partial(_by_id, kind, how, tokens, 0)


def _out_prod_id() -> Points:
    for per_slot in (False, True):
        for how in _CHOICES:
            for tokens in (3, 40):
                yield {"per_slot": per_slot, "choice": how, "tokens": tokens}, partial(
                    _by_id, "", how, tokens, 2 if per_slot else 1)  # fmt: skip


def _by_id(kind: str, how: str, tokens: int, n_x: int, i: Inputs) -> Tensor:
    d, ids = i("d", "f32", (7, 2, tokens)), i("ids", "i32", (2, tokens), Choice(5, how))
    if kind:
        return ops.mul_mat_id_back(i("experts", kind, (256, 7, 5)), d, ids)
    return ops.out_prod_id(i("x", "f32", (65, n_x, tokens)), d, ids, 5)


# -- losses and steps


def _labelled(i: Inputs, ne: tuple[int, ...], gaps: bool, labels: str) -> tuple[Tensor, Tensor]:
    inits: dict[str, Init] = {"soft": Uniform(0, 2 / ne[0]), "hard": Given((0.0, 0.0, 1.0)), "none": Given((0.0,))}
    return _f32(i, "logits", ne, gaps, Normal(4.0)), _f32(i, "labels", ne, gaps, inits[labels])


def _cross_entropy(back: bool) -> Points:
    for ne in ((33, 5, 2, 1), (1025, 3, 1, 1), (2, 2, 2, 2), (8193, 4, 1, 1)):
        for labels in ("soft", "hard", "none"):
            for gaps in (False, True):
                yield {"ne": ne, "labels": labels, "gaps": gaps}, partial(_of_loss, ne, labels, gaps, back)


def _of_loss(ne: tuple[int, ...], labels: str, gaps: bool, back: bool, i: Inputs) -> Tensor:
    logits, wanted = _labelled(i, ne, gaps, labels)
    if back:
        return ops.cross_entropy_loss_back(i("d", "f32", (1,), Uniform(0.5, 2.0)), logits, wanted)
    return ops.cross_entropy_loss(logits, wanted)


def _steps(adam: bool) -> Points:
    for ne in _SHAPES:
        for wd in (0.0, 0.1):
            for alpha in (0.01, 0.5):
                yield {"ne": ne, "wd": wd, "alpha": alpha}, partial(_of_step, adam, ne, wd, alpha)


def _of_step(adam: bool, ne: tuple[int, ...], wd: float, alpha: float, i: Inputs) -> Tensor:
    a = i("a", "f32", ne)
    if adam:
        hyper = i("hyper", "f32", (5,), Given((alpha, 1e-3, wd, 1.7, 30.0)))
        return ops.opt_step_adamw(a, i("m", "f32", ne), i("v", "f32", ne, Uniform(0.0, 0.1)), hyper)
    return ops.opt_step_sgd(a, i("grad", "f32", ne), i("hyper", "f32", (2,), Given((alpha, wd))))


_POINTS: dict[str, Callable[[], Points]] = {
    "REPEAT_BACK": _repeat_back, "GET_ROWS_BACK": _get_rows_back, "SET_ROWS_BACK": _set_rows_back,
    "VIEW_BACK": _view_back, "SILU_BACK": partial(_unary_back, "silu"), "UNARY_BACK": _unary_kinds,
    "RMS_NORM_BACK": _rms_norm_back, "ROPE_BACK": _rope_back, "SOFT_MAX_BACK": _soft_max_back, "OUT_PROD": _out_prod,
    "MUL_MAT_ID_BACK": _mul_mat_id_back, "OUT_PROD_ID": _out_prod_id,
    "CROSS_ENTROPY_LOSS": partial(_cross_entropy, False), "CROSS_ENTROPY_LOSS_BACK": partial(_cross_entropy, True),
    "OPT_STEP_SGD": partial(_steps, False), "OPT_STEP_ADAMW": partial(_steps, True),
}  # fmt: skip


def _cases(op: str) -> Iterator[Case]:
    yield from (Case(op, axes, make) for axes, make in _POINTS[op]())


for _op in _POINTS:
    register_cases(_op, quick=partial(_cases, _op))
