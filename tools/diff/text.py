"""How `graphrt diff` shows what it found: a summary, the first bad node, a plot of error by depth, and a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from graphrt.tools.common import printable, table_lines
from graphrt.tools.diff.nodes import NodeDiff
from graphrt.tools.diff.report import Finding, Input, Mode, Report
from graphrt.tools.inspect.labels import heading, nb_text, type_text

#: Nodes that the table shows unless told to show all: those over their tolerance, or else the worst.
MOST_OVER, WORST = 20, 10
PLOT_WIDTH, PLOT_HEIGHT = 72, 12
MARKS = {"free-running": "o", "re-synced": "x"}


def lines(report: Report, every: bool) -> Iterator[str]:
    """All that is printed. every: the table has every node."""
    reference, other = (printable(side) for side in report.sides)
    after = f" after {report.n_past}" if report.info.phase != "graph" else ""
    yield f"{printable(heading(report.info))}{after} | reference {reference} | other side {other}"
    for mode in report.modes:
        yield _summary(mode, report)
    yield from _cut_lines(report)
    for mode in report.modes:
        if mode.first is not None:
            yield ""
            yield from finding_lines(mode.first, mode.name)
    yield from _verdict_lines(report)
    yield ""
    yield from plot(report.modes, [t.index for t in report.info.nodes])
    yield ""
    yield from _table(report, every)


def _summary(mode: Mode, report: Report) -> str:
    opens = " (--cut opens them)" if report.cut is None else ""
    inside = f", {mode.unread} are inside fusions{opens} or not on both sides" if mode.unread else ""
    over = f"{len(mode.over)} over their tolerance" if mode.over else "all within their tolerances"
    worst = max((d.ratio for d in mode.nodes), default=0.0)
    return f"{mode.name}: {len(mode.nodes)} nodes compared{inside}; {over}, the worst at {_times(worst)}"


def _cut_lines(report: Report) -> Iterator[str]:
    cut = report.cut
    if cut is None:
        return
    yield f"opened: {cut.cut} of {cut.fusions} fusions of the other side"
    if cut.vanished:
        first = printable(cut.over_uncut[0])
        yield f"uncut, {len(cut.over_uncut)} nodes were over their tolerance, {first} first; opening made that vanish:"
        yield f"  a fusion makes it, the one that {first} ends or one before (without --cut, --resync tells which)"


def _verdict_lines(report: Report) -> Iterator[str]:
    """What two modes tell together."""
    modes = {mode.name: mode for mode in report.modes}
    free, fed = modes.get("free-running"), modes.get("re-synced")
    if free is None or fed is None:
        return
    if free.over and not fed.over:
        yield ""
        yield "each step is right by itself: what goes wrong lies between them (memory, order, what a run leaves"
        yield "behind), or many small errors add up; `graphrt memory` checks the plan"
    elif fed.first is not None and not free.over:
        yield ""
        yield f"the run as a whole stays within tolerance: what {printable(fed.first.diff.key)} is off by drowns in it"


def finding_lines(f: Finding, mode: str) -> Iterator[str]:
    """All that is known of the first bad node."""
    t, d = f.node, f.diff
    layer = "outside of layers" if t.layer is None else f"layer {t.layer}"
    yield printable(f"first over its tolerance, {mode}: {d.key} = {t.op}, {type_text(t)}, {layer}, #{t.index}")
    limit = f"{d.verdict.limit:.3g}" if d.verdict.limit else "none: every bit must be right"
    yield f"  NMSE {d.nmse:.3g}, tolerance {limit} ({_times(d.ratio)}); max abs {_number(d.verdict.max_abs)}"
    fusion = f", in the fusion {f.group} of {' + '.join(f.members)}" if f.members else ", by itself"
    yield printable(f"  strides {nb_text(t)} bytes; on {t.backend}{fusion}")
    if d.at is not None:
        head = "" if f.head is None or f"head {f.head}" in f.where else f", head {f.head}"
        values = f"{_number(d.actual)} instead of {_number(d.expected)}"
        yield f"  worst at [{', '.join(map(str, d.at))}] ({f.where}{head}): {values}"
    yield from _words(d.verdict.message)
    if mode == "re-synced":
        yield "  it was fed with the reference's inputs: the error is its own"
    elif f.inputs:
        yield "  inputs: " + printable(", ".join(_input(i) for i in f.inputs))


def _words(message: str) -> Iterator[str]:
    """The judge's words, less the figures that stand above."""
    said, _, worst = message.partition("; worst at")
    pattern = worst.partition("; ")[2]
    if said and (" in one row" in said or not said.startswith("NMSE")):
        yield printable(f"  {said}")
    if pattern:
        yield printable(f"  what is wrong: {pattern}")


def _input(i: Input) -> str:
    if i.nmse is None:
        return f"{i.name} can't be read"
    return f"{i.name} equal" if i.nmse == 0 else f"{i.name} differs, NMSE {i.nmse:.2g}"


def _times(ratio: float) -> str:
    """A ratio of relative errors."""
    if not math.isfinite(ratio):
        return "not to be measured in it"
    return f"{ratio:.0f} x tolerance" if ratio >= 100 else f"{ratio:.2g} x tolerance"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


# ---- error by depth ----


def plot(modes: Sequence[Mode], numbers: Sequence[int]) -> list[str]:
    """NMSE by node as text: each column has the largest of some nodes. `!`: over the tolerance. numbers: of all
    nodes, as dumps have them."""
    n_nodes = len(numbers)
    points = [(_column(d.index, n_nodes), d, MARKS[m.name]) for m in modes for d in m.nodes if d.nmse > 0]
    finite = [math.log10(d.nmse) for _, d, _ in points if math.isfinite(d.nmse)]
    if not points:
        return ["error by depth: every value is equal"]
    low, high = (math.floor(min(finite)), math.ceil(max(finite))) if finite else (-1, 0)
    high = max(high, low + 1)
    grid = [[" "] * PLOT_WIDTH for _ in range(PLOT_HEIGHT)]
    largest: dict[tuple[int, str], NodeDiff] = {}
    for column, d, mark in points:
        held = largest.get((column, mark))
        if held is None or (d.over, d.nmse) > (held.over, held.nmse):
            largest[column, mark] = d
    for (column, mark), d in sorted(largest.items(), key=lambda item: item[1].over):
        share = (math.log10(d.nmse) - low) / (high - low) if math.isfinite(d.nmse) else 1.0
        row = PLOT_HEIGHT - 1 - round(share * (PLOT_HEIGHT - 1))
        grid[row][column] = "!" if d.over else mark
    legend = ", ".join(f"{MARKS[m.name]} {m.name}" for m in modes)
    out = [f"error by depth: NMSE, {legend}, ! over its tolerance"]
    for i, cells in enumerate(grid):
        power = high - i * (high - low) / (PLOT_HEIGHT - 1)
        label = f"1e{power:+.0f}" if i % 3 == 0 or i == PLOT_HEIGHT - 1 else ""
        out.append(f"{label:>6} |{''.join(cells)}".rstrip())
    return [
        *out,
        f"{'':>6} +{'-' * PLOT_WIDTH}",
        f"{'':>8}{f'#{numbers[0]}':<{PLOT_WIDTH // 2}}{f'#{numbers[-1]}':>{PLOT_WIDTH // 2}}",
    ]


def _column(index: int, n: int) -> int:
    return min(index * PLOT_WIDTH // max(n, 1), PLOT_WIDTH - 1)


# ---- the table ----


def _table(report: Report, every: bool) -> Iterator[str]:
    """Nodes in order; a column of errors for each mode."""
    by_mode = [{d.index: d for d in mode.nodes} for mode in report.modes]
    indices = sorted({i for nodes in by_mode for i in nodes})
    over = [i for i in indices if any(i in nodes and nodes[i].over for nodes in by_mode)]
    if every:
        chosen, title = indices, "every node that was compared"
    elif over:
        chosen, title = over[:MOST_OVER], f"nodes over their tolerance, {min(len(over), MOST_OVER)} of {len(over)}"
    else:
        chosen = sorted(sorted(indices, key=lambda i: -_worst(by_mode, i))[:WORST])
        title = f"the {len(chosen)} nodes nearest to their tolerance (--all has every node)"
    short = {"free-running": "", "re-synced": "own "} if len(report.modes) > 1 else {m.name: "" for m in report.modes}
    columns = ["#", "name", "op", "type"]
    for mode in report.modes:
        columns += [f"{short[mode.name]}{what}" for what in ("NMSE", "tolerance", "x tol", "max abs")]
    yield f"{title}; x tol: the relative error in parts of the tolerance"
    yield from table_lines([*columns, ""], [_row(report, by_mode, i) for i in chosen])


def _worst(by_mode: Sequence[dict[int, NodeDiff]], i: int) -> float:
    return max(nodes[i].ratio for nodes in by_mode if i in nodes)


def _row(report: Report, by_mode: Sequence[dict[int, NodeDiff]], i: int) -> list[object]:
    t, over = report.info.nodes[i], False
    cells: list[object] = [t.index, t.name, t.op, type_text(t)]
    for nodes in by_mode:
        d = nodes.get(i)
        if d is None:
            cells += ["-"] * 4
            continue
        limit = "exact" if not d.verdict.limit else f"{d.verdict.limit:.2e}"
        cells += [f"{d.nmse:.2e}", limit, f"{d.ratio:.2f}", _number(d.verdict.max_abs)]
        over = over or d.over
    return [*cells, "over" if over else ""]
