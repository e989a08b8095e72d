"""PagedSteps: how the steps of an engine over pages are chosen, filled and run; engine_paged.py is the engine."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from graphrt.backend import Backend, Usage
from graphrt.backends.cpu import threads
from graphrt.errors import SessionError
from graphrt.execute import Executable, prepare
from graphrt.graph import Graph
from graphrt.models.adapters import AdapterTable
from graphrt.models.cache_paged import PagedCache, page_sizes
from graphrt.models.engine import MAX_AHEAD, NO_LOGITS, AnyEngine, Ids, SessionOptions
from graphrt.models.hparams import HParams
from graphrt.models.paging.ladder import block_rung, coarse_rung, rung
from graphrt.models.paging.prefixes import Prefixes
from graphrt.models.recent import Recent
from graphrt.models.sampling_device import SampleTables, candidates
from graphrt.models.step import Logits
from graphrt.models.step_chosen import Chooser, ChosenStep
from graphrt.models.step_paged import PagedStep, StepSize
from graphrt.ops import RowSettings, SampleParams
from graphrt.tensor import Tensor, new_tensor

#: Prepared steps that an engine keeps, and their bytes: a server's of 256 texts are 16 of single tokens and 15 that
#: read prompts beside them, in two ways to choose, again with what texts share, and those that read one prompt (22).
#: Of an 8B model on a GPU each has 200 MiB at most.
MAX_STEPS, MAX_STEP_BYTES = 192, 12 << 30

#: Tokens of a step up to which it chooses the next ones itself. (H200, a step of an 8B model's one text: by one graph,
#: with one copy of inputs, 568 tokens a second, by two 561.) A larger step leaves logits to a second graph, so that it
#: is prepared and captured once for all the ways in which its texts' tokens may be chosen.
CHOSEN_WITHIN = 1

#: Pieces of prompts, and their tokens, that a step which tells nothing of others has room for together, however few
#: there are: a row's bits may depend on the size of its step. (H200, prompts of 128 tokens of an 8B model, reckoned: a
#: step for two takes 10.9 ms, one for each alone 6.5; 512 tokens take 19.5, too long for a piece that is alone.)
MOST_SLOTS, ALONE_TOKENS = 4, 256

_NOT_TOLD = Prefixes(reason="the backend reads what sequences share for each of them")


class AnyBatch(Protocol):
    """Sequences that generate together. going: those that have tokens to come; close(): ends all."""

    @property
    def going(self) -> list[int]: ...

    def close(self) -> None: ...


class StepPlan(NamedTuple):
    """Which prepared step reads some tokens, and what it reads once of what sequences share."""

    size: StepSize
    prefixes: Prefixes


def new_cache(
    hp: HParams, backend: Backend, options: SessionOptions, n_seq: int, held: HParams | None = None
) -> PagedCache:
    """The cache of an engine with these options, of which no default stands for another number. held: what of hp's
    layers it is for, None for all: pages are counted as if it had them all, so that all stages of a pipeline have the
    same ones. Raises SessionError."""
    n_new = options.n_batch + (1 + MAX_AHEAD) * n_seq
    sizes = page_sizes(hp, hp.windowed, options.n_ctx, n_new, n_seq, options.page, options.n_pages)
    types = options.type_k, options.type_v
    held = hp if held is None else held
    return PagedCache(held, backend, held.windowed, options.n_ctx, types, sizes, n_seq=n_seq, share=options.share)


class PagedSteps(AnyEngine[PagedCache, PagedStep]):
    """The steps of an engine over pages. A step reads up to n_batch tokens of prompts and one token of each other
    sequence. Its graph is one of a ladder of sizes, the rest of which belongs to nobody."""

    most_prepared, most_prepared_bytes = MAX_STEPS, MAX_STEP_BYTES
    #: The batch of sequences that generate, while there is one.
    batch: AnyBatch | None = None

    def _most_at_once(self, n_batch: int) -> int:
        return n_batch

    def _new_cache(self) -> PagedCache:
        made = new_cache(self.decoder.hp, self.home, self.options, self.n_seq, self.decoder.cached[0])
        for seq in range(self.n_seq if self.decoder.adapter_key else 0):
            made.pool.put_below(seq, self.decoder.adapter_key)
        return made

    def adapter_key(self, seq: int) -> bytes:
        return self.cache.pool.key(seq)

    @property
    def most_tokens(self) -> int:
        """Of a step."""
        return self.n_batch + self.n_seq

    # ---- prepared steps ----

    def prepared(self, size: StepSize, *, adapted: bool = False, quiet: bool = False) -> PagedStep:
        """The step of up to so many tokens and so on that gives logits; made on first use. adapted: sequences may have
        adapters; quiet: as step() has it."""

        def make() -> PagedStep:
            inputs = self.decoder.paged_inputs(size, self.cache, self._gates(adapted))
            end = self.decoder.passed(inputs) if quiet else self.decoder.result(inputs)
            return PagedStep(inputs, prepare(Graph(end), self.backends))

        return self._prepared.made((size, adapted, "quiet") if quiet else (size, adapted), make)

    def choosing(self, size: StepSize, most: int = 0, *, adapted: bool = False, itself: bool = False) -> ChosenStep:
        """The same that finds its tokens on the board and leaves the next ones there, the likeliest or, with `most`,
        those that the sequences' tables say, of so many candidates. itself: by the graph that reads the tokens."""
        gates, keep_logits = self._gates(adapted), not self.home.asynchronous
        tables, decoder = self.tables if most else None, self.decoder
        if itself:

            def make_both() -> PagedStep:
                inputs, graph = decoder.paged_chosen(
                    self.board, size, self.cache, gates, tables, most, keep_logits=keep_logits
                )
                return PagedStep(inputs, prepare(graph, self.backends))

            return ChosenStep(self._prepared.made((size, adapted, "chosen", most), make_both), None)
        n, scores = size.n_outputs, self.scores(size.n_outputs)

        def make() -> PagedStep:
            made = decoder.paged_scored(self.board, size, self.cache, scores, gates, keep_logits=keep_logits)
            return PagedStep(made[0], prepare(made[1], self.backends))

        def make_chooser() -> Chooser:
            rows, graph = decoder.choices(scores, n, self.board, tables, most)
            return Chooser(rows, prepare(graph, self.backends))

        reads = self._prepared.made((size, adapted, "board"), make)
        return ChosenStep(reads, self._choosers.made((n, most), make_chooser))

    def chooses_itself(self, size: StepSize) -> bool:
        """Whether a step of this size that waits for nothing chooses the next tokens itself."""
        return size.n_tokens <= CHOSEN_WITHIN

    @cached_property
    def _choosers(self) -> Recent[Hashable, Chooser]:
        return Recent(MAX_STEPS)

    def scores(self, n: int) -> Tensor:
        """f32 [n_vocab, at least n], where a step leaves logits to be chosen by: one leaf for a row of each sequence,
        and another one, made when it is first needed, for a row of each token."""
        rows = self.n_seq if n <= self.n_seq else self.most_tokens
        if rows not in self._scores:
            leaf = new_tensor("f32", self.decoder.hp.n_vocab, rows, name="scores_board")
            leaf.buffer = self.home.alloc(leaf.nbytes, Usage.STATE)
            self._scores[rows] = leaf
        return self._scores[rows]

    @cached_property
    def _scores(self) -> dict[int, Tensor]:
        return {}

    def _gates(self, adapted: bool) -> Tensor | None:
        return self.adapters.table if adapted and self.adapters is not None else None

    @cached_property
    def adapters(self) -> AdapterTable | None:
        """Which adapters sequences have, None of a model without any; made on first use."""
        made = self.decoder.adapters
        return None if made is None else AdapterTable(made, self.n_seq, self.home)

    def is_adapted(self, seqs: Iterable[int]) -> bool:
        """Whether a step of these sequences needs adapters: one without is the model's own."""
        return self.adapters is not None and self.adapters.any_of(seqs)

    @cached_property
    def tables(self) -> SampleTables:
        """What the sequences' tokens are chosen by on a device; made on first use."""
        return SampleTables(self.decoder.hp.n_vocab, self.n_seq, self.home)

    @cached_property
    def board(self) -> Tensor:
        """i32 [1, n_seq + 2 * most_tokens]: the token that a step has chosen for each sequence; from n_seq on those
        after every token of a step; and from given_at on those that the host gives the next."""
        leaf = new_tensor("i32", 1, self.n_seq + 2 * self.most_tokens, name="token_board")
        leaf.buffer = self.home.alloc(leaf.nbytes, Usage.STATE)
        return leaf

    @property
    def given_at(self) -> int:
        """The board's first row of tokens that the host gives."""
        return self.n_seq + self.most_tokens

    def plan(self, new: Mapping[int, int], *, every: bool = False, size: StepSize | None = None) -> StepPlan:
        """How a step reads so many last tokens of these sequences, which have cells. Sizes are rungs, so that there are
        few. Where each sequence has one token, tokens, sequences and wanted rows are one rung; else sequences are of a
        coarse ladder, whose empty ones cost a row of logits each. A table has room for the longest sequence's pages,
        in powers of two, or of four where prompts are read. size: of the step, where it is known; then nothing is read
        once for several."""
        if size is not None:
            return StepPlan(size, _NOT_TOLD)
        longest = max(self.cache.pool.of(seq).reserved for seq in new)
        shared = self.cache.prefixes(new) if self.home.reads_shared_once else _NOT_TOLD
        n, by = sum(new.values()), 4 if sum(new.values()) > len(new) else 2
        blocks = block_rung(-(-longest // self.cache.sizes.page), self.cache.sizes.max_blocks, by)
        size = self.size_of(n, len(new), blocks, every=every)
        n_groups = coarse_rung(len(shared.groups), self.n_seq) if shared.groups else 0
        return StepPlan(size._replace(n_groups=n_groups), shared)

    def largest_size(self, n_tokens: int, n_seq: int, *, every: bool = False) -> StepSize:
        """That of a step of sequences that may be as long as the context and share nothing."""
        return self.size_of(n_tokens, n_seq, self.cache.sizes.max_blocks, every=every)

    def size_of(self, n_tokens: int, n_seq: int, n_blocks: int, *, every: bool = False) -> StepSize:
        """That of a step of so many tokens of so many sequences, whose tables have so many entries: rungs."""
        n = rung(n_tokens, self.most_tokens)
        if n_tokens == n_seq:
            n = min(n, self.n_seq)
            return StepSize(n, n, n, n_blocks)
        seqs = coarse_rung(n_seq, self.n_seq)
        return StepSize(n, seqs, n if every else seqs, n_blocks)

    def own_size(self, n_tokens: int = 0) -> StepSize:
        """That of a step whose size tells nothing of other sequences: of n_tokens tokens of one, beside which there is
        room for own_slots() others of as many, or with 0 of a single token of each of however many."""
        if n_tokens:
            n, slots = rung(n_tokens, self.n_batch), self.own_slots(n_tokens)
            return StepSize(slots * n, slots, slots, self.cache.sizes.max_blocks)
        return StepSize(self.n_seq, self.n_seq, self.n_seq, self.cache.sizes.max_blocks)

    def own_slots(self, n_tokens: int) -> int:
        """Sequences that such a step of n_tokens tokens has room for, whether they are there or not."""
        most = min(ALONE_TOKENS, self.n_batch) // rung(n_tokens, self.n_batch)
        return max(1, min(self.n_seq, MOST_SLOTS, most))

    def arranged(self, seqs: Sequence[int]) -> list[int]:
        """The order in which a step reads sequences: that given, unless some share what can be read once."""
        return self.cache.arranged(seqs) if self.home.reads_shared_once else list(seqs)

    def executable(self, n: int, n_outputs: int) -> Executable:
        return self.prepared(self.largest_size(n * self.n_seq, self.n_seq, every=n_outputs > self.n_seq)).exe

    def chained(self, sampling: SampleParams | None = None) -> PagedStep:
        return self._chained(sampling).reads

    def _chained(self, sampling: SampleParams | None) -> ChosenStep:
        most = candidates([RowSettings.of(sampling)]) if sampling is not None else 0
        size, adapted = self.largest_size(self.n_seq, self.n_seq), self.is_adapted(range(self.n_seq))
        return self.choosing(size, most, adapted=adapted, itself=self.chooses_itself(size))

    def draws_ahead(self, sampling: SampleParams) -> bool:
        chooser = self._chained(sampling).chooser
        return super().draws_ahead(sampling) and (chooser is None or len(chooser.exe.splits) == 1)

    # ---- reading ----

    def after_what_is_known(self, given: Mapping[int, Ids]) -> dict[int, Ids]:
        """What is to be read of the tokens after empty sequences have taken over what the tree has of theirs. Raises
        CacheFullError where there are too few pages for all; then nothing has changed."""
        pool, left = self.cache.pool, dict(given)
        with self.emptied_where_it_fails() as began:
            for seq, ids in given.items():
                if not self.lengths[seq]:
                    began.append(seq)
                    self.lengths[seq] = n = pool.adopt(seq, ids.tolist())
                    left[seq] = ids[n:]
            pool.check_room({seq: len(ids) for seq, ids in left.items()}, windowed=False)
        return left

    @contextmanager
    def emptied_where_it_fails(self) -> Iterator[list[int]]:
        """The sequences that are put into the list are empty again where what is done inside fails or is
        interrupted."""
        began: list[int] = []
        done = False
        try:
            yield began
            done = True
        finally:
            if not done:
                for seq in began:
                    self.cut(seq, 0)

    def step(
        self, part: Mapping[int, Ids], *, every: bool = False, quiet: bool = False, size: StepSize | None = None
    ) -> Logits:
        """One step: up to most_tokens tokens of any sequences, any number of each. size: of its graph, in which they
        have room; unless told, the smallest. The logits after each one's last token, f32 [sequences, n_vocab], or after
        every token, one sequence after the other; quiet: of a pipeline, none are wanted, so that no stage waits for the
        last one, and the result is empty. Raises CacheFullError; then nothing has changed."""
        order = list(part) if every else self.arranged(list(part))
        new = {seq: len(part[seq]) for seq in order}
        try:
            with threads.using(self.n_threads_batch if max(new.values()) > 1 else 0):
                prepared = self.feed({seq: part[seq] for seq in order}, every=every, quiet=quiet, size=size)
                prepared.exe.run()
            for seq, ids in part.items():
                self.cache.pool.commit(seq, ids.tolist())
                self.lengths[seq] += len(ids)
        finally:  # nothing stays of a step that was interrupted
            self.forget(new)
        if quiet:
            return NO_LOGITS
        logits = prepared.logits()[: sum(new.values()) if every else len(new)]
        return logits if order == list(part) else logits[[order.index(seq) for seq in part]]

    def feed(
        self, part: Mapping[int, Ids], *, every: bool = False, quiet: bool = False, size: StepSize | None = None
    ) -> PagedStep:
        """A step with its inputs filled, ready to run; its tokens have cells and don't count as read yet."""
        new = {seq: len(ids) for seq, ids in part.items()}
        n = sum(new.values())
        if n > self.most_tokens:
            raise SessionError(
                f"a step reads at most {self.most_tokens} tokens, n_batch and one of each sequence, got {n}; read them "
                f"in several"
            )
        self.cache.append(new)
        plan = self.plan(new, every=every, size=size)
        prepared = self.prepared(plan.size, adapted=self.is_adapted(new), quiet=quiet)
        ends = np.cumsum(list(new.values()), dtype=np.int32)
        rows = np.arange(n, dtype=np.int32) if every else ends - 1
        ids = np.concatenate([np.asarray(ids, np.int32) for ids in part.values()])
        prepared.write(new, ids, rows, prefixes=plan.prefixes.groups)
        return prepared

    def begin(self, batch: AnyBatch) -> None:
        """A batch of this engine's sequences generates from now on. Raises SessionError where another one does."""
        if self.batch is not None:
            raise SessionError("an engine generates one batch at a time, and has one that goes on; close that")
        self.batch = batch

    def end(self, batch: AnyBatch) -> None:
        """It does no more."""
        if self.batch is batch:
            self.batch = None

    def forget(self, seqs: Iterable[int]) -> None:
        """Nothing stays of these sequences' tokens beyond `lengths`."""
        for seq in seqs:
            n = int(self.lengths[seq])
            if self.cache.pool.of(seq).reserved > n:
                self.cache.pool.truncate(seq, n)

    def cut(self, seq: int, n: int) -> int:
        """Leaves a sequence its first n tokens, as PagePool.truncate() does."""
        self.lengths[seq] = self.cache.pool.truncate(seq, n)
        return int(self.lengths[seq])

    def _check(self, seq: int, ids: Sequence[int] | Ids) -> None:
        self.known(seq)
        super()._check(seq, ids)

    def known(self, seq: int) -> int:
        """The sequence's number. Raises SessionError for one that is none, or that generates in a batch."""
        if not 0 <= seq < self.n_seq:
            raise SessionError(f"a sequence must be 0 to {self.n_seq - 1}, got {seq}")
        if self.batch is not None and seq in self.batch.going:
            raise SessionError(f"sequence {seq} generates in a batch; end it there first (ContinuousBatch.end())")
        return seq
