"""Makes a quantized file of a model's: planned by names and shapes, then written tensor by tensor.

Of a tensor only some rows at a time are in memory as floats, so that a model of any size can be quantized.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.dtypes import DType
from graphrt.errors import GGUFError
from graphrt.models import gguf_write
from graphrt.models.gguf import GGUFFile, TensorInfo
from graphrt.models.gguf_split import SPLIT_KEYS
from graphrt.models.gguf_write import Planned, writing
from graphrt.models.quantize.imatrix import Importance
from graphrt.models.quantize.mixtures import Request, choose, traits_of
from graphrt.models.quantize.types import quantize
from graphrt.printing import brief_name

Bytes = npt.NDArray[np.uint8]

#: Values of a tensor that are floats at a time.
SLAB = 1 << 23
_VERSION = 2  # of ggml's block layouts: general.quantization_version

#: Types that quantize to something without one of them being asked for: nothing was lost before.
_PLAIN = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Step:
    """What becomes of one tensor."""

    info: TensorInfo
    dtype: DType

    @property
    def planned(self) -> Planned:
        return Planned(self.info.name, self.dtype, self.info.ne)

    @property
    def changes(self) -> bool:
        return self.info.dtype != self.dtype


@dataclass(frozen=True)
class Plan:
    """A file to be made. keys: its keys as bytes; steps: its tensors in order; nbytes: of the whole file."""

    keys: dict[str, bytes]
    steps: list[Step]
    alignment: int

    @property
    def nbytes(self) -> int:
        return gguf_write.file_size(self.keys, [step.planned for step in self.steps], self.alignment)

    @property
    def bits_per_weight(self) -> float:
        """Of all tensors together."""
        elements = sum(int(np.prod(step.info.ne)) for step in self.steps)
        return 8 * sum(step.planned.nbytes for step in self.steps) / max(1, elements)


def plan(file: GGUFFile, request: Request, *, requantize: bool = False, importance: Importance | None = None) -> Plan:
    """What quantizing a file will make. requantize: tensors that are quantized already may be so again.

    Raises GGUFError for a tensor that can't be, and for importances of other shapes.
    """
    infos = list(file.tensors.values())
    if not infos:
        raise GGUFError("a model to quantize must have tensors, this file has none. Is it the right file?")
    steps = [Step(info, dt) for info, dt in zip(infos, choose(infos, request, traits_of(file.metadata, file.tensors)))]
    for step in steps:
        _check(step, requantize)
        if importance is not None and step.changes:
            importance.of(step.info)
    keys = {key: value for key, value in file.raw_values().items() if key not in SPLIT_KEYS}
    keys["general.quantization_version"] = gguf_write.u32(_VERSION)
    keys["general.file_type"] = gguf_write.u32(request.file_type.number)
    if importance is not None:
        keys["quantize.imatrix.file"] = gguf_write.string(importance.source)
        keys["quantize.imatrix.entries_count"] = gguf_write.u32(len(importance.rows))
        keys["quantize.imatrix.chunks_count"] = gguf_write.u32(importance.n_chunks)
        if importance.datasets:
            keys["quantize.imatrix.dataset"] = gguf_write.string(importance.datasets[0])
    return Plan(keys, steps, file.alignment)


def _check(step: Step, requantize: bool) -> None:
    if not step.changes or step.info.dtype.name in _PLAIN:
        return
    name, kind = brief_name(step.info.name), step.info.dtype
    if not kind.is_quantized:
        raise GGUFError(f"{name}: only floats can be quantized, got {kind}. Use a model of float tensors.")
    if not requantize:
        raise GGUFError(
            f"{name}: quantizing what is quantized already ({kind}) loses more than quantizing the f16 or f32 model; "
            f"use that one, or ask for it (allow_requantize)"
        )


def write(
    file: GGUFFile, plan: Plan, path: str | os.PathLike[str], *, importance: Importance | None = None,
    done: Callable[[Step, float], None] = lambda step, error: None,
) -> None:  # fmt: skip
    """Writes the planned file. done: called after each tensor with the squared error of its values over the sum of
    their squares, 0 where it was copied. Raises GGUFError, leaving no file behind."""
    target = Path(path)
    if any(target.exists() and os.path.samefile(target, part) for part in file.paths):
        raise GGUFError(f"{target}: the file to write must not be the one that is read. Give it another name.")
    with writing(target, plan.keys, [step.planned for step in plan.steps], plan.alignment) as out:
        for step in plan.steps:
            if not step.changes:
                out.tensor(step.planned, [file.data(step.info.name)])
                done(step, 0.0)
                continue
            errors = _Errors()
            out.tensor(step.planned, _pieces(file, step, importance, errors))
            done(step, errors.relative)


@dataclass
class _Errors:
    lost: float = 0.0
    held: float = 0.0

    @property
    def relative(self) -> float:
        return self.lost / self.held if self.held else 0.0


def _pieces(file: GGUFFile, step: Step, importance: Importance | None, errors: _Errors) -> Iterator[Bytes]:
    """A tensor's new data, some rows at a time."""
    info, dt = step.info, step.dtype
    n, per_matrix = info.ne[0], info.ne[1] if len(info.ne) > 1 else 1
    raw = file.data(info.name).reshape(-1, info.dtype.row_size(n))
    weights = importance.of(info) if importance is not None else None
    for start, stop in _slabs(len(raw), per_matrix, max(1, SLAB // n)):
        rows = as_floats(raw[start:stop], info.dtype)
        mine = None
        if weights is not None:
            mine = weights[0 if len(weights) == 1 else start // per_matrix]
        try:
            made = quantize(rows, dt, mine)
        except GGUFError as error:
            raise GGUFError(f"{brief_name(info.name)}: {error}") from None
        back = as_floats(made, dt)
        errors.lost += float(np.square(back - rows, dtype=np.float64).sum())
        errors.held += float(np.square(rows, dtype=np.float64).sum())
        yield made.reshape(-1)


def _slabs(n_rows: int, per_matrix: int, most: int) -> Iterator[tuple[int, int]]:
    """Runs of at most `most` rows, none of which has rows of two matrices: these have importances of their own."""
    for first in range(0, n_rows, per_matrix):
        for start in range(first, first + per_matrix, most):
            yield start, min(start + most, first + per_matrix)


def as_floats(rows: Bytes, dt: DType) -> npt.NDArray[np.float32]:
    """Rows of a type's data as float32 values: uint8 [n_rows, bytes of a row] to [n_rows, n]."""
    import gguf  # 0.1 s, and few need it

    with np.errstate(all="ignore"):  # damaged scales give NaN, which quantize() tells
        values: Any = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(dt.id))
    return np.asarray(values, np.float32).reshape(len(rows), -1)
