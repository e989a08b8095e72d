"""What api.py hands to public functions: plausible arguments, and what no function wants."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import graphrt
from graphrt.ops import FlashAttnParams, RopeParams, SampleParams
from graphrt.ops.score import number as number_of
from graphrt.ops.score import symbols, table, tanh, where
from graphrt.ops.score_tree import Expr
from graphrt.tensor import Tensor

#: Makers, so that no call sees what another has changed.
JUNK: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: True, lambda: False, lambda: 0, lambda: -1, lambda: 1, lambda: 7, lambda: 2**31,
    lambda: -(2**31) - 1, lambda: 2**63, lambda: -(2**63) - 1, lambda: 10**30, lambda: 0.5, lambda: -2.5,
    lambda: float("nan"), lambda: float("inf"), lambda: -float("inf"), lambda: 1e300, lambda: 1e-320, lambda: 1j,
    lambda: "", lambda: "abc", lambda: "f32", lambda: "q4_0", lambda: "cpu", lambda: "a\0b", lambda: "\ud800",
    lambda: "x" * 300, lambda: b"abc", list, lambda: [1], lambda: [1, 2], lambda: [None], lambda: ["a"],
    lambda: [[1.0], [2.0, 3.0]], lambda: [float("nan")], lambda: (1, 2, 3), lambda: (1, 1, 1, 1, 1), dict,
    lambda: {"a": 1}, set, object, lambda: range(3), lambda: (i for i in range(2)), lambda: np.zeros((3, 4)),
    lambda: np.zeros(4, np.float32), lambda: np.zeros(0, np.int32), lambda: np.int64(3), lambda: np.float32(2),
    lambda: np.array(["x"]), lambda: np.array([None]), lambda: np.array(2**40), lambda: torch.zeros(3, 4),
    lambda: torch.zeros(2, dtype=torch.bfloat16), lambda: graphrt.new_input("f32", 4, name="junk"),
    lambda: graphrt.new_tensor("i32", 4, name="loose"), lambda: Path("nowhere/at/all.gguf"), lambda: int,
    lambda: graphrt.ops.add, lambda: lambda *given: given, lambda: Exception("x"), lambda: bytearray(8),
    lambda: memoryview(b"abcd"), lambda: SampleParams(), lambda: [{"role": "user", "content": "hi"}],
    lambda: [{"role": 1}],
)  # fmt: skip

KINDS = (
    *("relu", "gelu", "silu", "tanh", "exp", "neg", "abs", "sigmoid", "sgn", "step", "reglu", "geglu", "swiglu"),
    *("swiglu_oai", "nothing", ""),
)
TYPES = ("f32", "f32", "f32", "f16", "i32", "i64", "f64", "q8_0", "bf16", "F32", "i8")


def junk(rng: random.Random) -> Any:
    return rng.choice(JUNK)()


def tensor(rng: random.Random, sizes: tuple[int, ...] = (1, 2, 3, 4, 32)) -> Tensor:
    """An input of a random small shape, now and then a view of one or the result of an op."""
    dt = rng.choice(TYPES)
    ne = [rng.choice(sizes) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]
    if dt == "q8_0":
        ne[0] = 32
    t = graphrt.new_input(dt, *ne, name=f"t{rng.randrange(10**9)}")
    if rng.random() < 0.2:
        return graphrt.ops.transpose(t) if dt != "q8_0" else t
    return graphrt.ops.scale(t, 2.0) if rng.random() < 0.1 and dt in ("f32", "f16") else t


def whole(rng: random.Random) -> int:
    return rng.choice((0, 0, 1, 1, 2, 3, 4, 8, 32, -1, 100))


def number(rng: random.Random) -> float:
    return rng.choice((0.0, 1.0, 0.5, 1e-5, 2.0, -1.0, 8.0, 100.0))


def text(rng: random.Random) -> str:
    return rng.choice((*KINDS, "f32", "a", "hello the sea"))


def wholes(rng: random.Random) -> list[int]:
    return [whole(rng) for _ in range(rng.choice((0, 1, 1, 2, 3, 4, 4, 12)))]


def score(rng: random.Random) -> Expr | None:
    """A score function of two to five parts, or None."""
    s, b, h, i, j = symbols()
    parts = (
        s,
        s * 0.5,
        tanh(s) * 30.0,
        number_of(number(rng)) * s,
        where(i < j, s, 0.0),
        table([1.0, 2.0])[i - j],
        h,
        b,
    )
    return None if rng.random() < 0.3 else s + rng.choice(parts) * rng.choice(parts)


def params(rng: random.Random, name: str) -> Any:
    """The record of parameters that an op takes, with a field or two of any value."""
    made = {"rope": RopeParams(n_dims=rng.choice((2, 4, 32, 3, 0, -2))), "sample": SampleParams()}
    return made.get(name, FlashAttnParams(1.0))
