"""`graphrt check --order`: steps prepared for a GPU that need not be here, and whether launches come in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphrt.backend import Backend, backend_elsewhere, get_backend
from graphrt.execute import Executable, prepare
from graphrt.models.arch.encoder import Encoder
from graphrt.models.embed import Embedder
from graphrt.models.engine import Engine, SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.model import Model
from graphrt.models.rope_options import RopeOptions
from graphrt.models.session import Session
from graphrt.ops.sample import SampleParams
from graphrt.tools.check.launch_order import Event, Violation, violations
from graphrt.tools.explain.devices import known_device
from graphrt.tools.inspect.graph_run import made_from
from graphrt.tools.inspect.subject import check_no_rope, is_graph, load_subject

#: Sequences of the decode steps that are checked beside those of one.
SEQUENCES = (2, 16)
#: Tokens of a page of the steps over pages.
PAGE = 64


@dataclass(frozen=True)
class Ordered:
    """What was found of a model's step. title: such as "decode of 1 token"; launches: steps that touch memory.

    starts_early: how many of them may begin before the one before has ended; early: by kernel, the parameters that such
    launches read before they wait for it.
    """

    title: str
    launches: int
    starts_early: int
    early: Mapping[str, set[str]]
    violations: tuple[Violation, ...]


def check_order(
    text: str, options: SessionOptions, *, device_name: str = "h100", exact: bool = False, synthetic: bool = False,
    rope: RopeOptions | None = None,
) -> list[Ordered]:  # fmt: skip
    """The steps of what `text` names on the triton backend, planned for that device: of a model prefill, decode of one
    and of several sequences, and decode with the next token's choice. Raises BackendError without Triton."""
    planned = backend_elsewhere("triton", known_device(device_name).elsewhere, exact=exact)
    backends = [planned, get_backend("cpu", exact=exact)]
    if not synthetic and is_graph(text):
        check_no_rope(text, rope)
        return [ordered("graph", prepare(made_from(text, 0)()[0], backends))]
    model, _ = load_subject(text, backends, synthetic=synthetic, rope=rope)
    return [ordered(title, exe) for title, exe in steps_of(model, backends, options)]


def steps_of(model: Model, backends: Sequence[Backend], options: SessionOptions) -> Iterator[tuple[str, Executable]]:
    """The steps of a model: what they are called, and prepared."""
    if isinstance(model.network, Encoder):
        n = min(options.n_batch, model.network.hp.n_ctx_train)
        for pooling in ("none", "mean", "cls"):
            exe = Embedder(model.network, backends).executable(n, 2, pooling)
            yield f"texts of {n} tokens, pooling {pooling}", exe
        return
    session = Session(model.decoder, backends, options)
    if session.n_batch > 1:
        yield f"prefill of {session.n_batch} tokens", session.executable(session.n_batch, 1)
    yield "decode of 1 token", session.executable(1, 1)
    yield "decode of 1 token and the next one's choice", session.chained().exe
    yield "decode of 1 token and the next one's draw", session.chained(SampleParams()).exe
    for n in SEQUENCES:
        engine = Engine(model.decoder, backends, options, n)
        yield f"decode of {n} sequences", engine.executable(1, n)
        yield f"decode of {n} sequences and the next tokens' choice", engine.chained().exe
        paged = PagedEngine(model.decoder, backends, replace(options, page=PAGE), n)
        step = paged.choosing(paged.largest_size(n, n))
        yield f"decode of {n} sequences over pages", step.reads.exe
    yield f"a prompt and {n - 1} tokens over pages", paged.prepared(paged.largest_size(paged.n_batch + n - 1, n)).exe
    if step.chooser is not None:
        yield f"the choice of {n} sequences' next tokens", step.chooser.exe


def ordered(title: str, exe: Executable) -> Ordered:
    """Whether a prepared graph's launches are in order, in one run and the next."""
    events = events_of(exe)
    early: dict[str, set[str]] = {}
    for event in events:
        for name in (use.name for use in event.uses if use.early):
            early.setdefault(event.kernel, set()).add(name)
    launches = [event for event in events if event.uses]
    starting = sum(event.starts_early for event in launches)
    return Ordered(title, len(launches), starting, early, tuple(violations(events)))


def events_of(exe: Executable) -> list[Event]:
    """What one run does on the GPU, in order. What another backend does, and a copy to or from it, waits for all."""
    events: list[Event] = []
    for split in exe.splits:
        told = [Event.of(launch, step.group.nodes[-1].name) for step in split.run.steps for launch in step.launches]
        if split.copies or not told:
            events.append(Event("another backend"))
        events += told
    return events


def lines(title: str, device_name: str, steps: Sequence[Ordered]) -> Iterator[str]:
    """What a person reads."""
    for step in steps:
        found = f"{len(step.violations)} violations" if step.violations else "all in order"
        counts = f"{step.launches} launches, {step.starts_early} may start before the one before has ended"
        yield f"{title.rpartition('/')[2]}, {step.title} on {device_name}: {counts}, {found}"
        yield from (f"  {violation}" for violation in step.violations)
    if any(step.early for step in steps):
        yield "read before waiting:"
    for kernel in dict.fromkeys(name for step in steps for name in step.early):
        yield f"  {kernel}: {', '.join(sorted(set().union(*(step.early.get(kernel, ()) for step in steps))))}"


def as_json(step: Ordered) -> dict[str, Any]:
    """A step as plain data."""
    return {
        "step": step.title,
        "launches": step.launches,
        "start_early": step.starts_early,
        "read_early": {kernel: sorted(names) for kernel, names in step.early.items()},
        "violations": [{**vars(v), "rule": v.rule.name.lower(), "text": str(v)} for v in step.violations],
    }
