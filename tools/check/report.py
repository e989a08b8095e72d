"""What would fall back, and why: `graphrt check` as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from graphrt.backend import Backend
from graphrt.graph import Graph
from graphrt.models.engine import SessionOptions
from graphrt.models.rope_options import RopeOptions
from graphrt.models.session import Session
from graphrt.op import op_spec
from graphrt.rules import check_graph
from graphrt.schedule import Schedule, schedule
from graphrt.tensor import Tensor
from graphrt.tools.inspect.describe import describe
from graphrt.tools.inspect.fold import ranges
from graphrt.tools.inspect.graph_run import made_from
from graphrt.tools.inspect.planned import Planned, planned
from graphrt.tools.inspect.played import Played
from graphrt.tools.inspect.subject import check_no_ranks, check_no_rope, is_graph, load_subject


@dataclass(frozen=True)
class Fallback:
    """Nodes that the backend does not run, alike but for their layer. where: the layers, "-" outside of layers;
    example: the first one's name; backend: who runs them; cause: the backend's reason, or the schedule's."""

    op: str
    count: int
    where: str
    example: str
    backend: str
    cause: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Copied:
    """Tensors that every run copies from one backend to another; nbytes: of each."""

    count: int
    where: str
    example: str
    origin: str
    target: str
    nbytes: int


@dataclass(frozen=True)
class Checked:
    """A step. title: "decode of 1 token"; nodes: that compute; views: nodes for which nothing runs; splits: in which it
    runs."""

    title: str
    nodes: int
    views: int
    splits: int
    fallbacks: list[Fallback]
    copies: list[Copied]

    @property
    def is_whole(self) -> bool:
        return not self.fallbacks and self.splits <= 1


def check(
    text: str, backend: Planned, options: SessionOptions, *, synthetic: bool = False, rope: RopeOptions | None = None,
    played: Played = Played(),
) -> list[Checked]:  # fmt: skip
    """The steps of what `text` names: a prompt's batch and a decode step of a model, else its graph. What `backend`
    refuses is for the CPU to run. rope: changes to a model's rotation; played: ranks of a model. Raises
    UnsupportedError where the CPU refuses too, SessionError for ranks of a graph."""
    backends: list[Backend] = [backend, *([planned("cpu")] if backend.name != "cpu" else [])]
    if not synthetic and is_graph(text):
        check_no_rope(text, rope)
        check_no_ranks(text, played)
        return [_checked("graph", made_from(text, 0)()[0], backends)]
    model, _ = load_subject(text, backends, synthetic=synthetic, rope=rope, played=played)
    session = Session(model.decoder, backends, options)
    sizes = (session.n_batch, 1) if session.n_batch > 1 else (1,)
    titles = {n: (f"prefill of {n} tokens" if n > 1 else "decode of 1 token") + str(played) for n in sizes}
    return [_checked(titles[n], session.decoder.graph(n, 1, session.cache), backends) for n in sizes]


def _checked(title: str, graph: Graph, backends: Sequence[Backend]) -> Checked:
    check_graph(graph)
    plan = schedule(graph, backends)
    layers = {t: i.layer for t, i in zip([*graph.leafs, *graph.nodes], describe(graph).tensors)}
    nodes = [n for n in graph.nodes if not op_spec(n.op).is_view]
    return Checked(
        title,
        len(nodes),
        len(graph.nodes) - len(nodes),
        len(plan.splits),
        _fallbacks(nodes, plan, backends, layers),
        _copies(plan, layers),
    )


Layers = dict[Tensor, int | None]


def _fallbacks(nodes: Sequence[Tensor], plan: Schedule, backends: Sequence[Backend], layers: Layers) -> list[Fallback]:
    asked = backends[0]
    alike: dict[tuple[str, str, str], list[Tensor]] = {}
    for node in nodes:
        found = plan.assignments[node]
        if found.backend is not asked:
            cause = plan.refusals.get(node, {}).get(asked.id) or asked.supports(node) or found.cause
            alike.setdefault((node.op, found.backend.id, cause), []).append(node)
    out = [
        Fallback(op, len(of), _where(of, layers), of[0].name, backend, cause, tuple(n.name for n in of))
        for (op, backend, cause), of in alike.items()
    ]
    return sorted(out, key=lambda f: -f.count)


def _copies(plan: Schedule, layers: Layers) -> list[Copied]:
    owner = {local: t for t, local in plan.local.items()}
    alike: dict[tuple[str, str, int, str], list[Tensor]] = {}
    for split in plan.splits:
        for c in split.copies:
            if not c.once:
                source = owner.get(c.source, c.source)
                alike.setdefault((c.origin, split.backend.id, c.source.data_nbytes, source.op), []).append(source)
    return [
        Copied(len(of), _where(of, layers), of[0].name, origin, target, nbytes)
        for (origin, target, nbytes, _), of in alike.items()
    ]


def _where(tensors: Iterable[Tensor], layers: Layers) -> str:
    """`0-29`, and `-` for what belongs to no layer."""
    found = [layers.get(t) for t in tensors]
    inside = ranges(sorted({layer for layer in found if layer is not None}))
    outside = "-" if None in found else ""
    return " and ".join(part for part in (inside, outside) if part)


def as_json(step: Checked) -> dict[str, Any]:
    """A step as plain data, with the name of every node that falls back."""
    return {
        "step": step.title,
        "nodes": step.nodes,
        "views": step.views,
        "splits": step.splits,
        "fallbacks": [{**vars(f), "names": list(f.names)} for f in step.fallbacks],
        "copies": [dict(vars(c)) for c in step.copies],
    }
