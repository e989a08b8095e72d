"""Cases from the text that llama.cpp's test-export-graph-ops writes: the nodes of a model's graphs, one a line.

    op type ne0..3 n_params params.. n_src (type ne0..3 nb0..3)*n_src name

Ops and types are numbers of ggml's enums. Those of the types never change; the ops' are as in OPS, and a file of
another version shows: its lines don't fit the ops' rules and are counted as unknown.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphrt.dtypes import dtype_by_id
from graphrt.errors import GraphError
from graphrt.op import registered_ops
from graphrt.ops import FlashAttnParams, RopeParams
from graphrt.ops.copy import ConcatParams, RepeatParams
from graphrt.ops.elementwise import ClampParams, ScaleParams
from graphrt.ops.norm import NormParams
from graphrt.ops.soft_max import SoftMaxParams
from graphrt.ops.sort import ArgsortParams, TopKParams
from graphrt.ops.unary import GLU_KINDS, UNARY_KINDS, GluParams, UnaryParams
from graphrt.tensor import Dims, Tensor
from graphrt.testing import Case
from graphrt.tools.conformance.cases.operands import Operand, case_of
from graphrt.tools.inspect.op_params import GLU, ROPE_MODES, UNARY

#: ggml_op of llama.cpp in 2026 (ggml.h), in the order of their numbers; op_params.py has those of kinds.
_OPS = """
NONE DUP ADD ADD_ID ADD1 ACC SUB MUL DIV SQR SQRT LOG SIN COS SUM SUM_ROWS CUMSUM MEAN ARGMAX COUNT_EQUAL REPEAT
REPEAT_BACK CONCAT SILU_BACK NORM RMS_NORM RMS_NORM_BACK GROUP_NORM L2_NORM MUL_MAT MUL_MAT_ID OUT_PROD SCALE SET CPY
CONT RESHAPE VIEW PERMUTE TRANSPOSE GET_ROWS GET_ROWS_BACK SET_ROWS DIAG DIAG_MASK_INF DIAG_MASK_ZERO SOFT_MAX
SOFT_MAX_BACK ROPE ROPE_BACK CLAMP CONV_TRANSPOSE_1D IM2COL IM2COL_BACK IM2COL_3D COL2IM_1D CONV_2D CONV_3D CONV_2D_DW
CONV_TRANSPOSE_2D POOL_1D POOL_2D POOL_2D_BACK UPSCALE PAD PAD_REFLECT_1D ROLL ARANGE TIMESTEP_EMBEDDING ARGSORT TOP_K
LEAKY_RELU TRI FILL FLASH_ATTN_EXT FLASH_ATTN_BACK SSM_CONV SSM_SCAN WIN_PART WIN_UNPART GET_REL_POS ADD_REL_POS
RWKV_WKV6 GATED_LINEAR_ATTN RWKV_WKV7 SOLVE_TRI GATED_DELTA_NET LIGHTNING_INDEXER DSV4_HC_COMB DSV4_HC_PRE DSV4_HC_POST
UNARY MAP_CUSTOM1 MAP_CUSTOM2 MAP_CUSTOM3 CUSTOM CROSS_ENTROPY_LOSS CROSS_ENTROPY_LOSS_BACK OPT_STEP_ADAMW OPT_STEP_SGD
GLU
"""
OPS = _OPS.split()


#: Bytes of memory for each element of a case: drawing its inputs and the float64 reference hold it three times.
NEEDED = 24


class _Words:
    """op_params: 32-bit words, each a whole number or the bits of a float."""

    def __init__(self, words: Sequence[int]) -> None:
        self.words = words

    def i(self, at: int) -> int:
        """0 where the line has no more words."""
        return self.words[at] if at < len(self.words) else 0

    def f(self, at: int) -> float:
        value: float = struct.unpack("<f", struct.pack("<i", self.i(at)))[0]
        return value


def _rope(w: _Words) -> RopeParams:
    mode = {number: name for name, number in ROPE_MODES.items()}.get(w.i(2))
    if mode is None:
        raise GraphError(f"ROPE of mode {w.i(2)} is not there")
    return RopeParams(w.i(1), mode, w.f(5), w.f(6), w.i(4), w.f(7), w.f(8), w.f(9), w.f(10))


def _kind(names: Sequence[str], number: int, known: Sequence[str], op: str) -> str:
    name = names[number].lower() if 0 <= number < len(names) else str(number)
    if name not in known:
        raise GraphError(f"{op} of kind {name} is not there")
    return name


def _norm(w: _Words) -> NormParams:
    return NormParams(w.f(0))


def _glu(w: _Words) -> GluParams:
    params = GluParams(_kind(GLU, w.i(0), GLU_KINDS, "GLU"), swapped=bool(w.i(1)))
    return replace(params, alpha=w.f(2), limit=w.f(3)) if params.kind == "swiglu_oai" else params


_Params = Callable[[_Words, Dims, Sequence[Operand]], Any]
#: How an op's parameters are read from its words, its result's shape and its sources. An op that isn't listed has none.
_PARAMS: dict[str, _Params] = {
    "SCALE": lambda w, ne, src: ScaleParams(w.f(0), w.f(1)),
    "CLAMP": lambda w, ne, src: ClampParams(w.f(0), w.f(1)),
    "NORM": lambda w, ne, src: _norm(w),
    "RMS_NORM": lambda w, ne, src: _norm(w),
    "L2_NORM": lambda w, ne, src: _norm(w),
    "SOFT_MAX": lambda w, ne, src: SoftMaxParams(w.f(0), w.f(1)),
    "ROPE": lambda w, ne, src: _rope(w),
    "CONCAT": lambda w, ne, src: ConcatParams(w.i(0)),
    "REPEAT": lambda w, ne, src: RepeatParams(ne),
    "ARGSORT": lambda w, ne, src: ArgsortParams(w.i(0) == 1),
    "TOP_K": lambda w, ne, src: TopKParams(ne[0]),
    "FLASH_ATTN_EXT": lambda w, ne, src: FlashAttnParams(w.f(0), w.f(1), w.f(2), prec=w.i(3)),
    "UNARY": lambda w, ne, src: UnaryParams(_kind(UNARY, w.i(0), UNARY_KINDS, "UNARY")),
    "GLU": lambda w, ne, src: _glu(w),
}


def file_cases(path: Path) -> tuple[list[Case], Counter[str]]:
    """The cases, each once, and why lines were left out. Raises GraphError when the file is not of this format."""
    try:
        if not path.is_file():  # a pipe would be waited for, a device may have no end
            raise OSError("it is no regular file")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GraphError(f"--test-file takes a text of test-export-graph-ops, {str(path)!r} is not: {error}") from error
    cases: dict[str, Case] = {}
    unknown: Counter[str] = Counter()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = iter([*line.split()])
            parsed = _parse(fields)
        except (ValueError, StopIteration) as error:
            raise GraphError(f"line {number} of {path} must be as test-export-graph-ops writes it: {error!r}") from None
        try:
            case = _case(*parsed)
        except GraphError as error:
            unknown[str(error)] += 1
        else:
            cases[str(case)] = case
    return list(cases.values()), unknown


def _parse(fields: Iterator[str]) -> tuple[int, int, Dims, list[int], list[tuple[int, Dims, Dims]]]:
    def whole(n: int) -> list[int]:
        return [int(next(fields)) for _ in range(n)]

    def dims() -> Dims:
        a, b, c, d = whole(4)
        return (a, b, c, d)

    op, kind = whole(2)
    ne = dims()
    words = whole(whole(1)[0])
    if not all(-(2**31) <= word < 2**31 for word in words):
        raise ValueError("a parameter is a word of 32 bits")
    sources = [(whole(1)[0], dims(), dims()) for _ in range(whole(1)[0])]
    return op, kind, ne, words, sources


def _case(op: int, kind: int, ne: Dims, words: Sequence[int], sources: Sequence[tuple[int, Dims, Dims]]) -> Case:
    name = OPS[op] if 0 <= op < len(OPS) else str(op)
    if name not in registered_ops():
        raise GraphError(f"op {name} is not there")
    src = [_operand(i, *source) for i, source in enumerate(sources)]
    params = _PARAMS[name](_Words(words), ne, src) if name in _PARAMS else None
    case = case_of(name, params, src)
    node = case.without_values()
    if (node.dtype.id, node.ne) != (kind, ne):
        raise GraphError(f"{name} yields {node.describe()} here, the file has type {kind}, {list(ne)}")
    elements = node.n_elements + sum(s.root_nbytes // s.dtype.type_size * s.dtype.block_size for s in src)
    return replace(case, needs_bytes=NEEDED * elements)


def _operand(i: int, kind: int, ne: Dims, nb: Dims) -> Operand:
    dt = dtype_by_id(kind)
    if dt is None:
        raise GraphError(f"type {kind} is not there")
    return Operand(dt, ne, nb, i, Tensor(dt, ne, nb=nb).nbytes)
