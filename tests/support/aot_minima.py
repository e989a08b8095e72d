"""Minima and maxima of floats in PTX: where one must not lose a NaN, and the places where it may (see aot.py).

min.f32 and max.f32 return the other operand when one is NaN, min.NaN.f32 and max.NaN.f32 return NaN. A broken tensor
must show in the result, so a kernel has the second form unless its place is listed here with the reason why NaN gets
through all the same. Minima of integers, such as sizes and indices, are not meant.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support import ROOT

KERNELS = ROOT / "backends" / "triton" / "kernels"

_WEIGHTS = "what scores are reduced by before e^x: a score that is NaN gives a weight that is NaN, and so a NaN sum"
_JOINED = "what parts are reduced by when they are joined: a part with a NaN has it in its sums, which are added up"
_SINK = "what a row and its sink are reduced by: both are in the sum, which is NaN if one of them is"
_SIZE = "a row's size, which decides by which power of two it is held as f16: the row itself keeps its NaN"
_LENGTH = "by which power of two a gradient is held as f16: what is not finite was left out, and keeps its NaN itself"
#: File and function of each place where the plain form stands, and why a NaN gets through all the same.
PLAIN = {
    "experts/route.py _shares": _WEIGHTS,
    "flash_attn/backward/deltas.py _power": _LENGTH,
    "flash_attn/backward/deltas.py attention_back_delta": _LENGTH,
    "flash_attn/backward/deltas.py attention_back_norms": _LENGTH,
    "flash_attn/backward/deltas.py attention_back_scales": _LENGTH,
    "flash_attn/append.py with_new_key": _WEIGHTS,
    "flash_attn/decode_blocks.py over_block": "the largest of a block to round, whose d is NaN where it has one",
    "flash_attn/decode_pieces.py softmax_step": _WEIGHTS,
    "flash_attn/decode_join.py join_parts": _JOINED,
    "flash_attn/decode_join.py joined_ways": _JOINED,
    "flash_attn/decode_join.py normalized": _SINK,
    "flash_attn/decode_passes.py all_maxima": _WEIGHTS,
    "flash_attn/decode_passes.py flash_attn_decode_passes": _WEIGHTS,
    "flash_attn/decode_passes.py row_maxima": _WEIGHTS,
    "flash_attn/fixup.py flash_attn_fixup": _JOINED,
    "flash_attn/forward.py join_ways": _JOINED,
    "flash_attn/forward.py normalized": _SINK,
    "flash_attn/forward.py softmax_step": _WEIGHTS,
    "flash_attn/hopper/consumer.py finish": "|m| of a row, beside its sink's: what is not finite is marked by itself",
    "flash_attn/hopper/consumer.py weigh": _WEIGHTS,
    "flash_attn/hopper/mla_scorer.py attend": f"{_WEIGHTS}; {_SINK}",
    "flash_attn/hopper/mla_scorer.py weigh_exactly": _WEIGHTS,
    "flash_attn/hopper/softcap.py cap_level": "which form of tanh serves the block's numbers: all of them keep NaN",
    "flash_attn/hopper/fp8.py rounded_queries": "what a row of queries is scaled by: a NaN of it stays one in its code",
    "flash_attn/hopper/fp8.py softmax_step8": _WEIGHTS,
    "flash_attn/hopper/softmax.py halve": _WEIGHTS,
    "flash_attn/hopper/softmax.py row_maximum": _WEIGHTS,
    "flash_attn/hopper/softmax.py row_size": "as cap_level, which asks for it",
    "flash_attn/hopper/softmax.py softmax_step": _WEIGHTS,
    "flash_attn/hopper/softmax.py together": "row maxima, which are numbers: NaN was left out before",
    "products/half_kernels.py larger": _SIZE,
    "products/half_kernels.py round_rows": _SIZE,
    "products/half_kernels.py scaling_of": _SIZE,
    "products/trained_kernels.py _most": _SIZE,
    "draw.py draw": _WEIGHTS,
    "soft_max.py soft_max_long_rows": _WEIGHTS,
    "soft_max.py soft_max_rows": _WEIGHTS,
}

_MINIMUM = re.compile(r"\b(?:redux\.sync\.)?(?:min|max)(?:\.\w+)+")
_FLOAT = re.compile(r"\.(?:bf16|f16|f32|f64)(?:x2)?$")
_SATURATED = re.compile(r"\b\w+(?:\.\w+)*\.sat(?:\.\w+)*\.(?:bf16|f16|f32|f64)(?:x2)?\b")


def plain_minima(ptx: str) -> list[str]:
    """The places in which a kernel has a minimum or maximum of floats that loses a NaN, as PLAIN names them.

    .sat counts too: it makes 0 of NaN. A place that the PTX does not tell is the instruction itself.
    """
    found, place = set[str](), ""
    for line in ptx.splitlines():
        code, _, comment = line.partition("//")
        if ".loc" in code:
            place = comment
        loses = [m[0] for m in _MINIMUM.finditer(code) if _FLOAT.search(m[0]) and ".NaN" not in m[0]]
        loses += [m[0] for m in _SATURATED.finditer(code)]
        found |= {_named(place) or loss for loss in loses}
    return sorted(found)


def _named(place: str) -> str:
    """File and function of the innermost call in this folder; place: as ptxas reads it, from the inside out."""
    for name, line in re.findall(r"([\w.]+\.py):(\d+)", place):
        found = [f for f, first, last in _functions(name) if first <= int(line) <= last]
        if found:
            return " or ".join(found)
    return ""


@cache
def _functions(name: str) -> list[tuple[str, int, int]]:
    """Every kernel's function of the files of a name: with its file, and its first and last line."""
    return [found for path in sorted(KERNELS.rglob(name)) for found in _of_file(path)]


def _of_file(path: Path) -> Iterator[tuple[str, int, int]]:
    for f in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(f, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in f.decorator_list):
            assert f.end_lineno is not None
            yield f"{path.relative_to(KERNELS).as_posix()} {f.name}", f.lineno, f.end_lineno
