"""Every op against an independent float64 computation, on every conformance case."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from support.judging import MOVES, Judged
from support.reference64 import REFERENCE64
from support.rounding import VARIANCE

import graphrt
from graphrt import ops
from graphrt.backends.cpu.memory import torch_type
from graphrt.backends.cpu.reference import REFERENCES, evaluate
from graphrt.dtypes import DType
from graphrt.op import op_spec, registered_ops
from graphrt.testing import Case, all_cases, nmse

#: The conformance tool runs the huge ones where there is memory for them.
CASES = {str(case): case for case in all_cases() if not case.needs_bytes}
#: NMSE of the CPU's functions in float64 against reference64; angles of thousands of radians cost ROPE some digits.
FLOAT64_CEILINGS = {"ROPE": 1e-20}


@cache
def judged(name: str) -> Judged:
    return Judged(CASES[name])


@pytest.mark.parametrize("name", CASES, ids=list(CASES))
def test_case(name: str) -> None:
    case = judged(name)
    exe = case.run("cpu")
    case.check(exe)
    case.check_sources_unchanged(exe)


def _as_torch(raw: np.ndarray | None, dt: DType) -> torch.Tensor | None:
    return None if raw is None else torch.from_numpy(raw.copy()).view(torch_type(dt))


@pytest.mark.parametrize("name", CASES, ids=list(CASES))
def test_case_in_float64(name: str) -> None:
    case = judged(name)
    node = case.node
    sources = [_as_torch(raw, s.dtype) if s is not None else None for s, raw in zip(node.src, case.sources)]
    actual = evaluate(node, sources, torch.float64).numpy()
    spec = op_spec(node.op)
    if spec.writes is not None:
        written = sources[spec.names.index(spec.writes)].contiguous().view(torch.uint8).numpy()
        np.testing.assert_array_equal(written, case.expected_bytes.view(np.uint8))
    elif node.dtype.kind == "int":
        actual = np.sort(actual, axis=-1) if node.op == "TOP_K" else actual
        np.testing.assert_array_equal(actual, case.expected)
    else:
        assert nmse(actual, case.expected) <= FLOAT64_CEILINGS.get(node.op, 1e-24)


def test_every_op_is_covered() -> None:
    for name, spec in registered_ops().items():
        assert spec.is_view or name in REFERENCES, f"{name} has no function in backends/cpu"
        assert spec.is_view or name in REFERENCE64, f"{name} has no function in reference64"
        first = next(all_cases(name), None)
        assert first is not None, f"{name} has no conformance case"
        exact = spec.is_view or spec.writes is not None or name in MOVES
        if not exact and first.build().result.dtype.kind == "float":
            assert name in VARIANCE, f"{name} has no error bound in rounding.py"


def test_a_case_is_named_once_and_uses_its_op() -> None:
    assert len({str(c) for c in all_cases()}) == len(list(all_cases()))
    for case in CASES.values():
        node = case.build().result
        assert case.op in (node.op, *(s.op for s in node.sources())), str(case)


def test_inputs_depend_on_case_seed_and_name_alone() -> None:
    case: Case = next(all_cases("ADD"))
    first, again, other = case.build(0), case.build(0), case.build(1)
    for a, b, c in zip(first.values.values(), again.values.values(), other.values.values()):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)


def test_integer_inputs_are_not_all_equal() -> None:
    for case in CASES.values():
        for t, values in case.build().values.items():
            if t.dtype.kind == "int" and values.size > 2 and (values >= 0).any():  # else a table without pages
                assert np.ptp(values) != 0, f"{case}: input {t.name} holds one value only"


# -- attention: what the contract promises


class Attention:
    """FLASH_ATTN_EXT and its LSE on given arrays; head size 4, n_kv 5, two heads over one of k and v."""

    def __init__(self, mask: np.ndarray | None, sinks: np.ndarray | None = None, softcap: float = 0.0) -> None:
        rng = np.random.default_rng(7)
        self.mask, self.sinks = mask, sinks
        self.arrays = {"q": rng.normal(size=(2, 3, 4)), "k": rng.normal(size=(5, 4)), "v": rng.normal(size=(5, 4))}
        self.softcap = softcap

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        q = graphrt.new_input("f32", 4, 3, 2, name="q")
        k, v = (graphrt.new_input("f32", 4, 5, name=n) for n in "kv")
        mask = graphrt.new_input("f16", 5, 3, name="mask") if self.mask is not None else None
        sinks = graphrt.new_input("f32", 2, name="sinks") if self.sinks is not None else None
        out = ops.flash_attn_ext(q, k, v, mask, 0.5, sinks=sinks, softcap=self.softcap)
        lse = ops.flash_attn_lse(q, k, mask, 0.5, sinks=sinks, softcap=self.softcap)
        exe = graphrt.prepare(graphrt.Graph(out, lse), "cpu")
        for name, values in [*self.arrays.items(), ("mask", self.mask), ("sinks", self.sinks)]:
            if values is not None:
                exe.write(name, values)
        exe.run()
        return exe.read(out)[0].transpose(1, 0, 2), exe.read(lse)[0, 0].T


def _hiding(*hidden: tuple[int, int]) -> np.ndarray:
    """A mask of zeros [n_q 3, n_kv 5] with -inf at the given (query, key); key -1 hides all of them."""
    mask = np.zeros((3, 5))
    for i, j in hidden:
        mask[i, j if j >= 0 else slice(None)] = -np.inf
    return mask


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("sinks", [None, np.array([0.5, -3.0]), np.array([-np.inf, 0.0])], ids=["none", "some", "-inf"])
def test_a_fully_masked_row_is_zero(sinks: np.ndarray | None, softcap: float) -> None:
    out, lse = Attention(_hiding((1, -1)), sinks, softcap).run()
    np.testing.assert_array_equal(out[:, 1], 0.0)
    assert np.isfinite(out).all() and (out[:, 0] != 0).all()
    np.testing.assert_array_equal(lse[:, 1], sinks if sinks is not None else [-np.inf, -np.inf])


def test_everything_masked_is_zero_whatever_the_cache_holds() -> None:
    attention = Attention(_hiding((0, -1), (1, -1), (2, -1)))
    attention.arrays["k"][:] = attention.arrays["v"][:] = np.nan
    out, lse = attention.run()
    np.testing.assert_array_equal(out, 0.0)
    np.testing.assert_array_equal(lse, -np.inf)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("cell", [1, 4])
def test_a_bad_value_in_a_masked_cell_is_harmless(where: str, bad: float, cell: int) -> None:
    attention = Attention(_hiding((0, cell), (1, cell), (2, cell)))
    clean = attention.run()
    attention.arrays[where][cell] = bad
    for a, b in zip(attention.run(), clean):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("where", ["k", "v"])
def test_nan_in_a_seen_cell_comes_through(where: str, masked: bool) -> None:
    attention = Attention(_hiding((0, 2), (1, 2)) if masked else None)
    attention.arrays[where][2, 1] = np.nan
    out, lse = attention.run()
    sees = [False, False, True] if masked else [True, True, True]
    columns = [1] if where == "v" else [0, 1, 2, 3]
    for i, seen in enumerate(sees):
        assert np.isnan(out[:, i][:, columns]).all() == seen and np.isnan(out[:, i]).any() == seen
        assert np.isnan(lse[:, i]).all() == (seen and where == "k")


def test_a_sink_takes_its_share() -> None:
    """q.k = 0 and v = 1 leave n / (n + e^sink): 0.3013 for five keys and a sink at 2.451."""
    attention = Attention(None, np.array([2.451, -np.inf]))
    attention.arrays["q"][:] = 0.0
    attention.arrays["v"][:] = 1.0
    out, lse = attention.run()
    np.testing.assert_allclose(out[0], 5 / (5 + math.exp(2.451)), rtol=1e-6)
    np.testing.assert_allclose(out[1], 1.0, rtol=1e-6)
    np.testing.assert_allclose(lse[:, 0], [math.log(5 + math.exp(2.451)), math.log(5)], rtol=1e-6)


def test_the_mask_comes_after_scale_and_softcap() -> None:
    """A bias of -3 under a softcap of 1 still takes e^-3: capped together it could not."""
    attention = Attention(np.array([[0.0, -3.0, 0.0, 0.0, 0.0]] * 3), softcap=1.0)
    attention.arrays["q"][:] = 0.0
    attention.arrays["v"] = np.eye(5, 4)
    out, _ = attention.run()
    np.testing.assert_allclose(out[0, 0], np.array([1, math.exp(-3), 1, 1]) / (4 + math.exp(-3)), rtol=1e-6)


def test_a_v_that_is_a_view_of_k() -> None:
    """MLA: v's head is the start of k's, in k's memory."""
    rng = np.random.default_rng(3)
    q, k = graphrt.new_input("f32", 6, 2, 3, name="q"), graphrt.new_input("f16", 6, 4, name="k")
    apart = graphrt.new_input("f16", 4, 4, name="v")
    shared = ops.flash_attn_ext(q, k, ops.view(k, (4, 4), k.nb[1:2]), None, 1.0)
    separate = ops.flash_attn_ext(q, k, apart, None, 1.0)
    exe = graphrt.prepare(graphrt.Graph(shared, separate), "cpu")
    cache = rng.normal(size=(4, 6))
    for name, values in {"q": rng.normal(size=(3, 2, 6)), "k": cache, "v": cache[:, :4]}.items():
        exe.write(name, values)
    exe.run()
    np.testing.assert_array_equal(exe.read(shared), exe.read(separate))


@pytest.mark.parametrize("sink", [None, 1.0])
def test_soft_max_of_a_fully_masked_row_is_zero(sink: float | None) -> None:
    a, mask = graphrt.new_input("f32", 4, 2, name="a"), graphrt.new_input("f32", 4, 2, name="mask")
    sinks = graphrt.new_input("f32", 1, name="sinks") if sink is not None else None
    out = ops.soft_max(a, mask, sinks)
    exe = graphrt.prepare(graphrt.Graph(out), "cpu")
    exe.write("a", np.ones((2, 4)))
    exe.write("mask", [[-np.inf] * 4, [0.0, 0.0, -np.inf, 0.0]])
    if sink is not None:
        exe.write("sinks", [sink])
    exe.run()
    share = 1 / 3 if sink is None else 1 / 4
    np.testing.assert_allclose(exe.read(out)[0, 0], [[0] * 4, [share, share, 0, share]], rtol=1e-6)


def test_soft_max_passes_nan_on() -> None:
    a = graphrt.new_input("f32", 3, 2, name="a")
    out = ops.soft_max(a)
    exe = graphrt.prepare(graphrt.Graph(out), "cpu")
    exe.write("a", [[0.0, np.nan, 0.0], [0.0, 0.0, 0.0]])
    exe.run()
    assert np.isnan(exe.read(out)[0, 0, 0]).all() and np.isfinite(exe.read(out)[0, 0, 1]).all()


def test_argmax_takes_the_first_of_equal_ones() -> None:
    a = graphrt.new_input("f32", 5000, 2, name="a")
    out = ops.argmax(a)
    exe = graphrt.prepare(graphrt.Graph(out), "cpu")
    values = np.zeros((2, 5000))
    values[0, [70, 4000]] = 1.0
    exe.write("a", values)
    exe.run()
    assert exe.read(out).reshape(-1).tolist() == [70, 0]
