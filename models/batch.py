"""Batch: several sequences read in one graph, equally many tokens of each at a time."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from graphrt.backend import Backend, Usage
from graphrt.errors import SessionError
from graphrt.execute import Executable, prepare
from graphrt.models.arch.skeleton import Decoder
from graphrt.models.cache import KVCache
from graphrt.models.placement import for_cache
from graphrt.models.session import MAX_AHEAD, MAX_PREPARED, Logits, SessionOptions, check_options, write_places
from graphrt.tensor import new_tensor

Ids = npt.NDArray[np.int32]


class Batch:
    """The state of n_seq sequences. n_past: tokens in the cache, int64 [n_seq].

    options: as a session's; n_batch bounds the tokens of all sequences together. Raises SessionError for n_seq under 1.
    """

    def __init__(self, decoder: Decoder, backends: Sequence[Backend], n_seq: int, options: SessionOptions) -> None:
        if n_seq < 1:
            raise SessionError(f"a batch must have at least one sequence, got {n_seq}")
        hp = decoder.hp
        self.decoder = decoder
        self.backends = list(backends)
        self.n_seq = n_seq
        self.n_ctx, n_batch = check_options(options, hp)
        self.n_batch = max(1, n_batch // n_seq)
        self.home = for_cache(self.backends, options.type_k)
        types = options.type_k, options.type_v
        self.cache = KVCache(hp, self.home, hp.windowed, self.n_ctx, self.n_batch, *types, n_seq=n_seq)
        self.n_past = np.zeros(n_seq, np.int64)
        self._prepared: OrderedDict[int, Executable] = OrderedDict()
        self._chained: Executable | None = None
        self._tokens = new_tensor("i32", n_seq, name="inp_tokens")

    def reset(self) -> None:
        """Forgets the sequences; what was prepared stays."""
        self.cache.clear()
        self.n_past[:] = 0

    def executable(self, n: int) -> Executable:
        """The prepared graph for n tokens of each sequence and the logits after each one's last; made on first use."""
        if n not in self._prepared:
            self._prepared[n] = prepare(self.decoder.graph(n * self.n_seq, self.n_seq, self.cache), self.backends)
            if len(self._prepared) > MAX_PREPARED:
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(n)
        return self._prepared[n]

    def eval(self, ids: Ids) -> Logits:
        """Reads tokens, int32 [n_seq, n], and returns the logits after each sequence's last one: f32 [n_seq, n_vocab].

        Raises SessionError when they are none, unknown, or do not fit the context.
        """
        self._check(ids)
        logits: Logits | None = None
        for start in range(0, ids.shape[1], self.n_batch):
            logits = self._step(ids[:, start : start + self.n_batch])
        assert logits is not None
        return logits

    def likeliest(self, tokens: Ids, n: int) -> Iterator[Ids]:
        """Reads a token of each sequence, int32 [n_seq], gives the likeliest next ones, reads those, and so on.

        Steps are queued ahead of what the caller takes, those it never takes count as not read: as Session.likeliest().
        """
        self._check(tokens[:, None])
        exe = self.chained()
        buffer, offset = exe.place(self._tokens)
        exe.write(self._tokens, tokens.astype(np.int32))
        start, given, queued = self.n_past.copy(), 0, 0
        most = min(n, int(self.n_ctx - start.max()))
        answers: deque[Callable[[], npt.NDArray[np.uint8]]] = deque()
        try:
            while given < most:
                while queued < min(most, given + min(MAX_AHEAD, self.n_batch)):
                    write_places(exe, self.cache, (start + queued)[:, None])
                    exe.run()
                    answers.append(buffer.read_later(offset, 4 * self.n_seq))
                    queued += 1
                answer = answers.popleft()().view(np.int32)
                given += 1
                self.n_past[:] = start + given
                yield answer
        finally:
            self._forget()

    def _forget(self) -> None:
        for ring in self.cache.rings.values():
            for seq, position in enumerate(self.n_past):
                ring.forget_from(int(position), seq)

    def chained(self) -> Executable:
        """The prepared step that reads a token of each sequence and writes the likeliest next ones in their place."""
        if self._chained is None:
            self._tokens.buffer = self.home.alloc(self._tokens.nbytes, Usage.STATE)
            self._chained = prepare(self.decoder.chained_graph(self._tokens, self.cache), self.backends)
            self._chained.write("inp_out_ids", np.arange(self.n_seq, dtype=np.int32))
        return self._chained

    def _check(self, ids: Ids) -> None:
        if ids.ndim != 2 or ids.shape[0] != self.n_seq or not ids.shape[1]:
            raise SessionError(f"tokens must be [{self.n_seq}, 1 or more], one row a sequence, got {list(ids.shape)}")
        if int(self.n_past.max()) + ids.shape[1] > self.n_ctx:
            raise SessionError(
                f"the context holds {self.n_ctx} tokens of each sequence, got {ids.shape[1]} after "
                f"{int(self.n_past.max())} that the cache holds; raise it with -c"
            )
        bad = ids[(ids < 0) | (ids >= self.decoder.hp.n_vocab)]
        if bad.size:
            raise SessionError(f"a token id must be 0 to {self.decoder.hp.n_vocab - 1}, got {int(bad[0])}")

    def _step(self, ids: Ids) -> Logits:
        n = ids.shape[1]
        exe = self.executable(n)
        exe.write("inp_tokens", np.ascontiguousarray(ids, np.int32))
        exe.write("inp_out_ids", (np.arange(self.n_seq) * n + n - 1).astype(np.int32))
        write_places(exe, self.cache, self.n_past[:, None] + np.arange(n))
        try:
            exe.run()
        except KeyboardInterrupt:
            self._forget()
            raise
        self.n_past += n
        logits = exe.host_array("result_output")
        found = exe.read("result_output") if logits is None else logits
        return np.asarray(found, np.float32).reshape(self.n_seq, -1)
