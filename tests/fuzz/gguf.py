"""GGUF files from a stranger: damaged, contradictory and hostile copies of small models of every architecture, from the
file to eight generated tokens, and what `graphrt info` says of them."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuzz.gguf_bases import Spec, of_sizes, specs
from fuzz.gguf_values import hostile_array, hostile_key, hostile_number, hostile_text, of_kind
from fuzz.gguf_vocab import VOCABULARY
from graphrt.backend import get_backend
from graphrt.dtypes import TYPES, dtype
from graphrt.errors import GraphrtError, TokenizerError
from graphrt.models.arch.encoder import Encoder
from graphrt.models.gguf import GGUFFile
from graphrt.models.model import Model
from graphrt.tools import cli

NAME = "gguf"
MOST = 2 << 20  # bytes of a file
TEXTS = ("Hello world", "<|im_start|> 12345 \u65e5\u672c\n\n", "\u00e9 'll \x00\ud800 \U0001f600")
NEW_TOKENS = 8
LONGEST = 8000  # characters that any error may print, its lines together

Rng = random.Random


def warm() -> None:
    """Makes what all inputs share: the undamaged files, and the kernels that they need."""
    torch.set_num_threads(1)  # threads don't outlive a fork
    logging.getLogger("graphrt").propagate = False
    logging.getLogger("graphrt").addHandler(_Checked())
    for i, spec in enumerate(specs()):
        word = _used(spec.bytes(), exact=i % 3 == 0)
        assert word.startswith(("generated", "embedded")), (spec.name, word)


# -- the input


def make(seed: int) -> bytes:
    """A file of under 2 MB."""
    rng = Rng(f"gguf {seed}")
    sizes = of_sizes(rng) if rng.random() < 0.1 else None
    spec = sizes or rng.choice(specs()).copy()
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5)) - (sizes is not None)):
        rng.choice(STRUCTURAL)(rng, spec)
    data = bytearray(spec.bytes())
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        rng.choice(BYTES)(rng, data)
    return bytes(data[: MOST - 1])


def change_number(rng: Rng, spec: Spec) -> None:
    """A scalar key becomes a number that breaks sums, products or comparisons."""
    scalars = [i for i, (_, kind, _) in enumerate(spec.kv) if not kind.startswith(("array", "string"))]
    if scalars:
        i = rng.choice(scalars)
        key, kind, value = spec.kv[i]
        spec.kv[i] = (key, kind, of_kind(kind, hostile_number(rng, value)))


def change_kind(rng: Rng, spec: Spec) -> None:
    """A key of another type than it should have."""
    i = rng.randrange(len(spec.kv))
    spec.kv[i] = (spec.kv[i][0], *hostile_array(rng, spec.kv[i][2]))


def change_text(rng: Rng, spec: Spec) -> None:
    texts = [i for i, (_, kind, _) in enumerate(spec.kv) if kind == "string"]
    i = rng.choice(texts)
    spec.kv[i] = (spec.kv[i][0], "string", hostile_text(rng))


def drop_key(rng: Rng, spec: Spec) -> None:
    if spec.kv:
        del spec.kv[rng.randrange(len(spec.kv))]


def add_key(rng: Rng, spec: Spec) -> None:
    """A key that is read, or that none reads, with a likely or an unlikely value."""
    key, kind, value = hostile_key(rng, spec.arch)
    spec.kv = [row for row in spec.kv if row[0] != key or rng.random() < 0.05]
    spec.kv.insert(rng.randint(0, len(spec.kv)), (key, kind, value))


def change_shape(rng: Rng, spec: Spec) -> None:
    """One dimension, and the data with it where that is small."""
    i = rng.randrange(len(spec.tensors))
    name, kind, ne, data = spec.tensors[i]
    dims = list(ne)
    j = rng.randrange(len(dims))
    dims[j] = rng.choice((0, 1, 2, dims[j] + 1, dims[j] * 2, dims[j] // 2, 1 << 31, 1 << 40, -1, 32, 256))
    if rng.random() < 0.2:
        dims = rng.choice(([*dims, 1], dims[::-1], dims[:1], [*dims, 2], [0, *dims]))[:4]
    spec.tensors[i] = (name, kind, tuple(dims), data if rng.random() < 0.3 else _sized(kind, dims, data))


def change_type(rng: Rng, spec: Spec) -> None:
    """The data of another type, as much as that type needs or as it was."""
    i = rng.randrange(len(spec.tensors))
    name, _, ne, data = spec.tensors[i]
    kind = rng.choice([name for name, t in TYPES.items() if t.id is not None])
    spec.tensors[i] = (name, kind, ne, data if rng.random() < 0.2 else _sized(kind, list(ne), data))


def _sized(kind: str, ne: list[int], data: bytes) -> bytes:
    """The data repeated or cut to what the shape needs, where that is small."""
    elements = int(np.prod(np.array(ne, object)))
    t = dtype(kind)
    if elements < 0 or elements > MOST or (ne and ne[0] % t.block_size):
        return data
    need = elements // t.block_size * t.type_size
    return (data * (need // max(len(data), 1) + 1))[:need] if need < MOST and data else data[:need]


def change_names(rng: Rng, spec: Spec) -> None:
    i = rng.randrange(len(spec.tensors))
    name, kind, ne, data = spec.tensors[i]
    number = rng.choice(("0", "99", "-1", "4294967296", "9" * 40, "\u0663", "01"))
    made = rng.choice((hostile_text(rng), name.replace("0", number), name + "x", name.upper(), "blk.0.x.weight"))
    spec.tensors[i] = ((made if isinstance(made, str) else made.decode("latin-1"))[:15], kind, ne, data)


def drop_tensor(rng: Rng, spec: Spec) -> None:
    if len(spec.tensors) > 1:
        del spec.tensors[rng.randrange(len(spec.tensors))]


def repeat_tensor(rng: Rng, spec: Spec) -> None:
    name, kind, ne, data = rng.choice(spec.tensors)
    for i in range(rng.choice((1, 1, 3, 200, 3000))):
        spec.tensors.append((rng.choice((f"x{i}", f"blk.{i}.x.weight", name)), "f32", (0,), b""))
    if rng.random() < 0.5:
        spec.tensors.append((name, kind, ne, data))


def spoil_data(rng: Rng, spec: Spec) -> None:
    """NaN, infinities, huge and tiny numbers in weights."""
    i = rng.randrange(len(spec.tensors))
    name, kind, ne, data = spec.tensors[i]
    junk = rng.choice((b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f", b"\x00\x7c\x00\x7c", bytes(4)))
    at = rng.randrange(max(1, len(data) - 4)) & ~3
    many = rng.choice((1, 8, len(data) // 4))
    spec.tensors[i] = (name, kind, ne, (data[:at] + junk * many + data[at + 4 * many :])[: len(data)])


def reorder(rng: Rng, spec: Spec) -> None:
    rng.shuffle(spec.kv)
    rng.shuffle(spec.tensors)


def align(rng: Rng, spec: Spec) -> None:
    spec.alignment = rng.choice((1, 2, 8, 16, 64, 4096))
    said = rng.choice((spec.alignment, spec.alignment, 0, 3, 1 << 31, 31))
    spec.kv.append(("general.alignment", "u32", said))


def other_order(rng: Rng, spec: Spec) -> None:
    spec.order = ">"


def other_arch(rng: Rng, spec: Spec) -> None:
    """The same keys under another family's name."""
    name = rng.choice([s.arch for s in specs()])
    spec.kv = [(key.replace(f"{spec.arch}.", f"{name}.", 1), kind, value) for key, kind, value in spec.kv]
    spec.kv = [(k, t, name if k == "general.architecture" and t == "string" else value) for k, t, value in spec.kv]
    spec.arch = name


STRUCTURAL: tuple[Callable[[Rng, Spec], None], ...] = (
    *(change_number,) * 6, *(change_kind,) * 3, *(add_key,) * 6, *(change_text,) * 2, *(drop_key,) * 2, change_shape,
    change_shape, change_type, change_type, change_names, drop_tensor, repeat_tensor, spoil_data, spoil_data, reorder,
    align, other_order, other_arch, *VOCABULARY, *VOCABULARY,
)  # fmt: skip


def flip(rng: Rng, data: bytearray) -> None:
    """Bytes of the first part, where numbers are, or anywhere."""
    end = len(data) if rng.random() < 0.3 else min(len(data), 4000)
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[rng.randrange(end)] = rng.randrange(256)


def cut(rng: Rng, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]
    data += b"GGUF" if not data else b""


def put_in(rng: Rng, data: bytearray) -> None:
    at = rng.randrange(min(len(data), 4000))
    data[at:at] = rng.choice((b"\xff" * 8, bytes(8), rng.randbytes(rng.randint(1, 40)), struct.pack("<Q", 1 << 62)))


def take_out(rng: Rng, data: bytearray) -> None:
    at = rng.randrange(min(len(data), 4000))
    if len(data) > 100:
        del data[at : at + rng.randint(1, 40)]


BYTES: tuple[Callable[[Rng, bytearray], None], ...] = (flip, flip, flip, cut, put_in, take_out)


# -- what is tried


def attempt(data: bytes) -> str:
    """How far it came: a class of error, "generated" or "embedded". Raises what no file may cause."""
    choice = zlib.crc32(data)
    try:
        return _informed(data) if choice % 8 == 0 else _used(data, exact=choice % 3 == 0)
    except GraphrtError as error:
        check_said(str(error))
        return type(error).__name__


def _used(data: bytes, exact: bool) -> str:
    with GGUFFile.from_bytes(data) as file:
        model = Model(file, [get_backend("cpu", exact=exact)])
        return _embedded(model) if isinstance(model.network, Encoder) else _generated(model)


def _generated(model: Model) -> str:
    word = "generated"
    try:
        tokens = [model.prompt_tokens(text) for text in TEXTS]
        prompt, stream = tokens[0], model.tokenizer.stream(special=True)
    except TokenizerError as error:
        check_said(str(error))
        word, prompt, stream = "generated from ids", [1, 2, 3], None
    session = model.session()
    if stream is None:
        logits = session.eval(prompt)
        for _ in range(1, NEW_TOKENS):
            logits = session.eval([int(np.nan_to_num(logits).argmax())])
        return word
    for piece in model.generate(prompt[:16], NEW_TOKENS, session=session, ignore_eos=True):
        stream.push(piece.token)
    return word


def _embedded(model: Model) -> str:
    try:
        model.embed(TEXTS[:2], "mean")
    except TokenizerError as error:
        check_said(str(error))
        model.embed([[1, 2, 3], [4]], "cls")
        return "embedded from ids"
    return "embedded"


def _informed(data: bytes) -> str:
    """What the command line prints of it, on both streams."""
    verb = ("info", "info --json", "info --tensors", "tokenize", "dump", "memory")[zlib.crc32(data) // 8 % 6].split()
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file, contextlib.ExitStack() as stack:
        file.write(data)
        file.flush()
        out = stack.enter_context(contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")))
        err = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(contextlib.suppress(SystemExit))
        more = ["-p", "Hello world"] if verb == ["tokenize"] else []
        code = cli.main([verb[0], file.name, *verb[1:], *more])
        out.flush()
        check_printable(out.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]
        check_said(err.getvalue())
        return f"{verb[0]}: {code}"
    return f"{verb[0]}: exit"


def check_said(text: str) -> None:
    """An error may not be raw or long, whatever the file says."""
    check_printable(text)
    if len(text) > LONGEST:
        raise AssertionError(f"an error of {len(text)} characters: {text[:300]!r} ... {text[-300:]!r}")


def check_printable(text: str) -> None:
    raw = next((c for c in text if not c.isprintable() and c not in "\n"), None)
    if raw is not None:
        at = text.index(raw)
        raise AssertionError(f"{raw!r} is printed raw: {text[max(0, at - 200) : at + 100]!r}")


class _Checked(logging.Handler):
    """A handler that holds what is logged to the same rule."""

    def emit(self, record: logging.LogRecord) -> None:
        check_said(record.getMessage())


def replay_as_file(path: Path) -> Any:
    """For a debugger: the model of a saved input."""
    return Model(GGUFFile.open(path), [get_backend("cpu")])
