"""What `graphrt explain` says: a table of all steps, or all that is known of a node, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from graphrt.printing import count_text, human_bytes
from graphrt.tools.common import printable, table_lines
from graphrt.tools.explain.steps import Explained, Step, seconds_of
from graphrt.tools.inspect.fold import Folded, fold
from graphrt.tools.inspect.labels import flop_text, heading, si

#: What matters most first: a narrow terminal cuts the rest off.
COLUMNS = (
    "count", "node", "us", "share", "bound by", "kernel", "schedule", "op or fusion", "launches", "bytes", "FLOP",
)  # fmt: skip
_RIGHT = {"count", "launches", "bytes", "FLOP", "us", "share"}


@dataclass(frozen=True, eq=False)
class Row:
    """Steps that are alike. section: its title; name: of what the first one gives; steps: all of them."""

    section: str
    name: str
    group: str
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float | None:
        """Of all steps, None where the ceilings are not known."""
        return seconds_of(self.steps)


def rows_of(found: Explained) -> list[Row]:
    """The steps, those of layers that are alike in one row, in the order of execution."""
    info = found.info
    folded = fold(info)
    section_of = _section_titles(folded)
    alike: dict[int, list[Step]] = {}
    for step in found.steps:
        alike.setdefault(folded.shown_as[info.groups[step.group].members[0]], []).append(step)
    rows = []
    for first, steps in alike.items():
        group = info.groups[steps[0].group]
        name = info.tensors[group.results[-1]].name
        rows.append(Row(section_of[first], name, group.name, tuple(steps)))
    order = list(dict.fromkeys(section_of.values()))
    return sorted(rows, key=lambda row: order.index(row.section))


def _section_titles(folded: Folded) -> dict[int, str]:
    return {i: section.title for section in folded.sections for i in section.tensors}


def title(found: Explained) -> str:
    """`smol.gguf, decode of 1 token after 4095`."""
    after = f" after {found.depth}" if found.subject.session is not None else ""
    return printable(heading(found.info) + after)


def device_lines(found: Explained) -> list[str]:
    """What the times are of."""
    d = found.device
    if d is None:
        return [
            "no ceilings are known for what runs here: no times (--device h100 plans for a GPU that need not be here)"
        ]
    how = "planned for" if found.planned else "on"
    if not d.copy:
        room = f"{human_bytes(d.shared_memory)} of shared memory a program"
        return [f"{how} {d.title}: {d.arch}, {room}; its rates are not known: no times"]
    return [
        f"{how} {d.title}: {d.arch}, {d.sm_count} multiprocessors, copy {d.copy / 1e12:.3g} TB/s, f16 products "
        f"{d.product / 1e12:.0f} TFLOP/s ({d.source}), {d.launch * 1e6:.1f} us a launch"
    ]


def table(found: Explained) -> Iterator[str]:
    """The table of all steps and what the whole takes. Lines that begin with -- are titles."""
    yield title(found)
    yield from device_lines(found)
    yield from found.subject.pages
    yield ""
    rows, total = rows_of(found), found.seconds
    texts = [list(COLUMNS), *(_cells(row, total) for row in rows)]
    for i, column in enumerate(COLUMNS):
        width = max(len(line[i]) for line in texts)
        for line in texts:
            line[i] = line[i].rjust(width) if column in _RIGHT else line[i]
    head, *lines = table_lines(texts[0], texts[1:])
    yield head
    section = ""
    for row, text in zip(rows, lines):
        if row.section != section:
            section = row.section
            yield f"-- {section}"
        yield text
    yield ""
    yield from _total(found)


def _cells(row: Row, total: float | None) -> list[str]:
    step, n = row.steps[0], len(row.steps)
    flops, moved = sum(s.work.flops for s in row.steps) / n, sum(s.work.bytes for s in row.steps) / n
    seconds = row.seconds
    us, bound, share = "-", "-", "-"
    if seconds is not None and total and step.cost is not None:
        us, bound, share = f"{1e6 * seconds / n:.1f}", step.cost.bound, f"{100 * seconds / total:.1f} %"
    launches = str(max(len(s.launches) for s in row.steps[-1:])) if step.launches else "-"
    return [
        str(n), printable(row.name), us, share, bound, step.kernel, step.schedule or "-", row.group, launches,
        human_bytes(moved), si(flops),
    ]  # fmt: skip


def _total(found: Explained) -> Iterator[str]:
    work = [s.work for s in found.steps]
    launches = sum(len(s.launches) for s in found.steps)
    yield (
        f"{len(found.steps)} steps, {launches} launches, {human_bytes(sum(w.bytes for w in work))} moved, "
        f"{flop_text(sum(w.flops for w in work))}"
    )
    fallen = [s for s in found.steps if s.refused]
    for cause in dict.fromkeys(s.cause for s in fallen):
        yield f"{count_text(sum(s.cause == cause for s in fallen), 'step')} on another backend: {printable(cause)}"
    copied = [c.nbytes for split in found.info.splits for c in split.copies if not c.once]
    if copied:
        yield f"{len(copied)} tensors copied between backends, {human_bytes(sum(copied))}"
    without = sum(s.cost is None for s in found.steps)
    if found.seconds and without:
        yield f"without {count_text(without, 'step')} whose ceilings are not known, and without copies:"
    if found.seconds:
        tokens = found.subject.n_tokens
        rate = f": {tokens / found.seconds:.0f} tokens/s at best" if tokens else ""
        yield f"expected at the ceilings: {1e3 * found.seconds:.3f} ms a step{rate}"
    yield "`graphrt explain MODEL NODE` tells all of a node"


def columns(facts: Sequence[tuple[str, str]]) -> list[str]:
    """Facts as lines: what it is of, and the fact; a label that is the one before is left out."""
    lines, last = [], ""
    width = max(len(label) for label, _ in facts)
    for label, text in facts:
        lines.append(f"{(label if label != last else '').ljust(width)}  {printable(text)}".rstrip())
        last = label
    return lines


def print_rich(lines: Sequence[str]) -> None:
    """The same on a terminal: titles set off, and lines as long as there is room."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    in_table = False
    for i, line in enumerate(lines):
        in_table = bool(line) and (in_table or line.lstrip().startswith("count  "))
        style = "bold" if i == 0 or line.startswith("-- ") or line.lstrip().startswith("count  ") else ""
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if in_table else "fold"
        console.print(Text(line, style), no_wrap=in_table, overflow=overflow)
