"""Session: one sequence being read and written by a model. Prompt in batches, then token by token."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend, Usage
from graphrt.errors import SessionError
from graphrt.execute import Executable, prepare
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.cache import KVCache
from graphrt.models.hparam_limits import default_ctx
from graphrt.models.hparams import HParams
from graphrt.models.placement import for_cache
from graphrt.models.sampling import Uniforms
from graphrt.ops import SampleParams
from graphrt.tensor import new_tensor

Logits = npt.NDArray[np.float32]

#: Logits of many tokens are made in pieces of at most this many bytes.
MAX_LOGITS_BYTES = 256 * 2**20
#: Prepared graphs that a session keeps: one for each number of tokens it has lately been given.
MAX_PREPARED = 8
#: And of those that choose the next token by themselves: one for each way to choose.
MAX_CHAINED = 2
#: Steps that are queued on a device beyond the token that the host waits for.
MAX_AHEAD = 4


@dataclass(frozen=True)
class SessionOptions:
    """n_ctx: the most tokens a sequence may have, 0 for what default_ctx() gives, the model's own limit or 4096;
    n_batch: the most tokens that are evaluated at once; type_k, type_v: the cache's types."""

    n_ctx: int = 0
    n_batch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"


def check_options(options: SessionOptions, hp: HParams) -> tuple[int, int]:
    """(n_ctx, n_batch) as they will be. Raises SessionError for those that can't."""
    n_ctx = options.n_ctx or default_ctx(hp)
    if not 1 <= n_ctx <= hp.n_ctx_train:
        raise SessionError(f"the context (-c) must be 1 to {hp.n_ctx_train}, the model's own limit, got {n_ctx}")
    if options.n_batch < 1:
        raise SessionError(f"the batch (-b) must be at least 1, got {options.n_batch}")
    return n_ctx, min(options.n_batch, n_ctx)


class Session:
    """The state of one sequence. n_past: tokens in the cache."""

    def __init__(self, decoder: Decoder, backends: Sequence[Backend], options: SessionOptions) -> None:
        hp = decoder.hp
        self.decoder = decoder
        self.backends = list(backends)
        self.n_ctx, self.n_batch = check_options(options, hp)
        home = for_cache(self.backends, options.type_k)
        self.cache = KVCache(hp, home, hp.windowed, self.n_ctx, self.n_batch, options.type_k, options.type_v)
        self.n_past = 0
        self._prepared: OrderedDict[tuple[int, int], Executable] = OrderedDict()
        self._chained: OrderedDict[SampleParams | None, Executable] = OrderedDict()
        self._token = new_tensor("i32", 1, name="inp_token")

    def reset(self) -> None:
        """Forgets the sequence; what was prepared stays."""
        self.cache.clear()
        self.n_past = 0

    def fallbacks(self) -> list[str]:
        """What of a decode step the preferred backend does not run, a sentence for each op, and how often it is cut."""
        plan = self.executable(1, 1).schedule
        reasons = {node.op: refused for node, refused in plan.refusals.items()}
        counts = Counter(node.op for node in plan.refusals)
        said = [
            f"{n} {op} run on {next(a.backend for node, a in plan.assignments.items() if node.op == op)}: "
            + "; ".join(f"{name} says {reason}" for name, reason in reasons[op].items())
            for op, n in counts.most_common()
        ]
        return [*said, f"a step is cut into {len(plan.splits)} parts with copies between"] if said else []

    def executable(self, n_tokens: int, n_outputs: int) -> Executable:
        """The prepared graph for that many tokens and wanted rows; made on first use."""
        key = (n_tokens, n_outputs)
        if key not in self._prepared:
            self._prepared[key] = prepare(self.decoder.graph(n_tokens, n_outputs, self.cache), self.backends)
            if len(self._prepared) > MAX_PREPARED:
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(key)
        return self._prepared[key]

    def eval(self, tokens: Sequence[int]) -> Logits:
        """Reads tokens and returns the logits after the last one: f32 [n_vocab], valid until the next call.

        Raises SessionError when they are none, unknown, or do not fit the context.
        """
        self._check(tokens)
        ids = np.asarray(tokens, np.int32)
        for start in range(0, len(ids), self.n_batch):
            rows = self._step(ids[start : start + self.n_batch], first_row=-1)
        last: Logits = rows[-1]
        return last

    def eval_rows(self, tokens: Sequence[int], first: int = 0) -> Logits:
        """Reads tokens and returns the logits after each from index `first` on: f32 [n - first, n_vocab].

        Raises SessionError as eval() does, and for a `first` outside 0 to n.
        """
        self._check(tokens)
        if not 0 <= first <= len(tokens):
            raise SessionError(f"the first wanted row must be 0 to {len(tokens)}, the number of tokens, got {first}")
        ids = np.asarray(tokens, np.int32)
        rows = np.empty((len(ids) - first, self.decoder.hp.n_vocab), np.float32)
        batch = max(1, min(self.n_batch, MAX_LOGITS_BYTES // (4 * self.decoder.hp.n_vocab)))
        for start, stop in _batches(first, len(ids), self.n_batch, batch):
            wanted = start >= first
            out = self._step(ids[start:stop], first_row=0 if wanted else -1)
            if wanted:
                rows[start - first : stop - first] = out
        return rows

    def _check(self, tokens: Sequence[int]) -> None:
        if not len(tokens):
            raise SessionError("a prompt must have at least one token, got none; give some text")
        if self.n_past + len(tokens) > self.n_ctx:
            held = f" after {self.n_past} that the cache holds" if self.n_past else ""
            longest = self.decoder.hp.n_ctx_train
            more = (
                f"or raise it with -c, up to {longest}" if self.n_ctx < longest else "this model can't raise it with -c"
            )
            raise SessionError(
                f"the context holds {self.n_ctx} tokens, got {len(tokens)}{held}; shorten the prompt, {more}"
            )
        bad = next((t for t in tokens if not 0 <= t < self.decoder.hp.n_vocab), None)
        if bad is not None:
            raise SessionError(f"a token id must be 0 to {self.decoder.hp.n_vocab - 1}, got {bad}")

    @property
    def runs_ahead(self) -> bool:
        """likeliest() gains over eval() and a choice by the host: one asynchronous backend runs the whole step."""
        splits = self.executable(1, 1).splits
        return len(splits) == 1 and splits[0].backend.asynchronous

    def draws_ahead(self, sampling: SampleParams) -> bool:
        """drawn() gains likewise: the backend draws too."""
        return self.runs_ahead and len(self.chained(sampling).splits) == 1

    def likeliest(self, token: int, n: int) -> Iterator[int]:
        """Reads `token` and gives the likeliest next one, reads that, and so on: at most n, until the context is full.

        Steps are queued ahead of what the caller takes; those it never takes count as not read, so that a caller may
        stop anywhere. n_past is right whenever a token is given. Raises SessionError as eval() does.
        """
        return self._run_ahead(token, n)

    def drawn(self, token: int, n: int, sampling: SampleParams, uniforms: Uniforms) -> Iterator[int]:
        """The same with tokens that are drawn, each by one number taken from `uniforms`: those that a Sampler of these
        parameters chooses. What steps queued ahead will need is only looked at. !! Logits that are NaN raise nothing.
        """
        return self._run_ahead(token, n, sampling, uniforms)

    def _run_ahead(
        self, token: int, n: int, sampling: SampleParams | None = None, uniforms: Uniforms | None = None
    ) -> Iterator[int]:
        self._check([token])
        exe = self.chained(sampling)
        buffer, offset = exe.place(self._token)
        exe.write(self._token, np.array([token], np.int32))
        start, given, queued = self.n_past, 0, 0
        ahead = min(MAX_AHEAD, self.n_batch)
        most = min(n, self.n_ctx - start)
        answers: deque[Callable[[], npt.NDArray[np.uint8]]] = deque()
        try:
            while given < most:
                while queued < min(most, given + ahead):
                    write_places(exe, self.cache, np.array([[start + queued]]))
                    if uniforms is not None:
                        exe.write("inp_uniform", np.array([uniforms.peek(queued - given)]))
                    exe.run()
                    answers.append(buffer.read_later(offset, 4))
                    queued += 1
                answer = answers.popleft()().view(np.int32)
                given += 1
                self.n_past = start + given
                if uniforms is not None:
                    uniforms.take()
                yield int(answer[0])
        finally:  # what was queued beyond is forgotten: no later step sees those cells before they are written again
            for ring in self.cache.rings.values():
                ring.forget_from(self.n_past)

    def chained(self, sampling: SampleParams | None = None) -> Executable:
        """The prepared step that reads one token and writes the next one where the next step reads it: the likeliest,

        or one that is drawn."""
        if sampling not in self._chained:
            if self._token.buffer is None:
                home = for_cache(self.backends, self.cache.type_k)
                self._token.buffer = home.alloc(self._token.nbytes, Usage.STATE)
            graph = self.decoder.chained_graph(self._token, self.cache, sampling)
            exe = self._chained[sampling] = prepare(graph, self.backends)
            exe.write("inp_out_ids", np.zeros(1, np.int32))
            if len(self._chained) > MAX_CHAINED:
                self._chained.popitem(last=False)
        self._chained.move_to_end(sampling)
        return self._chained[sampling]

    def _step(self, ids: npt.NDArray[np.int32], first_row: int) -> Logits:
        n = len(ids)
        rows = np.arange(n - 1 if first_row < 0 else first_row, n, dtype=np.int32)
        exe = self.executable(n, len(rows))
        positions = np.arange(self.n_past, self.n_past + n, dtype=np.int64)
        exe.write("inp_tokens", ids)
        exe.write("inp_out_ids", rows)
        write_places(exe, self.cache, positions[None])
        try:
            exe.run()
        except KeyboardInterrupt:  # the tokens were not read, whatever cells they reached
            for ring in self.cache.rings.values():
                ring.forget_from(self.n_past)
            raise
        self.n_past += n
        logits = exe.host_array("result_output")
        return np.asarray(exe.read("result_output") if logits is None else logits, np.float32).reshape(len(rows), -1)


def write_places(exe: Executable, cache: KVCache, positions: npt.NDArray[np.int64]) -> None:
    """Writes where the next tokens stand, int64 [n_seq, n]: their positions and cells, and what all cells then hold."""
    exe.write_all(places(cache, positions))


def places(cache: KVCache, positions: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
    """Those values by the inputs' names; the cells are noted as taken."""
    values: dict[str, npt.NDArray[np.generic]] = {"inp_pos": positions}
    for kind, ring in cache.rings.items():
        suffix = "_swa" if kind == "swa" else ""
        values[f"attn_inp_k_idxs{suffix}"] = ring.take(positions)
        values[f"attn_inp_kq_cells{suffix}"] = ring.positions
    return values


def _batches(first: int, n: int, without: int, with_logits: int) -> Iterator[tuple[int, int]]:
    """Where batches start and stop: at most `without` tokens before index `first`, `with_logits` from there on."""
    edges = [*range(0, first, without), *range(first, n, with_logits), n]
    yield from zip(edges, edges[1:])
