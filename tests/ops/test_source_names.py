"""What an op calls its sources: one name in the node, the builder, the rule and the reference function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest

from graphrt import ops
from graphrt.backends.cpu import backend  # noqa: F401  (fills REFERENCES)
from graphrt.backends.cpu.reference import REFERENCES
from graphrt.errors import GraphError
from graphrt.op import op_spec, register, registered_ops
from graphrt.tensor import OptionalSource


def _parameters(function: Callable[..., object]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def test_sources_have_one_name_everywhere() -> None:
    """What the builder calls a source is its name in the node, in the rule and in the reference function."""
    for name, spec in registered_ops().items():
        rule = spec.infer.func if isinstance(spec.infer, partial) else spec.infer
        assert tuple(p for p in _parameters(rule) if p != "op") == ("params", *spec.names), name
        builder = getattr(ops, name.lower(), None)
        if builder is not None:
            given = _parameters(builder)
            assert all(source in given for source in spec.names), f"{name}: {spec.names} and {given}"
        if not spec.is_view:
            assert _parameters(REFERENCES[name].function) == ("node", *spec.names), name
            assert set(REFERENCES[name].stored) <= set(spec.names), name


def test_type_checkers_know_which_sources_may_be_absent() -> None:
    optional = {source for spec in registered_ops().values() for source in set(spec.names) - set(spec.required)}
    required = {source for spec in registered_ops().values() for source in spec.required}
    assert optional == set(get_args(OptionalSource)) and not optional & required


@pytest.mark.parametrize(
    "wrong, rule",
    [
        ({"sources": ("mask?", "a")}, "those that may be absent last"),
        ({"sources": ("a", "a?")}, "have different names"),
        ({"sources": ("a", "b"), "inplace": ("c",)}, r"name its sources, got \['c'\]"),
        ({"writes": "target"}, r"name its sources, got \['target'\]"),
        ({"masked": ("a",)}, r"name its sources, got \['mask'\]"),
    ],
)
def test_an_op_names_its_sources(wrong: dict[str, Any], rule: str) -> None:
    spec = replace(op_spec("SQR"), **{"name": "NEW", "inplace": (), **wrong})
    with pytest.raises(GraphError, match=rule):
        register(spec)
    assert "NEW" not in registered_ops()
