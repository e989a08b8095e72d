"""Weights: the tensors of a GGUF file as leafs of graphs, in a backend's memory."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend, Buffer, Bytes
from graphrt.errors import ArchError
from graphrt.models.gguf import GGUFFile, TensorInfo
from graphrt.models.ranks.share import Share
from graphrt.printing import brief_name
from graphrt.progress import Advance, ignore
from graphrt.tensor import Tensor, full_dims, new_tensor

_LAYER = re.compile(r"blk\.([0-9]{1,9})\.(.*)(\.\w+)", re.DOTALL)
MAX_NAMED, MAX_RANGES = 12, 8  # kinds of tensors, and ranges of layers, in an error
SAMPLED = 256  # bytes of each of the places that a fingerprint looks at
MAX_COMPARED = 1000  # names that a missing one is held against


class Weights:
    """Hands out each tensor once by name, checked for its shape, and knows what was never asked for.

    What is missing or misshapen gets a leaf without memory, so that check() can name all of it. A backend that can
    address the mapped file reads it in place; others get a copy of each tensor asked for. advance: told the bytes of
    each. share: of a model that is cut over several ranks (ranks/weights.py), else None.
    """

    share: Share | None = None

    def __init__(self, file: GGUFFile, backend: Backend, advance: Advance = ignore) -> None:
        self.file = file
        self._advance = advance
        self.backend = backend
        self.loaded: dict[str, Tensor] = {}
        self._left: set[str] = set()
        self._missing: dict[str, tuple[int, ...]] = {}
        self._misshapen: dict[str, tuple[int, ...]] = {}

    @overload
    def __call__(self, name: str, *ne: int) -> Tensor: ...
    @overload
    def __call__(self, name: str, *ne: int, optional: bool) -> Tensor | None: ...
    def __call__(self, name: str, *ne: int, optional: bool = False) -> Tensor | None:
        """The leaf `name` of shape `ne`, None for an optional one that the file has not. Call check() after all."""
        if name in self.loaded:
            return self.loaded[name]
        info = self.file.tensors.get(name)
        if info is None and optional:
            return None
        if info is not None and full_dims(self.shape(info, name)) == full_dims(ne):
            leaf = new_tensor(info.dtype, *self.shape(info, name), name=name)
            leaf.buffer = self._bind(leaf)
            self._advance(leaf.nbytes)
        else:
            leaf = new_tensor("f32", *ne, name=name)
            (self._missing if info is None else self._misshapen)[name] = ne
        self.loaded[name] = leaf
        return leaf

    def leave(self, name: str) -> None:
        """Notes that the file may have the tensor `name`, and that nothing reads it."""
        self._left.add(name)

    def shape(self, info: TensorInfo, name: str) -> tuple[int, ...]:
        """The shape in which a tensor of the file is handed out."""
        return info.ne

    def tied(self, embedding: Tensor) -> Tensor:
        """The output matrix of a file without one: the embedding."""
        return embedding

    def constant(self, name: str, values: npt.NDArray[np.int32]) -> Tensor:
        """A leaf with values that no file has: i32, values.shape reversed."""
        leaf = new_tensor("i32", *values.shape[::-1], name=name)
        leaf.buffer = self._held(leaf, np.ascontiguousarray(values).view(np.uint8).reshape(-1))
        return leaf

    def _bind(self, leaf: Tensor) -> Buffer:
        return self._held(leaf, self.file.data(leaf.name))

    def _held(self, leaf: Tensor, data: Bytes) -> Buffer:
        return self.backend.wrap_host(data) or self.backend.hold(leaf, data)

    def check(self) -> None:
        """Raises ArchError with all tensors that the file lacks, that have another shape, or that nobody asked for."""
        unknown = [name for name in self.file.tensors if name not in self.loaded and name not in self._left]
        wrong = [line for line in (self._of_missing(unknown), self._of_misshapen(), _of_unknown(unknown)) if line]
        if wrong:
            raise ArchError("\n".join(wrong))

    def _of_missing(self, unknown: list[str]) -> str:
        if not self._missing:
            return ""
        close = [difflib.get_close_matches(name, unknown[:MAX_COMPARED], 1, 0.8) for name in list(self._missing)[:5]]
        near = dict.fromkeys(names[0] for names in close if names)
        hint = f"; the nearest it has: {', '.join(map(brief_name, list(near)[:3]))}" if near else ""
        count = f"{len(self._missing)} tensors" if len(self._missing) > 1 else "a tensor"
        return (
            f"the model needs {count} of which the file has none of that name: {_braced(self._missing)}{hint}; "
            f"fetch it again or use another model"
        )

    def _of_misshapen(self) -> str:
        shapes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
        for name, ne in self._misshapen.items():
            shapes.setdefault((ne, self.file.tensors[name].ne), []).append(name)
        shown = [
            f"{_braced(names)} must have the shape {list(ne)}, not {list(has)}"
            for (ne, has), names in list(shapes.items())[:MAX_NAMED]
        ]
        shown += [f"{len(shapes) - MAX_NAMED} more kinds do not fit"] if len(shapes) > MAX_NAMED else []
        rest = "; the file's keys ask for it: it is damaged or of another architecture"
        return f"tensor {', '.join(shown)}{rest}" if shown else ""

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes that tell files apart."""
        return fingerprint(self.file)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that were asked for."""
        return sum(t.nbytes for t in self.loaded.values())


def fingerprint(file: GGUFFile) -> bytes:
    """32 bytes that tell files apart: of all names, types and shapes, and of three places in each tensor's data."""
    digest = hashlib.sha256()
    for name, info in sorted(file.tensors.items()):
        digest.update(repr((name, info.dtype.id, info.ne)).encode("utf-8", "surrogateescape"))
        for start in (0, info.nbytes // 2, max(0, info.nbytes - SAMPLED)):
            stop = min(start + SAMPLED, info.nbytes)
            digest.update(file.span(name, start, stop).tobytes())
    return digest.digest()


def _of_unknown(unknown: list[str]) -> str:
    if not unknown:
        return ""
    return (
        f"every tensor of the file must be known to its architecture, {len(unknown)} are not: {_braced(unknown)}; "
        f"the file is of a variant that is not implemented"
    )


def _braced(names: Iterable[str]) -> str:
    """The names, those of layers put together as a shell would spell them: blk.{0-3,7}.{attn_q,attn_k}.weight."""
    layers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        layers.setdefault((match[2], match[3]) if match else (name, ""), []).extend([int(match[1])] if match else [])
    stems: dict[tuple[str, str], list[str]] = {}
    for (stem, end), found in layers.items():
        stems.setdefault((_ranges(found), end), []).append(stem)
    shown = []
    for (found_in, end), group in stems.items():
        if found_in:
            named = [brief_name(stem) for stem in group[:MAX_NAMED]] + ["..."] * (len(group) > MAX_NAMED)
            shown.append(f"blk.{found_in}.{named[0] if len(group) == 1 else '{' + ','.join(named) + '}'}{end}")
        else:
            shown += map(brief_name, group)
    more = [f"and {len(shown) - MAX_NAMED} more"] if len(shown) > MAX_NAMED else []
    return ", ".join(shown[:MAX_NAMED] + more)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 7] as "{0-2,7}", [3] as "3", [] as ""."""
    there = set(numbers)
    starts = [n for n in sorted(there) if n - 1 not in there]
    ends = [n for n in sorted(there) if n + 1 not in there]
    spans = [f"{a}-{b}" if b > a else str(a) for a, b in zip(starts[:MAX_RANGES], ends)]
    spans += ["..."] * (len(starts) > MAX_RANGES)
    return ",".join(spans) if len(numbers) < 2 else f"{{{','.join(spans)}}}"
