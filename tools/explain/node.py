"""All that `graphrt explain` knows of one node, as facts: pairs of what it is of and a sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from graphrt.errors import GraphError
from graphrt.printing import count_text, human_bytes
from graphrt.program import Fact, LaunchInfo
from graphrt.tools.explain.steps import Explained, Step
from graphrt.tools.explain.weights import weights_of
from graphrt.tools.inspect.describe import GraphInfo, TensorInfo
from graphrt.tools.inspect.labels import flop_text, nb_text, params_text, type_text, view_text


def find_node(found: Explained, text: str) -> TensorInfo:
    """The node of a name as dumps print it, or of an index, "#12". Raises GraphError for none, a leaf or several."""
    info = found.info
    if text.startswith("#") and text[1:].isdecimal():
        index = int(text[1:])
        if index >= len(info.tensors):
            raise GraphError(f"a node's index must be below {len(info.tensors)}, got {text}; `graphrt dump` lists them")
        named = [info.tensors[index]]
    else:
        named = [t for t in info.tensors if t.name == text]
    nodes = [t for t in named if not t.is_leaf]
    if len(nodes) == 1:
        return nodes[0]
    if named and not nodes:
        raise GraphError(f"a node is what something computes, {named[0].name!r} is a leaf: it holds data; name a node")
    if nodes:
        numbers = ", ".join(f"#{t.index}" for t in nodes[:8])
        raise GraphError(f"a node must be one, {text[:80]!r} is the name of {len(nodes)}; give one of {numbers}")
    names = [t.name for t in info.nodes]
    near = difflib.get_close_matches(text, names, 4, 0.5) or [n for n in names if n.startswith(text[:4])][:4]
    hint = f"the nearest are {', '.join(near)}" if near else "`graphrt dump` lists them"
    raise GraphError(f"a node must be in the graph, none is called {text[:80]!r}; {hint}")


def step_of(found: Explained, node: TensorInfo) -> Step | None:
    """The step that computes a node, None for a view, which nothing computes."""
    return next((s for s in found.steps if node.group == s.group and any(n.name == node.name for n in s.nodes)), None)


def facts(found: Explained, node: TensorInfo) -> Iterator[Fact]:
    """All facts, in order."""
    info, step = found.info, step_of(found, node)
    yield "node", f"#{node.index} {node.name}: {node.op} {type_text(node)}, nb {nb_text(node)}"
    for name, s in node.sources_by_name().items():
        t = info.tensors[s]
        view = f", {view_text(info, t)}" if t.view is not None else ""
        yield "sources", f"{name} = {t.name}: {type_text(t)}, nb {nb_text(t)}{view}"
    if node.params:
        given = {k: v for k, v in node.params.items() if v not in ("", (), [])}  # of score functions there are few
        shown = ", ".join(f"{k} {v:g}" if isinstance(v, float) else f"{k} {v}" for k, v in given.items())
        yield "parameters", shown if node.op.startswith("FLASH_ATTN") else params_text(node) or "as the op has them"
    if step is None:
        yield "kernel", f"none: a view {view_text(info, node)}; what it looks at is made by {_maker(info, node).name}"
        return
    yield "backend", f"{step.backend.id}: {step.cause}"
    yield from _fusion(found, step)
    if step.runner:
        yield "kernel", step.runner
    yield from _weights(found, step)
    if node.op.startswith("FLASH_ATTN_VARLEN"):
        yield from (("pages", line) for line in found.subject.pages)
    yield from step.facts
    for i, launch in enumerate(step.launches, 1):
        yield "launches", f"{i}. {launch_text(launch)}"
    yield from _expected(found, step)


def walk(found: Explained, node: TensorInfo, program: int) -> Iterator[Fact]:
    """What one program of an attention's launch does. Raises GraphError for a node of another kind."""
    step = _walked(found, node)
    yield "node", f"#{node.index} {node.name}: {node.op} {type_text(node)}"
    yield "kernel", f"{step.kernel}, {step.schedule}"
    yield from step.walk(program) or ()


def walk_data(found: Explained, node: TensorInfo, program: int) -> dict[str, Any]:
    """The same for machines."""
    return _walked(found, node).walk_data(program) or {}


def not_attention(what: str, node: TensorInfo) -> str:
    """The error where something that only an attention has is asked of another node."""
    return f"{what} needs an attention that the triton backend runs, {node.name} is {node.op}; name such a node"


def _walked(found: Explained, node: TensorInfo) -> Step:
    step = step_of(found, node)
    if step is None or step.tiles is None:
        raise GraphError(not_attention("--program", node))
    return step


def _maker(info: GraphInfo, node: TensorInfo) -> TensorInfo:
    """The first in a chain of views that is none itself."""
    while node.view is not None and node.group is None and node.sources():
        node = info.tensors[node.sources()[0]]
    return node


def _fusion(found: Explained, step: Step) -> Iterator[Fact]:
    group = found.info.groups[step.group]
    names = [n.name for n in step.nodes]
    if len(names) > 1:
        yield "fusion", f"{group.name}: {', '.join(names)} as one step"
        inside = [found.info.tensors[i].name for i in group.members if found.info.tensors[i].place is None]
        if inside:
            yield "fusion", f"never in memory: {', '.join(inside)}"
    else:
        yield "fusion", "none: a step of its own"


def launch_text(launch: LaunchInfo) -> str:
    """`packed_gemv, 1024 programs of 4 warps: KIND0=q4_K N=1 ...`."""
    if launch.grid is None:
        return f"{launch.name}()"
    grid = " x ".join(map(str, launch.grid))
    constants = " ".join(f"{k}={v}" for k, v in launch.constants)
    warps = f", {count_text(launch.warps, 'warp')}" if launch.warps else ""
    return f"{launch.name}, grid {grid}{warps}: {constants}"


def _weights(found: Explained, step: Step) -> Iterator[Fact]:
    for w in weights_of(step, found.subject.executable):
        how = f"packed as planes ({w.planes})" if w.planes else "as in the file"
        size = f"{human_bytes(w.nbytes)}, {w.bytes_per_element:.3f} bytes an element"
        yield "weights", f"{w.name} {w.kind}[{w.k}, {w.rows}] {how}: {size}"


def _expected(found: Explained, step: Step) -> Iterator[Fact]:
    flops, moved = step.work
    yield "work", f"{human_bytes(moved)}, {flop_text(flops)}"
    if step.cost is None:
        return
    c, total = step.cost, found.seconds
    share = f", {100 * c.seconds / total:.2f} % of the step's" if total else ""
    yield "expected", f"{1e6 * c.seconds:.1f} us{share}; bound by {c.bound}"
    launches = f"{len(step.launches)} x {1e6 * c.launches / len(step.launches):.1f} us of launching"
    yield "expected", f"bytes {1e6 * c.bytes:.1f} us, FLOPs {1e6 * c.flops:.1f} us, {launches}"
