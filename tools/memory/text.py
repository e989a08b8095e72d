"""`graphrt memory` in words: tables, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from graphrt.printing import count_text, human_bytes
from graphrt.tools.common import printable, table_lines
from graphrt.tools.inspect.subject import Subject
from graphrt.tools.memory.lifetimes import Life, Step
from graphrt.tools.memory.limit import COUNTED, Fit
from graphrt.tools.memory.report import ArenaReport, MemoryReport, Peak, Row

#: Living tensors at the peak that a table lists; JSON has all.
SHOWN_ALIVE = 10
#: Violations that are listed; JSON has all.
SHOWN_WRONG = 20
LIFE_COLUMNS = ("tensor", "op", "size", "offset", "first use", "last use")


def heading(subject: Subject) -> str:
    """`smol.gguf, decode of 1 token, context of 4096`."""
    holder = subject.session or subject.engine
    tokens = f"{subject.n_tokens} token{'s' * (subject.n_tokens > 1)}"
    if holder is None:
        return printable(subject.title) + (f", a step on {tokens}" if subject.phase == "train" else "")
    many = f", {subject.engine.n_seq} sequences" if subject.engine is not None else ""
    return f"{printable(subject.title)}, {subject.phase} of {tokens}{many}, context of {holder.n_ctx}"


def arena_bytes(subject: Subject) -> int:
    """Of all its arenas."""
    return sum(arena.buffer.nbytes for arena in subject.executable.arenas.values())


def lines(
    report: MemoryReport, subject: Subject, limit: int | None, fitting: Sequence[Fit], other: Subject | None = None
) -> Iterator[str]:
    """Plain lines, the same wherever they go. other: the step that takes less."""
    yield heading(subject)
    if other is not None:
        tokens = count_text(other.n_tokens, "token")
        size = human_bytes(arena_bytes(other))
        yield f"{other.phase} of {tokens} takes less: arenas of {size} (--phase {other.phase})"
    yield ""
    yield from _bound("weights", "type", report.weights)
    yield from _bound("cache", "cache", report.cache)
    if subject.pages:
        yield from (*subject.pages, "")
    for backend, nbytes in report.kept.items():
        yield from (f"kept by {backend}: {human_bytes(nbytes)}, weights in f16 (--keep-weights)", "")
    for arena in report.arenas:
        yield from _arena(arena, report.steps)
    yield from _verdict(report)
    if limit is not None:
        yield ""
        yield from _limit(limit, fitting)


def _verdict(report: MemoryReport) -> Iterator[str]:
    """What the check of the plan found."""
    wrong = report.wrong
    if not wrong:
        yield "the plan is sound: no two tensors that are alive at one step share bytes"
        return
    first = f", the first {SHOWN_WRONG}" if len(wrong) > SHOWN_WRONG else ""
    yield f"the plan is wrong: {len(wrong)} violation{'s' * (len(wrong) > 1)}{first}:"
    yield from (f"  {printable(str(v))}" for v in wrong[:SHOWN_WRONG])


def _bound(title: str, column: str, rows: Sequence[Row]) -> Iterator[str]:
    """A table of weights or of the cache."""
    if not rows:
        return
    total = sum(row.nbytes for row in rows)
    named = [" ".join(filter(None, (row.what, row.dtype))) for row in rows]
    cells = [
        (name, row.count, human_bytes(row.nbytes), _percent(row.share), row.backend) for name, row in zip(named, rows)
    ]
    yield f"{title}: {human_bytes(total)}"
    yield from table_lines((column, "tensors", "size", "share", "on"), cells)
    yield ""


def _arena(report: ArenaReport, steps: Sequence[Step]) -> Iterator[str]:
    arena, peak = report.arena, report.peak
    saved = report.saved / report.alone if report.alone else 0
    held = f"{len(arena.lives)} tensors in {len(steps)} steps"
    yield f"compute arena of {arena.backend}: {human_bytes(arena.nbytes)}, {held}"
    yield f"  without reuse  {human_bytes(report.alone)}; reuse saved {human_bytes(report.saved)} ({_percent(saved)})"
    yield f"  peak           {human_bytes(peak.nbytes)} alive at step {step_text(peak.step, steps)}"
    yield f"  fragmentation  {human_bytes(peak.gaps)} in gaps at the peak ({_percent(gap_share(peak))})"
    yield ""
    alive = peak.lives[:SHOWN_ALIVE]
    more = f", the largest {len(alive)}" if len(alive) < len(peak.lives) else ""
    yield f"alive at the peak: {len(peak.lives)} tensors{more}"
    yield from table_lines(LIFE_COLUMNS, [_life(x, steps) for x in alive])
    yield ""
    yield "largest tensors"
    yield from table_lines(LIFE_COLUMNS, [_life(x, steps) for x in report.largest])
    yield ""


def gap_share(peak: Peak) -> float:
    """The part of the bytes up to the highest living one that is in gaps, from 0 to 1."""
    return peak.gaps / peak.top if peak.top else 0.0


def step_text(step: int, steps: Sequence[Step]) -> str:
    """`12 (attn_norm-0)`: a step's number and what it makes, "end" behind the last."""
    return f"{step} ({printable(steps[step].name)})" if step < len(steps) else "end"


def _life(x: Life, steps: Sequence[Step]) -> tuple[str, ...]:
    first, last = (step_text(s, steps) for s in (x.first, x.last))
    return x.name, x.op, human_bytes(x.nbytes), str(x.offset), first, last


def _limit(limit: int, fitting: Sequence[Fit]) -> Iterator[str]:
    yield f"the longest context in {human_bytes(limit)}"
    columns = ("cache type", "-c", "weights", "cache", "prefill", "decode", "total", "")
    yield from table_lines(columns, [_fit(fit) for fit in fitting])
    yield COUNTED


def _fit(fit: Fit) -> tuple[str, ...]:
    if fit.needs is None:
        return fit.types, "none", "", "", "", "", "", fit.reason or "not even one token fits; raise the limit"
    n = fit.needs
    sizes = [human_bytes(b) for b in (n.weights, n.cache, n.prefill, n.decode, n.total)]
    return fit.types, str(n.n_ctx), *sizes, "the model's own limit" if n.n_ctx == fit.most else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# ---- JSON ----


def as_json(
    report: MemoryReport, subject: Subject, limit: int | None, fitting: Sequence[Fit], other: Subject | None = None
) -> dict[str, Any]:
    """The report as plain data; bytes and steps as whole numbers, shares from 0 to 1. other: the step that takes
    less."""
    told: dict[str, Any] = {
        "title": subject.title,
        "phase": subject.phase,
        "n_tokens": subject.n_tokens,
        "n_ctx": holder.n_ctx if (holder := subject.session or subject.engine) is not None else 0,
        "weights": [asdict(row) for row in report.weights],
        "cache": [asdict(row) for row in report.cache],
        "kept": report.kept,
        "arenas": [_arena_json(arena) for arena in report.arenas],
        "steps": [asdict(step) for step in report.steps],
        "violations": [{"rule": v.rule, "tensors": [asdict(x) for x in v.tensors]} for v in report.wrong],
    }
    if subject.engine is not None:
        told["pages"] = subject.pages_data
    if other is not None:
        told["other"] = {"phase": other.phase, "n_tokens": other.n_tokens, "arena_nbytes": arena_bytes(other)}
    if limit is not None:
        told["limit"] = {"nbytes": limit, "counted": COUNTED, "contexts": [_fit_json(fit) for fit in fitting]}
    return told


def _arena_json(report: ArenaReport) -> dict[str, Any]:
    arena, peak = report.arena, report.peak
    return {
        "backend": arena.backend,
        "nbytes": arena.nbytes,
        "alignment": arena.alignment,
        "without_reuse": report.alone,
        "saved": report.saved,
        "peak": {"step": peak.step, "nbytes": peak.nbytes, "alive": [x.number for x in peak.lives]},
        "fragmentation": {"nbytes": peak.gaps, "share": gap_share(peak)},
        "largest": [x.number for x in report.largest],
        "tensors": [asdict(x) for x in arena.lives],
    }


def _fit_json(fit: Fit) -> dict[str, Any]:
    needs = {**asdict(fit.needs), "total": fit.needs.total} if fit.needs is not None else None
    return {"types": fit.types, "n_ctx": fit.needs.n_ctx if fit.needs else 0, "needs": needs, "reason": fit.reason}
