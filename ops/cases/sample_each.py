"""Conformance cases of SAMPLE_EACH and PENALIZE: rows of one graph that ask for different things."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from graphrt.ops.sample_each import N_SETTINGS, RowSettings, penalize, sample_each
from graphrt.tensor import Tensor
from graphrt.testing import Case, Given, Inputs, Normal, Rows, Uniform, register_cases

_MIN_P = math.log(0.05)
#: Of each kind of truncation one row, and what they make together; the first takes the highest logit.
EACH = (
    RowSettings(),
    RowSettings(0.8, 40, 0.95, _MIN_P),
    RowSettings(1.5, 64, 0.7, min_keep=9),
    RowSettings(1.0, 5, 1.0, math.log(0.5)),
    RowSettings(1.3, 50, 1.0, typical_p=0.6),
    RowSettings(1.0, 60, 1.0, xtc_probability=1.0, xtc_threshold=0.02),
    RowSettings(2.0, 33, 0.9, _MIN_P, 3, typical_p=0.9, xtc_probability=0.5, xtc_threshold=0.01),
    RowSettings(0.01, 1000, 0.0, 0.0, 2),
)
#: Penalties, biases and masks, each by itself and together; the first changes nothing.
CHANGES = (
    RowSettings(),
    RowSettings(repeat=1.3, last_n=5.0),
    RowSettings(frequency=0.25, presence=-0.5, last_n=100.0),
    RowSettings(n_biases=3.0),
    RowSettings(masked=1.0),
    RowSettings(repeat=0.7, frequency=-0.125, presence=1.0, last_n=9.0, n_biases=5.0, masked=1.0),
    RowSettings(n_biases=5.0, repeat=1.1, last_n=0.0),
)


@dataclass(frozen=True)
class Past:
    """Ids of which many come more than once."""

    n: int

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(0, self.n, shape) // 3


@dataclass(frozen=True)
class Bits:
    """Words of random bits."""

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.integers(-(1 << 31), 1 << 31, shape)


def _table(settings: tuple[RowSettings, ...]) -> Given:
    return Given(tuple(x for each in settings for x in each.column))


def _make_each(inputs: Inputs, n: int, rows: int, step: float, most: int, table: int) -> Tensor:
    logits = inputs("logits", "f32", (n, rows), Normal(2.0, step=step))
    slots = inputs("slots", "i32", (rows,), Rows(table, distinct=True))
    settings = inputs("settings", "f64", (N_SETTINGS, table), _table(EACH[:table]))
    return sample_each(logits, inputs("uniforms", "f64", (2, rows), Uniform(0.0, 1.0)), slots, settings, most)


def _make_penalize(inputs: Inputs, n: int, rows: int, size: int) -> Tensor:
    table = len(CHANGES)
    logits = inputs("logits", "f32", (n, rows), Normal(2.0))
    slots = inputs("slots", "i32", (rows,), Rows(table, distinct=True))
    settings = inputs("settings", "f64", (N_SETTINGS, table), _table(CHANGES))
    biased = inputs("biased", "i32", (6, table), Rows(n, distinct=True))
    biases = inputs("biases", "f64", (6, table), Given((1.5, -math.inf, 0.25, -3.0, 100.0)))
    past = inputs("past", "i32", (size, table), Past(min(n, 30)))
    n_past = inputs("n_past", "i32", (rows,), Rows(2 * size))
    allowed = inputs("allowed", "i32", (-(-n // 32), table), Bits())
    return penalize(logits, slots, settings, biased, biases, past, n_past, allowed)


def _each_cases() -> Iterator[Case]:
    points = [(300, 8, 0.0, 64, 8), (300, 6, 0.5, 64, 8), (3001, 8, 0.0, 64, 8), (40, 5, 0.0, 64, 8)]
    for n, rows, step, most, table in [*points, (3001, 3, 0.25, 1024, 8), (70, 2, 0.0, 7, 2)]:
        axes: dict[str, Any] = {"n": n, "rows": rows, "step": step, "most": most, "table": table}
        yield Case("SAMPLE_EACH", axes, partial(_make_each, **axes))


def _each_full() -> Iterator[Case]:
    yield from _each_cases()
    for rows, step, most in ((8, 0.0, 64), (3, 0.25, 1024)):
        axes: dict[str, Any] = {"n": 128256, "rows": rows, "step": step, "most": most, "table": 8}
        yield Case("SAMPLE_EACH", axes, partial(_make_each, **axes))


def _penalize_cases() -> Iterator[Case]:
    for n, rows, size in ((50, 7, 16), (4097, 7, 64), (300, 3, 200), (31, 5, 7)):
        axes: dict[str, Any] = {"n": n, "rows": rows, "size": size}
        yield Case("PENALIZE", axes, partial(_make_penalize, **axes))


register_cases("SAMPLE_EACH", quick=_each_cases, full=_each_full)
register_cases("PENALIZE", quick=_penalize_cases)
