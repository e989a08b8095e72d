"""Distributions of attention masks [..., n_q, n_kv]: -inf hides a key from a query, other values are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphrt.testing.blocks import AnyArray
from graphrt.testing.values import Init


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
    """-inf for the keys after a query's own position; the last query's position is that of the last key.

    The keys that a query sees get 0 or, with `distance`, minus their distance from it, which ALiBi multiplies by a
    head's slope. window: how many keys a query sees, its own the last of them; 0 for all.
    """

    window: int = 0
    distance: bool = False

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        n_q, n_kv = shape[-2:]
        ahead = np.arange(n_kv) - (np.arange(n_q)[:, None] + (n_kv - n_q))
        seen = ahead <= 0
        if self.window:
            seen &= ahead > -self.window
        bias = ahead.astype(np.float64) if self.distance else np.zeros(ahead.shape)
        return np.broadcast_to(np.where(seen, bias, -np.inf), shape).copy()


@dataclass(frozen=True)
class BlockMask:
    """Blocks of `n_q` queries by `n_kv` keys: one in `one_in` is seen and the rest are -inf.

    Each row of blocks sees at least one, which is never the first block of keys: so kernels meet rows whose first keys
    are all hidden.
    """

    n_q: int
    n_kv: int
    one_in: int = 4

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        across = (*shape[:-2], -(-shape[-2] // self.n_q), -(-shape[-1] // self.n_kv))
        seen = rng.random(across) < 1 / self.one_in
        one = rng.integers(min(1, across[-1] - 1), across[-1], across[:-1])
        np.put_along_axis(seen, one[..., None], True, axis=-1)
        whole = seen.repeat(self.n_q, -2).repeat(self.n_kv, -1)[..., : shape[-2], : shape[-1]]
        return np.where(whole, np.where(rng.random(shape) < 0.5, 0.0, -rng.uniform(0, 2, shape)), -np.inf)


@dataclass(frozen=True)
class LengthMask:
    """The queries of each matrix (a head and sequence) see so many leading keys, in each matrix another number.

    The numbers are spread evenly from few keys to all of them.
    """

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        count = int(np.prod(shape[:-2]))
        lengths = -(-shape[-1] * (1 + rng.permutation(count)) // count)
        mask = np.where(np.arange(shape[-1]) < lengths[:, None, None], 0.0, -np.inf)
        return np.broadcast_to(mask, (count, *shape[-2:])).reshape(shape).copy()


@dataclass(frozen=True)
class Hiding:
    """`base`, with the keys `cells` hidden from all queries, and all keys from the queries `rows` (shares of n_q)."""

    base: Init
    cells: Sequence[int] = ()
    rows: tuple[float, float] = (0.0, 0.0)

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        mask = self.base(rng, shape)
        mask[..., list(self.cells)] = -np.inf
        first, last = (round(share * shape[-2]) for share in self.rows)
        mask[..., first:last, :] = -np.inf
        return mask


@dataclass(frozen=True)
class GgmlMask:
    """What ggml's suite draws: values from -1 to 1, and in them blocks of 128 keys by 64 queries, all -inf or all 0.

    There are as many blocks as would cover a fifth of the mask if none overlapped, so that a small mask has none.
    """

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        mask = rng.uniform(-1.0, 1.0, shape)
        for _ in range(int(0.2 * mask.size / (128 * 64))):
            matrix = mask[rng.integers(shape[0]), rng.integers(shape[1])]
            i, j = rng.integers(shape[2]), rng.integers(shape[3])
            matrix[i : i + 64, j : j + 128] = -np.inf if rng.integers(2) else 0.0
        return mask


@dataclass(frozen=True)
class GgmlSparseMask:
    """What ggml's suite draws for its axis n_kv_max: few seen keys, at random places, with small negative values.

    The first row has n_kv_max of them, each following row one fewer, down to 16 fewer, and then from n_kv_max again.
    """

    n_kv_max: int

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
        mask = np.full((int(np.prod(shape[:-1])), shape[-1]), -np.inf)
        for i, row in enumerate(mask):
            count = self.n_kv_max - i % min(self.n_kv_max, 17)
            seen = np.sort(rng.permutation(shape[-1])[:count])
            row[seen] = -0.03125 * (1 + (np.arange(count) + i) % 7)
        return mask.reshape(shape)
