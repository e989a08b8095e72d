"""`graphrt memory --svg`: each tensor of an arena as a rectangle, from its first to its last step, at its offset.

One picture for each arena, one under another. Colours tell the kind of op (Okabe and Ito's, which colour-blind people
tell apart), with a legend; tooltips tell the rest. The style sheet follows the reader's choice of light or dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from graphrt.printing import human_bytes
from graphrt.tools.common import printable
from graphrt.tools.memory.lifetimes import Life, Step
from graphrt.tools.memory.report import ArenaReport, MemoryReport
from graphrt.tools.memory.text import step_text

#: Sizes in pixels.
WIDTH, LEFT, RIGHT, PLOT_HEIGHT = 1400, 80, 24, 520
HEADER, ABOVE, BELOW = 64, 62, 64  # the picture's title and legend; over and under each plot
CHAR_WIDTH, MIN_LABEL_HEIGHT = 6.2, 11
MIN_SIDE = 0.8  # so that the smallest tensor still shows

#: Kind of op: its fill, the colour of text on it, and its ops; what is in none is "other". Of fused ops the first kind
#: that one of them has is shown.
KINDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "matrix product": ("#0072B2", "#fff", ("MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "OUT_PROD_ID", "MUL_MAT_ID_BACK")),
    "attention": (
        "#D55E00",
        "#000",
        (
            "FLASH_ATTN_EXT",
            "FLASH_ATTN_LSE",
            "FLASH_ATTN_VARLEN",
            "FLASH_ATTN_VARLEN_LSE",
            "SOFT_MAX",
            "KQ_MASK",
            "FLASH_ATTN_BACK",
            "FLASH_ATTN_VARLEN_BACK",
            "SOFT_MAX_BACK",
        ),
    ),
    "norm": ("#009E73", "#000", ("NORM", "RMS_NORM", "L2_NORM", "RMS_NORM_BACK")),
    "elementwise": (
        "#56B4E9",
        "#000",
        (
            "ADD",
            "SUB",
            "MUL",
            "DIV",
            "SCALE",
            "SQR",
            "SQRT",
            "UNARY",
            "GLU",
            "CLAMP",
            "FILL",
            "SILU_BACK",
            "UNARY_BACK",
            "OPT_STEP_SGD",
            "OPT_STEP_ADAMW",
            "ADD_ID",
        ),
    ),
    "rotation": ("#F0E442", "#000", ("ROPE", "ROPE_BACK")),
    "rows and copies": (
        "#E69F00",
        "#000",
        (
            "GET_ROWS",
            "SET_ROWS",
            "CPY",
            "CONT",
            "DUP",
            "CONCAT",
            "REPEAT",
            "REPEAT_BACK",
            "GET_ROWS_BACK",
            "SET_ROWS_BACK",
            "VIEW_BACK",
            "ALL_REDUCE",
            "ALL_GATHER",
            "REDUCE_SCATTER",
            "SEND",
            "RECV",
            "copy",
        ),
    ),
    "input": ("#CC79A7", "#000", ("input",)),
    "other": ("#999999", "#000", ()),
}
_KIND_OF = {op: kind for kind, (_, _, ops) in KINDS.items() for op in ops}
_CLASS = {kind: f"k{i}" for i, kind in enumerate(KINDS)}

STYLE = """
text { font: 12px Helvetica, Arial, sans-serif; fill: #222; }
.title { font-size: 17px; font-weight: bold; }
.small, .on { font-size: 10.5px; }
.paper { fill: #fff; }
.axis { stroke: #555; fill: none; }
.grid { stroke: #888; stroke-opacity: 0.25; }
.band { fill: #888; fill-opacity: 0.1; }
.life { stroke: #fff; stroke-width: 0.4; }
.life:hover { stroke: #000; stroke-width: 2; }
.peak { stroke: #000; stroke-width: 1.5; stroke-dasharray: 5 3; }
.wrong { fill: none; stroke: #000; stroke-width: 3; }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd; }
  .paper { fill: #16181c; }
  .axis { stroke: #aaa; }
  .life { stroke: #16181c; }
  .life:hover, .peak, .wrong { stroke: #fff; }
}
.on { pointer-events: none; }
"""


def svg(report: MemoryReport, title: str) -> str:
    """The picture as the text of an SVG file."""
    height = HEADER + max(1, len(report.arenas)) * (ABOVE + PLOT_HEIGHT + BELOW)
    colours = "".join(
        f".{_CLASS[kind]} {{ fill: {fill}; }}\n.on.{_CLASS[kind]}t {{ fill: {text}; }}\n"
        for kind, (fill, text, _) in KINDS.items()
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{_text("memory of " + title)}">',
        f"<title>{_text('memory of ' + title)}</title>",
        f"<style>{STYLE}{colours}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="{LEFT}" y="26">Memory by step: {_text(title)}</text>',
        *_legend(),
    ]
    if not report.arenas:
        out.append(f'<text x="{LEFT}" y="{HEADER + 30}">There is no compute arena: all tensors are bound.</text>')
    for i, arena in enumerate(report.arenas):
        out += _Plot(arena, report.steps, HEADER + ABOVE + i * (ABOVE + PLOT_HEIGHT + BELOW)).lines()
    return "\n".join([*out, "</svg>"]) + "\n"


def kind_of(op: str) -> str:
    """The kind of op, which its colour tells; of fused ops ("MUL_MAT+ADD") the one that comes first in KINDS."""
    found = {_KIND_OF.get(part, "other") for part in op.split("+")}
    return next(kind for kind in KINDS if kind in found)


def _legend() -> Iterator[str]:
    x = float(LEFT)
    for kind in KINDS:
        yield f'<rect class="{_CLASS[kind]}" x="{x:.0f}" y="40" width="13" height="13"/>'
        yield f'<text x="{x + 18:.0f}" y="51">{kind}</text>'
        x += 44 + len(kind) * CHAR_WIDTH


class _Plot:
    """One arena. top: of the plot's frame, in pixels; byte and step become pixels by `y` and `x`."""

    def __init__(self, report: ArenaReport, steps: Sequence[Step], top: float) -> None:
        self.report, self.steps, self.top = report, steps, top
        self.per_step = (WIDTH - LEFT - RIGHT) / (len(steps) + 1)  # the last column is the end
        self.per_byte = PLOT_HEIGHT / max(1, report.arena.nbytes)

    def x(self, step: float) -> float:
        return LEFT + step * self.per_step

    def y(self, offset: float) -> float:
        """Offset 0 is at the bottom."""
        return self.top + PLOT_HEIGHT - offset * self.per_byte

    def lines(self) -> Iterator[str]:
        yield from self._caption()
        yield from self._layers()
        yield from self._axes()
        for life in sorted(self.report.arena.lives, key=lambda x: (x.first, x.offset)):
            yield from self._life(life)
        for life in {x for v in self.report.wrong for x in v.tensors}:
            yield self._box(life, "wrong")
        yield from self._peak()

    def _caption(self) -> Iterator[str]:
        r = self.report
        said = (
            f"Arena of {r.arena.backend}: {human_bytes(r.arena.nbytes)} for {len(r.arena.lives)} tensors; "
            f"{human_bytes(r.alone)} without reuse; {human_bytes(r.peak.gaps)} in gaps at the peak"
        )
        wrong = f"; {len(r.wrong)} violations, framed" if r.wrong else ""
        yield f'<text x="{LEFT}" y="{self.top - 38:.0f}">{_text(said + wrong)}</text>'

    def _layers(self) -> Iterator[str]:
        """Every other layer has a band behind it; its number is over it where there is room."""
        free = 0.0
        spans: dict[int, list[int]] = {}
        for i, step in enumerate(self.steps):
            if step.layer is not None:
                spans.setdefault(step.layer, []).append(i)
        for layer, numbers in spans.items():
            x, width = self.x(numbers[0]), (numbers[-1] - numbers[0] + 1) * self.per_step
            name = f"layer {layer}" if width > 60 else str(layer)
            if layer % 2 == 0:
                yield f'<rect class="band" x="{x:.1f}" y="{self.top:.0f}" width="{width:.1f}" height="{PLOT_HEIGHT}"/>'
            middle, half = x + width / 2, len(name) * 3
            if middle - half > free:
                place = f'text-anchor="middle" x="{middle:.1f}" y="{self.top - 4:.0f}"'
                yield f'<text class="small" {place}>{name}</text>'
                free = middle + half + 4

    def _axes(self) -> Iterator[str]:
        bottom, right = self.top + PLOT_HEIGHT, WIDTH - RIGHT
        unit, size = _unit(self.report.arena.nbytes)
        for offset in _ticks(self.report.arena.nbytes / size):
            y = self.y(offset * size)
            yield f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>'
            yield f'<text text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{offset:.6g}</text>'
        for step in _ticks(len(self.steps), whole=True):
            x = self.x(step)
            yield f'<path class="axis" d="M{x:.1f} {bottom:.0f}v5"/>'
            yield f'<text text-anchor="middle" x="{x:.1f}" y="{bottom + 19:.0f}">{step:.0f}</text>'
        yield f'<path class="axis" d="M{LEFT} {self.top:.0f}V{bottom:.0f}H{right}"/>'
        middle = self.top + PLOT_HEIGHT / 2
        yield f'<text text-anchor="middle" transform="translate(20 {middle:.0f}) rotate(-90)">offset ({unit})</text>'
        what = "step (a node, or nodes that are fused, in the order of execution; layers above)"
        yield f'<text text-anchor="middle" x="{(LEFT + right) / 2:.0f}" y="{bottom + 40:.0f}">{what}</text>'

    def _life(self, life: Life) -> Iterator[str]:
        kind = kind_of(life.op)
        tip = (
            f"{life.name}\n{life.op}, {human_bytes(life.nbytes)} at offset {life.offset}\n"
            f"from step {step_text(life.first, self.steps)} to {step_text(life.last, self.steps)}"
        )
        yield self._box(life, f"life {_CLASS[kind]}", tip)
        width, height = (life.last - life.first + 1) * self.per_step, life.nbytes * self.per_byte
        room = int((width - 6) / CHAR_WIDTH)
        name = printable(life.name)
        if height >= MIN_LABEL_HEIGHT and room >= min(len(name), 12):
            shown = name if len(name) <= room else name[: room - 1] + "…"
            y = self.y(life.offset + life.nbytes / 2) + 4
            yield f'<text class="on {_CLASS[kind]}t" x="{self.x(life.first) + 3:.1f}" y="{y:.1f}">{_text(shown)}</text>'

    def _box(self, life: Life, style: str, tip: str = "") -> str:
        width = max(MIN_SIDE, (life.last - life.first + 1) * self.per_step)
        height = max(MIN_SIDE, life.nbytes * self.per_byte)
        place = f'x="{self.x(life.first):.1f}" y="{self.y(life.offset) - height:.1f}"'
        size = f'width="{width:.1f}" height="{height:.1f}"'
        return f'<rect class="{style}" {place} {size}>' + (f"<title>{_text(tip)}</title>" if tip else "") + "</rect>"

    def _peak(self) -> Iterator[str]:
        peak = self.report.peak
        x = self.x(peak.step + 0.5)
        anchor = "end" if x > WIDTH / 2 else "start"
        said = f"peak: {human_bytes(peak.nbytes)} at step {step_text(peak.step, self.steps)}"
        yield f'<path class="peak" d="M{x:.1f} {self.top:.0f}V{self.top + PLOT_HEIGHT:.0f}"/>'
        yield f'<text text-anchor="{anchor}" x="{x:.1f}" y="{self.top - 20:.0f}">{_text(said)}</text>'


def _unit(nbytes: int) -> tuple[str, int]:
    """What sizes up to `nbytes` are counted in, and its bytes: the largest unit of which there is one at least."""
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    return next(((name, size) for name, size in units if nbytes >= size), ("B", 1))


def _ticks(top: float, whole: bool = False) -> list[float]:
    """At most 11 round numbers from 0 to `top`."""
    step = 1.0
    while top / step > 10:
        step *= 10
    while not whole and top / step < 1 and step > 1e-9:
        step /= 10
    step = next((s for s in (step / 5, step / 2) if top / s <= 10 and (not whole or s >= 1)), step)
    return [i * step for i in range(int(top / step + 1e-9) + 1)]


def _text(text: str) -> str:
    """Text that XML takes anywhere, with line breaks."""
    return "&#10;".join(escape(printable(line)) for line in text.split("\n"))
