"""The triton backend, without a GPU in Triton's interpreter: kernels on small shapes, and what surrounds them."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import graphrt
from graphrt.backend import Backend, get_backend
from graphrt.backends.triton import device
from graphrt.dtypes import dtype
from graphrt.errors import BackendError
from graphrt.graph import Graph
from graphrt.ops.flash_attn_ext import flash_attn_ext, flash_attn_lse
from graphrt.ops.view import view
from graphrt.tensor import Flag, Tensor
from graphrt.testing import Case, all_cases
from graphrt.tools.conformance.run.step import run_case

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton.kernels.flash_attn import configs, portable
from graphrt.backends.triton.kernels.flash_attn.chooser import Device, choose
from graphrt.backends.triton.kernels.flash_attn.chooser import Problem as Sizes
from graphrt.backends.triton.kernels.flash_attn.fusions import attention_of
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlans
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling, split_head

#: On a GPU the conformance tool runs whole sets; this is every n-th case of the quick one, others for each schedule.
EVERY = 6
SLOW = ("n_kv=10000", "n_kv=4097", "layout=far", "n_q=512")
REFUSED = ("dropout_p=", "bias=[")


def _cases() -> list[Case]:
    found = [c for op in ("FLASH_ATTN_EXT", "FLASH_ATTN_LSE") for c in all_cases(op, "quick")]
    return [c for c in found if not any(part in str(c) for part in (*SLOW, *REFUSED))]


def _some(schedule: str | None) -> list[Case]:
    names = (None, "tile", "split", "stream_k")
    every = EVERY if schedule is None else 4 * EVERY
    return [c for c in _cases() if zlib.crc32(str(c).encode()) % every == names.index(schedule)]


@pytest.fixture(scope="module")
def backend() -> Backend:
    return get_backend("triton")


@pytest.mark.parametrize("case", _some(None), ids=str)
def test_a_case(case: Case, backend: Backend) -> None:
    outcome = run_case(case, backend)
    assert outcome.status == "pass", outcome.message


@pytest.mark.parametrize("schedule", ["tile", "split", "stream_k"])
def test_cases_under_a_forced_schedule(schedule: str) -> None:
    backend = get_backend("triton", schedule=schedule)
    cases = _some(schedule)
    assert len(cases) >= 10
    for case in cases:
        outcome = run_case(case, backend)
        assert outcome.status == "pass", (str(case), outcome.message)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(BackendError, match="one of tile, split, stream_k, got 'lean'"):
        get_backend("triton", schedule="lean")


@pytest.mark.parametrize(
    ("kind", "d", "reason"),
    [
        ("q4_K", 256, "k must be one of f32, f16, .* this one is q4_K"),
        ("f16", 640, "head sizes up to 576, k's is 640"),
    ],
)
def test_what_it_refuses_has_a_reason(kind: str, d: int, reason: str, backend: Backend) -> None:
    q, k = Tensor(dtype("f32"), (d, 1, 2)), Tensor(dtype(kind), (d, 8, 2))
    found = backend.supports(flash_attn_ext(q, k, k, None, 1.0))
    assert found is not None
    assert re.search(reason, found), found


def test_types_that_nobody_decodes_are_refused(backend: Backend) -> None:
    w, x = Tensor(dtype("q8_K"), (256, 8)), Tensor(dtype("f32"), (256, 1))
    assert backend.supports(graphrt.ops.mul_mat(w, x)) == "it has no decoder for q8_K"


@pytest.mark.parametrize(
    ("d", "parts"), [(576, (512, 64)), (112, (128, 0)), (80, (64, 16)), (1, (16, 0)), (65, (64, 16))]
)
def test_a_head_size_is_covered_by_powers_of_two(d: int, parts: tuple[int, int]) -> None:
    assert split_head(d) == parts
    assert all(sum(split_head(n)) >= n and sum(split_head(n)) < 2 * max(n, 16) for n in range(1, 577))


class Setup:
    """An attention over random memory. leafs: by name, torch tensors that may be changed between runs."""

    def __init__(
        self, n_q: int, n_kv: int, mask: np.ndarray | None, heads: tuple[int, int] = (4, 2), d: int = 32
    ) -> None:
        rng = np.random.default_rng(7)
        self.q = Tensor(dtype("f32"), (d, n_q, heads[0]), name="q", flags=Flag.INPUT)
        self.k, self.v = (Tensor(dtype("f16"), (d, n_kv, heads[1]), name=n, flags=Flag.INPUT) for n in "kv")
        self.mask = None
        if mask is not None:
            self.mask = Tensor(dtype("f16"), mask.shape[::-1], name="mask", flags=Flag.INPUT)
        self.values = {
            t: rng.standard_normal(t.shape).astype(np.float32 if t is self.q else np.float16)
            for t in (self.q, self.k, self.v)
        }
        if self.mask is not None and mask is not None:
            self.values[self.mask] = mask.astype(np.float16).reshape(self.mask.shape)

    def run(self, backend: Backend, nodes: list[Tensor], times: int = 1) -> list[np.ndarray]:
        graph = Graph(*nodes)
        exe = graphrt.prepare(graph, backend)
        for t, value in self.values.items():
            if t in graph.leafs:
                exe.write(t, value)
        for _ in range(times):
            exe.run()
        return [exe.read(n) for n in nodes]


def causal(n_q: int, n_kv: int) -> np.ndarray:
    hidden = np.arange(n_kv)[None] > np.arange(n_q)[:, None] + n_kv - n_q
    return np.where(hidden, -np.inf, 0.0)


def test_attention_and_its_lse_run_as_one_kernel(backend: Backend) -> None:
    s = Setup(5, 70, causal(5, 70))
    out = flash_attn_ext(s.q, s.k, s.v, s.mask, 0.2)
    lse = flash_attn_lse(s.q, s.k, s.mask, 0.2)
    exe = graphrt.prepare(Graph(out, lse), backend)
    assert [g.label for split in exe.splits for g in split.groups] == ["FLASH_ATTN_EXT+FLASH_ATTN_LSE"]
    both = s.run(backend, [out, lse])
    (alone,) = s.run(backend, [flash_attn_lse(s.q, s.k, s.mask, 0.2)])
    expected = s.run(get_backend("cpu"), [out, lse])
    np.testing.assert_array_equal(both[1], alone)
    for a, e in zip(both, expected):
        np.testing.assert_allclose(a, e, rtol=2e-3, atol=2e-3)


def _classes(mask: np.ndarray, tokens: int, block_n: int) -> dict[tuple[int, int], int]:
    """0, 1 or 2 for each (tile of so many queries, k-block): skipped, full, partial."""
    n_q, n_kv = mask.shape
    found = {}
    for i in range(0, n_q, tokens):
        for j in range(0, n_kv, block_n):
            part = mask[i : i + tokens, j : j + block_n]
            whole = part.shape[1] == block_n
            found[i // tokens, j // block_n] = 0 if np.isneginf(part).all() else 1 if whole and (part == 0).all() else 2
    return found


def _of_blocks(kinds: str, n_q: int, n_kv: int) -> np.ndarray:
    """A mask whose k-blocks of 64 are, in turn, hidden, full or partial."""
    blocks = {"-": np.full(64, -np.inf), "f": np.zeros(64), "p": np.where(np.arange(64) < 9, -np.inf, 0.0)}
    return np.tile(np.concatenate([blocks[kind] for kind in kinds])[:n_kv], (n_q, 1))


@pytest.mark.parametrize(
    "kind",
    [
        *("causal", "window", "holes", "bias", "hidden", "open"),
        *("f-fp-", "ff-p-", "-ffpp", "fp-p-", "-p-pp", "--pp-", "fpf-p", "pf-p-", "ff-pp"),
    ],
)
def test_the_plan_of_a_mask(kind: str) -> None:
    n_q, n_kv, rng = 70, 300, np.random.default_rng(3)
    mask = {
        "causal": causal(n_q, n_kv),
        "window": np.where(np.arange(n_kv)[None] < np.arange(n_q)[:, None] + 100, -np.inf, causal(n_q, n_kv)),
        "holes": np.where(np.kron(rng.random((7, 10)) < 0.5, np.ones((10, 30))) > 0, -np.inf, 0.0),
        "bias": rng.standard_normal((n_q, n_kv)),
        "hidden": np.full((n_q, n_kv), -np.inf),
        "open": np.zeros((n_q, n_kv)),
    }.get(kind)
    mask = _of_blocks(kind, n_q, n_kv) if mask is None else mask
    s = Setup(n_q, n_kv, mask)
    target = device.target()
    from graphrt.backend import Usage
    from graphrt.backends.triton.memory import allocate

    places = {}
    node = flash_attn_ext(s.q, s.k, s.v, s.mask, 0.2)
    for t in (*s.values, node):
        places[t] = allocate(t.nbytes, Usage.COMPUTE, target.device)
        if t in s.values:
            places[t].write(0, s.values[t].reshape(-1).view(np.uint8))
    p = Problem(attention_of(node), lambda t: (places[t], 0))
    t = Tiling.of(p, 32, 64)
    plan, launches = MaskPlans(target.device).plan(p, t, True)
    for launch in launches:
        launch()
    expected = _classes(mask.astype(np.float16), 32 // t.pack, 64)
    assert t.n_qt == 5 and t.n_blocks == 5
    lengths = []
    for i in range(t.n_qt):
        full = [j for j in range(t.n_blocks) if expected[i, j] == 1]
        partial = [j for j in range(t.n_blocks) if expected[i, j] == 2]
        assert plan.counts[i].tolist() == [len(full), len(partial)]
        assert plan.blocks[i][: len(full) + len(partial)].tolist() == full + partial
        lengths.append(max(1, len(full) + len(partial)))
        first, run = plan.runs[i].tolist()
        assert (full + partial)[:run] == list(range(first, first + run)), "the run is the list's start"
        for listed in (full, full + partial):
            assert run >= len(listed) or listed != list(range(listed[0], listed[0] + len(listed)))
        tile = mask[i * 16 : (i + 1) * 16]
        for j in range(t.n_blocks):
            seen = ~np.isneginf(tile[:, j * 64 : (j + 1) * 64]).all(0)
            bits = np.array(plan.seen[i, j].tolist(), np.int64) & 0xFFFFFFFF
            got = (bits[:, None] >> np.arange(32)) & 1
            np.testing.assert_array_equal(got.reshape(-1)[: len(seen)], seen)
    sums = np.concatenate([[0], np.cumsum(lengths * t.n_groups)])
    np.testing.assert_array_equal(plan.unit_start.tolist(), sums)


@pytest.mark.parametrize(("heads", "block_m"), [((6, 2), 32), ((10, 2), 16), ((24, 1), 16), ((4, 4), 16)])
def test_the_plan_of_tiles_that_end_inside_a_token(heads: tuple[int, int], block_m: int) -> None:
    """A tile's first and last token count with all that they see, though only some of their heads are in it."""
    n_q, n_kv, rng = 37, 300, np.random.default_rng(6)
    hidden = np.kron(rng.random((n_q, 5)) < 0.9, np.ones((1, 64)))[:, :n_kv] > 0
    s = Setup(n_q, n_kv, np.where(hidden, -np.inf, 0.0), heads)
    target, node = device.target(), flash_attn_ext(s.q, s.k, s.v, s.mask, 0.2)
    from graphrt.backend import Usage
    from graphrt.backends.triton.kernels.flash_attn.mask_blocks import FULL, PARTIAL, block_kinds
    from graphrt.backends.triton.memory import allocate

    places = {t: allocate(t.nbytes, Usage.COMPUTE, target.device) for t in (*s.values, node)}
    places[s.mask].write(0, s.values[s.mask].reshape(-1).view(np.uint8))
    p = Problem(attention_of(node), lambda t: (places[t], 0))
    t = Tiling.of(p, block_m, 64)
    plan, launches = MaskPlans(target.device).plan(p, t, False)
    for launch in launches:
        launch()
    kinds = block_kinds(s.values[s.mask].reshape(1, 1, n_q, n_kv), t)
    assert np.array_equal(plan.counts.cpu().numpy(), np.stack([(kinds == k).sum(1) for k in (FULL, PARTIAL)], 1))


@pytest.mark.parametrize("n_kv", [203, 256])
def test_the_plan_of_a_dense_mask(n_kv: int) -> None:
    """Blocks that hide nothing are full, whatever they add: one value of -inf, or an end inside, makes them partial."""
    n_q, rng = 37, np.random.default_rng(7)
    mask = rng.normal(size=(n_q, n_kv))
    mask[:16, 64:128] = -np.inf
    mask[20, 129] = mask[36, 62] = -np.inf
    s = Setup(n_q, n_kv, mask, (2, 2))
    target, node = device.target(), flash_attn_ext(s.q, s.k, s.v, s.mask, 0.2)
    from graphrt.backend import Usage
    from graphrt.backends.triton.kernels.flash_attn.mask_blocks import block_kinds
    from graphrt.backends.triton.memory import allocate

    places = {t: allocate(t.nbytes, Usage.COMPUTE, target.device) for t in (*s.values, node)}
    places[s.mask].write(0, s.values[s.mask].reshape(-1).view(np.uint8))
    p = Problem(attention_of(node), lambda t: (places[t], 0))
    t = Tiling.of(p, 16, 64)
    plans = MaskPlans(target.device)
    plan, launches = plans.plan(p, t, False, dense=True)
    assert plans.plan(p, t, False)[0] is not plan, "another plan than that of kernels that add nothing to full blocks"
    for launch in launches:
        launch()
    last = 2 if n_kv == 203 else 1
    expected = np.array([[1, 0, 1, last], [1, 1, 2, last], [2, 1, 1, last]])
    np.testing.assert_array_equal(plan.kinds.cpu().numpy(), expected)
    np.testing.assert_array_equal(block_kinds(s.values[s.mask].reshape(1, 1, n_q, n_kv), t, dense=True), expected)


def test_a_prepared_graph_follows_its_mask_from_run_to_run(backend: Backend) -> None:
    """Lengths live in device memory: one program serves every number of visible keys, none among them."""
    s = Setup(1, 200, np.zeros((1, 200)))
    out = flash_attn_ext(s.q, s.k, s.v, s.mask, 0.2)
    exe = graphrt.prepare(Graph(out), backend)
    for t, value in s.values.items():
        exe.write(t, value)
    for n in (200, 1, 0, 77, 128, 200):
        mask = np.where(np.arange(200) < n, 0.0, -np.inf).astype(np.float16).reshape(s.mask.shape)
        exe.write(s.mask, mask)
        s.values[s.mask] = mask
        exe.run()
        (expected,) = s.run(get_backend("cpu"), [out])
        np.testing.assert_allclose(exe.read(out), expected, rtol=2e-3, atol=2e-3)


def test_a_repair_does_the_marked_tiles_and_no_other() -> None:
    s = Setup(70, 130, causal(70, 130))
    target = device.target()
    from graphrt.backend import Usage
    from graphrt.backends.triton.memory import allocate

    node = flash_attn_ext(s.q, s.k, s.v, s.mask, 0.2)
    places = {t: allocate(t.nbytes, Usage.COMPUTE, target.device) for t in (*s.values, node)}
    for t, value in s.values.items():
        places[t].write(0, value.reshape(-1).view(np.uint8))
    p = Problem(attention_of(node), lambda t: (places[t], 0))
    t = Tiling.of(p, 32, 64, pack=1)
    config = configs.Config(32, 64, 4 if target.is_nvidia else 1, 1)
    plan, launches = MaskPlans(target.device).plan(p, t, False)
    sizes = Sizes(p.n_q, p.n_kv, t.n_groups, 2, 1, p.k.d, p.v.d, True, 32, 64)
    choice = choose(sizes, Device(target.sm_count), "tile")
    scratch = torch.full((1,), math.nan, device=target.device)
    args = portable.main_arguments(p, t, config, choice, plan, scratch, target)
    bad = torch.zeros(t.n_tiles + 1, dtype=torch.int32, device=target.device)
    marked = [1, 4, t.n_tiles - 1]
    bad[marked] = 7 << 16
    for launch in [*launches, portable.repair_launch(args, bad, config.warps, target)]:
        launch()
    out = places[node].read(0, node.nbytes).view(np.float32).reshape(70, 4, 32)
    (expected,) = s.run(get_backend("cpu"), [node])
    for tile in range(t.n_tiles):
        head, rows = tile // t.n_qt, slice(tile % t.n_qt * 32, tile % t.n_qt * 32 + 32)
        if tile in marked:
            np.testing.assert_allclose(out[rows, head], expected[0, rows, head], rtol=2e-3, atol=2e-3)
        else:
            assert np.isnan(out[rows, head]).all(), "an unmarked tile was written"
    assert int(bad[-1]) == len(marked), "repaired tiles are counted"


@pytest.mark.gpu
@pytest.mark.skipif(device.interpreting() or not torch.cuda.is_available(), reason="needs a GPU")
def test_replays_of_the_captured_graph_are_bitwise_equal() -> None:
    backend = get_backend("triton")
    for schedule, n_q, n_kv in (("stream_k", 1, 5000), ("split", 3, 5000), ("tile", 200, 900)):
        s = Setup(n_q, n_kv, causal(n_q, n_kv), heads=(8, 2), d=128)
        out = flash_attn_ext(s.q, s.k, s.v, s.mask, 0.1)
        exe = graphrt.prepare(Graph(out), get_backend("triton", schedule=schedule))
        for t, value in s.values.items():
            exe.write(t, value)
        exe.run()
        first = exe.read(out)
        for _ in range(1000):
            exe.run()
        np.testing.assert_array_equal(exe.read(out), first)
    assert backend.deterministic


@pytest.mark.gpu
@pytest.mark.skipif(device.interpreting() or not torch.cuda.is_available(), reason="needs a GPU")
def test_processes_that_share_a_gpu_get_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    from graphrt.tools.cli import main

    command = ["test", "-b", "triton-fast", "--share", "6", "--seconds", "20"]
    assert main(command) == 0, capsys.readouterr().out


#: What compiled code may depend on: how far apart rows and panels lie (vector loads), and whether a multiple of 16
#: keys, or cells of a whole cache (NewRows), is there.
_SPECIALIZED = {"n_kv", "s_panel", "new", "caches", *(f"s{t}_{axis}" for t in "qkvmb" for axis in "ths")}


def test_nothing_is_compiled_by_a_length() -> None:
    code = """
from graphrt.backends.triton.kernels.flash_attn import fixup, forward, mask
for kernel in (forward.flash_attn, fixup.flash_attn_fixup, mask.classify_blocks, mask.list_blocks, mask.sum_units):
    print(*(p.name for p in kernel.params if not p.is_constexpr and not p.do_not_specialize and p.name[:2] != "p_"))
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True, timeout=300)
    floats = {"sign", "factor", "softcap"}  # Triton specializes no floats
    assert set(done.stdout.split()) <= _SPECIALIZED | floats


def test_a_view_of_k_as_v(backend: Backend) -> None:
    s = Setup(3, 90, causal(3, 90), d=64)
    v = view(s.k, (32, 90, 2), s.k.nb[1:])
    out = flash_attn_ext(s.q, s.k, v, s.mask, 0.1)
    del s.values[s.v]
    np.testing.assert_allclose(s.run(backend, [out])[0], s.run(get_backend("cpu"), [out])[0], rtol=2e-3, atol=2e-3)


def test_listing_backends_does_not_import_triton() -> None:
    code = "import sys; from graphrt.backend import discover; discover(); sys.exit('triton.language' in sys.modules)"
    assert importlib.util.find_spec("triton") is not None
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0


def test_tune_prints_rows_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from graphrt.tools.cli import main

    path = tmp_path / "rows.txt"
    command = ["tune", "--tiny", "--form", "decode", "-d", "64", "--kind", "half", "-o", str(path)]
    assert main(command) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("Row(")]
    assert row in path.read_text()
    made = eval(row.split("#")[0].strip().rstrip(","), {"Row": configs.Row, "Config": configs.Config})
    assert made.rows == 16 and made.d == 64 and made.kinds == ("half",) and made.config.block_m == 16
