"""A profile for its reader: tables, or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphrt.tools.common import table_lines
from graphrt.tools.profile.phase import GpuStep, Part, Phase, Row, rows


def as_json(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """The phases for `run --json`: times in microseconds, rows by group and by op."""
    return [
        {
            "phase": p.kind, "tokens": p.n_tokens, "steps": p.steps, "step_us": p.step * 1e6,
            "parts_us": sum(p.seconds) * 1e6, "times_taken": _how(p),
            "gpu": _gpu_figures(p.gpu) if p.gpu else None,
            "groups": [{"group": r.name, "op": r.op, "tensors": r.tensors, **_figures(r)} for r in rows(p, _label)],
            "ops": [{"op": r.name, **_figures(r)} for r in rows(p, _op)],
        }
        for p in phases
    ]  # fmt: skip


def _gpu_figures(g: GpuStep) -> dict[str, float]:
    return {"span_us": g.span * 1e6, "gaps_us": g.gaps * 1e6, "kernels": g.kernels}


def _label(part: Part) -> str:
    return part.label


def _op(part: Part) -> str:
    return part.op


def _figures(r: Row) -> dict[str, Any]:
    return {
        "calls": r.calls, "total_us": r.seconds * 1e6, "mean_us": r.seconds / r.calls * 1e6, "share": r.share,
        "bytes": r.work.bytes, "flops": r.work.flops, "gb_per_s": r.gb_per_s, "tflop_per_s": r.tflop_per_s,
    }  # fmt: skip


def _how(phase: Phase) -> str:
    if phase.gpu is None:
        return "each group by itself, medians by the host's clock"
    return "kernels inside whole steps" if phase.in_step else "kernels of each group by itself"


def lines(phases: Sequence[Phase]) -> list[str]:
    """Two tables a phase, and a sentence on the gaps."""
    out = []
    for p in phases:
        out += [
            "",
            f"{p.kind}: {p.n_tokens} token{'s' * (p.n_tokens > 1)} a step, {p.steps} steps; times are of {_how(p)}",
        ]
        out += _table("group", rows(p, _label), tensors=True)
        out += ["", *_table("op", rows(p, _op), tensors=False), "", _step_line(p)]
    return out


def _table(first: str, found: Sequence[Row], tensors: bool) -> list[str]:
    columns = [first, "calls", "total us", "mean us", "share", "GB/s", "TFLOP/s", *(["tensors"] if tensors else [])]
    body = []
    for r in found:
        figures = f"{r.seconds * 1e6:.0f}", f"{r.seconds / r.calls * 1e6:.2f}", f"{100 * r.share:.1f} %"
        rates = f"{r.gb_per_s:.1f}", f"{r.tflop_per_s:.3f}"
        more = [", ".join(r.tensors[:2]) + (f" and {len(r.tensors) - 2} more" if len(r.tensors) > 2 else "")]
        body.append([r.name, str(r.calls), *figures, *rates, *(more if tensors else [])])
    widths = [max(len(line[i]) for line in [columns, *body]) for i in range(7)]
    body = [[c.rjust(w) if i else c for i, (c, w) in enumerate(zip(row, widths))] + row[7:] for row in body]
    return table_lines([columns[0], *(c.rjust(w) for c, w in zip(columns[1:7], widths[1:])), *columns[7:]], body)


def _step_line(p: Phase) -> str:
    whole = f"a whole step takes {p.step * 1e6:.0f} us by the host's clock"
    if p.gpu is None:
        return f"{whole}; its groups one by one add up to {sum(p.seconds) * 1e6:.0f} us"
    share = 100 * p.gpu.gaps / p.gpu.span if p.gpu.span else 0.0
    return (
        f"{whole}, {p.gpu.span * 1e6:.0f} us on the GPU: {p.gpu.kernels:.0f} kernels and copies, with gaps of "
        f"{p.gpu.gaps * 1e6:.0f} us between them ({share:.1f} %)"
    )
