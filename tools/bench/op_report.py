"""What `graphrt bench op` says: rows, the marks they are held against, and the report as a table, Markdown or JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from graphrt.printing import human_bytes
from graphrt.tools.bench.op_shapes import LLAMA_SOURCE, Mark, Shape
from graphrt.tools.bench.timing import Ceilings, Times
from graphrt.tools.common import markdown_lines, table_lines

#: What makes the exit code 1.
BAD = ("wrong", "failed")
#: llama.cpp's has an asterisk because it is quoted.
COLUMNS = (
    "shape", "us", "TFLOP/s", "GB/s", "of ceiling", "one cache", "cuDNN", "flash", "llama.cpp*", "x peer", "x llama",
    "first", "goal",
)  # fmt: skip


@dataclass(frozen=True)
class PeerTime:
    """A peer's seconds an op, or None with the reason why it has none. form: how it was run."""

    seconds: float | None
    said: str


@dataclass
class Row:
    """One shape's outcome. status: ok, wrong, unsupported or failed; message: why it is not ok.

    seconds: of one op, None unless ok. flops: counted ones of one op; moved: bytes of one op. error: the largest
    relative error of the rows that were judged. first, goal: is the mark met, None where there is none to judge by.
    reused: seconds where all nodes share one cache, which the device's own cache may hold: llama.cpp's figures are so.
    memory: bytes that the graph of all nodes plans for results, inputs left out. cost: of a form of flash decoding,
    what it does and moves by ops/decode_costs.py, in words.
    """

    shape: Shape
    status: str
    message: str = ""
    seconds: float | None = None
    spread: tuple[float, float] | None = None
    runs: int = 0
    nodes: int = 0
    flops: float = 0.0
    moved: float = 0.0
    error: float | None = None
    peers: dict[str, PeerTime] = field(default_factory=dict)
    reused: float | None = None
    first: bool | None = None
    goal: bool | None = None
    memory: int | None = None
    cost: str = ""

    @property
    def tflop_per_s(self) -> float | None:
        return self.flops / self.seconds / 1e12 if self.seconds else None

    @property
    def gb_per_s(self) -> float | None:
        return self.moved / self.seconds / 1e9 if self.seconds else None

    @property
    def best_peer(self) -> float | None:
        """Seconds of the fastest peer."""
        return min((p.seconds for p in self.peers.values() if p.seconds is not None), default=None)

    @property
    def of_best_peer(self) -> float | None:
        """How many times the fastest peer's speed."""
        return self.best_peer / self.seconds if self.seconds and self.best_peer else None

    @property
    def of_llama(self) -> float | None:
        """How many times llama.cpp's quoted speed, like with like: of one query with the cache that was read before."""
        if not self.seconds or self.shape.llama is None:
            return None
        if self.shape.is_decode:
            return self.shape.llama / (1e6 * (self.reused or self.seconds))
        assert self.tflop_per_s is not None
        return self.tflop_per_s / self.shape.llama

    def share(self, best: Ceilings) -> float | None:
        """Of the ceiling: copied bytes for decode, else a matrix product's FLOPs in the type that attention uses."""
        if self.seconds is None:
            return None
        if self.shape.is_decode:
            return (self.gb_per_s or 0.0) / best.copy_gb_per_s
        product = best.tflop_per_s.get("f16") or max(best.tflop_per_s.values())
        return (self.tflop_per_s or 0.0) / product


def measured(shape: Shape, times: Times, nodes: int, flops: float, moved: float, error: float) -> Row:
    """The row of a shape whose result is right. times: of runs of `nodes` ops; flops, moved: of one op."""
    each = sorted(t / nodes for t in times.seconds)
    spread = (each[len(each) // 10], each[-1 - len(each) // 10])
    return Row(shape, "ok", times.note, times.median / nodes, spread, len(each), nodes, flops, moved, error)


def judge_marks(rows: Sequence[Row]) -> None:
    """Fills in which marks are met."""
    by_name = {r.shape.name: r for r in rows}
    for row in rows:
        row.first, row.goal = (_met(row, mark, by_name) for mark in (row.shape.first, row.shape.goal))


def _met(row: Row, mark: Mark | None, by_name: dict[str, Row]) -> bool | None:
    if mark is None or row.seconds is None or row.tflop_per_s is None:
        return None
    if mark.unit == "TFLOP/s":
        return row.tflop_per_s >= mark.value
    if mark.unit == "us":
        return 1e6 * row.seconds <= mark.value
    if mark.unit == "of cuDNN":
        peer = row.peers.get("cudnn")
        return None if peer is None or peer.seconds is None else peer.seconds / row.seconds >= mark.value
    other = by_name.get(mark.of.name) if mark.of is not None else None
    if other is None or other.seconds is None or other.tflop_per_s is None:
        return None
    if mark.unit == "speed of":
        return row.tflop_per_s / other.tflop_per_s >= mark.value
    return row.seconds / other.seconds <= mark.value


def mean_of_llama(rows: Sequence[Row]) -> tuple[float, int] | None:
    """The geometric mean of the ratios to llama.cpp and of how many, where its figure is of the very shape."""
    logs = [math.log(r.of_llama) for r in rows if r.of_llama is not None and not r.shape.elsewhere]
    return (math.exp(sum(logs) / len(logs)), len(logs)) if logs else None


@dataclass(frozen=True)
class Report:
    """Everything that is said. machine: device, driver and versions; before, after: the ceilings at both ends."""

    op: str
    backend: str
    machine: dict[str, str]
    before: Ceilings
    after: Ceilings
    rows: list[Row]
    tiny: bool = False

    @property
    def exit_code(self) -> int:
        """1 where a result was wrong, a shape failed, or nothing was measured."""
        bad = any(r.status in BAD for r in self.rows) or all(r.status != "ok" for r in self.rows)
        return 1 if bad else 0

    @property
    def best(self) -> Ceilings:
        """The ceilings that shares are of: the higher ones."""
        return self.before.best(self.after)

    def csv(self) -> list[str]:
        """The rows as comma-separated values, the first line their names."""
        out = io.StringIO()
        names = ("shape", "status", "us", "tflop_per_s", "gb_per_s", "memory", "share_of_ceiling", "relative_error")
        table = csv.writer(out, lineterminator="\n")
        table.writerow(names)
        table.writerows([found[name] for name in names] for r in self.rows for found in [_row_json(r, self.best)])
        return out.getvalue().splitlines()

    def as_json(self) -> dict[str, Any]:
        mean = mean_of_llama(self.rows)
        return {
            "op": self.op,
            "backend": self.backend,
            "tiny": self.tiny,
            "machine": self.machine,
            "ceilings": {"before": asdict(self.before), "after": asdict(self.after)},
            "llama_source": LLAMA_SOURCE,
            "geomean_of_llama": {"ratio": mean[0], "shapes": mean[1]} if mean else None,
            "results": [_row_json(r, self.best) for r in self.rows],
        }

    def lines(self, markdown: bool) -> list[str]:
        """The report as text: what it ran on, the table, and what must be known to read it."""
        table = (markdown_lines if markdown else table_lines)(COLUMNS, [_cells(r, self.best) for r in self.rows])
        remarks = [f"- {line}" if markdown else line for line in self._remarks()]
        return [*self._head(), "", *table, "", *remarks]

    def _head(self) -> list[str]:
        m, before, after = self.machine, self.before, self.after
        products = (f"{kind} {rate:.3g} and {after.tflop_per_s[kind]:.3g}" for kind, rate in before.tflop_per_s.items())
        return [
            f"{self.op} on {self.backend}, {m['device']}, driver {m['driver']}, torch {m['torch']}, "
            f"triton {m['triton']}, graphrt {m['graphrt']}",
            f"ceilings before and after, in the same process: copy {before.copy_gb_per_s:.0f} and "
            f"{after.copy_gb_per_s:.0f} GB/s; products {', '.join(products)} TFLOP/s",
        ]

    def _remarks(self) -> list[str]:
        shown = [r for r in self.rows if r.seconds is not None]
        lines = [f"{r.shape.name}: {r.message}" for r in self.rows if r.message]
        if self.tiny:
            lines.append("Sizes are tiny (--tiny): these figures say nothing of speed.")
        if shown:
            error = max(r.error or 0.0 for r in shown)
            lines.append(f"What is timed was right before, to a relative error of {error:.1e} against float64.")
        if any(r.of_llama is not None for r in shown):
            lines.append(f"* {LLAMA_SOURCE}.")
            if any(r.reused is not None for r in shown):
                lines.append("one cache: all nodes read the same K and V, as llama.cpp's do; x llama is of that time.")
            lines += [f"* of {r.shape.name} it is that of {r.shape.elsewhere}." for r in shown if r.shape.elsewhere]
        lines += _beside_standard(shown)
        lines += [f"{r.shape.name}: {1e6 * (r.seconds or 0.0):.1f} us; {r.cost}." for r in shown if r.cost]
        mean = mean_of_llama(self.rows)
        if mean is not None:
            lines.append(f"Geometric mean of the ratios to llama.cpp: {mean[0]:.2f}, over {mean[1]} shapes.")
        if any(r.best_peer is not None for r in shown):
            lines.append("cuDNN and flash: torch's SDPA in this run, in a CUDA graph; its q is f16 where ours is f32.")
        lines += [f"{r.shape.name}: FlexAttention has {_peer(r, 'flex')}." for r in shown if _peer(r, "flex") != "-"]
        return lines


def _beside_standard(rows: Sequence[Row]) -> list[str]:
    """What the fused op saves, where both forms were measured."""
    by_name, lines = {r.shape.name: r for r in rows}, []
    for r in rows:
        other = by_name.get(r.shape.name.replace(" standard", "")) if r.shape.apart else None
        if other is not None and r.seconds and other.seconds:
            memory = (
                f", {human_bytes(r.memory)} for results instead of {human_bytes(other.memory)}"
                if (r.memory is not None and other.memory is not None)
                else ""
            )
            lines.append(f"{r.shape.name}: {r.seconds / other.seconds:.2f} times the time of the fused op{memory}.")
    return lines


def _cells(r: Row, best: Ceilings) -> list[str]:
    if r.seconds is None:
        return [r.shape.name, r.status, *["-"] * (len(COLUMNS) - 2)]
    share = r.share(best)
    rates = [f"{r.tflop_per_s:.3g}", f"{r.gb_per_s:.3g}" if (r.gb_per_s or 0) < 1 else f"{r.gb_per_s:.0f}"]
    llama = "-" if r.shape.llama is None else f"{r.shape.llama:g}"
    reused = "-" if r.reused is None else f"{1e6 * r.reused:.1f} us"
    return [
        r.shape.name, f"{1e6 * r.seconds:.1f}", *rates, f"{100 * (share or 0.0):.0f} %", reused, _peer(r, "cudnn"),
        _peer(r, "flash"), llama, _ratio(r.of_best_peer), _ratio(r.of_llama), _mark(r.shape.first, r.first),
        _mark(r.shape.goal, r.goal),
    ]  # fmt: skip


def _peer(r: Row, name: str) -> str:
    """A peer's figure in the unit of its row: us for decode, else TFLOP/s."""
    peer = r.peers.get(name)
    if peer is None or peer.seconds is None:
        return "-"
    return f"{1e6 * peer.seconds:.1f} us" if r.shape.is_decode else f"{r.flops / peer.seconds / 1e12:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mark(mark: Mark | None, met: bool | None) -> str:
    if mark is None:
        return "-"
    answer = {True: "yes", False: "no", None: "?"}[met]
    unit = {"speed of": "of plain", "time of": "of f16's time"}.get(mark.unit, mark.unit)
    return f"{answer} ({mark.value:g} {unit})"


def _row_json(r: Row, best: Ceilings) -> dict[str, Any]:
    """us and rates of one op; sizes as in Shape."""
    s = r.shape
    sizes = {k: v for k, v in vars(s).items() if k not in ("first", "goal", "llama", "elsewhere", "name")}
    return {
        "shape": s.name,
        "sizes": sizes,
        "status": r.status,
        "message": r.message,
        "us": None if r.seconds is None else 1e6 * r.seconds,
        "us_with_one_cache": None if r.reused is None else 1e6 * r.reused,
        "us_10_to_90_percent": None if r.spread is None else [1e6 * t for t in r.spread],
        "runs": r.runs,
        "nodes": r.nodes,
        "tflop_per_s": r.tflop_per_s,
        "gb_per_s": r.gb_per_s,
        "memory": r.memory,
        "cost": r.cost or None,
        "share_of_ceiling": r.share(best),
        "ceiling": "copy" if s.is_decode else "product",
        "relative_error": r.error,
        "peers": {
            name: {"us": None if p.seconds is None else 1e6 * p.seconds, "said": p.said} for name, p in r.peers.items()
        },
        "of_best_peer": r.of_best_peer,
        "llama": None
        if s.llama is None
        else {"value": s.llama, "unit": "us" if s.is_decode else "TFLOP/s", "quoted": True, "elsewhere": s.elsewhere},
        "of_llama": r.of_llama,
        "first": _mark_json(s.first, r.first),
        "goal": _mark_json(s.goal, r.goal),
    }


def _mark_json(mark: Mark | None, met: bool | None) -> dict[str, Any] | None:
    return None if mark is None else {"mark": str(mark), "met": met}
