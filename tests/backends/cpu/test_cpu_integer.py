"""Products of quantized rows with rounded activations, by every instruction set that this machine has, and their code
for those that it lacks."""

from __future__ import annotations

import itertools
import re
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

pytest.importorskip("gguf")
from graphrt.backends.cpu import fast  # noqa: E402

if reason := fast.available():
    pytest.skip(reason, allow_module_level=True)
from support.cpu_kernels import Memory, at, decode, encode, run  # noqa: E402
from support.rounding import ROUNDING, largest_energy, of_products, of_rounded  # noqa: E402

from graphrt import get_backend, new_input, ops  # noqa: E402
from graphrt.backends.cpu.fast import (  # noqa: E402
    attention,
    dot,
    experts,
    integer,
    jit,
    math_ops,
    matvec,
    norm_rope,
    reduce,
)
from graphrt.backends.cpu.fast import rows as rows_kernels  # noqa: E402
from graphrt.backends.cpu.fast.attention_task import Shape  # noqa: E402
from graphrt.backends.cpu.fast.ir import Host  # noqa: E402
from graphrt.backends.cpu.fast.tiles import gemm_kernel  # noqa: E402
from graphrt.errors import BackendError  # noqa: E402
from graphrt.tensor import Tensor  # noqa: E402
from graphrt.testing import Case, Inputs  # noqa: E402
from graphrt.tools.common import rounding_backend  # noqa: E402
from graphrt.tools.conformance.cases.sources import make_backend  # noqa: E402
from graphrt.tools.conformance.run.step import run_case  # noqa: E402

HERE: list[dot.Dot] = [d for d, has in dot.CHOICES if has(jit.host())]


def rounded(mem: Memory, form: Any, x: np.ndarray) -> tuple[np.ndarray, int]:
    """Rounded rows of x, and bytes of each."""
    nb = form.row_bytes(x.shape[-1])
    rows = mem.put(np.full((len(x), nb), 0xFF, np.uint8))
    run(fast.round_rows(form, dst=at(rows), x=at(x), n_rows=len(x), n=x.shape[-1], x_nb=x.strides[0]))
    return rows, nb


def product(mem: Memory, name: str, bits: int, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """y [tokens, rows] of x [tokens, n] and w [rows, bytes], whose rows have gaps between them."""
    padded = mem.put(np.pad(w, ((0, 0), (0, 6)), constant_values=0xFF), offset=2)
    rows, nb = rounded(mem, fast.form_of(name, bits), x)
    y = mem.nan(len(x), len(w))
    run(fast.gemv(
        name, y=at(y), w=at(padded), x=at(rows), n_rows=len(w), n=x.shape[1], w_nb=padded.shape[1], n_tok=len(x),
        x_nb=nb, y_nb=y.strides[0], bits=bits,
    ))  # fmt: skip
    return y


def check(name: str, bits: int, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """The error is what rounding x explains, and sums in f32 of terms that the codes' own zero may make larger."""
    values, wide = decode(name, w).astype(np.float64), x.astype(np.float64)
    of_x = of_rounded(wide, 8 * fast.form_of(name, bits).parts) @ (values**2).T
    most = np.abs(values).reshape(len(w), -1, 32).max(-1).repeat(32, -1)  # codes are summed with their offsets
    of_added = ROUNDING * (2 * 3.0) ** 2  # tiles() has 3 in y before
    of_sums = of_products(2 * most + np.abs(values), wide, np.zeros(values.shape))
    error = y - wide @ values.T
    assert (error**2).sum() <= largest_energy(of_x + of_sums + of_added)


def tiles(mem: Memory, name: str, bits: int, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The same by panels of 16 rows, added to what y holds."""
    padded = mem.put(np.pad(w, ((0, 0), (0, 6)), constant_values=0xFF), offset=2)
    form = fast.panel_form_of(name, bits)
    rows, nb = rounded(mem, form, x)
    y = mem.put(np.full((len(x), len(w)), 3.0, np.float32))
    panels = mem.put(np.full((2, fast.panel_bytes(form, len(x))), 0xFF, np.uint8))
    run(fast.gemm(
        name, y=at(y), w=at(padded), x=at(rows), panels=at(panels), n_panels=2, n_rows=len(w), n=x.shape[1],
        n_tok=len(x), w_nb=padded.shape[1], x_nb=nb, y_nb=y.strides[0], bits=bits, res=at(y), res_nb=y.strides[0],
    ))  # fmt: skip
    return y - 3.0


#: What every instruction set is tried on: nibbles, rest blocks, signed codes, offsets, two runs to 32 values.
FEW = ("q4_0", "q8_0", "q4_K", "q6_K", "nvfp4")


CASES = [
    pytest.param(by, name, way, n_tok, bits, id=f"{by.name}-{name}-{way.__name__}-{n_tok}-{bits}")
    for by in HERE
    for name in (fast.CODE_TYPES if by is HERE[0] else FEW)
    for way, n_tok, bits in ((product, 1, 16), (product, 3, 16), (product, 1, 8), (tiles, 5, 16), (tiles, 5, 8))
    if 8 * by.parts(bits) == bits
]


@pytest.mark.parametrize(("by", "name", "way", "n_tok", "bits"), CASES)
def test_products(
    by: dot.Dot, name: str, way: Any, n_tok: int, bits: int, mem: Memory, rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows of several units and of blocks that fill none, more than 16 of them."""
    monkeypatch.setattr(integer, "best_dot", lambda host: by)
    n = {32: 608, 64: 192, 256: 768}[fast.TYPES[name].size]
    w = encode(rng, name, (19, n))
    x = mem.put((rng.standard_normal((n_tok, n + 3)) * np.exp(rng.uniform(-9, 9, (n_tok, 1)))).astype(np.float32))
    check(name, bits, x[:, :n], w, way(mem, name, bits, x[:, :n], w))


@pytest.mark.parametrize(("name", "n"), [("q4_K", 4864), ("q8_0", 4768)])
def test_rows_in_pieces(name: str, n: int, mem: Memory, rng: np.random.Generator) -> None:
    """More activations and weights than the nearest cache holds: pieces, the last one shorter, and a rest."""
    w, x = encode(rng, name, (19, n)), mem.put(rng.standard_normal((7, n)).astype(np.float32))
    assert x.shape[0] * n > 2 * integer.PIECE_BYTES
    for way, bits in itertools.product((product, tiles), (16, 8)):
        check(name, bits, x, w, way(mem, name, bits, x, w))


#: A block with the largest products of a code and its run's number, its scale 1, and what each value then is.
LARGEST_BLOCKS = {
    "q5_K": (b"\0\x3c\0\0" + b"\xff" * 172, 63.0 * 31),
    "q6_K": (b"\0" * 192 + b"\x80" * 16 + b"\0\x3c", 128.0 * 32),
    "iq4_xs": (b"\0\x3c" + b"\0" * 134, 32.0 * 127),
}


@pytest.mark.parametrize("name", LARGEST_BLOCKS)
def test_the_largest_sums_fit(name: str, mem: Memory) -> None:
    block, value = LARGEST_BLOCKS[name]
    w = np.tile(np.frombuffer(block, np.uint8), (17, 2))
    assert (decode(name, w) == value).all()
    y = tiles(mem, name, 16, mem.put(np.full((2, 512), -1.0, np.float32)), w)
    np.testing.assert_allclose(y, -512 * value, rtol=1e-6)


def test_all_instructions_give_the_same_bits(mem: Memory, rng: np.random.Generator) -> None:
    """Sums of integers are exact: of 16 bits only the order of the f32 sums may differ, and it does not."""
    x = mem.put(rng.standard_normal((1, 512)).astype(np.float32))
    for name in ("q4_K", "q4_1", "q6_K"):
        w, found = encode(rng, name, (9, 512)), []
        for way in HERE:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(integer, "best_dot", lambda host, way=way: way)
                found.append(product(mem, name, 16, x, w))
        assert all(np.array_equal(y, found[0]) for y in found[1:])


@pytest.mark.parametrize("bits", [16, 8])
def test_what_is_rounded(bits: int, mem: Memory) -> None:
    """Largest values, zeros, groups too small to count, and rows that are no numbers."""
    values = np.zeros((6, 64), np.float32)
    values[0, :32], values[0, 32:] = 1e30, -1e30
    values[1, ::2], values[1, 1::2] = 3.0, -3.0
    values[3] = 1e-38
    values[4, 5], values[5, 40] = np.inf, np.nan
    x, w = mem.put(values), encode(np.random.default_rng(1), "q8_0", (3, 64))
    y = product(mem, "q8_0", bits, x, w)
    wide, codes = values[:3].astype(np.float64), decode("q8_0", w).astype(np.float64)
    # all are the largest of their group, so that only the sums' own rounding is lost
    assert (np.abs(y[:3] - wide @ codes.T) <= 1e-6 * (np.abs(wide) @ np.abs(codes).T)).all()
    assert not y[3].any()
    assert not np.isfinite(y[4:]).any()


def test_types_with_one_layout_share_what_was_rounded() -> None:
    def key(name: str, bits: int = 16) -> str:
        return fast.form_of(name, bits).key

    assert key("q4_K") == key("q5_K") and key("q4_0") == key("q8_0") != key("q6_K")
    assert len({key("q4_K"), key("q6_K"), key("q4_0"), key("nvfp4"), key("iq2_xs")}) == 5


# code for machines that are not here

TARGETS = {
    "vnni512-amx": ("x86_64-unknown-linux-gnu", "sapphirerapids", ("avx512vnni",), ("vpdpbusd", "zmm")),
    "vnni512": ("x86_64-unknown-linux-gnu", "x86-64-v4", ("avx512vnni",), ("vpdpbusd", "zmm")),
    "vnni256": ("x86_64-unknown-linux-gnu", "x86-64-v3", ("avxvnni",), ("vpdpbusd", "ymm")),
    "madd512": ("x86_64-unknown-linux-gnu", "x86-64-v4", (), ("vpmaddwd", "zmm")),
    "madd256": ("x86_64-unknown-linux-gnu", "x86-64-v3", (), ("vpmaddwd", "ymm")),
    "sdot": ("aarch64-unknown-linux-gnu", "neoverse-n1", ("dotprod",), ("sdot",)),
    "portable": ("aarch64-unknown-linux-gnu", "generic", (), ("mul",)),
}
OF_CPU = {
    "x86-64-v3": ("ssse3", "avx2", "f16c", "fma"),
    "x86-64-v4": ("ssse3", "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512vl"),
}
OF_CPU["sapphirerapids"] = (*OF_CPU["x86-64-v4"], "amx-tile", "amx-int8", "amx-bf16")


def elsewhere(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are made for such a machine from now on."""
    triple, cpu, extra, _ = TARGETS[way]
    there = Host(triple, cpu, dict.fromkeys((*OF_CPU.get(cpu, ()), *extra), True))
    assert dot.best_dot(there).name == way.partition("-")[0]
    for module in (jit, integer):
        monkeypatch.setattr(module, "host", lambda: there)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def assembly(kernel: jit.Kernel) -> str:
    there = jit.host()
    module = llvm.parse_assembly(kernel.ir())
    module.verify()
    features = ",".join(f"+{name}" for name in there.features)
    machine = llvm.Target.from_triple(there.triple).create_target_machine(cpu=there.cpu, features=features, opt=3)
    return str(machine.emit_assembly(module))


@pytest.mark.parametrize("name", ["q4_K", "q8_0", "iq4_nl"])
@pytest.mark.parametrize("way", TARGETS)
def test_code_for_other_machines(way: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of few tokens and of many, also of experts, are sums by the machine's own instruction, those of panels
    by the one for words; rounding is made too."""
    elsewhere(way, monkeypatch)
    few, many = fast.form_of(name, 16), fast.panel_form_of(name, 16)
    for form in {few.key: few, many.key: many}.values():
        assembly(integer.rounding_kernel(form.key, form))
    of_words = [word.replace("vpdpbusd", "vpdpwssd") for word in TARGETS[way][3]]
    for kernel, words in (
        (matvec.gemv_kernel(matvec.Rows(name, 16), 1), TARGETS[way][3]),
        (gemm_kernel(name, many), of_words),
        *([(experts.gemm_kernel(name, many), of_words)] if name == "q4_K" else []),
    ):
        lines = assembly(kernel).splitlines()
        assert any(all(word in line for word in words) for line in lines)


#: What isn't a product, one of each kind.
OTHERS = {
    "norms": lambda: [norm_rope.rms_norm_kernel(False, True), norm_rope.layer_norm_kernel(True, True)],
    "rope": lambda: [norm_rope.rope_kernel(64, 64, True), norm_rope.rope_kernel(48, 32, False)],
    "maps": lambda: [math_ops.map_kernel(op) for op in ("add", "silu_glu", "gelu_glu", "softcap", "clamp", "copy")],
    "rows": lambda: [reduce.sum_kernel(), reduce.soft_max_kernel(), reduce.order_kernel(True)],
    "argmax": lambda: [reduce.largest_kernel(), reduce.chosen_kernel()],
    "cache": lambda: [rows_kernels.set_rows_kernel(kind, "i64") for kind in ("f16", "bf16", "q8_0", "q4_0")],
    "experts": lambda: [experts.order_kernel()],
    "attention": lambda: attention.attention_kernels(Shape("f16", "f16", 64, 64, 4, True, True, True)),
    "attention of q8_0": lambda: attention.attention_kernels(Shape("q8_0", "q8_0", 64, 64, 1, True, False, False)),
    "f32 rows": lambda: [matvec.gemv_kernel(matvec.Rows(kind, 32), 2) for kind in ("f32", "f16", "bf16", "q6_K")],
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("way", ["madd256", "sdot"])
def test_nothing_else_is_called_on_other_machines(way: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is whole by itself: where a machine lacks an instruction, LLVM may call a library's function for each value
    (exp, a conversion of f16), which nobody would find at run time, or which would take a hundred times as long."""
    elsewhere(way, monkeypatch)
    for kernel in OTHERS[what]():
        called = re.findall(r"^\s+(?:callq?|bl)\s+(\S+)", assembly(kernel), re.MULTILINE)
        assert set(called) <= {"memset", "memcpy", "memset@PLT", "memcpy@PLT"}, called


# what is declared


def test_what_is_declared() -> None:
    """8 bits are; 16 keep more than the f16 that the judge allows anyway."""

    def said(bits: int, kind: str = "q4_K", tokens: int = 3) -> str | None:
        node = ops.mul_mat(new_input(kind, 256, 4, name="w"), new_input("f32", 256, tokens, name="x"))
        return get_backend("cpu", exact=False, activation_bits=bits).rounds_activations(node)

    eight = "int8" if fast.amx_tiles() is not None or fast.form_of("q4_K", 8).parts == 1 else None
    assert said(8) == said(8, "iq2_xs") == said(8, tokens=40) == eight
    assert said(16) is said(32) is said(8, "f16") is None
    assert get_backend("cpu", activation_bits=8).rounds_activations(ops.sqr(new_input("f32", 4, name="x"))) is None
    with pytest.raises(BackendError, match="8 or 16, or 32"):
        get_backend("cpu", exact=False, activation_bits=4)


def product_case(kind: str, tokens: int) -> Case:
    def make(inputs: Inputs) -> Tensor:
        return ops.mul_mat(inputs("w", kind, (512, 33)), inputs("x", "f32", (512, tokens), None))

    return Case("MUL_MAT", {"type": kind, "tokens": tokens}, make)


@pytest.mark.parametrize("name", ["cpu-fast", "cpu-int8"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_the_judge_holds_what_is_declared(name: str, tokens: int) -> None:
    for kind in FEW[:-1]:
        found = run_case(product_case(kind, tokens), make_backend(name))
        assert found.status == "pass", found.message


@pytest.mark.skipif(fast.form_of("q8_0", 8).parts != 1, reason="this machine's instructions take 16 bits")
def test_a_rounding_that_is_not_declared_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_case(product_case("q8_0", 1), make_backend("cpu-int8")).rounded == "int8"
    monkeypatch.setattr("graphrt.backends.cpu.backend.CpuBackend.rounds_activations", lambda self, node: None)
    assert run_case(product_case("q8_0", 1), make_backend("cpu-int8")).status == "fail"


def test_the_flag_and_what_it_excludes() -> None:
    assert rounding_backend("auto", False).activation_bits == 8
    for name, exact in (("triton", False), ("cpu", True)):
        with pytest.raises(BackendError, match="leave one out"):
            rounding_backend(name, exact)
