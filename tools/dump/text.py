"""`graphrt dump --format text`: a header, and a table of every leaf and node, layers that are alike folded into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from graphrt.op import Work
from graphrt.printing import human_bytes
from graphrt.tools.common import printable, table_lines
from graphrt.tools.inspect.describe import GraphInfo, GroupInfo, TensorInfo
from graphrt.tools.inspect.fold import Folded, Section
from graphrt.tools.inspect.labels import (
    flop_text,
    group_text,
    heading,
    nb_text,
    params_text,
    place_text,
    role,
    si,
    source_text,
    type_text,
    view_text,
)

Cell = Callable[[GraphInfo, TensorInfo], str]

#: Each column: its title, its text, and whether it is flush right.
COLUMNS: tuple[tuple[str, Cell, bool], ...] = (
    ("#", lambda info, t: str(t.index), True),
    ("op", role, False),
    ("name", lambda info, t: t.name + (" [output]" if "output" in t.flags else ""), False),
    ("type", lambda info, t: type_text(t), False),
    ("sources", source_text, False),
    ("on", lambda info, t: t.backend or "", False),
    ("split", lambda info, t: "" if t.split is None else str(t.split), True),
    ("group", group_text, False),
    ("FLOP", lambda info, t: "" if t.is_leaf else si(t.flops), True),
    ("bytes", lambda info, t: "" if t.is_leaf else human_bytes(t.bytes), True),
    ("place", place_text, False),
    ("size", lambda info, t: human_bytes(t.place.nbytes) if t.place else "", True),
    ("nb", lambda info, t: nb_text(t), False),
    ("view", view_text, False),
    ("parameters", lambda info, t: params_text(t), False),
)
#: What a narrow terminal goes without, the first one first.
DISPENSABLE = ("nb", "size", "on", "split", "place", "parameters", "view", "bytes", "FLOP", "#", "group", "sources")


def lines(info: GraphInfo, folded: Folded) -> Iterator[str]:
    """Plain lines, the same wherever they go."""
    table = iter(_table(info, folded, _columns(info)))
    yield from header(info)
    yield ""
    yield next(table)
    for section in folded.sections:
        yield f"-- {section_title(info, section)}"
        for _ in section.tensors:
            yield next(table)


def print_rich(info: GraphInfo, folded: Folded) -> None:
    """The same on a terminal: as many columns as it has room for, names of columns and sections set off."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    columns, left_out = _that_fit(info, folded, _columns(info), console.width)
    head, *rows = _table(info, folded, columns)
    for line in header(info):
        console.print(Text(line))
    if left_out:
        console.print(Text(f"no room here for {', '.join(left_out)}: a pipe or a wider terminal has them", "dim"))
    console.print()
    console.print(Text(_cut(head, console.width), "bold"))
    body = iter(rows)
    for section in folded.sections:
        console.print(Text(_cut(f"-- {section_title(info, section)}", console.width), "bold"))
        for index in section.tensors:
            style = "dim" if info.tensors[index].is_leaf else ""
            console.print(Text(_cut(next(body), console.width), style))


def header(info: GraphInfo) -> list[str]:
    """What is shown, what it is cut into, its work and its memory. Several splits get a line each."""
    flops, moved = info.work
    nodes = info.nodes
    out = [printable(heading(info))]
    parts = [
        f"{len(nodes)} nodes, {len(info.tensors) - len(nodes)} leafs",
        f"{flop_text(flops)}, {human_bytes(moved)} moved",
    ]
    if info.splits:
        backends = ", ".join(dict.fromkeys(split.backend for split in info.splits))
        plural = "s" * (len(info.splits) > 1)
        parts.insert(1, f"{len(info.splits)} split{plural} on {backends}, {len(info.groups)} groups")
    if info.buffers:
        sizes: dict[str, int] = {}
        for buffer in info.buffers:
            sizes[buffer.usage] = sizes.get(buffer.usage, 0) + buffer.nbytes
        parts.append("memory: " + ", ".join(f"{usage} {human_bytes(n)}" for usage, n in sorted(sizes.items())))
    out.append(" | ".join(parts))
    return [*out, *_split_lines(info)] if len(info.splits) > 1 else out


def _split_lines(info: GraphInfo) -> Iterator[str]:
    for i, split in enumerate(info.splits):
        groups = sum(group.split == i for group in info.groups)
        copied = sum(copy.nbytes for copy in split.copies if not copy.once)
        copies = f", {human_bytes(copied)} copied to it a run" if copied else ""
        yield f"split {i}: {groups} groups on {split.backend}{copies}"


def section_title(info: GraphInfo, section: Section) -> str:
    """The section's name and the work of each of what it stands for."""
    flops, moved = section_work(info, section)
    each = "each " if section.count > 1 else ""
    return f"{section.title}, {each}{flop_text(flops)}, {human_bytes(moved)}"


def section_work(info: GraphInfo, section: Section) -> Work:
    """FLOPs and bytes of a section, of one of its layers: of its groups, each counted where its first node is."""
    mine = set(section.tensors)
    parts: Sequence[GroupInfo | TensorInfo] = [g for g in info.groups if g.members[0] in mine]
    if not info.groups:
        parts = [info.tensors[i] for i in section.tensors]
    return Work(sum(p.flops for p in parts), sum(p.bytes for p in parts))


Columns = list[tuple[str, Cell, bool]]


def _columns(info: GraphInfo) -> Columns:
    """The columns that tell something: of a graph that is not prepared, or is one split, some are empty or the same."""
    idle = {"on", "split"} if len(info.splits) <= 1 else set()
    if not info.splits:
        idle |= {"group", "place", "size"}
    return [column for column in COLUMNS if column[0] not in idle]


def _table(info: GraphInfo, folded: Folded, columns: Columns) -> list[str]:
    """The titles, and a line for each tensor that is shown; numbers and their titles end in line."""
    shown = [info.tensors[i] for section in folded.sections for i in section.tensors]
    texts = [[title, *(printable(cell(info, t)) for t in shown)] for title, cell, _ in columns]
    for column, (_, _, right) in zip(texts, columns):
        if right:
            width = max(map(len, column))
            column[:] = [text.rjust(width) for text in column]
    titles, *rows = zip(*texts)
    return table_lines(titles, rows)


def _that_fit(info: GraphInfo, folded: Folded, columns: Columns, width: int) -> tuple[Columns, list[str]]:
    """As many of the columns as fit into `width` characters, and the titles of the others."""
    left_out: list[str] = []
    for title in (None, *DISPENSABLE):
        if title is not None and any(c[0] == title for c in columns):
            columns = [c for c in columns if c[0] != title]
            left_out.append(title)
        if max(map(len, _table(info, folded, columns))) <= width:
            break
    return columns, left_out


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
