"""Programs of the fast CPU kernels: what a program's words promise, whoever comes late; and matrices in slices."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import write_model

from graphrt import Graph, Tensor, get_backend, new_input, ops, prepare
from graphrt.backends.cpu import fast

if reason := fast.available():
    pytest.skip(reason, allow_module_level=True)
from graphrt.backends.cpu import products
from graphrt.backends.cpu.fast import jit, pool
from graphrt.models import load
from graphrt.models.engine import Engine, SessionOptions
from graphrt.testing import dequantize, nmse, quantize

SMALL, LARGE, THREADS = 1, 1 << 30, 4


@dataclass(frozen=True)
class FakeKernel:
    address: int = 0


@dataclass(frozen=True)
class Item:
    """An item of a packed program. group: the number of its group; target: chunks done when it and all before are."""

    group: int
    chunks: int
    target: int
    chained: bool
    waits: bool


def packed(groups: Sequence[Sequence[int]]) -> tuple[list[Item], int]:
    """The items of groups of steps, given by their memory traffic, and the number of threads."""
    entry = pool.Entry(FakeKernel(), (ctypes.c_int64 * 1)())  # type: ignore[arg-type]
    words = pool._pack([[(entry, n) for n in group] for group in groups], THREADS)

    def word(offset: int) -> int:
        return ctypes.c_int64.from_address(words.address + offset).value

    group_of = [i for i, group in enumerate(groups) for _ in group]
    assert word(pool._N_ITEMS) == len(group_of)
    items = []
    for i, group in enumerate(group_of):
        at = pool._ITEMS + i * pool._ITEM
        flags = word(at + pool._FLAGS)
        items.append(
            Item(group, word(at + pool._N_CHUNKS), word(at + pool._TARGET), *(bool(flags & f) for f in (2, 1)))
        )
    assert (pool._CHAINED, pool._WAIT) == (2, 1)
    return items, word(pool._N_THREADS)


def check(items: Sequence[Item]) -> None:
    """No item begins before all of the groups before its own are done.

    A thread takes a chunk of an item, and whoever takes an item's only chunk goes through the chained ones behind it in
    order. So what a thread can be sure of when it begins an item is: what was waited for, and its own chain.
    """
    sure, target, chain, pending = -1, 0, [], -1
    for i, item in enumerate(items):
        if item.chained:
            assert chain and item.chunks == 1, "a chained item is one chunk's, behind a head of one chunk"
            chain.append(i)
        else:
            sure = max(sure, pending)
            chain, pending = ([i] if item.chunks == 1 else []), -1
            target += item.chunks
        if item.waits:  # a head waits for its whole chain, which is in one chunk
            assert not item.chained, "only who takes chunks comes by to wait"
            last = i
            while last + 1 < len(items) and items[last + 1].chained:
                last += 1
            pending = last
        assert item.target == target, "as many chunks as there are up to here"
        needed = {j for j in range(i) if items[j].group < item.group}
        assert all(j <= sure or j in chain for j in needed), f"item {i} begins before {needed}"


@pytest.mark.parametrize("sizes", [2, 3, 4])
def test_no_step_begins_before_those_that_it_needs(sizes: int) -> None:
    """All programs of so many groups of one to three small or large steps."""
    forms = [form for n in (1, 2, 3) for form in itertools.product((SMALL, LARGE), repeat=n)]
    if sizes == 4:
        forms = [form for form in forms if len(form) < 3]
    for groups in itertools.product(forms, repeat=sizes):
        items, threads = packed(groups)
        check(items)
        assert [item.chunks for item in items] == [THREADS if n == LARGE else 1 for g in groups for n in g]
        assert threads == (1 if items[-1].target == 1 else THREADS)


def test_small_steps_are_one_chain() -> None:
    items, threads = packed([[SMALL], [SMALL, SMALL], [SMALL]])
    assert [item.chained for item in items] == [False, True, True, True] and threads == 1
    items, _ = packed([[LARGE, SMALL], [SMALL]])
    assert [item.chained for item in items] == [False, False, False], "the large one may still run"


# ---- matrices in slices ----


def both(graph: Graph, bits: int = 32, **given: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(fast, reference) of each output, for the same random inputs but those given by name. bits: of activations."""
    exes = [prepare(graph, get_backend("cpu", exact=exact, activation_bits=bits)) for exact in (False, True)]
    rng = np.random.default_rng(3)
    for leaf in graph.inputs:
        values: Any = rng.standard_normal(leaf.shape).astype(np.float32)
        if leaf.dtype.kind == "int":
            values = rng.integers(0, 3, leaf.shape)
        elif leaf.dtype.is_quantized:
            values = quantize(values, leaf.dtype, rng)
        for exe in exes:
            exe.write(leaf, given.get(leaf.name, values))
    for exe in exes:
        exe.run()
    fast_one, exact = exes
    return [(fast_one.read(out), exact.read(out)) for out in graph.outputs]


def leaf(name: str, *ne: int, kind: str = "f32") -> Tensor:
    return new_input(kind, *ne, name=name)


def _product(rows: int, kind: str) -> Graph:
    return Graph(ops.mul_mat(leaf("w", 64, rows, kind=kind), leaf("x", 64, 11)))


def _with_residual(rows: int, kind: str) -> Graph:
    made = ops.mul_mat(leaf("w", 64, rows, kind=kind), leaf("x", 64, 11))
    return Graph(ops.add(leaf("r", rows, 11), made))


def _gate(rows: int, kind: str) -> Graph:
    x = leaf("x", 64, 11)
    gate, up = (ops.mul_mat(leaf(name, 64, rows, kind=kind), x) for name in ("gate", "up"))
    return Graph(ops.glu(gate, up, "swiglu"))


def _experts(rows: int, kind: str) -> Graph:
    ids = leaf("ids", 2, 11, kind="i32")
    made = ops.mul_mat_id(leaf("w", 64, rows, 3, kind=kind), leaf("x", 64, 2, 11), ids)
    return Graph(ops.add_id(made, leaf("b", rows, 3), ids))


@pytest.mark.parametrize("kind", ["q8_0", "f16"])
@pytest.mark.parametrize("make", [_product, _with_residual, _gate, _experts])
def test_large_matrices_are_decoded_in_slices(make: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slice is shorter, of one row, or as long as all others; one may be the whole matrix."""
    monkeypatch.setattr(products, "SLICE_BYTES", 4 * 4 * 64 + 100)  # four rows and a half
    for rows in (10, 9, 8, 4, 3):
        for found, expected in both(make(rows, kind)):
            assert nmse(found, expected) < 1e-12


def test_a_slice_is_as_long_as_its_bytes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[tuple[int, int]] = []
    slices = products.matrix_slices

    def noted(*args: Any) -> Any:
        for start, stop, decode, matrix in slices(*args):
            assert matrix.shape == (stop - start, 64)
            cut.append((start, stop))
            yield start, stop, decode, matrix

    monkeypatch.setattr(products, "matrix_slices", noted)
    for nbytes, wanted in ((4 * 4 * 64, [(0, 4), (4, 8), (8, 10)]), (1, [(i, i + 1) for i in range(10)])):
        monkeypatch.setattr(products, "SLICE_BYTES", nbytes)
        cut.clear()
        both(_product(10, "q8_0"))
        assert cut == wanted


# ---- what is kept ----


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_weights_are_decoded_once_for_each_look_at_them(kind: str) -> None:
    """Views of one weight that begin at one place: all rows, every other one, the first halves of rows."""
    rng, backend = np.random.default_rng(4), get_backend("cpu")
    values = rng.standard_normal((8, 64)).astype(np.float32)
    whole = Tensor(kind, (64, 8), name="w")
    raw = quantize(values, whole.dtype, rng)
    whole.buffer = backend.wrap_host(np.ascontiguousarray(raw).reshape(-1).view(np.uint8))
    x, half = leaf("x", 64, 2), leaf("half", 32, 2)
    row = whole.nb[1]
    looks = [
        ops.view(whole, (64, 4), (row,)),
        ops.view(whole, (64, 4), (2 * row,)),
        ops.view(whole, (64, 4), (row,), row),
    ]
    parts = [ops.view(whole, (32, 4), (row,)), ops.view(whole, (32, 4), (row // 2,))]
    graph = Graph(*(ops.mul_mat(w, x) for w in looks), *(ops.mul_mat(w, half) for w in parts))
    exe = prepare(graph, backend)
    given = {t: rng.standard_normal((2, t.ne[0])).astype(np.float32) for t in (x, half)}
    for t, value in given.items():
        exe.write(t, value)
    for _ in range(2):
        exe.run()
    w = dequantize(raw, whole.dtype).reshape(8, 64).astype(np.float64)
    seen = [w[:4], w[::2], w[1:5], w[:4, :32], w.reshape(16, 32)[:4]]
    for out, matrix, t in zip(graph.outputs, seen, (x, x, x, half, half), strict=True):
        assert nmse(exe.read(out)[0, 0], given[t] @ matrix.T) < 1e-12


def test_machine_code_on_disk_is_that_of_these_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of kept kernels changes with every byte of the sources, of which a new version has others."""
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    source, found = tmp_path / "blocks.py", set()
    for text in ("a = 1", "a = 2", "a = 1"):
        source.write_text(text)
        found.add(jit._fingerprint.__wrapped__())
    assert len(found) == 2


def test_kernels_of_a_program_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, each once and kept; what can't be compiled says so, and is compiled by the next who needs it."""
    monkeypatch.setenv("GRAPHRT_KERNEL_CACHE", str(tmp_path / "kernels"))
    made: list[str] = []
    real = jit.compile_ir

    def compile_ir(text: str) -> bytes:
        made.append(text)
        if len(made) == 1:
            raise ValueError("no memory for LLVM")
        return real(text)

    monkeypatch.setattr(jit, "compile_ir", compile_ir)
    kernels = [jit.Kernel(f"store_{n}", ("at",), lambda f, n=n: f.store(f.args("at")[0], f.const(n))) for n in (3, 4)]
    with pytest.raises(ValueError, match="no memory"):
        jit.load_kernels(kernels)
    assert not any(kernel.is_loaded for kernel in kernels)
    next((tmp_path / "kernels").glob("*.o")).unlink()  # the other was compiled
    for _ in range(2):
        jit.load_kernels([*kernels, *kernels])
    texts = [kernel.ir() for kernel in kernels]
    assert made == [*texts, *texts] and len(list((tmp_path / "kernels").glob("*.o"))) == 2
    found = np.zeros(1, np.int64)
    for kernel, value in zip(kernels, (3, 4), strict=True):
        fast.Step([pool.Entry(kernel, kernel.pack(at=found.ctypes.data))], 8)()
        assert found[0] == value


# ---- uses outside of models ----


def _weight_with_gaps() -> Graph:
    """Every other element of a matrix as a norm's row of weights."""
    row = ops.transpose(ops.view(leaf("w", 2, 32), (1, 32), (8,)))
    return Graph(ops.mul(ops.rms_norm(leaf("x", 32, 3), 1e-5), row))


def _row_times_norm() -> Graph:
    """A norm of one row: both sources of the MUL are rows."""
    return Graph(ops.mul(leaf("w", 32), ops.rms_norm(leaf("x", 32), 1e-5)))


def _product_and_itself() -> Graph:
    made = ops.mul_mat(leaf("w", 32, 5, kind="q8_0"), leaf("x", 32, 3))
    return Graph(ops.add(made, made))


def _product_that_is_read() -> Graph:
    made = ops.mul_mat(leaf("w", 32, 5, kind="q8_0"), leaf("x", 32, 3))
    norm = ops.rms_norm(leaf("y", 32, 3), 1e-5)
    return Graph(made, ops.add(made, leaf("r", 5, 3)), norm, ops.mul(norm, leaf("weight", 32)))


def _gate_of_two_inputs() -> Graph:
    w, u = leaf("w", 32, 5, kind="q8_0"), leaf("u", 32, 5, kind="q8_0")
    return Graph(ops.glu(ops.mul_mat(w, leaf("x", 32, 3)), ops.mul_mat(u, leaf("y", 32, 3)), "swiglu"))


def _gate_the_other_way() -> Graph:
    x = leaf("x", 32, 3)
    up, gate = ops.mul_mat(leaf("w", 32, 5, kind="q8_0"), x), ops.mul_mat(leaf("u", 32, 5, kind="q8_0"), x)
    return Graph(up, ops.glu(gate, up, "swiglu"))


def _turned_gate() -> Graph:
    """GLU(second product, first product), and nobody else reads these."""
    x = leaf("x", 32, 3)
    first, second = (ops.mul_mat(leaf(name, 32, 5, kind="q8_0"), x) for name in "ab")
    whole = Graph(first, ops.glu(second, first, "swiglu"))
    return Graph(whole.outputs[1])


def _scales_and_tanh(inner: float, outer: float, bias: tuple[float, float]) -> Graph:
    bent = ops.unary(ops.scale(leaf("x", 32, 3), inner, bias[0]), "tanh")
    return Graph(ops.scale(bent, outer, bias[1]))


def _repeated_rows() -> Graph:
    return Graph(ops.add(leaf("a", 32, 4, 3), leaf("b", 32, 1, 3)), ops.mul(leaf("c", 32, 4), leaf("d", 32, 2)))


def _parts_of_rows() -> Graph:
    """Two of four rows of each of six: the distances between rows are not one."""
    x, r = leaf("x", 32, 4, 6), leaf("r", 32, 2, 6)
    part = ops.view(x, (32, 2, 6), x.nb[1:3])
    few = ops.mul_mat(leaf("w", 32, 5, kind="q8_0"), part)
    return Graph(ops.scale(part, 2.0), ops.rms_norm(part, 1e-5), ops.add(part, r), ops.add(r, part), few)


def _two_sequences_rotated() -> Graph:
    return Graph(ops.rope(leaf("x", 32, 2, 3, 2), leaf("pos", 3, kind="i32"), ops.RopeParams(32, "neox")))


def _factors_that_are_an_input() -> Graph:
    params = ops.RopeParams(32, "neox")
    return Graph(ops.rope(leaf("x", 32, 2, 3), leaf("pos", 3, kind="i32"), params, ops.sqr(leaf("f", 16))))


OUTSIDE = {
    "a norm's weights with gaps": _weight_with_gaps,
    "a row times a norm": _row_times_norm,
    "a product added to itself": _product_and_itself,
    "a product and a norm that are outputs": _product_that_is_read,
    "gate and up of two inputs": _gate_of_two_inputs,
    "a gate that comes second": _gate_the_other_way,
    "a gate that comes second and alone": _turned_gate,
    "no cap: 2 tanh 3 x": lambda: _scales_and_tanh(3.0, 2.0, (0.0, 0.0)),
    "a cap with a bias before": lambda: _scales_and_tanh(0.5, 2.0, (0.25, 0.0)),
    "a cap with a bias behind": lambda: _scales_and_tanh(0.5, 2.0, (0.0, 0.25)),
    "a cap": lambda: _scales_and_tanh(0.5, 2.0, (0.0, 0.0)),
    "rows that repeat": _repeated_rows,
    "parts of rows": _parts_of_rows,
    "two sequences rotated": _two_sequences_rotated,
    "frequency factors that a node makes": _factors_that_are_an_input,
}


@pytest.mark.parametrize(("bits", "limit"), [(32, 1e-11), (16, 1e-8)])
@pytest.mark.parametrize("what", OUTSIDE)
def test_what_no_model_has_is_right_too(what: str, bits: int, limit: float) -> None:
    for found, expected in both(OUTSIDE[what](), bits):
        assert nmse(found, expected) < limit


def _attention(n_q: int, n_kv: int, m2: int = 1, n_seq: int = 1) -> Graph:
    q, k, v = leaf("q", 32, n_q, 4, n_seq), *(leaf(name, 32, n_kv, 2, n_seq, kind="f16") for name in "kv")
    mask = leaf("mask", n_kv, n_q, m2, n_seq, kind="f16")
    return Graph(ops.flash_attn_ext(q, k, v, mask, 0.2))


@pytest.mark.parametrize("n_q", [3, 40])
@pytest.mark.parametrize(("m2", "n_seq"), [(4, 2), (2, 1), (1, 2)])
def test_masks_of_heads_and_of_sequences(n_q: int, m2: int, n_seq: int) -> None:
    ((found, expected),) = both(_attention(n_q, 50, m2, n_seq))
    assert nmse(found, expected) < 1e-10


@pytest.mark.parametrize("n_q", [40, 129, 260])
@pytest.mark.parametrize("window", [0, 30])
def test_many_queries_that_see_a_part_of_the_keys(n_q: int, window: int) -> None:
    """Two sequences, of which the second stands further on; none of the first keys is seen."""
    n_kv = n_q + 90
    last = np.arange(n_q)[None, :, None] + np.array([30, 85])[:, None, None]
    key = np.arange(n_kv)[None, None]
    sees = (key <= last) & (key > last - window if window else key >= 20)
    mask = np.where(sees, 0.0, -np.inf).astype(np.float16)[:, None]
    ((found, expected),) = both(_attention(n_q, n_kv, 1, 2), mask=mask)
    assert nmse(found, expected) < 1e-10


@pytest.mark.parametrize("window", [0, 7])
def test_a_mask_of_distances(window: int) -> None:
    graph = Graph(ops.kq_mask(leaf("cells", 40, 2, kind="i32"), leaf("pos", 3, 2, kind="i32"), window, True))
    cells = np.stack([np.arange(40), np.arange(40)[::-1] - 5])
    ((found, expected),) = both(graph, cells=cells, pos=np.array([[20, 21, 39], [3, 4, 5]]))
    assert np.array_equal(found, expected) and float(found[0, 0, 0, 18]) == (-2.0)


# ---- single values of formats ----


def blocks_of(values: np.ndarray) -> np.ndarray:
    """A row of f32 as the q8_0 bytes that a cache gets: uint8 [bytes]."""
    target, ids = new_input("q8_0", len(values), 4, name="cache"), leaf("ids", 1, kind="i64")
    node = ops.set_rows(leaf("row", len(values), 1), ids, target)
    exe = prepare(Graph(node), get_backend("cpu", exact=False))
    exe.write("ids", np.array([2]))
    exe.write("row", values.astype(np.float32))
    exe.run()
    buffer, offset = exe.place(target)
    return np.asarray(buffer.read(offset + 2 * target.nb[1], target.nb[1]))


def test_halves_are_rounded_away_from_zero() -> None:
    """127 is a block's largest value, so that its step is 1."""
    values = np.array([127.0, *(sign * (i + 0.5) for i in range(15) for sign in (1, -1)), 0.49999997])
    codes = blocks_of(values)[2:].view(np.int8)
    assert codes.tolist() == [127, *(sign * (i + 1) for i in range(15) for sign in (1, -1)), 0]


def test_every_exponent_of_mxfp4() -> None:
    """Powers of two from the smallest on, of which the first are below f32's normal numbers."""
    n = 255  # the last exponent is NaN
    blocks = np.zeros((n, 17), np.uint8)
    blocks[:, 0] = np.arange(n)
    blocks[:, 1:] = np.arange(16) * 17
    wide, kind = np.full((n, 32), np.nan, np.float32), Tensor("mxfp4", (32, n)).dtype
    step = fast.dequant_rows(
        "mxfp4", "f32", dst=wide.ctypes.data, w=blocks.ctypes.data, n_rows=n, n=32, w_nb=17, dst_nb=128
    )
    step()
    with np.errstate(over="ignore"):
        expected = np.asarray(dequantize(blocks, kind)).reshape(n, 32)
    assert np.array_equal(wide, expected) and wide[1, 1] == 0.5 * 2.0**-126


def test_a_thread_that_begins_inside_a_token_rotates_by_its_angles() -> None:
    """Every part of the work by itself, the last one first, where another rotation's angles may lie on the stack."""
    rng = np.random.default_rng(8)
    x, pos = rng.standard_normal((3, 5, 32)).astype(np.float32), np.array([7, 100, 3], np.int32)
    others, freq = np.array([11, 12, 13], np.int32), 1e4 ** (-np.arange(16) / 16)
    call = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)

    def rotated(parts: int, y: np.ndarray, at: np.ndarray) -> None:
        step = fast.rope(
            y=y.ctypes.data, x=x.ctypes.data, pos=at.ctypes.data, freq=freq.ctypes.data, head_dim=32, n_dims=32,
            neox=True, n_head=5, n_tok=3, x_nb1=128, x_nb2=640, y_nb1=128, y_nb2=640,
        )  # fmt: skip
        (entry,) = step.entries
        for part in reversed(range(parts)):
            call(entry.kernel.address)(ctypes.addressof(entry.args), part, parts)

    angle = pos[:, None, None] * freq
    a, b = x[..., :16].astype(np.float64), x[..., 16:].astype(np.float64)
    turned = np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)
    for parts in (1, 2, 4, 7):
        y = np.full_like(x, np.nan)
        rotated(1, y.copy(), others)
        rotated(parts, y, pos)
        assert nmse(y, turned) < 1e-12


@pytest.mark.parametrize("n_seq", [1, 3])
def test_a_step_of_several_sequences_is_one_native_program(tmp_path: Path, n_seq: int) -> None:
    """What is not native ends a program, and each program has to wake the threads."""
    model = load(write_model(tmp_path / "m.gguf", "llama"), "cpu")
    engine = Engine(model.decoder, model.backends, SessionOptions(n_ctx=64, n_batch=n_seq), n_seq)
    (split,) = engine.executable(1, n_seq).splits
    assert [step.runner for step in split.run.steps if not step.runner.startswith("native ")] == []


def test_indices_that_matrices_share_are_dealt_out_in_turn() -> None:
    """Matrix i takes row i mod 2 of the indices, in either form."""
    ids = np.array([[0, 3], [2, 1]])
    rows = leaf("rows", 4, 2, 4)
    node = ops.set_rows(rows, leaf("ids", 2, 2, kind="i64"), leaf("t", 4, 5, 4))
    values = np.arange(1, 33, dtype=np.float32).reshape(4, 2, 4)
    expected = np.zeros((4, 5, 4), np.float32)
    for i in range(4):
        expected[i, ids[i % 2]] = values[i]
    for exact in (True, False):
        exe = prepare(Graph(node), get_backend("cpu", exact=exact))
        exe.write("t", np.zeros((4, 5, 4)))
        exe.write("rows", values)
        exe.write("ids", ids)
        exe.run()
        assert np.array_equal(exe.read(node).reshape(4, 5, 4), expected)
