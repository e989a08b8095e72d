"""What the triton backend decides in plain Python, at the edges of its conditions: which memory serves whom, which
form of a kernel is launched, what is refused. Next to nothing is run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from support.aot_arch import target_of
from support.aot_rows import context
from support.planned import lowered, multiplied, routed

from graphrt import ops
from graphrt.backend import Usage
from graphrt.backends.triton import device
from graphrt.backends.triton.context import Context
from graphrt.ops.view import permute, view
from graphrt.tensor import Tensor

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton import memory
from graphrt.backends.triton.kernels import kq_mask
from graphrt.backends.triton.kernels.experts.pairs import Pairs, listed_tiles, sorted_pairs
from graphrt.backends.triton.kernels.flash_attn import decode_configs, decode_launch, portable
from graphrt.backends.triton.kernels.flash_attn.fusions import attention_of
from graphrt.backends.triton.kernels.flash_attn.kernel import Scratch
from graphrt.backends.triton.kernels.flash_attn.launcher import Launcher
from graphrt.backends.triton.kernels.flash_attn.mask_plan import MaskPlans
from graphrt.backends.triton.kernels.flash_attn.problem import Problem, Tiling
from graphrt.backends.triton.kernels.flash_attn.ranges import longest_first, next_bad
from graphrt.backends.triton.kernels.products import emit
from graphrt.backends.triton.kernels.products.broadcast import Broadcast
from graphrt.backends.triton.kernels.products.forms import Form
from graphrt.backends.triton.kernels.products.gemm_small import portable_launch
from graphrt.backends.triton.kernels.products.half import Activations
from graphrt.backends.triton.kernels.products.plan import INLINE_TOKENS, rounds_inside
from graphrt.backends.triton.kernels.products.product import Product
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import Stage, TritonBuffer
from graphrt.backends.triton.packing import Packed, PackedBuffer
from graphrt.backends.triton.support import why_unsupported

HOPPER = target_of("sm_90")


def with_packed(ctx: Context, *weights: Tensor) -> Context:
    """The context with these weights packed, as the backend holds them."""
    buffers = {w: PackedBuffer(Packed.empty(w.dtype.name, w.n_rows, w.ne[0], "cpu"), Usage.WEIGHTS) for w in weights}
    place = ctx.place
    ctx.place = lambda t: (buffers[t.root], t.view_offs) if t.root in buffers else place(t)
    return ctx


# ---- weights and products ----


def test_what_a_step_packs_is_read_when_that_is_done() -> None:
    """Every other row of packed weights is packed anew in each run: constant as the weights are, its product waits."""
    whole = Tensor("q8_0", (256, 64))
    ctx = with_packed(context(HOPPER), whole)
    for w, early in ((whole, True), (view(whole, (256, 32), (2 * whole.nb[1],)), False)):
        steps = lowered(ops.mul_mat(w, Tensor("f32", (256, 2))), ctx)
        product = steps[-1]
        assert isinstance(product, Launch) and ctx.is_constant(w)
        assert all(isinstance(step, Launch) for step in steps) == early
        assert product.args["PDL"] == product.options.get("launch_pdl", False) == early


@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True), (False, False)])
def test_a_launch_of_several_weights_waits_for_each(which: tuple[bool, bool]) -> None:
    ctx, weights = context(HOPPER), [Tensor("f16", (64, 32)) for _ in which]
    buffers = {
        w: TritonBuffer(torch.zeros(w.nbytes, dtype=torch.uint8), Usage.WEIGHTS if constant else Usage.COMPUTE)
        for w, constant in zip(weights, which)
    }
    place = ctx.place
    ctx.place = lambda t: (buffers[t], 0) if t in buffers else place(t)
    x = Tensor("f32", (64, 2))
    (step,) = multiplied(weights, x, [ops.mul_mat(w, x) for w in weights], ctx)
    assert isinstance(step, Launch) and step.args["PDL"] == all(which)


def test_only_whole_rows_of_packed_weights_are_taken_as_they_lie() -> None:
    whole = Tensor("q8_0", (64, 8))
    row, block = whole.nb[1], whole.dtype.type_size
    ctx = with_packed(context(device.INTERPRETER), whole)
    for ne, nb1, offs, taken in (
        ((64, 8), row, 0, True), ((64, 4), row, 2 * row, True), ((64, 4), 2 * row, 0, False),
        ((64, 3), row, block, False), ((32, 8), row, 0, False), ((32, 4), block, 0, False),
    ):  # fmt: skip
        packed, steps = ctx.packed(view(whole, ne, (nb1,), offs))
        assert (packed.k, packed.rows) == ne and (steps == []) == taken, (ne, nb1, offs)


def test_a_larger_scratch_takes_the_place_of_a_smaller_one() -> None:
    ctx = context(device.INTERPRETER)
    first, other = ctx.shared_scratch("a", 10), ctx.shared_scratch("b", 10)
    larger = ctx.shared_scratch("a", 20)
    assert larger.numel() >= 20 and first.data_ptr() != other.data_ptr()
    assert ctx.shared_scratch("a", 5).data_ptr() == ctx.shared_scratch("a", 20).data_ptr() == larger.data_ptr()


def test_rows_of_activations() -> None:
    ctx = context(device.INTERPRETER)
    for x, expected in (
        (Tensor("f32", (64, 3)), (3, 64, 64, 1)),
        (view(Tensor("f32", (96, 3)), (64, 3), (384,)), (3, 64, 96, 1)),
        (Tensor("f32", (64, 3, 2)), (6, 64, 64, 1)),
        (permute(Tensor("f32", (2, 64)), 1, 0, 2, 3), (2, 64, 1, 2)),
    ):
        rows = emit.rows_of(ctx.view(x))
        assert (rows.n, rows.k, rows.row_stride, rows.stride) == expected
        inside = rounds_inside([Product(Tensor("q8_0", (64, 8)), x)], x)
        assert inside == (rows.stride == 1 and rows.n <= INLINE_TOKENS)
    for n in (1, 2, 3):
        rows = emit.rows_of(ctx.view(x := Tensor("f32", (64, n))))
        assert rounds_inside([Product(Tensor("q8_0", (64, 8)), x)], x) == (n <= 2)


def test_one_x_is_made_once_in_each_form() -> None:
    ctx, steps = context(HOPPER), list[Any]()
    converted = emit._Converted(Product(Tensor("q8_0", (128, 8)), Tensor("f32", (128, 16))), ctx)
    forms = [Form.F16, Form.F16_ORDERED, Form.F16, Form.BF16]
    made = [converted.get(form, steps) for form in forms]
    assert [half.values.dtype for half in made] == [*[torch.float16] * 3, torch.bfloat16] and len(steps) == 3
    assert [half.ordered for half in made] == [False, True, False, False]
    assert made[0] is made[2] and len({half.values.data_ptr() for half in made}) == 3


@pytest.mark.parametrize("splits", range(1, 8))
def test_no_split_of_k_is_empty(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_launch, "splits_of", lambda *args: splits)
    ctx = context(device.INTERPRETER)
    config = portable_launch.find_config("interpreter", "q8_0", 16)
    for k_steps in range(1, 13):
        packed = Packed.empty("q8_0", 16, config.width * k_steps, "cpu")
        x = Activations(torch.zeros(16, packed.k, dtype=torch.float16))
        sums, (launch,) = portable_launch.packed_product(
            packed, 16, x, Broadcast(16), torch.zeros(16, 16), None, None, ctx
        )
        n, each = launch.args["n_splits"], launch.args["steps_a_split"]
        assert (n - 1) * each < k_steps <= n * each and n <= splits
        assert sums.parts.shape[0] == n and launch.grid[1] == n and launch.args["SPLIT"] == (n > 1)


def test_matrices_that_do_not_lie_one_after_the_other_are_not_flattened() -> None:
    t = torch.arange(2 * 3 * 4).view(2, 3, 4, 1)
    assert emit._in_a_row(t).shape == (6, 4, 1)
    for part in (t[:1, :2], t[:, :1]):
        assert emit._in_a_row(part).data_ptr() == part.data_ptr()
    whole = Tensor("f16", (64, 8, 4, 3))
    for w, each in (
        (whole, True),
        (view(whole, (64, 8, 2, 3), whole.nb[1:]), False),
        (view(whole, (64, 8, 2, 1), whole.nb[1:]), True),
        (permute(whole, 0, 1, 3, 2), False),
    ):
        found = routed(ops.mul_mat(w, Tensor("f32", (64, 65, *w.ne[2:]))), context(device.INTERPRETER))
        assert (found.kernel.name == "gemm_large_each") == each, (w, found.kernel.name)


def test_experts_chosen_twice_are_sorted_twice() -> None:
    ctx = context(device.INTERPRETER)
    ids = [Tensor("i32", (2, 5)) for _ in range(2)]
    (first, steps), (again, none), (other, more) = (sorted_pairs(t, 4, ctx) for t in (ids[0], ids[0], ids[1]))
    assert first is again and first is not other and (len(steps), len(none), len(more)) == (1, 0, 1)
    assert sorted_pairs(ids[0], 8, ctx)[0] is not first
    tiles = [listed_tiles(pairs, n, ctx) for pairs, n in ((first, 16), (first, 32), (other, 16), (first, 16))]
    assert [len(steps) for _, steps in tiles] == [1, 1, 1, 0]
    assert len({t.data_ptr() for t, _ in tiles}) == 3 and tiles[0][0] is tiles[3][0]


def test_there_are_tiles_for_all_pairs_and_for_those_of_no_expert() -> None:
    """However pairs are dealt out to the experts' groups and the one of no expert's, each of which has whole tiles."""
    for n_expert, count, tokens in itertools.product((1, 2, 3), (1, 2, 4, 7, 9), (1, 2, 4, 16)):
        dealt = [d for d in itertools.product(range(count + 1), repeat=n_expert + 1) if sum(d) == count]
        needed = max(sum(-(-n // tokens) for n in d) for d in dealt)
        assert needed <= Pairs(n_expert, 1, torch.zeros(n_expert + 2), torch.zeros(count)).tiles(tokens) <= count


# ---- attention ----


@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_scale_is_its_sign_and_a_positive_factor(scale: float, softcap: float) -> None:
    """sign and factor: logits as powers of two, or what tanh is taken of."""
    found = portable.scaling(SimpleNamespace(scale=scale, softcap=softcap))
    assert found["factor"] > 0 and found["sign"] == np.sign(scale)
    whole = scale / softcap if softcap else scale * np.log2(np.e)
    assert np.isclose(found["sign"] * found["factor"], whole, rtol=1e-12)


def tiling(**sizes: int) -> Tiling:
    known = {
        "block_m": 16, "block_n": 64, "pack": 4, "n_groups": 8, "n_qt": 1, "n_tiles": 8, "n_blocks": 4,
        "mask_groups": 1, "n_mask_tiles": 1,
    }  # fmt: skip
    return Tiling(**(known | sizes))


def test_units_fit_with_64_programs_and_a_block_to_spare() -> None:
    """The fixup counts a few programs past the last, and units past a tile's last."""
    edge = {"n_tiles": 1 << 13, "n_blocks": (1 << 10) - 1}
    assert not portable.units_fit(tiling(**edge), (1 << 8) - 64)
    assert portable.units_fit(tiling(**edge), (1 << 8) - 65)
    assert portable.units_fit(tiling(**(edge | {"n_blocks": (1 << 10) - 2})), (1 << 8) - 64)
    assert portable.units_fit(tiling(**(edge | {"n_tiles": (1 << 13) - 1})), (1 << 8) - 64)


@pytest.mark.parametrize(("n_seq", "big"), [(2, False), (8192, True)])
def test_large_batches_are_shared_out_in_64_bits(n_seq: int, big: bool) -> None:
    """On memory that is not there."""
    target = replace(device.INTERPRETER, device=device.ELSEWHERE)
    ctx = context(target)
    q = Tensor("f32", (64, 1, 8, n_seq))
    k, v = (Tensor("f16", (64, 640, 8, n_seq)) for _ in "kv")
    launcher = Launcher(target, ctx.place, "tile")
    (launch,) = launcher.launches(attention_of(ops.flash_attn_ext(q, k, v, None, 0.125)))
    assert isinstance(launch, Launch) and launch.args["BIG"] == big


def test_tiles_of_heads() -> None:
    p: Any = SimpleNamespace(gqa=24, n_head=48, n_q=3, m2=1, m3=1, n_seq=2, n_kv=100)
    t = Tiling.of(p, 16, 64)
    assert (t.pack, t.n_groups, t.n_qt, t.n_tiles, t.n_blocks) == (12, 4, 3, 24, 2), "12 divides 24, 16 does not"
    assert (t.mask_groups, t.n_mask_tiles) == (1, 3)
    p.m2, p.m3 = 48, 2
    t = Tiling.of(p, 16, 64)
    assert (t.mask_groups, t.n_mask_tiles) == (4, 2 * 4 * 3)
    assert Tiling.of(p, 16, 64, 8).n_groups == 6


def test_tiles_of_one_length() -> None:
    for n, uniform in ((1, True), (2, False), (3, False)):
        assert tiling(n_mask_tiles=n).uniform(True) == uniform and tiling(n_mask_tiles=n).uniform(False)


def test_sections_divide_the_groups() -> None:
    for groups, l2, section in ((6, 4, 3), (6, 6, 6), (6, 1, 1), (6, 0, 1), (7, 5, 1), (8, 5, 4)):
        k = SimpleNamespace(data_nbytes=600, ne=(64, 64, 1, 1))
        p: Any = SimpleNamespace(k_t=k, v_t=None, n_seq=1, gqa=4, panels=False)
        target: Any = SimpleNamespace(l2=1000 * l2)
        assert portable._section(p, tiling(n_groups=groups, pack=4), target) == section


def attention(
    place: Any = None, k: Tensor | None = None, v: Tensor | None = None, mask: Tensor | None = None
) -> Problem:
    k = k if k is not None else Tensor("f16", (64, 64, 2))
    v = v if v is not None else Tensor("f16", (64, 64, 2))
    node = ops.flash_attn_ext(Tensor("f32", (64, 3, 4)), k, v, mask, 0.125)
    return Problem(attention_of(node), place or context(device.INTERPRETER).place)


def test_v_in_k_is_where_k_begins() -> None:
    """As large parts of it as K is read in; of 192 elements the first 128 are such a part, those from 64 on are not."""
    for d, offs, inside in ((128, 0, True), (128, 128, False), (64, 0, False)):
        k = Tensor("f16", (192, 64, 2))
        v = view(k, (d, *k.ne[1:3]), k.nb[1:3], offs)
        node = ops.flash_attn_ext(Tensor("f32", (192, 3, 4)), k, v, None, 0.125)
        assert Problem(attention_of(node), context(device.INTERPRETER).place).v_in_k == inside
    assert not attention().v_in_k


def test_a_mask_has_a_plan_for_each_tiling() -> None:
    place = context(device.INTERPRETER).place
    masks = [Tensor("f16", (64, 3)) for _ in range(2)]
    problems = [attention(place, mask=mask) for mask in masks]
    plans = MaskPlans("cpu")
    one, two = (Tiling.of(problems[0], rows, 32) for rows in (16, 32))
    first, launches = plans.plan(problems[0], one, False)
    assert [launch.kernel.fn.__name__ for launch in launches] == ["classify_blocks", "list_blocks"]
    again, launches = plans.plan(problems[0], one, True)
    assert again is first and [launch.kernel.fn.__name__ for launch in launches] == ["sum_units"]
    assert plans.plan(problems[0], one, True) == (first, []) and plans.plan(problems[0], one, False) == (first, [])
    for p, t in ((problems[0], two), (problems[1], one)):
        found, launches = plans.plan(p, t, True)
        assert found is not first and len(launches) == 3


@pytest.mark.parametrize(
    ("n_kv", "row", "offs", "unit"),
    [(64, 64, 0, 8), (64, 72, 16, 8), (64, 66, 0, 2), (64, 72, 4, 2), (64, 65, 0, 1), (64, 72, 2, 1), (62, 64, 0, 2),
     (63, 64, 0, 1)],
)  # fmt: skip
def test_a_mask_is_read_by_what_divides_all_of_its_addresses(n_kv: int, row: int, offs: int, unit: int) -> None:
    mask = view(Tensor("f16", (row, 4)), (n_kv, 3), (2 * row,), offs)
    k, v = (Tensor("f16", (64, n_kv, 2)) for _ in "kv")
    p = attention(k=k, v=v, mask=mask)
    _, launches = MaskPlans("cpu").plan(p, Tiling.of(p, 16, 32), False)
    assert launches[0].args["UNIT"] == unit


def test_scratch_and_counters_of_attentions_suffice() -> None:
    scratch = Scratch(device.INTERPRETER.device)
    sizes = [0, 4, 5, 100, 96, 101, 104]
    parts = [scratch.part(n) for n in sizes]
    assert all(part.numel() * 4 >= max(n, 4) for part, n in zip(parts, sizes))
    assert parts[3] is parts[4] and parts[5] is parts[6]
    counters = [scratch.counters(n) for n in (5, 6, 4, 6, 7)]
    assert all(c.numel() >= n and not c.any() for c, n in zip(counters, (5, 6, 4, 6, 7)))
    assert counters[1] is counters[2] is counters[3]


def test_parts_are_joined_in_the_launch_only_where_each_tile_has_its_programs() -> None:
    main = {
        "splits": 0, "programs": 16, "n_q": 1, "D_K": 64, "RANGES": True, "K_KIND": "f16", "V_KIND": "bf16",
    }  # fmt: skip
    config: Any = decode_configs.find_decode_config(64, "f16", "f16")

    def rows(n_blocks: int = 20, **changed: Any) -> int:
        return decode_launch.join_of(main | changed, tiling(n_blocks=n_blocks), config)[0]

    assert rows() == 4 and rows(programs=8) == 4 and rows(splits=3) == 4
    assert rows(programs=7) == 0, "a program has several tiles"
    assert rows(RANGES=False) == 0 and rows(K_KIND="q8_0") == 0 and rows(V_KIND="q4_0") == 0
    blocks = {"K_KIND": "q8_0", "V_KIND": "f8_e4m3"}
    assert rows(**blocks) == 4 and rows(**blocks, n_q=3) == 0, "the loop for more than 8 rows lacks the registers"
    config = decode_configs.find_decode_config(128, "q8_0", "q8_0", rows=4)
    blocks = {"D_K": 128, "K_KIND": "q8_0", "V_KIND": "q8_0", "splits": 20}
    assert rows(18, **blocks) == 4 and rows(19, **blocks) == 0, "4 rows of 130 floats: 18 parts are 37 KB, 19 are 39"
    config = decode_configs.find_decode_config(64, "f16", "f16")
    large = {"D_K": 128, "n_q": 4, "splits": 20}
    assert rows(11, **large) == 16 and rows(12, **large) == 0, "16 rows of 130 floats: 11 parts are 92 KB, 12 are 100"


@triton.jit
def _bad_ranks(p_bad, p_out, programs, n_tiles, n_qt, section):
    """out[pid, i]: the ranks whose tiles are bad, as a program finds them one after the other; then n_tiles."""
    pid = tl.program_id(0)
    rank = next_bad(pid, programs, n_tiles, n_qt, section, p_bad)
    for i in range(0, 8):
        tl.store(p_out + pid * 8 + i, rank)
        rank = tl.minimum(next_bad(rank + programs, programs, n_tiles, n_qt, section, p_bad), n_tiles)


@triton.jit
def _order(p_out, n_qt, section):
    tl.store(p_out + tl.program_id(0), longest_first(tl.program_id(0), n_qt, section))


@pytest.mark.skipif(not device.interpreting(), reason="interpreted")
@pytest.mark.parametrize(("groups", "n_qt", "section"), [(6, 100, 3), (6, 100, 1), (6, 100, 6), (1, 5, 1)])
def test_every_tile_has_its_rank_and_bad_ones_are_found(groups: int, n_qt: int, section: int) -> None:
    n_tiles = groups * n_qt
    order = torch.full((n_tiles,), -1, dtype=torch.int32)
    _order[(n_tiles,)](order, n_qt, section)
    assert sorted(order.tolist()) == list(range(n_tiles)), "each tile once"
    assert order[0] == n_qt - 1, "the first group's last queries first"
    marked = [r for r in (0, 3, 255, 256, 257, 300, n_tiles - 1) if r < n_tiles]
    bad = torch.zeros(n_tiles, dtype=torch.int32)
    bad[order[marked].long()] = 1
    for programs in (1, 2, 4):
        found = torch.full((programs, 8), -1, dtype=torch.int32)
        _bad_ranks[(programs,)](bad, found, programs, n_tiles, n_qt, section)
        for pid in range(programs):
            ranks = sorted({r for r in marked if r % programs == pid})
            assert found[pid].tolist() == ranks + [n_tiles] * (8 - len(ranks))


@pytest.mark.parametrize(
    ("n_cells", "row", "even"), [(64, 64, True), (64, 72, True), (64, 67, False), (64, 68, False), (60, 64, False)]
)
def test_masks_are_written_in_whole_vectors_only_where_all_rows_are(n_cells: int, row: int, even: bool) -> None:
    cells = view(Tensor("i32", (row, 2)), (n_cells, 2), (4 * row,))
    node = ops.kq_mask(cells, Tensor("i32", (3, 2)), 0, False)
    (launch,) = kq_mask.lower_kq_mask([node], context(HOPPER))
    assert isinstance(launch, Launch) and launch.args["EVEN"] == even and launch.args["sc"] == row


# ---- memory ----


class Events:
    """torch.cuda.Event without a GPU: what is recorded and waited for, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.made = itertools.count()

    def __call__(self) -> Any:
        i, log = next(self.made), self.log
        return SimpleNamespace(record=lambda: log.append(("record", i)), synchronize=lambda: log.append(("wait", i)))


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 128, 700])
def test_an_upload_takes_as_many_pieces_as_it_needs(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    monkeypatch.setattr(torch.cuda, "Event", events)
    stage = Stage.__new__(Stage)
    stage.size, stage.piece, stage.used = 64, 0, 0
    stage.pieces = [torch.empty(64, dtype=torch.uint8) for _ in range(memory.STAGE_PIECES)]
    stage.done = [None] * memory.STAGE_PIECES
    source = np.random.default_rng(0).integers(0, 256, nbytes).astype(np.uint8)
    for _ in range(2):
        target = torch.zeros(nbytes, dtype=torch.uint8)
        stage.upload(source, target)
        assert np.array_equal(target.numpy(), source)
    taken = 2 * -(-nbytes // 64)
    recorded = [i for what, i in events.log if what == "record"]
    assert recorded == list(range(taken - 1)), "one for each piece that is left"
    assert [i for what, i in events.log if what == "wait"] == list(range(max(0, taken - memory.STAGE_PIECES)))
    for i in range(taken - memory.STAGE_PIECES):
        assert events.log.index(("wait", i)) > events.log.index(("record", i))


def test_small_uploads_share_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", events := Events())
    stage = Stage.__new__(Stage)
    stage.size, stage.piece, stage.used, stage.done = 256, 0, 0, [None] * memory.STAGE_PIECES
    stage.pieces = [torch.zeros(256, dtype=torch.uint8) for _ in range(memory.STAGE_PIECES)]
    starts = [stage._room(n).data_ptr() - stage.pieces[0].data_ptr() for n in (5, 64, 65, 60)]
    assert starts[:3] == [0, 64, 128] and stage.piece == 1 and len(events.log) == 1, "each at a multiple of 64"


def test_elements_that_are_not_whole_words() -> None:
    """Three blocks of q8_0 are 102 bytes: 26 words, of which the last is half the buffer's own."""
    buffer = TritonBuffer(torch.zeros(128, dtype=torch.uint8), Usage.COMPUTE)
    t = Tensor("q8_0", (32, 3))
    assert memory.elements(buffer, 0, t, torch.int32).numel() == 26
    assert memory.elements(buffer, 16, t, torch.int16).numel() == 51


# ---- what is refused ----


def test_strides_that_no_attention_reads() -> None:
    q = Tensor("f32", (64, 1, 4))

    def reason(kind: str, nb: tuple[int, ...], ne: tuple[int, ...] = (64, 8, 2)) -> str:
        k = Tensor(kind, ne)
        turned = replaced(k, (k.nb[0], *nb))
        return why_unsupported(ops.flash_attn_ext(q, turned, Tensor("f16", ne), None, 0.1)) or ""

    assert reason("q8_0", (68, 544, 1088)) == "" and "must be even" in reason("q8_0", (68, 545, 1090))
    assert "must be even" in reason("q8_0", (69, 552, 1104))
    assert reason("f16", (128, 1024, 2048)) == "" and "whole elements" in reason("f16", (128, 1025, 2050))


def replaced(t: Tensor, nb: tuple[int, ...]) -> Tensor:
    """The leaf with other strides, as a plugin's or a loaded graph's tensor may have them."""
    t.nb = nb  # type: ignore[assignment]
    return t


def test_heads_of_576_are_served_and_larger_ones_are_not() -> None:
    for d, served in ((576, True), (577, False), (592, False)):
        q, k, v = Tensor("f32", (d, 1, 4)), Tensor("f16", (d, 8, 1)), Tensor("f16", (512, 8, 1))
        assert (why_unsupported(ops.flash_attn_ext(q, k, v, None, 0.1)) is None) == served


@pytest.mark.parametrize(("rows", "step", "served"), [(3, 18, False), (2, 18, False), (1, 18, True), (2, 20, True)])
def test_elements_lie_whole_steps_apart(rows: int, step: int, served: bool) -> None:
    x = replaced(Tensor("f32", (4, rows)), (4, step, step * rows, step * rows))
    assert (why_unsupported(ops.sqr(x)) is None) == served
