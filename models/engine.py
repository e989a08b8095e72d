"""Engine: the state of several sequences of a model. One step reads tokens of any of them, any number of each."""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from graphrt.arguments import check_fields
from graphrt.backend import Backend, Usage
from graphrt.backends.cpu import threads
from graphrt.dtypes import dtype
from graphrt.errors import GraphError, SessionError
from graphrt.execute import Executable, prepare
from graphrt.graph import Graph
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.cache import Cache, KVCache
from graphrt.models.hparam_sizes import default_ctx
from graphrt.models.hparams import HParams
from graphrt.models.key_reader import INT32_MAX
from graphrt.models.placement import for_cache
from graphrt.models.recent import Recent
from graphrt.models.sampling import Uniforms
from graphrt.models.step import AnyStep, Logits, PreparedStep
from graphrt.ops import SampleParams
from graphrt.ops.flash_attn_ext import PREC_DEFAULT, PREC_F8, PREC_F32
from graphrt.progress import Advance, ignore, task
from graphrt.tensor import Tensor, new_tensor

log = logging.getLogger(__name__)

Ids = npt.NDArray[np.int32]

C = TypeVar("C", bound=Cache)
S = TypeVar("S", bound=AnyStep[Any])

#: Prepared steps that an engine keeps: one for each number of tokens it has lately been given.
MAX_PREPARED = 8
#: And of those that choose the next tokens by themselves: one for each way to choose.
MAX_CHAINED = 2
#: What SessionOptions.attn_prec may be, and the param of FLASH_ATTN_EXT that it stands for.
ATTN_PRECS = {"auto": PREC_DEFAULT, "f32": PREC_F32, "f8": PREC_F8}
#: For SessionOptions.n_ctx: the context that the model was trained on.
OWN_CTX = -1
#: Sequences of an engine.
MAX_SEQ = 1 << 16
#: Steps that are queued on a device beyond the tokens that the host waits for.
MAX_AHEAD = 4
#: Steps that a prompt is read in, for each stage of a pipeline, and the fewest tokens of one that is made smaller for
#: that: all stages then work at once, but for the first steps and the last ones.
STEPS_OF_A_STAGE, LEAST_TOKENS = 4, 64
#: The title of the task of reading a prompt.
READING = "reading the prompt"
#: The wanted rows of a step of one token.
_FIRST = np.zeros(1, np.int32)
#: Of a step that gives none.
NO_LOGITS = np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class SessionOptions:
    """n_ctx: the most tokens a sequence may have, 0 for what default_ctx() gives, the model's own limit or 4096,
    OWN_CTX for as many as the model was trained on; more are allowed where positions are computed, and warned of;
    n_batch: the most tokens that are evaluated at once, all sequences together; type_k, type_v: the cache's types;
    n_threads_batch: CPU threads of a step that reads several tokens of a sequence, 0 for as many as others have;
    flash_attn: attention is one op; without it scores and weights lie in memory between ops of their own, to compare;
    attn_prec: what it multiplies in, of ATTN_PRECS: "auto" is the backend's choice, "f32" rounds nothing on the way,
    "f8" lets it round queries and softmax weights to f8_e4m3 beside a cache of that, which costs accuracy: an H100
    reads prompts faster so, other kernels round nothing more.

    Of engines: page, the tokens of a page of the cache, 16 to 256, 0 for a ring of n_ctx cells for each sequence;
    n_pages: pages of the layers that see all tokens, 0 for as many as whole contexts of all sequences take; share: full
    pages stay for other sequences that begin with the same tokens."""

    n_ctx: int = 0
    n_batch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    n_threads_batch: int = 0
    page: int = 0
    n_pages: int = 0
    share: bool = True
    flash_attn: bool = True
    attn_prec: str = "auto"

    def __post_init__(self) -> None:
        check_fields(self, SessionError)
        for side in ("type_k", "type_v"):  # f8 and F16 are f8_e4m3 and f16; for what is no type the cache has words
            with contextlib.suppress(GraphError):
                object.__setattr__(self, side, dtype(getattr(self, side)).name)


def check_options(options: SessionOptions, hp: HParams) -> tuple[int, int]:
    """(n_ctx, n_batch) as they will be. Raises SessionError for those that can't."""
    n_ctx = hp.n_ctx_train if options.n_ctx == OWN_CTX else options.n_ctx or default_ctx(hp)
    learned = hp.rope is None and not hp.max_alibi_bias
    most, why = (hp.n_ctx_train, "for which the model has positions") if learned else (INT32_MAX, "what positions hold")
    if not 1 <= n_ctx <= most:
        raise SessionError(f"n_ctx, the context, must be 1 to {most}, {why}, got {n_ctx}")
    if options.n_threads_batch < 0:
        raise SessionError(f"threads must be at least 1, or 0 for the usual number, got {options.n_threads_batch}")
    kinds = {options.type_k, options.type_v} - {"f16", "bf16", "f32"}
    if not options.flash_attn and (kinds or options.page):
        got = "pages" if options.page else f"a cache of {', '.join(sorted(kinds))}"
        raise SessionError(f"attention without flash_attn reads a ring of f16, bf16 or f32, got {got}; leave one out")
    _check_attn_prec(options)
    if options.n_batch < 1:
        raise SessionError(f"n_batch must be at least 1, got {options.n_batch}")
    return n_ctx, min(options.n_batch, n_ctx)


def _check_attn_prec(options: SessionOptions) -> None:
    prec = options.attn_prec
    if prec not in ATTN_PRECS:
        raise SessionError(f"attn_prec must be one of {', '.join(ATTN_PRECS)}, got {prec[:40]!r}")
    if prec != "auto" and (options.page or not options.flash_attn):
        got = "pages" if options.page else "attention without flash_attn"
        raise SessionError(f"attn_prec {prec} is of flash_attn over a ring of cells, got {got}; use attn_prec auto")
    types = (options.type_k, options.type_v)
    if prec == "f8" and types != ("f8_e4m3", "f8_e4m3"):
        raise SessionError(
            f"attn_prec f8 multiplies 8-bit floats, so that type_k and type_v must be f8_e4m3, they are "
            f"{' and '.join(types)}; use type_k f8 and type_v f8, or attn_prec auto"
        )


def _check_past_training(decoder: Decoder, n_ctx: int) -> None:
    """Warns of a context that is longer than the model was trained on. Raises SessionError where there are no positions
    for it."""
    trained = decoder.hp.n_ctx_train
    if decoder.position_embd is not None:
        raise SessionError(f"n_ctx must be 1 to {trained}, for which the model has positions, got {n_ctx}")
    log.warning(
        "a context of %d tokens is longer than the %d that the model was trained on: what it says beyond these may "
        "make no sense, unless its rotation of positions is stretched (RopeOptions, --rope-scaling on a command line)",
        n_ctx,
        trained,
    )


class _Alone(AbstractContextManager[None]):
    """See Engine.alone()."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise SessionError(
                "a session serves one thread at a time, and another one is using it; open one for each thread: "
                "sessions of a model share its weights"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class AnyEngine(ABC, Generic[C, S]):
    """The state of n_seq sequences. lengths: tokens of each in the cache, int64 [n_seq]; n_batch: the most tokens of a
    sequence in a step; options: as they are kept, with the numbers that stand for defaults put in. Raises SessionError
    for options that can't be, and for n_seq."""

    #: Prepared steps that are kept: the ones that were used last, and of these so many bytes of memory.
    most_prepared = MAX_PREPARED
    most_prepared_bytes = 1 << 62

    def __init__(
        self,
        decoder: Decoder,
        backends: Sequence[Backend],
        options: SessionOptions = SessionOptions(),
        n_seq: int = 1,
    ) -> None:
        if not 1 <= n_seq <= MAX_SEQ:
            raise SessionError(f"an engine has 1 to {MAX_SEQ} sequences, got {n_seq}")
        hp = decoder.hp
        self.decoder = decoder
        self.backends = list(backends)
        self.n_seq = n_seq
        self.n_ctx, n_batch = check_options(options, hp)
        if self.n_ctx > hp.n_ctx_train:
            _check_past_training(decoder, self.n_ctx)
        self.options = replace(options, n_ctx=self.n_ctx, n_batch=n_batch)
        self.n_batch = self._most_at_once(n_batch)
        self.n_threads_batch = options.n_threads_batch
        self.home = for_cache(self.backends, options.type_k)
        self.cache = self._new_cache()
        self.lengths = np.zeros(n_seq, np.int64)
        self._prepared = Recent[Hashable, S](self.most_prepared, self.most_prepared_bytes, lambda step: step.nbytes)
        self._busy = threading.Lock()
        self._alone = _Alone(self._busy)

    @property
    def n_prepared(self) -> int:
        """Steps that were prepared so far."""
        return self._prepared.n_made

    @abstractmethod
    def _most_at_once(self, n_batch: int) -> int:
        """The most tokens of one sequence that a step reads."""

    @abstractmethod
    def _new_cache(self) -> C:
        """An empty cache."""

    def reset(self) -> None:
        """Forgets the sequences; what was prepared stays."""
        self.cache.clear()
        self.lengths[:] = 0

    def adapter_key(self, seq: int) -> bytes:
        """What tells a sequence from those whose tokens lie in a cache otherwise, by their adapters."""
        return self.decoder.adapter_key

    @abstractmethod
    def executable(self, n: int, n_outputs: int) -> Executable:
        """The graph of a step that reads n tokens of each sequence and has so many wanted rows."""

    @abstractmethod
    def chained(self, sampling: SampleParams | None = None) -> S:
        """The step that reads a token of each sequence and writes the next ones where the next step reads them: the
        likeliest, or ones that are drawn. Made on first use."""

    @abstractmethod
    def read(self, tokens: Mapping[int, Sequence[int] | Ids]) -> Logits:
        """Reads tokens of some sequences, by their numbers, and gives the logits after each one's last: f32
        [sequences, n_vocab], in the order given.

        Raises SessionError when there are none, a sequence is unknown, or tokens are none, unknown, or do not fit the
        context; then nothing was read.
        """

    def reading(self, n: int) -> AbstractContextManager[Advance]:
        """The task of reading n tokens: a prompt's, since a step of generated ones is over at once."""
        return task(READING, n, "tokens") if n > self.n_seq else nullcontext(ignore)

    def at_once(self, n: int) -> int:
        """How many of a sequence's n tokens a step reads: n_batch, or of a pipeline fewer, so that its stages have
        something to do at the same time."""
        size, steps = self.n_batch, STEPS_OF_A_STAGE * self.decoder.stages
        while self.decoder.stages > 1 and size >= 2 * LEAST_TOKENS and n < steps * size:
            size //= 2
        return size

    def alone(self) -> AbstractContextManager[None]:
        """Nothing else runs steps meanwhile. Raises SessionError where another thread does."""
        return self._alone

    @abstractmethod
    def step(self, part: Mapping[int, Ids], *, every: bool = False, quiet: bool = False) -> Logits:
        """One step. The logits after each sequence's last token, f32 [sequences, n_vocab]; quiet: none are wanted."""

    @abstractmethod
    def run_ahead(
        self, tokens: Ids, n: int, sampling: SampleParams | None = None, uniforms: Uniforms | None = None
    ) -> Generator[Ids, None, None]:
        """Reads a token of each sequence, int32 [n_seq], gives the next ones, reads those, and so on: at most n times,
        until a context is full. The next ones are the likeliest or, with `sampling`, of an engine of one sequence,
        drawn, each by a number taken from `uniforms`; what steps queued ahead will need is only looked at.

        Steps are queued ahead of what the caller takes; those it never takes count as not read, so that a caller may
        stop anywhere. lengths are right whenever tokens are given. Raises SessionError as read() does, and for logits
        that are no numbers. !! A backend that queues its work doesn't look at these.
        """

    @property
    def runs_ahead(self) -> bool:
        """run_ahead() gains over read() and a choice by the host: one backend runs the whole step, and queues its work
        or leaves the logits where the host sees them."""
        if not self.home.asynchronous:
            return len(self.chained().exe.splits) == 1 and self.chained().logits_stay
        splits = self.executable(1, self.n_seq).splits
        return len(splits) == 1 and splits[0].backend.asynchronous

    def draws_ahead(self, sampling: SampleParams) -> bool:
        """So it does where tokens are drawn: the backend queues its work and draws too."""
        return self.home.asynchronous and self.runs_ahead and len(self.chained(sampling).exe.splits) == 1

    def fallbacks(self) -> list[str]:
        """What of a decode step the preferred backend does not run, a sentence for each op, and how often it is cut."""
        plan = self.executable(1, self.n_seq).schedule
        reasons = {node.op: refused for node, refused in plan.refusals.items()}
        counts = Counter(node.op for node in plan.refusals)
        said = [
            f"{n} {op} run on {next(a.backend.id for node, a in plan.assignments.items() if node.op == op)}: "
            + "; ".join(f"{name} says {reason}" for name, reason in reasons[op].items())
            for op, n in counts.most_common()
        ]
        return [*said, f"a step is cut into {len(plan.splits)} parts with copies between"] if said else []

    def checked(self, tokens: Mapping[int, Sequence[int] | Ids]) -> dict[int, Ids]:
        """The tokens as arrays. Raises SessionError as read() does."""
        if not tokens:
            raise SessionError("tokens of at least one sequence must be given, got none")
        for seq, ids in tokens.items():
            if not 0 <= seq < self.n_seq:
                raise SessionError(f"a sequence must be 0 to {self.n_seq - 1}, got {seq}")
            self._check(seq, ids)
        return {seq: np.asarray(ids, np.int32) for seq, ids in tokens.items()}

    def _check(self, seq: int, ids: Sequence[int] | Ids) -> None:
        past, n_vocab = int(self.lengths[seq]), self.decoder.hp.n_vocab
        if not len(ids):
            raise SessionError("a prompt must have at least one token, got none; give some text")
        if past + len(ids) > self.n_ctx:
            each = " of each sequence" if self.n_seq > 1 else ""
            held = f" after {past} that the cache holds" if past else ""
            longest = self.decoder.hp.n_ctx_train
            more = f"or raise n_ctx, up to {longest}" if self.n_ctx < longest else "the model was trained on no more"
            raise SessionError(
                f"the prompt is too long: the context holds {self.n_ctx} tokens{each}, got {len(ids)}{held}; "
                f"shorten the prompt, {more}"
            )
        bad = [t for t in ids if not 0 <= t < n_vocab]
        if bad:
            raise SessionError(f"a token id must be 0 to {n_vocab - 1}, got {bad[0]}")


class Engine(AnyEngine[KVCache, PreparedStep]):
    """Sequences that have a ring of cells each."""

    def _most_at_once(self, n_batch: int) -> int:
        return max(1, n_batch // self.n_seq)

    def _new_cache(self) -> KVCache:
        hp, options = self.decoder.hp, self.options
        if options.page:
            raise SessionError(
                f"sessions have a ring of cells, so page must be 0, got {options.page}; engines have pages: "
                f"Model.engine()"
            )
        types, (first, *others) = (options.type_k, options.type_v), self.decoder.cached
        return KVCache(
            first, self.home, hp.windowed, self.n_ctx, self.n_batch, *types, n_seq=self.n_seq,
            flash_attn=self.options.flash_attn, prec=ATTN_PRECS[self.options.attn_prec], others=others,
        )  # fmt: skip

    def prepared(self, n: int, n_outputs: int) -> PreparedStep:
        """The step of n tokens of each sequence and so many wanted rows; made on first use."""

        def make() -> PreparedStep:
            inputs = self.decoder.inputs(n, n_outputs, self.cache)
            return PreparedStep(inputs, prepare(Graph(self.decoder.result(inputs)), self.backends))

        return self._prepared.made((n, n_outputs), make)

    def passing(self, n: int, n_outputs: int) -> PreparedStep:
        """The same of a step whose logits nobody wants."""

        def make() -> PreparedStep:
            inputs = self.decoder.inputs(n, n_outputs, self.cache)
            return PreparedStep(inputs, prepare(Graph(self.decoder.passed(inputs)), self.backends))

        return self._prepared.made((n, n_outputs, "passing"), make)

    def executable(self, n: int, n_outputs: int) -> Executable:
        return self.prepared(n, n_outputs).exe

    def chained(self, sampling: SampleParams | None = None) -> PreparedStep:
        if self._tokens.buffer is None:
            self._tokens.buffer = self.home.alloc(self._tokens.nbytes, Usage.STATE)

        def make() -> PreparedStep:
            keep_logits = not self.home.asynchronous
            inputs, graph = self.decoder.chained(self._tokens, self.cache, sampling, keep_logits=keep_logits)
            step = PreparedStep(inputs, prepare(graph, self.backends))
            if inputs.rows in step.exe.graph.inputs:  # only the last stage of a pipeline reads them
                step.exe.write(inputs.rows, np.arange(self.n_seq, dtype=np.int32))
            return step

        return self._chained.made(sampling, make)

    @cached_property
    def _tokens(self) -> Tensor:
        """What chained steps read and write."""
        return new_tensor("i32", self.n_seq, name="inp_tokens")

    @cached_property
    def _chained(self) -> Recent[SampleParams | None, PreparedStep]:
        return Recent(MAX_CHAINED)

    def read(self, tokens: Mapping[int, Sequence[int] | Ids]) -> Logits:
        with self.alone():
            given = self.checked(tokens)
            if len(given) == self.n_seq == sum(map(len, given.values())):  # a token of each
                return self.step(given).copy()
            found: dict[int, Logits] = {}
            longest = max(map(len, given.values()))
            size = self.at_once(longest)
            with self.reading(sum(map(len, given.values()))) as advance:
                for start in range(0, longest, size):
                    part = {seq: ids[start : start + size] for seq, ids in given.items() if len(ids) > start}
                    goes_on = all(len(given[seq]) > start + size for seq in part)
                    logits = self.step(part, quiet=self.decoder.stages > 1 and goes_on)
                    found |= zip(part, logits.copy())  # a sequence's last step is the one that stays
                    advance(sum(map(len, part.values())))
            rows = [found[seq] for seq in given]
            return rows[0][None] if len(rows) == 1 else np.stack(rows)

    def step(self, part: Mapping[int, Ids], *, every: bool = False, tail: int = 1, quiet: bool = False) -> Logits:
        """One step: at most n_batch tokens of each sequence, which may be of different numbers. The logits after each
        one's last token, f32 [sequences, n_vocab], or, of an engine of one sequence, after every one, or after the
        `tail` last ones. quiet: of a pipeline, none are wanted, so that no stage waits for the last one; the result is
        empty."""
        done = False
        most = max(map(len, part.values()))
        try:
            if self.n_threads_batch and most > 1:
                with threads.using(self.n_threads_batch):
                    prepared = self._run(part, every, tail, quiet)
            else:
                prepared = self._run(part, every, tail, quiet)
            for seq, ids in part.items():
                self.lengths[seq] += len(ids)
            done = sum(map(len, part.values())) == most * self.n_seq  # as many of each
        finally:  # nothing stays of tokens beyond a sequence's own, nor of a step that was interrupted
            if not done:
                self._forget()
        if quiet:
            return NO_LOGITS
        logits = prepared.logits()
        return logits if self.n_seq == 1 else logits[list(part)]

    def _run(self, part: Mapping[int, Ids], every: bool, tail: int, quiet: bool) -> PreparedStep:
        prepared = self.feed(part, every=every, tail=tail, quiet=quiet)
        prepared.exe.run()
        return prepared

    def feed(self, part: Mapping[int, Ids], *, every: bool = False, tail: int = 1, quiet: bool = False) -> PreparedStep:
        """A step with its inputs filled, ready to run; its tokens don't count as read yet.

        A sequence that has fewer tokens than others, or none, reads tokens 0 beyond its own, in cells to be forgotten.
        """
        n = max(map(len, part.values()))
        if n == self.n_seq == 1 and not quiet:
            prepared = self.prepared(1, 1)
            prepared.write(self.lengths[:, None], part[0], _FIRST)
            return prepared
        ids = np.zeros((self.n_seq, n), np.int32)
        last = np.zeros(self.n_seq, np.int32)
        for seq, mine in part.items():
            ids[seq, : len(mine)] = mine
            last[seq] = len(mine) - 1
        rows = np.arange(self.n_seq, dtype=np.int32) * n + last
        if every or tail > 1:
            rows = np.arange(0 if every else n - tail, n, dtype=np.int32)
        prepared = self.passing(n, len(rows)) if quiet else self.prepared(n, len(rows))
        prepared.write(self.lengths[:, None] + np.arange(n), ids, rows)
        return prepared

    def run_ahead(
        self, tokens: Ids, n: int, sampling: SampleParams | None = None, uniforms: Uniforms | None = None
    ) -> Generator[Ids, None, None]:
        self.checked(dict(enumerate(tokens[:, None])))
        step = self.chained(sampling)
        buffer, offset = step.exe.place(self._tokens)
        step.exe.write(self._tokens, tokens.astype(np.int32))
        start, given, queued, nbytes = self.lengths.copy(), 0, 0, self._tokens.nbytes
        ahead = min(MAX_AHEAD, self.n_batch) if self.home.asynchronous else 1
        most = min(n, int(self.n_ctx - start.max()))
        answers: deque[Callable[[], npt.NDArray[np.uint8]]] = deque()
        try:
            while given < most:
                with self.alone():
                    while queued < min(most, given + ahead):
                        uniform = None if uniforms is None else np.array([uniforms.peek(queued - given)])
                        step.write((start + queued)[:, None], uniform=uniform)
                        step.exe.run()
                        answers.append(buffer.read_later(offset, nbytes))
                        queued += 1
                    answer = answers.popleft()().view(np.int32)
                step.check_chosen(answer)
                given += 1
                self.lengths[:] = start + given
                tokens = answer
                if uniforms is not None:
                    uniforms.take()
                yield answer
        finally:  # what was queued beyond is forgotten: no later step sees those cells before they are written again
            self._forget()

    def _forget(self) -> None:
        """Nothing stays of tokens beyond `lengths`."""
        self.cache.forget_from(self.lengths)
