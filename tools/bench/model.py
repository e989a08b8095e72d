"""What `graphrt bench MODEL` measures: a model from a file or made up, and sessions at a depth, timed and put back."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from graphrt.errors import SessionError
from graphrt.tools.bench.workload import Test
from graphrt.tools.common import session_options
from graphrt.tools.rope_flags import rope_options

if TYPE_CHECKING:
    from graphrt.backend import Backend
    from graphrt.models.engine import Engine, SessionOptions
    from graphrt.models.engine_paged import PagedEngine
    from graphrt.models.model import Model
    from graphrt.ranks import Ranks
    from graphrt.tools.bench.llama_cpp import Peer

#: Steps before anything is timed: a GPU backend may compile in the first and capture in the next ones.
WARM_UP_STEPS = 3
#: Room in the cache after a test's last token, where the model allows it.
SPARE = 64
#: Tokens of a page of sequences that have different lengths.
PAGE = 64


class Source:
    """The model that the options name: a file (pulled if need be), or with --synthetic one made up."""

    def __init__(self, args: argparse.Namespace) -> None:
        if (args.model is None) == (args.synthetic is None):
            raise SessionError("one model must be given: MODEL, or --synthetic NAME such as llama-8b:q4_k_m")
        self.synthetic: str | None = args.synthetic
        self.model: str | None = args.model
        self._asked: str | None = getattr(args, "asked", args.model)
        self.rope = rope_options(args)
        self.ranks: Ranks | int = getattr(args, "as_ranks", 1)
        if self.synthetic:
            from graphrt.models.synthetic import synthetic

            synthetic(self.synthetic)  # a bad name must show first

    @property
    def label(self) -> str:
        return self.synthetic or str(self._asked).rpartition("/")[2]

    @cached_property
    def path(self) -> str:
        from graphrt.models import hub

        return str(hub.resolve(self.model))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        from graphrt.models.gguf import GGUFFile
        from graphrt.models.synthetic import synthetic

        if self.synthetic:
            return synthetic(self.synthetic).nbytes
        with GGUFFile.open(self.path) as file:
            return sum(info.nbytes for info in file.tensors.values())

    @cached_property
    def n_params(self) -> int:
        """Elements of all tensors, as llama.cpp counts parameters."""
        from graphrt.models.gguf import GGUFFile
        from graphrt.models.synthetic import synthetic

        if self.synthetic:
            return sum(math.prod(info.ne) for info in synthetic(self.synthetic).tensors.values())
        with GGUFFile.open(self.path) as file:
            return sum(math.prod(info.ne) for info in file.tensors.values())

    def load(self, backends: Sequence[Backend], layers: int | None = None, *, whole: bool = False) -> Model:
        """The model on backends. layers: a synthetic one's first so many only; whole: not only this rank's part."""
        from graphrt.models.model import Model, load
        from graphrt.models.synthetic import synthetic

        ranks = 1 if whole else self.ranks
        if self.synthetic:
            file = synthetic(self.synthetic, layers)
            if self.rope is not None:
                self.rope.apply(file)
            return Model(file, backends, ranks)
        return load(self.path, backends, rope=self.rope, ranks=ranks)


def backends_for(name: str, exact: bool) -> list[Backend]:
    """The backend of that name, and the CPU for what it refuses. Raises BackendError."""
    from graphrt.backend import get_backend

    backends = [get_backend(name, exact=exact)]
    if backends[0].name != "cpu":
        backends.append(get_backend("cpu", exact=exact))
    return backends


def options_for(test: Test, args: argparse.Namespace, model: Model) -> SessionOptions:
    """A context as long as the test needs, as llama-bench makes it, unless -c gives one.

    Raises SessionError for a test that does not fit.
    """
    from graphrt.models.engine import OWN_CTX

    limit = model.decoder.hp.n_ctx_train
    asked = limit if args.ctx_size == OWN_CTX else args.ctx_size
    longest = asked or limit
    if test.end > longest:
        raise SessionError(
            f"test {test} needs a context of {test.end} tokens, "
            + (f"-c gives {longest}; raise it" if asked else f"the model allows {longest}; use a shorter one")
        )
    return replace(session_options(args), n_ctx=asked or min(test.end + SPARE, limit))


class Prepared:
    """Sequences with a test's depth in their cache, which each repetition starts from. ids: of test.end tokens; each
    sequence has others of them. Sequences of different lengths lie in pages."""

    def __init__(self, model: Model, test: Test, options: SessionOptions, ids: Sequence[int]) -> None:
        self.test, self.ids = test, ids[: test.end]
        if test.ragged:
            n_pages = sum(-(-(end + SPARE) // PAGE) for end in test.ends)
            options = replace(options, page=PAGE, n_pages=n_pages, share=False)
        self.engine = model.engine(test.batch.n, options)
        shifted = [np.roll(np.asarray(ids, np.int32), 7 * seq)[: test.end] for seq in range(test.batch.n)]
        self.tokens = np.stack(shifted)
        self._read([0] * test.batch.n, test.starts)
        self._cells = None if test.ragged else cast("Engine", self.engine).cache.saved()

    def _read(self, starts: Sequence[int], stops: Sequence[int]) -> None:
        spans = zip(self.tokens, starts, stops)
        parts = {seq: ids[start:stop] for seq, (ids, start, stop) in enumerate(spans) if stop > start}
        if parts:
            self.engine.read(parts)

    def _put_back(self) -> None:
        """The sequences are as they were at first."""
        engine, starts = self.engine, self.test.starts
        if self._cells is not None:
            cast("Engine", engine).cache.restore(self._cells)
            engine.lengths[:] = starts
        else:
            engine = cast("PagedEngine", engine)
            have = [engine.truncate(seq, min(start, int(engine.lengths[seq]))) for seq, start in enumerate(starts)]
            self._read(have, starts)

    def once(self) -> float:
        """Seconds of the test, from its depth on. Ends with a result on the host, so nothing is left queued.

        Tokens are generated as `run` does it: each the likeliest after the one before.
        """
        engine, test = self.engine, self.test
        self._put_back()
        first = self.tokens[np.arange(test.batch.n), [min(start, test.end - 1) for start in test.starts]]
        start = time.perf_counter()
        if test.kind == "pp":
            self._read(test.starts, test.ends)
        elif engine.runs_ahead or test.batch.n > 1:
            deque(engine.run_ahead(first, test.n), maxlen=0)
        else:
            for i in range(test.start, test.end):
                self._read([i], [i + 1])
        return time.perf_counter() - start


def measure(prepared: Prepared, repetitions: int, peer: Peer | None) -> dict[str, Any]:
    """A row: tokens/s of a test, the peer's in turn with ours, and what a token costs."""
    test, engine = prepared.test, prepared.engine
    warm_ups = 1 if engine.backends[0].name == "cpu" else math.ceil(WARM_UP_STEPS / test.steps(engine.n_batch))
    for _ in range(warm_ups):
        prepared.once()
    if peer and test.batch.n == 1 and not test.ragged:
        peer.seconds(test, prepared.ids)
    ours, theirs = [], []
    for _ in range(repetitions):  # in turn, so that both meet the same machine
        ours.append(test.n_timed / prepared.once())
        if peer and test.batch.n == 1 and not test.ragged:
            theirs.append(test.n / peer.seconds(test, prepared.ids))
    row: dict[str, Any] = {"test": str(test), "kind": test.kind, "n": test.n, "depth": test.depth, **_summary(ours)}
    if theirs:
        row["peer"] = _summary(theirs)
        row["ratio"] = row["tokens_per_s"] / row["peer"]["tokens_per_s"]
    return row


def _summary(rates: list[float]) -> dict[str, float]:
    deviation = statistics.stdev(rates) if len(rates) > 1 else 0.0
    return {"tokens_per_s": statistics.median(rates), "deviation": deviation}


def add_work(row: dict[str, Any], model: Model, prepared: Prepared) -> None:
    """Adds what bounds a test: tg reads the weights and the cells that a token sees, GB/s; pp multiplies, GFLOP/s."""
    rate = row["tokens_per_s"]
    if prepared.test.kind == "tg":
        row["kv_bytes_per_token"] = _kv_bytes(prepared)
        row["bytes_per_token"] = model.bytes_per_token / prepared.test.batch.n + row["kv_bytes_per_token"]
        row["gb_per_s"] = rate * row["bytes_per_token"] / 1e9
    else:
        row["gflop_per_s"] = rate * (_product_flops(model) + _attention_flops(prepared)) / 1e9


def _product_flops(model: Model) -> int:
    """Of a prompt's token: all matrices but the embedding and the output, which few tokens reach."""
    table, output = model.decoder.token_embd, model.decoder.output
    weights = (t for t in model.weights.loaded.values() if t is not table and t is not output)
    share = model.decoder.share_of_token
    return 2 * sum(int(t.n_elements * share(t)) for t in weights if t.n_dims >= 2 and t.name.endswith(".weight"))


def _attention_flops(prepared: Prepared) -> float:
    hp = prepared.engine.decoder.hp
    return sum(
        2 * hp.n_head[il] * (hp.d_k + hp.d_v) * _seen(prepared.test, hp.window if windowed else 0)
        for il, windowed in enumerate(hp.windowed)
    )


def _kv_bytes(prepared: Prepared) -> float:
    engine = prepared.engine
    window = engine.decoder.hp.window
    return sum(
        sum(t.dtype.row_size(t.ne[0]) for t in layer.leafs) * _seen(prepared.test, window if layer.kind == "swa" else 0)
        for layer in engine.cache.layers
    )


def _seen(test: Test, window: int) -> float:
    """How many tokens one of the test's sees, itself included, on average."""
    each = (range(start, end) for start, end in zip(test.starts, test.ends))
    return statistics.fmean(min(p + 1, window or p + 1) for positions in each for p in positions)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
