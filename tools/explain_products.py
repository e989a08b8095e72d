"""Of matrix products: how their weights lie, and what the GPU backend planned of them (kernels/products/plan.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphrt.backends.triton.packing import PackedBuffer, packing_of
from graphrt.execute import Executable
from graphrt.tools.explain_steps import Step

if TYPE_CHECKING:
    from graphrt.backends.triton.kernels.products.plan import Part


@dataclass(frozen=True)
class WeightInfo:
    """name; kind: its type; rows, k; planes: of packed weights, "" for others: as in the file; nbytes: in memory."""

    name: str
    kind: str
    rows: int
    k: int
    planes: str
    nbytes: int

    @property
    def bytes_per_element(self) -> float:
        return self.nbytes / (self.rows * self.k)


def weights_of(step: Step, exe: Executable) -> list[WeightInfo]:
    """The matrices that a step's products multiply with."""
    found = []
    for node in step.nodes:
        w = node.src[0]
        if node.op in ("MUL_MAT", "MUL_MAT_ID") and w is not None:
            buffer = exe.place(w)[0]
            packed = isinstance(buffer, PackedBuffer)
            nbytes = buffer.footprint if packed else w.nbytes
            planes = _planes(w.dtype.name) if packed else ""
            found.append(WeightInfo(w.name, w.dtype.name, w.n_elements // w.ne[0], w.ne[0], planes, nbytes))
    return found


def _planes(kind: str) -> str:
    """What planes a packed type has."""
    p = packing_of(kind)
    assert p is not None
    scale = str(p.scale_type).removeprefix("torch.")
    parts = [f"{p.bits}-bit codes"]
    parts += [f"{p.high_bits} high bit{'s' * (p.high_bits > 1)}"] if p.high_bits else []
    parts += [f"{p.scales} {scale} scale{'s' * (p.scales > 1)} of 32 elements"]
    parts += [f"{p.supers} float16 of 256"] if p.supers else []
    return ", ".join(parts)


def plan_facts(step: Step) -> Iterator[tuple[str, str]]:
    """What was planned of a step's products: kernels, why these and not others, in what form they read activations."""
    parts = step.products.parts if step.products is not None else ()
    for part in parts:
        of = ", ".join(p.weight.name for p in part.products)
        yield "kernel", part.route.kernel.name + (f", for {of}" if len(parts) > 1 else "")
        yield "why", part.route.reason
        for name, reason in part.route.refused.items():
            yield "why", f"not {name}: it {reason}"
        yield "activations", f"read {_read_as(part)}: {part.made.value}"


def _read_as(part: Part) -> str:
    return "as they are" if part.route.form.name == "AS_IS" else f"in {part.route.form.value}"


def stored_facts(step: Step) -> Iterator[tuple[str, str]]:
    """How a step's result is stored, if not just as the graph has it."""
    if step.stored is not None and step.stored.form.name != "AS_IS":
        yield "result", f"stored in {step.stored.form.value}, as all products that read it want it"
    elif step.stored is not None and step.stored.q8_copy:
        yield "result", "stored as the graph has it, and beside that in 8 bits for the products that want them"


def plan_json(step: Step) -> list[dict[str, Any]]:
    """plan_facts() as data."""
    return [
        {
            "kernel": part.route.kernel.name, "reason": part.route.reason, "refused": dict(part.route.refused),
            "weights": [p.weight.name for p in part.products], "form": part.route.form.value, "made": part.made.value,
        }
        for part in (step.products.parts if step.products is not None else ())
    ]  # fmt: skip
