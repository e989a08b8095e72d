"""How tensors look on the host: numpy's types and shapes, what may be written into one, and its elements read back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphrt.buffer import Buffer, Bytes
from graphrt.dtypes import DType
from graphrt.errors import GraphError
from graphrt.tensor import Tensor

Array = npt.NDArray[np.generic]

#: numpy's type for each plain type; what numpy lacks travels as its bits: bf16 as 16, floats of 8 bits as 8.
NUMPY_TYPES: dict[str, npt.DTypeLike] = {
    "f32": np.float32, "f16": np.float16, "f64": np.float64, "bf16": np.uint16,
    "f8_e4m3": np.uint8, "f8_e5m2": np.uint8,
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
}  # fmt: skip


def host_type(dt: DType) -> np.dtype[np.generic]:
    """How a tensor's elements look on the host: a plain type's own, for a quantized one its raw bytes."""
    return np.dtype(NUMPY_TYPES.get(dt.name, np.uint8))


def host_bytes(t: Tensor, values: npt.ArrayLike) -> Bytes:
    """The bytes of what is to be written into a tensor. Raises GraphError as Executable.write() does."""
    kind = host_type(t.dtype)
    if isinstance(values, np.ndarray) and values.dtype == kind and _lies_flat(values, t):
        return values.view(np.uint8)  # what a step's inputs are: nothing to convert
    given = _array(t, values)
    if not np.can_cast(given.dtype, kind, "same_kind"):
        raise GraphError(f"{t.name!r} is {t.describe()} and takes {kind} on the host, got {given.dtype}")
    if kind.kind == "i" and given.dtype.itemsize > kind.itemsize and given.size:
        low, high, most = int(given.min()), int(given.max()), 1 << (8 * kind.itemsize - 1)
        if low < -most or high >= most:
            raise GraphError(f"{t.name!r} is {t.describe()}, which holds {-most} to {most - 1}, got {low} to {high}")
    if not t.is_contiguous:
        raise GraphError(
            f"what is written must lie in one piece, {t.name!r} has gaps or another order (strides "
            f"{list(t.nb)} bytes); write the whole of {t.root.name!r}"
        )
    with np.errstate(over="ignore"):  # what a narrower type can't hold becomes infinite, as in any such conversion
        array = np.ascontiguousarray(given, dtype=kind)
    shape = _host_shape(t)
    if given.shape != shape and (array.nbytes != t.data_nbytes or _differ(given.shape, shape)):
        raise GraphError(
            f"{t.name!r} is {t.describe()} and takes an array of the shape "
            f"{list(shape[4 - t.n_dims :])}, which is ne reversed, or a flat one of as many {kind} elements, "
            f"got the shape {list(given.shape)}"
        )
    return array.reshape(-1).view(np.uint8)


def _lies_flat(values: Array, t: Tensor) -> bool:
    return values.ndim == 1 and values.flags.c_contiguous and values.nbytes == t.data_nbytes and t.is_contiguous


def _array(t: Tensor, values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # what numpy and torch say, on several lines
        told = str(error).split("\n")[0][:200]
        raise GraphError(
            f"{t.name!r} takes what numpy can make one array of, got {type(values).__name__}: {told}"
        ) from error


def _host_shape(t: Tensor) -> tuple[int, int, int, int]:
    """The shape that write() takes and read() gives."""
    return (*t.shape[:3], t.dtype.row_size(t.ne[0])) if t.dtype.is_quantized else t.shape


def _differ(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Neither flat nor the shape, dimensions of one aside: elements would lie elsewhere than the caller thinks."""
    return len(given) > 1 and [n for n in given if n > 1] != [n for n in shape if n > 1]


def strided(memory: Bytes, t: Tensor) -> Array:
    """A tensor's elements in the bytes that begin with its first one: a look at them in torch's shape, no copy."""
    kind = host_type(t.dtype)
    if t.dtype.is_quantized:
        row = t.dtype.row_size(t.ne[0])
        return np.lib.stride_tricks.as_strided(memory, (*t.shape[:3], row), (*t.nb[:0:-1], 1), writeable=True)
    whole = memory[: memory.size // kind.itemsize * kind.itemsize].view(kind)
    return np.lib.stride_tricks.as_strided(whole, t.shape, t.nb[::-1], writeable=True)


def read_tensor(t: Tensor, buffer: Buffer, offset: int) -> Array:
    """A contiguous host copy of a tensor at `offset` of `buffer`, whatever its strides."""
    return np.ascontiguousarray(strided(buffer.read(offset, t.nbytes), t))
