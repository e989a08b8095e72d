"""A case from a node that was found somewhere: its op, parameters, and its sources' types, shapes and strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from graphrt import ops
from graphrt.dtypes import DType
from graphrt.errors import GraphError
from graphrt.op import build, op_spec
from graphrt.tensor import Dims, Tensor, contiguous_nb
from graphrt.testing import Case, Distinct, Init, Inputs, MaskValues, Normal, Positions, Rows, Uniform

#: Positions of tokens in the cases that need some.
MAX_POSITION = 4096


@dataclass(frozen=True)
class Operand:
    """A source. root: sources with equal numbers share memory, of root_nbytes bytes, where this one lies at offs."""

    dtype: DType
    ne: Dims
    nb: Dims
    root: int
    root_nbytes: int
    offs: int = 0

    @property
    def is_whole(self) -> bool:
        t = Tensor(self.dtype, self.ne)
        return self.nb == t.nb and self.offs == 0 and self.root_nbytes == t.nbytes

    def __str__(self) -> str:
        shape = f"{self.dtype.name}[{','.join(map(str, self.ne))}]"
        if self.is_whole:
            return shape
        strides = "" if self.nb == contiguous_nb(self.dtype, self.ne) else f"nb[{','.join(map(str, self.nb))}]"
        return f"{shape}{strides}@{self.root}+{self.offs}of{self.root_nbytes}"


#: Values that sources need to make sense: (op, index of the source) -> what makes them from the operands.
_VALUES: dict[tuple[str, int], Callable[[Sequence[Operand | None]], Init]] = {
    ("GET_ROWS", 1): lambda src: Rows(_of(src, 0).ne[1]),
    ("MUL_MAT_ID", 2): lambda src: Rows(_of(src, 0).ne[2]),
    ("ADD_ID", 2): lambda src: Rows(_of(src, 1).ne[1]),
    ("SET_ROWS", 1): lambda src: Rows(_of(src, 2).ne[1], distinct=True),
    ("ROPE", 1): lambda src: Positions(MAX_POSITION),
    ("ROPE", 2): lambda src: Uniform(0.9, 2.0),
    ("DIV", 1): lambda src: Uniform(0.5, 2.0),
    ("SQRT", 0): lambda src: Uniform(0.0, 2.0),
    ("FLASH_ATTN_EXT", 0): lambda src: Normal(3.0),
    ("FLASH_ATTN_EXT", 1): lambda src: Normal(1.0),
    ("FLASH_ATTN_EXT", 2): lambda src: Normal(1.0),
    ("FLASH_ATTN_EXT", 3): lambda src: MaskValues(0.3),
    ("FLASH_ATTN_EXT", 4): lambda src: Uniform(2.0, 10.0),
    ("SOFT_MAX", 0): lambda src: Uniform(-10.0, 10.0),
    ("SOFT_MAX", 1): lambda src: MaskValues(0.3),
    ("ARGSORT", 0): lambda src: Distinct(),
    ("TOP_K", 0): lambda src: Distinct(),
}


def init_of(op: str, i: int, src: Sequence[Operand | None]) -> Init | None:
    """What makes the values of an op's source, None for the usual ones. src: all its sources."""
    make = _VALUES.get((op, i))
    return make(src) if make is not None else None


def _of(src: Sequence[Operand | None], i: int) -> Operand:
    found = src[i] if i < len(src) else None
    if found is None:
        raise GraphError(f"source {i} must be there")
    return found


def case_of(op: str, params: Any, src: Sequence[Operand | None], **axes: object) -> Case:
    """The case; its string has everything that distinguishes it. axes: what it shall show beside."""
    shown = [str(s) if s is not None else "-" for s in src]
    described = {**axes, "src": f"[{';'.join(shown)}]"}
    if params is not None:
        described["params"] = params
    return Case(op, described, partial(_make, op=op, params=params, src=tuple(src)))


def _make(inputs: Inputs, op: str, params: Any, src: Sequence[Operand | None]) -> Tensor:
    leafs: dict[int, Tensor] = {}
    sources: list[Tensor | None] = []
    for i, operand in enumerate(src):
        if operand is None:
            sources.append(None)
            continue
        if operand.root not in leafs:
            n = operand.root_nbytes // operand.dtype.type_size * operand.dtype.block_size
            ne: Sequence[int] = operand.ne if operand.is_whole else (n,)
            leafs[operand.root] = inputs(f"src{i}", operand.dtype.name, ne, init_of(op, i, src))
        sources.append(_look(leafs[operand.root], operand))
    return build(op_spec(op), *sources, params=params)


def _look(leaf: Tensor, operand: Operand) -> Tensor:
    """The leaf as the operand sees it: a view along ascending strides, then permuted."""
    if operand.is_whole:
        return leaf
    ne, nb = operand.ne, operand.nb
    order = sorted(range(4), key=lambda i: (ne[i] == 1 and i > 0, nb[i], i))
    if operand.dtype.is_quantized:
        order = [0, *(i for i in order if i != 0)]
    look = ops.view(leaf, [ne[i] for i in order], [nb[i] for i in order[1:]], offs=operand.offs)
    if order == [0, 1, 2, 3]:
        return look
    return ops.permute(look, *order)
