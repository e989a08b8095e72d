"""The two sides that `graphrt diff` holds against each other, and the low-precision run that its tolerances come from.

A side is written NAME[,KEY=VALUE...]. NAME is a backend as `graphrt test -b` has it (cpu, cpu-fast, triton,
triton-fast, MODULE:CLASS), or a .npz file of values by node name. Keys: fuse=0, every node by itself; ctk=TYPE and
ctv=TYPE, the cache's types; fa=off, attention as three ops; prec=f32 or f8, what it multiplies in; model=FILE, another
file of the same architecture; ranks=N, pp=M and ep=1, all of N ranks in one graph, as --ranks, --pp and --ep elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from graphrt.backend import Backend, Group, get_backend
from graphrt.errors import GraphError, SessionError
from graphrt.execute import plan_groups
from graphrt.graph import Graph
from graphrt.host import read_tensor
from graphrt.models.engine import SessionOptions
from graphrt.models.model import Model
from graphrt.models.ranks.plan import RankPlan
from graphrt.models.ranks.played import PlayedWeights
from graphrt.models.rope_options import RopeOptions
from graphrt.ops.collectives import MAX_PLAYED
from graphrt.tensor import Tensor
from graphrt.testing import AnyArray
from graphrt.tools.common import SWITCH, switch
from graphrt.tools.conformance.cases.sources import FAST, make_backend
from graphrt.tools.conformance.run.low_backend import LowPrecision
from graphrt.tools.conformance.run.lowprec import why_not_rounded
from graphrt.tools.conformance.run.step import rounding_of
from graphrt.tools.diff.file import FileSide, Run, file_side, node_keys
from graphrt.tools.inspect.graph_run import GraphRun, Make, made_from
from graphrt.tools.inspect.played import Played
from graphrt.tools.inspect.subject import load_subject
from graphrt.tools.inspect.traced_step import Step, WatchedSession, steps

KEYS = ("fuse", "ctk", "ctv", "model", "fa", "prec", "ranks", "pp", "ep")


@dataclass(frozen=True)
class SideSpec:
    """A side as the command line has it. text: all of it; name: of a backend, or a .npz file; options: by key."""

    text: str
    name: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def is_file(self) -> bool:
        return self.name.endswith(".npz")

    def session_options(self, options: SessionOptions) -> SessionOptions:
        given = self.options
        fused = switch(given["fa"]) if "fa" in given else options.flash_attn
        type_k, type_v = given.get("ctk", options.type_k), given.get("ctv", options.type_v)
        prec = given.get("prec", options.attn_prec)
        return replace(options, type_k=type_k, type_v=type_v, flash_attn=fused, attn_prec=prec)

    @property
    def played(self) -> Played:
        """The ranks that it is cut over."""
        return Played(int(self.options.get("ranks", 1)), int(self.options.get("pp", 1)), self.options.get("ep") == "1")


def side_spec(text: str) -> SideSpec:
    """Reads `NAME[,KEY=VALUE...]`. Raises SessionError."""
    name, *parts = text.split(",")
    pairs = [part.partition("=") for part in parts]
    wrong = next((p for p, (key, _, value) in zip(parts, pairs) if key not in KEYS or not value), None)
    if not name or wrong is not None or (name.endswith(".npz") and parts):
        got = wrong if wrong is not None else text
        raise SessionError(
            f"a side must be a backend with {', '.join(f'{key}=...' for key in KEYS)} after commas, or a .npz file by "
            f"itself, got {got[:80]!r}; for example -b cpu-fast,fuse=0"
        )
    options = {key: value for key, _, value in pairs}
    if options.get("fuse", "0") not in ("0", "1"):
        raise SessionError(f"fuse must be 0 (every node by itself) or 1, got {options['fuse'][:40]!r}")
    if options.get("fa", "on").lower() not in SWITCH:
        raise SessionError(f"fa must be on, or off for attention as three ops, got {options['fa'][:40]!r}")
    _check_ranks(text, options)
    return SideSpec(text, name, options)


def _check_ranks(text: str, options: Mapping[str, str]) -> None:
    """Raises SessionError for ranks that can't be."""
    for key in ("ranks", "pp"):
        value = options.get(key, "1")
        if not re.fullmatch(r"\d{1,3}", value) or not 1 <= int(value) <= MAX_PLAYED:
            raise SessionError(f"{key} must be a whole number from 1 to {MAX_PLAYED}, got {value[:40]!r}")
    if options.get("ep", "0") not in ("0", "1"):
        raise SessionError(f"ep must be 0 or 1 (some experts whole on each rank), got {options['ep'][:40]!r}")
    if options.get("ranks", "1") == "1" and {"pp", "ep"} & set(options):
        raise SessionError(f"pp= and ep= divide ranks, got {text[:80]!r}; give ranks=N too")


def backends_of(spec: SideSpec) -> list[Backend]:
    """The backend of a side, and the CPU for what it refuses. Raises BackendError."""
    first = get_backend(exact=False) if spec.name == "auto" else make_backend(spec.name)
    found = [first]
    if first.name != "cpu":
        found.append(get_backend("cpu", exact=spec.name not in (*FAST, "auto")))
    if spec.options.get("fuse") == "0":
        for backend in found:
            backend.fuse = partial(Backend.fuse, backend)  # type: ignore[method-assign]
    return found


@dataclass
class RunSide:
    """A side that runs. title: as the command line has it; state: what caches, and inputs that are written into, held
    before the step, as stored, by name."""

    title: str
    run: Run
    state: dict[str, AnyArray] = field(default_factory=dict)

    @property
    def nodes(self) -> dict[str, Tensor]:
        """The nodes of the latest run by key."""
        return node_keys(self.run.exe.graph)

    @cached_property
    def groups(self) -> list[Group]:
        """The steps that the side takes when nothing is watched."""
        return plan_groups(self.run.graph(), self.run.backends)

    def rounds(self, node: Tensor) -> str | None:
        """What the side rounds a node's activations to on purpose."""
        return rounding_of(node, self.run.backends[0])


Side = RunSide | FileSide


# ---- what runs ----


@dataclass(frozen=True)
class Prompt:
    """What a model's sides read. ids: the tokens, or text: to be cut by the first side's tokenizer; phase: "prefill",
    the prompt's last batch, or "decode", the step after it."""

    ids: Callable[[Model], list[int]]
    phase: str


@dataclass
class Pair:
    """reference and other: the two sides; low: the same work as the side that runs first in low precision. tokens: that
    the sides have read, () for a graph. alike: node for node; else only nodes with names of their own are compared,
    where both sides have them; plan: how the other side is cut over ranks, where the reference is not."""

    reference: Side
    other: Side
    low: RunSide
    tokens: Sequence[int] = ()
    alike: bool = True
    plan: RankPlan | None = None

    @property
    def running(self) -> list[RunSide]:
        return [side for side in (self.reference, self.other) if isinstance(side, RunSide)]


def graph_pair(text: str, specs: Sequence[SideSpec], seed: int) -> Pair:
    """The sides of a saved case or a script. Raises SessionError for options that only a model has."""
    for spec in specs:
        others = [key for key in spec.options if key != "fuse"]
        if others:
            raise SessionError(f"{others[0]}= belongs to a model, {text[:200]!r} is a graph; leave it out")
    make = made_from(text, seed)
    sides: list[Side] = [file_side(s.name) if s.is_file else _graph_side(s, make) for s in specs]
    low = RunSide("low precision", GraphRun(make, [_low_backend(sides)]))
    for side in (*sides, low):
        if isinstance(side, RunSide):
            _check_names(side.run.run().graph)
    return Pair(sides[0], sides[1], low)


def _check_names(graph: Graph) -> None:
    """Raises GraphError for names that come twice: nodes are matched by them."""
    again = next((key for key in node_keys(graph) if key not in {t.name for t in graph.nodes}), None)
    if again is not None:
        raise GraphError(
            f"two sides are matched by names, which must be used once, got {again.rpartition('#')[0]!r} twice"
        )


def _graph_side(spec: SideSpec, make: Make) -> RunSide:
    run = GraphRun(make, backends_of(spec))
    return RunSide(spec.text, run, {leaf.name: values for leaf, values in run.inputs().items()})


def model_pair(
    text: str,
    specs: Sequence[SideSpec],
    prompt: Prompt,
    options: SessionOptions,
    advance: Callable[[], None],
    *,
    synthetic: bool = False,
    rope: RopeOptions | None = None,
) -> Pair:
    """The sides of a model's step: all read the same tokens in the same batches. rope: changes to the
    rotations of all; advance: called after each side."""
    batches: list[list[int]] = []
    sides: list[Side] = []

    def read(spec: SideSpec, backends: Sequence[Backend]) -> RunSide:
        other = spec.options.get("model")
        model, _ = load_subject(
            other or text, backends, synthetic=synthetic and other is None, rope=rope, played=spec.played
        )
        session = WatchedSession(model.decoder, model.backends, spec.session_options(options))
        given = list(batches)
        todo = (Step(session, ids) for ids in given) if given else steps(session, prompt.ids(model), prompt.phase)
        step, state = None, {}
        for step in todo:
            state = {} if given else _held_by(session)  # of the side that is read first, the reference if it runs
            step.run()
            if not given:
                batches.append(step.ids)
        assert step is not None  # a prompt has tokens
        advance()
        return RunSide(spec.text, step, state)

    for spec in specs:
        sides.append(file_side(spec.name) if spec.is_file else read(spec, backends_of(spec)))
    first = next(spec for spec in specs if not spec.is_file)
    low = read(replace(first, text="low precision"), [_low_backend(sides)])
    plan = _plan(sides, specs)
    alike = plan is None and len({spec.session_options(options).flash_attn for spec in specs if not spec.is_file}) == 1
    if alike:
        _check_alike(sides)
    return Pair(sides[0], sides[1], low, [token for ids in batches for token in ids], alike, plan)


def _plan(sides: Sequence[Side], specs: Sequence[SideSpec]) -> RankPlan | None:
    """How the other side is cut over ranks, where the reference is not."""
    if specs[0].played == specs[1].played:
        return None
    assert isinstance(sides[1], RunSide) and isinstance(sides[1].run, Step)
    weights = sides[1].run.session.decoder.weights
    assert isinstance(weights, PlayedWeights)
    return weights.plan


def _held_by(session: WatchedSession) -> dict[str, AnyArray]:
    leafs = [leaf for layer in session.cache.layers for leaf in layer.leafs]
    return {leaf.name: read_tensor(leaf, leaf.buffer, leaf.offset) for leaf in leafs if leaf.buffer is not None}


def _low_backend(sides: Sequence[Side]) -> LowPrecision:
    """It rounds activations to 8 bits where the other side does. Nothing tells how a file was made: it may have done so
    wherever that is allowed, as llama.cpp does on a CPU."""
    other = sides[1]
    if isinstance(other, RunSide):
        return LowPrecision(other.rounds)
    return LowPrecision(lambda node: "int8" if why_not_rounded(node, "int8") is None else None)


def _check_alike(sides: Sequence[Side]) -> None:
    """Raises SessionError for models that have different nodes."""
    graphs = [node_keys(side.run.exe.graph) for side in sides if isinstance(side, RunSide)]
    if len(graphs) < 2:
        return
    first, second = graphs
    for key in [*first, *second]:
        if key not in first or key not in second or (first[key].op, first[key].ne) != (second[key].op, second[key].ne):
            here, there = (f"{g[key].op} {g[key].describe()}" if key in g else "absent" for g in graphs)
            if first.get(key) is not None and first[key].op == "SET_ROWS" and key in second:
                continue
            raise SessionError(
                f"two sides must be of one architecture and shape, node {key!r} is {here} and {there}; "
                f"give two files of one model"
            )
