"""On a GPU: each launch of a step behind one that is slow, and that has the right values in place at its end only.

What a launch must not read yet is poisoned meanwhile, and what it must not write yet is written over.
"""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    tiny,
    tiny_archs,  # noqa: F401  (whose models are among tiny.py's others)
)

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from graphrt import get_backend
from graphrt.backends.triton import device
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import span_of
from graphrt.models.engine import SessionOptions
from graphrt.models.model import load

ALIGNMENT = 256
#: How long the slow launch takes: far longer than what follows needs to begin.
NANOSECONDS = 2_000_000
#: Kernels that take no place in memory from memory, so that they may be let read poison.
PLAIN = {"dense_gemv", "packed_gemv", "plain_head_gemv", "packed_head_gemv", "add_norm_rows"}


@triton.jit
def right_in_the_end(p_memory, p_right, n, NANOSECONDS: tl.constexpr, BLOCK: tl.constexpr):
    """Fills n words with NaN, lets the next launch begin, and after a time copies the right ones there."""
    gdc_wait()
    programs = tl.num_programs(0)
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), programs):
        i = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_memory + i, tl.full([BLOCK], -1, tl.int32), mask=i < n)
    gdc_launch_dependents()
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    end = now + NANOSECONDS
    while now < end:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), programs):
        i = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_memory + i, tl.load(p_right + i, mask=i < n), mask=i < n)


def moved(launch: Launch) -> tuple[Launch, torch.Tensor]:
    """The launch with all that it touches only after waiting in one memory, int32; and that memory."""
    late = {a.name: a.memory for a in launch.accesses() if not a.early and a.memory.numel()}
    storages = {
        span_of(t)[0]: torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        for t in late.values()
    }
    regions: list[tuple[int, int, int]] = []  # what overlaps stays together
    for storage, start, stop in sorted(span_of(t) for t in late.values()):
        if regions and regions[-1][0] == storage and start < regions[-1][2]:
            regions[-1] = (storage, regions[-1][1], max(stop, regions[-1][2]))
        else:
            regions.append((storage, start // ALIGNMENT * ALIGNMENT, stop))
    pieces = [torch.nn.functional.pad(storages[s][a:b], (0, -(b - a) % ALIGNMENT)) for s, a, b in regions]
    arena = torch.cat(pieces)
    starts = [sum(piece.numel() for piece in pieces[:i]) for i in range(len(pieces))]
    args = dict(launch.args)
    for name, t in late.items():
        storage, start, stop = span_of(t)
        at = next(p + start - a for p, (s, a, b) in zip(starts, regions) if s == storage and a <= start and stop <= b)
        there = arena[at : at + stop - start].view(t.dtype).as_strided(t.shape, t.stride())
        parameter, _, field = name.partition(".")
        if field:
            args[parameter] = args[parameter]._replace(**{field: there})
        else:
            args[name] = replace(args[name], base=there) if hasattr(args[name], "base") else there
    return Launch(launch.kernel, launch.grid, args, launch.options, launch.smaller), arena.view(torch.int32)


def after_poison(launch: Launch, memory: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """All memory after the slow launch and this one."""
    memory.copy_(right)
    programs = torch.cuda.get_device_properties(memory.device).multi_processor_count
    right_in_the_end[(programs,)](memory, right, memory.numel(), NANOSECONDS, 1024, num_warps=1, launch_pdl=True)
    launch()
    return memory.clone()


def without_wait(launch: Launch) -> Launch:
    """The same, compiled not to wait, but launched as early."""
    args: dict[str, Any] = dict(launch.args)
    for name in ("form", "spec"):
        if is_dataclass(args.get(name)):
            args[name] = replace(args[name], pdl=False)
    if "PDL" in args:
        args["PDL"] = False
    return Launch(launch.kernel, launch.grid, args, launch.options, launch.smaller)


@pytest.mark.gpu
@pytest.mark.skipif(device.interpreting() or not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "weights"), [("llama", "Q4_0"), ("llama", None), ("gemma3", None), ("gpt-oss", None), ("deepseek2", None)]
)
def test_what_comes_late_is_not_touched_before(tmp_path: Path, name: str, weights: str | None) -> None:
    """Products, norms, rotation, attention, its fixup and experts of a decode step, each launch that starts early."""
    target = device.target()
    if not target.has_pdl:
        pytest.skip("only with programmatic dependent launch may a launch begin early")
    tiny.write_model(tmp_path / "m.gguf", name, *([weights] if weights else []))
    backend = get_backend("triton", exact=False, capture=False)
    session = load(tmp_path / "m.gguf", [backend]).session(SessionOptions(n_ctx=128, n_batch=64))
    session.eval(list(range(1, 41)))
    session.eval([41])
    (split,) = session.executable(1, 1).splits
    tried, overlapped = set[str](), set[str]()
    for step in split.run.launches:
        if isinstance(step, Launch) and step.starts_early:
            launch, memory = moved(step)
            right = memory.clone()
            launch()
            expected = memory.clone()
            assert torch.equal(after_poison(launch, memory, right), expected), step.name
            tried.add(step.name)
            if step.name in PLAIN and not torch.equal(after_poison(without_wait(launch), memory, right), expected):
                overlapped.add(step.name)
        step()
    assert len(tried) > 3
    # A launch that doesn't wait shows: the test sees what it is meant to see.
    assert overlapped == tried & PLAIN
