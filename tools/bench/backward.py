"""`graphrt bench op FLASH_ATTN_BACK`: gradients of attention, beside those of torch's SDPA in the same process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphrt
from graphrt.backend import Backend
from graphrt.graph import Graph
from graphrt.tools.bench.back_program import build, fill, wrong
from graphrt.tools.bench.back_shapes import BackShape
from graphrt.tools.bench.op_inputs import Noise
from graphrt.tools.bench.timing import Clock, runs_for
from graphrt.tools.common import markdown_lines, table_lines

COLUMNS = (
    "shape", "form", "ms", "TFLOP/s", "GB/s", "of ceiling", "cuDNN", "flash", "flash, in order", "efficient", "x peer",
    "of beside", "first", "goal",
)  # fmt: skip
#: torch's ways, and whether it is told to keep an order.
PEERS = {
    "cuDNN": (SDPBackend.CUDNN_ATTENTION, False), "flash": (SDPBackend.FLASH_ATTENTION, False),
    "flash, in order": (SDPBackend.FLASH_ATTENTION, True), "efficient": (SDPBackend.EFFICIENT_ATTENTION, False),
}  # fmt: skip
_TYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BackRow:
    """One shape's outcome. seconds: of all gradients, None where message says why there is none; peers: seconds of
    torch's ways by name, or why there are none."""

    shape: BackShape
    seconds: float | None = None
    message: str = ""
    peers: dict[str, float | str] = field(default_factory=dict)

    @property
    def tflop_per_s(self) -> float | None:
        return self.shape.flops / self.seconds / 1e12 if self.seconds is not None else None

    @property
    def gb_per_s(self) -> float | None:
        """Of what must move: BackShape.bytes."""
        return self.shape.bytes / self.seconds / 1e9 if self.seconds is not None else None


def measure(
    shapes: Sequence[BackShape], backend_of: Callable[[str], Backend], clock: Clock, cuda: bool,
    repetitions: int | None, peers: bool, say: Callable[[str], None],
) -> list[BackRow]:  # fmt: skip
    """A row for each shape; whatever is raised on the way becomes a message. backend_of: the backend for a form."""
    noise, rows, found = Noise(), list[BackRow](), dict[Any, dict[str, float | str]]()
    for shape in shapes:
        row = BackRow(shape)
        rows.append(row)
        try:
            row.seconds, row.message = _seconds(shape, noise, backend_of(shape.form), clock, cuda, repetitions)
            if peers and cuda:
                key = _asked(shape)
                found[key] = row.peers = found.get(key) or _peers(shape, clock, repetitions)
        except Exception as error:  # a compiler's, a driver's, lack of memory
            row.message = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"
        if cuda:
            torch.cuda.empty_cache()
        said = row.message if row.seconds is None else f"{1e3 * row.seconds:.3f} ms, {row.tflop_per_s:.0f} TFLOP/s"
        say(f"{shape.name}: {said}")
    return rows


def _seconds(
    shape: BackShape, noise: Noise, backend: Backend, clock: Clock, cuda: bool, repetitions: int | None
) -> tuple[float | None, str]:
    """(seconds of all gradients, ""), or None and what is wrong with them."""
    program = build(shape, noise, backend)
    exe = graphrt.prepare(Graph(*program.nodes.values()), backend)
    fill(program, exe, *program.nodes.values())
    for _ in range(3):
        exe.run()
    said = wrong(program, exe, "cuda" if cuda else "cpu")
    if said:
        return None, said
    n = repetitions or runs_for(clock.times(exe.run, 3, exe.synchronize).median)
    return clock.times(exe.run, n, exe.synchronize).median, ""


# -- torch


def _asked(s: BackShape) -> tuple[Any, ...]:
    """What torch is asked for: forms are ours."""
    return s.d, s.heads, s.seqs, s.causal, s.packed, s.softcap, s.max_bias, s.sinks, s.dropout_p, s.bias, s.kv_type


def why_not(s: BackShape) -> str | None:
    """Why SDPA can't be a peer of a shape, None where it may."""
    wanted = {"softcap": s.softcap > 0, "ALiBi": s.max_bias > 0, "sinks": s.sinks}
    wanted["sequences of several lengths"] = len(set(s.seqs)) > 1
    missing = [name for name, is_wanted in wanted.items() if is_wanted]
    return f"it has no {' or '.join(missing)}" if missing else None


def _peers(s: BackShape, clock: Clock, repetitions: int | None) -> dict[str, float | str]:
    reason = why_not(s)
    if reason is not None:
        return dict.fromkeys(PEERS, reason)
    found: dict[str, float | str] = {}
    for name, (kind, ordered) in PEERS.items():
        if name == "efficient" and not s.bias:
            continue  # the others are faster where they can
        try:
            found[name] = _peer(s, kind, ordered, clock, repetitions)
        except RuntimeError as error:  # so torch says that a kernel does not take the arguments, or lack of memory
            found[name] = str(error).partition("\n")[0][:120]
    return found


def _peer(s: BackShape, kind: SDPBackend, ordered: bool, clock: Clock, repetitions: int | None) -> float:
    """Seconds of one backward. Raises RuntimeError where it can't run."""
    n_seq, n, dtype = len(s.seqs), s.seqs[0], _TYPES[s.kv_type]

    def leaf(heads: int) -> torch.Tensor:
        return torch.randn(n_seq, heads, n, s.d, device="cuda", dtype=dtype, requires_grad=True)

    q, k, v = leaf(s.heads[0]), leaf(s.heads[1]), leaf(s.heads[1])
    bias = torch.randn(1, 1, n, n, device="cuda", dtype=dtype, requires_grad=True) if s.bias else None
    of = [q, k, v, *([bias] if bias is not None else [])]
    torch.use_deterministic_algorithms(ordered, warn_only=True)
    try:
        with warnings.catch_warnings(), sdpa_kernel([kind]):
            warnings.simplefilter("ignore")
            out = F.scaled_dot_product_attention(
                q, k, v, bias.expand(n_seq, s.heads[0], n, n) if bias is not None else None, s.dropout_p, s.causal,
                enable_gqa=s.heads[0] != s.heads[1],
            )  # fmt: skip
            d_out = torch.randn_like(out)

            def work() -> None:
                torch.autograd.grad(out, of, d_out, retain_graph=True)

            for _ in range(3):
                work()
            runs = repetitions or runs_for(clock.times(work, 3, lambda: None).median)
            return clock.times(work, runs, lambda: None).median
    finally:
        torch.use_deterministic_algorithms(False)


# -- reports


def cells_of(row: BackRow, rows: Sequence[BackRow], ceiling: float) -> list[str]:
    """A row of the table, as COLUMNS has them. ceiling: of a product in f16, TFLOP/s."""
    s, rate, moved = row.shape, row.tflop_per_s, row.gb_per_s
    if rate is None or moved is None or row.seconds is None:
        return [s.name, s.form, "-", row.message or "-", *["-"] * (len(COLUMNS) - 4)]
    peers = [row.peers.get(name, "-") for name in PEERS]
    shown = [f"{s.flops / t / 1e12:.0f}" if isinstance(t, float) else "-" for t in peers]
    times = [t for t in peers if isinstance(t, float)]
    other = next((r for r in rows if r.shape.name == s.beside and r.tflop_per_s is not None), None)
    beside = f"{rate / other.tflop_per_s:.2f}" if other is not None and other.tflop_per_s else "-"
    factor = f"{min(times) / row.seconds:.2f}" if times else "-"
    figures = [f"{1e3 * row.seconds:.3f}", f"{rate:.0f}", f"{moved:.0f}", f"{100 * rate / ceiling:.0f} %"]
    return [s.name, s.form, *figures, *shown, factor, beside, s.first or "-", s.goal or "-"]


def lines(rows: Sequence[BackRow], form: str, ceiling: float) -> list[str]:
    """The table as text, and why torch is no peer of some; form is "table" or "md"."""
    cells = [cells_of(r, rows, ceiling) for r in rows]
    found = list((markdown_lines if form == "md" else table_lines)(list(COLUMNS), cells))
    reasons = {
        (r.shape.name, name, said) for r in rows for name, said in r.peers.items() if isinstance(said, str)
    }  # fmt: skip
    return [*found, "", *(f"{shape}, torch by {name}: {said}" for shape, name, said in sorted(reasons))]


def as_json(rows: Sequence[BackRow]) -> list[dict[str, Any]]:
    """Every row with its sizes."""
    return [
        {
            **asdict(r.shape), "ms": None if r.seconds is None else 1e3 * r.seconds, "tflop_per_s": r.tflop_per_s,
            "gb_per_s": r.gb_per_s,
            "peers": {name: 1e3 * x if isinstance(x, float) else x for name, x in r.peers.items()},
            "message": r.message,
        }
        for r in rows
    ]  # fmt: skip


def failed(rows: Sequence[BackRow]) -> bool:
    return any(r.seconds is None or not math.isfinite(r.seconds) for r in rows)
