"""gemm_small/mma.py without a GPU: its source on numpy arrays, and the layouts that it asks Triton for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from support import gluon_warps
from support.batch_products import GATES, RNG, TARGET, nmse, weight_of, x_of
from support.gluon_emulator import emulate
from support.planned import multiplied

from graphrt.backend import Usage
from graphrt.backends.triton import device
from graphrt.backends.triton.context import Context
from graphrt.backends.triton.kernels.products.gemm_small import layouts, mma_launch
from graphrt.backends.triton.kernels.products.gemm_small.mma import batch_mma
from graphrt.backends.triton.kernels.products.gemm_small.mma_launch import BatchConfig, Split
from graphrt.backends.triton.kernels.products.gemm_small.wgmma import batch_wgmma
from graphrt.backends.triton.kernels.products.half import Gate
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.backends.triton.packing import PackedBuffer
from graphrt.dtypes import dtype
from graphrt.tensor import Tensor

SMALL = BatchConfig(32, 2, 2, 2)


@pytest.mark.parametrize("kind", mma_launch.KINDS)
def test_types(kind: str) -> None:
    """Rows, tokens and steps that tiles don't divide; buffers that are used again; copies that land late and early."""
    block = 256 if dtype(kind).block_size == 256 else 128
    for n, k, config in ((9, 5 * block, SMALL), (17, block, BatchConfig(64, 1, 2, 3)), (33, 3 * block, SMALL)):
        w, values = weight_of(kind, 40, k)
        x, exact = x_of(n, k)
        results = []
        for late in (True, False):
            out = torch.full((n, 40), float("nan"))
            emulate(mma_launch.launch(TARGET, [w], x, [out], config), late)
            results.append(out)
        assert torch.equal(*results)
        assert nmse(results[0], exact @ values.T) < 1e-9, (kind, n, k)


def _split(ranges: int, steps: int, tiles: int) -> Split:
    parts = torch.full((tiles * ranges * 32 * 16,), float("nan"))
    return Split(ranges, steps, parts, torch.zeros(tiles, dtype=torch.int32))


@pytest.mark.parametrize("kind", ["q4_K", "q6_K", "q8_0", "q4_0"])
@pytest.mark.parametrize(("ranges", "steps"), [(2, 3), (5, 1)])
def test_a_split_of_k(kind: str, ranges: int, steps: int) -> None:
    """Counters are zeros again when it is done; a residual and a gate come after the sum of all parts."""
    (w, values), (other, u) = weight_of(kind, 48, 1280), weight_of(kind, 48, 1280)
    x, exact = x_of(16, 1280, factors=True)
    out = torch.from_numpy(RNG.standard_normal((16, 48)).astype(np.float32))
    expected, split = exact @ values.T + out.numpy(), _split(ranges, steps, 2)
    emulate(mma_launch.launch(TARGET, [w], x, [out], SMALL, residual=out, split=split), True)
    assert nmse(out, expected) < 1e-9 and not split.counter.any()
    split = _split(ranges, steps, 3)
    outs, both = [out, torch.empty(16, 48)], _split(ranges, steps, 4)
    emulate(mma_launch.launch(TARGET, [w, other], x, outs, SMALL, split=both), True)
    assert nmse(out, exact @ values.T) < 1e-9
    emulate(mma_launch.launch(TARGET, [w, other], x, [out], SMALL, gate=Gate("reglu"), split=split), True)
    assert nmse(out, np.maximum(exact @ values.T, 0) * (exact @ u.T)) < 1e-9 and not split.counter.any()


@pytest.mark.parametrize("kind", ["q4_K", "q6_K", "q5_0"])
def test_several_matrices_and_a_residual(kind: str) -> None:
    x, exact = x_of(12, 512, factors=True)
    pairs = [weight_of(kind, m, 512) for m in (40, 32, 7)]
    for count in (2, 3):
        outs = [torch.full((12, w.rows), float("nan")) for w, _ in pairs[:count]]
        emulate(mma_launch.launch(TARGET, [w for w, _ in pairs[:count]], x, outs, SMALL), True)
        for out, (_, values) in zip(outs, pairs):
            assert nmse(out, exact @ values.T) < 1e-9
    weight, values = pairs[0]
    added = torch.from_numpy(RNG.standard_normal((12, 40)).astype(np.float32))
    out = added.clone()
    emulate(mma_launch.launch(TARGET, [weight], x, [out], SMALL, residual=out), True)
    assert nmse(out, exact @ values.T + added.numpy()) < 1e-9


@pytest.mark.parametrize("ranges", [1, 2])
def test_biases(ranges: int) -> None:
    """Each matrix's own, once, whatever k is split into; with a residual of a single one."""
    x, exact = x_of(12, 512, factors=True)
    pairs = [weight_of("q4_K", m, 512) for m in (40, 32, 7)]
    biases = [torch.from_numpy(RNG.standard_normal(w.rows).astype(np.float32)) for w, _ in pairs]
    for count in (1, 2, 3):
        weights, added = [w for w, _ in pairs[:count]], biases[:count]
        outs = [torch.full((12, w.rows), float("nan")) for w in weights]
        split = _split(2, 1, 4) if ranges == 2 else None
        emulate(mma_launch.launch(TARGET, weights, x, outs, SMALL, added, split=split), True)
        for out, (_, values), bias in zip(outs, pairs, added):
            assert nmse(out, exact @ values.T + bias.numpy()) < 1e-9
    residual = torch.from_numpy(RNG.standard_normal((12, 40)).astype(np.float32))
    emulate(mma_launch.launch(TARGET, [pairs[0][0]], x, [outs[0]], SMALL, biases[:1], residual), True)
    assert nmse(outs[0], exact @ pairs[0][1].T + biases[0].numpy() + residual.numpy()) < 1e-9


@pytest.mark.parametrize("kind", ["q4_K", "q6_K", "q8_0"])
@pytest.mark.parametrize("glu", GATES)
def test_a_gate(kind: str, glu: str) -> None:
    """A NaN in a row of the gate comes through."""
    (gate, g), (up, u) = weight_of(kind, 24, 512, broken=5), weight_of(kind, 24, 512)
    x, exact = x_of(9, 512, factors=True)
    out = torch.full((9, 24), float("nan"))
    emulate(mma_launch.launch(TARGET, [gate, up], x, [out], SMALL, gate=Gate(glu)), True)
    with np.errstate(over="ignore"):
        expected = GATES[glu](exact @ g.T) * (exact @ u.T)
    assert nmse(out, expected) < 1e-9


def test_a_part_of_the_rows() -> None:
    """Rows of a matrix as a view of its planes; supers of q6_K that begin inside a word take the other way."""
    whole, values = weight_of("q6_K", 64, 256)
    x, exact = x_of(9, 256)
    part, odd = whole.part(16, 56), whole.part(17, 57)
    assert mma_launch.aligned(part) and not mma_launch.aligned(odd)
    out = torch.full((9, 40), float("nan"))
    emulate(mma_launch.launch(TARGET, [part], x, [out], SMALL), True)
    assert nmse(out, exact @ values[16:56].T) < 1e-9


def test_what_it_takes() -> None:
    old, small = replace(TARGET, arch="sm_80", shared_memory=166912), replace(TARGET, shared_memory=101376)
    for target in (TARGET, old, small):
        for kind in mma_launch.KINDS:
            for n in (9, 16, 17, 64):
                config = mma_launch.config_for(target, kind, n)
                assert config is not None
                tokens = mma_launch.padded_tokens(n)
                used = config.stages * mma_launch.stage_bytes(kind, config.rows, tokens, config.wk)
                assert config.stages >= 2 and used * config.per_sm <= target.shared_memory
                assert config.rows * config.wk in (16 * config.warps, 32 * config.warps)
                assert 4 * config.wk * config.rows * tokens <= used  # the sums take the buffers' place
    for kind, k, n, target, taken in (
        ("q4_0", 640, 9, TARGET, True), ("q4_0", 576, 9, TARGET, False), ("q2_K", 512, 9, TARGET, False),
        ("q4_K", 512, 65, TARGET, False), ("q4_K", 512, 9, device.INTERPRETER, False),
    ):  # fmt: skip
        assert mma_launch.fits(kind, k, n, target) == taken
    assert mma_launch.splits_of(TARGET, BatchConfig(32, 8, 8, 4), 32, 4096) == (2, 2)
    assert mma_launch.splits_of(TARGET, BatchConfig(32, 8, 8, 4), 128, 4096) == (1, 4)
    assert mma_launch.splits_of(TARGET, BatchConfig(128, 2, 8, 4), 32, 14336) == (4, 14)


def _at(bases: Sequence[Sequence[int]], i: int) -> np.ndarray:
    """Where bases put number i: the sum of its bits' ones, in bits."""
    found = np.zeros(len(bases[0]), np.int64)
    for bit, basis in enumerate(bases):
        if i >> bit & 1:
            found ^= np.array(basis)
    return found


def _conflicts(layout: Any, shared: Any, size: int, at_once: int) -> int:
    """How often lanes of a warp that access at_once elements of `size` bytes at a time hit one bank again, at most."""
    shape = layout.shape
    offsets = np.zeros(shape, np.int64)
    for i in range(int(np.prod(shape))):
        offsets[tuple(_at(shared.offset_bases, i))] = i
    worst, width = 0, size * at_once
    lanes_at_once = 32 if width <= 4 else 128 // width
    for first in range(0, 1 << len(layout.reg_bases), at_once):
        where = [
            [tuple(_at(layout.reg_bases, first + i) ^ _at(layout.lane_bases, lane)) for i in range(at_once)]
            for lane in range(32)
        ]
        starts = np.array([[offsets[w] for w in lane] for lane in where]) * size
        assert (np.diff(starts, axis=1) == size).all() and (starts[:, 0] % width == 0).all(), "not side by side"
        for part in range(0, 32, lanes_at_once):
            words = {int(a) // 4 + i for a in starts[part : part + lanes_at_once, 0] for i in range(-(-width // 4))}
            banks = np.bincount([w % 32 for w in words], minlength=32)
            worst = max(worst, int(banks.max()) - 1)
    return worst


@pytest.mark.parametrize("words", [4, 8])
@pytest.mark.parametrize(
    ("wk", "wr", "rows", "tokens"), [(8, 1, 32, 16), (2, 4, 128, 64), (4, 2, 64, 32), (8, 1, 16, 16)]
)
def test_shared_memory_without_conflicts(words: int, wk: int, wr: int, rows: int, tokens: int) -> None:
    """Reads in the operands' layouts and the copies' writes, 16 bytes at a time. words: of a group of codes."""
    b = layouts
    x = b.pieces_shared(wk, tokens, 16, 8)
    assert _conflicts(b.x_layout(wk, wr, tokens), x, 2, 8) == 0
    assert _conflicts(b.pieces_copy(wk, tokens, 16, 8, wk * wr), x, 2, 8) == 0
    planes = b.pieces_shared(wk, rows, words, 4)
    assert _conflicts(b.words_layout(wk, wr, rows, words), planes, 4, 4) == 0
    assert _conflicts(b.pieces_copy(wk, rows, words, 4, wk * wr), planes, 4, 4) == 0
    read = b.sums_layout(wk, rows, tokens, wk * wr, False)
    assert rows == 16 or _conflicts(read, b.sums_shared(wk, rows, tokens), 4, 1) == 0


@pytest.mark.skipif(not device.interpreting(), reason="rows are rounded on the host")
@pytest.mark.parametrize(("arch", "kernel"), [("sm_80", "batch_mma"), ("sm_90", "batch_wgmma")])
def test_what_the_backend_launches(arch: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of one type together, those that it doesn't take by themselves; a gate and a residual in one launch."""
    places: dict[Tensor, tuple[TritonBuffer, int]] = {}
    ctx = Context(lambda t: places[t.root], replace(TARGET, arch=arch), False)

    def held(kind: str, ne: tuple[int, int], values: np.ndarray | None = None) -> Tensor:
        t = Tensor(dtype(kind), ne)
        data = (
            torch.zeros(t.nbytes, dtype=torch.uint8) if values is None else torch.from_numpy(values).view(torch.uint8)
        )
        places[t] = (TritonBuffer(data.view(-1), Usage.COMPUTE), 0)
        return t

    def weight(kind: str, m: int) -> tuple[Tensor, np.ndarray]:
        packed, values = weight_of(kind, m, 256, paired=kernel == "batch_wgmma")
        t = Tensor(dtype(kind), (256, m))
        places[t] = (PackedBuffer(packed, Usage.WEIGHTS), 0)
        return t, values

    def run(steps: Sequence[Any]) -> list[str]:
        for step in steps:
            if step.kernel is batch_wgmma:
                gluon_warps.emulate(step, 0)
            elif step.kernel is batch_mma:
                emulate(step, True)
            else:
                step.args |= {"PDL": False}
                step.options.pop("launch_pdl", None)
                step()
        return [step.kernel.fn.__name__ for step in steps]

    numbers = RNG.standard_normal((12, 256)).astype(np.float32)
    x, rounded = held("f32", (256, 12), numbers), numbers.astype(np.float16).astype(np.float64)
    pairs = [weight(kind, m) for kind, m in (("q4_K", 40), ("q6_K", 24), ("q4_K", 16))]
    outs = [held("f32", (t.ne[1], 12)) for t, _ in pairs]
    steps = multiplied([t for t, _ in pairs], x, outs, ctx)
    assert run(steps) == ["round_rows", kernel, kernel]
    for out, (_, values) in zip(outs, pairs):
        assert nmse(ctx.view(out).data.view(12, -1), rounded @ values.T) < 1e-9
    gate, up = weight("q4_K", 40), weight("q4_K", 40)
    assert run(multiplied([gate[0], up[0]], x, outs[:1], ctx, gate=Gate("reglu"))) == ["round_rows", kernel]
    expected = np.maximum(rounded @ gate[1].T, 0) * (rounded @ up[1].T)
    assert nmse(ctx.view(outs[0]).data.view(12, -1), expected) < 1e-9
    assert run(multiplied([up[0]], x, outs[:1], ctx, residual=outs[0])) == ["round_rows", kernel]
    assert nmse(ctx.view(outs[0]).data.view(12, -1), expected + rounded @ up[1].T) < 1e-9
    biases = [held("f32", (t.ne[1],), RNG.standard_normal(t.ne[1]).astype(np.float32)) for t, _ in pairs]
    assert run(multiplied([t for t, _ in pairs], x, outs, ctx, biases=biases)) == ["round_rows", kernel, kernel]
    for out, bias, (_, values) in zip(outs, biases, pairs):
        assert nmse(ctx.view(out).data.view(12, -1), rounded @ values.T + ctx.view(bias).data.numpy()) < 1e-9
    steps = multiplied([t for t, _ in pairs], x, outs, ctx, biases=[*biases[:2], None])
    assert run(steps) == ["round_rows", kernel, kernel, kernel], "in a launch all have biases or none"
    monkeypatch.setattr(mma_launch, "KINDS", ("q6_K",))
    steps = multiplied([t for t, _ in pairs], x, outs, ctx)
    names = [s.kernel.fn.__name__ for s in steps]
    assert names[:2] == ["round_rows", kernel] and "gemm_packed" in names
    assert names.count("round_rows") == (2 if arch == "sm_90" else 1)  # an order for each
