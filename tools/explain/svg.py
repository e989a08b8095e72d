"""`graphrt explain --svg`: which program has which part of each tile of an attention, and where parts are merged.

A row is a place that the device has for a program; along it the k-blocks that its programs visit, one tile after the
other. Grey is idle: after a row's last k-block, and places without a program. All rows are of one height, so that the
coloured share of the plot is the efficiency. Neighbouring tiles differ in colour (Okabe and Ito's, which colour-blind
people tell apart); parts that others merge are striped, the part that merges them has a thick edge. Tooltips tell the
rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby

from graphrt.printing import count_text
from graphrt.program import Bar, TilePlan
from graphrt.tools.common import printable

#: Sizes in pixels.
WIDTH, LEFT, RIGHT, TOP, BELOW = 1400, 92, 24, 132, 58
PLOT_HEIGHT, MIN_ROW, MAX_ROW = 792, 3.0, 30.0
CHAR_WIDTH, MIN_LABEL_HEIGHT = 5.9, 11
#: Rows that the note on left out ones takes; below this height edges of bars are thinner.
GAP_ROWS, LOW_ROW = 5, 6.0
#: Fills of tiles in turn, and the colour of text on them.
FILLS = (
    ("#56B4E9", "#000"), ("#E69F00", "#000"), ("#009E73", "#fff"), ("#F0E442", "#000"), ("#0072B2", "#fff"),
    ("#D55E00", "#fff"), ("#CC79A7", "#000"),
)  # fmt: skip

STYLE = """
text { font: 12px Helvetica, Arial, sans-serif; fill: #222; }
.title { font-size: 17px; font-weight: bold; }
.on { font-size: 10.5px; pointer-events: none; }
.paper, .gap { fill: #fff; }
.axis { stroke: #555; fill: none; }
.grid { stroke: #888; stroke-opacity: 0.3; }
.bar { stroke: #fff; stroke-width: 0.8; }
.low .bar { stroke-width: 0.3; }
.bar:hover { stroke: #000; stroke-width: 2; }
.stripes { pointer-events: none; }
.stripe { stroke: #000; stroke-opacity: 0.55; stroke-width: 2; }
.merges { fill: #000; pointer-events: none; }
.idle { fill: #888; fill-opacity: 0.2; }
.note { font-size: 11px; }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd; }
  .paper, .gap { fill: #16181c; }
  .axis { stroke: #aaa; }
  .bar { stroke: #16181c; }
  .bar:hover { stroke: #fff; }
  .merges { fill: #fff; }
}
"""
_PATTERN = (
    '<defs><pattern id="parts" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="stripe" d="M0 0V7"/></pattern></defs>'
)


def svg(plan: TilePlan, title: str) -> str:
    """The picture as the text of an SVG file. title: which attention it is."""
    picture = _Picture(plan)
    height = picture.bottom + BELOW
    name = f"{title}: {plan.busy_percent:.0f} % efficient"
    fills = "".join(f".c{i} {{ fill: {fill}; }}\n.on.c{i}t {{ fill: {on}; }}\n" for i, (fill, on) in enumerate(FILLS))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" aria-label="{_text(name)}">',
        f"<title>{_text(name)}</title>",
        f"<style>{STYLE}{fills}</style>",
        _PATTERN,
        f'<rect class="paper" width="{WIDTH}" height="{height:.0f}"/>',
        f'<text class="title" x="{LEFT}" y="28">{_text(name)}</text>',
        *picture.lines(),
    ]
    return "\n".join([*out, "</svg>"]) + "\n"


class _Picture:
    """rows: the slots with programs that are shown, None for those between that are left out; idle_rows: below them, of
    places without a program. Both are cut by the same share where not all fit."""

    def __init__(self, plan: TilePlan) -> None:
        self.plan = plan
        n, most = len(plan.slots), int(PLOT_HEIGHT / MIN_ROW)
        share = min(1.0, most / plan.at_once)
        self.rows: list[int | None] = list(range(n))
        if share < 1 and n > 2 * GAP_ROWS:
            half = max(1, (round(n * share) - GAP_ROWS) // 2)
            self.rows = [*range(half), *[None] * GAP_ROWS, *range(n - half, n)]
        self.idle_rows = round(plan.idle_places * share)
        self.row_height = min(MAX_ROW, PLOT_HEIGHT / (len(self.rows) + self.idle_rows))
        self.idle_top = TOP + len(self.rows) * self.row_height
        self.bottom = self.idle_top + self.idle_rows * self.row_height
        self.per_unit = (WIDTH - LEFT - RIGHT) / plan.longest
        self.shared = plan.shared_tiles()

    def lines(self) -> Iterator[str]:
        yield from self._caption()
        yield from self._legend()
        yield from self._grid()
        yield '<g class="low">' if self.row_height < LOW_ROW else "<g>"
        for row, slot in enumerate(self.rows):
            if slot is not None:
                yield from self._row(slot, TOP + row * self.row_height)
        yield "</g>"
        yield from self._runs()
        yield from self._left_out()
        yield from self._no_program()
        yield from self._axes()

    def _row(self, slot: int, y: float) -> Iterator[str]:
        for bar in self.plan.slots[slot]:
            yield from self._bar(bar, y)
        yield from self._idle(slot, y)

    def _left_out(self) -> Iterator[str]:
        """A note where rows are left out."""
        if None in self.rows:
            middle = TOP + (self.rows.index(None) + GAP_ROWS / 2) * self.row_height
            left_out = len(self.plan.slots) - len(self.rows) + GAP_ROWS
            yield f'<text class="note" x="{LEFT + 6}" y="{middle + 4:.1f}">{left_out} more rows like these</text>'

    def _no_program(self) -> Iterator[str]:
        """The places that have no program, as one block."""
        if not self.plan.idle_places:
            return
        said = f"{self.plan.idle_places} of {count_text(self.plan.at_once, 'place')} have no program: idle throughout"
        height = self.bottom - self.idle_top
        place = f'x="{LEFT}" y="{self.idle_top:.2f}" width="{WIDTH - LEFT - RIGHT}" height="{height:.2f}"'
        yield f'<rect class="idle" {place}><title>{_text(said)}</title></rect>'
        if height >= MIN_LABEL_HEIGHT + 4:
            middle = self.idle_top + height / 2 + 4
            yield f'<text x="{LEFT + 8}" y="{middle:.1f}">{_text(said)}</text>'

    def _caption(self) -> Iterator[str]:
        plan = self.plan
        known = "" if not plan.masked or plan.kinds is not None else ", if the mask hides none"
        said = (
            f"{plan.kernel}, schedule {plan.schedule}: {len(plan.k_blocks)} tiles of {plan.rows} rows, {plan.units} "
            f"k-blocks of {plan.keys} keys{known}; {plan.programs} programs, places for {plan.at_once} at once"
        )
        yield f'<text x="{LEFT}" y="50">{_text(said)}</text>'
        yield f'<text x="{LEFT}" y="68">{_text(self._merging())}</text>'

    def _merging(self) -> str:
        if not self.shared:
            return "No tile is shared: nothing is to be merged."
        by = "a launch of its own (fixup)" if self.plan.join == "fixup" else "the last of a tile's programs"
        listed = ", ".join(map(str, list(self.shared)[:20])) + (", …" if len(self.shared) > 20 else "")
        return f"{len(self.shared)} tiles need fixup, by {by}: {listed}"

    def _legend(self) -> Iterator[str]:
        x, y = float(LEFT), 84
        for fill, kind, text in (
            ("c0", "", "the whole tile"),
            ("c0", "open", "open part: its partial result goes to scratch"),
            ("c0", "merges", "finisher: has the tile's last k-block; all parts become its result"),
            ("idle", "", "idle: no k-block left, or no program"),
        ):
            yield f'<rect class="{fill}" x="{x:.0f}" y="{y}" width="26" height="13"/>'
            yield from _marks(kind, x, y, 26, 13)
            yield f'<text x="{x + 32:.0f}" y="{y + 11}">{text}</text>'
            x += 54 + len(text) * CHAR_WIDTH

    def _bar(self, bar: Bar, y: float) -> Iterator[str]:
        s = bar.segment
        x, width = LEFT + bar.start * self.per_unit, (s.stop - s.start) * self.per_unit
        colour = s.tile % len(FILLS)
        kind = "open" if s.is_fixup else "merges" if s.needs_fixup else ""
        role = {"open": "open part", "merges": "finisher", "": "the whole tile"}[kind]
        slot = f", slot {s.slot} of scratch" if s.slot is not None else ""
        tip = f"program {bar.program}, tile {s.tile}\n{role}: units {s.start} to {s.stop - 1} of the tile{slot}"
        height = self.row_height
        place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
        yield f'<rect class="bar c{colour}" {place}><title>{_text(tip)}</title></rect>'
        yield from _marks(kind, x, y, width, height)
        if height >= MIN_LABEL_HEIGHT:
            yield from _label(s.tile, x, y + height / 2, width, kind == "open")

    def _runs(self) -> Iterator[str]:
        """The number of a tile that rows too low for text have one after the other, in the middle of them."""
        if self.row_height >= MIN_LABEL_HEIGHT:
            return
        slots = [self.plan.slots[slot] if slot is not None else () for slot in self.rows]
        first = [slot[0] if slot else None for slot in slots]
        for tile, run in groupby(enumerate(first), lambda row: row[1].segment.tile if row[1] is not None else None):
            rows = list(run)
            if tile is not None and len(rows) * self.row_height >= MIN_LABEL_HEIGHT + 4:
                widths = (bar.stop - bar.start for _, bar in rows if bar is not None)
                middle = TOP + (rows[0][0] + len(rows) / 2) * self.row_height
                yield from _label(tile, LEFT, middle, min(widths) * self.per_unit, True)

    def _idle(self, slot: int, y: float) -> Iterator[str]:
        end = self.plan.slots[slot][-1].stop if self.plan.slots[slot] else 0
        if end < self.plan.longest:
            x = LEFT + end * self.per_unit
            size = f'width="{WIDTH - RIGHT - x:.2f}" height="{self.row_height:.2f}"'
            yield f'<rect class="idle" x="{x:.2f}" y="{y:.2f}" {size}/>'

    def _grid(self) -> Iterator[str]:
        for tick in _ticks(self.plan.longest):
            yield f'<path class="grid" d="M{LEFT + tick * self.per_unit:.1f} {TOP}V{self.bottom:.1f}"/>'

    def _axes(self) -> Iterator[str]:
        middle = (LEFT + WIDTH - RIGHT) / 2
        for tick in _ticks(self.plan.longest):
            x = LEFT + tick * self.per_unit
            yield f'<path class="axis" d="M{x:.1f} {self.bottom:.1f}v5"/>'
            yield f'<text text-anchor="middle" x="{x:.1f}" y="{self.bottom + 19:.1f}">{tick}</text>'
        yield f'<path class="axis" d="M{LEFT} {TOP}V{self.bottom:.1f}H{WIDTH - RIGHT}"/>'
        what = "k-blocks that it visits, from its start on"
        yield f'<text text-anchor="middle" x="{middle:.0f}" y="{self.bottom + 42:.1f}">{what}</text>'
        step = max(1, round(14 / self.row_height + 0.5))
        for row, slot in enumerate(self.rows):
            if slot is not None and slot % (_round(step)) == 0:
                y = TOP + (row + 0.5) * self.row_height + 4
                yield f'<text text-anchor="end" x="{LEFT - 6}" y="{y:.1f}">{slot}</text>'
        rows = "program" if self.plan.programs == self.plan.at_once else "place for a program"
        centre = (TOP + self.bottom) / 2
        yield f'<text text-anchor="middle" transform="translate(24 {centre:.0f}) rotate(-90)">{rows}</text>'


def _label(tile: int, x: float, middle: float, width: float, striped: bool) -> Iterator[str]:
    """A tile's number at the start of a bar, where it fits; stripes are no ground for text, so it gets one."""
    label, colour = f"tile {tile}" if width > 60 else str(tile), tile % len(FILLS)
    if width < len(label) * CHAR_WIDTH + 10:
        return
    if striped:
        ground = f'width="{len(label) * 5.6 + 6:.0f}" height="13"'
        yield f'<rect class="on c{colour}" x="{x + 2:.1f}" y="{middle - 6.5:.1f}" {ground}/>'
    yield f'<text class="on c{colour}t" x="{x + 5:.1f}" y="{middle + 4:.1f}">{label}</text>'


def _marks(kind: str, x: float, y: float, width: float, height: float) -> Iterator[str]:
    """What tells parts of shared tiles: stripes of an open one, a thick edge of the finisher."""
    if kind == "open":
        size = f'width="{width:.2f}" height="{height:.2f}"'
        yield f'<rect class="stripes" fill="url(#parts)" x="{x:.2f}" y="{y:.2f}" {size}/>'
    elif kind == "merges":
        edge = min(4.0, width / 3)
        place = f'x="{x + width - edge:.2f}" y="{y:.2f}"'
        yield f'<rect class="merges" {place} width="{edge:.2f}" height="{height:.2f}"/>'


def _round(step: int) -> int:
    """The next of 1, 2, 5, 10, ..."""
    size = 1
    while True:
        for times in (1, 2, 5):
            if times * size >= step:
                return times * size
        size *= 10


def _ticks(longest: int) -> range:
    """At most about ten round numbers from 0 on."""
    return range(0, longest + 1, _round(max(1, longest // 10)))


def _text(text: str) -> str:
    """Text that XML takes anywhere, with line breaks."""
    return "&#10;".join(escape(printable(line)) for line in text.split("\n"))
