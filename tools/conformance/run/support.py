"""The table of ops and backends: how many of an op's cases each takes, and the reasons for the rest."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphrt.backend import Backend, backend_elsewhere, discover
from graphrt.errors import BackendError
from graphrt.graph import Graph
from graphrt.testing import Case
from graphrt.tools.common import write_text
from graphrt.tools.conformance.cases.sources import FAST, make_backend, pick, source_of
from graphrt.tools.conformance.run.reference import computing_nodes
from graphrt.tools.conformance.run.step import rounding_of
from graphrt.tools.explain.devices import known_device
from graphrt.tools.inspect.planned import planned


@dataclass
class Cell:
    """taken: cases that a backend takes of an op; rounded: of these, with activations rounded on purpose, by the type
    that they are rounded to; reasons: how often it gave each."""

    taken: int = 0
    rounded: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.taken + sum(self.reasons.values())

    @property
    def word(self) -> str:
        return "full" if not self.reasons else "partial" if self.taken else "none"


def table(cases: Sequence[Case], backends: Sequence[tuple[str, Backend]]) -> dict[str, dict[str, Cell]]:
    """By op and backend."""
    found: dict[str, dict[str, Cell]] = {}
    for case in cases:
        node = case.without_values()
        nodes = computing_nodes(Graph(node))
        row = found.setdefault(case.op, {name: Cell() for name, _ in backends})
        for name, backend in backends:
            reason = next((r for node in nodes if (r := backend.supports(node)) is not None), None)
            if reason is None:
                row[name].taken += 1
                rounded = rounding_of(node, backend)
                row[name].rounded.update([rounded] if rounded is not None else [])
            else:
                row[name].reasons[reason] += 1
    return found


def main(args: argparse.Namespace) -> int:
    """`graphrt test support`: every usable backend, or the one asked for, whether or not it can be used here."""
    names = [args.backend] if args.backend != "auto" else [n for n, i in discover().items() if i.cls and not i.reason]
    backends = [(name, _to_ask(name, args.device)) for name in names]
    cases = pick(list(source_of(args).cases()), args.op, args.params)
    found = table(cases, backends)
    text = {"console": _text, "csv": _csv, "md": _markdown, "json": _json}.get(args.output, _text)(found, names)
    if args.output_file is not None:
        write_text(args.output_file, text + "\n")
    else:
        print(text)
    missing = any(cell.reasons for row in found.values() for cell in row.values())
    return 1 if args.require_supported and missing else 0


def _to_ask(name: str, device: str | None) -> Backend:
    """A backend to ask what it takes. One that can't be used here, or any if a device is named, plans for a device that
    need not be here, which is said on stderr. Raises BackendError for an unknown name."""
    base, fast = name.partition(":")[0], name.partition(":")[0] in FAST
    info = discover().get(FAST[base][0] if fast else base)
    if info is None or info.cls is None or (info.reason is None and device is None):
        return make_backend(name)
    known = known_device(device or "h100")
    try:
        backend = backend_elsewhere(info.name, known.elsewhere, exact=not fast)
        print(f"{name}: planned for {known.title}, which need not be here (--device names another)", file=sys.stderr)
        return backend
    except BackendError:
        if device is not None:
            raise
    print(f"{name} can't be used here, {info.reason}: this is what it says without its device", file=sys.stderr)
    return planned(name)


def _text(found: dict[str, dict[str, Cell]], names: Sequence[str]) -> str:
    columns = {name: max(len(name), 18) for name in names}
    width = max(len(op) for op in found)
    lines = [f"{'op':<{width}}  " + "  ".join(f"{n:<{w}}" for n, w in columns.items())]
    for op, row in found.items():
        shown = [f"{row[n].word} {row[n].taken}/{row[n].total}" for n in names]
        lines.append(f"{op:<{width}}  " + "  ".join(f"{s:<{w}}" for s, w in zip(shown, columns.values())).rstrip())
    for name in names:
        lines += [line for rounded in _roundings(found, name) for line in ("", f"{name} {rounded}")]
        reasons = _reasons(found, name)
        if reasons:
            lines += ["", f"{name} does not take:"]
            lines += [f"  {n:>5}  {', '.join(sorted(ops))}: {reason}" for reason, (n, ops) in reasons]
    return "\n".join(lines)


def _reasons(found: dict[str, dict[str, Cell]], name: str) -> list[tuple[str, tuple[int, set[str]]]]:
    """Each reason of a backend with its count and the ops it was given for, the most frequent first."""
    out: dict[str, tuple[int, set[str]]] = {}
    for op, row in found.items():
        for reason, n in row[name].reasons.items():
            before, ops = out.get(reason, (0, set()))
            out[reason] = (before + n, ops | {op})
    return sorted(out.items(), key=lambda item: -item[1][0])


def _roundings(found: dict[str, dict[str, Cell]], name: str) -> list[str]:
    """What a backend does to activations on purpose, in words."""
    rows = [(op, kind, n) for op, row in found.items() for kind, n in row[name].rounded.items()]
    return [f"takes {n} of {op} with activations rounded to {kind}" for op, kind, n in rows]


def _csv(found: dict[str, dict[str, Cell]], names: Sequence[str]) -> str:
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["op", "backend", "support", "taken", "cases", "rounded", "reason", "count"])
    for op, row in found.items():
        for name in names:
            cell = row[name]
            for reason, n in cell.reasons.most_common() or [("", 0)]:
                rounded = cell.rounded.total()
                rows.writerow([op, name, cell.word, cell.taken, cell.total, rounded, reason, n])
    return out.getvalue().rstrip("\n")


def _markdown(found: dict[str, dict[str, Cell]], names: Sequence[str]) -> str:
    lines = [f"| op | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for op, row in found.items():
        cells = " | ".join(f"{row[n].word} {row[n].taken}/{row[n].total}" for n in names)
        lines.append(f"| {op} | {cells} |")
    for name in names:
        lines += [line for rounded in _roundings(found, name) for line in ("", f"`{name}` {rounded}.")]
        reasons = _reasons(found, name)
        if reasons:
            lines += ["", f"`{name}` does not take:", ""]
            lines += [f"- {n} of {', '.join(sorted(ops))}: {reason}" for reason, (n, ops) in reasons]
    return "\n".join(lines)


def _json(found: dict[str, dict[str, Cell]], names: Sequence[str]) -> str:
    return json.dumps({
        op: {name: {"support": row[name].word, "taken": row[name].taken, "cases": row[name].total,
                    "rounded": dict(row[name].rounded), "reasons": dict(row[name].reasons)} for name in names}
        for op, row in found.items()
    }, indent=1)  # fmt: skip
