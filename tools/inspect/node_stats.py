"""What `graphrt trace` says of a tensor's values: statistics, and the text that llama-eval-callback prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.tensor import Tensor
from graphrt.tools.inspect.llama_names import llama_name

Values = npt.NDArray[np.float64]
#: Values that are shown at each end of an axis, as llama-eval-callback has it.
ENDS = 3


@dataclass(frozen=True)
class Stats:
    """min, max, mean, rms: over the finite values, None where there are none. sum: over all. nan, inf: how many; n: of
    how many. first, last: up to three values at either end, in the order of memory."""

    min: float | None
    max: float | None
    mean: float | None
    rms: float | None
    sum: float
    nan: int
    inf: int
    n: int
    first: tuple[float, ...]
    last: tuple[float, ...]

    @property
    def largest(self) -> float:
        """The largest finite magnitude, 0 where there is none."""
        return max(abs(self.min or 0.0), abs(self.max or 0.0))


def stats_of(values: Values) -> Stats:
    """The statistics of float64 values of any shape."""
    flat = values.reshape(-1)
    nan, inf = int(np.isnan(flat).sum()), int(np.isinf(flat).sum())
    good = flat[np.isfinite(flat)] if nan or inf else flat
    first, last = tuple(map(float, flat[:ENDS])), tuple(map(float, flat[-ENDS:]))
    with np.errstate(all="ignore"):
        total = float(flat.sum())
        if not good.size:
            return Stats(None, None, None, None, total, nan, inf, flat.size, first, last)
        rms = float(np.sqrt(np.mean(np.square(good))))
        mean = float(good.mean())
        return Stats(float(good.min()), float(good.max()), mean, rms, total, nan, inf, flat.size, first, last)


def eval_callback_lines(t: Tensor, values: Values) -> Iterator[str]:
    """What llama-eval-callback prints of a node, character by character, by the name that it has there; values: float64
    [ne3, ne2, ne1, ne0]."""
    sources = [*t.src, None, None][:2]
    first, second = (f"{llama_name(s)}{{{_ne(s)}}}" if s is not None else "" for s in sources)
    head = f"common_debug_cb_eval: {llama_name(t):>24} = ({t.dtype.name}) {_op(t):>10}"
    yield f"{head}({first}, {second}}}) = {{{_ne(t)}}}"
    with np.errstate(all="ignore"):
        total = float(values.sum())
    for cube in values:
        yield "    ["
        for matrix in _ends(cube, " " * 8 + "..., "):
            if isinstance(matrix, str):
                yield matrix
                continue
            yield " " * 8 + "["
            for row in _ends(matrix, " " * 12 + "..., "):
                yield row if isinstance(row, str) else " " * 12 + _row(row)
            yield " " * 8 + "],"
        yield "    ]"
        yield f"    sum = {total:f}"


def ends(values: Values) -> object:
    """Nested lists of the first and last three values along each axis."""
    for axis, n in enumerate(values.shape):
        if n > 2 * ENDS:
            values = np.take(values, [*range(ENDS), *range(n - ENDS, n)], axis)
    shown: object = values.tolist()
    return shown


def _ends(values: Values, gap: str) -> Iterator[Values | str]:
    """The first and last three along the first axis, and `gap` for those between."""
    if len(values) <= 2 * ENDS:
        yield from values
        return
    yield from values[:ENDS]
    yield gap
    yield from values[-ENDS:]


def _row(row: Values) -> str:
    numbers = [f"{v:12.4f}" for v in (row if len(row) <= 2 * ENDS else [*row[:ENDS], *row[-ENDS:]])]
    if len(row) <= 2 * ENDS:
        return f"[{', '.join(numbers)}  ],"
    return f"[{', '.join(numbers[:ENDS])},    ..., {', '.join(numbers[ENDS:])}  ],"


def _ne(t: Tensor) -> str:
    return ", ".join(map(str, t.ne))


def _op(t: Tensor) -> str:
    """As ggml_op_desc() has it: of UNARY and GLU the kind."""
    kind = getattr(t.params, "kind", None) if t.op in ("UNARY", "GLU") else None
    return kind.upper() if isinstance(kind, str) else t.op
