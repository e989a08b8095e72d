"""Running a conformance case on a backend and judging the result: what test_ops.py and the tests of backends share.

The tolerance rule: a result's relative error (the root of its NMSE) against float64 is at most twice that of an
independent float32 computation rounded to the result's type, plus a rounding band of that type, and never over the
type's ceiling. Indices and moved elements are exact; what is written in a quantized type has gguf's bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from reference64 import REFERENCE64

import graphrt
from graphrt.backend import Backend
from graphrt.dtypes import DType
from graphrt.execute import Executable, host_type
from graphrt.op import op_spec
from graphrt.tensor import Tensor
from graphrt.testing import Case, Inputs, dequantize, nmse, quantize

Array = npt.NDArray[np.generic]

#: Relative error: the rounding band that is always allowed, and the ceiling that nothing may pass.
BANDS = {"f32": 2.0**-22, "f16": 2.0**-12, "bf16": 2.0**-9}
CEILINGS = {"f32": 2.0**-18, "f16": 2.0**-10, "bf16": 2.0**-7}


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
    """A case with its inputs and its references; the latter are computed when they are asked for."""

    case: Case

    @cached_property
    def inputs(self) -> Inputs:
        return self.case.build()

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

    @cached_property
    def tolerance(self) -> float:
        """The largest NMSE that the rule allows."""
        name = self.node.dtype.name
        low = rounded(REFERENCE64[self.node.op](self.node, *self.values(np.float32)), self.node.dtype)
        error = min(2.0 * math.sqrt(nmse(low, self.expected)) + BANDS[name], CEILINGS[name])
        return error**2

    @cached_property
    def expected_bytes(self) -> Array:
        """What the written source holds afterwards, for an op that writes."""
        i = op_spec(self.node.op).writes
        assert i is not None
        source = self.node.src[0]
        if source.dtype.kind == "int":
            return self.expected.astype(host_type(self.node.dtype))
        rows = quantize(dequantize(self.sources[0], source.dtype), self.node.dtype)
        if self.node.op == "CPY":
            values = dequantize(self.sources[0], source.dtype)
            return quantize(REFERENCE64["CPY"](self.node, values, None), self.node.dtype)
        return REFERENCE64[self.node.op](self.node, rows, self.sources[1], self.sources[i])

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
        else:
            error = nmse(dequantize(actual, self.node.dtype), self.expected)
            assert error <= self.tolerance, f"NMSE {error:.3g} over {self.tolerance:.3g}"

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
