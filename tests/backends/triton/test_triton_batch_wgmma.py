"""gemm_small/wgmma.py without a GPU: its source on numpy arrays, partitions, copies and products in many orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from support.batch_products import GATES, RNG, TARGET, nmse, weight_of, x_of
from support.gluon_emulator import Shared
from support.gluon_warps import Barriers, Schedule, emulate
from support.wgmma_order import wgmma_order

from graphrt.backends.triton.kernels.products.gemm_small import layouts, mma_launch, wgmma_launch
from graphrt.backends.triton.kernels.products.gemm_small.wgmma_launch import HopperConfig
from graphrt.backends.triton.kernels.products.half import Activations, Gate
from graphrt.backends.triton.packing import Packed, packing_of
from graphrt.dtypes import dtype

SMALL = HopperConfig(2, 2, 2, 3)
SEEDS = range(2)


def _run(
    weights: Sequence[Packed],
    x: Activations,
    outs: Sequence[torch.Tensor],
    config: HopperConfig,
    seed: int = 0,
    together: bool = True,
    **more: Any,
) -> None:
    ordered = Activations(x.values[:, wgmma_order(x.k)].contiguous(), x.factors)
    tokens = mma_launch.padded_tokens(x.rows)
    made = wgmma_launch.launch(TARGET, weights, ordered, outs, config, tokens, **more)
    emulate(made, seed, together=together and more.get("split") is not None)


def _check(kind: str, n: int, m: int, k: int, config: HopperConfig, seeds: Sequence[int]) -> None:
    """A product is right, and has the same bits whatever the order of things."""
    (w, values), (x, exact) = weight_of(kind, m, k, paired=True), x_of(n, k)
    results = []
    for seed in seeds:
        results.append(torch.full((n, m), float("nan")))
        _run([w], x, [results[-1]], config, seed)
        assert torch.equal(results[0], results[-1]), seed
    assert nmse(results[0], exact @ values.T) < 1e-9


@pytest.mark.parametrize("kind", mma_launch.KINDS)
def test_types(kind: str) -> None:
    """Rows, tokens and chunks that tiles don't divide; buffers that are used again."""
    step = 256 if dtype(kind).block_size == 256 else 128
    for n, m, k, config in (
        (9, 40, 9 * step, SMALL), (17, 200, step, HopperConfig(1, 1, 3, 2)),
        (33, 200, 5 * step, HopperConfig(4, 4, 2, 6)), (64, 40, 7 * step, HopperConfig(1, 2, 4, 5)),
    ):  # fmt: skip
        _check(kind, n, m, k, config, SEEDS)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("warpgroups", [1, 2, 4])
def test_configs(warpgroups: int, chunk: int, stages: int) -> None:
    """Rings of all sizes go round: k has a chunk more than planes have buffers, and its last chunk is not whole."""
    steps = max(chunk * (stages + 1) + 1, 8)
    for x_stages in range(2, 7) if warpgroups == 1 else (2, 3, 6):
        _check("q4_0", 9, 72, 128 * steps, HopperConfig(warpgroups, chunk, stages, x_stages), (x_stages, stages))


@pytest.mark.parametrize(
    ("kind", "n", "config"),
    [
        ("q4_K", 65, HopperConfig(2, 2, 4, 4)),
        ("q6_K", 200, HopperConfig(2, 1, 2, 3)),
        ("q8_0", 256, HopperConfig(2, 1, 3, 2)),
    ],
)
def test_many_tokens(kind: str, n: int, config: HopperConfig) -> None:
    """Tiles of 128 and 256 tokens, also where k is split and every program adds up a share."""
    _check(kind, n, 72, 1280, config, SEEDS)
    (w, values), (x, exact) = weight_of(kind, 72, 1280, paired=True), x_of(n, 1280, factors=True)
    tokens, added = mma_launch.padded_tokens(n), torch.ones(n, 72)
    parts, counter = torch.full((2 * 3 * 64 * tokens,), float("nan")), torch.zeros(4, dtype=torch.int32)
    split = mma_launch.Split(3, 2 * (2 // config.chunk), parts, counter)
    _run([w], x, [added], config, residual=added, split=split)
    assert nmse(added, exact @ values.T + 1) < 1e-9 and not counter.any()


def _split(ranges: int, steps: int, tiles: int) -> mma_launch.Split:
    """tiles: of a warpgroup."""
    parts = torch.full((tiles * ranges * 64 * 64,), float("nan"))
    return mma_launch.Split(ranges, steps, parts, torch.zeros(2 * tiles, dtype=torch.int32))


@pytest.mark.parametrize("kind", ["q4_K", "q6_K", "q8_0", "q4_0"])
@pytest.mark.parametrize(("ranges", "steps", "k"), [(2, 3, 1280), (5, 1, 1280), (8, 1, 2048)])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_split_of_k(kind: str, ranges: int, steps: int, k: int, seed: int) -> None:
    """Counters are zeros again when it is done; a residual and a gate come after the sum of all parts."""
    (w, values), (other, u) = weight_of(kind, 88, k, paired=True), weight_of(kind, 88, k, paired=True)
    x, exact = x_of(16, k, factors=True)
    out = torch.from_numpy(RNG.standard_normal((16, 88)).astype(np.float32))
    expected, split = exact @ values.T + out.numpy(), _split(ranges, steps, 2)
    _run([w], x, [out], SMALL, seed, residual=out, split=split)
    assert nmse(out, expected) < 1e-9 and not split.counter.any()
    outs, split = [out, torch.empty(16, 88)], _split(ranges, steps, 4)
    _run([w, other], x, outs, SMALL, seed, split=split)
    assert nmse(out, exact @ values.T) < 1e-9 and not split.counter.any()
    assert nmse(outs[1], exact @ u.T) < 1e-9
    _run([w, other], x, [out], SMALL, seed, gate=Gate("reglu"), split=split)
    assert nmse(out, np.maximum(exact @ values.T, 0) * (exact @ u.T)) < 1e-9 and not split.counter.any()


@pytest.mark.parametrize(("n", "ranges"), [(33, 2), (64, 3), (17, 11)])
def test_a_split_of_many_tokens(n: int, ranges: int) -> None:
    """Programs that have several pieces of eight tokens, and none; more parts than are asked for at a time. The bits
    are the same whatever the order of things, also where programs run one after the other: those that leave their share
    to the last one."""
    w, values = weight_of("q4_0", 72, 256 * ranges, paired=True)
    x, exact = x_of(n, 256 * ranges, factors=True)
    results = []
    for seed, together in ((0, True), (1, True), (2, False)):
        out, split = torch.ones(n, 72), _split(ranges, 1, 2)
        _run([w], x, [out], SMALL, seed, together, residual=out, split=split)  # a share done twice adds that twice
        assert nmse(out, exact @ values.T + 1) < 1e-9 and not split.counter.any()
        results.append(out)
    assert all(torch.equal(results[0], found) for found in results[1:])


@pytest.mark.parametrize("kind", ["q4_K", "q6_K", "q5_0"])
@pytest.mark.parametrize("warpgroups", [1, 2, 4])
def test_several_matrices_and_a_residual(kind: str, warpgroups: int) -> None:
    config = HopperConfig(warpgroups, 2, 2, 4)
    x, exact = x_of(12, 768, factors=True)
    pairs = [weight_of(kind, m, 768, paired=True) for m in (200, 32, 7)]
    for count in (2, 3):
        outs = [torch.full((12, w.rows), float("nan")) for w, _ in pairs[:count]]
        _run([w for w, _ in pairs[:count]], x, outs, config)
        for out, (_, values) in zip(outs, pairs):
            assert nmse(out, exact @ values.T) < 1e-9
    weight, values = pairs[0]
    added = torch.from_numpy(RNG.standard_normal((12, 200)).astype(np.float32))
    out = added.clone()
    _run([weight], x, [out], config, residual=out)
    assert nmse(out, exact @ values.T + added.numpy()) < 1e-9


@pytest.mark.parametrize("warpgroups", [1, 2, 4])
@pytest.mark.parametrize("ranges", [1, 2])
def test_biases(warpgroups: int, ranges: int) -> None:
    """Each matrix's own, once, whatever k is split into; with a residual of a single one."""
    config = HopperConfig(warpgroups, 2, 2, 4)
    x, exact = x_of(12, 1024, factors=True)
    pairs = [weight_of("q4_K", m, 1024, paired=True) for m in (200, 32, 7)]
    biases = [torch.from_numpy(RNG.standard_normal(w.rows).astype(np.float32)) for w, _ in pairs]
    for count in (1, 2, 3):
        weights, added = [w for w, _ in pairs[:count]], biases[:count]
        outs = [torch.full((12, w.rows), float("nan")) for w in weights]
        split = _split(2, 2, 24) if ranges == 2 else None
        _run(weights, x, outs, config, biases=added, split=split)
        for out, (_, values), bias in zip(outs, pairs, added):
            assert nmse(out, exact @ values.T + bias.numpy()) < 1e-9
    residual = torch.from_numpy(RNG.standard_normal((12, 200)).astype(np.float32))
    _run([pairs[0][0]], x, [outs[0]], config, biases=biases[:1], residual=residual)
    assert nmse(outs[0], exact @ pairs[0][1].T + biases[0].numpy() + residual.numpy()) < 1e-9


@pytest.mark.parametrize("kind", ["q4_K", "q6_K", "q8_0"])
@pytest.mark.parametrize("glu", GATES)
@pytest.mark.parametrize("warpgroups", [1, 2, 4])
def test_a_gate(kind: str, glu: str, warpgroups: int) -> None:
    """A NaN in a row of the gate comes through."""
    (gate, g), (up, u) = weight_of(kind, 104, 768, broken=70, paired=True), weight_of(kind, 104, 768, paired=True)
    x, exact = x_of(9, 768, factors=True)
    out = torch.full((9, 104), float("nan"))
    _run([gate, up], x, [out], HopperConfig(warpgroups, 2, 2, 4), gate=Gate(glu))
    with np.errstate(over="ignore"):
        expected = GATES[glu](exact @ g.T) * (exact @ u.T)
    assert nmse(out, expected) < 1e-9


@pytest.mark.parametrize("k", [256, 512])
def test_a_part_of_the_rows(k: int) -> None:
    """Rows of a matrix as a view of its planes. Of q6_K two rows share a word of supers where k is 256."""
    whole, values = weight_of("q6_K", 96, k, paired=True)
    x, exact = x_of(9, k)
    part = whole.part(16, 88)
    assert mma_launch.aligned(part)
    out = torch.full((9, 72), float("nan"))
    _run([part], x, [out], SMALL)
    assert nmse(out, exact @ values[16:88].T) < 1e-9


@pytest.mark.parametrize(
    "config", [HopperConfig(2, 4, 4, 6, 1), HopperConfig(4, 4, 2, 4, 1), HopperConfig(2, 4, 2, 4, 2)]
)
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_what_fits(config: HopperConfig, tokens: int) -> None:
    """Rings and barriers of a program, counted here, and of as many programs as there shall be."""
    for kind in mma_launch.KINDS:
        found = wgmma_launch.fitted(config, kind, tokens, TARGET.shared_memory)
        assert found is not None and 2 <= found.stages <= config.stages and found.chunk in (1, 2, 4)
        assert (found.warpgroups, found.x_stages, found.per_sm) == (config.warpgroups, config.x_stages, config.per_sm)
        p = packing_of(kind)
        assert p is not None
        group = 4 * (p.words + p.high_words) + layouts.scale_bytes(kind)
        planes = found.stages * found.warpgroups * found.chunk * 64 * (4 * group + 4 * (p.supers > 0))
        x = found.x_stages * tokens * 128 * 2
        barriers = 2 * 8 * (found.stages + found.x_stages)
        assert found.per_sm * (planes + x + barriers + 1024) <= TARGET.shared_memory + 1024
    assert wgmma_launch.fitted(config, "q4_K", tokens, 32768) is None


def test_few_parts_of_short_rows() -> None:
    """One warpgroup a program from a third of the multiprocessors' tiles on, up to all of them."""

    def warpgroups(m: int, k: int = 4096, kind: str = "q4_K", tokens: int = 64) -> int:
        found = wgmma_launch.config_for(TARGET, kind, tokens, m, k)
        assert found is not None
        return found.warpgroups

    assert [warpgroups(m) for m in (1024, 44 * 64, 44 * 64 + 1, 4096, 6144, 132 * 64)] == [2, 2, 1, 1, 1, 1]
    assert [warpgroups(4096, 14336), warpgroups(4096, kind="q6_K"), warpgroups(4096, tokens=32)] == [2, 2, 2]


@pytest.mark.parametrize("tokens", [128, 256])
def test_what_fits_of_many_tokens(tokens: int) -> None:
    """Every type has a config, with buffers of x for a step ahead and two of planes."""
    for kind in mma_launch.KINDS:
        for m in (4096, 28672):
            found = wgmma_launch.config_for(TARGET, kind, tokens, m, 4096)
            assert found is not None and found.stages >= 2 and found.x_stages >= 2
            rings = found.stages * wgmma_launch.chunk_bytes(kind, found) + found.x_stages * (tokens * 256 + 16)
            assert rings + 1024 <= TARGET.shared_memory


@pytest.mark.parametrize("chunk", [2, 4])
def test_a_chunk_is_its_steps_one_after_the_other(chunk: int) -> None:
    """Shared memory of a chunk may be read as that of its steps: what steps_of() relies on."""

    def bases(layout: Any) -> list[list[int]]:
        return [list(basis) for basis in layout.offset_bases]

    for words in (4, 8):
        whole = bases(layouts.pieces_shared(chunk, 64, words, 4))
        step = bases(layouts.pieces_shared(1, 64, words, 4))
        assert whole[: len(step)] == step and all(basis[0] for basis in whole[len(step) :])
    for shape in ([64, 4, 1], [64, 4, 2], [64, 4], [64]):
        whole, step = bases(layouts.rows_shared([chunk, *shape])), bases(layouts.rows_shared([1, *shape]))
        assert whole[: len(step)] == step and all(basis[0] for basis in whole[len(step) :])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wait_without_end(seed: int) -> None:
    """What the emulator itself makes of a barrier that lacks an arrival: it fails at once and says where."""
    schedule = Schedule(seed, 4, False)
    barriers = Barriers(schedule)
    place = Shared(np.zeros(1, np.int64))
    barriers.init(place, 3)

    def other() -> None:
        barriers.wait(place, 1)  # the phase before the first
        barriers.arrive(place, count=2)

    with pytest.raises(AssertionError, match="deadlock: 0 waits at .* for parity 0 in phase 0, which lacks 1 of 3"):
        schedule.run(lambda: schedule.specialize([lambda: barriers.wait(place, 0), other], [4]))
