"""Distributions of inputs. Each takes a generator and a shape (torch order) and gives float64 or int64 values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from graphrt.dtypes import DType
from graphrt.testing.blocks import AnyArray, quantize


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
    """Normally distributed, of deviation `std` around `mean`. step: values are rounded to its multiples, 0 for none.

    Small multiples of a power of two are exact in f16 and bf16, and so are their products in f32. With such a step the
    result has no error from the rounding of its sources, and its tolerance can be tight.
    """

    std: float = 1.0
    mean: float = 0.0
    step: float = 0.0

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        values = rng.normal(self.mean, self.std, shape)
        return np.round(values / self.step) * self.step if self.step else values


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
    """Token positions from 0 to top, both ends among them where there are two or more."""

    top: int

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        positions = rng.integers(0, self.top + 1, shape)
        if shape[-1] > 1:
            positions[..., 0], positions[..., -1] = self.top, 0
        return positions


@dataclass(frozen=True)
class Given:
    """These values, over and over: extremes that a distribution would not hit."""

    values: tuple[float, ...]

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        return np.resize(np.array(self.values), shape)


@dataclass(frozen=True)
class Spoiled:
    """`base`, but with NaN, or infinity if `infinite`, in places whose values must not count.

    These are the indices `cells` along `axis`, and of each row what comes after `used` elements. NaN is written as bits
    that are all ones: that is NaN as a float, and as the scale of a quantized block.
    """

    base: Init
    cells: Sequence[int] = ()
    axis: int = -2
    used: int | None = None
    infinite: bool = False

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        values = self.base(rng, shape)
        if self.infinite:
            np.moveaxis(values, self.axis, 0)[list(self.cells)] = np.inf
        return values

    def store(self, rng: np.random.Generator, shape: tuple[int, ...], dt: DType) -> AnyArray:
        raw = np.ascontiguousarray(quantize(self(rng, shape), dt, rng))
        if not self.infinite:
            as_bytes = raw.view(np.uint8)
            np.moveaxis(as_bytes, self.axis, 0)[list(self.cells)] = 0xFF
            if self.used is not None:
                as_bytes[..., dt.row_size(self.used) :] = 0xFF
        return raw


@dataclass(frozen=True)
class Islands:
    """`base` in the `n` rows that begin at each of `starts`, zeros elsewhere: gigabytes whose pages nobody touches."""

    base: Init
    starts: tuple[int, ...]
    n: int

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        values: npt.NDArray[np.float64] = np.zeros(shape)
        for start in self.starts:
            values[..., start : start + self.n, :] = self.base(rng, (*shape[:-2], self.n, shape[-1]))
        return values

    def store(self, rng: np.random.Generator, shape: tuple[int, ...], dt: DType) -> AnyArray:
        pieces = [quantize(self.base(rng, (*shape[:-2], self.n, shape[-1])), dt, rng) for _ in self.starts]
        raw = np.zeros((*shape[:-1], pieces[0].shape[-1]), pieces[0].dtype)
        for start, piece in zip(self.starts, pieces):
            raw[..., start : start + self.n, :] = piece
        return raw
