"""Arguments of public functions, held against their annotations: a wrong one is a GraphrtError that names it.

    @checked(GraphError)
    def scale(a: Tensor, s: float) -> Tensor: ...

    scale(a, "2")       # GraphError: scale(): s must be a number, got str '2'

Annotations are looked at when a function is first called. What this module can't tell (protocols, arrays) passes, and
is for the function itself to check.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import numbers
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

from graphrt.errors import GraphrtError
from graphrt.printing import brief

P = ParamSpec("P")
R = TypeVar("R")

#: What an error calls a type.
_WORDS: dict[Any, str] = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a text", type(None): "None",
    os.PathLike: "a path",
}  # fmt: skip
_KINDS: dict[type, tuple[tuple[str, Any], ...]] = {}  # of dataclasses, by their fields' names
_LISTS = (collections.abc.Sequence, collections.abc.Iterable, list, tuple)


def checked(error: type[GraphrtError]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: calls with an argument that is not as its annotation says raise `error`. A generator function's are
    looked at when it is called, not when its first value is asked for."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature, name = inspect.signature(function), function.__qualname__.removesuffix(".__init__")

        @functools.cache
        def annotations() -> dict[str, Any]:
            return {p.name: _resolved(p.annotation, function) for p in signature.parameters.values()}

        passed: set[tuple[type, ...]] = set()  # types of arguments for which nothing but types needs a look

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            kinds_given = tuple(map(type, args))
            if kinds_given in passed and not kwargs:
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments  # a TypeError, as Python's own, for names and numbers
            known = annotations()
            for key, value in given.items():
                kind = signature.parameters[key].kind
                values = value if kind is inspect.Parameter.VAR_POSITIONAL else (value,)
                if kind is inspect.Parameter.VAR_KEYWORD:
                    continue
                for one in values:
                    if not _fits(one, known[key]):
                        raise error(f"{name}(): {key} must be {described(known[key])}, got {shown(one)}")
            if not kwargs and all(_is_told_by_type(known[key]) for key in given):
                passed.add(kinds_given)
            return function(*args, **kwargs)

        return call

    return decorate


def check_fields(record: Any, error: type[GraphrtError]) -> None:
    """Raises `error` for a field of a dataclass's instance that is not as its annotation says."""
    for field, kind in _kinds(type(record)):
        value = getattr(record, field)
        if type(value) is not kind and not _fits(value, kind):
            raise error(f"{type(record).__name__}: {field} must be {described(kind)}, got {shown(value)}")


def _kinds(record: type) -> tuple[tuple[str, Any], ...]:
    if record not in _KINDS:
        _KINDS[record] = tuple((field.name, _resolved(field.type, record)) for field in dataclasses.fields(record))
    return _KINDS[record]


def _resolved(annotation: Any, where: Any) -> Any:
    """An annotation that is text, as a type; Any where a name in it is known to type checkers alone."""
    if not isinstance(annotation, str):
        return Any if annotation is inspect.Parameter.empty else annotation
    names = vars(sys.modules[where.__module__])
    try:
        return eval(annotation, names)  # noqa: S307 (our own source)
    except (NameError, AttributeError, TypeError):
        return Any


def _is_told_by_type(kind: Any) -> bool:
    """Whether a value's type alone says if it is what an annotation says."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return all(map(_is_told_by_type, typing.get_args(kind)))
    return origin is None


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is what an annotation says, as far as that can be told."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or isinstance(kind, TypeVar):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if kind is int:
        return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, (numbers.Real, np.floating)) and not isinstance(value, bool)
    if kind is bool:
        return isinstance(value, (bool, np.bool_))
    if kind is None:
        return value is None
    if origin is not None:
        return _fits_generic(value, origin, args)
    return isinstance(value, kind) if isinstance(kind, type) and not getattr(kind, "_is_protocol", False) else True


def _fits_generic(value: Any, origin: Any, args: tuple[Any, ...]) -> bool:
    if origin in (collections.abc.Callable, typing.Literal) or not isinstance(origin, type):
        return callable(value) if origin is collections.abc.Callable else True
    if origin is np.ndarray:
        return isinstance(value, np.ndarray)
    if origin is collections.abc.Sequence and isinstance(value, np.ndarray) and value.ndim == 1:
        return args[:1] == (int,) and value.dtype.kind in "iu" or args[:1] == (float,) and value.dtype.kind in "iuf"
    if not isinstance(value, origin) or (origin is collections.abc.Sequence and isinstance(value, (str, bytes))):
        return False
    if isinstance(value, Mapping):
        return all(_fits(k, args[0]) and _fits(v, args[1]) for k, v in value.items())
    if isinstance(value, collections.abc.Sequence):
        each = args if origin is tuple and Ellipsis not in args else (args[0],) * len(value)
        return len(each) == len(value) and all(_fits(v, kind) for v, kind in zip(value, each))
    return True


def described(kind: Any) -> str:
    """An annotation in words: "a number or None", "a list of Tensor"."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(described(arg) for arg in args))
    if origin in _LISTS:
        return f"a list of {', '.join(_plural(arg) for arg in args if arg is not Ellipsis)}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if origin is collections.abc.Callable:
        return "a function"
    base = origin or kind
    return _WORDS.get(base) or ("None" if kind is None else f"a {getattr(base, '__name__', base)}")


def _plural(kind: Any) -> str:
    words = {int: "whole numbers", float: "numbers", str: "texts"}
    return words.get(kind) or described(kind).removeprefix("a ")


def shown(value: Any) -> str:
    """A value's type and the beginning of what it is."""
    if value is None:
        return "None"
    if isinstance(value, (bool, int, float, str, bytes, list, tuple, dict)):
        return f"{type(value).__name__} {brief(value)}"
    shape = getattr(value, "shape", None)
    return f"a {type(value).__module__}.{type(value).__name__}" + (f" of shape {brief(list(shape))}" if shape else "")
