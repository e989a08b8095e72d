"""`graphrt explain --json`: the same facts as numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from graphrt.program import LaunchInfo
from graphrt.tools.explain.node import facts, step_of, walk_data
from graphrt.tools.explain.steps import Explained, Step
from graphrt.tools.explain.text import rows_of
from graphrt.tools.explain.weights import weights_of
from graphrt.tools.inspect.describe import TensorInfo

#: What the built-in backends add to a step, where they have nothing to add.
_NOTHING_CHOSEN: dict[str, Any] = {"products": [], "stored": None, "attention": None}


def as_json(found: Explained, node: TensorInfo | None, program: int | None = None) -> dict[str, Any]:
    """Times in seconds, sizes in bytes. steps: of all, alike ones once; node, step and facts: of the one asked for;
    walk: what that program of the node's launch does."""
    info, device = found.info, found.device
    out: dict[str, Any] = {
        "title": info.title, "phase": info.phase, "n_tokens": info.n_tokens, "depth": found.depth,
        "device": None if device is None else {**asdict(device), "planned": found.planned},
        "seconds": found.seconds,
        "tokens_per_second": info.n_tokens / found.seconds if found.seconds and info.n_tokens else None,
    }  # fmt: skip
    if found.subject.pages:
        out["pages"] = found.subject.pages_data
    if node is None:
        out["steps"] = [
            {"count": len(r.steps), "section": r.section, "seconds_of_all": r.seconds, **_step_json(found, r.steps[0])}
            for r in rows_of(found)
        ]
        return out
    step = step_of(found, node)
    out["node"] = {"index": node.index, "name": node.name, "op": node.op, "type": node.dtype, "ne": node.ne}
    out["node"] |= {"nb": node.nb, "params": node.params, "view": asdict(node.view) if node.view else None}
    out["step"] = _step_json(found, step) if step is not None else None
    out["facts"] = [list(fact) for fact in facts(found, node)]
    if program is not None:
        out["walk"] = walk_data(found, node, program)
    return out


def _step_json(found: Explained, step: Step) -> dict[str, Any]:
    group = found.info.groups[step.group]
    exe = found.subject.executable
    return {
        "nodes": [n.name for n in step.nodes], "ops": [n.op for n in step.nodes],
        "fusion": group.name if len(step.nodes) > 1 else None, "backend": step.backend.id, "cause": step.cause,
        "refused": step.refused, "kernel": step.kernel, "schedule": step.schedule or None,
        "runner": step.runner or None,
        "launches": [_launch_json(x) for x in step.launches],
        "weights": [{**asdict(w), "bytes_per_element": w.bytes_per_element} for w in weights_of(step, exe)],
        "bytes": step.work.bytes, "flops": step.work.flops,
        "cost": None if step.cost is None else {
            **asdict(step.cost), "seconds": step.cost.seconds, "bound": step.cost.bound,
        },
        **_NOTHING_CHOSEN, **step.data,
    }  # fmt: skip


def _launch_json(launch: LaunchInfo) -> dict[str, Any]:
    constants = dict(launch.constants)
    return {"kernel": launch.name, "grid": launch.grid, "warps": launch.warps, "constants": constants}
