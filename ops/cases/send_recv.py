"""Conformance cases of SEND and RECV, both ranks played: types, shapes, gaps, and what comes between."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

from graphrt.ops.cases.gaps import gapped
from graphrt.ops.send_recv import recv, send
from graphrt.tensor import Dims, Tensor
from graphrt.testing import Case, Inputs, register_cases

_SHAPES: tuple[Dims, ...] = ((5, 4, 3, 2), (129, 33, 1, 1))
_TYPES = ("f32", "f16", "bf16", "i32")


def _given(inputs: Inputs, dt: str, ne: Dims, gaps: bool) -> Tensor:
    return gapped(inputs, "a", dt, ne) if gaps else inputs("a", dt, ne)


def _make_send(inputs: Inputs, dt: str, ne: Dims, gaps: bool) -> Tensor:
    return send(_given(inputs, dt, ne, gaps), rank=0, other=1, played=True)


def _make_recv(inputs: Inputs, dt: str, ne: Dims, gaps: bool) -> Tensor:
    after = inputs("after", "f32", (3,))
    return recv(after, _given(inputs, dt, ne, gaps), rank=1, other=0, type=dt, ne=ne)


def _cases(op: str, make: Callable[..., Tensor]) -> Iterator[Case]:
    for dt, ne, gaps in itertools.product(_TYPES, _SHAPES, (False, True)):
        made = partial(make, dt=dt, ne=ne, gaps=gaps)
        yield Case(op, {"type": dt, "ne": ne, "gaps": gaps}, made)


register_cases("SEND", quick=partial(_cases, "SEND", _make_send))
register_cases("RECV", quick=partial(_cases, "RECV", _make_recv))
