"""Conformance cases of SOFT_MAX: row lengths, masks, rows that see nothing, ALiBi, sinks, gaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

from graphrt.ops.cases.gaps import gapped
from graphrt.ops.soft_max import soft_max
from graphrt.tensor import Dims, Tensor
from graphrt.testing import Case, Hiding, Inputs, MaskValues, Uniform, grid, register_cases


@dataclass(frozen=True)
class _Axes:
    """One point. ne: of the logits [n, n_q, n_head, n_seq]; spread: they lie from -spread to spread before the scale.

    mask: its type, None for none. rows: from which queries the mask hides everything, shares of n_q from and to.
    mask_rows: how many rows the mask has beyond n_q. gaps: between the rows of the logits.
    """

    ne: Dims = (17, 5, 6, 2)
    mask: str | None = None
    max_bias: float = 0.0
    sinks: bool = False
    scale: float = 1.0
    rows: tuple[float, float] = (0.0, 0.0)
    mask_rows: int = 0
    spread: float = 10.0
    gaps: bool = False


def _axes() -> Iterator[_Axes]:
    shapes = ((17, 5, 6, 2), (1, 3, 6, 1), (1000, 2, 6, 1))
    for base in (
        _Axes(),
        _Axes(mask="f16", scale=0.125),
        _Axes(mask="f32", max_bias=8.0),
        _Axes(mask="f16", max_bias=8.0, sinks=True, scale=0.5),
        _Axes(sinks=True),
    ):
        yield from grid(base, {"ne": shapes})
    yield from grid(
        _Axes(mask="f16"), {"rows": ((0.0, 0.4), (0.4, 0.6), (0.6, 1.0), (0.0, 1.0)), "sinks": (False, True)}
    )
    yield from grid(_Axes(mask="f16", max_bias=4.0), {"ne": [(33, 3, heads, 2) for heads in (2, 10, 12, 14)]})
    yield from grid(_Axes(), {"ne": ((1023, 3, 1, 1), (4097, 2, 1, 1), (50257, 1, 1, 1)), "spread": (10.0, 200.0)})
    yield from grid(_Axes(gaps=True, scale=0.5, mask_rows=3), {"mask": (None, "f16", "f32"), "sinks": (False, True)})


def _make(inputs: Inputs, axes: _Axes) -> Tensor:
    n, n_q, n_head, n_seq = axes.ne
    values = Uniform(-axes.spread, axes.spread)
    a = gapped(inputs, "a", "f32", axes.ne, values) if axes.gaps else inputs("a", "f32", axes.ne, values)
    mask = None
    if axes.mask is not None:  # of two heads: a mask for every other one
        mask = inputs("mask", axes.mask, (n, n_q + axes.mask_rows, 2, n_seq), Hiding(MaskValues(0.3), (), axes.rows))
    sinks = inputs("sinks", "f32", (n_head,), Uniform(0, 10)) if axes.sinks else None
    return soft_max(a, mask, sinks, axes.scale, axes.max_bias)


def _cases() -> Iterator[Case]:
    for axes in dict.fromkeys(_axes()):
        yield Case("SOFT_MAX", asdict(axes), partial(_make, axes=axes))


register_cases("SOFT_MAX", quick=_cases)
