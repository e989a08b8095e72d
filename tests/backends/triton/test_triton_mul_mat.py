"""Products in 16 bits, in Triton's interpreter: the conformance tool's judge, and what only these kernels have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from support.aot_arch import target_of
from support.aot_rows import context
from support.planned import lowered, multiplied, routed
from support.wgmma_order import wgmma_order

from graphrt.backend import Usage
from graphrt.backends.triton import device
from graphrt.dtypes import dtype
from graphrt.judge import judge
from graphrt.ops.cases.mul_mat import TYPES
from graphrt.ops.mul_mat import mul_mat
from graphrt.ops.view import permute, view
from graphrt.tensor import Tensor
from graphrt.testing import dequantize, quantize
from graphrt.tools.conformance.run.lowprec import low

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton.context import Context
from graphrt.backends.triton.kernels.products import gemm_large, gemv, half, route
from graphrt.backends.triton.kernels.products.broadcast import Broadcast, broadcast_of
from graphrt.backends.triton.kernels.products.gemm_small import configs, portable_launch
from graphrt.backends.triton.kernels.products.half import Gate, in_type
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import TritonBuffer
from graphrt.backends.triton.packing import PACKED_TYPES, Packed, PackedBuffer, pack
from graphrt.backends.triton.support import why_unsupported

RNG = np.random.default_rng(5)


class Run:
    """Tensors in memory, and products of them. values: what each holds, as numbers in torch's shape."""

    def __init__(self, exact: bool = True) -> None:
        self.places: dict[Tensor, tuple[TritonBuffer, int]] = {}
        self.values: dict[Tensor, np.ndarray] = {}
        self.target = device.target()
        self.ctx = Context(lambda t: (self.places[t.root][0], t.view_offs), self.target, exact)

    def hold(self, t: Tensor, raw: np.ndarray) -> None:
        data = torch.from_numpy(np.ascontiguousarray(raw).reshape(-1).view(np.uint8).copy()).to(self.target.device)
        self.places[t] = (TritonBuffer(data, Usage.COMPUTE), 0)

    def leaf(self, kind: str, ne: tuple[int, ...], values: np.ndarray | None = None, packed: bool = False) -> Tensor:
        t = Tensor(dtype(kind), ne)
        values = RNG.standard_normal(t.shape).astype(np.float32) if values is None else values.reshape(t.shape)
        raw = quantize(values.astype(np.float32), t.dtype, RNG)
        self.values[t] = dequantize(raw, t.dtype)
        self.hold(t, raw)
        if packed:
            memory = Packed.empty(kind, t.n_rows, t.ne[0], self.target.device)
            pack(self.places[t][0].memory.view(t.n_rows, -1), memory)
            self.places[t] = (PackedBuffer(memory, Usage.WEIGHTS), 0)
        return t

    def node(self, w: Tensor, x: Tensor) -> Tensor:
        """A product of them, in memory full of NaN."""
        out = mul_mat(w, x)
        self.hold(out, np.full(out.shape, np.nan, np.float32))
        return out

    def read(self, t: Tensor) -> np.ndarray:
        return self.places[t][0].read(0, t.nbytes).view(np.float32).reshape(t.shape)

    def run(self, steps: Sequence[Any]) -> None:
        for step in steps:
            step()

    def expected(self, node: Tensor) -> np.ndarray:
        w, x = (self.values[s].astype(np.float64) for s in node.src)
        return x @ np.repeat(np.repeat(w, x.shape[1] // w.shape[1], 1), x.shape[0] // w.shape[0], 0).swapaxes(2, 3)

    def check(self, node: Tensor, steps: Sequence[Any], added: Any = 0.0) -> None:
        """Runs the steps and judges what node holds then."""
        self.run(steps)
        rounded = low(node, [torch.from_numpy(self.values[s].astype(np.float32)) for s in node.src]).numpy()
        verdict = judge(node, self.read(node), self.expected(node) + added, rounded + added)
        assert verdict.ok, (node.src, verdict.message)

    def product(self, w: Tensor, x: Tensor) -> Tensor:
        """MUL_MAT as the backend lowers it, judged."""
        node = self.node(w, x)
        self.check(node, lowered(node, self.ctx))
        return node


FLOATS = ("f16", "bf16", "f32")
KINDS = [t for t in TYPES if t in PACKED_TYPES or t in FLOATS]


@pytest.mark.parametrize("kind", KINDS)
def test_types_and_tokens(kind: str) -> None:
    """Odd heights; numbers of tokens that take one tile, two, several, and the dense way."""
    for m, n in ((5, 1), (33, 3), (17, 9), (7, 17), (3, 65)):
        run = Run()
        w = run.leaf(kind, (256, m), packed=kind in PACKED_TYPES)
        run.product(w, run.leaf("f32", (256, n)))


@pytest.mark.parametrize("kind", ["iq2_xxs", "tq1_0", "f64"])
def test_weights_that_a_run_makes(kind: str) -> None:
    """Blocks as they are: a run packs them first, where the type can be."""
    run = Run()
    run.product(run.leaf(kind, (256, 5)), run.leaf("f32", (256, 3)))


#: Row lengths that whole blocks fill and steps of a tile don't.
SHORT_ROWS = [(kind, k) for kind in ("q4_0", "q8_0", "mxfp4", "f16", "f32") for k in (32, 96, 544, 1280)]
BLOCKS = [(kind, k) for kind in ("q6_K", "tq1_0", "iq3_s") for k in (256, 768, 1280)]


@pytest.mark.parametrize(("kind", "k"), [*SHORT_ROWS, *BLOCKS])
def test_rows_that_end_inside_a_tile(kind: str, k: int) -> None:
    run = Run()
    run.product(run.leaf(kind, (k, 6), packed=kind in PACKED_TYPES), run.leaf("f32", (k, 9)))


@pytest.mark.parametrize("kind", ["q5_K", "f16"])
@pytest.mark.parametrize(("n", "k"), [(9, 256), (9, 1024), (65, 512)])
def test_activations_beyond_f16(kind: str, n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows far above f16's range and far below it, and one with an infinity, each as right as the others."""
    if k == 256:
        monkeypatch.setattr(portable_launch, "splits_of", lambda *args: 1)
    run = Run()
    values = RNG.standard_normal((n, k)).astype(np.float32)
    values[1] *= 3e6
    values[2] *= 1e-9
    values[3] *= 1e34
    values[4, 7] = np.inf
    values[5] = 0.0
    values[6] *= np.where(np.arange(k) % 2, 1e5, 1.0)
    w, x = run.leaf(kind, (k, 8), packed=kind in PACKED_TYPES), run.leaf("f32", (k, n), values)
    node = run.node(w, x)
    run.run(lowered(node, run.ctx))
    actual, rows = run.read(node)[0, 0], np.arange(n) != 4
    weights = run.values[w][0, 0].astype(np.float64)
    assert np.isinf(actual[4]).all()
    assert not actual[5].any()
    error = np.linalg.norm(actual[rows] - values[rows].astype(np.float64) @ weights.T, axis=1)
    # Against the root of the sum of squared terms, which does not cancel: x and w in f16 are off by 2^-11 each at most.
    error /= np.sqrt((values[rows].astype(np.float64) ** 2 @ (weights**2).T).sum(-1)) + 1e-300
    assert error.max() < 2.0**-10, error


@pytest.mark.parametrize("kind", ["q4_K", "bf16"])
def test_a_split_of_k_changes_only_rounding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    w, x = run.leaf(kind, (2304, 5), packed=kind in PACKED_TYPES), run.leaf("f32", (2304, 9))
    parts = []
    original = portable_launch._launch

    def spied(*args: Any) -> Any:
        found = original(*args)
        parts.append(found[0].parts.shape[0])
        return found

    monkeypatch.setattr(portable_launch, "_launch", spied)
    split = run.read(run.product(w, x))
    monkeypatch.setattr(portable_launch, "splits_of", lambda *args: 1)
    whole = run.read(run.product(w, x))
    assert parts == [3, 1]
    np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["q8_0", "f16", "f32", "iq2_xxs"])
@pytest.mark.parametrize("batches", [((1, 1), (3, 2)), ((2, 2), (2, 4)), ((3, 2), (6, 2)), ((1, 2), (3, 4))])
@pytest.mark.parametrize("few_tokens", [64, 0])
def test_batches(kind: str, batches: Any, few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "SMALL_TOKENS", dict.fromkeys(route.SMALL_TOKENS, few_tokens))
    monkeypatch.setattr(gemv, "MAX_TOKENS", 0)
    monkeypatch.setattr(portable_launch, "splits_of", lambda *args: 2)
    run, k = Run(), 512
    w = run.leaf(kind, (k, 5, *batches[0]), packed=kind in PACKED_TYPES)
    run.product(w, run.leaf("f32", (k, 3, *batches[1])))


def test_a_batch_puts_together_all_tokens_that_share_a_matrix() -> None:
    def batch(a: tuple[int, int], b: tuple[int, int], n: int = 3) -> Broadcast:
        return broadcast_of(Tensor("f16", (8, 5, *a)), (8, n, *b))

    assert batch((1, 1), (4, 3)) == Broadcast(36)
    assert batch((1, 2), (4, 4)) == Broadcast(24, 2)
    assert batch((2, 2), (4, 4)) == Broadcast(6, 8, 2, 2)


@pytest.mark.parametrize("kind", ["q6_K", "f16"])
@pytest.mark.parametrize("n", [9, 65])
def test_a_residual_in_the_memory_of_the_result(kind: str, n: int) -> None:
    run = Run()
    w, x = run.leaf(kind, (768, 33), packed=kind in PACKED_TYPES), run.leaf("f32", (768, n))
    node = run.node(w, x)
    added = RNG.standard_normal(node.shape).astype(np.float32)
    run.hold(node, added)
    run.check(node, multiplied([w], x, [node], run.ctx, residual=node), added)


@pytest.mark.parametrize("kind", ["q6_K", "f16", "f32", "iq2_xxs"])
@pytest.mark.parametrize("n", [3, 9, 65])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_bias_and_a_residual(kind: str, n: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias is one row for all tokens: alone, and before a residual that lies in the memory of the result.

    The first token's x is nearly 0 and has a scale of its own, by which the bias must not be multiplied.
    """
    monkeypatch.setattr(portable_launch, "splits_of", lambda *args: splits)
    run, values = Run(), RNG.standard_normal((n, 768)).astype(np.float32)
    values[0] *= 1e-9
    w, x = run.leaf(kind, (768, 33), packed=kind in PACKED_TYPES), run.leaf("f32", (768, n), values)
    node, bias = run.node(w, x), run.leaf("f32", (33,))
    run.check(node, multiplied([w], x, [node], run.ctx, biases=[bias]), run.values[bias])
    added = RNG.standard_normal(node.shape).astype(np.float32)
    run.hold(node, added)
    steps = multiplied([w], x, [node], run.ctx, biases=[bias], residual=node)
    run.check(node, steps, run.values[bias] + added)


@pytest.mark.parametrize("gate", [Gate("swiglu"), Gate("geglu"), Gate("reglu"), Gate("swiglu_oai", 1.7, 7.0)], ids=str)
@pytest.mark.parametrize(("n", "kinds"), [(9, ("q8_0", "q8_0")), (65, ("q8_0", "bf16"))])
def test_a_gate(gate: Gate, n: int, kinds: tuple[str, str]) -> None:
    """Of two products, whose sums may have parts of their own and types of activations of their own."""
    run = Run()
    x = run.leaf("f32", (512, n), 4e4 * RNG.standard_normal((n, 512)).astype(np.float32))
    w = [run.leaf(t, (512, 9), 1e-5 * RNG.standard_normal((9, 512)), packed=t in PACKED_TYPES) for t in kinds]
    node = run.node(w[0], x)
    run.run(multiplied(w, x, [node], run.ctx, gate=gate))
    g, u = (run.values[x][0, 0].astype(np.float64) @ run.values[t][0, 0].astype(np.float64).T for t in w)
    if gate.kind == "swiglu_oai":
        g, u = np.minimum(g, 7.0), np.clip(u, -7.0, 7.0) + 1.0
    y = {"swiglu": g, "geglu": 1.5957691216057308 * (g + 0.044715 * g**3), "swiglu_oai": 1.7 * g}.get(gate.kind)
    expected = (np.maximum(g, 0.0) if y is None else g / (1.0 + np.exp(-y))) * u
    np.testing.assert_allclose(run.read(node)[0, 0], expected, rtol=0.02, atol=0.02 * np.abs(expected).max())


def test_weights_of_several_types_share_their_activations() -> None:
    for exact, n in ((True, 2), (True, 9), (False, 2)):
        run = Run(exact)
        x = run.leaf("f32", (256, n))
        kinds = ("q8_0", "f16", "q8_0", "bf16", "q8_0", "q8_0")
        weights = [run.leaf(t, (256, 7), packed=t in PACKED_TYPES) for t in kinds]
        nodes = [run.node(w, x) for w in weights]
        run.run(multiplied(weights, x, nodes, run.ctx))
        for node in nodes:
            expected = run.expected(node)
            error = np.linalg.norm(run.read(node) - expected) / np.linalg.norm(expected)
            assert error < (2.0**-9 if exact else 2.0**-6)


def test_ordered_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """gemm_small/wgmma.py's order, of rows that a program holds whole and of longer ones."""
    for most in (half.MAX_WHOLE_ROW, 128):
        monkeypatch.setattr(half, "MAX_WHOLE_ROW", most)
        run = Run()
        x = torch.from_numpy(run.values[run.leaf("f32", (384, 3))]).float()
        plain, ordered = (in_type(x, torch.float16, run.ctx, order) for order in (False, True))
        for step in (*plain[1], *ordered[1]):
            step()
        assert ordered[0].ordered and not plain[0].ordered
        assert torch.equal(ordered[0].values, plain[0].values[:, wgmma_order(384)])


def test_a_large_matrix_is_dequantized_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_large, "SCRATCH", 2 * 256 * 5)
    for kind in ("q4_K", "iq3_s"):
        run = Run()
        run.product(run.leaf(kind, (256, 13), packed=kind in PACKED_TYPES), run.leaf("f32", (256, 65)))


@pytest.mark.parametrize(
    ("m", "k", "ends"),
    [
        (8192, 28672, [4096, 8192]),  # a 70B's ffn_down: as many as fit would be 4681
        (28672, 8192, [14336, 28672]),
        (8192, 16384, [8192]),
        (9000, 16384, [4608, 9000]),
        (16000, 17000, [5376, 10752, 16000]),
        (1100, 223_696, [512, 1024, 1100]),  # 600 fit: two slices of 550 end nowhere
        (600, 1 << 20, [128 * i for i in range(1, 5)] + [600]),  # not one whole tile fits
    ],
)
def test_slices_end_at_whole_tiles_and_fit(m: int, k: int, ends: list[int]) -> None:
    found = list(gemm_large.slices(m, k))
    assert [end for _, end in found] == ends and [first for first, _ in found] == [0, *ends[:-1]]
    assert all(2 * k * (end - first) <= gemm_large.SCRATCH for first, end in found)


@pytest.mark.parametrize("kind", ["q5_0", "iq3_s", "f16", "f32"])
@pytest.mark.parametrize(("scratch", "turns"), [(6, 1), (5, 2), (2, 3), (1, 12)])
def test_matrices_of_many_tokens_are_multiplied_together(
    kind: str, scratch: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 matrices of 8 rows; scratch: in halves of a matrix where it is 1, else in matrices. x: heads in a row."""
    rows, k = 8, 256
    monkeypatch.setattr(gemm_large, "SCRATCH", 2 * k * (rows // 2 if scratch == 1 else rows * scratch))
    run = Run()
    w, held = run.leaf(kind, (k, rows, 3, 2), packed=kind == "q5_0"), run.leaf("f32", (k, 3, 65, 2))
    x = permute(held, 0, 2, 1, 3)
    run.values[x] = run.values[held].transpose(0, 2, 1, 3)
    node = run.node(w, x)
    steps = lowered(node, run.ctx)
    products = [s for s in steps if s.name == "multiply_each"]
    assert len(products) == (turns if dtype(kind).is_quantized else 1)
    run.check(node, steps)


@pytest.mark.parametrize("kind", ["f16", "f32", "bf16"])
@pytest.mark.parametrize("n", [2, 9, 65])
def test_weights_whose_rows_are_not_contiguous(kind: str, n: int) -> None:
    """The transpose of a matrix in memory."""
    run = Run()
    held = run.leaf(kind, (7, 40))
    w = permute(held, 1, 0, 2, 3)
    run.values[w] = run.values[held].transpose(0, 1, 3, 2)
    run.product(w, run.leaf("f32", (40, n)))


def test_a_part_of_packed_weights() -> None:
    """Rows of them, as a view."""
    for n in (3, 65):
        run = Run()
        whole = run.leaf("q6_K", (512, 20), packed=True)
        w = view(whole, (512, 6), (whole.nb[1], 0, 0), 9 * whole.nb[1])
        run.values[w] = run.values[whole][:, :, 9:15]
        run.product(w, run.leaf("f32", (512, n)))


def test_what_takes_which_way() -> None:
    exact, quick = Run(), Run(exact=False)
    x, many = Tensor("f32", (256, 8)), Tensor("f32", (256, 9))
    for kind, when_exact in (("q4_K", False), ("f16", True), ("f32", True), ("iq2_xxs", False)):
        w = Tensor(kind, (256, 8))
        asked = ((x, exact), (x, quick), (many, quick))
        taken = [routed(mul_mat(w, t), run.ctx).kernel.name for t, run in asked]
        assert (taken[0] == "gemv") == when_exact and taken[1] == "gemv"
        assert taken[2] == ("gemm_large" if kind == "f32" else "gemm_small")
        assert why_unsupported(mul_mat(w, x)) is None
    assert "no decoder for q8_1" in (why_unsupported(mul_mat(Tensor("q8_1", (256, 8)), x)) or "")


@pytest.mark.parametrize("arch", [*configs.TABLES, "sm_86", "sm_120", "gfx90a"])
def test_every_shape_has_a_config(arch: str) -> None:
    for kind in KINDS:
        for n in (1, 16, 17, 64, 129, 5000):
            c = configs.find_config(arch, kind, n)
            assert c.width % 128 == 0 or kind in FLOATS, "a superblock is whole steps, a word of scales within one"
            assert c.width in (128, 256) or c.width % 256 == 0 or kind in FLOATS


@pytest.mark.parametrize("usage", [Usage.WEIGHTS, Usage.COMPUTE])
@pytest.mark.parametrize(
    ("kind", "tokens", "heads"), [("f16", 2, 1), ("q8_0", 2, 1), ("q4_K", 2, 1), ("q4_K", 16, 1), ("q8_0", 3, 4)]
)
def test_weights_that_a_run_writes_are_read_when_that_is_done(kind: str, tokens: int, heads: int, usage: Usage) -> None:
    """On Hopper a launch may begin before the one before it ends, and reads its weights first."""
    w, x = Tensor(kind, (256, 64, heads)), Tensor("f32", (256, tokens, heads))
    node = mul_mat(w, x)
    ctx = context(target_of("sm_90"))
    place = ctx.place
    buffer = TritonBuffer(torch.zeros(w.nbytes, dtype=torch.uint8), usage)
    if kind != "f16" and usage is Usage.WEIGHTS:
        buffer = PackedBuffer(Packed.empty(kind, w.n_rows, 256, "cpu"), usage)
    ctx.place = lambda t: (buffer, 0) if t is w else place(t)
    steps = [step for step in lowered(node, ctx) if isinstance(step, Launch)]
    product = steps[-1]
    names = ("packed_gemv", "dense_gemv", "batch_wgmma", "packed_head_gemv")
    assert product.kernel.__name__ in names
    early = product.args["PDL"] if "PDL" in product.args else product.args["form"].pdl
    assert early == product.options.get("launch_pdl", False) == (usage is Usage.WEIGHTS)
