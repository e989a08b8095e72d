"""Conformance cases and what judges them: shared by the tests, the conformance tool and third-party backends.

A case is data: an op, its axes as a printable string, and a function that builds its node from inputs. The inputs are
a function of (case, seed, input name) alone, on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import gguf  # the format's own package: quantizes and dequantizes blocks
import numpy as np
import numpy.typing as npt

from graphrt.dtypes import DType, dtype
from graphrt.execute import Executable, host_type
from graphrt.graph import Graph
from graphrt.op import registered_ops
from graphrt.tensor import Tensor, new_input

Floats = npt.NDArray[np.float64]
AnyArray = npt.NDArray[np.generic]


class Init(Protocol):
    """Values of an input: float64 or int64 of the given shape (torch order)."""

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray: ...


@dataclass(frozen=True)
class Uniform:
    """Evenly between low and high."""

    low: float = -1.0
    high: float = 1.0

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        return rng.uniform(self.low, self.high, shape)


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0."""

    std: float = 1.0

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        return rng.normal(0.0, self.std, shape)


@dataclass(frozen=True)
class Distinct:
    """No two equal values in a row, so that an order is unique."""

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        order = rng.permuted(np.broadcast_to(np.arange(shape[-1]), shape).copy(), axis=-1)
        return order / shape[-1] - 0.5


@dataclass(frozen=True)
class Rows:
    """Row indices below n; distinct along the last dimension if asked."""

    n: int
    distinct: bool = False

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        if not self.distinct:
            return rng.integers(0, self.n, shape)
        all_rows = np.broadcast_to(np.arange(self.n), (*shape[:-1], self.n)).copy()
        return rng.permuted(all_rows, axis=-1)[..., : shape[-1]]


@dataclass(frozen=True)
class Positions:
    """Token positions from 0 to top."""

    top: int

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        return rng.integers(0, self.top + 1, shape)


@dataclass(frozen=True)
class MaskValues:
    """-inf with probability p, else 0 or a negative number; the first and the last `empty_rows` rows all -inf."""

    p: float
    empty_rows: int = 0

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        bias = np.where(rng.random(shape) < 0.5, 0.0, -rng.uniform(0, 4, shape))
        mask = np.where(rng.random(shape) < self.p, -np.inf, bias)
        if self.empty_rows:
            mask[..., : self.empty_rows, :] = mask[..., -self.empty_rows :, :] = -np.inf
        elif shape[-1] > 0:
            mask[..., 0] = np.where(np.isinf(mask).all(-1), 0.0, mask[..., 0])
        return mask


@dataclass(frozen=True)
class CausalMask:
    """0 up to the query's own position, -inf after it; the last query sees every key."""

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        n_q, n_kv = shape[-2:]
        visible = np.arange(n_kv) <= (np.arange(n_q)[:, None] + (n_kv - n_q))
        return np.broadcast_to(np.where(visible, 0.0, -np.inf), shape).copy()


#: Byte offsets of the f16 scales in a block, for types that gguf can't quantize to: random bits, sane scales.
_SCALE_OFFSETS: dict[str, tuple[int, ...]] = {
    "q2_K": (80, 82), "q3_K": (108,), "q4_K": (0, 2), "q5_K": (0, 2), "q6_K": (208,), "iq2_xxs": (0,), "iq2_xs": (0,),
    "iq2_s": (0,), "iq3_xxs": (0,), "iq3_s": (0,), "iq1_s": (0,), "iq4_nl": (0,), "iq4_xs": (0,),
}  # fmt: skip


def random_blocks(dt: DType, shape: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Valid blocks of any quantized type: uint8 [..., bytes a row] for `shape` elements."""
    rows = (*shape[:-1], shape[-1] // dt.block_size)
    raw = rng.integers(0, 256, (*rows, dt.type_size), dtype=np.uint8)
    for offset in _SCALE_OFFSETS.get(dt.name, ()):
        scales = (rng.uniform(0.25, 1.0, rows) / 64).astype(np.float16)
        raw[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    if dt.name == "iq1_m":  # its f16 scale is spread over the high nibbles of four 16-bit words at the block's end
        bits = (rng.uniform(0.25, 1.0, rows) / 64).astype(np.float16).view(np.uint16)
        words = raw[..., 48:56].copy().view(np.uint16) & 0x0FFF
        words |= np.stack([(bits >> (4 * i) & 0xF) << 12 for i in range(4)], axis=-1).astype(np.uint16)
        raw[..., 48:56] = words.view(np.uint8)
    if dt.name == "nvfp4":
        raw[..., :4] = rng.integers(0x20, 0x40, (*rows, 4), dtype=np.uint8)
    return raw.reshape(*shape[:-1], -1)


def quantize(values: AnyArray, dt: DType, rng: np.random.Generator | None = None) -> AnyArray:
    """float64 or int values as the host array of a type; random blocks for a type that gguf can't quantize to."""
    if dt.name == "bf16":
        return _gguf_quantize(values, gguf.GGMLQuantizationType.BF16).view(np.uint16)
    if not dt.is_quantized:
        return values.astype(host_type(dt))
    if dt.name in _SCALE_OFFSETS or dt.name in ("iq1_m", "nvfp4"):
        assert rng is not None
        return random_blocks(dt, values.shape, rng)
    return _gguf_quantize(values, gguf.GGMLQuantizationType(dt.id))


def _gguf_quantize(values: AnyArray, kind: gguf.GGMLQuantizationType) -> AnyArray:
    raw: AnyArray = gguf.quants.quantize(values.astype(np.float32), kind)
    return raw


def dequantize(raw: AnyArray, dt: DType) -> AnyArray:
    """The values of a host array: float64, or int64 for an integer type."""
    if dt.kind == "int":
        return raw.astype(np.int64)
    if dt.is_quantized or dt.name == "bf16":
        values: AnyArray = gguf.quants.dequantize(raw.view(np.uint8), gguf.GGMLQuantizationType(dt.id))
        return values.astype(np.float64)
    return raw.astype(np.float64)


@dataclass(frozen=True)
class Case:
    """One conformance case. axes: what varies, for people and for reruns; make: builds the node from inputs."""

    op: str
    axes: Mapping[str, object]
    make: Callable[[Inputs], Tensor] = field(compare=False)

    def __str__(self) -> str:
        return f"{self.op}({','.join(f'{k}={_shown(v)}' for k, v in self.axes.items())})"

    def build(self, seed: int = 0) -> Inputs:
        """The case's node and its inputs' values."""
        inputs = Inputs(str(self), seed)
        inputs.node = self.make(inputs)
        return inputs


def _shown(value: object) -> str:
    return str(value).replace(" ", "")


class Inputs:
    """Makes the inputs of one case and remembers their values: calling it adds an input leaf."""

    def __init__(self, case: str, seed: int) -> None:
        self.case = case
        self.seed = seed
        self.values: dict[Tensor, AnyArray] = {}
        self.node: Tensor | None = None

    def __call__(self, name: str, dt: str, ne: Sequence[int], init: Init | None = None) -> Tensor:
        """An input leaf of that type and shape, filled by `init`: without it floats in -1..1, integers below 1000."""
        init = init or (Rows(1000) if dtype(dt).kind == "int" else Uniform())
        tensor = new_input(dt, *ne, name=name)
        digest = hashlib.sha256(f"{self.seed}/{self.case}/{name}".encode()).digest()
        rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:8], "little")))
        self.values[tensor] = quantize(init(rng, tensor.shape), dtype(dt), rng)
        return tensor

    @property
    def result(self) -> Tensor:
        assert self.node is not None
        return self.node

    def graph(self) -> Graph:
        return Graph(self.result)

    def fill(self, exe: Executable) -> None:
        """Writes every input."""
        for tensor, values in self.values.items():
            exe.write(tensor, values)


def all_cases(op: str | None = None) -> Iterator[Case]:
    """The cases of one op or of every registered op."""
    for name, spec in registered_ops().items():
        if op in (None, name):
            yield from spec.cases()


def nmse(actual: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """sum((actual - expected)^2) / sum(expected^2) in float64; the reference's energy is below.

    NaN or infinity where the reference has none (or another one) gives infinity; a reference of all zeros gives 0 when
    met exactly and infinity otherwise.
    """
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    special = ~np.isfinite(e)
    if not np.array_equal(a[special], e[special], equal_nan=True) or not np.isfinite(a[~special]).all():
        return float("inf")
    a, e = a[~special], e[~special]
    error, energy = float(np.sum((a - e) ** 2)), float(np.sum(e**2))
    if energy == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / energy
