"""Cases of several ops with NaN or infinities among their inputs: a form that fuses them must not lose what is broken.

A block's products, dense or of chosen experts: gate, up, their GLU and, in some, down. Backends run them grouped as
their fuse() does; what comes of them is held against the nodes one by one (see graphrt.judge.judge_broken).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

import graphrt
from graphrt import ops
from graphrt.backend import Backend, get_backend
from graphrt.backends.cpu import evaluate
from graphrt.backends.cpu.blocks import encode
from graphrt.backends.cpu.memory import strided
from graphrt.judge import Mask, judge_broken
from graphrt.ops.cases.mul_mat_id import Choice
from graphrt.ops.unary import GLU_KINDS
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, Normal, dequantize
from graphrt.tools.conformance.run.reference import computing_nodes, raw_bytes
from graphrt.tools.conformance.run.step import Outcome, outcome_of

Array = npt.NDArray[np.generic]
#: Experts, and how many of them a token has.
N_EXPERT, USED = 4, 2
KINDS = ("q8_0", "q4_K", "f16")
#: What is broken: a value, and the inputs that have it.
BROKEN: dict[str, tuple[float, tuple[str, ...]]] = {
    "NaN in x": (np.nan, ("x",)), "inf in x": (np.inf, ("x",)), "-inf in x": (-np.inf, ("x",)),
    "NaN in gate": (np.nan, ("gate",)), "NaN in up": (np.nan, ("up",)), "NaN in both": (np.nan, ("gate", "up")),
    "inf in gate": (np.inf, ("gate",)), "-inf in up": (-np.inf, ("up",)),
    "NaN in gate's bias": (np.nan, ("gate_b",)), "NaN in up's bias": (np.nan, ("up_b",)),
    "NaN in both biases": (np.nan, ("gate_b", "up_b")), "inf in gate's bias": (np.inf, ("gate_b",)),
    "-inf in gate's bias": (-np.inf, ("gate_b",)), "inf in up's bias": (np.inf, ("up_b",)),
}  # fmt: skip


def _scale(value: float) -> npt.NDArray[np.uint8]:
    """The two bytes that a block of one of these quantized types begins with."""
    return np.array([value], np.float16).view(np.uint8)


@dataclass(frozen=True)
class Form:
    """One point: products of a type (kind) for so many tokens, joined by a GLU of the kind `act`.

    experts: the matrices are of experts; biased: the experts' biases are added; down: the GLU's result is multiplied by
    a matrix too, and for experts summed by weight. broken: where NaN and infinities are, a key of BROKEN.
    """

    kind: str
    act: str
    tokens: int
    broken: str
    experts: bool = False
    biased: bool = False
    down: bool = False

    def make(self, inputs: Inputs) -> Tensor:
        k, m = (256, 256) if self.kind == "q4_K" else (64, 64)
        n = self.tokens
        x = inputs("x", "f32", (k, 1, n) if self.experts else (k, n), Normal())
        ids = inputs("ids", "i32", (USED, n), Choice(N_EXPERT, "topk")) if self.experts else None

        def product(name: str, source: Tensor) -> Tensor:
            shape = (source.ne[0], m, N_EXPERT) if ids is not None else (source.ne[0], m)
            w = inputs(name, self.kind, shape)
            if ids is None:
                return ops.mul_mat(w, source)
            made = ops.mul_mat_id(w, source, ids)
            return ops.add_id(made, inputs(f"{name}_b", "f32", (m, N_EXPERT)), ids) if self.biased else made

        out = ops.glu(product("gate", x), product("up", x), self.act)
        if not self.down:
            return out
        out = product("down", out)
        if ids is None:
            return out
        out = ops.mul(out, inputs("weights", "f32", (1, USED, n)))
        slots = [ops.view(out, (m, n), out.nb[2:3], offs=i * out.nb[1]) for i in range(USED)]
        return ops.add(slots[0], slots[1])

    def spoil(self, inputs: Inputs) -> None:
        """Writes the broken values: of x into one token, of weights into a row of each expert (of quantized ones its
        first block), of biases into one of each expert."""
        value, names = BROKEN[self.broken]
        for t, values in inputs.values.items():
            if t.name not in names:
                continue
            if t.name == "x":
                rows = values.reshape(self.tokens, -1)[self.tokens // 2]
            else:
                rows = values if t.name.endswith("_b") else values[..., t.ne[1] // 2, :]
            if t.dtype.is_quantized and np.isnan(value):
                rows[..., : t.dtype.type_size] = 0xFF  # NaN as the scale
            elif t.dtype.is_quantized:
                rows[..., :2] = _scale(value)
            else:
                rows[..., 5] = value


@dataclass(frozen=True)
class FusedCase(Case):
    """A case of several ops, which run_fused() runs."""

    form: Form = Form("f16", "swiglu", 1, "NaN in x")

    def build(self, seed: int = 0) -> Inputs:
        inputs = super().build(seed)
        self.form.spoil(inputs)
        return inputs


def fused_cases() -> Iterator[FusedCase]:
    """All forms: few tokens, some and many, each kind of weights and activation, each broken input."""
    for tokens in (1, 4, 32, 300):
        for kind in KINDS:
            for act in GLU_KINDS:
                for broken in BROKEN:
                    for form in _forms(Form(kind, act, tokens, broken)):
                        yield FusedCase("GLU", asdict(form), form.make, form=form)


def _forms(form: Form) -> Iterator[Form]:
    value, names = BROKEN[form.broken]
    of_bias = names[0].endswith("_b")
    # An infinite scale times the sum of a block's products is an infinity, where the sum of infinite products is NaN:
    # that is as good, as long as no GLU makes a number of one of them.
    bounded = {"gate": ("reglu", "swiglu_oai"), "up": ("swiglu_oai",)}.get(names[0], ())
    if np.isinf(value) and form.kind != "f16" and form.act in bounded:
        return
    if not of_bias:
        yield form
        yield replace(form, experts=True)
    else:
        yield replace(form, experts=True, biased=True)
    if names in (("x",), ("gate",)) or of_bias:
        yield replace(form, experts=True, biased=of_bias, down=True)
    if names in (("x",), ("gate",)):
        yield replace(form, down=True)


def run_fused(case: FusedCase, backend: Backend, seed: int = 0) -> Outcome:
    """Prepares and runs a case as a model's step would be, twice, and judges what comes of it."""
    inputs = case.build(seed)
    expected, from_nan, from_infinity = _reference(inputs)

    def work() -> str:
        message = ""
        exe = graphrt.prepare(inputs.graph(), backend if backend.name == "cpu" else [backend, get_backend("cpu")])
        inputs.fill(exe)
        for _ in range(2):  # the second run finds the first one's memory
            exe.run()
            actual = dequantize(exe.read(inputs.result), inputs.result.dtype)
            message = message or judge_broken(inputs.result, actual, expected, from_nan, from_infinity).message
        return message

    return outcome_of(case, work)


def _reference(inputs: Inputs) -> tuple[Array, Mask, Mask]:
    """The result; where a NaN among the inputs takes part; and where no NaN does, but an infinity."""
    expected = _evaluated(inputs, np.inf)
    from_nan = np.isnan(_evaluated(inputs, 1.0))
    return expected, from_nan, np.isnan(_evaluated(inputs, np.nan)) & ~from_nan


def _evaluated(inputs: Inputs, infinity: float) -> Array:
    """The result in float64, computed node by node.

    infinity: what the inputs' infinities of both signs are replaced by; inf leaves them as they are.
    """
    memory: dict[Tensor, npt.NDArray[np.uint8]] = {}
    for t, values in inputs.values.items():
        if t.dtype.kind == "float" and infinity != np.inf:
            values = np.where(np.isinf(values), np.asarray(infinity, values.dtype), values)
        elif t.dtype.is_quantized and infinity != np.inf:
            values = values.copy()
            scales = values.reshape(-1, t.dtype.type_size)[:, :2]
            scales[np.isinf(scales.copy().view(np.float16)[:, 0])] = _scale(infinity)
        memory[t] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    result = torch.empty(0)
    for node in computing_nodes(inputs.graph()):
        sources = [strided(torch.from_numpy(memory[s.root]), s.view_offs, s) if s is not None else None
                   for s in node.src]  # fmt: skip
        result = evaluate(node, sources)
        memory[node.root] = raw_bytes(encode(result, node.dtype))
    return result.numpy()
