"""Attention over pages and packed keys on the GPU backend: cases, lists of tiles, lengths that change between runs."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import graphrt
from graphrt import get_backend, ops
from graphrt.backend import Usage
from graphrt.backends.triton import device
from graphrt.graph import Graph
from graphrt.tensor import Tensor, new_input
from graphrt.testing import Case, all_cases
from graphrt.tools.check.launch_order import Event, violations
from graphrt.tools.conformance.run.step import run_case

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

import triton
import triton.language as tl
from support import aot_varlen, varlen_emulation

from graphrt.backends.triton.kernels.flash_attn.decode_configs import CONFIGS
from graphrt.backends.triton.kernels.flash_attn.facts import attention_facts
from graphrt.backends.triton.kernels.flash_attn.fusions import Attention
from graphrt.backends.triton.kernels.flash_attn.launcher import Launcher
from graphrt.backends.triton.kernels.flash_attn.tile_plan import attention_plan
from graphrt.backends.triton.kernels.flash_attn.varlen.plan import VarlenPlans
from graphrt.backends.triton.kernels.flash_attn.varlen.problem import VarlenProblem
from graphrt.backends.triton.kernels.flash_attn.varlen.tile_list import sum_varlen_units
from graphrt.backends.triton.kernels.flash_attn.visits import spanned_block, visited_span
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.ops.cases.flash_attn_varlen import Axes, as_case

OPS = ("FLASH_ATTN_VARLEN", "FLASH_ATTN_VARLEN_LSE")
#: On a GPU the conformance tool runs whole sets; this is every n-th case of the quick ones, others for each schedule.
EVERY = 12
Array = Any


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _some(schedule: str | None) -> list[Case]:
    found = [c for op in OPS for c in all_cases(op)]
    names = (None, "tile", "split", "stream_k")
    every = EVERY if schedule is None else 2 * EVERY
    return [c for c in found if zlib.crc32(str(c).encode()) % every == names.index(schedule)]


@pytest.mark.parametrize("case", _some(None), ids=str)
def test_a_case(case: Case) -> None:
    outcome = run_case(case, get_backend("triton"))
    assert outcome.status == "pass", outcome.message


@pytest.mark.parametrize("schedule", ["tile", "split", "stream_k"])
def test_cases_under_a_forced_schedule(schedule: str) -> None:
    cases = _some(schedule)
    assert cases
    for case in cases:
        outcome = run_case(case, get_backend("triton", schedule=schedule))
        assert outcome.status == "pass", (str(case), outcome.message)


#: Five steps of one graph of 12 tokens, 4 sequences and pages of 16: q_starts and lengths.
STEPS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((0, 1, 2, 3, 4), (40, 1, 97, 16)),  # single tokens; the last 8 are nobody's
    ((0, 9, 10, 11, 12), (9, 2, 98, 17)),  # a prompt beside them; the first sequence is another
    ((0, 0, 12, 12, 12), (40, 80, 0, 17)),  # one alone
    ((0, 3, 6, 9, 12), (96, 3, 5, 0)),
    ((0, 1, 2, 3, 4), (112, 4, 99, 18)),
)


@pytest.mark.parametrize("n_head_kv", [1, 2])
def test_one_graph_serves_all_lengths(n_head_kv: int, rng: np.random.Generator) -> None:
    """Tables, lengths and starts are inputs, read when the graph runs, and what the last step left does not count."""
    n_seq, page, n_pages, n_head, d = 4, 16, 40, 4, 64
    leafs = {
        "q": new_input("f32", d, 12, n_head, name="q"), "k": new_input("f16", d, page, n_head_kv, n_pages, name="k"),
        "v": new_input("f16", d, page, n_head_kv, n_pages, name="v"), "q_starts": new_input("i32", 5, name="q_starts"),
        "lengths": new_input("i32", n_seq, name="lengths"), "block_table": new_input("i32", 8, n_seq, name="table"),
    }  # fmt: skip
    node = ops.flash_attn_varlen(**leafs, scale=0.125)
    fast, exact = (graphrt.prepare(Graph(node), backend) for backend in ("triton", "cpu"))
    for starts, lengths in STEPS:
        values = {
            "q": rng.normal(size=(n_head, 12, d)), "k": rng.normal(size=(n_pages, n_head_kv, page, d)),
            "v": rng.normal(size=(n_pages, n_head_kv, page, d)), "q_starts": np.array(starts),
            "lengths": np.array(lengths), "block_table": rng.permutation(n_pages)[:32].reshape(n_seq, 8),
        }  # fmt: skip
        results = [_run(exe, leafs, values, node) for exe in (fast, exact)]
        np.testing.assert_allclose(*results, atol=3e-3)
        assert np.isfinite(results[0]).all() and not results[0][0, starts[-1] :].any()


def test_pages_that_are_not_there() -> None:
    """Wherever the table says that keys lie, memory outside of the cache is not read."""
    shape = {"q": (64, 2, 2), "k": (64, 16, 1, 5), "v": (64, 16, 1, 5), "q_starts": (3,), "lengths": (2,)}
    leafs = {name: new_input("i32" if name in ("q_starts", "lengths") else "f32", *ne, name=name)
             for name, ne in shape.items()}  # fmt: skip
    leafs["block_table"] = new_input("i32", 4, 2, name="table")
    node = ops.flash_attn_varlen(**leafs, scale=0.125)
    values = {name: np.ones(leaf.shape) for name, leaf in leafs.items()}
    values |= {"q_starts": np.array([0, 1, 2]), "lengths": np.array([64, 64])}
    values["block_table"] = np.array([[10**9, -(10**9), 5, -1], [4, 2**31 - 1, -(2**31), 0]])
    assert (_run(graphrt.prepare(Graph(node), "triton"), leafs, values, node) == 1).all()


def test_queries_of_nobody_have_no_sink() -> None:
    q, k, starts = (new_input(kind, *ne, name=name) for kind, ne, name in (
        ("f32", (64, 5, 2), "q"), ("f32", (64, 9, 2), "k"), ("i32", (2,), "q_starts")))  # fmt: skip
    k_starts, sinks = new_input("i32", 2, name="k_starts"), new_input("f32", 2, name="sinks")
    node = ops.flash_attn_varlen_lse(q, k, starts, 0.125, k_starts=k_starts, sinks=sinks)
    leafs = {"q": q, "k": k, "starts": starts, "k_starts": k_starts, "sinks": sinks}
    values = {"q": np.ones(q.shape), "k": np.ones(k.shape), "starts": np.array([0, 3]), "k_starts": np.array([0, 9]),
              "sinks": np.array([1.0, 2.0])}  # fmt: skip
    found = _run(graphrt.prepare(Graph(node), "triton"), leafs, values, node)[0, 0]
    assert np.isfinite(found[:3]).all() and np.isneginf(found[3:]).all()


def _run(exe: Any, leafs: Mapping[str, Tensor], values: Mapping[str, Array], node: Tensor) -> Array:
    for name, leaf in leafs.items():
        kind = {"f32": np.float32, "f16": np.float16, "i32": np.int32}[leaf.dtype.name]
        exe.write(leaf, np.ascontiguousarray(values[name].reshape(leaf.shape), kind))
    exe.run()
    return exe.read(node)


@triton.jit
def _spans(
    p_out, row0, n, length, skip, window, PACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    first, full_first, full_end, end, first_key, end_key = visited_span(
        row0, n, length, length - n, skip, window, PACK, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, ALIBI
    )
    n_full = full_end - full_first
    tl.store(p_out, end - first)
    tl.store(p_out + 1, n_full)
    tl.store(p_out + 2, first_key)
    tl.store(p_out + 3, end_key)
    for i in range(0, end - first):
        if i < n_full:
            tl.store(p_out + 4 + i, spanned_block(i, first, full_first, full_end, False))
        else:
            tl.store(p_out + 4 + i, spanned_block(i, first, full_first, full_end, True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("skip", [0, 21])
def test_a_tile_visits_what_its_rows_see(
    causal: bool, window: int, alibi: bool, skip: int, rng: np.random.Generator
) -> None:
    """Every k-block that some row sees, once; as full ones those that all see whole, if there is nothing to add. Keys
    that count for nothing are seen by none."""
    for _ in range(20):
        pack, block_m, block_n = int(rng.integers(1, 6)), 8, 16
        n, length = int(rng.integers(1, 30)), int(rng.integers(0, 90))
        row0 = block_m * int(rng.integers(0, -(-n * pack // block_m)))
        out = torch.full((64,), -7, dtype=torch.int32)
        _spans[(1,)](out, row0, n, length, skip, window, pack, block_m, block_n, causal, window > 0, alibi)
        count, n_full, first_key, end_key, *blocks = out.tolist()
        position = length - n + np.arange(row0, min(row0 + block_m, n * pack))[:, None] // pack
        key = np.arange(-(-90 // block_n) * block_n)
        seen = (
            (key >= skip)
            & (key < length)
            & ((key <= position) | (not causal))
            & ((window == 0) | (key > position - window))
        )
        by_block = seen.reshape(len(position), -1, block_n)
        needed = set(np.flatnonzero(by_block.any((0, 2))).tolist())
        full = set(np.flatnonzero(by_block.all((0, 2))).tolist()) if not alibi else set()
        visited = blocks[:count]
        assert needed <= set(visited) and len(set(visited)) == count <= len(needed) + 1
        assert set(visited[:n_full]) == full
        assert set(np.flatnonzero(seen.any(0)).tolist()) <= set(range(first_key, end_key))
        if seen.any():
            assert first_key == np.flatnonzero(seen.any(0))[0] and end_key == np.flatnonzero(seen.any(0))[-1] + 1


def _planned(shape: aot_varlen.Shape, starts: list[int], kv: list[int]) -> tuple[Any, Any, Any]:
    """A tiling of 16 rows and 32 keys, and what the device lists of it: records, units."""
    places: dict[Tensor, TritonBuffer] = {}

    def place(t: Tensor) -> tuple[TritonBuffer, int]:
        places.setdefault(t.root, TritonBuffer(torch.zeros(t.root.nbytes, dtype=torch.uint8), Usage.COMPUTE))
        return places[t.root], t.view_offs

    found = aot_varlen.attention(shape)
    p = VarlenProblem(Attention(found.out), place)
    p.memory(p.q_starts, torch.int32)[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
    p.memory(p.kv, torch.int32)[: len(kv)] = torch.tensor(kv, dtype=torch.int32)
    tiling = p.tiling(16, 32)
    plan, launches = VarlenPlans("cpu").plan(p, tiling)
    for launch in launches:
        launch()
    return tiling, plan.tiles, plan.unit_start


@pytest.mark.parametrize("starts", [[0, 1, 2, 3], [0, 9, 9, 40], [0, 0, 0, 0], [0, 40, 40, 40], [0, 13, 14, 27]])
def test_the_list_of_tiles(starts: list[int]) -> None:
    """Query tiles of each sequence in order, nobody's last, each as many units as it has k-blocks, one at least."""
    lengths = [40, 0, 70]
    shape = aot_varlen.Shape((64, 64), 16, n_tokens=40, n_seq=3, heads=(8, 2))
    t, records, unit_start = _planned(shape, starts, lengths)
    expected, units = [], []
    for seq, (first, end) in enumerate(zip(starts, [*starts[1:], 40])):
        length = lengths[seq] if seq < 3 else 0
        for row0 in range(0, (end - first) * 4, 16):
            expected.append([seq, first, end - first, row0, length, 0, length - (end - first), 0])
            last = (min(row0 + 16, (end - first) * 4) - 1) // 4
            keys = max(0, length - (end - first) + last + 1)
            units += [max(1, -(-keys // 32))] * 2
    assert len(expected) <= t.n_qt and records[: len(expected)].tolist() == expected
    units += [0] * (t.n_tiles - len(units))
    assert unit_start.tolist() == [0, *np.cumsum(units), 0, 0]


def _divided(
    units: list[int], n_groups: int, programs: int, turn: int, rounds: bool, more: int = 0
) -> tuple[list[int], int, int]:
    """(units' starts, whole tiles, programs that share) as sum_varlen_units has them of units of query tiles."""
    n_tiles = len(units) * n_groups
    found = torch.full((n_tiles + 3,), -1, dtype=torch.int32)
    args = {"p_units": torch.tensor(units, dtype=torch.int32), "p_unit_start": found, "n_tiles": n_tiles, "CHUNK": 16}
    args |= {"n_groups": n_groups, "programs": programs, "turn": turn, "more": more, "ROUNDS": rounds}
    Launch(sum_varlen_units, (1,), args)()
    *starts, whole, sharing = found.tolist()
    return starts, whole, sharing


@pytest.mark.parametrize(
    ("units", "n_groups", "programs", "turn", "rounds", "found"),
    [
        ([512], 8, 132, 2, False, (512, 0, 128)),  # 16 parts of each
        ([40] * 32, 1, 132, 5, True, (40, 0, 128)),
        ([129, 130, 131, 132] * 4, 8, 132, 12, True, (132, 0, 128)),  # a tile each, shorter ones too
        ([10] * 66, 4, 132, 2, True, (0, 264, 132)),  # two rounds, nothing is left
        ([10] * 75, 4, 132, 12, True, (10, 264, 108)),  # and 36 tiles, in three parts
        ([10] * 75, 4, 132, 0, True, (-1, 132, 132)),  # which equal shares of all do sooner
        ([30] * 100, 1, 132, 2, True, (-1, 0, 132)),  # a tile each would leave programs idle
        ([30, 2, 30], 1, 12, 20, False, (-1, 0, 12)),  # a part without keys
        ([1], 2, 132, 2, False, (1, 0, 2)),
    ],
)
def test_how_tiles_are_divided(
    units: list[int], n_groups: int, programs: int, turn: int, rounds: bool, found: tuple[int, int, int]
) -> None:
    """found: units that tiles behind the whole ones count as, -1: as they have; whole tiles; programs that share."""
    starts, *rest = _divided([*units, 0], n_groups, programs, turn, rounds)
    alike, whole, sharing = found
    counted = np.diff(starts)[whole : len(units) * n_groups]
    assert rest == [whole, sharing]
    own = np.repeat(units, n_groups)[whole:]
    np.testing.assert_array_equal(counted, own if alike < 0 else np.full_like(own, alike))


def test_each_unit_has_one_program(rng: np.random.Generator) -> None:
    """Whatever tiles there are; where they are cut evenly, a program has one part, with a unit of the tile's own."""
    evenly = 0
    for _ in range(150):
        longest, spread = int(rng.integers(1, 60)), int(rng.choice([0, 1, 3, 60]))
        units = rng.integers(max(1, longest - spread), longest + 1, int(rng.integers(1, 12))).tolist()
        n_groups, programs, more = int(rng.integers(1, 5)), int(rng.integers(1, 60)), int(rng.integers(3))
        listed = [n + more for n in units] + [0] * 2
        starts, whole, sharing = _divided(listed, n_groups, programs, 3, bool(rng.integers(2)), more)
        own = np.repeat(units, n_groups)
        counted = np.diff(starts)[whole : len(own)]
        assert not whole % programs and 1 <= sharing <= programs and (counted >= own[whole:]).all()
        total, even = starts[-1], len(set(counted.tolist())) == 1 and sharing % len(counted) == 0
        evenly += even and bool((counted > own[whole:]).any())
        for tile, n in enumerate(own[whole:].tolist(), whole):
            first, end = starts[tile], starts[tile + 1]
            parts = [(p * total // sharing, (p + 1) * total // sharing) for p in range(sharing)]
            parts = [
                (max(low, first) - first, min(high, end) - first) for low, high in parts if low < end and high > first
            ]
            assert [i for low, high in parts for i in range(low, min(high, n))] == list(range(n))
            if even:
                assert len(parts) == sharing // len(counted) and all(low < n for low, _ in parts)
    assert evenly > 10


def test_more_sequences_than_are_looked_at_at_a_time() -> None:
    """1500 sequences of one token, each tenth without one."""
    ends = np.cumsum([0 if i % 10 == 0 else 1 for i in range(1500)]).tolist()
    shape = aot_varlen.Shape((64, 64), 0, n_tokens=1400, n_seq=1500, heads=(2, 2))
    t, records, _ = _planned(shape, [0, *ends], list(range(0, 40)))
    seqs = [i for i in range(1500) if i % 10] + [1500] * 4
    assert records[: len(seqs), 0].tolist() == seqs and t.n_qt <= 1400


def test_wrong_numbers_stay_inside(rng: np.random.Generator) -> None:
    """Starts, lengths and pages that can't be: results mean nothing, but nothing outside is read."""
    t, records, unit_start = _planned(
        aot_varlen.Shape((64, 64), 16, n_tokens=40, n_seq=3, heads=(8, 2)), [-5, 99, 20, 1000], [-1, 10**9, 70]
    )
    seq, first, n, _, length, _ = records[:, :6].T
    assert (first >= 0).all() and ((first + n) <= 40).all() and (length >= 0).all() and (length <= 256 * 16).all()
    assert (torch.diff(unit_start[:-2]) >= 0).all() and (seq >= 0).all()


#: What the decode kernel is emulated on, over a GPU of six multiprocessors: heads of each size, pages smaller and
#: larger than k-blocks, packed keys, windows, ALiBi, sinks, queries before the first key.
EMULATED = (
    r"d=.64,64.,heads=.4,2.,types=.f16,f16.,page=(16|32|256),seqs=..2,40.*130.,.1,33..(,tables=shared)?.$",
    r"page=0,seqs=..5,2.,.3,0.", r"d=.(128,128|256,256).*page=16,seqs=..2,40", r"page=16.*1,65.*window=20.$",
    r"page=16,seqs=..1,700.*window=100.$", r"2,40.*max_bias", r"sinks=near,spare|spare=3,softcap=10.0,sinks=large",
    r"types=.f8_e4m3,f8_e4m3.*2,40",
)  # fmt: skip


def _emulated() -> list[Case]:
    """Without those of score functions and explicit masks, which are other kernels'."""
    cases = [c for c in all_cases("FLASH_ATTN_VARLEN") if "score=" not in str(c) and "mask=" not in str(c)]
    return [c for c in cases if any(re.search(part, str(c)) for part in EMULATED)]


@pytest.mark.parametrize("case", _emulated(), ids=str)
@pytest.mark.parametrize("schedule", [None, "stream_k"])
def test_the_decode_kernel(case: Case, schedule: str | None) -> None:
    """Its source, with copies that land as late as they may; memory that nothing was written to holds NaN."""
    chosen, _, found, expected = varlen_emulation.run(case, 6, schedule=schedule)
    assert chosen.kernel == "varlen_decode"
    np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.parametrize(("d", "kernel"), [((64, 64), "varlen_decode"), ((40, 40), "varlen")])
def test_tiles_of_about_one_length(d: tuple[int, int], kernel: str) -> None:
    """Cut into as many parts each; the shorter ones lack some units of the last, and some programs have nothing."""
    case = as_case("FLASH_ATTN_VARLEN", Axes(d=d, page=16, seqs=((1, 1000), (1, 860))))
    chosen, _, found, expected = varlen_emulation.run(case, 9)
    assert chosen.kernel == kernel
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_pages_of_blocks_have_their_own_loop_s_configuration() -> None:
    """The kernel has no decode_thin.py, whose rows say other numbers of keys and warps."""
    found = aot_varlen.launches("sm_90", aot_varlen.Shape((128, 128), 16, "q8_0"))
    launch = next(step for step in found if step.name == "flash_attn_varlen_decode")
    wanted = CONFIGS[128, "q8_0"]
    assert (launch.args["BLOCK_N"], launch.options["num_warps"]) == (wanted.block_n, wanted.warps)


def test_what_is_said_of_a_choice() -> None:
    """Bounds are told as bounds, and no mask is spoken of."""
    few, many = (aot_varlen.chosen("sm_90", shape) for shape in (aot_varlen.SHAPES[0], aot_varlen.SHAPES[5]))
    assert few.kernel == "varlen_decode" and few.choice.schedule == many.choice.schedule == "stream_k"
    assert many.kernel == "hopper_varlen" and "it takes 16 query rows" in many.refused["varlen_decode"]
    facts = [f"{what}: {said}" for what, said in attention_facts(attention_plan(few, 132, None))]
    assert any("pages of 16, by the block table" in fact for fact in facts) and not any("mask:" in f for f in facts)
    assert any("at most 16: 8 of 8 tokens of 8 sequences x 2 groups" in fact for fact in facts), facts


@pytest.mark.parametrize(("n_tokens", "mask"), [(8, "new"), (512, "keys")])
def test_what_is_said_of_a_mask(n_tokens: int, mask: str) -> None:
    """An explicit one is the portable kernel's, and the others say so."""
    found = aot_varlen.chosen("sm_90", aot_varlen.Shape((128, 128), 16, n_tokens=n_tokens, mask=mask))
    assert found.kernel == "varlen" and set(found.refused) == {"varlen_decode", "hopper_varlen_mla", "hopper_varlen"}
    said = [name for name, why in found.refused.items() if "explicit masks are the portable kernel's" in why]
    assert {"hopper_varlen", "varlen_decode" if n_tokens == 8 else "hopper_varlen_mla"} <= set(said)
    facts = [f"{what}: {said}" for what, said in attention_facts(attention_plan(found, 132, None))]
    columns = {"new": "300 columns of a sequence's new tokens", "keys": "300 columns of a sequence's keys"}
    assert any(f"mask: {columns[mask]}" in fact for fact in facts) and any("a mask beside that" in f for f in facts)


@pytest.mark.parametrize(("n_tokens", "own", "schedule"), [(20480, True, "tile"), (20480, False, "stream_k"),
                                                           (128, True, "stream_k")])  # fmt: skip
def test_packed_texts_are_a_program_a_tile(n_tokens: int, own: bool, schedule: str) -> None:
    """Where they attend to themselves and are many; else one tile may be all the work."""
    q, k, v = (Tensor("f32", (32, n_tokens, 12)) for _ in "qkv")
    starts, others = Tensor("i32", (65,)), Tensor("i32", (65,))
    node = ops.flash_attn_varlen(q, k, v, starts, 0.1, k_starts=starts if own else others, causal=False)
    memory: dict[Tensor, TritonBuffer] = {}

    def place(t: Tensor) -> tuple[TritonBuffer, int]:
        empty = torch.zeros(t.nbytes, dtype=torch.uint8)
        return memory.setdefault(t, TritonBuffer(empty, Usage.COMPUTE)), 0

    launcher = Launcher(aot_varlen.target_of("sm_90"), place)
    launcher.launches(Attention(node))
    assert launcher.chosen[node].choice.schedule == schedule


@pytest.mark.parametrize("shape", aot_varlen.SHAPES, ids=str)
def test_launches_that_overlap_touch_nothing_in_common(shape: aot_varlen.Shape) -> None:
    """Lists of tiles are made in every run, and read before the launch ahead has ended."""
    steps = aot_varlen.launches("sm_90", shape)
    events = [Event.of(step.info(), "attention") for step in (*steps, *steps[2:])]  # two layers of one list
    assert violations(events) == []
