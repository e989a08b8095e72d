"""SAMPLE: the next token of each row of logits, drawn as llama.cpp's samplers draw it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from graphrt.arguments import checked
from graphrt.dtypes import I32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, build, reduction_work, register, require
from graphrt.tensor import Tensor

#: The most candidates that a draw is from.
MAX_TOP_K = 1024


@dataclass(frozen=True)
class SampleParams:
    """Which tokens may be drawn. Three filters follow each other, then the rest is drawn from at temperature `temp`.

    top_k: the so many highest logits, equal ones in the order of their ids; top_p: of these the most probable ones, as
    many as reach this probability together (1: all); min_p: of these the ones at least this many times as probable as
    the first (0: all). min_keep: how many the last two filters leave at least.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    min_keep: int = 1


def _infer(params: SampleParams, logits: Tensor, uniforms: Tensor) -> Result:
    plain = logits.dtype.name == "f32" and logits.ne[2] == logits.ne[3] == 1
    require(plain, "SAMPLE", "the logits must be an f32 matrix", logits)
    known = uniforms.dtype.name in ("f32", "f64") and uniforms.ne == (logits.ne[1], 1, 1, 1)
    require(known, "SAMPLE", "there must be one number, f32 or f64, a row of logits", logits, uniforms)
    p = params
    require(0 < p.temp < math.inf, "SAMPLE", f"temp must be finite and over 0, got {p.temp}; ops.argmax is 0")
    require(1 <= p.top_k <= MAX_TOP_K, "SAMPLE", f"top_k must be 1 to {MAX_TOP_K}, got {p.top_k}")
    require(0 <= p.top_p <= 1 and 0 <= p.min_p <= 1, "SAMPLE", f"top_p, min_p must be 0 to 1, got {p.top_p}, {p.min_p}")
    require(0 <= p.min_keep <= MAX_TOP_K, "SAMPLE", f"min_keep must be 0 to {MAX_TOP_K}, got {p.min_keep}")
    return Result(I32, (logits.ne[1],))


SAMPLE = register(OpSpec("SAMPLE", _infer, reduction_work(10), ("logits", "uniforms"), params=SampleParams))


@checked(GraphError)
def sample(logits: Tensor, uniforms: Tensor, params: SampleParams = SampleParams(), name: str = "") -> Tensor:
    """A token id for each row of logits, drawn as llama.cpp's samplers draw it.

    result[j] = the first id whose running sum of probabilities, in the order of falling logits, is over uniforms[j].
    Probabilities are softmax(logits / temp) of what the filters of `params` leave, in float64: what
    models.sampling.Sampler gives for the same numbers. logits: f32 [n_vocab, n]; uniforms: f32 or f64 [n] in [0, 1);
    params: a SampleParams. The result is i32 [n]. A row whose largest logit is NaN or -inf gives the first of the
    order. Source: llama.cpp's llama-sampler; ggml has no such op. Raises GraphError for other types, shapes and
    parameters.
    """
    given = replace(params, top_k=int(params.top_k), min_keep=int(params.min_keep))
    return build(SAMPLE, logits, uniforms, params=given, name=name)
