"""A graph as a picture for notebooks: a line of text a tensor, in the order of running, and an arc for each source."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence

from graphrt.printing import cut, printable
from graphrt.tensor import Tensor

#: Lines of a picture; of a larger graph the first and the last tensors are shown.
MAX_LINES = 80
#: Pixels: of a line, of a character, and from one arc to the next wider one.
LINE, CHARACTER, STEP = 18, 7.3, 7
#: How many steps wide the widest arc is.
MAX_STEPS = 14


def svg(tensors: Sequence[Tensor], inputs: Collection[Tensor], outputs: Collection[Tensor]) -> str:
    """The picture of a graph's tensors, leafs first. Inputs are marked "in", results "out"."""
    shown = tensors if len(tensors) <= MAX_LINES else [*tensors[: MAX_LINES // 2], *tensors[-MAX_LINES // 2 :]]
    left_out = len(tensors) - len(shown)
    lines = {t: i + (1 if left_out and i >= MAX_LINES // 2 else 0) for i, t in enumerate(shown)}
    left = STEP * MAX_STEPS + 14
    said = {t: _described(t, "in  " if t in inputs else "out " if t in outputs else "    ") for t in shown}
    texts = [_text(left, row, said[t]) for t, row in lines.items()]
    if left_out:
        texts.append(_text(left, MAX_LINES // 2, f"... {left_out} more tensors"))
    arcs = [_arc(left, lines[s], row) for t, row in lines.items() for s in t.sources() if s in lines]
    width = left + CHARACTER * max(map(len, said.values()), default=0) + 20
    height = LINE * (len(shown) + (1 if left_out else 0)) + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}"><rect width="100%" height="100%" fill="white"/>'
        f'<g fill="none" stroke="#0072B2" stroke-width="1.2">{"".join(arcs)}</g>'
        f'<g font-family="monospace" font-size="12" fill="black">{"".join(texts)}</g></svg>'
    )


def _described(t: Tensor, mark: str) -> str:
    sources = ", ".join(cut(s.name, 30) for s in t.sources())
    made = "" if t.is_leaf else f" = {t.op}({sources})"
    return printable(f"{mark}{cut(t.name, 40)}{made}  {t.describe()}")


def _text(left: float, row: int, text: str) -> str:
    return f'<text x="{left}" y="{LINE * row + 19}" xml:space="preserve">{html.escape(text)}</text>'


def _arc(left: float, start: int, stop: int) -> str:
    """From a source's line down to its reader's, the wider the farther."""
    x, width = left - 8, STEP * min(MAX_STEPS, abs(stop - start))
    y0, y1 = LINE * start + 15, LINE * stop + 15
    return (
        f'<path d="M{x} {y0}C{x - width} {y0} {x - width} {y1} {x} {y1}"/>'
        f'<circle cx="{x}" cy="{y1}" r="2" fill="#0072B2"/>'
    )
