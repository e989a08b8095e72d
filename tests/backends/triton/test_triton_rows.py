"""What moves, rotates and orders rows on the triton backend: conformance cases, rounding, the fused form."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import gguf
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from graphrt import float8, ops
from graphrt.backend import Group, Place, Region, Usage
from graphrt.backends.triton import device
from graphrt.backends.triton.backend import TritonBackend
from graphrt.backends.triton.support import why_unsupported
from graphrt.dtypes import FLOATS8, dtype
from graphrt.judge import judge, judge_written
from graphrt.op import op_spec
from graphrt.ops.rope import RopeParams
from graphrt.tensor import Tensor
from graphrt.testing import Case, all_cases, dequantize
from graphrt.tools.conformance.run.step import run_case

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from support.aot_rows import context, latent_group, rope_cache_found
from support.gluon_emulator import run_ptx
from support.planned import lowered_group

from graphrt.backends.triton.context import Context
from graphrt.backends.triton.kernels import copy, kq_mask, penalize, rope, rows, sample, sort
from graphrt.backends.triton.kernels.common.float8 import E4M3_BITS, E4M3_CVT
from graphrt.backends.triton.kernels.rope_fusions import RopeCache
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.program import Program

LOWERINGS = {
    **rows.LOWERINGS, **copy.LOWERINGS, **rope.LOWERINGS, **sample.LOWERINGS, **sort.LOWERINGS, **kq_mask.LOWERINGS,
    **penalize.LOWERINGS,
}  # fmt: skip
#: `graphrt test -b triton` runs all cases; this is every n-th of the quick ones, less what takes long interpreted.
EVERY = {
    "SET_ROWS": 4, "GET_ROWS": 7, "ROPE": 5, "CPY": 4, "ARGMAX": 1, "TOP_K": 1, "SAMPLE": 4, "KQ_MASK": 3,
    "SAMPLE_EACH": 1, "PENALIZE": 1,
}  # fmt: skip
SLOW = ("most=1024", "top_k=1024", "n_rows=700", "batch=[4,2]", "n=4096", "n=8193", "ne=[40,5,33,1]")
QUANTIZED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")


class NodeByNode(TritonBackend):
    """The backend with this file's lowerings alone."""

    def fuse(self, region: Region) -> list[Group]:
        return [Group([node]) for node in region.nodes]

    def supports(self, node: Tensor) -> str | None:
        return None

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        ctx = Context(place, self.target, self.exact)
        nodes = [group.nodes for group in groups if not op_spec(group.nodes[0].op).is_view]
        steps = [step for n in nodes for step in LOWERINGS[n[0].op](n, ctx)]

        def run() -> None:
            for step in steps:
                step()

        return Program(groups, run)


def _cases() -> list[Case]:
    found = [case for op in LOWERINGS for case in all_cases(op, "quick")]
    some = [c for c in found if zlib.crc32(str(c).encode()) % EVERY.get(c.op, 8) == 0]
    return [c for c in some if not any(part in str(c) for part in SLOW)]


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_a_case(case: Case) -> None:
    outcome = run_case(case, NodeByNode())
    assert outcome.status == "pass", outcome.message


def run(nodes: Sequence[Tensor], ctx: Context) -> None:
    """Runs nodes one by one."""
    for node in nodes:
        if not op_spec(node.op).is_view:
            for step in LOWERINGS[node.op]([node], ctx):
                step()


def fill(t: Tensor, values: np.ndarray | torch.Tensor, ctx: Context) -> None:
    ctx.view(t).torch().copy_(torch.as_tensor(values).reshape(t.shape))


def read(t: Tensor, ctx: Context) -> np.ndarray:
    """The elements of a contiguous tensor as stored, in torch's shape; bytes of a quantized one, bits of bf16."""
    data = ctx.view(t).data.cpu()
    return (data.view(torch.uint16) if t.dtype.name == "bf16" else data).numpy().reshape(*t.shape[:3], -1)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_rounding_to_blocks_is_the_reference_codes(kind: str) -> None:
    rng = np.random.default_rng(5)
    x = np.concatenate([rng.normal(size=(12, 64)), rng.normal(size=(4, 64)) * 1e-6, rng.normal(size=(4, 64)) * 1e3])
    steps = rng.integers(-16, 17, (6, 64)) / 2  # ties: of magnitudes with both signs, and halves between codes
    x = np.concatenate([x, steps, np.zeros((1, 64)), np.full((1, 64), -3.25)]).astype(np.float32)
    source, target = Tensor("f32", x.shape[::-1]), Tensor(kind, x.shape[::-1])
    node, ctx = ops.cpy(source, target), context(device.target())
    fill(source, x, ctx)
    run([node], ctx)
    expected = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(read(target, ctx)[0, 0], expected)


def test_rounding_to_bf16_is_to_nearest_even_and_keeps_nan() -> None:
    rng = np.random.default_rng(6)
    bits = rng.integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:4] = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800001]  # two ties, the largest, a NaN of low bits only
    x = torch.from_numpy(bits.view(np.float32))
    source, target, ids = Tensor("f32", (4096, 1)), Tensor("bf16", (4096, 1)), Tensor("i32", (1,))
    ctx = context(device.target())
    fill(source, x, ctx)
    run([ops.set_rows(source, ids, target)], ctx)
    found, expected = ctx.view(target).data.cpu(), x.bfloat16()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("kind", FLOATS8)
def test_all_codes_of_8_bits_come_back(kind: str) -> None:
    """Each code's number, and that number's code; what is too large, halfway between two numbers, tiny or NaN."""
    dt, codes = dtype(kind), np.arange(256, dtype=np.uint8)
    numbers = float8.decode(codes, dt)
    largest, finite = FLOATS8[kind].largest, np.isfinite(numbers)
    halfway = (numbers[:127] + numbers[1:128]) / 2
    hard = np.concatenate([numbers, halfway[np.isfinite(halfway)], [largest * 1.1, -1e30, np.inf, -np.inf, 1e-9, -0.0]])
    stored, decoded, ids = Tensor(kind, (256, 1)), Tensor("f32", (256, 1)), Tensor("i32", (1,))
    source, target = Tensor("f32", (len(hard), 1)), Tensor(kind, (len(hard), 1))
    ctx = context(device.target())
    fill(stored, codes, ctx)
    fill(source, hard, ctx)
    by_row, by_copy = ops.get_rows(stored, ids), ops.cpy(stored, decoded)
    run([by_row, by_copy, ops.set_rows(source, ids, target)], ctx)
    for node in (by_row, decoded):
        assert np.array_equal(read(node, ctx)[0, 0, 0], numbers.astype(np.float32), equal_nan=True)
    found = read(target, ctx)[0, 0, 0]
    assert np.array_equal(found[:256][finite], codes[finite])
    back, right = float8.decode(found, dt), float8.decode(float8.encode(hard, dt), dt)
    assert np.array_equal(back, right, equal_nan=True) and np.nanmax(np.abs(back)) == largest
    assert np.array_equal(np.signbit(back), np.signbit(hard))


@pytest.mark.parametrize("asm", [E4M3_CVT, E4M3_BITS], ids=["sm_89", "sm_80"])
def test_the_instructions_that_read_8_bits(asm: Any) -> None:
    codes = np.concatenate([np.roll(np.arange(256, dtype=np.uint8), i) for i in range(4)])  # each at every place
    words = run_ptx(asm.value, [np.int32, np.int32], [codes.view(np.uint32)])
    found = np.stack(words, -1).reshape(-1).view(np.float16)
    assert np.array_equal(found.astype(np.float64), float8.decode(codes, dtype("f8_e4m3")), equal_nan=True)


def _filled(found: RopeCache, n_tokens: int) -> Context:
    """Memory for the nodes of a fused group, with the same random inputs every time."""
    rng = np.random.default_rng(7)
    ctx = context(device.target())
    for t in dict.fromkeys((found.q["a"], found.k["a"], found.v_set["rows"])):
        fill(t, rng.normal(size=t.shape).astype(np.float32), ctx)
    fill(found.q["positions"], rng.integers(0, 100_000, n_tokens), ctx)
    fill(found.k_set["ids"], rng.permutation(found.k_set.ne[1])[:n_tokens], ctx)
    return ctx


#: kind, n_tokens, mode, d, n_dims, heads: one token; heads of 40, so that blocks hold parts of two; several a program.
FUSED = [
    *((kind, 1, "neox", 64, 64, (4, 2)) for kind in ("f32", "f16", "bf16", "f8_e4m3", *QUANTIZED)),
    *((kind, 3, "normal", 40, 20, (5, 4)) for kind in ("f16", "bf16", *QUANTIZED)),
    ("f16", 11, "normal", 32, 24, (3, 2)), ("q8_0", 9, "neox", 32, 32, (4, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "n_tokens", "mode", "d", "n_dims", "heads"), FUSED)
def test_the_fused_form_is_the_single_ones(
    kind: str, n_tokens: int, mode: str, d: int, n_dims: int, heads: tuple[int, int]
) -> None:
    layer = rope_cache_found(kind, n_tokens, mode, d, n_dims, heads)
    one, fused = _filled(layer, n_tokens), _filled(layer, n_tokens)
    run(layer[:4], one)
    steps = rope.lower_rope_cache(layer, fused)
    assert len(steps) == 2  # the table, and all the rest
    for step in steps:
        step()
    for node in (layer.q, layer.k_set["target"], layer.v_set["target"]):
        found, expected = read(node, fused), read(node, one)
        if node.dtype.is_quantized:
            assert judge_written(node, found, expected).ok
        else:  # sums may be rounded once or twice
            a, e = (dequantize(x, node.dtype) for x in (found, expected))
            assert judge(node, a, e, e).ok


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("form", ["rope_cache", "latent_rope_cache", "SET_ROWS"])
def test_no_row_is_written_that_is_not_there(kind: str, form: str) -> None:
    """Ids before the first and behind the last, as tokens of nobody have; memory around the cache stays as it is."""
    group, found = latent_group(kind, 4, "neox"), rope_cache_found(kind, 4, "neox", 64, 64, (4, 2))
    sets = [group.captured.row.k_set] if form == "latent_rope_cache" else [found.k_set, found.v_set]
    ctx = context(device.target())
    plain, middle = ctx.place, {}
    for root in (s["target"].root for s in sets):
        memory = torch.full((3 * root.nbytes,), 7, dtype=torch.uint8, device=ctx.target.device)
        middle[root] = (TritonBuffer(memory, Usage.COMPUTE), root.nbytes)
    ctx.place = lambda t: middle[t.root] if t.root in middle else plain(t)
    fill(sets[0]["ids"], np.array([-1, 5, sets[0].ne[1], -2]), ctx)
    if form == "SET_ROWS":
        run(found[:4], ctx)
    else:
        for step in lowered_group(group, ctx) if form == "latent_rope_cache" else rope.lower_rope_cache(found, ctx):
            step()
    for root, (buffer, start) in middle.items():
        changed = np.flatnonzero(buffer.memory.cpu().numpy() != 7)
        row = start + 5 * root.nb[1]
        assert len(changed) and row <= changed.min() and changed.max() < row + root.nb[1], "the row 5, no other"


@pytest.mark.parametrize("of", ["k", "v"])
def test_one_memory_of_q_and_k_or_v_is_read_before_it_is_written(of: str) -> None:
    positions, ids, x = Tensor("i32", (2,)), Tensor("i64", (2,)), Tensor("f32", (32, 3, 2))
    q, k = (ops.rope(x, positions, RopeParams(32, "neox")) for _ in range(2))
    caches = [Tensor("f16", (96, 8)) for _ in range(2)]
    v = Tensor("f32", (96, 2))
    sets = ops.set_rows(ops.reshape(k, 96, 2), ids, caches[0]), ops.set_rows(v, ids, caches[1])
    nodes = RopeCache(q, k, *sets)
    one, fused = _filled(nodes, 2), _filled(nodes, 2)
    run(nodes[:4], one)
    place = fused.place
    taken = x if of == "k" else v
    fused.place = lambda t: place(taken if t is q else t)  # as the planner may have it: nobody reads that later
    for step in rope.lower_rope_cache(nodes, fused):
        step()
    for t in (*caches, q):
        assert np.array_equal(read(t, fused), read(t, one))


def test_layers_share_a_table() -> None:
    positions, ctx = Tensor("i32", (4,)), context(device.target())
    a = [ops.rope(Tensor("f32", (32, 2, 4)), positions, RopeParams(32)) for _ in range(2)]
    other = ops.rope(Tensor("f32", (32, 2, 4)), positions, RopeParams(16))
    kernels = [[step.kernel for step in rope.lower_rope([n], ctx) if isinstance(step, Launch)] for n in (*a, other)]
    assert [len(k) for k in kernels] == [2, 1, 2]


def test_argmax_is_the_first_of_equal_ones_in_every_run() -> None:
    n, inf, nan = 1500, float("inf"), float("nan")
    x = torch.full((5, n), -inf)
    x[0, 700], x[0, 1300] = 2.0, 2.0
    x[1, 1100], x[1, 1200] = -0.0, 0.0
    x[3, 9], x[3, 1000], x[3, 1001] = inf, nan, nan
    x[4, :] = -torch.arange(1.0, n + 1.0)
    a, ctx = Tensor("f32", (n, 5)), context(device.target())
    fill(a, x, ctx)
    node = ops.argmax(a)
    steps = sort.lower_argmax([node], ctx)
    for expected in ([700, 1100, 0, 1000, 0], [4, 4, 4, 4, 4]):
        for step in steps:
            step()
        assert read(node, ctx).reshape(-1).tolist() == expected
        fill(a, torch.where(torch.arange(n) == 4, -5.0, -6.0).expand(5, n), ctx)


@pytest.mark.parametrize(("n", "k"), [(700, 40), (5000, 3), (2048, 512), (12, 12)])
def test_what_is_drawn_from_is_the_highest_in_order_in_every_run(n: int, k: int) -> None:
    """Whatever the rows hold before and after: falling logits lie in one block, equal ones in all."""
    a, u, ctx = Tensor("f32", (n, 3)), Tensor("f64", (3,)), context(device.target())
    node = ops.sample(a, u, ops.SampleParams(1.0, k, 1.0, 0.0))
    steps = sample.lower_sample([node], ctx)
    rng = np.random.default_rng(n)
    for _ in range(2):
        x = np.stack([-np.arange(n), np.zeros(n), rng.integers(-9, 9, n)]).astype(np.float32)[rng.permutation(3)]
        fill(a, x, ctx)
        fill(u, rng.random(3), ctx)
        for step in steps:
            step()
        best = steps[-1].args["p_sorted"]
        assert (0x7FFFFFFF - (best & 0x7FFFFFFF)).tolist() == np.argsort(-x, axis=1, kind="stable")[:, :k].tolist()


@pytest.mark.parametrize("places", [[], [4999], [0, 4000, 4001], list(range(2, 79, 2))])
def test_few_logits_that_a_mask_leaves_cost_no_more_to_order(places: list[int]) -> None:
    """Those of -inf are equal: thousands of them are as high as the last that is wanted."""
    n, k = 5000, 40
    a, u, ctx = Tensor("f32", (n, 1)), Tensor("f64", (1,)), context(device.target())
    steps = sample.lower_sample([ops.sample(a, u, ops.SampleParams(1.0, k, 1.0, 0.0))], ctx)
    x = np.full((1, n), -np.inf, np.float32)
    x[0, places] = np.arange(len(places)) % 7
    fill(a, x, ctx)
    for step in steps:
        step()
    best = steps[-1].args["p_sorted"]
    assert (0x7FFFFFFF - (best & 0x7FFFFFFF)).tolist() == np.argsort(-x, axis=1, kind="stable")[:, :k].tolist()
    assert int(steps[2].args["p_kept"][0]) <= len(places) + 2 * k


def test_what_has_no_decoder_or_rounding_is_refused() -> None:
    ids = Tensor("i32", (2,))
    assert why_unsupported(ops.get_rows(Tensor("q4_K", (256, 3)), ids)) is None
    assert "no decoder for q8_K" in (why_unsupported(ops.get_rows(Tensor("q8_K", (256, 3)), ids)) or "")
    source = Tensor("f32", (256, 3))
    assert why_unsupported(ops.cpy(source, Tensor("q5_1", (256, 3)))) is None
    assert "does not round to q4_K" in (why_unsupported(ops.cpy(source, Tensor("q4_K", (256, 3)))) or "")
    assert why_unsupported(ops.cpy(Tensor("q8_K", (256, 3)), Tensor("q8_K", (256, 3)))) is None
