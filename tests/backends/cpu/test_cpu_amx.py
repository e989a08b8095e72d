"""Products by AMX's tiles: played in memory, and their code for a processor that has them."""

from __future__ import annotations

import re
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

pytest.importorskip("gguf")
from graphrt.backends.cpu import fast  # noqa: E402

if reason := fast.available():
    pytest.skip(reason, allow_module_level=True)
from support.cpu_kernels import Memory, at, decode, encode, nmse, run  # noqa: E402
from support.played_tiles import PlayedTiles  # noqa: E402
from support.rounding import largest_energy, of_products, of_rounded  # noqa: E402

from graphrt import Graph, get_backend, new_input, ops, prepare  # noqa: E402
from graphrt.backends.cpu.fast import amx, amx_bytes, amx_experts, jit, matvec, pool  # noqa: E402
from graphrt.backends.cpu.fast.ir import Host  # noqa: E402
from graphrt.testing import Case, Inputs  # noqa: E402
from graphrt.tools.conformance.cases.sources import make_backend  # noqa: E402
from graphrt.tools.conformance.run.step import run_case  # noqa: E402

#: Of a bf16's relative error the square's mean at most: it is evenly spread within 2**-8 to either side.
OF_BF16 = (2.0**-8) ** 2 / 3


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    by = PlayedTiles()
    for module in (fast, amx, amx_bytes, amx_experts):  # the first one first: it keeps what it finds in the second
        monkeypatch.setattr(module, "amx_tiles", lambda: by)


def product(mem: Memory, name: str, bits: int, x: np.ndarray, w: np.ndarray, before: float = 3.0) -> np.ndarray:
    """y [tokens, rows] of x [tokens, n] and w [rows, bytes], added to what y holds; between rows of w are gaps."""
    padded = mem.put(np.pad(w, ((0, 0), (0, 6)), constant_values=0xFF), offset=2)
    split, n_tok, n = fast.split_of(name, bits), *x.shape
    tiles = mem.put(np.full(split.bytes(n, n_tok), 0xFF, np.uint8))
    run(fast.split_rows(split, dst=at(tiles), x=at(x), n_tok=n_tok, n=n, x_nb=x.strides[0]))
    y = mem.put(np.full((n_tok, len(w)), before, np.float32))
    panels = mem.put(np.full((2, fast.amx_panel_bytes(split, n_tok)), 0xFF, np.uint8))
    run(fast.amx_gemm(
        name, y=at(y), w=at(padded), x=at(tiles), panels=at(panels), n_panels=2, n_rows=len(w), n=n, n_tok=n_tok,
        w_nb=padded.shape[1], y_nb=y.strides[0], bits=bits, res=at(y), res_nb=y.strides[0],
    ))  # fmt: skip
    found: np.ndarray = y - before
    return found


def check(name: str, bits: int, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """Of a number that is two bf16 an error of both remains; of 8 bits x has one. What lies in both second parts is
    left out."""
    values, wide = decode(name, w).astype(np.float64), x.astype(np.float64)
    of_w, of_x = OF_BF16**2 * values**2, (OF_BF16**2 if bits == 16 else OF_BF16) * wide**2
    left_out = OF_BF16**2 * (wide**2 @ (values**2).T)
    of_sums = of_products(2 * np.abs(values), wide, of_w)
    error = y - wide @ values.T
    assert (error**2).sum() <= largest_energy(of_x @ (values**2).T + left_out + of_sums + 2.0**-48 * 36)


@pytest.mark.parametrize("name", fast.CODE_TYPES)
def test_products(played: None, name: str, mem: Memory, rng: np.random.Generator) -> None:
    """Every type: several units, blocks that fill none, more rows and tokens than a tile has."""
    n = {32: 352, 64: 192, 256: 768}[fast.TYPES[name].size]
    w = encode(rng, name, (37, n))
    x = mem.put((rng.standard_normal((19, n + 3)) * np.exp(rng.uniform(-9, 9, (19, 1)))).astype(np.float32))
    check(name, 16, x[:, :n], w, product(mem, name, 16, x[:, :n], w))


@pytest.mark.parametrize(("n_rows", "n_tok"), [(1, 1), (16, 16), (33, 48), (300, 9), (150, 530)])
def test_sizes(played: None, n_rows: int, n_tok: int, mem: Memory, rng: np.random.Generator) -> None:
    """Blocks of rows and tokens that are odd or whole in number; more rows than are decoded at once, more tokens than
    pass by, of rows in pieces."""
    assert amx.ROWS < 150 and amx.TOKENS < 530 and amx.PIECE < 288
    for bits in (16, 8):
        w, x = encode(rng, "q8_0", (n_rows, 288)), mem.put(rng.standard_normal((n_tok, 288)).astype(np.float32))
        check("q8_0", bits, x, w, product(mem, "q8_0", bits, x, w))


@pytest.mark.parametrize("bits", [16, 8])
def test_rows_that_are_no_numbers(played: None, bits: int, mem: Memory) -> None:
    """Their products are none either, those of others are; so it is with weights, whatever bits a NaN has."""
    values = np.ones((5, 64), np.float32)
    values[1, 5], values[2, 40], values[3, 7] = np.inf, np.nan, -np.inf
    values.view(np.uint32)[4, 9] = 0x7F800001
    w = encode(np.random.default_rng(1), "q8_0", (4, 64))
    w[1, :2], w[3, 34:36] = (0xFF, 0x7F), (1, 0x7C)  # NaN of f16
    y = product(mem, "q8_0", bits, mem.put(values), w)
    finite = np.isfinite(y)
    assert finite[0, 0] and finite[0, 2] and finite.sum() == 2


def test_largest_and_smallest(played: None, mem: Memory) -> None:
    values = np.zeros((3, 64), np.float32)
    values[0, :32], values[0, 32:], values[2] = 1e30, -1e30, 1e-39
    w = encode(np.random.default_rng(1), "q8_0", (3, 64))
    y = product(mem, "q8_0", 16, mem.put(values), w, 0.0)
    wide = decode("q8_0", w).astype(np.float64)
    assert (np.abs(y[0] - values[0].astype(np.float64) @ wide.T) <= 3e-5 * np.abs(values[0]) @ np.abs(wide).T).all()
    assert not y[1:].any()


def test_a_graph(played: None, rng: np.random.Generator) -> None:
    """Many tokens take them, two matrices of one x share its tiles, residuals are added; few tokens take rows."""
    x = new_input("f32", 256, 21, name="x")
    weights = [new_input("q4_K", 256, n, name=f"w{n}") for n in (40, 24)]
    res = new_input("f32", 40, 21, name="res")
    products = [ops.mul_mat(w, x) for w in (weights[0], weights[0], weights[1], weights[0])]
    out = [ops.glu(products[0], products[1], "swiglu"), products[2], ops.add(products[3], res)]
    sides = []
    for exact in (False, True):
        backend = get_backend("cpu", exact=exact)
        exe = prepare(Graph(*out), [backend])
        for t in (x, res):
            exe.write(t, np.random.default_rng(t.ne[0]).standard_normal(t.shape).astype(np.float32))
        for t in weights:
            exe.write(t, np.asarray(encode(np.random.default_rng(t.ne[1]), "q4_K", (t.ne[1], 256))))
        exe.run()
        sides.append([np.asarray(exe.read(t)) for t in out])
        if not exact:
            runners = " ".join(step.runner for split in exe.splits for step in split.run.steps)
            made = re.findall(r"(?:gemm|split)\w+", runners)
    assert sorted(made) == ["gemm_q4_K_played_16"] * 4 + ["split_k_eights_1_2"]
    for a, b in zip(*sides):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("own_x", [False, True])
def test_experts(played: None, own_x: bool, bits: int, rng: np.random.Generator) -> None:
    """Expert 0 has no token, 1 one, 2 two, 3 more than a tile, others are no expert's; two products of one x and its
    experts share its tiles, one of other experts doesn't."""
    n_tok, n_expert, n = 21, 4, 288
    ids = np.stack([np.full(n_tok, 3), np.resize([3, 1], n_tok)], 1).astype(np.int32)
    ids[5:, 1], ids[7:9, 1], ids[9, 1], ids[10, 1] = 3, 2, 4, -1
    w = new_input("q8_0", n, 19, n_expert, name="w")
    x = new_input("f32", n, 2 if own_x else 1, n_tok, name="x")
    names = ("ids", "others")
    chosen, others = (new_input("i32", 2, n_tok, name=name) for name in names)
    bias = new_input("f32", 19, n_expert, name="bias")
    out = [
        ops.add_id(ops.mul_mat_id(w, x, chosen), bias, chosen), ops.mul_mat_id(w, x, others),
        ops.mul_mat_id(w, x, chosen), ops.scale(ops.mul_mat_id(w, x, chosen), 2.0),
    ]  # fmt: skip
    given = {
        w: encode(rng, "q8_0", (n_expert, 19, n)), x: rng.standard_normal(x.shape).astype(np.float32),
        chosen: ids, others: ids[::-1].copy(), bias: rng.standard_normal((n_expert, 19)).astype(np.float32),
    }  # fmt: skip
    sides = []
    for backend in (get_backend("cpu", exact=False, activation_bits=bits), get_backend("cpu")):
        exe = prepare(Graph(*out), [backend])
        for t, values in given.items():
            exe.write(t, values)
        exe.run()
        sides.append([np.asarray(exe.read(t)).reshape(n_tok, 2, 19) for t in out])
    for a, b in zip(*sides):
        assert np.array_equal(np.isnan(a), np.isnan(b)) and np.isnan(a).any()
        assert nmse(a[~np.isnan(a)], b[~np.isnan(b)]) < (1e-9 if bits == 16 else 1e-4)


@pytest.mark.parametrize("name", ["cpu-fast", "cpu-int8"])
def test_the_judge(played: None, name: str) -> None:
    for kind in ("q4_0", "q6_K"):

        def make(inputs: Inputs, kind: str = kind) -> Any:
            return ops.mul_mat(inputs("w", kind, (512, 33)), inputs("x", "f32", (512, 40), None))

        found = run_case(Case("MUL_MAT", {"type": kind}, make), make_backend(name))
        assert found.status == "pass", found.message


# few tokens, by tiles of bytes

WIDTHS = {"one run": 32, "batches, a rest, one piece": 576, "pieces that end in a rest": 1408}
FEW = [(name, n_tok) for name in amx_bytes.TYPES for n_tok in (8, 5)]


@pytest.mark.parametrize(("name", "n_tok"), FEW)
def test_few_tokens(played: None, name: str, n_tok: int, mem: Memory, rng: np.random.Generator) -> None:
    """More rows than a tile has, and fewer; a row's end is the matrix's. The error is what rounding x explains: a token
    doesn't feel that another one is much larger, nor a group of 32 that another is."""
    assert amx_bytes.PIECE < 1408 and 576 // 32 % amx_bytes.RUNS
    columns = fast.columns_of(name, amx_bytes.BITS, n_tok)
    assert columns is not None
    for n in WIDTHS.values():
        w = encode(rng, name, (37, n))
        padded = mem.put(np.pad(w, ((0, 0), (0, 6)), constant_values=0xFF), offset=2)
        sizes = np.exp(rng.uniform(-9, 9, (n_tok, n // 32))).repeat(32, -1)
        x = mem.put((np.pad(rng.standard_normal((n_tok, n)) * sizes, ((0, 0), (0, 3)))).astype(np.float32))
        given = mem.put(np.full(columns.bytes(n), 0xFF, np.uint8))
        run(fast.round_columns(columns, dst=at(given), x=at(x), n_tok=n_tok, n=n, x_nb=x.strides[0]))
        y = mem.nan(n_tok, len(w))
        run(fast.gemv(
            name, y=at(y), w=at(padded), x=at(given), n_rows=len(w), n=n, w_nb=padded.shape[1], n_tok=n_tok,
            y_nb=y.strides[0], bits=amx_bytes.BITS, columns=columns,
        ))  # fmt: skip
        values, wide = decode(name, w).astype(np.float64), x[:, :n].astype(np.float64)
        most = np.abs(values).reshape(len(w), -1, 32).max(-1).repeat(32, -1)  # codes are summed with their offsets
        error = (y - wide @ values.T) ** 2
        may = of_rounded(wide, amx_bytes.BITS) @ (values**2).T
        may += of_products(2 * most + np.abs(values), wide, np.zeros(values.shape))
        assert (error.sum(-1) <= [largest_energy(row) for row in may]).all()


def test_who_takes_tiles_of_bytes(played: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as gain by them, rounded, of types that begin with their scales, where there are tiles."""
    asked = [("q4_1", 16, 5), ("q4_1", 16, 8), ("q4_1", 16, 4), ("q4_1", 16, 9), ("q4_1", 8, 8), ("q4_1", 32, 8),
             ("q4_K", 16, 8), ("f32", 16, 8)]  # fmt: skip
    assert [fast.columns_of(*one) is not None for one in asked] == [True] * 2 + [False] * 6
    monkeypatch.setattr(amx_bytes, "amx_tiles", lambda: None)
    assert fast.columns_of("q4_1", 16, 8) is None


def test_a_graph_of_few_tokens(played: None, rng: np.random.Generator) -> None:
    """Matrices of one x share its columns, those of a feed-forward may be of two types, residuals are added, and a row
    that is no number is one token's alone."""
    kinds = ("q4_1", "q8_0", "q6_K")
    x, res = new_input("f32", 256, 6, name="x"), new_input("f32", 40, 6, name="res")
    weights = [new_input(kind, 256, 40, name=kind) for kind in kinds]
    made = [ops.mul_mat(w, x) for w in (*weights, weights[0], weights[0])]
    out = [ops.glu(made[0], made[1], "swiglu"), ops.glu(made[3], made[2], "swiglu"), ops.add(made[4], res)]
    given = {t: rng.standard_normal(t.shape).astype(np.float32) for t in (x, res)}
    given[x][..., 2, 7] = np.nan
    sides = []
    for backend in (get_backend("cpu", exact=False), get_backend("cpu")):
        exe = prepare(Graph(*out), [backend])
        for t, values in given.items():
            exe.write(t, values)
        for t in weights:
            exe.write(t, np.asarray(encode(np.random.default_rng(len(t.name)), t.dtype.name, (40, 256))))
        exe.run()
        sides.append([np.asarray(exe.read(t)).reshape(6, 40) for t in out])
        if backend.id == "cpu" and len(sides) == 1:
            runners = " ".join(step.runner for split in exe.splits for step in split.run.steps)
    found = re.findall(r"(?:gemv|columns|round)_\w+", runners)
    assert found.count("columns_16") == 1 and sum("played_bytes" in name for name in found) == 3, found
    for a, b in zip(*sides):
        assert (np.isnan(a).all(-1) == (np.arange(6) == 2)).all()
        assert nmse(np.delete(a, 2, 0), np.delete(b, 2, 0)) < 1e-8


@pytest.mark.skipif(amx.amx_tiles() is None, reason="this machine has no tiles")
def test_this_machines_tiles_are_as_played(mem: Memory, rng: np.random.Generator) -> None:
    """The same bits: sums of a run are whole numbers, the rest is not the tiles'."""
    w, x = encode(rng, "q5_1", (37, 736)), mem.put(rng.standard_normal((8, 736)).astype(np.float32))
    columns = amx_bytes.Columns()
    given = mem.put(np.full(columns.bytes(736), 0xFF, np.uint8))
    run(fast.round_columns(columns, dst=at(given), x=at(x), n_tok=8, n=736, x_nb=x.strides[0]))
    sides = []
    for by in (amx.Amx(), PlayedTiles()):
        y = mem.nan(8, 37)
        kernel = matvec.gemv_kernel(amx_bytes.ByteTiles("q5_1", columns, by), 8)
        args = kernel.pack(y=at(y), w=at(w), x=at(given), n_rows=37, n=736, w_nb=w.shape[1], y_nb=y.strides[0])
        run(pool.Step([pool.Entry(kernel, args)], 0))
        sides.append(y)
    assert np.array_equal(*sides)


# the code of a processor that has them


def there() -> Host:
    features = ("ssse3", "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "avx512bf16")
    return Host("x86_64-unknown-linux-gnu", "sapphirerapids", dict.fromkeys((*features, *amx.FEATURES), True))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("name", ["q4_K", "q8_0"])
def test_code(name: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers are set up once, three products of two parts and two of one for each pair of tiles, and given back at
    the one return; decoding is by full vectors and calls nothing."""
    monkeypatch.setattr(jit, "host", there)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    lines = {}
    split = fast.split_of(name, bits)
    by_expert = [amx_experts.gemm_kernel(name, bits // 8, amx.Amx()), amx_experts.split_kernel("x", split)]
    for kernel in (
        amx.gemm_kernel(name, bits // 8, amx.Amx()), amx.split_kernel("x", split),
        *(by_expert if name == "q4_K" else []),
    ):  # fmt: skip
        module = llvm.parse_assembly(kernel.ir())
        module.verify()
        target = llvm.Target.from_triple(there().triple)
        features = ",".join(f"+{name}" for name in there().features)
        machine = target.create_target_machine(cpu=there().cpu, features=features, opt=3)
        text = str(machine.emit_assembly(module))
        lines[kernel.name] = text.splitlines()
        called = re.findall(r"^\s+callq?\s+(\S+)", text, re.MULTILINE)
        assert set(called) <= {"memset", "memcpy", "memset@PLT", "memcpy@PLT"}, called
    products = lines[f"gemm_{name}_amx_{bits}"]

    def count(word: str) -> int:
        return sum(f"\t{word}" in line for line in products)

    assert count("ldtilecfg") == count("tilerelease") == count("ret") == 1
    pieces = len(fast.CODE_TYPES[name].units)
    assert count("tdpbf16ps") == pieces * 4 * (bits // 8 + 1)
    assert count("tileloadd") == pieces * (4 + 2 * (bits // 8 + 2)) and count("tilestored") == pieces * 4
    assert any("zmm" in line for line in products) and any("zmm" in line for line in lines["split_x"])


def test_who_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instructions alone are not enough: the system must have allowed them."""
    for features, allowed, expected in (
        (amx.FEATURES, True, amx.Amx), (amx.FEATURES, False, type(None)), (amx.FEATURES[1:], True, type(None))
    ):  # fmt: skip
        monkeypatch.setattr(amx, "host", lambda features=features: Host("x86_64", "x", dict.fromkeys(features, True)))
        monkeypatch.setattr(amx, "_allowed", lambda allowed=allowed: allowed)
        assert isinstance(amx.amx_tiles.__wrapped__(), expected)
