"""Tensor: ggml's metadata of an array, with no data of its own.

ne[i] is the number of elements along dimension i and nb[i] the stride in bytes. ne[0] is the contiguous dimension, so
the torch shape is `ne` reversed. A view shares the memory of `view_src`, at `view_offs` bytes from its start; a view of
a view points at the root. A leaf that holds data (a weight, a cache) has a `buffer`; a node's place is decided by
prepare() and kept in the Executable, so that one graph can be prepared for several backends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntFlag
from math import prod
from typing import Any, Literal, overload

from graphrt.arguments import checked
from graphrt.buffer import Buffer
from graphrt.dtypes import DType, dtype
from graphrt.errors import GraphError

MAX_DIMS = 4
MAX_SRC = 10
MAX_NAME = 64
#: So that sizes in bytes fit 64 bits with their sign.
MAX_ELEMENTS = 2**56

Dims = tuple[int, int, int, int]

#: Names of sources that the ops here can do without, for type checkers: node["mask"] may be None, node["q"] never is.
#: No op here needs a source of such a name. An op elsewhere may name its own as it likes.
OptionalSource = Literal[
    "mask", "sinks", "factors", "value", "lengths", "block_table", "k_starts", "prefixes", "attn_bias", "d_lse", "sent",
    "a1", "a2", "a3", "a4", "a5", "a6", "a7", "k_scale", "v_scale",
]  # fmt: skip

#: By an op's name, where each of its sources stands in `src`, by the source's name. graphrt.op.register() fills it.
_PLACES: dict[str, dict[str, int]] = {}


def name_sources(op: str, names: Sequence[str]) -> None:
    """Says what the sources of an op are called, in their order: nodes of it can then be asked by name."""
    _PLACES[op] = {name: i for i, name in enumerate(names)}


class Flag(IntFlag):
    """What the runtime must respect of a tensor. INPUT: written from outside between runs. OUTPUT: read after a run."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2


def full_dims(ne: Sequence[int]) -> Dims:
    """1 to 4 dimensions filled up to four with ones. Raises GraphError for another number, a dimension
    under 1, and more than MAX_ELEMENTS."""
    if not 1 <= len(ne) <= MAX_DIMS:
        raise GraphError(f"a tensor has 1 to {MAX_DIMS} dimensions, got {len(ne)}: {list(ne)}")
    dims = [int(n) for n in ne] + [1] * (MAX_DIMS - len(ne))
    if min(dims) < 1:
        raise GraphError(f"every dimension must be at least 1, got {dims}; leave an empty tensor out of the graph")
    if prod(dims) > MAX_ELEMENTS:
        raise GraphError(f"a tensor has at most 2**56 elements, got {dims}; cut it into several")
    return (dims[0], dims[1], dims[2], dims[3])


def contiguous_nb(dt: DType, ne: Dims) -> Dims:
    """Byte strides of a tensor without gaps. Raises GraphError when ne[0] is not a whole number of blocks."""
    nb1 = dt.row_size(ne[0])
    return (dt.type_size, nb1, nb1 * ne[1], nb1 * ne[1] * ne[2])


class Tensor:
    """One tensor: a leaf (op "NONE") or the result of an op.

    dtype, ne, nb: as in the module's docstring. op: the op's name; params: its frozen dataclass or None; src: its
    sources, None where an optional one is absent; node["mask"] is the one of that name. view_src, view_offs: the root
    whose memory it shares and the offset in bytes. flags: see Flag. buffer, offset: where a leaf's data lies, in bytes
    from the buffer's start.
    """

    __slots__ = (
        "name", "dtype", "ne", "nb", "op", "params", "src", "view_src", "view_offs", "flags", "buffer", "offset",
    )  # fmt: skip

    def __init__(
        self,
        dt: DType | str,
        ne: Sequence[int],
        *,
        name: str = "",
        nb: Dims | None = None,
        op: str = "NONE",
        params: Any = None,
        src: Sequence[Tensor | None] = (),
        view_src: Tensor | None = None,
        view_offs: int = 0,
        flags: Flag = Flag.NONE,
    ) -> None:
        if len(src) > MAX_SRC:
            raise GraphError(f"an op has at most {MAX_SRC} sources, {op} got {len(src)}")
        self.dtype = dtype(dt)
        self.ne = full_dims(ne)
        self.nb = contiguous_nb(self.dtype, self.ne) if nb is None else nb
        self.op = op
        self.params = params
        self.src = tuple(src)
        if view_src is not None and view_src.view_src is not None:
            view_offs += view_src.view_offs
            view_src = view_src.view_src
        self.view_src: Tensor | None = view_src
        self.view_offs: int = view_offs
        self.flags = flags
        self.buffer: Buffer | None = None
        self.offset = 0
        self.name = ""
        if name != "":  # most nodes that are only built to be compared have none
            self.named(name)

    @checked(GraphError)
    def named(self, name: str) -> Tensor:
        """Sets the name (at most 63 characters, as ggml) and returns the tensor."""
        if len(name) >= MAX_NAME:
            raise GraphError(f"a tensor's name has at most {MAX_NAME - 1} characters, got {len(name)}: {name[:80]!r}")
        self.name = name
        return self

    def as_output(self) -> Tensor:
        """Marks the tensor to be kept and readable after a run."""
        self.flags |= Flag.OUTPUT
        return self

    @property
    def root(self) -> Tensor:
        """The tensor whose memory this one uses: itself, or the root of its view."""
        return self.view_src if self.view_src is not None else self

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`ne` reversed: the shape that torch and numpy use."""
        return self.ne[::-1]

    @property
    def n_elements(self) -> int:
        return prod(self.ne)

    @property
    def n_rows(self) -> int:
        """Rows of ne[0] elements."""
        return self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def n_dims(self) -> int:
        """Dimensions up to the last one over 1, at least 1."""
        return max([i + 1 for i, n in enumerate(self.ne) if n > 1], default=1)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last one, gaps of a strided view included."""
        tail = sum((n - 1) * stride for n, stride in zip(self.ne[1:], self.nb[1:]))
        if self.dtype.block_size == 1:
            return self.dtype.type_size + (self.ne[0] - 1) * self.nb[0] + tail
        return self.ne[0] // self.dtype.block_size * self.nb[0] + tail

    @property
    def data_nbytes(self) -> int:
        """Bytes of the elements alone, without gaps: what a kernel must at least read or write."""
        return self.n_elements // self.dtype.block_size * self.dtype.type_size

    @property
    def is_contiguous(self) -> bool:
        """No gaps and in order, whatever the strides of dimensions of one element say."""
        expected = self.dtype.type_size
        for i, (n, stride) in enumerate(zip(self.ne, self.nb)):
            blocks = n // self.dtype.block_size if i == 0 else n
            if blocks > 1 and stride != expected:
                return False
            expected *= blocks
        return True

    @property
    def overlaps_itself(self) -> bool:
        """Two elements may share bytes: a stride is shorter than what it steps over."""
        blocks = (self.ne[0] // self.dtype.block_size, *self.ne[1:])
        extent = self.dtype.type_size
        for stride, n in sorted((stride, n) for stride, n in zip(self.nb, blocks) if n > 1):
            if stride < extent:
                return True
            extent += stride * (n - 1)
        return False

    @property
    def has_contiguous_rows(self) -> bool:
        """Each row of ne[0] elements is without gaps."""
        return self.ne[0] == self.dtype.block_size or self.nb[0] == self.dtype.type_size

    @property
    def is_leaf(self) -> bool:
        return self.op == "NONE"

    @overload
    def __getitem__(self, name: OptionalSource) -> Tensor | None: ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(self, name: str) -> Tensor: ...
    def __getitem__(self, name: str) -> Tensor | None:
        """The source that the op calls so (OpSpec.sources), None for an optional one that is absent. Raises GraphError
        for a name that is none of its sources'."""
        try:
            i = _PLACES[self.op][name]
        except KeyError:
            known = ", ".join(_PLACES.get(self.op, {})) or "no sources"
            raise GraphError(f"a source is asked for by its name, {self.op} has {known}; got {name!r}") from None
        return self.src[i] if i < len(self.src) else None

    #: Without this, Python would take a tensor for a sequence because it has __getitem__.
    __iter__ = None

    def sources(self) -> Iterator[Tensor]:
        """The sources that are present, in order."""
        return (s for s in self.src if s is not None)

    def sources_by_name(self) -> dict[str, Tensor]:
        """The sources that are present, in order, by the names that the op gives them."""
        return {name: s for name, s in zip(_PLACES.get(self.op, {}), self.src) if s is not None}

    def describe(self) -> str:
        """`type[ne0, ne1, ...]`, as error messages and dumps show a tensor."""
        return f"{self.dtype.name}[{', '.join(str(n) for n in self.ne[: max(self.n_dims, 1)])}]"

    def __repr__(self) -> str:
        args = ", ".join(s.name or s.op if s is not None else "-" for s in self.src)
        return f"<{self.name or '?'} = {self.op}({args}) {self.describe()}>"


@checked(GraphError)
def new_tensor(dt: DType | str, *ne: int, name: str = "") -> Tensor:
    """A leaf of that type and shape; bind a buffer to it, or let prepare() give it one."""
    return Tensor(dt, ne, name=name)


@checked(GraphError)
def new_input(dt: DType | str, *ne: int, name: str) -> Tensor:
    """A leaf that is written from outside before runs. Its place never changes once prepared."""
    return Tensor(dt, ne, name=name, flags=Flag.INPUT)
