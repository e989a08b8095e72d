"""`graphrt explain --json`: the same facts as numbers."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from typing import Any

from graphrt.tools.describe import TensorInfo
from graphrt.tools.explain_attention import AttentionPlan
from graphrt.tools.explain_node import facts, step_of
from graphrt.tools.explain_products import plan_json, weights_of
from graphrt.tools.explain_steps import Explained, Step
from graphrt.tools.explain_text import rows_of


def as_json(found: Explained, node: TensorInfo | None) -> dict[str, Any]:
    """Times in seconds, sizes in bytes. steps: of all, alike ones once; node, step and facts: of the one asked for."""
    info, device = found.info, found.device
    out: dict[str, Any] = {
        "title": info.title, "phase": info.phase, "n_tokens": info.n_tokens, "depth": found.depth,
        "device": None if device is None else {**asdict(device), "planned": found.planned},
        "seconds": found.seconds,
        "tokens_per_second": info.n_tokens / found.seconds if found.seconds and info.n_tokens else None,
    }  # fmt: skip
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
    return out


def _step_json(found: Explained, step: Step) -> dict[str, Any]:
    group = found.info.groups[step.group]
    exe = found.subject.executable
    return {
        "nodes": [n.name for n in step.nodes], "ops": [n.op for n in step.nodes],
        "fusion": group.name if len(step.nodes) > 1 else None, "backend": step.backend.name, "cause": step.cause,
        "refused": step.refused, "kernel": step.kernel, "schedule": step.schedule or None,
        "runner": step.runner or None,
        "launches": [{**asdict(x), "constants": dict(x.constants)} for x in step.launches],
        "weights": [{**asdict(w), "bytes_per_element": w.bytes_per_element} for w in weights_of(step, exe)],
        "products": plan_json(step), "stored": step.stored.form.value if step.stored is not None else None,
        "bytes": step.work.bytes, "flops": step.work.flops,
        "cost": None if step.cost is None else {
            **asdict(step.cost), "seconds": step.cost.seconds, "bound": step.cost.bound,
        },
        "attention": None if step.attention is None else _attention_json(step.attention),
    }  # fmt: skip


def _attention_json(plan: AttentionPlan) -> dict[str, Any]:
    c = plan.chosen
    config = {f.name: getattr(c.config, f.name) for f in fields(c.config)} if is_dataclass(c.config) else None
    return {
        "kernel": c.kernel, "refused": dict(c.refused), "workers": c.workers, "stages": c.stages, "config": config,
        "shared_bytes": c.shared, "tiling": asdict(c.tiling), "choice": asdict(c.choice), "programs": c.programs,
        "at_once": plan.at_once, "join": c.join or None, "repairs": c.repairs, "k_blocks": list(plan.k_blocks),
        "mask_blocks": plan.kinds, "longest": plan.longest, "busy_percent": plan.busy_percent,
        "fixup_tiles": [{"tile": tile, "parts": n} for tile, n in plan.shared_tiles().items()],
        "bars": [[b.program, b.start, *asdict(b.segment).values()] for b in plan.bars],
    }  # fmt: skip
