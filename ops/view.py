"""VIEW, RESHAPE, PERMUTE, TRANSPOSE: other looks at a tensor's memory. Nothing is computed and nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphrt.arguments import checked
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Work, build, register, require
from graphrt.tensor import MAX_DIMS, Dims, Tensor, contiguous_nb, full_dims


@dataclass(frozen=True)
class ViewParams:
    """The shape, the byte strides of dimensions 1 to 3 and the offset in bytes of a view."""

    ne: Dims
    nb: tuple[int, int, int]
    offs: int


@dataclass(frozen=True)
class ReshapeParams:
    """The new shape."""

    ne: Dims


@dataclass(frozen=True)
class PermuteParams:
    """axes[i] is where dimension i of the source goes, as in ggml (the inverse of torch's permute)."""

    axes: Dims


def _infer_view(params: ViewParams, a: Tensor) -> Result:
    a.dtype.row_size(params.ne[0])
    require(params.offs >= 0 and min(params.nb) >= 0, "VIEW", f"offset and strides must not be negative, got {params}")
    whole = all(n % a.dtype.type_size == 0 for n in (params.offs, *params.nb))
    require(whole, "VIEW", f"offset and strides must be whole blocks of {a.dtype.type_size} bytes, got {params}", a)
    nb = (a.nb[0], *params.nb)
    last = Tensor(a.dtype, params.ne, nb=nb).nbytes + params.offs
    require(last <= a.nbytes, "VIEW", f"it must end inside its source ({a.nbytes} bytes), it ends at byte {last}", a)
    return Result(a.dtype, params.ne, nb, params.offs)


def _infer_reshape(params: ReshapeParams, a: Tensor) -> Result:
    require(a.is_contiguous, "RESHAPE", "the source must be contiguous; cont() makes it so", a)
    same = a.n_elements == Tensor(a.dtype, params.ne).n_elements
    require(same, "RESHAPE", f"the number of elements must stay, {list(params.ne)} asked for", a)
    return Result(a.dtype, params.ne, contiguous_nb(a.dtype, params.ne))


def _infer_permute(params: PermuteParams, a: Tensor, op: str = "PERMUTE") -> Result:
    require(sorted(params.axes) == [0, 1, 2, 3], op, f"axes must be 0 to 3 once each, got {params.axes}")
    if a.dtype.is_quantized:
        require(params.axes[0] == 0, op, "blocks lie along dimension 0, which must stay", a)
    ne, nb = list(a.ne), list(a.nb)
    for i, axis in enumerate(params.axes):
        ne[axis], nb[axis] = a.ne[i], a.nb[i]
    return Result(a.dtype, full_dims(ne), (nb[0], nb[1], nb[2], nb[3]))


def _infer_transpose(params: None, a: Tensor) -> Result:
    return _infer_permute(PermuteParams((1, 0, 2, 3)), a, "TRANSPOSE")


def _no_work(node: Tensor) -> Work:
    return Work(0, 0)


VIEW = register(
    OpSpec(
        "VIEW", _infer_view, _no_work,
        params=ViewParams, is_view=True,
    )
)  # fmt: skip
RESHAPE = register(
    OpSpec(
        "RESHAPE", _infer_reshape, _no_work,
        params=ReshapeParams, is_view=True,
    )
)  # fmt: skip
PERMUTE = register(
    OpSpec(
        "PERMUTE", _infer_permute, _no_work,
        params=PermuteParams, is_view=True,
    )
)  # fmt: skip
TRANSPOSE = register(OpSpec("TRANSPOSE", _infer_transpose, _no_work, is_view=True))


@checked(GraphError)
def view(a: Tensor, ne: Sequence[int], nb: Sequence[int] = (), offs: int = 0, name: str = "") -> Tensor:
    """A look at `ne` elements of `a` from byte `offs`: no memory of its own, nothing is moved.

    No formula: nothing is computed. a: any type; ne: one to four numbers, the shape; nb: up to three strides in bytes,
    of dimensions 1 to 3, contiguous ones if left out; offs: in bytes. Strides and offset are whole blocks of a's type,
    which the result has. Source: ggml_view_4d. Raises GraphError for a look that ends outside of `a`, or into a block.
    """
    dims = full_dims(ne)
    require(len(nb) < MAX_DIMS, "VIEW", f"nb has at most {MAX_DIMS - 1} strides, of dimensions 1 to 3, got {len(nb)}")
    strides = [int(s) for s in nb]
    following = strides[-1] * dims[len(strides)] if strides else a.nb[0] * (dims[0] // a.dtype.block_size)
    for i in range(len(strides) + 1, MAX_DIMS):
        strides.append(following)
        following *= dims[i]
    return build(VIEW, a, params=ViewParams(dims, (strides[0], strides[1], strides[2]), int(offs)), name=name)


@checked(GraphError)
def reshape(a: Tensor, *ne: int, name: str = "") -> Tensor:
    """The same elements in the same order in another shape; nothing is moved.

    No formula: nothing is computed. a: any type, contiguous; ne: one to four numbers with as many elements as `a` has.
    The result has a's type. Source: ggml_reshape_4d. Raises GraphError where `a` is not contiguous (ops.cont makes it
    so) or has another number of elements.
    """
    return build(RESHAPE, a, params=ReshapeParams(full_dims(ne)), name=name)


@checked(GraphError)
def permute(a: Tensor, *axes: int, name: str = "") -> Tensor:
    """Dimension i of `a` becomes dimension axes[i]: result.ne[axes[i]] = a.ne[i]. Strides change, nothing is moved.

    a: any type; axes: 0, 1, 2 and 3, each once; a quantized type keeps dimension 0. !! This is ggml's order, the
    inverse of torch's and numpy's. Source: ggml_permute. Raises GraphError for other axes.
    """
    require(len(axes) == MAX_DIMS, "PERMUTE", f"takes {MAX_DIMS} axes, got {axes}")
    return build(PERMUTE, a, params=PermuteParams((axes[0], axes[1], axes[2], axes[3])), name=name)


@checked(GraphError)
def transpose(a: Tensor, name: str = "") -> Tensor:
    """Swaps dimensions 0 and 1: result[j, i, ...] = a[i, j, ...]. Strides change, nothing is moved.

    a: any plain type, [n, m, a2, a3]; the result is [m, n, a2, a3]. Source: ggml_transpose. Raises GraphError for a
    quantized type, whose blocks lie along dimension 0.
    """
    return build(TRANSPOSE, a, name=name)
