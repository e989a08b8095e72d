"""Conformance cases of VIEW, RESHAPE, PERMUTE and TRANSPOSE."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from graphrt.ops.copy import cont
from graphrt.ops.view import permute, reshape, transpose, view
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, register_cases


def _cases(op: str, look: Callable[[Tensor], Tensor]) -> Iterator[Case]:
    """A view is right when what reads it reads the right elements: each case copies the view out."""
    for dt in ("f32", "f16"):

        def make(inputs: Inputs, dt: str = dt) -> Tensor:
            return cont(look(inputs("a", dt, (6, 4, 3, 2))))

        yield Case(op, {"type": dt}, make)


register_cases("VIEW", quick=partial(_cases, "VIEW", lambda a: view(a, (3, 2, 2), nb=a.nb[1:3], offs=a.nb[1])))
register_cases("RESHAPE", quick=partial(_cases, "RESHAPE", lambda a: reshape(a, 8, 9, 2)))
register_cases("PERMUTE", quick=partial(_cases, "PERMUTE", lambda a: permute(a, 2, 0, 3, 1)))
register_cases("TRANSPOSE", quick=partial(_cases, "TRANSPOSE", transpose))
