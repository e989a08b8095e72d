"""The Python API's public functions with arguments of wrong types and values.

An input is a seed of calls. Whatever is given, a call must end in a GraphrtError or in the right answer: what an op
computes is held against reference64.py, logits are finite, texts are texts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.reference64 import REFERENCE64
from support.tiny import CHAT, write_model

import graphrt
from fuzz import api_values as values
from graphrt import Graph, ops
from graphrt.backend import get_backend
from graphrt.dtypes import dtype
from graphrt.errors import GraphrtError
from graphrt.host import host_type
from graphrt.models import Model, load
from graphrt.models.engine import SessionOptions
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.paging.check import check
from graphrt.models.session import Session
from graphrt.op import op_spec
from graphrt.tensor import Tensor
from graphrt.testing import nmse

NAME = "api"
#: Calls of an input: so few that a finding says where it comes from.
CALLS = 3
#: Of f16 against float64; what an op gets wrong is far more.
TOLERANCE = 1e-4
#: What may be left, of sources of about 1, where float64 leaves nothing.
CANCELLED = 1e-6
BUILDERS = tuple(name for name in ops.__all__ if name[0].islower())

Call = Callable[[random.Random], Any]


def warm() -> None:
    """Loads the models and compiles what valid calls need."""
    torch.set_num_threads(1)
    for seed in range(300):
        attempt(make(seed))


def make(seed: int) -> bytes:
    return f"{NAME} {seed}".encode()


def attempt(data: bytes) -> str:
    """The calls of a seed. The word: what they came to."""
    rng = random.Random(data)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # any text is a path to write to
        return "+".join(sorted({call(rng) for _ in range(CALLS)}))


def call(rng: random.Random) -> str:
    """One call of any public function: "fine", or the error's class."""
    try:
        rng.choice(_CALLS)(rng)
    except GraphrtError as error:
        assert str(error).strip() and len(str(error)) < 5000
        return type(error).__name__
    return "fine"


@functools.cache
def _models() -> tuple[Model, Model]:
    """A decoder with a tokenizer and a chat template, and an encoder."""
    import support.tiny_archs  # noqa: F401 (the encoder)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        decoder = write_model(folder / "decoder.gguf", "llama", tokenizer="spm", chat=CHAT)
        encoder = write_model(folder / "encoder.gguf", "bert")
        return load(decoder, "cpu"), load(encoder, "cpu")


# ---- arguments ----


def _spoiled(rng: random.Random, *plausible: Any) -> list[Any]:
    """The arguments, or with one or two that nobody wants."""
    given = list(plausible)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        given[rng.randrange(len(given))] = values.junk(rng)
    return given


def _argument(rng: random.Random, name: str, builder: str, annotation: str) -> Any:
    """A plausible one for a parameter of a builder."""
    if annotation.startswith("Tensor"):
        return values.tensor(rng) if annotation == "Tensor" or rng.random() < 0.4 else None
    if annotation.endswith("Params"):
        return values.params(rng, builder)
    makers: dict[str, Call] = {"int": values.whole, "float": values.number, "str": values.text}
    makers |= {"bool": lambda rng: rng.random() < 0.5, "Sequence[int]": values.wholes, "Expr | None": values.score}
    return "" if name == "name" and rng.random() < 0.8 else makers[annotation](rng)


def _built(rng: random.Random) -> None:
    """A node of any op, and what it computes."""
    name = rng.choice(BUILDERS)
    builder = getattr(ops, name)
    args: list[Any] = []
    named: dict[str, Any] = {}
    for p in inspect.signature(builder).parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            args += values.wholes(rng)
        elif p.kind is p.KEYWORD_ONLY:
            named |= (
                {p.name: _argument(rng, p.name, name, p.annotation)}
                if p.default is p.empty or rng.random() < 0.4
                else {}
            )
        else:
            args.append(_argument(rng, p.name, name, p.annotation))
    if rng.random() < 0.5:
        args = _spoiled(rng, *args)
    if rng.random() < 0.5 and len(args) > 1 and isinstance(args[0], Tensor):  # shapes that fit are rare by chance
        args[1] = args[0] if isinstance(args[1], Tensor) and rng.random() < 0.5 else args[1]
    node = builder(*args, **named)
    assert isinstance(node, Tensor)
    _computes(node)


def _computes(node: Tensor) -> None:
    """Runs a node on inputs between 0.5 and 1.5, integers 0, and compares it with the reference."""
    if max(t.nbytes for t in (node, node.root, *node.sources())) > 1 << 20:
        return
    graph = Graph(node)
    exe = graphrt.prepare(graph, _backend())
    given: dict[Tensor, Any] = {}
    for leaf in graph.inputs:
        given[leaf] = _filling(leaf)
        exe.write(leaf, given[leaf])
    exe.run()
    found = exe.read(node)
    sources = [given.get(s) if s is not None else None for s in node.src]
    plain = all(s is None or (v is not None and not s.dtype.is_quantized) for s, v in zip(node.src, sources))
    wide = any(s is not None and s.dtype.name == "bf16" for s in (*node.src, node))
    if not plain or wide or node.op == "SET_ROWS" or op_spec(node.op).is_view or node.dtype.is_quantized:
        return
    if node.op == "TOP_K":  # in any order
        found = np.sort(found)
    with np.errstate(all="ignore"):
        exact = REFERENCE64[node.op](node, *(s if s is None else _wide(s) for s in sources))
    exact = np.asarray(np.sort(exact) if node.op == "TOP_K" else exact).reshape(found.shape)
    assert _agree(found, exact), f"{node!r} {node.params}: {found} {exact}"


def _agree(found: np.ndarray, exact: np.ndarray) -> bool:
    """Whether a result is as exact as its type: also where that type has infinity, or sources of about 1 cancel out."""
    with np.errstate(all="ignore"):
        differ = found != exact.astype(found.dtype)
        left = np.where(differ, np.abs(found - exact), 0.0)
    return bool(left.max() < CANCELLED) or nmse(found[differ], exact[differ]) < TOLERANCE


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def _filling(leaf: Tensor) -> np.ndarray:
    kind = host_type(leaf.dtype)
    if leaf.dtype.is_quantized:
        return np.zeros(leaf.data_nbytes, kind)
    if leaf.dtype.kind == "int" or leaf.dtype.name == "bf16":
        return np.zeros(leaf.shape, kind)
    if leaf.dtype.name == "f64":
        return np.full(leaf.shape, 0.5)
    order = np.arange(leaf.n_elements) * 7919 % 10007  # no two alike, so that sorting has one answer
    return (0.5 + order / 10007).astype(kind).reshape(leaf.shape)


@functools.cache
def _backend() -> Any:
    return get_backend("cpu", exact=False)


# ---- the runtime ----


def _leaf(rng: random.Random) -> None:
    make = rng.choice((graphrt.new_input, graphrt.new_tensor))
    dt, name, *ne = _spoiled(rng, rng.choice(values.TYPES), "a", *values.wholes(rng))
    leaf = make(dt, *ne, name=name)
    assert leaf.n_elements >= 1 and dtype(leaf.dtype) is leaf.dtype


def _backend_named(rng: random.Random) -> None:
    (name,) = _spoiled(rng, rng.choice(("cpu", "auto", "cpu:0", "frob", "triton:x")))
    assert get_backend(name).name


def _type_named(rng: random.Random) -> None:
    (name,) = _spoiled(rng, "q4_K")
    assert dtype(name).name


def _graph(rng: random.Random) -> None:
    tensors = _spoiled(rng, *(values.tensor(rng) for _ in range(rng.choice((1, 2)))))
    graph = Graph(*tensors)
    repr(graph), graph._repr_svg_(), graph.key
    graph.uses(*_spoiled(rng, tensors[0])), graph.tensor(*_spoiled(rng, "a"))
    graph.expand(*_spoiled(rng, values.tensor(rng)))


def _prepared(rng: random.Random) -> None:
    leaf = graphrt.new_input("f32", 4, 3, name="a")
    graph, backends = _spoiled(rng, Graph(ops.sqr(leaf), ops.scale(leaf, 2.0, name="y")), rng.choice(("cpu", ["cpu"])))
    exe = graphrt.prepare(graph, backends)
    repr(exe)
    if graph.inputs != [leaf]:
        return
    target, written = _spoiled(rng, rng.choice(("a", leaf)), np.ones((3, 4), np.float32))
    rng.choice((exe.write, lambda t, v: exe.write_all({t: v}) if isinstance(t, (str, Tensor)) else exe.write(t, v)))(
        target, written
    )
    exe.run()
    values_of = exe.read(*_spoiled(rng, "y"))
    exe.host_array(*_spoiled(rng, "y")), exe.place(*_spoiled(rng, leaf))
    if isinstance(written, np.ndarray) and written.shape == (3, 4) and values_of.shape == (1, 1, 3, 4):
        assert np.isfinite(values_of).all()


# ---- models ----


def _options(rng: random.Random) -> SessionOptions:
    return SessionOptions(*_spoiled(rng, rng.choice((0, 32)), rng.choice((1, 8, 512)), "f32", "f16"))


def _text_of(rng: random.Random) -> None:
    model, _ = _models()
    prompt, n = _spoiled(rng, rng.choice(("hello the sea", [1, 5, 9])), rng.choice((0, 1, 4)))
    if isinstance(n, int) and n < 0 or (isinstance(n, int) and n > 8):
        n = 8 if n > 8 else n
    session = model.session(SessionOptions(n_ctx=24)) if rng.random() < 0.7 else values.junk(rng)
    if session is None:
        session = model.session(SessionOptions(n_ctx=24))
    for piece in model.generate(prompt, n, session=session):
        assert isinstance(piece.text, str) and 0 <= piece.token < 329


def _answer(rng: random.Random) -> None:
    model, _ = _models()
    hello = [{"role": "user", "content": values.junk(rng) if rng.random() < 0.5 else "hello"}]
    messages, session = _spoiled(rng, hello, model.session(SessionOptions(n_ctx=64)))
    answer = model.chat(messages, 3, session=session)
    assert isinstance(answer, str)


def _numbers_of(rng: random.Random) -> None:
    model, encoder = _models()
    tokens, options = _spoiled(rng, [1, 5, 9], SessionOptions(n_ctx=24))
    rows = model.logits(tokens, options)
    assert rows.shape == (len(tokens), 329) and np.isfinite(rows).all()
    texts, pooling, n_batch = _spoiled(rng, [[1, 5], [3]], rng.choice(("", "mean", "cls", "none")), 8)
    for row in encoder.embed(texts, pooling, n_batch=n_batch):
        assert np.isfinite(row).all()


def _tokens_of(rng: random.Random) -> None:
    model, _ = _models()
    prompt, raw, system, n_ctx = _spoiled(rng, "hello", rng.random() < 0.5, None, 24)
    found = model.prompt_tokens(prompt, raw=raw, system=system, n_ctx=n_ctx)
    assert found and all(0 <= token < 329 for token in found)


def _loaded(rng: random.Random) -> None:
    path, backend = _spoiled(rng, "nowhere.gguf", "cpu")
    if path is not None:  # None is the demo model, which may have to be fetched
        graphrt.load(path, backend)
    _models()[0].load_session(*_spoiled(rng, "nowhere.session", None))


def _in_a_session(rng: random.Random) -> None:
    """Some calls on one session, which stays whole whatever is refused."""
    model, _ = _models()
    session = model.session(_options(rng) if rng.random() < 0.3 else SessionOptions(24, 8, "f32", "f32"))
    engine = model.engine(*_spoiled(rng, 2, SessionOptions(n_ctx=24))) if rng.random() < 0.1 else None
    session.eval([1, 5, 9, 7])
    for _ in range(4):
        tokens = session.tokens
        try:
            _step(rng, session)
        except GraphrtError:
            assert session.tokens == tokens, "what is refused changes nothing"
        assert session.n_past == len(session.tokens) <= session.n_ctx
    repr(session), repr(model), repr(engine)


def _step(rng: random.Random, session: Session) -> None:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: _finite(session.eval(*_spoiled(rng, [1, 2]))),
        lambda: _finite(session.eval_rows(*_spoiled(rng, [1, 2], 1))),
        lambda: session.rewind(*_spoiled(rng, 2)),
        lambda: session.shift(*_spoiled(rng, 1, 2)),
        lambda: session.keep_prefix(*_spoiled(rng, [1, 5, 3])),
        lambda: _kept(session, session.copy()),
        lambda: _list(session.likeliest(*_spoiled(rng, 3, 2))),
        lambda: _saved(session, *_spoiled(rng, "/nowhere/at/all")),
    )
    rng.choice(calls)()


def _in_an_engine(rng: random.Random) -> None:
    """Some calls on an engine over pages, whose sequences stay whole whatever is refused."""
    model, _ = _models()
    options = SessionOptions(24, 8, "f32", "f32", page=16, n_pages=rng.choice((0, 2)))
    engine = PagedEngine(model.decoder, model.backends, options, 3)
    engine.read({0: [1, 5, 9, 7]})
    away = engine.swap_out(0)
    engine.swap_in(1, away)
    for _ in range(4):
        held = [engine.tokens(seq) for seq in range(3)]
        calls: tuple[Callable[[], Any], ...] = (
            lambda: _finite(engine.read(*_spoiled(rng, {0: [1, 2], 2: [3]}))),
            lambda: engine.truncate(*_spoiled(rng, 1, 2)),
            lambda: engine.fork(*_spoiled(rng, 1, 2)),
            lambda: engine.free(*_spoiled(rng, 1)),
            lambda: engine.swap_out(*_spoiled(rng, 1)),
            lambda: engine.swap_in(*_spoiled(rng, 2, away)),
            lambda: engine.save(*_spoiled(rng, 1, "/nowhere/at/all")),
            lambda: engine.load(*_spoiled(rng, 0, "nowhere.session")),
        )
        try:
            rng.choice(calls)()
        except GraphrtError:
            assert [engine.tokens(seq) for seq in range(3)] == held, "what is refused changes nothing"
        check(engine.cache.pool)
        assert engine.lengths.tolist() == [len(engine.tokens(seq)) for seq in range(3)]


def _finite(rows: np.ndarray) -> None:
    assert np.isfinite(rows).all()


def _saved(session: Session, path: Any) -> None:
    """In a folder of its own: some of what is given is the name of a file."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        session.save(path)


def _kept(session: Session, other: Session) -> None:
    assert session.tokens == other.tokens


def _list(tokens: Iterator[int]) -> None:
    assert all(0 <= token < 329 for token, _ in zip(tokens, range(4)))


_CALLS: tuple[Call, ...] = (
    *(_built,) * 12, _leaf, _leaf, _backend_named, _type_named, _graph, _graph, *(_prepared,) * 4, _text_of, _answer,
    _numbers_of, _tokens_of, _loaded, _in_a_session, _in_a_session, _in_an_engine,
)  # fmt: skip
