"""Where a model's memory lies when several backends share its graph: with the one that works on it."""

from __future__ import annotations

from collections.abc import Sequence

from graphrt.backend import Backend
from graphrt.dtypes import dtype
from graphrt.errors import GraphError
from graphrt.ops.mul_mat import mul_mat
from graphrt.ops.rows import set_rows
from graphrt.tensor import Tensor

_N = 256  # a whole number of blocks of every type


def _first(backends: Sequence[Backend], probe: Tensor) -> Backend:
    return next((b for b in backends if b.supports(probe) is None), backends[0])


def for_weights(backends: Sequence[Backend]) -> Backend:
    """The preferred backend of those that multiply with weights."""
    return _first(backends, mul_mat(Tensor(dtype("f16"), (_N, _N)), Tensor(dtype("f32"), (_N, 1))))


def for_cache(backends: Sequence[Backend], cache_type: str) -> Backend:
    """The preferred backend of those that write into a cache: writing happens where the memory is."""
    try:
        target = Tensor(dtype(cache_type), (_N, 2))
        probe = set_rows(Tensor(dtype("f32"), (_N, 1)), Tensor(dtype("i64"), (1,)), target)
    except GraphError:  # no type that a cache can have: the cache itself says so, in its own words
        return backends[0]
    return _first(backends, probe)
