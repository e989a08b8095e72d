"""Running a conformance case on a backend and judging the result: what test_ops.py and the tests of backends share.

The tolerance rule: the energy of a result's error against float64, of each row and of all of them, is at most what
independent roundings of f32 pass once in 7e10 cases (rounding.py derives that from the inputs, alike on every machine),
plus a band for roundings that go the same way, and, but for sums that may cancel out, never over the type's ceiling.
Indices and moved elements are exact; what is written in a quantized type has gguf's bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

import graphrt
from graphrt.backend import Backend
from graphrt.backends.cpu.experts import expert_weight
from graphrt.backends.cpu.products import matrix_weight
from graphrt.dtypes import DType
from graphrt.execute import Executable
from graphrt.host import host_type
from graphrt.op import op_spec
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, dequantize, quantize
from support import rounding_back, rounding_softmax  # noqa: F401  (add their ops to VARIANCE)
from support.reference64 import REFERENCE64
from support.rounding import VARIANCE, largest_energies, largest_energy, of_rounded_products, of_storing

Array = npt.NDArray[np.generic]

#: Relative error: the band that is always allowed, four roundings of f32 or half a one of f16 and bf16, and the ceiling
#: that nothing may pass; a single row may pass it eight times, as in graphrt.judge.
BANDS = {"f32": 2.0**-22, "f16": 2.0**-12, "bf16": 2.0**-9, "f8_e4m3": 2.0**-5}
CEILINGS = {"f32": 2.0**-18, "f16": 2.0**-10, "bf16": 2.0**-7, "f8_e4m3": 2.0**-3}
ROW_CEILING = 8.0
#: Sums that may cancel out: the result is no measure of its error then, so nothing but the bound limits it.
SUMS = (
    "MUL_MAT", "MUL_MAT_ID", "NORM", "SUM_ROWS", "OUT_PROD", "OUT_PROD_ID", "MUL_MAT_ID_BACK", "REPEAT_BACK",
    "GET_ROWS_BACK", "VIEW_BACK", "RMS_NORM_BACK", "SOFT_MAX_BACK", "FLASH_ATTN_BACK", "FLASH_ATTN_VARLEN_BACK",
    "CROSS_ENTROPY_LOSS_BACK", "SILU_BACK", "UNARY_BACK", "ALL_REDUCE", "REDUCE_SCATTER",
)  # fmt: skip
#: Which weights' products have rounded activations on the CPU.
ROUNDED = {"MUL_MAT": matrix_weight, "MUL_MAT_ID": expert_weight}
#: Nothing is computed for these: their results have the sources' bits.
MOVES = ("CONT", "DUP", "CONCAT", "REPEAT", "ALL_GATHER", "SEND", "RECV", "KQ_MASK", "SET_ROWS_BACK")


def _nothing(node: Tensor) -> None:
    return None


def addresses(t: Tensor) -> Array:
    """Where each byte of `t` lies within its root: [ne3, ne2, ne1, bytes a row]."""
    i3, i2, i1, i0 = np.indices([t.ne[3], t.ne[2], t.ne[1], t.ne[0] // t.dtype.block_size])
    starts = t.view_offs + i3 * t.nb[3] + i2 * t.nb[2] + i1 * t.nb[1] + i0 * t.nb[0]
    return (starts[..., None] + np.arange(t.dtype.type_size)).reshape(*t.shape[:3], -1)


def stored(t: Tensor, memory: Array) -> Array:
    """The elements of `t` in the bytes of its root, address by address; a quantized row as its bytes."""
    flat = memory[addresses(t)]
    return flat if t.dtype.is_quantized else flat.view(host_type(t.dtype)).reshape(t.shape)


def rounded(values: Array, dt: DType) -> Array:
    """Values as they are after having been stored in a plain type."""
    return dequantize(quantize(values, dt), dt)


@dataclass
class Judged:
    """A case with its inputs and its references; the latter are computed when they are asked for.

    rounds: bits of activations where the CPU's fast form rounds those of products on purpose.
    """

    case: Case
    seed: int = 0
    rounds: int | None = None

    @cached_property
    def inputs(self) -> Inputs:
        return self.case.build(self.seed)

    @property
    def node(self) -> Tensor:
        return self.inputs.result

    @cached_property
    def sources(self) -> list[Array | None]:
        """Each source as stored."""
        memory = {t: np.ascontiguousarray(v).reshape(-1).view(np.uint8) for t, v in self.inputs.values.items()}
        return [stored(s, memory[s.root]) if s is not None else None for s in self.node.src]

    def values(self, floats: type) -> list[Array | None]:
        """Each source as numbers: the given float type, or int64."""
        out: list[Array | None] = []
        for source, raw in zip(self.node.src, self.sources):
            if source is None or raw is None:
                out.append(None)
            else:
                numbers = dequantize(raw, source.dtype)
                out.append(numbers if source.dtype.kind == "int" else numbers.astype(floats))
        return out

    @cached_property
    def expected(self) -> Array:
        """The result in float64 or int64."""
        return REFERENCE64[self.node.op](self.node, *self.values(np.float64))

    @property
    def is_moved(self) -> bool:
        plain_rows = self.node.op == "GET_ROWS" and not self.node.src[0].dtype.is_quantized
        return self.node.op in MOVES or plain_rows

    @cached_property
    def finite(self) -> Array:
        """The expected result without its NaN and infinities, which are 0 here; past f8_e4m3's largest, 448, it is
        that."""
        numbers = np.nan_to_num(self.expected, nan=0.0, posinf=0.0, neginf=0.0)
        return np.clip(numbers, -448.0, 448.0) if self.node.dtype.name == "f8_e4m3" else numbers

    @cached_property
    def limits(self) -> tuple[float, Array]:
        """The largest Euclidean norms of the error: of the whole result, and of each row."""
        name = self.node.dtype.name
        sources = self.values(np.float64)
        variance = VARIANCE[self.node.op](self.node, self.expected, *sources)
        on_purpose = self.rounds is not None and ROUNDED.get(self.node.op, _nothing)(self.node) is not None
        if on_purpose:
            variance = variance + of_rounded_products(self.node, self.rounds, *sources)
        variance = np.where(np.isfinite(self.expected), variance + of_storing(self.finite, self.node.dtype), 0.0)
        assert np.isfinite(variance).all() and (variance >= 0).all(), "rounding.py has no bound for this case"
        energies, norms = variance.sum(-1), np.linalg.norm(self.finite, axis=-1)
        norm = float(np.linalg.norm(norms))
        whole = math.sqrt(largest_energy(energies)) + BANDS[name] * norm
        rows = np.sqrt(largest_energies(energies)) + BANDS[name] * norms
        if self.node.op in SUMS:
            return whole, rows
        most = np.maximum(norms, norm / math.sqrt(norms.size))  # a row that cancels out is no measure of itself
        return min(whole, CEILINGS[name] * norm), np.minimum(rows, ROW_CEILING * CEILINGS[name] * most)

    def margins(self, actual: Array) -> tuple[float, float]:
        """How often the error fits into what is allowed, in the whole and in the worst row: below 1 it is wrong.

        actual: numbers. NaN and infinity must be where the reference has them.
        """
        special = ~np.isfinite(self.expected)
        np.testing.assert_array_equal(actual[special], self.expected[special])
        error = np.linalg.norm(np.where(special, 0.0, actual) - self.finite, axis=-1)
        assert np.isfinite(error).all(), "NaN or infinity where it must be a number"
        whole, rows = self.limits
        worst = np.divide(rows, error, out=np.full(error.shape, math.inf), where=error > 0).min()
        total = float(np.linalg.norm(error))
        return whole / total if total else math.inf, float(worst)

    @cached_property
    def expected_bytes(self) -> Array:
        """What the written source holds afterwards, for an op that writes."""
        spec = op_spec(self.node.op)
        assert spec.writes is not None
        source = self.node.src[0]
        if source.dtype.kind == "int":
            return self.expected.astype(host_type(self.node.dtype))
        rows = quantize(dequantize(self.sources[0], source.dtype), self.node.dtype)
        if self.node.op == "CPY":
            values = dequantize(self.sources[0], source.dtype)
            return quantize(REFERENCE64["CPY"](self.node, values, None), self.node.dtype)
        return REFERENCE64[self.node.op](self.node, rows, *self.sources[1:])

    def run(self, backend: Backend | str) -> Executable:
        """The case prepared on one backend and run once."""
        exe = graphrt.prepare(self.inputs.graph(), backend)
        self.inputs.fill(exe)
        exe.run()
        return exe

    def check(self, exe: Executable) -> None:
        """Asserts that the result is right."""
        actual = exe.read(self.node)
        if op_spec(self.node.op).writes is not None:
            np.testing.assert_array_equal(actual.view(np.uint8), self.expected_bytes.view(np.uint8))
        elif self.node.op == "TOP_K":
            np.testing.assert_array_equal(np.sort(actual, axis=-1), self.expected)
        elif self.node.dtype.kind == "int":
            np.testing.assert_array_equal(actual, self.expected)
        elif self.is_moved:
            np.testing.assert_array_equal(dequantize(actual, self.node.dtype), rounded(self.expected, self.node.dtype))
        else:
            whole, row = self.margins(dequantize(actual, self.node.dtype))
            assert whole >= 1, f"the error is {1 / whole:.3g} times what rounding explains"
            assert row >= 1, f"a row's error is {1 / row:.3g} times what rounding explains"

    def check_sources_unchanged(self, exe: Executable) -> None:
        """Asserts that no input changed but the one that the op writes into, and of that only what it writes."""
        written = self.node.root if op_spec(self.node.op).writes is not None else None
        for t, before in self.inputs.values.items():
            after = exe.read(t).reshape(-1).view(np.uint8)
            raw = np.ascontiguousarray(before).reshape(-1).view(np.uint8)
            if t is written:
                mine = np.unique(addresses(self.node))
                outside = np.setdiff1d(np.arange(raw.size), mine)
                np.testing.assert_array_equal(after[outside], raw[outside])
            else:
                np.testing.assert_array_equal(after, raw, err_msg=f"input {t.name} was written to")
