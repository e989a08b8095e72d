"""Warm-up: what a PagedEngine's first steps of each size would do, all of it before anybody waits: preparing graphs,
compiling kernels (by several threads), loading them and capturing steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from graphrt.models.continuous_batch import ContinuousBatch
from graphrt.models.engine_paged import PagedEngine
from graphrt.models.guesses import MOST_ROWS
from graphrt.models.paged_steps import PagedSteps
from graphrt.models.paging.ladder import block_rung, coarse_rung, rung
from graphrt.models.sampling import Uniforms
from graphrt.models.sampling_device import CANDIDATES, Drawn
from graphrt.models.step_paged import StepSize
from graphrt.ops import RowSettings, SampleParams
from graphrt.progress import task

#: A step is compiled by its first run, and captured by its second.
RUNS = 3
#: Seconds after which no more sizes of steps that read prompts are begun: they are captured when they first come.
SECONDS = 20.0
#: Of texts whose likeliest tokens are taken after an edit, such as those that never end: a way of its own of steps that
#: choose themselves.
EDITED = RowSettings(n_biases=1)
#: Threads that compile, at most: each takes some hundred megabytes.
_MOST_THREADS = 16


def rungs(low: int, high: int) -> list[int]:
    """Sizes of steps that read low to high tokens."""
    return sorted({rung(n, high) for n in range(low, high + 1)})


def warm_up(
    engine: PagedEngine,
    *,
    alone: bool = False,
    most_guessed: int = 0,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Has an engine whose sequences are empty ready for any number of single tokens, chosen in the usual ways, and for
    prompts; it is empty afterwards. Steps that read prompts, beside all other sequences and by themselves, and those of
    sequences that share pages are captured for so many seconds, the largest first; of those with adapters kernels are
    compiled, and no more. alone: of steps that tell nothing of other sequences; most_guessed: tokens of a sequence that
    are guessed at a time, whose steps are captured too. Nothing is left to do where its backend
    doesn't queue its work."""
    if not engine.home.asynchronous or not engine.runs_ahead:
        return
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    compile_ahead(engine, ways_of(engine, alone=alone, most_guessed=most_guessed), threads)
    drawn, end = RowSettings.of(SampleParams()), clock() + seconds
    if alone:
        for settings in (RowSettings(), drawn, *([EDITED] if engine.chooses_itself(engine.own_size()) else [])):
            _run(engine, engine.n_seq, settings, alone=True)
        for n in prompt_sizes(engine):
            if clock() < end:
                _run(engine, 1, drawn, min(n, engine.n_ctx - RUNS - 1), alone=True)
        engine.reset()
        return
    sizes = sizes_of(engine)
    with task("warming up", 2 * len(sizes.single), "steps") as advance:
        for settings in (RowSettings(), drawn):
            for size in sizes.single:
                _run(engine, size.n_seq, settings)
                advance()
        for size in filter(engine.chooses_itself, sizes.single):
            _run(engine, size.n_seq, EDITED)
            _run(engine, size.n_seq, drawn, waits=True)
    for settings in (RowSettings(), drawn):  # all of them: one that comes later keeps texts waiting
        for size in guessed_sizes(engine, most_guessed):
            _run_size(engine, size, settings)
    _run(engine, 1, RowSettings(), min(engine.n_batch, engine.n_ctx - RUNS - 1))
    engine.reset()
    end = clock() + seconds
    late = [*sizes.beside, *sizes.prompts, *sizes.shared]
    with task("warming up for prompts", len(late), "steps") as advance:
        for size in late:
            if clock() >= end:
                break
            _run_size(engine, size, drawn)
            advance()
    engine.reset()


#: The steps of a kind that are compiled: their size, the candidates of their choice, 0 for the likeliest, and whether
#: they have adapters.
Way = tuple[StepSize, int, bool]


def ways_of(engine: PagedEngine, *, alone: bool = False, most_guessed: int = 0) -> list[Way]:
    """The steps that warm_up() compiles."""
    most = CANDIDATES[0]
    if alone:
        return [(engine.own_size(n), most, False) for n in (0, *prompt_sizes(engine))] + [(engine.own_size(), 0, False)]
    sizes = sizes_of(engine)
    adapted = [(each, 0, True) for each in (sizes.beside, sizes.single)] if engine.adapters is not None else []
    listed = [*adapted, (sizes.shared, most, False), (sizes.prompts, most, False), (sizes.beside, most, False)]
    guessed = guessed_sizes(engine, most_guessed)
    listed += [(each, n, False) for each in (guessed, sizes.single) for n in (most, 0)]
    return [(size, n, has_adapters) for each, n, has_adapters in listed for size in each]


def prompt_sizes(engine: PagedSteps) -> list[int]:
    """Tokens of pieces of a prompt that are steps of their own, largest first."""
    return rungs(1, engine.n_batch)[::-1]


def compile_ahead(engine: PagedEngine, ways: Sequence[Way], threads: int) -> None:
    """Compiles the kernels of steps by so many threads."""
    with task("compiling kernels", len(ways), "steps") as advance, engine.home.compiling(threads):
        for size, n_candidates, has_adapters in ways:
            itself = engine.chooses_itself(size)
            step = engine.choosing(size, n_candidates, adapted=has_adapters, itself=itself)
            step.reads.exe.compile_ahead()
            if step.chooser is not None:
                step.chooser.exe.compile_ahead()
            advance()


class Sizes(NamedTuple):
    """Of the steps of short texts, largest first. single: of single tokens; beside: that read prompts beside as many
    other sequences as there may be, and the largest beside few; prompts: that read one prompt; shared: a few of
    sequences that begin with the same pages, whose kernels are others."""

    single: list[StepSize]
    beside: list[StepSize]
    prompts: list[StepSize]
    shared: list[StepSize]


def sizes_of(engine: PagedSteps) -> Sizes:
    """Those that an engine's steps have most."""
    blocks = block_rung(1, engine.cache.sizes.max_blocks)

    def made(n_seq: int, sizes: Sequence[int]) -> list[StepSize]:
        return [engine.size_of(n, n_seq or n, blocks) for n in reversed(sizes)]

    fewer = max(n for n in range(1, engine.n_seq + 1) if n == 1 or coarse_rung(n, engine.n_seq) < engine.n_seq)
    single = made(0, rungs(1, engine.n_seq))
    every = rungs(2, engine.most_tokens)
    beside = made(engine.n_seq, [n for n in every if n > fewer])
    if fewer > 1:  # the first steps of texts that all come at once
        beside += made(fewer, [n for n in every[-2:] if n > fewer])
    prompts = made(1, every)
    shared = []
    if engine.home.reads_shared_once and engine.n_seq > 1:
        several = [size for size in single if size.n_seq > 1]
        shared = [size._replace(n_groups=1) for size in (*several, *beside)]
    return Sizes(single, beside, prompts, shared)


def guessed_sizes(engine: PagedSteps, most_guessed: int) -> list[StepSize]:
    """Those of steps with up to so many guesses of each short text, of one text and of several."""
    if not most_guessed:
        return []
    blocks, found = block_rung(1, engine.cache.sizes.max_blocks), list[StepSize]()
    for n_seq in sorted({coarse_rung(n, engine.n_seq) for n in range(1, engine.n_seq + 1)}):
        high = min(n_seq * (1 + most_guessed), MOST_ROWS, engine.most_tokens)
        for n in sorted({rung(n, engine.most_tokens) for n in range(min(n_seq, 2) + 1, high + 1)}):
            found.append(StepSize(n, n_seq, n, blocks))
    return found


def _run_size(engine: PagedEngine, size: StepSize, settings: RowSettings) -> None:
    """Runs a step of this size, which reads a prompt of two tokens, until it is captured."""
    for seq in range(RUNS - 1):
        with ContinuousBatch(engine, size=size) as batch:
            batch.add(0, [seq, seq], 1, _drawn(settings, 0))
            batch.step()
        engine.free(0)


def _drawn(settings: RowSettings, seed: int, *, waits: bool = False) -> Drawn:
    """waits: for what the host finds out, which is nothing."""
    uniforms, biases = Uniforms(seed) if settings.temp > 0 else None, ((0, 0.0),) * int(settings.n_biases)
    return Drawn(settings, uniforms, biases, costs=(lambda _: {}) if waits else None)


def _run(
    engine: PagedEngine, n: int, settings: RowSettings, n_prompt: int = 1, *, alone: bool = False, waits: bool = False
) -> None:
    """Some steps of n sequences."""
    with ContinuousBatch(engine, alone=alone) as batch:
        for seq in range(n):
            how = _drawn(settings, seq, waits=waits)
            batch.add(seq, [0] * n_prompt, min(RUNS, engine.n_ctx - n_prompt), how)
        while batch.going:
            batch.step()
    for seq in range(n):
        engine.free(seq)
