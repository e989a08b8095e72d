"""experts/wgmma.py without a GPU: its source on numpy arrays, with partitions, copies and products in many orders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from support.batch_products import GATES, RNG, TARGET, nmse, weight_of
from support.gluon_warps import emulate
from support.wgmma_order import wgmma_order

from graphrt.backends.triton.kernels.experts import hopper
from graphrt.backends.triton.kernels.experts.hopper import Matrices, TileConfig
from graphrt.backends.triton.kernels.experts.pairs import Pairs
from graphrt.backends.triton.kernels.products.gemm_small import mma_launch, wgmma_launch
from graphrt.backends.triton.kernels.products.half import Activations, Gate
from graphrt.backends.triton.packing import packing_of
from graphrt.dtypes import dtype

SMALL = TileConfig(16, 2, 2, 2, 3)
#: Fewer programs than tiles, so that they take several.
FEW = replace(TARGET, sm_count=3)
ALPHA, LIMIT = 1.702, 7.0


def _oai(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
    return gate / (1 + np.exp(np.minimum(-ALPHA * gate, 700.0))) * (up + 1)


def _pairs(counts: list[int]) -> Pairs:
    """Sorted pairs, so many of each expert and last of none, in an order of their own."""
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    order = RNG.permutation(first[-1]).astype(np.int32)
    return Pairs(len(counts) - 1, 1, torch.from_numpy(first), torch.from_numpy(order))


def _tiles(counts: list[int], tokens: int) -> torch.Tensor:
    """As pairs.list_tiles has them, and two more that aren't any."""
    found, place = [], 0
    for group, count in enumerate(counts):
        found += [[group, place + i, min(place + i + tokens, place + count), 0] for i in range(0, count, tokens)]
        place += count
    return torch.tensor([*found, *[[len(counts), 0, 0, 0]] * 2], dtype=torch.int32)


def _x(pairs: Pairs, k: int) -> tuple[Activations, np.ndarray]:
    """Activations by place as the kernel takes them, and their values by pair."""
    values = RNG.standard_normal((pairs.count, k)).astype(np.float16)
    factors = 2.0 ** RNG.integers(-3, 4, pairs.count)
    row = -(-k // 128) * 128
    padded = np.zeros((pairs.count, row), np.float16)
    padded[:, :k] = values
    exact = np.empty((pairs.count, k))
    exact[pairs.sorted.numpy()] = values.astype(np.float64) * factors[:, None]
    ordered = np.ascontiguousarray(padded[:, wgmma_order(row)])
    return Activations(torch.from_numpy(ordered), torch.from_numpy(factors).to(torch.float32), True), exact


def _matrices(kind: str, n_expert: int, m: int, k: int, bias: bool) -> tuple[Matrices, np.ndarray, np.ndarray]:
    """(matrices of all experts, their values [n_expert, m, k], biases [n_expert, m], zeros if there are none)"""
    weight, values = weight_of(kind, n_expert * m, k, paired=True)
    biases = RNG.standard_normal((n_expert, m)).astype(np.float32) if bias else None
    given = Matrices(weight, None if biases is None else torch.from_numpy(biases))
    zeros = np.zeros((n_expert, m)) if biases is None else biases.astype(np.float64)
    return given, values.reshape(n_expert, m, k), zeros


def _check(
    kind: str, counts: list[int], m: int, k: int, config: TileConfig, glu: str = "", bias: bool = False, seed: int = 0,
    broken: bool = False,
) -> None:  # fmt: skip
    """Every pair's row is right, rows of no expert are NaN, and the order of tiles and pairs changes no bit.

    broken: one of expert 1's biases of the gate is NaN.
    """
    pairs, n_expert = _pairs(counts), len(counts) - 1
    x, exact = _x(pairs, k)
    made = [_matrices(kind, n_expert, m, k, bias) for _ in range(2 if glu else 1)]
    if broken:
        (gate_matrices, _, gate_biases), *_ = made
        assert gate_matrices.bias is not None
        gate_matrices.bias[1, 70] = gate_biases[1, 70] = np.nan
    group = np.repeat(np.arange(n_expert + 1), counts)
    expert = np.empty(pairs.count, int)
    expert[pairs.sorted.numpy()] = group
    live = expert < n_expert
    sums = [
        np.einsum("pk,pmk->pm", exact[live], values[expert[live]]) + biases[expert[live]] for _, values, biases in made
    ]
    with np.errstate(over="ignore"):
        expected = sums[0] if not glu else _oai(*sums) if glu == "swiglu_oai" else GATES[glu](sums[0]) * sums[1]
    results = []
    for turn in (seed, seed + 1):
        out = torch.full((pairs.count, m), -1.0)
        gate = Gate(glu, ALPHA, LIMIT) if glu else None
        tiles = _tiles(counts, config.tokens)
        emulate(hopper.launch(FEW, [w for w, _, _ in made], x, pairs, tiles, k, out, config, gate), turn)
        results.append(out)
    assert torch.equal(results[0].nan_to_num(7.5), results[1].nan_to_num(7.5))
    assert results[0][torch.from_numpy(~live)].isnan().all()
    if live.any():
        assert nmse(results[0][torch.from_numpy(live)], expected) < 1e-9


@pytest.mark.parametrize("kind", mma_launch.KINDS)
def test_types(kind: str) -> None:
    """Experts without pairs, with one tile and with several; rows that tiles don't divide; buffers used again."""
    step = 256 if dtype(kind).block_size == 256 else 128
    _check(kind, [0, 17, 3, 33, 0, 0], 40, 5 * step, SMALL)
    _check(kind, [2, 0, 40, 2], 200, 3 * step, TileConfig(32, 4, 4, 2, 4))


@pytest.mark.parametrize("kind", ["mxfp4", "q8_0", "q5_0", "q4_1", "iq4_nl"])
@pytest.mark.parametrize("k", [160, 288, 480])
def test_rows_that_are_not_whole_steps(kind: str, k: int) -> None:
    _check(kind, [18, 0, 5, 1], 72, k, SMALL, bias=True)
    _check(kind, [18, 0, 5, 0], 40, k, TileConfig(16, 1, 4, 3, 2), "swiglu", bias=True)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("warpgroups", [1, 2, 3, 4])
def test_configs(warpgroups: int, chunk: int, stages: int) -> None:
    """Rings of all sizes go round within a tile and from tile to tile, of long rows and of the shortest."""
    for x_stages in (2, 5):
        config = TileConfig(16, warpgroups, chunk, stages, x_stages)
        _check("q4_0", [17, 0, 2, 0], 72, 128 * (chunk * (stages + 1) + 1), config, seed=x_stages)
        _check("q4_0", [17, 0, 2, 0], 72, 256, config, seed=x_stages)


@pytest.mark.parametrize("glu", [*GATES, "swiglu_oai"])
@pytest.mark.parametrize(("kind", "k"), [("mxfp4", 352), ("q6_K", 512), ("q4_K", 768)])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
def test_a_gate(kind: str, k: int, glu: str, warpgroups: int) -> None:
    """A NaN among biases comes through."""
    biased = glu in ("swiglu_oai", "reglu")
    _check(kind, [0, 9, 20, 1], 104, k, TileConfig(16, warpgroups, 2, 2, 4), glu, bias=biased, broken=biased)


def test_only_pairs_without_an_expert() -> None:
    _check("q4_0", [0, 0, 5], 40, 256, SMALL)


@pytest.mark.parametrize("config", [c for _, c in hopper._CONFIGS])
@pytest.mark.parametrize("kind", mma_launch.KINDS)
def test_what_fits(kind: str, config: TileConfig) -> None:
    """Rings and barriers of a program, counted here; registers of its threads."""
    found = hopper.fitted(config, kind, TARGET.shared_memory)
    assert 2 <= found.stages <= config.stages and found.chunk <= config.chunk and found.x_stages <= config.x_stages
    assert (found.warpgroups, found.tokens) == (config.warpgroups, config.tokens)
    p = packing_of(kind)
    assert p is not None
    codes = found.stages * found.warpgroups * found.chunk * 64 * 4 * 4 * (p.words + p.high_words)
    x, barriers = found.x_stages * found.tokens * 128 * 2, 2 * 8 * (found.stages + found.x_stages)
    assert codes + x + barriers <= TARGET.shared_memory
    at_start, registers = wgmma_launch.registers_of(found.warpgroups)
    assert 128 * (found.warpgroups + 1) * at_start <= 65536
    assert 128 * (found.warpgroups * registers + wgmma_launch.PRODUCER) <= 65536
