"""Parameters as ggml lays them in a node's op_params: 32-bit words, each a whole number or the bits of a float."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

#: ggml_unary_op and ggml_glu_op of llama.cpp in 2026 (ggml.h), in the order of their numbers.
_UNARY = """
ABS SGN NEG STEP TANH ELU RELU SIGMOID GELU GELU_QUICK SILU HARDSWISH HARDSIGMOID EXP EXPM1 SOFTPLUS GELU_ERF XIELU
FLOOR CEIL ROUND TRUNC
"""
UNARY, GLU = _UNARY.split(), ["REGLU", "GEGLU", "SWIGLU", "SWIGLU_OAI", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_CLAMP"]
#: ggml's numbers of the ways of RoPE.
ROPE_MODES = {"normal": 0, "neox": 2}

Params = Mapping[str, Any]


def float_word(value: float) -> int:
    """The bits of a float as a word with a sign."""
    return int(np.float32(value).view(np.int32))


def _floats(*names: str) -> Callable[[Params], list[int]]:
    return lambda p: [float_word(p[name]) for name in names]


def _rope(p: Params) -> list[int] | None:
    """n_past (unused), n_dims, mode, n_ctx (unused), n_ctx_orig, then floats."""
    mode = ROPE_MODES.get(p["mode"])
    if mode is None:
        return None
    floats = _floats("freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")(p)
    return [0, p["n_dims"], mode, 0, p["n_ctx_orig"], *floats]


def _kind(names: list[str], p: Params) -> int | None:
    name = p["kind"].upper()
    return names.index(name) if name in names else None


def _unary(p: Params) -> list[int] | None:
    number = _kind(UNARY, p)
    return None if number is None else [number]


def _glu(p: Params) -> list[int] | None:
    number = _kind(GLU, p)
    words = [number, int(p["swapped"])] if number is not None else None
    oai = words is not None and p["kind"] == "swiglu_oai"
    return [*words, *_floats("alpha", "limit")(p)] if oai and words is not None else words


#: By op, the words of its parameters. What ggml lacks, or lays out otherwise, is not here.
_WORDS: dict[str, Callable[[Params], list[int] | None]] = {
    "SCALE": _floats("scale", "bias"), "CLAMP": _floats("low", "high"),
    "NORM": _floats("eps"), "RMS_NORM": _floats("eps"), "L2_NORM": _floats("eps"),
    "SOFT_MAX": _floats("scale", "max_bias"), "ROPE": _rope, "CONCAT": lambda p: [p["dim"]],
    "ARGSORT": lambda p: [int(p["descending"])], "UNARY": _unary, "GLU": _glu,
    "FLASH_ATTN_EXT": lambda p: [*_floats("scale", "max_bias", "softcap")(p), p["prec"]],
}  # fmt: skip


def words_of(op: str, params: Params | None) -> tuple[int, ...] | None:
    """The words of a node's parameters by name; None for an op whose words ggml does not define, or a kind that it
    lacks."""
    words = _WORDS[op](params) if op in _WORDS and params is not None else None
    return None if words is None else tuple(words)
