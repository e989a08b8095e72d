"""`graphrt diff --svg`: error by depth. Each node is a dot at its NMSE, on a logarithmic scale, a mode a shape and a
colour (Okabe and Ito's, which colour-blind people tell apart), with the tolerance of each behind it. Layers are bands;
nodes over their tolerance are ringed, the first one is named. The style sheet follows the reader's
choice of light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from graphrt.tools.common import printable
from graphrt.tools.diff.nodes import NodeDiff
from graphrt.tools.diff.report import Mode, Report
from graphrt.tools.inspect.labels import heading

#: Sizes in pixels.
WIDTH, HEIGHT = 980, 520
LEFT, RIGHT, TOP, BOTTOM = 78, 20, 118, 56
ZERO = 22  # the scale's lower end is so far above the axis, where nodes without error lie
#: Nodes over their tolerance whose rings have tooltips; of more all rings are one thin path.
MOST_TIPS = 40
RING = 5.5
#: From the first node over its tolerance to its name, and of a bold letter.
BESIDE, BOLD_WIDTH = 20, 8.2
#: The scale, as powers of ten, where all values are equal.
EMPTY_DECADES = (-12, 0)

CLASSES = {"free-running": "free", "re-synced": "own"}
STYLE = """
text { font: 13px Helvetica, Arial, sans-serif; fill: #222; }
.title { font-size: 17px; font-weight: bold; }
.small { font-size: 11.5px; }
.paper { fill: #fff; }
.axis { stroke: #555; fill: none; }
.grid { stroke: #888; stroke-opacity: 0.25; fill: none; }
.band { fill: #888; fill-opacity: 0.1; }
.free, .own { fill: none; stroke-width: 5.5; }
.free { stroke: #0072B2; stroke-linecap: round; }
.own { stroke: #D55E00; stroke-linecap: square; stroke-width: 4; }
.allowed { fill: none; stroke-width: 2; stroke-opacity: 0.4; }
.allowed.free { stroke-linecap: butt; }
.allowed.own { stroke-linecap: butt; }
.name { font-weight: bold; }
.over { fill: none; stroke: #000; stroke-width: 1.6; pointer-events: all; }
.many { stroke-width: 0.6; }
.first { stroke: #000; fill: none; }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd; }
  .paper { fill: #16181c; }
  .axis { stroke: #aaa; }
  .free { stroke: #56B4E9; }
  .own { stroke: #E69F00; }
  .over, .first { stroke: #fff; }
}
"""


def svg(report: Report) -> str:
    """The picture as the text of an SVG file."""
    title = f"Error by depth: {heading(report.info)}"
    said = f"reference {report.sides[0]}, other side {report.sides[1]}"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{_text(title)}">',
        f"<title>{_text(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="28">{_text(title)}</text>',
        f'<text x="{LEFT}" y="50">{_text(said)}</text>',
        *_Plot(report).lines(),
    ]
    return "\n".join([*out, "</svg>"]) + "\n"


class _Plot:
    """Node and NMSE become pixels by `x` and `y`."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.per_node = (WIDTH - LEFT - RIGHT) / max(len(report.info.nodes), 1)
        seen = [v for m in report.modes for d in m.nodes for v in (d.nmse, d.verdict.limit or 0.0) if 0 < v < math.inf]
        powers = [math.log10(v) for v in seen]
        self.low, self.high = (math.floor(min(powers)), math.ceil(max(powers))) if powers else EMPTY_DECADES
        self.high = max(self.high, self.low + 1)

    def x(self, index: float) -> float:
        return LEFT + (index + 0.5) * self.per_node

    def y(self, nmse: float) -> float:
        """0 lies on the axis, what is not finite at the top."""
        if not nmse > 0:
            return float(HEIGHT - BOTTOM) if nmse == 0 else float(TOP)
        share = (min(math.log10(nmse), self.high) - self.low) / (self.high - self.low) if nmse < math.inf else 1.0
        return HEIGHT - BOTTOM - ZERO - share * (HEIGHT - BOTTOM - TOP - ZERO - 8)

    def lines(self) -> Iterator[str]:
        yield from self._layers()
        yield from self._axes()
        for mode in self.report.modes:
            yield self._allowed(mode)
        for mode in self.report.modes:
            yield self._dots(mode)
        for mode in self.report.modes:
            if len(mode.over) <= MOST_TIPS:
                yield from (self._ring(d) for d in mode.over)
            else:
                yield self._rings(mode.over)
        yield from self._legend()
        yield from self._first()

    def _layers(self) -> Iterator[str]:
        """Every other layer has a band behind it, its number over it where there is room."""
        spans: dict[int, list[int]] = {}
        for i, t in enumerate(self.report.info.nodes):
            if t.layer is not None:
                spans.setdefault(t.layer, []).append(i)
        free = 0.0
        for layer, indices in spans.items():
            x, width = self.x(indices[0] - 0.5), (indices[-1] - indices[0] + 1) * self.per_node
            name = f"layer {layer}" if width > 50 else str(layer)
            if layer % 2 == 0:
                height = HEIGHT - BOTTOM - TOP
                yield f'<rect class="band" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{height}"/>'
            middle, half = x + width / 2, len(name) * 3.4
            if middle - half > free:
                yield f'<text class="small" text-anchor="middle" x="{middle:.1f}" y="{TOP - 5}">{name}</text>'
                free = middle + half + 3

    def _axes(self) -> Iterator[str]:
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        step = max(1, math.ceil((self.high - self.low) / 8))
        for power in range(self.low, self.high + 1, step):
            y = self.y(10.0**power)
            yield f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>'
            yield f'<text text-anchor="end" x="{LEFT - 7}" y="{y + 4:.1f}">1e{power}</text>'
        if any(d.nmse == 0 for m in self.report.modes for d in m.nodes):
            yield f'<text text-anchor="end" x="{LEFT - 7}" y="{bottom + 5}">0</text>'
        yield f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
        n = len(self.report.info.nodes)
        step = next((s for p in range(7) for s in (10**p, 2 * 10**p, 5 * 10**p) if n / s <= 10), n)
        first = self.report.info.nodes[0].index
        for number in range(-(-first // step) * step, first + n, step):
            x = self.x(number - first)
            yield f'<path class="axis" d="M{x:.1f} {bottom}v5"/>'
            yield f'<text text-anchor="middle" x="{x:.1f}" y="{bottom + 19}">{number}</text>'
        middle = (TOP + bottom) / 2
        yield f'<text text-anchor="middle" transform="translate(18 {middle:.0f}) rotate(-90)">NMSE</text>'
        what = "number of the node, as `graphrt dump` has it (layers above)"
        yield f'<text text-anchor="middle" x="{(LEFT + right) / 2:.0f}" y="{bottom + 42}">{what}</text>'

    def _allowed(self, mode: Mode) -> str:
        """The tolerances, as a short dash for each node that has one."""
        half = max(1.5, self.per_node)
        at = [(self.x(d.index) - half, self.y(d.verdict.limit)) for d in mode.nodes if d.verdict.limit]
        dashes = "".join(f"M{x:.1f} {y:.1f}h{2 * half:.1f}" for x, y in at)
        return f'<path class="{CLASSES[mode.name]} allowed" d="{dashes or "M0 0"}"/>'

    def _dots(self, mode: Mode) -> str:
        dots = "".join(f"M{self.x(d.index):.1f} {self.y(d.nmse):.1f}h0" for d in mode.nodes)
        return f'<path class="{CLASSES[mode.name]}" d="{dots or "M0 0"}"/>'

    def _ring(self, d: NodeDiff) -> str:
        tip = f"{d.key}\nNMSE {d.nmse:.3g}, tolerance {d.verdict.limit or 0:.3g}"
        place = f'cx="{self.x(d.index):.1f}" cy="{self.y(d.nmse):.1f}" r="{RING}"'
        return f'<circle class="over" {place}><title>{_text(tip)}</title></circle>'

    def _rings(self, nodes: Sequence[NodeDiff]) -> str:
        half = f"a{RING} {RING} 0 1 0"
        at = [(self.x(d.index), self.y(d.nmse)) for d in nodes]
        rings = "".join(f"M{x - RING:.1f} {y:.1f}{half} {2 * RING} 0{half} {-2 * RING} 0" for x, y in at)
        return f'<path class="over many" d="{rings}"/>'

    def _legend(self) -> Iterator[str]:
        x, y = float(LEFT), 78
        for mode in self.report.modes:
            style = CLASSES[mode.name]
            yield f'<path class="{style}" d="M{x + 5:.0f} {y - 4}h0"/>'
            said = f"{mode.name} ({len(mode.nodes)} nodes, {len(mode.over)} over)"
            yield f'<text x="{x + 16:.0f}" y="{y}">{said}</text>'
            x += 34 + 6.4 * len(said)
            yield f'<path class="{style} allowed" d="M{x:.0f} {y - 4}h14"/>'
            yield f'<text x="{x + 20:.0f}" y="{y}">its tolerance</text>'
            x += 122
        if any(mode.over for mode in self.report.modes):
            yield f'<circle class="over" cx="{x + 5:.0f}" cy="{y - 4}" r="{RING}"/>'
            yield f'<text x="{x + 18:.0f}" y="{y}">over it</text>'

    def _first(self) -> Iterator[str]:
        """The first node over its tolerance by name, of the mode that feeds the reference's inputs if it has one."""
        found = [mode.first.diff for mode in self.report.modes if mode.first is not None]
        if not found:
            return
        d = found[-1]
        x, y = self.x(d.index), self.y(d.nmse)
        room = int((WIDTH - LEFT - RIGHT - 2 * BESIDE) / BOLD_WIDTH)
        name = printable(d.key)
        said = f"first: {name if len(name) <= room - 7 else name[: room - 8] + '…'}"
        width = len(said) * BOLD_WIDTH
        left = x - BESIDE - width > LEFT  # before it there is room: all is within tolerance there
        start = x - BESIDE - width if left else min(x + BESIDE, WIDTH - RIGHT - width)
        edge = x - 6 if left else x + 6
        yield f'<path class="first" d="M{edge:.1f} {y:.1f}H{start + width if left else start:.1f}"/>'
        # A ground of its own, since not every viewer draws an outline behind letters (paint-order).
        yield f'<rect class="paper" x="{start:.1f}" y="{y - 9:.1f}" width="{width:.1f}" height="18"/>'
        yield f'<text class="name" x="{start + 3:.1f}" y="{y + 4.5:.1f}">{escape(said)}</text>'


def _text(text: str) -> str:
    """Text that XML takes anywhere, with line breaks."""
    return "&#10;".join(escape(printable(line)) for line in text.split("\n"))
