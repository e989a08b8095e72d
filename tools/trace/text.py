"""How `graphrt trace` shows what it found: a table of nodes, and where a NaN comes from, as lines and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graphrt.tools.common import printable, table_lines
from graphrt.tools.inspect.describe import TensorInfo
from graphrt.tools.inspect.labels import type_text
from graphrt.tools.inspect.node_stats import Stats
from graphrt.tools.trace.first_nan import Found, Source, Verdict

#: Columns, and which of them are flush right.
COLUMNS = ("#", "name", "op", "type", "min", "max", "mean", "rms", "nan", "inf", "first", "last")
_RIGHT = {"#", "min", "max", "mean", "rms", "nan", "inf"}
#: What a narrow terminal goes without, the first one first.
DISPENSABLE = ("first", "last", "type", "#", "op", "mean")


@dataclass(frozen=True)
class NodeTrace:
    """A node, the names of what it reads (None for an absent source), and the statistics of its values."""

    node: TensorInfo
    sources: tuple[str | None, ...]
    stats: Stats

    def json(self) -> dict[str, Any]:
        t = self.node
        known = {"index": t.index, "name": t.name, "op": t.op, "layer": t.layer, "type": t.dtype, "ne": list(t.ne)}
        return {**known, "sources": list(self.sources), **asdict(self.stats)}


def print_nodes(traces: Sequence[NodeTrace]) -> None:
    """The table: aligned plain text in a pipe, on a terminal as many columns as it has room for."""
    if not sys.stdout.isatty():
        for line in _table(traces, COLUMNS):
            print(line)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    columns, left_out = list(COLUMNS), []
    for title in DISPENSABLE:
        if max(map(len, _table(traces, columns))) <= console.width:
            break
        columns.remove(title)
        left_out.append(title)
    if left_out:
        console.print(Text(f"no room here for {', '.join(left_out)}: a pipe or a wider terminal has them", "dim"))
    head, *rows = _table(traces, columns)
    console.print(Text(head, "bold"))
    for line, trace in zip(rows, traces):
        console.print(Text(line, "red" if trace.stats.nan else ""))


def _table(traces: Sequence[NodeTrace], columns: Sequence[str]) -> list[str]:
    cells = [dict(zip(COLUMNS, _cells(trace))) for trace in traces]
    texts = [[title, *(cell[title] for cell in cells)] for title in columns]
    for i, title in enumerate(columns):
        if title in _RIGHT:
            width = max(map(len, texts[i]))
            texts[i] = [text.rjust(width) for text in texts[i]]
    titles, *rows = zip(*texts)
    return table_lines(titles, rows)


def _cells(trace: NodeTrace) -> tuple[str, ...]:
    t, s = trace.node, trace.stats
    numbers = (number(s.min), number(s.max), number(s.mean), number(s.rms), str(s.nan), str(s.inf))
    first, last = (" ".join(map(number, values)) for values in (s.first, s.last))
    return (str(t.index), t.name, t.op, type_text(t), *numbers, first, last)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


# ---- the first NaN ----


def verdict_lines(verdict: Verdict) -> Iterator[str]:
    """What --first-nan says, for people."""
    s = verdict.logits
    where = f"{verdict.n_tokens} tokens after {verdict.n_past}"
    yield f"the step of {where} is spoilt: its logits have {_counts(s)}"
    if verdict.vanished:
        yield from _vanished_lines(verdict)
    if verdict.found is not None:
        yield from _found_lines(verdict.found)
    elif not verdict.vanished:
        yield "no node that can be read holds it"


def _vanished_lines(verdict: Verdict) -> Iterator[str]:
    yield f"with every node cut it vanishes; that cuts {verdict.fusions} fusions"
    if not verdict.repeats:
        yield "as it is, the step was not spoilt when it ran again: what makes it is no fusion, it comes and goes"
    elif verdict.culprit is None:
        yield "no fusion alone brings it back: it takes several, or memory that nodes share when nothing is cut"
    else:
        names = printable(", ".join(verdict.culprit_nodes))
        yield f"the fusion {verdict.culprit.name} of {names} brings it back when all others are cut"


def _found_lines(found: Found) -> Iterator[str]:
    t = found.node
    layer = "outside of layers" if t.layer is None else f"layer {t.layer}"
    what = f"the fusion of {' + '.join(found.fusion)}" if found.fusion else t.op
    yield printable(f"first: {t.name} = {what}, {type_text(t)}, {layer}, #{t.index}")
    place = f"{found.row_name} {found.row}"
    if found.head is not None:
        place = f"head {found.head}, {place}"
    at = ", ".join(map(str, found.index))
    yield f"  {_counts(found.stats)} of {found.stats.n} values, the first at [{at}]: {place}"
    heads = "" if found.heads is None else f"heads {_list(found.heads)}, "
    yield f"  all of them: {heads}{found.row_name}s {_list(found.rows)}"
    if found.inputs_clean:
        yield "  its inputs are clean, so it made them:"
    else:
        names = ", ".join(s.name for s in found.sources if s.clean is False)
        yield printable(f"  its input {names} is not clean, and was not made in this step:")
    yield from ("    " + line for line in _source_lines(found))


def _source_lines(found: Found) -> list[str]:
    columns = ("input", "op", "type", "clean", "min", "max", "mean", "rms", "nan", "inf", "")
    return table_lines(columns, [_source_cells(s, s is found.worst) for s in found.sources])


def _source_cells(source: Source, worst: bool) -> tuple[str, ...]:
    s = source.stats
    clean = {True: "yes", False: "no", None: "not known"}[source.clean]
    numbers = ("-",) * 6 if s is None else (*map(number, (s.min, s.max, s.mean, s.rms)), str(s.nan), str(s.inf))
    op = "leaf" if source.op == "NONE" else source.op
    return (source.name, op, source.type, clean, *numbers, "worst" if worst else "")


def _counts(s: Stats) -> str:
    return f"{s.nan} NaN and {s.inf} infinite"


def _list(numbers: Sequence[int]) -> str:
    """1, 2, 3 and so on: at most eight, and how many more."""
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The same for programs."""
    culprit = None
    if verdict.culprit is not None:
        culprit = {"name": verdict.culprit.name, "nodes": list(verdict.culprit_nodes)}
    found = None if verdict.found is None else _found_json(verdict.found)
    plain = {"n_past": verdict.n_past, "n_tokens": verdict.n_tokens, "logits": asdict(verdict.logits)}
    cutting = {"vanished": verdict.vanished, "fusions_cut": verdict.fusions, "culprit": culprit}
    return {**plain, **cutting, "repeats": verdict.repeats, "first": found}


def _found_json(found: Found) -> dict[str, Any]:
    t = found.node
    worst = found.worst
    node = {"index": t.index, "name": t.name, "op": t.op, "layer": t.layer, "type": t.dtype, "ne": list(t.ne)}
    return {
        **node,
        "fusion": list(found.fusion),
        "stats": asdict(found.stats),
        "at": list(found.index),
        "head": found.head,
        found.row_name: found.row,
        "heads": None if found.heads is None else list(found.heads),
        f"{found.row_name}s": list(found.rows),
        "inputs_clean": found.inputs_clean,
        "worst_input": None if worst is None else worst.name,
        "inputs": [asdict(source) for source in found.sources],
    }
