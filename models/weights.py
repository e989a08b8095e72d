"""Weights: the tensors of a GGUF file as leafs of graphs, in a backend's memory."""

from __future__ import annotations

import difflib
from typing import overload

from graphrt.backend import Backend, Buffer
from graphrt.errors import ArchError
from graphrt.models.gguf import GGUFFile
from graphrt.tensor import Tensor, full_dims, new_tensor


class Weights:
    """Hands out each tensor once by name, checked for its shape, and knows what was never asked for.

    A backend that can address the mapped file reads it in place; others get a copy of each tensor asked for.
    """

    def __init__(self, file: GGUFFile, backend: Backend) -> None:
        self.file = file
        self.backend = backend
        self.loaded: dict[str, Tensor] = {}

    @overload
    def __call__(self, name: str, *ne: int) -> Tensor: ...
    @overload
    def __call__(self, name: str, *ne: int, optional: bool) -> Tensor | None: ...
    def __call__(self, name: str, *ne: int, optional: bool = False) -> Tensor | None:
        """The leaf `name` of shape `ne`. Raises ArchError when it is missing (unless optional) or of another shape."""
        if name in self.loaded:
            return self.loaded[name]
        info = self.file.tensors.get(name)
        if info is None:
            if optional:
                return None
            close = difflib.get_close_matches(name, self.file.tensors, 3)
            hint = f"; the nearest it has: {', '.join(close)}" if close else ""
            raise ArchError(
                f"the model needs tensor {name!r} {list(ne)}, the file has none of that name{hint}.\n"
                f"It is incomplete or of a variant that is not implemented: fetch it again or use another model."
            )
        if full_dims(info.ne) != full_dims(ne):
            raise ArchError(
                f"tensor {name!r} must have the shape {list(ne)} that the file's keys ask for, it has {list(info.ne)}; "
                f"the file is damaged or of another architecture"
            )
        leaf = new_tensor(info.dtype, *info.ne, name=name)
        leaf.buffer = self._bind(leaf)
        self.loaded[name] = leaf
        return leaf

    def _bind(self, leaf: Tensor) -> Buffer:
        data = self.file.data(leaf.name)
        return self.backend.wrap_host(data) or self.backend.hold(leaf, data)

    def check_all_used(self) -> None:
        """Raises ArchError when the file has tensors that the architecture never asked for."""
        unknown = [name for name in self.file.tensors if name not in self.loaded]
        if unknown:
            shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
            raise ArchError(
                f"every tensor of the file must be known to its architecture, {len(unknown)} are not: {shown}; "
                f"the file is of a variant that is not implemented"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that were asked for."""
        return sum(t.nbytes for t in self.loaded.values())
