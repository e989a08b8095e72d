"""Warm-up: what a PagedEngine's first steps of each size would do, all of it before anybody waits: preparing graphs,
compiling kernels (by several threads), loading them and capturing steps."""

from __future__ import annotations

import os

from graphrt.models.continuous_batch import ContinuousBatch
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.paging.ladder import block_rung, rung
from graphrt.models.sampling import Uniforms
from graphrt.models.sampling_device import CANDIDATES, Drawn
from graphrt.ops import RowSettings, SampleParams
from graphrt.progress import task

#: A step is compiled by its first run, and captured by its second.
RUNS = 3
#: Threads that compile, at most: each takes some hundred megabytes.
_MOST_THREADS = 16


def rungs(low: int, high: int) -> list[int]:
    """Sizes of steps that read low to high tokens."""
    return sorted({rung(n, high) for n in range(low, high + 1)})


def warm_up(engine: PagedEngine) -> None:
    """Has an engine whose sequences are empty ready for any number of single tokens, chosen in the usual ways, and for
    prompts; it is empty afterwards. Of steps that read prompts beside all other sequences, and of those with adapters,
    kernels are compiled, and no more. Nothing is left to do where its backend doesn't queue its work."""
    if not engine.home.asynchronous or not engine.runs_ahead:
        return
    blocks = block_rung(1, engine.cache.sizes.max_blocks)
    single = [(n, n) for n in reversed(rungs(1, engine.n_seq))]
    prompts = [(n, 1) for n in reversed(rungs(2, engine.most_tokens))]
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    beside = [(n, engine.n_seq) for n in reversed(rungs(engine.n_seq + 1, engine.most_tokens))]
    adapted = [(sizes, 0, True) for sizes in (beside, single)] if engine.adapters is not None else []
    ways = [*adapted, (beside, 0, False), (single, CANDIDATES[0], False), (single, 0, False), (prompts, 0, False)]
    n_steps = sum(len(sizes) for sizes, *_ in ways)
    with task("compiling kernels", n_steps, "steps") as advance, engine.home.compiling(threads):
        for sizes, most, has_adapters in ways:
            for n_tokens, n_seq in sizes:
                size = engine.size_of(n_tokens, n_seq, blocks)
                engine.choosing(size, most, adapted=has_adapters).exe.compile_ahead()
                advance()
    drawn = RowSettings.of(SampleParams())
    with task("warming up", 2 * len(single), "steps") as advance:
        for settings in (RowSettings(), drawn):
            for n, _ in single:
                _run(engine, n, settings)
                advance()
    _run(engine, 1, RowSettings(), min(engine.n_batch, engine.n_ctx - RUNS - 1))
    engine.reset()


def _run(engine: PagedEngine, n: int, settings: RowSettings, n_prompt: int = 1) -> None:
    """Some steps of n sequences."""
    with ContinuousBatch(engine) as batch:
        for seq in range(n):
            uniforms = Uniforms(seq) if settings.temp > 0 else None
            batch.add(seq, [0] * n_prompt, min(RUNS, engine.n_ctx - n_prompt), Drawn(settings, uniforms))
        while batch.going:
            batch.step()
    for seq in range(n):
        engine.free(seq)
