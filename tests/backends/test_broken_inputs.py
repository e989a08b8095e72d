"""NaN and infinities among a block's inputs come through every fused form, and one GLU is as good as the other."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from support.gluon_emulator import Gl, Memory, Value, rebuilt

from graphrt import Graph, Tensor, get_backend, new_input, ops, prepare
from graphrt.backend import Group, Region
from graphrt.backends.cpu import evaluate, fast
from graphrt.backends.triton import device
from graphrt.dtypes import dtype
from graphrt.judge import judge_broken
from graphrt.ops.unary import GLU_KINDS
from graphrt.testing import dequantize, quantize
from graphrt.tools import cli
from graphrt.tools.conformance.cases.fused import FusedCase, fused_cases, run_fused

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton.kernels.common.activation import glu
from graphrt.backends.triton.kernels.common.gluon_activation import glu as gluon_glu
from graphrt.backends.triton.kernels.products import route
from graphrt.backends.triton.kernels.products.activations import MAX_TWO_PARTS, Q8Rows, Rows, quantize_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CASES = list(fused_cases())
NAMED = {str(c): c for c in CASES}
#: `graphrt test --set broken` runs all.
SOME = [c for c in CASES if zlib.crc32(str(c).encode()) % 29 == 0]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_on_the_cpu(case: FusedCase, exact: bool) -> None:
    if not exact and fast.available():
        pytest.skip(fast.available() or "")
    outcome = run_fused(case, get_backend("cpu", exact=exact))
    assert outcome.status == "pass", outcome.message


def _case(kind: str, act: str, tokens: int, broken: str, *flags: str) -> FusedCase:
    """flags: of experts, biased, down."""
    fields = {"kind": kind, "act": act, "tokens": tokens, "broken": broken}
    fields |= {flag: flag in flags for flag in ("experts", "biased", "down")}
    return NAMED[f"GLU({','.join(f'{k}={v}'.replace(' ', '') for k, v in fields.items())})"]


#: A case of each kernel that has a GLU, and the group that it is of. With min.f32 and max.f32 each of them fails.
DENSE = {
    "gemv": (_case("q8_0", "reglu", 1, "NaN in gate"), "gate_up_glu"),
    "gemv, plain": (_case("f16", "reglu", 1, "NaN in gate"), "gate_up_glu"),
    "tiles": (_case("q8_0", "reglu", 32, "NaN in gate"), "gate_up_glu"),
    "tiles, plain": (_case("f16", "reglu", 32, "NaN in gate"), "gate_up_glu"),
    "slices": (_case("f16", "reglu", 300, "NaN in gate"), "gate_up_glu"),
    "rounded to f16": (_case("q8_0", "reglu", 32, "NaN in gate", "down"), "gate_up_glu, private"),
    "few, rounded": (_case("q8_0", "reglu", 1, "NaN in gate", "down"), "gate_up_glu, private"),
    "an infinity rounded to 8 bits": (_case("q8_0", "reglu", 1, "inf in x"), "gate_up_glu"),
}
EXPERTS = {
    "gemv": (_case("q8_0", "swiglu_oai", 1, "NaN in gate's bias", "experts", "biased"), False),
    "gemv, plain": (_case("f16", "reglu", 1, "NaN in gate", "experts"), False),
    "gemv, infinite bias": (_case("f16", "swiglu_oai", 1, "inf in gate's bias", "experts", "biased"), False),
    "tiles": (_case("f16", "swiglu_oai", 4, "NaN in both biases", "experts", "biased", "down"), True),
    "tiles, quantized": (_case("q8_0", "reglu", 4, "NaN in gate's bias", "experts", "biased"), True),
}


def _passes(case: FusedCase, group: str) -> None:
    backend = get_backend("triton", exact=False)
    seen: list[str] = []
    fuse = backend.fuse

    def watched(region: Region) -> list[Group]:
        groups = fuse(region)
        seen.extend(str(g.kernel) + ", private" * bool(g.private) for g in groups)
        return groups

    backend.fuse = watched  # type: ignore[method-assign]
    outcome = run_fused(case, backend)
    assert outcome.status == "pass", outcome.message
    assert group in seen, seen


@pytest.mark.parametrize("form", DENSE)
def test_dense(form: str) -> None:
    _passes(*DENSE[form])


@pytest.mark.parametrize("form", EXPERTS)
def test_experts(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, many = EXPERTS[form]
    if many:
        monkeypatch.setattr(route, "MAX_PAIRS", 0)
    _passes(case, "expert_gate_up")


def test_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHRT_FUSE", "0")
    for act, broken in (("reglu", "NaN in gate"), ("swiglu_oai", "NaN in both")):
        case = _case("f16", act, 4, broken)
        assert run_fused(case, get_backend("triton", exact=False)).status == "pass"


def test_of_all_groups_with_a_glu() -> None:
    """A group that these tests don't know must be added to them."""
    pytest.importorskip("triton")
    from graphrt.backends.triton.fuse import FUSIONS

    known = {"gate_up_glu", "expert_gate_up", "glu_back"}  # glu_back rounds nothing and holds nothing back
    assert {f.name for f in FUSIONS if "glu" in f.name or "gate" in f.name} <= known


def test_the_set_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["test", "--set", "broken", "--list"]) == 0
    assert capsys.readouterr().out.count("GLU(") == len(CASES) > 1000
    assert cli.main(["test", "perf", "--set", "broken"]) == 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("k", [64, MAX_TWO_PARTS + 32])
def test_a_group_of_8_bits_keeps_what_is_no_number(value: float, k: int) -> None:
    """Its scale is NaN, not infinite: a product would be an infinity of any sign, which a GLU may make 0 of."""
    where = device.target().device
    x = torch.ones(2, k)
    x[1, 40] = value
    found = Q8Rows.empty(2, k, where)
    quantize_rows(device.target(), Rows(x.to(where).view(-1), 2, k, k), found)()
    expected = np.zeros((2, k // 32), bool)
    expected[1, 1] = True
    np.testing.assert_array_equal(found.d.isnan().cpu().numpy(), expected)
    np.testing.assert_array_equal(found.s.isnan().cpu().numpy(), expected.repeat(2, 1))


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_a_written_block_keeps_nan(kind: str) -> None:
    """SET_ROWS: a row of a cache with a NaN among numbers, by every backend; other blocks are what they were."""
    rows, ids = new_input("f32", 64, 2, name="rows"), new_input("i64", 2, name="ids")
    cache = new_input(kind, 64, 4, name="cache")
    values = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    values[1, 40] = np.nan
    zeros = quantize(np.zeros((4, 64)), dtype(kind))
    found = []
    for backend in ("cpu", get_backend("cpu", exact=False), get_backend("triton")):
        out = ops.set_rows(rows, ids, cache)
        exe = prepare(Graph(out), backend)
        for t, given in ((rows, values), (ids, np.array([2, 0])), (cache, zeros)):
            exe.write(t, given)
        exe.run()
        found.append(dequantize(exe.read(out), dtype(kind)).reshape(4, 64))
    for result in found:
        assert np.isnan(result[0, 32:]).all() and np.isfinite(result[0, :32]).all() and np.isfinite(result[1:]).all()
        np.testing.assert_allclose(result, found[0], atol=0.02)


# -- one GLU in each dialect

VALUES = [
    np.nan,
    np.inf,
    -np.inf,
    0.0,
    -0.0,
    1e-30,
    1.0,
    -1.0,
    0.5,
    -3.0,
    7.0,
    7.5,
    -20.0,
    30.0,
    1e4,
    -1e4,
    1e30,
    -1e30,
]
GATE, UP = (a.reshape(-1) for a in np.meshgrid(np.array(VALUES, np.float32), np.array(VALUES, np.float32)))
ALPHA, LIMIT = 1.702, 7.0


@triton.jit
def _glus(p_gate, p_up, p_out, alpha, limit, KIND: tl.constexpr, QUICK: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    m = i < 324
    gate, up = tl.load(p_gate + i, mask=m, other=0.0), tl.load(p_up + i, mask=m, other=0.0)
    tl.store(p_out + i, glu(gate, up, alpha, limit, KIND, QUICK), mask=m)


def _triton(kind: str, quick: bool) -> np.ndarray:
    where = device.target().device
    gate, up = (torch.from_numpy(a).to(where) for a in (GATE, UP))
    out = torch.zeros_like(gate)
    _glus[(1,)](gate, up, out, ALPHA, LIMIT, kind, quick, 512)
    return out.cpu().numpy()


def _gluon(kind: str) -> np.ndarray:
    function = rebuilt(gluon_glu, {"gl": Gl(Memory({}), 4)})
    return function(Value(GATE), Value(UP), ALPHA, LIMIT, kind).data


def _reference(kind: str, exactly: type) -> np.ndarray:
    gate, up = (torch.from_numpy(a.astype(exactly)) for a in (GATE, UP))
    node = ops.glu(*(new_input("f32", len(GATE), name=name) for name in ("gate", "up")), kind, alpha=ALPHA, limit=LIMIT)
    return evaluate(node, [gate, up], torch.float64 if exactly is np.float64 else torch.float32).numpy().reshape(-1)


@pytest.mark.parametrize("kind", GLU_KINDS)
def test_the_dialects_agree(kind: str) -> None:
    """Gluon's is plain Triton's to the bit; both have NaN and infinities where the CPU's f32 has them."""
    exact, quick, gluon = _triton(kind, False), _triton(kind, True), _gluon(kind)
    if device.interpreting():
        np.testing.assert_array_equal(quick.view(np.int32), gluon.view(np.int32))
    expected = _reference(kind, np.float32)
    for found in (exact, quick):
        special = ~np.isfinite(expected)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        np.testing.assert_array_equal(found[special], expected[special])
        np.testing.assert_allclose(found[~special], expected[~special], rtol=2e-5, atol=1e-6)


@triton.jit
def _minima(p_a, p_b, p_out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(p_a + i), tl.load(p_b + i)
    ALL: tl.constexpr = tl.PropagateNan.ALL
    tl.store(p_out + i, tl.minimum(a, b))
    tl.store(p_out + N + i, tl.maximum(a, b))
    tl.store(p_out + 2 * N + i, tl.minimum(a, b, propagate_nan=ALL))
    tl.store(p_out + 3 * N + i, tl.maximum(a, b, propagate_nan=ALL))


def test_a_minimum_loses_nan_as_on_a_gpu() -> None:
    """In the interpreter too, and in the emulator of Gluon: else no test without a GPU could see it."""
    nan, where = float("nan"), device.target().device
    a, b = torch.tensor([nan, 1.0, nan, 2.0]), torch.tensor([3.0, nan, nan, 1.0])
    out = torch.zeros(4, 4).to(where)
    _minima[(1,)](a.to(where), b.to(where), out, 4)
    expected = [[3.0, 1.0, nan, 1.0], [3.0, 1.0, nan, 2.0], [nan, nan, nan, 1.0], [nan, nan, nan, 2.0]]
    np.testing.assert_array_equal(out.cpu().numpy(), np.array(expected, np.float32))
    gl = Gl(Memory({}), 4)
    for how, row in ((gl.minimum, 0), (gl.maximum, 1)):
        for nans, more in ((tl.PropagateNan.NONE, 0), (tl.PropagateNan.ALL, 2)):
            found = how(Value(a.numpy()), Value(b.numpy()), propagate_nan=nans).data
            np.testing.assert_array_equal(found, np.array(expected[row + more], np.float32))


# -- the judge


def _spoil(where: int, value: float) -> Callable[[np.ndarray], Any]:
    return lambda a: a.__setitem__(where, value)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_spoil(0, 1.0), "not the NaN or infinity"), (_spoil(0, np.inf), "not the NaN or infinity"),
        (_spoil(1, 1.0), "not the NaN or infinity"), (_spoil(1, np.nan), ""), (_spoil(1, -np.inf), ""),
        (_spoil(2, np.nan), ""), (_spoil(2, 5.0), "NMSE"), (_spoil(2, 1.001), ""),
        (_spoil(3, np.nan), "NaN or infinite where it must be a number"),
        (_spoil(3, np.inf), "NaN or infinite where it must be a number"), (_spoil(3, -2.2), "NMSE"),
    ],
)  # fmt: skip
def test_the_judge_of_broken_inputs(spoil: Callable[[np.ndarray], Any], said: str) -> None:
    """Element 0 comes of a NaN, 1 and 2 of infinities, of which 2 is a number all the same, 3 of numbers."""
    node: Tensor = ops.sqr(new_input("f32", 4, name="x"))
    expected = np.array([np.nan, np.inf, 1.0, -2.0]).reshape(node.shape)
    from_nan, from_infinity = (np.array(m, bool).reshape(node.shape) for m in ([1, 0, 0, 0], [0, 1, 1, 0]))
    actual = expected.copy()
    assert judge_broken(node, actual, expected, from_nan, from_infinity).ok
    spoil(actual.reshape(-1))
    verdict = judge_broken(node, actual, expected, from_nan, from_infinity)
    assert said in verdict.message and verdict.ok == (said == "")
