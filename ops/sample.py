"""SAMPLE: the next token of each row of logits, drawn as llama.cpp's samplers draw it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from graphrt.arguments import checked
from graphrt.dtypes import I32
from graphrt.errors import GraphError
from graphrt.op import OpSpec, Result, Sources, build, reduction_work, register, require
from graphrt.tensor import Tensor
from graphrt.testing import Case, Init, Inputs, Normal, Uniform

#: The most candidates that a draw is from.
MAX_TOP_K = 1024


@dataclass(frozen=True)
class SampleParams:
    """The k highest logits, equal ones by id; of these the first that reach top_p together (1: all); of these the ones
    at least min_p times as likely as the first (0: all), either way at least min_keep; then logits over temp, a draw.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    min_keep: int = 1


def _infer(src: Sources, params: SampleParams) -> Result:
    logits, uniforms = src
    assert logits is not None and uniforms is not None
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


#: One sampler at a time, all, none; as much kept as there is; a temperature that leaves one choice.
_PARAMS = (
    SampleParams(),
    SampleParams(1.0, 1, 1.0, 0.0),
    SampleParams(1.5, 40, 1.0, 0.0),
    SampleParams(1.0, 200, 0.5, 0.0),
    SampleParams(0.7, 64, 1.0, 0.2),
    SampleParams(3.0, 30, 0.0, 1.0, 5),
    SampleParams(1e-3, 7, 0.9, 0.0),
)


def _cases() -> Iterator[Case]:
    # Normal logits; with a step, many equal ones. 5 and 128: top_k reaches beyond, or is most of it.
    grid = [((n, m), 3.0, 0.0, p) for n, m in ((5, 3), (128, 4), (3001, 4)) for p in _PARAMS]
    grid += [((3001, 2), 1.0, 0.5, p) for p in _PARAMS[:5]]
    grid += [((40000, 2), 2.0, step, SampleParams(1.2, 50, 0.9, 0.01)) for step in (0.0, 0.25)]
    grid += [((3001, 1), 2.0, step, SampleParams(1.2, MAX_TOP_K, 0.99, 0.001)) for step in (0.0, 0.25)]
    yield from _of(grid)
    yield Case("SAMPLE", {"ne": (77, 4), "uniforms": "f32"}, _maker((77, 4), Normal(2.0), SampleParams(2.0), "f32"))


def _full_cases() -> Iterator[Case]:
    yield from _cases()
    wide = (SampleParams(), SampleParams(1.2, MAX_TOP_K, 0.99, 0.001))
    yield from _of([((262144, m), 2.0, step, p) for m in (1, 3) for step in (0.0, 0.25, 64.0) for p in wide])


def _of(grid: Iterable[tuple[tuple[int, int], float, float, SampleParams]]) -> Iterator[Case]:
    for ne, std, step, p in grid:
        axes = {"ne": ne, "std": std, "step": step, **vars(p)}
        yield Case("SAMPLE", axes, _maker(ne, Normal(std, step=step), p))


def _maker(ne: tuple[int, int], logits: Init, params: SampleParams, kind: str = "f64") -> Callable[[Inputs], Tensor]:
    def make(inputs: Inputs) -> Tensor:
        return sample(inputs("logits", "f32", ne, logits), inputs("u", kind, ne[1:], Uniform(0.0, 1.0)), params)

    return make


_MORE = {"full": _full_cases}
SAMPLE = register(
    OpSpec("SAMPLE", _infer, _cases, reduction_work(10), n_src=(2, 2), params=SampleParams, more_cases=_MORE)
)


@checked(GraphError)
def sample(logits: Tensor, uniforms: Tensor, params: SampleParams = SampleParams(), name: str = "") -> Tensor:
    """A token id for each row of logits: f32 [n_vocab, n] and f32 or f64 [n] in [0, 1) to i32 [n].

    The first id whose running sum of probabilities is over the row's number. Probabilities are float64, in the order of
    falling logits; what models.sampling.Sampler gives for the same numbers. A row whose largest logit is NaN or -inf
    gives the first of the order.
    """
    given = replace(params, top_k=int(params.top_k), min_keep=int(params.min_keep))
    return build(SAMPLE, logits, uniforms, params=given, name=name)
