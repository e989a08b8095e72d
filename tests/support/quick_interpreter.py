"""Triton 3.6's interpreter in a third of the time: the same numbers in the same order, with less done around each.

Most of its time goes to the types of intermediate values, to patching triton.language once more for each function that
a kernel calls, to reductions an element at a time, and to sums and products of integers done again in 64 bits to look
for an overflow, which it then doesn't report; here it is. For tests only: test_quick_interpreter.py compares it with
Triton's own, and with GRAPHRT_QUICK_INTERPRETER=0 all tests run on that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

core = tl.core


def use() -> None:
    """Replaces the slow parts in this process. They are of 3.6: other versions are left alone by the caller."""
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_lang = _patch_once
    interpreter.ReduceOps.generic_reduce = _reduce
    interpreter.ScanOps.generic_scan = _scan
    interpreter.TritonSemantic.binary_op_sanitize_overflow_impl = _assert_no_overflow
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor
    core.tuple.__init__ = _init_tuple
    core.tuple.__getattr__ = _tuple_attribute


# --- types: each worked out once ---

_slow_np_dtype = interpreter._get_np_dtype
_slow_block_type = core.block_type.__init__
_slow_tuple = core.tuple.__init__
_slow_tuple_attribute = core.tuple.__getattr__
_np_dtypes: dict[str, np.dtype[Any]] = {}
_block_types: dict[tuple[str, int, tuple[int, ...]], dict[str, Any]] = {}


def _np_dtype(kind: Any) -> np.dtype[Any]:
    name = kind.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _slow_np_dtype(kind)
    return _np_dtypes[name]


def _init_block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
    plain = tuple([s.value if isinstance(s, core.constexpr) else s for s in shape])
    key = (element_ty.name, getattr(element_ty, "address_space", 0), plain)
    if key not in _block_types:
        _slow_block_type(self, element_ty, shape)
        _block_types[key] = dict(self.__dict__)
    self.__dict__.update(_block_types[key])


@functools.cache
def _shape_of_tensors(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(s) for s in shape])


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.numel, self.shape = _shape_of_tensors(tuple(type.shape.values) if type.is_block() else ())


def _init_tuple(self: Any, args: Any, type: Any = None) -> None:
    """Without a type: that is made when somebody asks, which for shapes nobody does."""
    if type is not None:
        _slow_tuple(self, args, type)
    else:
        self.values = list(args)


def _tuple_attribute(self: Any, name: str) -> Any:
    if name != "type":
        return _slow_tuple_attribute(self, name)
    self.type = core._type_for_tuple_values(self.values)
    return self.type


# --- triton.language: patched once a launch, by what was worked out at the first ---


class _Scope:
    """What a launch has changed; made once, put in place and taken back many times."""

    def __init__(self) -> None:
        self.changes: list[tuple[object, str, object, object]] = []
        self.in_place = False

    def set_attr(self, obj: object, name: str, value: object) -> None:
        self.changes.append((obj, name, getattr(obj, name, interpreter._MISSING), value))
        setattr(obj, name, value)

    def put_in_place(self) -> None:
        for obj, name, _, value in self.changes:
            setattr(obj, name, value)

    def restore(self) -> None:
        for obj, name, before, _ in reversed(self.changes):
            if before is interpreter._MISSING:
                delattr(obj, name)
            else:
                setattr(obj, name, before)
        self.in_place = False


_scope = _Scope()
_nothing = _Scope()


def _patch_once(fn: Callable[..., Any]) -> _Scope:
    """Both modules whose functions kernels and tl.standard call. A function that a kernel calls finds it done."""
    if _scope.in_place:
        return _nothing
    if _scope.changes:
        _scope.put_in_place()
    else:
        _patch_all(_scope)
    _scope.in_place = True
    return _scope


def _patch_all(scope: _Scope) -> None:
    for lang in (tl, core):
        for package in (lang, lang.tensor, *([lang.math] if lang is tl else [])):
            interpreter._patch_builtin(package, interpreter.interpreter_builder, scope)
        interpreter._patch_lang_tensor(lang.tensor, scope)
        interpreter._patch_lang_core(lang, scope)
    interpreter._patch_builtin(core.tensor_descriptor_base, interpreter.interpreter_builder, scope)


# --- reductions: all of a slice at once, slices one after the other ---


def _combined(op: Any, input: Sequence[Any], axis: int) -> Iterator[list[Any]]:
    """What combine_fn has made of the first, the first two, ... slices of each input."""
    kinds = [x.dtype for x in input]
    arrays = [np.moveaxis(x.handle.data, axis, 0) for x in input]
    so_far = [op.to_tensor(a[0], kind) for a, kind in zip(arrays, kinds)]
    yield so_far
    for i in range(1, arrays[0].shape[0]):
        more = [op.to_tensor(a[i], kind) for a, kind in zip(arrays, kinds)]
        found = op.combine_fn.fn(*so_far, *more)
        found = list(found) if isinstance(found, (tuple, core.tuple)) else [found]
        so_far = [op.to_tensor(_array(f, a[0]), kind) for f, a, kind in zip(found, arrays, kinds)]
        yield so_far


def _array(found: Any, like: np.ndarray[Any, Any]) -> Any:
    data = np.asarray(found.handle.data if isinstance(found, core.tensor) else found)
    return np.broadcast_to(data, like.shape) if like.ndim else data.reshape(-1)[0]


def _reduce(self: Any, input: Sequence[Any]) -> list[Any]:
    whole = self.axis is None
    dims = input[0].handle.data.ndim
    input, axis = self.unravel(input, self.axis)
    *_, last = _combined(self, input, axis)
    found = []
    for made, x in zip(last, input):
        data = made.handle.data.reshape(np.delete(x.handle.data.shape, axis))
        if self.keep_dims:
            data = data.reshape((1,) * dims) if whole else np.expand_dims(data, axis)
        found.append(self.to_tensor(data.item() if data.ndim == 0 else data, x.dtype))
    return found


def _scan(self: Any, input: Sequence[Any]) -> list[Any]:
    steps = list(_combined(self, input, self.axis))
    found = []
    for i, x in enumerate(input):
        shape = np.delete(x.handle.data.shape, self.axis)
        data = np.stack([step[i].handle.data.reshape(shape) for step in steps], self.axis)
        found.append(self.to_tensor(data, x.dtype))
    return found


# --- overflow of integers ---

_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _assert_no_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Callable[..., Any]) -> None:
    """For numbers of less than 64 bits; binary_op: add, sub or mul of a TritonSemantic."""
    kind = lhs.type.scalar
    if kind.int_bitwidth < 64:
        exact = _EXACT[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        assert kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value(), (
            f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"
        )
