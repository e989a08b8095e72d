"""What the launches of mma.py and wgmma.py share: tiles, the size of planes, arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphrt.backends.triton.kernels.products.activations import Q8Rows
from graphrt.backends.triton.kernels.products.half import Activations, Gate
from graphrt.backends.triton.packing import Packed, packing_of, whole_plane

#: Matrices of one launch.
MAX_SEGMENTS = 3
#: Elements of k of a step.
STEP = 128
#: Shared memory that the system takes for each program, in bytes, and registers of a multiprocessor.
RESERVED, REGISTERS = 1024, 65536


@dataclass(frozen=True, eq=False)
class Split:
    """k in `ranges` ranges of `steps` steps. parts: f32, a tile's sums for each; counter: int32, zeros, one a tile."""

    ranges: int
    steps: int
    parts: torch.Tensor
    counter: torch.Tensor


def tiles_of(weights: Sequence[Packed], rows: int, gate: Gate | None) -> int:
    """Tiles of so many rows in a launch; with a gate half of them are the gate's."""
    if gate is not None:
        return -(-weights[0].rows // (rows // 2))
    return sum(-(-w.rows // rows) for w in weights)


def row_bytes(kind: str) -> int:
    """Shared memory of a row's planes in a step."""
    p = packing_of(kind)
    assert p is not None
    return 16 * (p.words + p.high_words) + 4 * p.scales * p.scale_type.itemsize + 4 * (p.supers > 0)


def arguments(
    weights: Sequence[Packed], x: Activations | Q8Rows, outs: Sequence[torch.Tensor], biases: Sequence[torch.Tensor],
    residual: torch.Tensor | None, split: Split | None, steps: int,
) -> dict[str, Any]:  # fmt: skip
    """All but x's values and what is fixed when a kernel is compiled. steps: of all of k. For what lacks stands
    outs[0]."""
    none = outs[0]
    n = x.n if isinstance(x, Q8Rows) else x.rows
    args: dict[str, Any] = {
        "p_residual": none if residual is None else residual, "p_parts": split.parts if split else none,
        "p_counter": split.counter if split else none, "n": n, "k": x.k, "n_splits": split.ranges if split else 1,
        "steps_a_split": split.steps if split else steps,
    }  # fmt: skip
    if isinstance(x, Activations):
        args["p_factors"] = none if x.factors is None else x.factors
    for i in range(MAX_SEGMENTS):
        out = outs[min(i, len(outs) - 1)]
        args |= _segment(i, weights[min(i, len(weights) - 1)], out, biases[i] if i < len(biases) else none)
    return args


def _segment(i: int, w: Packed, out: torch.Tensor, bias: torch.Tensor) -> dict[str, Any]:
    """The i-th matrix. Supers: as int32; for what isn't there stand quants."""
    supers = w.quants if w.supers is None else w.words(w.supers)
    planes = (w.quants, w.quants if w.high is None else w.high, whole_plane(w.scales), supers)
    named = {f"p_{name}{i}": plane for name, plane in zip(("quants", "high", "scales", "supers"), planes)}
    return named | {f"p_out{i}": out, f"p_bias{i}": bias, f"m{i}": w.rows}
