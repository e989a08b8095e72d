"""An input with gaps in it, for the cases of every op."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.dtypes import dtype
from graphrt.ops.view import view
from graphrt.tensor import Tensor, full_dims
from graphrt.testing import Init, Inputs, Rows, Spoiled, Uniform


def gapped(inputs: Inputs, name: str, dt: str, ne: Sequence[int], init: Init | None = None) -> Tensor:
    """An input of type `dt` and shape `ne` with gaps between its rows and matrices: a view of a larger tensor.

    The gaps hold NaN (integers: -1), so that the result of an op that reads them is wrong.
    """
    dims = full_dims(ne)
    init = init or (Rows(1000) if dtype(dt).kind == "int" else Uniform())
    whole = inputs(name, dt, (dims[0] * 2, dims[1] + 1, *dims[2:]), Spoiled(init, (0,), used=dims[0]))
    return view(whole, dims, whole.nb[1:], offs=whole.nb[1])
