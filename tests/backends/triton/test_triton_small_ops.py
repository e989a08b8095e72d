"""Elementwise ops, norms and SOFT_MAX of the triton backend, without a GPU in Triton's interpreter."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import graphrt
from graphrt import ops
from graphrt.backend import Backend, Group, Place, Region, Usage
from graphrt.backends.triton import device
from graphrt.op import op_spec
from graphrt.ops.unary import GLU_KINDS, UNARY_KINDS
from graphrt.ops.view import permute, reshape, view
from graphrt.tensor import Tensor, new_input, new_tensor
from graphrt.testing import Case, all_cases
from graphrt.tools.conformance.run.step import run_case

if device.unusable() is not None:
    pytest.skip(f"the triton backend can't be used here: {device.unusable()}", allow_module_level=True)

from graphrt.backends.triton.backend import TritonBackend
from graphrt.backends.triton.context import Context
from graphrt.backends.triton.kernels import elementwise, norm, soft_max
from graphrt.backends.triton.kernels.elementwise import Layout, Operand
from graphrt.backends.triton.kernels.norm_fusions import ScaledNorm
from graphrt.backends.triton.launch import Launch
from graphrt.backends.triton.memory import allocate
from graphrt.program import Program

LOWERINGS = {**elementwise.LOWERINGS, **norm.LOWERINGS, **soft_max.LOWERINGS}
#: Of the conformance cases every n-th is run here; on a GPU the conformance tool runs all.
EVERY = 5
#: The interpreter computes with numpy, which warns of what a GPU does in silence.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
RNG = np.random.default_rng(5)


class SmallOps(TritonBackend):
    """A backend of these ops alone. fused: a whole graph is a norm and what is to be one step with it."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.launches = 0

    def supports(self, node: Tensor) -> str | None:
        return None if node.op in LOWERINGS or op_spec(node.op).is_view else "it is no small op"

    def fuse(self, region: Region) -> list[Group]:
        if self.fused:
            return [Group(list(region.nodes), results=[region.nodes[-1]])]
        return [Group([n]) for n in region.nodes]

    def compile(self, groups: Sequence[Group], place: Callable[[Tensor], Place]) -> Program:
        ctx = Context(place, self.target, exact=False)
        steps = []
        for group in groups:
            nodes = [n for n in group.nodes if not op_spec(n.op).is_view]
            if nodes:
                apart = LOWERINGS[nodes[0].op]
                steps += norm.lower_scaled_norm(ScaledNorm(*nodes), ctx) if self.fused else apart(nodes, ctx)
        self.launches = sum(isinstance(step, Launch) for step in steps)

        def run() -> None:
            for step in steps:
                step()

        return Program(groups, run)


def _some() -> list[Case]:
    found = [c for op in LOWERINGS for c in all_cases(op, "quick")]
    found = [c for c in found if "50257" not in str(c)]
    return [c for c in found if zlib.crc32(str(c).encode()) % EVERY == 0 or "special" in str(c)]


@pytest.fixture(scope="module")
def backend() -> SmallOps:
    return SmallOps()


@pytest.mark.parametrize("case", _some(), ids=str)
def test_a_case(case: Case, backend: Backend) -> None:
    outcome = run_case(case, backend)
    assert outcome.status == "pass", outcome.message


class Inputs:
    """Inputs of random values, by name."""

    def __init__(self) -> None:
        self.values: dict[str, np.ndarray] = {}

    def __call__(self, name: str, *ne: int, kind: str = "f32") -> Tensor:
        values = RNG.uniform(0.5, 2.0, ne[::-1]) * RNG.choice([-1.0, 1.0], ne[::-1])
        self.values[name] = values.astype(np.float16 if kind == "f16" else np.float32)
        return new_input(kind, *ne, name=name)

    def run(self, out: Tensor, backend: Backend | str) -> np.ndarray:
        exe = graphrt.prepare(graphrt.Graph(out), backend)
        for leaf in exe.graph.inputs:
            exe.write(leaf, self.values[leaf.name].reshape(leaf.shape))
        exe.run()
        return exe.read(out)

    def check(self, out: Tensor, backend: Backend) -> None:
        actual, expected = self.run(out, backend), self.run(out, "cpu")
        rtol = {"f32": 2e-6, "f16": 1e-3}[out.dtype.name]
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol)


def _turned(x: Tensor) -> Tensor:
    return permute(x, 2, 0, 1, 3)


#: Of inputs made by `new`: nodes whose sources are read along other dimensions than they lie.
STRIDED: dict[str, Callable[[Inputs], Tensor]] = {
    "a turned": lambda new: ops.add(_turned(new("a", 5, 6, 7, 2)), new("b", 6, 7, 5, 2)),
    "b turned": lambda new: ops.div(new("a", 6, 7, 5, 2), _turned(new("b", 5, 6, 7, 2))),
    "b turned and repeated": lambda new: ops.mul(new("a", 12, 7, 10, 4), _turned(new("b", 5, 6, 7, 2))),
    "a scalar a row": lambda new: ops.sub(new("a", 40, 3, 2), new("b", 1, 3, 2)),
    "one scalar": lambda new: ops.sub(new("a", 40, 3, 2), new("b", 1)),
    "a column": lambda new: ops.add(new("a", 1, 33, 2), new("b", 1, 33)),
    "types": lambda new: ops.add(_turned(new("a", 5, 6, 7, kind="f16")), new("b", 6, 1, 5)),
    "from the middle": lambda new: ops.sqr(view(new("a", 31, 9), (8, 9), [31 * 4], offs=20)),
    "scale": lambda new: ops.scale(_turned(new("a", 40, 33, 2)), 3.0, 0.5),
    "glu": lambda new: ops.glu(_turned(new("a", 5, 6, 7, 2)), None, "swiglu", swapped=True),
    "glu of two": lambda new: ops.glu(_turned(new("a", 5, 6, 7, 2)), new("b", 6, 7, 5, 2), "geglu"),
    "norm": lambda new: ops.norm(_turned(new("a", 2, 37, 3, 2)), 1e-5),
    "rms_norm": lambda new: ops.rms_norm(_turned(new("a", 5, 6, 7, 2)), 1e-5),
    "sum_rows": lambda new: ops.sum_rows(_turned(new("a", 5, 6, 7, 2))),
    "soft_max": lambda new: ops.soft_max(
        _turned(new("a", 5, 6, 7, 2)), _turned(new("m", 1, 6, 9)), reshape(new("s", 5), 1, 5), 0.5, 4.0
    ),
    "sinks turned": lambda new: ops.soft_max(new("a", 9, 2, 6), None, permute(new("s", 2, 3), 1, 0, 2, 3)),
}


@pytest.mark.parametrize("name", STRIDED)
def test_sources_of_other_strides(name: str, backend: SmallOps) -> None:
    inputs = Inputs()
    inputs.check(STRIDED[name](inputs), backend)
    assert backend.launches == 1


@pytest.mark.parametrize("name", STRIDED)
def test_offsets_of_64_bits(name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs()
    out = STRIDED[name](inputs)
    expected = inputs.run(out, backend)
    for module in (elementwise, soft_max):
        monkeypatch.setattr(module, "MAX_OFFSET", -1)
    np.testing.assert_array_equal(inputs.run(out, backend), expected)


@pytest.mark.parametrize("name", ["norm", "rms_norm", "sum_rows", "soft_max", "sinks turned"])
@pytest.mark.parametrize("big", [False, True])
def test_rows_that_registers_do_not_hold(
    name: str, big: bool, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (norm, soft_max):
        monkeypatch.setattr(module, "MAX_ROW", 4)
        monkeypatch.setattr(module, "LONG_BLOCK", 16)
    if big:
        for module in (elementwise, soft_max):
            monkeypatch.setattr(module, "MAX_OFFSET", -1)
    inputs = Inputs()
    inputs.check(STRIDED[name](inputs), backend)


def test_long_rows_hidden_in_part_and_in_the_whole(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soft_max, "MAX_ROW", 16)
    monkeypatch.setattr(soft_max, "LONG_BLOCK", 16)
    inputs = Inputs()
    out = ops.soft_max(inputs("a", 50, 4), inputs("m", 50, 4))
    hidden = np.zeros((4, 50), np.float32)
    hidden[0, :40], hidden[1, 3:], hidden[2] = -np.inf, -np.inf, -np.inf
    inputs.values["m"] = hidden
    inputs.check(out, backend)
    assert (inputs.run(out, backend)[0, 0, 2] == 0).all()


def test_a_result_in_the_memory_of_its_source() -> None:
    target = device.target()
    x = torch.linspace(-3, 3, 2100, device=target.device)
    other = torch.linspace(1, 2, 2100, device=target.device)
    ne = (700, 3, 1, 1)
    strides = (1, 700, 2100, 2100)
    a, b = x.clone(), other.clone()
    elementwise.elementwise_launch("SUB", ne, Operand(a, ne, strides), Operand(b, ne, strides), a, target)()
    torch.testing.assert_close(a, x - other)
    elementwise.elementwise_launch("swiglu", ne, Operand(x, ne, strides), Operand(b, ne, strides), b, target)()
    torch.testing.assert_close(b, torch.nn.functional.silu(x) * other)
    ctx = Context(lambda t: (allocate(t.nbytes, Usage.COMPUTE, target.device), 0), target, exact=False)
    a = x.clone()
    norm.norm_launch("RMS_NORM", 1e-6, ne, Operand(a, ne, strides), a, ctx)()
    torch.testing.assert_close(a.view(3, 700), torch.nn.functional.rms_norm(x.view(3, 700), (700,), eps=1e-6))


#: What follows an RMS_NORM `x` [48, 6]: MUL, and perhaps ADD; whether one launch does it.
CHAINS: dict[str, tuple[bool, Callable[[Inputs, Tensor], Tensor]]] = {
    "mul": (True, lambda new, x: ops.mul(x, new("w", 48))),
    "mul, residual": (True, lambda new, x: ops.add(ops.mul(x, new("w", 48)), new("r", 48, 6))),
    "residual first": (True, lambda new, x: ops.add(new("r", 48, 6), ops.mul(x, new("w", 48)))),
    "residual of f16": (True, lambda new, x: ops.add(new("r", 48, 6, kind="f16"), ops.mul(x, new("w", 48)))),
    "residual turned": (
        True,
        lambda new, x: ops.add(ops.mul(x, new("w", 48)), permute(new("r", 6, 48), 1, 0, 2, 3)),
    ),
    "one row": (True, lambda new, x: ops.add(ops.mul(x, new("w", 48)), new("r", 48))),
    "weights of f16": (False, lambda new, x: ops.mul(x, new("w", 48, kind="f16"))),
    "weights repeated": (False, lambda new, x: ops.mul(x, new("w", 24))),
    "weights first": (False, lambda new, x: ops.mul(new("w", 48, 6), x)),
    "residual repeated": (False, lambda new, x: ops.add(ops.mul(x, new("w", 48)), new("r", 24, 2))),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("long", [False, True])
def test_a_norm_with_what_follows_it(name: str, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if long:
        monkeypatch.setattr(norm, "MAX_ROW", 16)
        monkeypatch.setattr(norm, "LONG_BLOCK", 32)
    one, follow = CHAINS[name]
    inputs = Inputs()
    out = follow(inputs, ops.rms_norm(inputs("x", 48, 6), 1e-5))
    fused = SmallOps(fused=True)
    together, apart = inputs.run(out, fused), inputs.run(out, SmallOps())
    rtol = {"f32": 1e-6, "f16": 1e-3}[out.dtype.name]
    np.testing.assert_allclose(together, apart, rtol=rtol, atol=rtol)
    assert (fused.launches == 1) == one


def test_weights_are_read_early_only_where_nothing_writes_them() -> None:
    target = device.target()
    for usage in Usage:
        x, w = new_tensor("f32", 32, 2), new_tensor("f32", 32, name="w")
        found = ScaledNorm(normed := ops.rms_norm(x, 1e-6), ops.mul(normed, w))
        ctx = Context(lambda t, u=usage: (allocate(t.nbytes, u, target.device), 0), target, exact=False)
        (launch,) = norm.lower_scaled_norm(found, ctx)
        assert isinstance(launch, Launch)
        assert launch.args["EARLY"] == (usage is Usage.WEIGHTS)


REFERENCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": lambda x: x / (1 + torch.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "softplus": lambda x: torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0),
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_functions_keep_their_digits_everywhere(kind: str, backend: Backend) -> None:
    """Relative to each value, not to the largest: near 0, and where results are small."""
    x = np.concatenate([s * np.geomspace(1e-8, 80, 2000) for s in (-1, 1)] + [np.linspace(-80, 80, 4000)])
    if kind == "gelu":  # beyond, a rounding of its argument is large beside the result
        x = x[x > -4]
    inputs = Inputs()
    out = ops.unary(inputs("x", len(x)), kind)
    inputs.values["x"] = x.astype(np.float32)
    expected = REFERENCES[kind](torch.from_numpy(inputs.values["x"]).double()).numpy()
    actual = inputs.run(out, backend).reshape(-1)
    error = np.abs(actual - expected) / np.maximum(np.abs(expected), 1e-37)
    assert error.max() < (4e-6 if kind == "gelu" else 8e-7), x[error.argmax()]


@pytest.mark.parametrize("kind", UNARY_KINDS)
def test_infinities_and_nan(kind: str, backend: Backend) -> None:
    inputs = Inputs()
    out = ops.unary(inputs("x", 4), kind)
    inputs.values["x"] = np.array([np.inf, -np.inf, np.nan, 89.0 if kind == "exp" else 0.0], np.float32)
    np.testing.assert_array_equal(inputs.run(out, backend), inputs.run(out, "cpu"))


@pytest.mark.parametrize("kind", GLU_KINDS)
def test_nan_in_a_gate_or_a_value(kind: str, backend: Backend) -> None:
    inputs = Inputs()
    out = ops.glu(inputs("a", 3), inputs("b", 3), kind)
    inputs.values["a"][..., 0] = inputs.values["b"][..., 1] = np.nan
    assert np.isnan(inputs.run(out, backend)).reshape(-1).tolist() == [True, True, False]


def test_bf16_is_rounded_to_even() -> None:
    target = device.target()
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 1])
    x = bits.to(torch.int32).view(torch.float32).to(target.device)
    out = torch.empty(len(x), dtype=torch.bfloat16, device=target.device)
    ne, strides = (len(x), 1, 1, 1), (1, 8, 8, 8)
    elementwise.elementwise_launch("SCALE", ne, Operand(x, ne, strides), None, out, target, 1.0, 0.0)()
    torch.testing.assert_close(out, x.bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_layouts() -> None:
    none = torch.empty(0)

    def operand(ne: tuple[int, int, int, int], *strides: int) -> Operand:
        return Operand(none, ne, (strides[0], strides[1], strides[2], strides[3]))

    ne = (4, 3, 2, 5)
    a = operand(ne, 1, 4, 12, 24)
    assert Layout.of(ne, [a]).ne == (120, 1, 1, 1)
    assert Layout.of(ne, [a], keep_rows=True).ne == (4, 30, 1, 1)
    row = Layout.of(ne, [a, operand((4, 1, 1, 1), 1, 4, 4, 4)])
    assert (row.ne, row.strides, row.repeats) == ((4, 30, 1, 1), ((1, 4, 0, 0), (1, 0, 0, 0)), False)
    apart = Layout.of(ne, [operand(ne, 1, 8, 24, 48)])
    assert (apart.ne, apart.strides) == ((4, 30, 1, 1), ((1, 8, 0, 0),))
    assert Layout.of(ne, [a, operand((4, 3, 1, 1), 1, 4, 12, 12)]).ne == (12, 10, 1, 1)
    repeated = Layout.of(ne, [a, operand((2, 3, 2, 5), 1, 2, 6, 12)])
    assert repeated.repeats and repeated.ne == (4, 30, 1, 1)
    assert not apart.big and Layout.of(ne, [operand(ne, 1, 4, 12, 2**30)]).big
