"""Conformance cases of ROPE: parts of a head that rotate, bases and scales, YaRN, frequency factors, gaps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial

from graphrt.op import build
from graphrt.ops.cases.gaps import gapped
from graphrt.ops.rope import ROPE, ROPE_MODES, RopeParams
from graphrt.tensor import Dims, Tensor
from graphrt.testing import Case, Inputs, Positions, Uniform, grid, register_cases


@dataclass(frozen=True)
class _Axes:
    """One point. ne: [head_dim, n_head, n_tokens, n_seq]; top: the largest position; factors: there are some."""

    params: RopeParams
    ne: Dims = (64, 3, 5, 2)
    top: int = 513
    type: str = "f32"
    factors: bool = False
    gaps: bool = False


def _axes() -> Iterator[_Axes]:
    yarn = RopeParams(64, "neox", 1e4, 0.25, 1024, 1.0, 1.0)
    points = [
        _Axes(RopeParams(64)),
        _Axes(RopeParams(32), (80, 3, 5, 2)),
        _Axes(RopeParams(2), (6, 1, 1, 1), factors=True),
        _Axes(RopeParams(20), (40, 5, 33, 1)),
        _Axes(RopeParams(128), (128, 2, 7, 1), top=131071),
        _Axes(RopeParams(64, freq_base=5e5), factors=True, top=8191),
        _Axes(RopeParams(64, freq_base=1e6, freq_scale=0.125), top=30001),
        _Axes(RopeParams(64, attn_factor=0.7), (64, 2, 1, 3)),
        _Axes(RopeParams(32), (48, 3, 5, 2), gaps=True),
        _Axes(yarn, top=4097),
        _Axes(replace(yarn, attn_factor=0.8), top=131071),
        _Axes(replace(yarn, ext_factor=0.5), (96, 3, 5, 2), factors=True, top=4097),
        _Axes(replace(yarn, beta_fast=4.0, beta_slow=2.0), (80, 3, 5, 2), gaps=True),
    ]
    modes = {mode: [replace(a, params=replace(a.params, mode=mode)) for a in points] for mode in ROPE_MODES}
    for axes in itertools.chain(*modes.values()):
        yield from grid(axes, {"type": ("f32", "f16")})


def _make(inputs: Inputs, axes: _Axes) -> Tensor:
    a = gapped(inputs, "a", axes.type, axes.ne) if axes.gaps else inputs("a", axes.type, axes.ne)
    positions = inputs("pos", "i32", axes.ne[2:3], Positions(axes.top))
    weights = inputs("factors", "f32", (axes.params.n_dims // 2,), Uniform(0.9, 2.0)) if axes.factors else None
    return build(ROPE, a, positions, weights, params=axes.params)


def _cases() -> Iterator[Case]:
    for axes in _axes():
        shown = {f.name: getattr(axes, f.name) for f in fields(axes)}
        yield Case("ROPE", {**shown, "params": _changed(axes.params)}, partial(_make, axes=axes))


def _changed(params: RopeParams) -> tuple[str, ...]:
    """What differs from the defaults, to be printed."""
    base = RopeParams(0, "")
    return tuple(f"{f.name}:{v}" for f in fields(params) if (v := getattr(params, f.name)) != getattr(base, f.name))


register_cases("ROPE", quick=_cases)
