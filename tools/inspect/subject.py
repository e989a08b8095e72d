"""What a debug tool looks at: a model's step, a saved case or the graph of a script, prepared as it would run.

subject("model.gguf", backends, phase="prefill", n_tokens=64)
subject("failed.npz", backends)              # what `graphrt test --save` wrote
subject("script.py:build", backends)         # build() returns a graphrt.Graph
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrt.errors import GraphError, GraphrtError, SessionError
from graphrt.tools.common import add_page_arguments, add_session_arguments, session_options, use_threads, whole
from graphrt.tools.inspect.played import Played
from graphrt.tools.rope_flags import rope_options

if TYPE_CHECKING:
    from graphrt.backend import Backend
    from graphrt.execute import Executable
    from graphrt.graph import Graph
    from graphrt.models.arch.encoder import Encoder
    from graphrt.models.engine import SessionOptions
    from graphrt.models.engine_paged import PagedEngine
    from graphrt.models.model import Model
    from graphrt.models.paging.prefixes import Prefixes
    from graphrt.models.rope_options import RopeOptions
    from graphrt.models.session import Session
    from graphrt.testing import Inputs

PHASES = ("prefill", "decode")
SUBJECT_HELP = (
    "a .gguf file, a known name or hf:OWNER/REPO[:QUANT]; a case that `graphrt test --save` wrote (.npz); or "
    "script.py:build, a function that returns a graphrt Graph"
)


@dataclass(frozen=True)
class Sequences:
    """Those of an engine. n: how many; shared: tokens that all begin with."""

    n: int = 1
    shared: int = 0


@dataclass(frozen=True, eq=False)
class Subject:
    """title: what it is called; phase: a model's "prefill", "decode" or "train", else "graph"; n_tokens: that a model's
    step reads, else 0. session: a model's, its sequence still empty, or engine: one over pages; inputs: a saved case's,
    with their values; prefixes: what the engine's step reads once of what its sequences share, and why."""

    title: str
    phase: str
    n_tokens: int
    executable: Executable
    session: Session | None = None
    inputs: Inputs | None = None
    engine: PagedEngine | None = None
    prefixes: Prefixes | None = None

    @property
    def pages(self) -> list[str]:
        """What an engine's cache is cut into: how many pages of each kind of cells, the tables of a step, and what
        sequences share."""
        if self.engine is None:
            return []
        sizes = self.engine.cache.sizes
        cut = ", ".join(
            f"{n} {kind}" + (f" (a window of {sizes.windows[kind]})" if sizes.windows[kind] else "")
            for kind, n in sizes.n_pages.items()
        )
        table = f"each sequence's table has {sizes.max_blocks} entries"
        first = f"pages of {sizes.page} tokens: {cut}; {table}" + (" a kind" if len(sizes.n_pages) > 1 else "")
        return [first, *([f"prefixes: {self.prefixes.reason}"] if self.prefixes is not None else [])]

    @property
    def pages_data(self) -> dict[str, Any]:
        """The same for machines; {} without pages."""
        if self.engine is None:
            return {}
        told: dict[str, Any] = {"n_seq": self.engine.n_seq, **asdict(self.engine.cache.sizes)}
        if self.prefixes is not None:
            told["prefixes"] = {
                "groups": [group._asdict() for group in self.prefixes.groups], "reason": self.prefixes.reason,
            }  # fmt: skip
        return told


def add_subject_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, --synthetic, --phase, --tokens, --page, --sequences, --ranks, --exact and the options of a session."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=SUBJECT_HELP)
    parser.add_argument(
        "--synthetic", metavar="NAME", help="random weights in a known shape instead, as `graphrt bench` takes it"
    )
    parser.add_argument("--phase", choices=PHASES, help="the step of a model to look at (default: decode)")
    parser.add_argument(
        "--tokens",
        type=whole(1),
        default=0,
        metavar="N",
        help="tokens of a prompt that prefill reads at once (default: the batch, -b, or the context if that is less)",
    )
    add_page_arguments(parser, "a step of several sequences over a cache in pages of N tokens")
    parser.add_argument(
        "--sequences", type=whole(1), default=1, metavar="N", help="with --page: sequences of a step (default: 1)"
    )
    parser.add_argument(
        "--shared", type=whole(0), default=0, metavar="N",
        help="with --page: tokens that all sequences begin with, as far as they fill pages (default: 0)",
    )  # fmt: skip
    add_ranks_arguments(parser)
    parser.add_argument("--exact", action="store_true", help="prepare the reference forms")
    add_session_arguments(parser)


def add_ranks_arguments(parser: argparse.ArgumentParser) -> None:
    """--ranks, --pp and --ep: ranks that are not there."""
    ranks = "all of N ranks (2 to 8) that the model is cut over, in one graph, as they would be linked"
    parser.add_argument("--ranks", type=whole(1, 8), default=1, metavar="N", help=ranks)
    stages = "with --ranks: in so many stages of a pipeline, of as many ranks each (default: 1)"
    parser.add_argument("--pp", type=whole(1, 8), default=1, metavar="M", help=stages)
    experts = "with --ranks: of a mixture of experts, each rank has some experts whole, not a part of every one"
    parser.add_argument("--ep", action="store_true", help=experts)


def played_of(args: argparse.Namespace) -> Played:
    """The ranks that a command line names. Raises SessionError where others of these options need --ranks."""
    if args.ranks == 1 and (args.pp > 1 or args.ep):
        raise SessionError("--pp and --ep divide ranks that are not there, got no --ranks; give their number")
    return Played(args.ranks, args.pp, args.ep)


def subject_of(args: argparse.Namespace, backends: Sequence[Backend] | None = None) -> Subject:
    """What a command line names, on these backends or those that it names. Raises what subject() raises."""
    from graphrt.tools.bench.model import backends_for

    if (args.model is None) == (args.synthetic is None):
        raise SessionError(
            "there must be one thing to look at, got "
            + ("none" if args.model is None else "two")
            + "; give MODEL, a saved case, script.py:build or --synthetic NAME"
        )
    use_threads(args)
    backends = backends_for(args.backend, args.exact) if backends is None else backends
    if not args.page and (args.pages or args.sequences > 1 or args.shared):
        raise SessionError(
            "--pages, --sequences and --shared belong to pages, got no --page; give one, such as --page 64"
        )
    options, text = session_options(args), args.synthetic or args.model
    synthetic, rope, many = bool(args.synthetic), rope_options(args), Sequences(args.sequences, args.shared)
    return subject(
        text, backends, args.phase, args.tokens, options, many=many, synthetic=synthetic, rope=rope,
        played=played_of(args),
    )  # fmt: skip


def training_subject_of(args: argparse.Namespace) -> Subject:
    """A model's step of training on --tokens tokens, as --train and --recompute say. Raises SessionError for what is no
    model, and what Trainer does."""
    from graphrt.models.training.lora import lora_of
    from graphrt.models.training.trainer import Trainer
    from graphrt.tools.bench.model import backends_for

    text, lora = args.synthetic or args.model or "", lora_of(args.train)
    if (args.model is None) == (args.synthetic is None) or is_graph(text) or args.page or args.phase or args.limit:
        raise SessionError("--train is of one model, without pages, phases and limits; give MODEL and --tokens alone")
    use_threads(args)
    model, title = load_subject(
        text, backends_for(args.backend, args.exact), synthetic=bool(args.synthetic), rope=rope_options(args)
    )
    n = args.tokens or min(session_options(args).n_batch, model.decoder.hp.n_ctx_train)
    trainer = Trainer(model, n, lora=lora, recompute=args.recompute)
    return Subject(f"{title}, {args.train}", "train", n, trainer.exe)


def subject(
    text: str,
    backends: Sequence[Backend],
    phase: str | None = None,
    n_tokens: int = 0,
    options: SessionOptions | None = None,
    *,
    many: Sequences = Sequences(),
    synthetic: bool = False,
    rope: RopeOptions | None = None,
    played: Played = Played(),
) -> Subject:
    """What `text` names, prepared on backends, the preferred first.

    phase: of a model, None for decode, which reads one token; n_tokens: that prefill reads, 0 for a whole batch or
    context; options: of the model's session or, with pages, of an engine; many: its sequences; synthetic: `text` is a
    made-up model's name; rope: changes to a model's rotation of positions; played: ranks of a model. Raises
    GraphError for a script or case that gives no graph, SessionError for a phase that can't be, and what loading and
    preparing raise.
    """
    if phase not in (None, *PHASES):
        raise SessionError(f"a phase must be one of {', '.join(PHASES)}, got {phase!r}")
    if synthetic or not is_graph(text):
        model, title = load_subject(text, backends, synthetic=synthetic, rope=rope, played=played)
        return _of_model(model, f"{title}{played}", backends, phase, n_tokens, options, many)
    check_no_rope(text, rope)
    if phase is not None or n_tokens or played != Played():
        raise SessionError(
            f"a phase, its tokens and ranks belong to a model, {text[:200]!r} is a graph; leave --phase, --tokens and "
            f"--ranks out"
        )
    if text.endswith(".npz"):
        return _of_case(Path(text), backends)
    path, function = script_of(text)
    return _of_script(path, function, backends)


def is_graph(text: str) -> bool:
    """A saved case or a script, and no model."""
    return text.endswith((".npz", ".py")) or text.rpartition(":")[0].endswith(".py")


def script_of(text: str) -> tuple[Path, str]:
    """The file and the function of `script.py:build`. Raises GraphError."""
    script, _, function = text.rpartition(":")
    if not function.isidentifier() or not script:
        raise GraphError(f"a script is given with its function, script.py:build, got {text[:200]!r}; name the function")
    return Path(script), function


def _of_model(
    model: Model,
    title: str,
    backends: Sequence[Backend],
    phase: str | None,
    n_tokens: int,
    options: SessionOptions | None,
    many: Sequences,
) -> Subject:
    from graphrt.models.arch.encoder import Encoder
    from graphrt.models.engine import SessionOptions

    options = options or SessionOptions()
    if isinstance(model.network, Encoder):
        return _of_encoder(model.network, title, backends, phase, n_tokens or options.n_batch)
    phase = phase or "decode"
    if phase == "decode" and n_tokens > 1:
        raise SessionError(f"decode reads one token, got --tokens {n_tokens}; give --phase prefill with it")
    if options.page:
        return _of_engine(model, title, phase, n_tokens, options, many)
    session = model.session(options)
    n = 1 if phase == "decode" else n_tokens or session.n_batch
    if n > session.n_batch:
        raise SessionError(
            f"a prefill reads at most a batch of {session.n_batch} tokens at once, got --tokens {n}; "
            f"raise -b, and -c if the context is shorter than that"
        )
    return Subject(title, phase, n, session.executable(n, 1), session=session)


def _of_engine(
    model: Model, title: str, phase: str, n_tokens: int, options: SessionOptions, many: Sequences
) -> Subject:
    """A step over pages: a token of each sequence, or a prompt's beside them."""
    from graphrt.models.engine_paged import PagedEngine

    engine = PagedEngine(model.decoder, model.backends, options, many.n)
    n = many.n if phase == "decode" else n_tokens or engine.most_tokens
    if n > engine.most_tokens:
        raise SessionError(
            f"a step reads at most {engine.most_tokens} tokens, a batch and one of each sequence, got --tokens {n}; "
            f"raise -b"
        )
    n_seq = min(n, many.n)
    size, prefixes = engine.largest_size(n, n_seq), None
    if many.shared:
        plan = engine.plan(_sharing(engine, n, n_seq, many.shared))
        size, prefixes = size._replace(n_groups=plan.size.n_groups), plan.prefixes
    return Subject(title, phase, n, engine.prepared(size).exe, engine=engine, prefixes=prefixes)


def _sharing(engine: PagedEngine, n: int, n_seq: int, shared: int) -> dict[int, int]:
    """Gives sequences pages: those of `shared` tokens together, as far as they are full, and of the step's n tokens,
    all but one of each other sequence the first one's. How many each has of those. Raises SessionError for more than
    the context holds."""
    pool, page = engine.cache.pool, engine.cache.sizes.page
    whole = shared // page * page
    new = {seq: 1 if seq else n - n_seq + 1 for seq in range(n_seq)}
    if whole + new[0] > engine.n_ctx:
        raise SessionError(
            f"the context holds {engine.n_ctx} tokens, got --shared {shared} and {new[0]} more; raise -c or lower it"
        )
    engine.cache.append({0: whole})
    pool.commit(0, [0] * whole)
    for seq in range(1, n_seq):
        pool.fork(0, seq)
    engine.cache.append(new)
    return new


def _of_encoder(encoder: Encoder, title: str, backends: Sequence[Backend], phase: str | None, n: int) -> Subject:
    """A text of n tokens, or as many as a text may have."""
    from graphrt.models.embed import Embedder

    if phase == "decode":
        raise SessionError(f"{encoder.hp.arch} models read texts at once and have no decode; leave --phase out")
    n = min(n, encoder.hp.n_ctx_train)
    return Subject(title, "prefill", n, Embedder(encoder, backends).executable(n, 1, encoder.hp.pooling or "none"))


def check_no_rope(text: str, rope: RopeOptions | None) -> None:
    """Raises SessionError where changes to a rotation are asked for of a graph."""
    if rope is not None:
        raise SessionError(f"a rotation of positions is of a model, {text[:200]!r} is a graph; leave its flags out")


def check_no_ranks(text: str, played: Played) -> None:
    """Raises SessionError where ranks are asked for of a graph."""
    if played != Played():
        raise SessionError(f"ranks are of a model, {text[:200]!r} is a graph; leave --ranks out")


def load_subject(
    text: str, backends: Sequence[Backend], *, synthetic: bool = False, rope: RopeOptions | None = None,
    played: Played = Played(),
) -> tuple[Model, str]:  # fmt: skip
    """A model by its file, name or, made up, shape, and what it is called. rope: changes to its rotation; played: ranks
    that it is cut over."""
    from graphrt.models import hub
    from graphrt.models.model import Model, load
    from graphrt.models.synthetic import synthetic as made_up

    if synthetic:
        file = made_up(text)
        if rope is not None:
            rope.apply(file)
        return Model(file, backends, played.ranks, played.stages, played.ep), file.name
    path, (n, stages, ep) = hub.resolve(text), (played.ranks, played.stages, played.ep)
    return load(path, backends, rope=rope, ranks=n, stages=stages, ep=ep), text.rpartition("/")[2]


def _of_case(path: Path, backends: Sequence[Backend]) -> Subject:
    from graphrt.execute import prepare
    from graphrt.tools.conformance.run.saved import load_failure

    inputs = load_failure(path)
    return Subject(inputs.case, "graph", 0, prepare(inputs.graph(), backends), inputs=inputs)


def _of_script(path: Path, function: str, backends: Sequence[Backend]) -> Subject:
    from graphrt.execute import prepare

    return Subject(f"{path.name}:{function}", "graph", 0, prepare(script_graph(path, function), backends))


def script_graph(path: Path, function: str) -> Graph:
    """The graph that a function of a script returns. Raises GraphError where there is none, and for what the script
    raises itself; errors of graphrt pass as they are."""
    from graphrt.graph import Graph

    with _importing_beside(path):
        module = _executed(path)
        build = getattr(module, function, None)
        if not callable(build):
            names = (
                ", ".join(n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__)
                or "none"
            )
            raise GraphError(
                f"a script must have the function {function!r}, {str(path)!r} has: {names}; name one of them"
            )
        _check_takes_nothing(build, function)
        made = _called(build, path)
    if not isinstance(made, Graph):
        raise GraphError(
            f"{function}() must return a graphrt.Graph, got {type(made).__name__}; return graphrt.Graph(*outputs)"
        )
    return made


def _executed(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"graphrt_script_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise GraphError(f"a script must be a Python file, {str(path)!r} is none; check the path")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does: dataclasses look their module up
    loader = spec.loader
    _called(lambda: loader.exec_module(module), path)
    return module


def _called(work: Callable[[], object], path: Path) -> object:
    """What the script's code returns; what it raises as one GraphError with the script's line."""
    try:
        return work()
    except GraphrtError:
        raise
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f"{str(path)!r}" + (f", line {line}," if line else "")
        raise GraphError(
            f"a script must run to its end, {where} raised {type(error).__name__}: {error}; mend it and try again"
        ) from error


def _check_takes_nothing(build: Callable[..., object], function: str) -> None:
    try:
        inspect.signature(build).bind()
    except (TypeError, ValueError) as error:
        raise GraphError(f"{function}() must take no arguments, and: {error}; give them defaults") from error


@contextmanager
def _importing_beside(path: Path) -> Iterator[None]:
    """A script may import its neighbours, as when Python runs it."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
