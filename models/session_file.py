"""A session as a file: its tokens and the rows of its cache, as they lie there, of any cache type.

    16 bytes    "graphrt session" and the format's version
    48 bytes    the model's fingerprint (32), the cache's types of k and v (8 each)
    16 bytes    u32: the context, tokens in all, tokens that are in the cache, kinds of cells
    for each kind of cells: u32, how many of the last tokens its layers hold
    i32 [tokens]: the tokens' ids
    for each layer, k and then v where it has memory of its own: rows of the tokens that its kind of cells holds
    4 bytes     the CRC-32 of all that

Numbers are little-endian. The file may come from a stranger: its size follows from its counts and from the model, and
must be that before anything of the cache is read; the context that it may ask for is bounded by hparam_limits.py.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from graphrt import private_files
from graphrt.dtypes import CACHE_TYPES
from graphrt.errors import SessionError
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.cache import Cache
from graphrt.models.engine import AnyEngine, SessionOptions, check_options
from graphrt.models.hparam_sizes import longest_unasked

MAGIC = b"graphrt session\1"
_HEADER = struct.Struct("<16s32s8s8s4I")
#: Kinds of cells that a model may have.
_MAX_KINDS = 8


@dataclass(frozen=True)
class Header:
    """model: its fingerprint; n_ctx: the context; types: the cache's, of k and v; n_tokens: all tokens; n_read: those
    that the cache holds; held: how many of the last of them each kind of cells does."""

    model: bytes
    types: tuple[str, str]
    n_ctx: int
    n_tokens: int
    n_read: int
    held: tuple[int, ...]

    def packed(self) -> bytes:
        types = (name.encode() for name in self.types)
        counts = self.n_ctx, self.n_tokens, self.n_read, len(self.held)
        return _HEADER.pack(MAGIC, self.model, *types, *counts) + struct.pack(f"<{len(self.held)}I", *self.held)


def fingerprint(decoder: Decoder, adapters: bytes) -> bytes:
    """32 bytes: sessions of decoders with the same ones can be exchanged. adapters: what tells a sequence's from others
    (Adapters.key()), b"" for none."""
    return hashlib.sha256(decoder.weights.fingerprint + repr(decoder.hp).encode() + adapters).digest()


def write(path: Path, engine: AnyEngine[Any, Any], tokens: Sequence[int], seq: int = 0) -> None:
    """Writes a sequence of an engine, in one step: the file is the old or the new one. tokens: all of it, those that
    are not read yet at the end. Raises SessionError where the file can't be written."""
    n_read = int(engine.lengths[seq])
    held = tuple(engine.cache.held(kind, seq) for kind in engine.cache.kinds)
    types = engine.options.type_k, engine.options.type_v
    header = Header(
        fingerprint(engine.decoder, engine.adapter_key(seq)), types, engine.n_ctx, len(tokens), n_read, held
    )
    try:
        private_files.write(path, with_check(_pieces(header, engine.cache, tokens, seq)))
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise SessionError(
            f"a session's file must be writable, {_named(path)} is not: {error}; give another"
        ) from error


def _pieces(header: Header, cache: Cache, tokens: Sequence[int], seq: int) -> Iterator[bytes]:
    yield from (header.packed(), np.array(tokens, "<i4").tobytes())
    yield from _rows(header, cache, seq)


def with_check(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same pieces, and the CRC-32 of them, 4 bytes."""
    check = 0
    for piece in pieces:
        check = zlib.crc32(piece, check)
        yield piece
    yield struct.pack("<I", check)


def _rows(header: Header, cache: Cache, seq: int) -> Iterator[bytes]:
    held = dict(zip(cache.kinds, header.held))
    for layer in cache.layers:
        first = header.n_read - held[layer.kind]
        for leaf in layer.leafs:
            yield cache.saved_rows(leaf, layer.kind, first, header.n_read, seq).tobytes()


class SessionFile:
    """An open file of a session, for a decoder; use it as a context. options: those that were asked for or, with None,
    the file's own context and cache types; adapters: as fingerprint() has it, those that sessions have unless given.
    Raises SessionError for a file that is none, or of another model."""

    def __init__(
        self, path: Path, decoder: Decoder, options: SessionOptions | None, adapters: bytes | None = None
    ) -> None:
        self._path, self._check = path, 0
        self._model = fingerprint(decoder, decoder.adapter_key if adapters is None else adapters)
        with self._answering():
            if not path.is_file():  # a pipe would be waited for, a device may have no end
                raise OSError("it is no regular file" if path.exists() else "there is no such file")
            self._file = path.open("rb")
        try:
            self.header = self._read_header()
            self.options = self._options(decoder, options)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SessionFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def _read_header(self) -> Header:
        magic, model, *types, n_ctx, n_tokens, n_read, n_kinds = _HEADER.unpack(self._bytes(_HEADER.size))
        if magic != MAGIC:
            raise self._refused("it begins otherwise, or is of another version", "check the path")
        if n_kinds > _MAX_KINDS or n_read > n_tokens or n_ctx < 1:
            raise self._damaged()
        held = struct.unpack(f"<{n_kinds}I", self._bytes(4 * n_kinds))
        names = [name.rstrip(b"\0").decode("ascii", "replace") for name in types]
        if not set(names) <= set(CACHE_TYPES):
            raise self._damaged()
        return Header(model, (names[0], names[1]), n_ctx, n_tokens, n_read, held)

    def _options(self, decoder: Decoder, asked: SessionOptions | None) -> SessionOptions:
        header = self.header
        if header.model != self._model:
            raise self._refused("it is of another model, or of other adapters", "load it with those it was made with")
        if asked is None:
            longest = longest_unasked(decoder.hp)
            if header.n_ctx > longest:
                raise self._refused(
                    f"its context is {header.n_ctx}, over the {longest} that a file may ask for",
                    "give the option n_ctx",
                )
            return SessionOptions(header.n_ctx, type_k=header.types[0], type_v=header.types[1])
        if (asked.type_k, asked.type_v) != header.types:
            k, v = header.types
            raise self._refused(f"its cache has the types {k} and {v}", "give these as type_k and type_v")
        n_ctx, _ = check_options(asked, decoder.hp)
        if decoder.rope_factors(n_ctx) is not decoder.rope_factors(header.n_ctx):
            raise self._refused(f"this model rotates otherwise in its context of {header.n_ctx}", "give that as n_ctx")
        return asked

    def fill(self, engine: AnyEngine[Any, Any], seq: int = 0) -> list[int]:
        """Puts the cache into an empty sequence of an engine with these options, and gives the tokens, of which the
        first header.n_read are in the cache. Raises SessionError; then the sequence holds anything."""
        header, cache = self.header, engine.cache
        if header.n_tokens > engine.n_ctx:
            raise self._refused(
                f"it has {header.n_tokens} tokens, the context holds {engine.n_ctx}", "give a larger n_ctx"
            )
        if len(header.held) != len(cache.kinds) or max(header.held) > header.n_read:
            raise self._damaged()
        held = dict(zip(cache.kinds, header.held))
        rows = sum(held[layer.kind] * leaf.nb[1] for layer in cache.layers for leaf in layer.leafs)
        expected = self._file.tell() + 4 * header.n_tokens + rows + 4
        if os.fstat(self._file.fileno()).st_size != expected:
            raise self._damaged()
        tokens = np.frombuffer(self._bytes(4 * header.n_tokens), "<i4")
        whole = cache.take_back(tokens[: header.n_read].tolist(), held, seq)
        for layer in cache.layers if whole else ():
            n = held[layer.kind]
            for leaf in layer.leafs:
                data = np.frombuffer(self._bytes(n * leaf.nb[1]), np.uint8).reshape(-1, leaf.nb[1])
                cache.put_saved_rows(leaf, layer.kind, header.n_read - n, data, seq)
        (check,) = struct.unpack("<I", self._bytes(4, counted=False))
        outside = (tokens < 0) | (tokens >= engine.decoder.hp.n_vocab)
        if check != self._check or outside.any() or not whole:
            raise self._damaged()
        return [int(token) for token in tokens]

    def _bytes(self, n: int, *, counted: bool = True) -> bytes:
        with self._answering():
            data = self._file.read(n)
        if len(data) != n:
            raise self._damaged()
        if counted:
            self._check = zlib.crc32(data, self._check)
        return data

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """What the system refuses as a SessionError."""
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            raise self._refused(str(error), "check the path") from error

    def _refused(self, why: str, then: str) -> SessionError:
        return SessionError(
            f"a session must be a file that Session.save() wrote, {_named(self._path)} can't be taken: {why}; {then}"
        )

    def _damaged(self) -> SessionError:
        return self._refused("it is damaged or cut short", "save the session again")


def _named(path: Path) -> str:
    return repr(str(path)[:200])
